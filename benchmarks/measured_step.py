"""The training step of ``estimate``'s options on this machine's devices: time and memory.

It takes the options of ``jax-transformer estimate``, and prints what was estimated next to what was
measured. The state is zeros and the ids are random, so nothing is read. See benchmarks/README.md.
"""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jax_transformer.cli.arguments import parse
from jax_transformer.extras.estimate.command import EstimateCommand

STEPS = 10


def estimated(words: list[str]) -> dict[str, Any] | None:
    """The estimate, made in a process that sees no accelerator; None if it cannot be made, as for
    cuDNN's attention."""
    command = [sys.executable, "-m", "jax_transformer", "estimate", "--json", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode not in (0, 1) or not done.stdout:
        print(f"no estimate: exit code {done.returncode}", file=sys.stderr)
        return None
    result: dict[str, Any] = json.loads(done.stdout)
    return result


class Step:
    """The model, the devices and the batches of ``estimate``'s options."""

    def __init__(self, words: list[str]):
        from jax_transformer.extras.estimate import estimate
        from jax_transformer.training.devices import Devices

        command = parse("estimate", EstimateCommand, words)
        self.options = options = command.options
        self.devices = Devices.take(options.devices, options.mesh.fsdp, options.mesh.tensor)
        self.config = estimate.config_of(options)
        shards, length = self.devices.row_shards, command.length or 0
        self.shape = estimate.largest_batch(options, self.config, length, shards)

    def batches(self, number: int) -> list[Any]:
        """Random ids, as often as one update takes batches."""
        from jax_transformer.data.batches import Batch

        draw, rows = np.random.default_rng(number), (self.shape.rows, self.shape.length)
        source, target = self.config.source_vocab_size, self.config.target_vocab_size
        ids = (draw.integers(3, n, rows).astype(np.int32) for n in (source, target, target))
        return [self.devices.divide(Batch(*ids))] * self.options.optimizer.accumulate


def largest_memory() -> int:
    """The largest memory of a device in bytes; 0 if unknown."""
    import jax

    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)


def measured(words: list[str]) -> dict[str, float]:
    """Seconds of a step, median, the memory, and the tokens of a batch."""
    import jax
    import jax.numpy as jnp

    from jax_transformer.training import run as training_run

    setup = Step(words)
    abstract = training_run.abstract_state(setup.options, setup.config, setup.devices)
    layout = jax.tree.map(lambda x: x.sharding, abstract)
    zeros = jax.jit(
        lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract), out_shardings=layout
    )
    step, key = training_run.make_step(setup.options, setup.config, abstract), setup.devices.key(0)
    seconds = []
    with setup.devices.context():
        state, batches = zeros(), setup.batches(0)
        for _ in range(STEPS + 1):
            began = time.perf_counter()
            state, metrics = step(state, batches, key)
            jax.block_until_ready((state, metrics))
            seconds.append(time.perf_counter() - began)
    return {
        "seconds": statistics.median(seconds[1:]),
        "first": seconds[0],
        "memory": largest_memory(),
        "tokens": 2 * setup.shape.rows * setup.shape.length * len(batches),
    }


def main() -> None:
    words = sys.argv[1:]
    guess, real = estimated(words), measured(words)
    print(" ".join(words))
    print(
        f"  {1e3 * real['seconds']:,.1f} ms a step, "
        f"{real['tokens'] / real['seconds']:,.0f} tokens/s, first step {real['first']:.1f} s"
    )
    if guess is None:
        print(f"  {real['memory'] / 2**30:.2f} GiB" if real["memory"] else "  no estimate")
        return
    peak = guess["memory_bytes"]["peak"] / 2**30
    if guess["seconds"]:
        print(
            f"  {guess['seconds']['model'] / real['seconds']:.1%} of the peak; estimated "
            f"{1e3 * guess['seconds']['least']:,.1f} to {1e3 * guess['seconds']['most']:,.1f} ms"
        )
    if real["memory"]:
        size = real["memory"] / 2**30
        print(f"  {size:.2f} GiB, estimated {peak:.2f}: {peak / size - 1:+.1%}")
    else:
        print(f"  estimated {peak:.2f} GiB; this device does not report its memory")


if __name__ == "__main__":
    main()
