"""Target tokens a second of the default task, with pairs in buckets and packed, in turns.

python benchmarks/packing.py [--widths 64 128] [--rounds 7] [--steps 40] [--d-model 128]
"""

import argparse
import dataclasses
import itertools
import os
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from benchmarks.input_pipeline import Trainer
from jax_transformer.data import batches
from jax_transformer.storage.run_folder import RunFolder
from jax_transformer.training import corpus
from jax_transformer.training.corpus import Corpus
from jax_transformer.training.options import ModelOptions, TrainOptions


def prepared(options: TrainOptions, width: int | None) -> Corpus:
    data = dataclasses.replace(options.data, packing=width)
    with tempfile.TemporaryDirectory() as folder:
        return corpus.prepare(dataclasses.replace(options, data=data), RunFolder(Path(folder)))


def turn(trainer: Trainer, text: Corpus, first: int, steps: int) -> tuple[float, float]:
    """Seconds of a step, and target tokens a second, over the steps from ``first`` on."""
    taken = list(batches.train_stream(text.train, text.plan, first, first + steps))
    began = time.perf_counter()
    for batch in taken:
        trainer.run(batch)
    seconds = time.perf_counter() - began
    tokens = sum(np.count_nonzero(b.target_out != text.config.target_pad_id) for b in taken)
    return seconds / steps, tokens / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128], help="of packed rows")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each way")
    parser.add_argument("--steps", type=int, default=40, help="steps of a turn")
    parser.add_argument("--d-model", type=int, help="of the preset's model (d_ff: four times)")
    args = parser.parse_args()
    load, width = os.getloadavg()[0], args.d_model
    model = ModelOptions(d_model=width, d_ff=4 * width) if width else ModelOptions()
    options = TrainOptions(model=model)
    texts = {each: prepared(options, each) for each in (None, *args.widths)}
    trainer = Trainer(texts[None], options)
    for text in texts.values():  # compiled before the first turn
        for shape in text.plan.widths:
            stream = batches.train_stream(text.train, text.plan)
            trainer.run(next(batch for batch in stream if batch.source.shape[1] == shape))
    turns: dict[int | None, list[tuple[float, float]]] = {each: [] for each in texts}
    for i, (each, text) in itertools.product(range(args.rounds), texts.items()):
        turns[each].append(turn(trainer, text, i * args.steps, args.steps))
    print("| rows are | full | ms a step | target tokens/s | of buckets |\n|---|---|---|---|---|")
    usual = np.array(turns[None])
    for each, text in texts.items():
        times = np.array(turns[each])
        seconds, speed = np.median(times, axis=0)
        ratio = np.median(times[:, 1] / usual[:, 1])
        name = f"packed, {each} tokens" if each else f"in {len(text.plan.widths)} buckets"
        full = f"{text.plan.fill():.0%}"
        print(f"| {name} | {full} | {1000 * seconds:.1f} | {speed:,.0f} | {ratio:.2f} |")
    print(f"\n{jax.devices()[0].device_kind}, {os.cpu_count()} cores; load before: {load:.1f}")


if __name__ == "__main__":
    main()
