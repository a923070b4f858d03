"""Time that a training step waits for its batch.

The default task's own steps and stream are timed in turns.

python benchmarks/input_pipeline.py [--rounds 5] [--steps 40]
"""

import argparse
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from jax_transformer.data import batches
from jax_transformer.data.batches import Batch
from jax_transformer.runtime.distributed import cores
from jax_transformer.storage.run_folder import RunFolder
from jax_transformer.training import corpus, optimizer, step
from jax_transformer.training.corpus import Corpus
from jax_transformer.training.devices import Devices
from jax_transformer.training.options import TrainOptions
from jax_transformer.transformer import Transformer

UNTIMED = 16  # the stream may have this many ready after another's turn


class Trainer:
    """The default run's step and its state."""

    def __init__(self, text: Corpus, options: TrainOptions):
        self.devices = Devices.take(options.devices)
        tx = optimizer.make(options.optimizer, options.steps)
        state = step.initial_state(Transformer(text.config, rngs=nnx.Rngs(0)), tx)
        self.state, self.key = self.devices.place(state), self.devices.key(0)
        self.step = step.make_step(text.config, tx, options.optimizer.label_smoothing)

    def run(self, batch: Batch) -> None:
        """Run one step and wait for it."""
        self.state, _ = self.step(self.state, [self.devices.divide(batch)], self.key)
        jax.block_until_ready(self.state)


def turn(trainer: Trainer, following: Callable[[], Batch], count: int) -> tuple[float, float]:
    """Mean seconds that a step waits for its batch, and that it takes in all, over ``count``
    steps."""
    waited, began = 0.0, 0.0
    for i in range(UNTIMED + count):
        if i == UNTIMED:
            waited, began = 0.0, time.perf_counter()
        asked = time.perf_counter()
        batch = following()
        waited += time.perf_counter() - asked
        trainer.run(batch)
    return waited / count, (time.perf_counter() - began) / count


def unbuffered(text: Corpus) -> Iterator[Batch]:
    """The same batches, each made when it is needed."""
    for number in itertools.count():
        bucket, pairs = text.plan.batch_indices(number)
        yield batches.make_batch(
            text.train.take(pairs), text.plan.widths[bucket], text.plan.rows[bucket]
        )


def measure(rounds: int, steps: int) -> dict[str, np.ndarray]:
    """Seconds of waiting and of the whole step, by way to get batches, one row per round.

    In a round all ways take the same batches.
    """
    options = TrainOptions()
    with tempfile.TemporaryDirectory() as folder:
        text = corpus.prepare(
            options, RunFolder(Path(folder)), lambda: Devices.take(options.devices).row_shards
        )
    trainer = Trainer(text, options)
    plain = unbuffered(text)
    for width in text.plan.widths:  # compiled before the first turn
        trainer.run(next(each for each in unbuffered(text) if each.source.shape[1] == width))
    stream = batches.train_stream(text.train, text.plan)
    times_by_way: dict[str, list[tuple[float, float]]] = {
        "ready before the loop": [],
        "prefetched (train_stream)": [],
        "made by the loop": [],
    }
    for number in range(rounds):
        start = number * (UNTIMED + steps)
        ready = iter(list(itertools.islice(unbuffered(text), start, start + UNTIMED + steps)))
        for name, source in zip(times_by_way, (ready, stream, plain), strict=True):
            times_by_way[name].append(turn(trainer, source.__next__, steps))
    stream.close()  # type: ignore[attr-defined]
    return {name: np.array(times) for name, times in times_by_way.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="turns of each way")
    parser.add_argument("--steps", type=int, default=40, help="timed steps of a turn")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    times_by_way = measure(args.rounds, args.steps)
    print(
        "| batches are | a step waits, ms | a step in all, ms | of it waiting |\n|---|---|---|---|"
    )
    for name, times in times_by_way.items():
        waiting, total = 1000 * np.median(times, axis=0)
        print(f"| {name} | {waiting:.3f} | {total:.1f} | {waiting / total:.2%} |")
    device = jax.devices()[0].device_kind
    print(f"\nJAX device {device}, {cores()} cores; load average before: {load:.1f}")


if __name__ == "__main__":
    main()
