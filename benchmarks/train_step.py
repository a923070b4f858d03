"""One training step, timed against the PyTorch twin at its best settings.

Forward, smoothed loss, backward, clipping and AdamW, with dropout 0.1.

Every contender has a process of its own and waits for its turn on a pipe, so rounds are
interleaved (A B C D, A B C D, ...) on the same cores, and only one works at a time. This process
imports neither framework. See benchmarks/README.md.
"""

import argparse
import itertools
import json
import math
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jax_transformer.runtime.distributed import cores

SIZES: dict[str, dict[str, int]] = {
    "big": dict(d_model=512, num_heads=8, num_layers=6, d_ff=2048, vocab_size=8000),
    "small": dict(d_model=256, num_heads=4, num_layers=3, d_ff=1024, vocab_size=8000),
    # The sizes of the paper with the vocabulary of its tied matrices, for a GPU
    "vaswani_base": dict(d_model=512, num_heads=8, num_layers=6, d_ff=2048, vocab_size=32000),
    "vaswani_big": dict(d_model=1024, num_heads=16, num_layers=6, d_ff=4096, vocab_size=32000),
    # Only to try the command
    "tiny": dict(d_model=64, num_heads=2, num_layers=1, d_ff=128, vocab_size=100),
}
OURS, AGAIN, MEDIUM = "JAX", "JAX again", "JAX, medium"
FLOAT32, BFLOAT16 = PRECISIONS = ("float32", "bfloat16")
# Precision -> name -> (torch.set_float32_matmul_precision, torch.compile)
TWINS = {
    FLOAT32: {
        "torch eager": ("highest", False),
        "torch eager, medium": ("medium", False),
        "torch.compile, medium": ("medium", True),
    },
    # torch.autocast; stock layers compute attention by scaled_dot_product_attention
    BFLOAT16: {
        "torch eager, autocast": ("medium", False),
        "torch.compile, autocast": ("medium", True),
    },
}
RATES = ("dropout", "attention_dropout", "activation_dropout", "embedding_dropout")
SMOOTHING, LEARNING_RATE, BETAS, EPSILON, DECAY, CLIP = 0.1, 1e-4, (0.9, 0.98), 1e-9, 0.01, 1.0
# The product whose speed is called the peak
MATMUL = {"cpu": (1024, 512, 2048), "gpu": (8192, 8192, 8192)}
REPEATS = 20
SAME_LOSS = 1e-5
SPAWN = multiprocessing.get_context("spawn")


class Work(NamedTuple):
    """The inputs of every contender: plain values, and the file with the initial weights."""

    size: str
    batch: int
    length: int
    weights: str
    device: str
    precision: str = FLOAT32
    """The dtype of computation; parameters are float32."""


def config(work: Work, rate: float = 0.1) -> Any:
    """vaswani2017_base (post-norm, three tied matrices) at a benchmark size, with dropout ``rate``
    everywhere, computed in float32."""
    import jax_transformer as jt

    longest = max(512, work.length)
    return jt.preset(
        "vaswani2017_base", max_length=longest, **SIZES[work.size], **dict.fromkeys(RATES, rate)
    )


def timed_config(work: Work, name: str) -> Any:
    """The same in the precision that is timed, as ``train`` sets it."""
    half = work.precision == BFLOAT16
    return config(work).with_sizes(
        compute_dtype=BFLOAT16 if half and name != MEDIUM else None,
        matmul_precision="medium" if half or name == MEDIUM else "highest",
    )


def arrays(work: Work) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Source, target in and target out (batch, length), without padding: every position is a
    token."""
    ids = (
        np.random.default_rng(0)
        .integers(3, SIZES[work.size]["vocab_size"], (2, work.batch, work.length + 1))
        .astype(np.int32)
    )
    return ids[0, :, 1:], ids[1, :, :-1], ids[1, :, 1:]


def step_flops(work: Work) -> float:
    """Floating-point operations of a step's matrix products.

    That is 3 × 2 × the multiply-adds of the forward pass: the backward pass has two products for
    each forward one. Elementwise work is not counted. A source token costs, in each encoder layer,
    4 d² (query, key, value, output) + 2 d f (feed-forward) + 2 s d (scores and mixing), and in each
    decoder layer 2 d² (its key and value); a target token 6 d² + 2 d f + 2 (t + s) d in each
    decoder layer, and d v for its logits.
    """
    d, f, layers, v = (
        SIZES[work.size][name] for name in ("d_model", "d_ff", "num_layers", "vocab_size")
    )
    n = work.length
    source = layers * (4 * d * d + 2 * d * f + 2 * n * d + 2 * d * d)
    target = layers * (6 * d * d + 2 * d * f + 4 * n * d) + d * v
    return 3 * 2.0 * work.batch * n * (source + target)


class Jax:
    """Our step, as ``train`` runs it: jitted, and given its own state to overwrite."""

    def __init__(self, work: Work, name: str):
        import jax

        import jax_transformer as jt
        from jax_transformer.data.batches import Batch
        from jax_transformer.training import optimizer, step
        from jax_transformer.training.optimizer import OptimizerOptions, Schedule

        adam = dict(beta1=BETAS[0], beta2=BETAS[1], epsilon=EPSILON, weight_decay=DECAY)
        adam |= dict(learning_rate=LEARNING_RATE, warmup_steps=0, clip_norm=CLIP)
        tx = optimizer.make(OptimizerOptions(schedule=Schedule.CONSTANT, **adam), 1_000_000)
        with np.load(work.weights) as weights:
            self.state = step.initial_state(jt.convert.from_torch(dict(weights), config(work)), tx)
        self.jax, self.loss_sum, self.work = jax, step.loss_sum, work
        self.timed = timed_config(work, name)
        self.batch, self.key = jax.device_put(Batch(*arrays(work))), jax.random.key(0)
        self.make_step = step.make_step(self.timed, tx, SMOOTHING)
        self.parameters = sum(array.size for array in self.state.params.values())
        shapes = MATMUL[work.device][:2], MATMUL[work.device][1:]
        self.factors = [jax.random.normal(self.key, shape, work.precision) for shape in shapes]
        self.product = jax.jit(lambda a, b: a @ b)

    def loss(self, precision: str | None) -> float:
        """Loss without dropout, at the timed precision or at the highest."""
        computed = config(self.work) if precision else self.timed
        with self.jax.default_matmul_precision(precision):
            loss = self.jax.jit(self.loss_sum, static_argnums=(3, 4))
            total, tokens = loss(
                self.state.params, self.state.frozen, self.batch, computed, SMOOTHING
            )
        return float(total) / int(tokens)

    def run(self, count: int) -> float:
        for _ in range(count):
            self.state, measured = self.make_step(self.state, [self.batch], self.key)
        self.jax.block_until_ready(self.state)
        return float(measured["loss"])

    def multiply(self, count: int) -> None:
        for _ in range(count):
            result = self.product(*self.factors)
        result.block_until_ready()


class Torch:
    """The twin's step as its users write it: fused AdamW, gradients freed instead of zeroed."""

    def __init__(self, work: Work, name: str):
        import torch

        from jax_transformer.architectures import twins

        precision, compiled = TWINS[work.precision][name]
        device = "cuda" if work.device == "gpu" else "cpu"
        torch.set_num_threads(cores())
        torch.set_float32_matmul_precision(precision)
        self.module = twins.twin(config(work))
        # Copied into the module's own parameters, so that tied matrices stay one
        with np.load(work.weights) as weights:
            self.module.load_state_dict(
                {key: torch.from_numpy(array) for key, array in weights.items()}, strict=True
            )
        self.module.to(device).train()
        self.torch, self.precision, self.device = torch, precision, device
        self.half = work.precision == BFLOAT16
        self.batch = [torch.from_numpy(array).to(device).long() for array in arrays(work)]
        adam = dict(lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=DECAY)
        self.adam = torch.optim.AdamW(self.module.parameters(), fused=True, **adam)
        self.forward = torch.compile(self.mean_loss) if compiled else self.mean_loss
        self.parameters = sum(parameter.numel() for parameter in self.module.parameters())
        shapes, dtype = (MATMUL[work.device][:2], MATMUL[work.device][1:]), work.precision
        like = dict(device=device, dtype=getattr(torch, dtype))
        self.factors = [torch.randn(shape, **like) for shape in shapes]

    def mean_loss(self, source: Any, target_in: Any, target_out: Any) -> Any:
        pad = self.module.tgt_pad_idx
        with self.torch.autocast(self.device, self.torch.bfloat16, enabled=self.half):
            logits = self.module(source, target_in).flatten(0, 1)
            return self.torch.nn.functional.cross_entropy(
                logits, target_out.flatten(), ignore_index=pad, label_smoothing=SMOOTHING
            )

    def loss(self, precision: str | None) -> float:
        """Loss without dropout, at the timed precision or at the highest.

        Gradients stay on: otherwise the stock layers would take another path.
        """
        self.torch.set_float32_matmul_precision(precision or self.precision)
        self.module.eval()
        half, self.half = self.half, self.half and precision is None
        loss = float(self.mean_loss(*self.batch).detach())
        self.half = half
        self.module.train()
        self.torch.set_float32_matmul_precision(self.precision)
        return loss

    def run(self, count: int) -> float:
        for _ in range(count):
            self.adam.zero_grad(set_to_none=True)
            loss = self.forward(*self.batch)
            loss.backward()
            self.torch.nn.utils.clip_grad_norm_(self.module.parameters(), CLIP)
            self.adam.step()
        self.synchronize()
        return float(loss.detach())

    def multiply(self, count: int) -> None:
        for _ in range(count):
            self.torch.matmul(*self.factors)
        self.synchronize()

    def synchronize(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()


def resident() -> float:
    """Peak memory of this process, in GB."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def seconds(function: Any, *args: Any) -> float:
    start = time.perf_counter()
    function(*args)
    return time.perf_counter() - start


def prepare(pipe: Any, work: Work) -> None:
    """Draw the weights, and send JAX's device."""
    import jax

    draw(work)
    pipe.send((jax.default_backend(), jax.devices()[0].device_kind))


def draw(work: Work) -> None:
    """Draw the weights by our initialisation, and write them under PyTorch's names."""
    from flax import nnx

    import jax_transformer as jt

    np.savez(work.weights, **jt.convert.to_torch(jt.Transformer(config(work), rngs=nnx.Rngs(0))))


def ours(size: str, batch: int, length: int) -> Jax:
    """Our step on the CPU with random weights."""
    with tempfile.TemporaryDirectory() as folder:
        work = Work(size, batch, length, f"{folder}/weights.npz", "cpu")
        draw(work)
        return Jax(work, OURS)


def serve(pipe: Any, name: str, work: Work) -> None:
    """Run a contender: build, print the losses, take the first step, then time rounds until told
    0."""
    from jax_transformer.runtime import process

    try:
        process.keep_freed_memory()  # as the command does; for the twins too
        contender: Any = (Jax if name in (OURS, AGAIN, MEDIUM) else Torch)(work, name)
        losses = {
            "parameters": contender.parameters,
            "loss": contender.loss("highest"),
            "loss as timed": contender.loss(None),
        }
        pipe.send(losses | {"first step": seconds(contender.run, 1)})
        contender.multiply(REPEATS)
        while count := pipe.recv():
            contender.run(1)  # wakes threads and caches
            taken = seconds(contender.run, count) / count
            products = seconds(contender.multiply, REPEATS)
            flops = REPEATS * 2.0 * math.prod(MATMUL[work.device]) / products
            pipe.send({"seconds": taken, "flops": flops, "memory": resident()})
    except Exception as error:
        pipe.send({"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"})


def start(target: Any, *args: Any) -> Any:
    """Start a process and return the pipe to it."""
    ours, theirs = SPAWN.Pipe()
    SPAWN.Process(target=target, args=(theirs, *args), daemon=True).start()
    theirs.close()
    return ours


def receive(pipe: Any) -> dict[str, Any]:
    try:
        return pipe.recv()
    except EOFError:
        return {"failed": "the process died"}


def contenders(args: argparse.Namespace) -> list[str]:
    """Our step, and itself once more, or the twins."""
    if args.against_self:
        return [OURS, AGAIN]
    twins = TWINS[args.precision].items()
    return [OURS, MEDIUM, *(name for name, (_, compiled) in twins if not (compiled and args.eager))]


def compare(
    size: str, batch: int, length: int, args: argparse.Namespace, folder: str
) -> dict[str, Any]:
    """Start the contenders one by one, check that they compute the same, and time them in turns."""
    work = Work(size, batch, length, f"{folder}/{size}.npz", "cpu", args.precision)
    backend, device = start(prepare, work).recv()
    work = work._replace(device="gpu" if backend == "gpu" else "cpu")
    pipes, results = {}, {}
    for name in contenders(args):
        print(f"{size}: {name} ...", file=sys.stderr)
        pipes[name] = start(serve, name, work)
        results[name] = receive(pipes[name]) | {"rounds": []}
        if name == OURS and "failed" in results[name]:
            raise SystemExit(f"{name} {results[name]['failed']}")
    reference = results[OURS]
    for name, result in results.items():
        for key in () if "failed" in result else ("parameters", "loss"):
            if not abs(result[key] / reference[key] - 1) <= (SAME_LOSS if key == "loss" else 0):
                raise SystemExit(
                    f"{key} of {name} is {result[key]!r}, ours is {reference[key]!r}: not the same"
                    " computation"
                )
    for _ in range(args.rounds):
        for name, result in results.items():
            if "failed" not in result:
                pipes[name].send(args.steps)
                received = receive(pipes[name])
                result.update(
                    received if "failed" in received else {"rounds": [*result["rounds"], received]}
                )
    for name in results:
        if "failed" not in results[name]:
            pipes[name].send(0)
    return {
        "size": f"{size}, {batch} x ({length} + {length}) tokens",
        "device": device,
        "flops": step_flops(work),
        "tokens": 2 * work.batch * work.length,
        "contenders": results,
    }


def table(compared: dict[str, Any]) -> str:
    """The figures of one size as markdown."""
    results = compared["contenders"]
    times = {
        name: [r["seconds"] for r in result["rounds"]]
        for name, result in results.items()
        if "failed" not in result
    }
    peaks = {name: statistics.median(r["flops"] for r in results[name]["rounds"]) for name in times}
    twins = [name for name in times if name not in (OURS, MEDIUM)]
    best = min(twins, key=lambda name: statistics.median(times[name]), default=OURS)
    peak = max(peaks, key=lambda name: peaks[name])
    lines = [
        f"**{compared['size']}**: {compared['flops'] / 1e9:.1f} GFLOP per step;"
        f" peak {peaks[peak] / 1e9:.0f} GFLOP/s ({peak})\n",
        f"| | s/step | quartiles | tokens/s | speed, {best} = 1 | share of peak | first step, s"
        " | memory, GB | loss is off by |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        if "failed" in result:
            lines.append(f"| {name} | unavailable: {result['failed']} | | | | | | | |")
            continue
        low, middle, high = np.quantile(times[name], (0.25, 0.5, 0.75))
        speed = statistics.median(b / t for b, t in zip(times[best], times[name], strict=True))
        off = abs(result["loss as timed"] / results[OURS]["loss"] - 1)
        lines.append(
            f"| {name} | {middle:.3f} | {low:.3f} – {high:.3f}"
            f" | {compared['tokens'] / middle:,.0f} | {speed:.2f}"
            f" | {compared['flops'] / middle / peaks[peak]:.0%} | {result['first step']:.1f}"
            f" | {result['rounds'][-1]['memory']:.2f} | {off:.0e} |"
        )
    return "\n".join(lines) + "\n"


def summary(compared: Sequence[dict[str, Any]]) -> str:
    """A row for each batch and length: ours at its fastest, and the fastest twin."""
    lines = [
        "| pairs x (source + target tokens) | ours, s/step | best twin, s/step"
        " | speed, best twin = 1 | share of peak | memory, GB: ours, the twin |",
        "|---|---|---|---|---|---|",
    ]
    for each in compared:
        rounds = {name: result.get("rounds") for name, result in each["contenders"].items()}
        times = {name: [r["seconds"] for r in taken] for name, taken in rounds.items() if taken}
        fastest = sorted(times, key=lambda name: statistics.median(times[name]))
        ours = next(name for name in fastest if name in (OURS, MEDIUM))
        twin = next((name for name in fastest if name not in (OURS, MEDIUM)), ours)
        middle = {name: statistics.median(times[name]) for name in (ours, twin)}
        speed = statistics.median(b / t for b, t in zip(times[twin], times[ours], strict=True))
        peak = max(statistics.median(r["flops"] for r in rounds[name]) for name in times)
        memory = ", ".join(f"{rounds[name][-1]['memory']:.2f}" for name in (ours, twin))
        lines.append(
            f"| {each['size'].partition(', ')[2].removesuffix(' tokens')}"
            f" | {middle[ours]:.3f} ({ours}) | {middle[twin]:.3f} ({twin}) | {speed:.2f}"
            f" | {each['flops'] / middle[ours] / peak:.0%} | {memory} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--size",
        choices=[*SIZES, "both"],
        default="both",
        help="big and small are measured; tiny tries the command out",
    )
    parser.add_argument("--precision", choices=PRECISIONS, default=FLOAT32)
    parser.add_argument(
        "--rounds", type=int, default=7, help="how often each contender has its turn"
    )
    parser.add_argument(
        "--steps", type=int, default=3, help="timed steps of a turn, after one that is not timed"
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[32], help="pairs")
    parser.add_argument(
        "--length", type=int, nargs="+", default=[32], help="tokens of each source and each target"
    )
    parser.add_argument(
        "--against-self",
        action="store_true",
        help="time ours twice and nothing else: the ratio is the noise of the machine",
    )
    parser.add_argument(
        "--eager", action="store_true", help="leave torch.compile out, which takes a minute a table"
    )
    parser.add_argument("--json", help="also write every round to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        # First steps are compiled again, and contenders share the memory of a GPU
        os.environ |= {"JAX_ENABLE_COMPILATION_CACHE": "false", "TORCHINDUCTOR_CACHE_DIR": folder}
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        load, compared = os.getloadavg()[0], []
        sizes = ("big", "small") if args.size == "both" else (args.size,)
        for size, batch, length in itertools.product(sizes, args.batch, args.length):
            compared.append(compare(size, batch, length, args, folder))
            if len(args.batch) * len(args.length) == 1:
                print(table(compared[-1]), flush=True)
    if len(args.batch) * len(args.length) > 1:
        print(f"{summary(compared)}\n")
    print(f"JAX device {compared[0]['device']}; load average before: {load:.1f}")
    if args.json:
        Path(args.json).write_text(json.dumps(compared, indent=1))


if __name__ == "__main__":
    main()
