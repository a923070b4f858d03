"""The method of a training run, in order. ``train.py`` and ``jax-transformer train`` are this."""

import sys

from jax_transformer import codec
from jax_transformer.training import corpus, loop, run_folder
from jax_transformer.training.options import TrainOptions


def train(options: TrainOptions) -> run_folder.RunFolder:
    """Train as ``options`` say, from the start or from where the run stopped, and return its folder."""
    folder = run_folder.choose(options)
    text = corpus.prepare(options, folder)
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.write(folder.train_config, codec.to_json(options))
    corpus.record(text, folder)

    state = loop.start(options, text, folder)
    weights, began = sum(array.size for array in state.params.values()), int(state.step)
    shapes = ", ".join(f"{rows}x{width}" for rows, width in zip(text.plan.rows, text.plan.widths, strict=True))
    print(f"{folder.path}: {options.model.preset}, {weights:,} parameters, vocabulary {text.tokenizer.vocab_size}", file=sys.stderr)
    print(f"{text.about['train_pairs']:,} pairs in batches of {shapes}, {text.about['fill']:.0%} full", file=sys.stderr)
    if text.about["dropped_empty"] or text.about["dropped_long"]:
        print(f"dropped: {text.about['dropped_empty']} pairs with an empty side, {text.about['dropped_long']} too long", file=sys.stderr)
    if began:
        print(f"continuing at step {began}", file=sys.stderr)

    loop.run(options, text, folder, state)
    return folder
