"""Memory of ``parity.compare``, in docs/parity-report.md: see benchmarks/README.md. Linux only.

The models are stacks of linear layers, and the batch is 16 vectors. Each comparison has a process
of its own.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAYERS = 48
COLUMNS = ["without gradients", "with gradients"]


def resident(field: str) -> int:
    """The bytes of this process in memory: ``VmRSS`` now, ``VmHWM`` at the most so far."""
    return int(Path("/proc/self/status").read_text().partition(f"{field}:")[2].split()[0]) * 1024


def times_the_weights(mib: float, gradients: bool, dtype: str = "float32") -> float:
    """The largest memory of a comparison and its two models, in times the weights of one."""
    import jax
    import numpy as np
    import torch
    from flax import nnx

    from jax_transformer.parity import compare

    def compared(width: int) -> None:
        torch.manual_seed(0)
        kind = getattr(torch, dtype)
        linear = [torch.nn.Linear(width, width).to(kind) for _ in range(LAYERS)]
        layers = lambda: [nnx.Linear(width, width, rngs=nnx.Rngs(0)) for _ in linear]  # noqa: E731
        ours = nnx.eval_shape(lambda: nnx.Sequential(*layers()))
        for layer, theirs in zip(ours.layers, linear, strict=True):
            for leaf, tensor in ("kernel", theirs.weight.T), ("bias", theirs.bias):
                array = tensor.detach().float().numpy()
                getattr(layer, leaf).set_value(jax.numpy.array(array, dtype))
        models = ours, torch.nn.Sequential(*linear).eval()
        batch = np.random.default_rng(0).standard_normal((16, width), np.float32)
        compare(*models, [batch], gradients=gradients).check()

    compared(8)  # loads the libraries
    size = jax.numpy.dtype(dtype).itemsize
    before, width = resident("VmRSS"), round((mib * 2**20 / size / LAYERS) ** 0.5)
    compared(width)
    return (resident("VmHWM") - before) / (LAYERS * width * (width + 1) * size)


def in_another_process(
    mib: float, gradients: bool, dtype: str = "float32", **variables: str
) -> float:
    """The same, with these variables in the environment."""
    call = f"times_the_weights({mib}, {gradients}, {dtype!r})"
    command = [sys.executable, "-c", f"from benchmarks import parity_memory as m;print(m.{call})"]
    environment = os.environ | variables
    return float(subprocess.check_output(command, text=True, cwd=ROOT, env=environment))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--mib", nargs="+", type=int, default=[192, 1024], help="weights, in MiB")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--without-gradients", action="store_true")
    args = parser.parse_args()
    columns = COLUMNS[:1] if args.without_gradients else COLUMNS
    print(f"| {args.dtype} weights of each model | {' | '.join(columns)} |")
    print("|---" * (len(columns) + 1) + "|")
    for mib in args.mib:
        variables = {"MALLOC_MMAP_THRESHOLD_": "1000000"}
        each = [False, True][: len(columns)]
        figures = (in_another_process(mib, x, args.dtype, **variables) for x in each)
        cells = " | ".join(f"{figure:.1f}" for figure in figures)
        print(f"| {mib} MiB | {cells} |", flush=True)


if __name__ == "__main__":
    main()
