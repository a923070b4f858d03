"""The method of a training run, in order. ``train.py`` and ``jax-transformer train`` are this."""

import sys
from typing import TYPE_CHECKING

from jax_transformer.config import codec
from jax_transformer.storage import atomic, checkpoint
from jax_transformer.storage.run_folder import RunFolder
from jax_transformer.training import corpus, resume, trackers
from jax_transformer.training.corpus import Corpus
from jax_transformer.training.open_run import claim
from jax_transformer.training.options import TrainOptions, read_options
from jax_transformer.training.stops import Stop

if TYPE_CHECKING:
    from jax_transformer.training.mesh import Devices


def train(options: TrainOptions, stop: Stop | None = None) -> RunFolder:
    """Train as ``options`` say, from the start or from where the run stopped, and return its folder. ``stop`` may ask it to save and stop."""
    stop = stop or Stop()
    trackers.check(options)
    with claim(options) as folder:
        with stop.at_once("stopped before the first step; the same command begins again"):
            text = corpus.prepare(options, folder, lambda: _devices(options).count)
            corpus.check(text, folder)
            intact = _intact(folder)
            _name_changes(options, folder, intact)
        atomic.write_text(folder.train_config, codec.to_json(options))
        corpus.record(text, folder)

        from jax_transformer.training import loop

        devices = _devices(options)
        state = loop.start(options, text, folder, devices, intact)
        _introduce(
            options, text, folder, sum(array.size for array in state.params.values()), intact
        )
        loop.Run(options, text, folder, devices, stop, int(state.step)).train(state)
    return folder


def _devices(options: TrainOptions) -> "Devices":
    """The devices to train on. JAX is loaded here, when the text is known to be good: a refusal should not wait for it."""
    from jax_transformer.training import compilation, mesh

    compilation.use_cache(options.compilation_cache)
    return mesh.Devices.take(options.devices)


def _intact(folder: RunFolder) -> int | None:
    """The step to go on from. Newer checkpoints, all damaged, are named and set aside; raises CheckpointError where none is intact."""
    checkpoint.remove_unfinished(folder.checkpoints)
    step, damage = checkpoint.newest_intact(folder.checkpoints)
    damaged = reversed(
        [each for each in checkpoint.steps(folder.checkpoints) if each > (step or 0)]
    )
    for each, error in zip(damaged, damage, strict=True):
        aside = checkpoint.quarantine(folder.checkpoints, each)
        say(f"warning: {error}; it is now {aside.name}, and the run goes on from step {step}")
    return step


def _name_changes(options: TrainOptions, folder: RunFolder, intact: int | None) -> None:
    """Say what differs from when the run was last going, of what is not refused."""
    if intact is None:
        return
    _, changed = resume.changes(options, read_options(folder))
    changed += resume.environment_changes(
        resume.environment(), checkpoint.read_manifest(folder.checkpoints, intact)
    )
    if changed:
        say(
            f"warning: since this run was stopped, these have changed: {', '.join(changed)}; it will not end bit for bit as it would have"
        )


def _introduce(
    options: TrainOptions, text: Corpus, folder: RunFolder, weights: int, intact: int | None
) -> None:
    about = text.about
    shapes = ", ".join(
        f"{rows}x{width}" for rows, width in zip(text.plan.rows, text.plan.widths, strict=True)
    )
    sizes = dict.fromkeys((text.config.source_vocab_size, text.config.target_vocab_size))
    name = options.model.preset if text.init_source is None else f"from {options.init}"
    say(
        f"{folder.path}: {name}, {weights:,} parameters, vocabulary {' and '.join(map(str, sizes))}"
    )
    for line in text.init_source.lines() if text.init_source is not None else ():
        say(line)
    say(f"{about['train_pairs']:,} pairs in batches of {shapes}, {about['fill']:.0%} full")
    if about["dropped_empty"] or about["dropped_long"] or about["cut_long"]:
        cut = f"; cut: {about['cut_long']} too long" if about["cut_long"] else ""
        say(
            f"dropped: {about['dropped_empty']} pairs with an empty side, {about['dropped_long']} too long{cut}"
        )
    if intact:
        say(f"continuing at step {intact}")


def say(message: str) -> None:
    """A line for the person who trains."""
    print(message, file=sys.stderr, flush=True)
