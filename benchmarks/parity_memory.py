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
COLUMNS = ["float32 weights of each model", "without gradients", "with gradients"]


def resident(field: str) -> int:
    """The bytes of this process in memory: ``VmRSS`` now, ``VmHWM`` at the most so far."""
    return int(Path("/proc/self/status").read_text().partition(f"{field}:")[2].split()[0]) * 1024


def times_the_weights(mib: float, gradients: bool) -> float:
    """The largest memory of a comparison and its two models, in times the weights of one."""
    import jax
    import numpy as np
    import torch
    from flax import nnx

    from jax_transformer.parity import compare

    def compared(width: int) -> None:
        torch.manual_seed(0)
        linear = [torch.nn.Linear(width, width) for _ in range(LAYERS)]
        layers = lambda: [nnx.Linear(width, width, rngs=nnx.Rngs(0)) for _ in linear]  # noqa: E731
        ours = nnx.eval_shape(lambda: nnx.Sequential(*layers()))
        for layer, theirs in zip(ours.layers, linear, strict=True):
            layer.kernel.set_value(jax.numpy.array(theirs.weight.detach().numpy().T))
            layer.bias.set_value(jax.numpy.array(theirs.bias.detach().numpy()))
        models = ours, torch.nn.Sequential(*linear).eval()
        batch = np.random.default_rng(0).standard_normal((16, width), np.float32)
        compare(*models, [batch], gradients=gradients).check()

    compared(8)  # loads the libraries
    before, width = resident("VmRSS"), round((mib * 2**20 / 4 / LAYERS) ** 0.5)
    compared(width)
    return (resident("VmHWM") - before) / (LAYERS * width * (width + 1) * 4)


def in_another_process(mib: float, gradients: bool, **variables: str) -> float:
    """The same, with these variables in the environment."""
    call = f"times_the_weights({mib}, {gradients})"
    command = [sys.executable, "-c", f"from benchmarks import parity_memory as m;print(m.{call})"]
    environment = os.environ | variables
    return float(subprocess.check_output(command, text=True, cwd=ROOT, env=environment))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--mib", nargs="+", type=int, default=[192, 1024], help="weights, in MiB")
    args = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |\n|---|---|---|")
    for mib in args.mib:
        variables = {"MALLOC_MMAP_THRESHOLD_": "1000000"}
        figures = (in_another_process(mib, each, **variables) for each in (False, True))
        cells = " | ".join(f"{figure:.1f}" for figure in figures)
        print(f"| {mib} MiB | {cells} |", flush=True)


if __name__ == "__main__":
    main()
