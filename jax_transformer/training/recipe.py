"""The method of a training run, in order. ``train.py`` and ``jax-transformer train`` are this."""

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from jax_transformer.architectures import registry
from jax_transformer.config import codec
from jax_transformer.errors import InputError, counted
from jax_transformer.runtime import distributed
from jax_transformer.storage import checkpoint, run_files, run_folder
from jax_transformer.storage.checkpoint import Checkpoint
from jax_transformer.storage.run_folder import RunFolder
from jax_transformer.training import corpus, metrics_logger, run
from jax_transformer.training.corpus import Corpus
from jax_transformer.training.options import TrainOptions, read_options
from jax_transformer.training.run import Stop

if TYPE_CHECKING:
    from jax_transformer.architectures.base import Architecture
    from jax_transformer.training.devices import Devices


def train(
    options: TrainOptions,
    stop: Stop | None = None,
    *,
    architecture: "Architecture | None" = None,
) -> RunFolder:
    """Train from the start, or from the run's newest checkpoint, and return the run folder.

    Args:
        options: what ``train --help`` lists.
        stop: can request to save and stop.
        architecture: registered for this process before ``options`` are used, so that
            ``options.model.preset`` can be a preset of it.

    Raises:
        Refusal: options, text, folder or checkpoint cannot be used; or the loss is not finite.
    """
    if architecture is not None:
        registry.register(architecture)
    stop = stop or Stop()
    metrics_logger.check_trackers(options)
    with run.open_run(options) as folder:
        options = _with_recorded_rate(options, folder)
        with stop.at_once("stopped before the first step; the same command begins again"):
            data = corpus.prepare(options, folder, lambda: _devices(options, stop).row_shards)
            corpus.check(data, folder)
            _check_equal(data)
            _check_trainable(options, data)
            devices = _devices(options, stop)
            _check_devices(options, data, devices)
            saved = _newest_intact(folder)
            _warn_of_changes(options, folder, saved)
            distributed.barrier("ready")
        if distributed.first():
            run_files.replace(folder.path, run_files.TRAIN_CONFIG, codec.to_json(options))
            corpus.record(data, folder)
            run_files.record(folder.path)
        distributed.barrier("folder written")

        from jax_transformer.training import loop

        state = loop.start(options, data, devices, saved)
        trained = sum(array.size for array in state.params.values())
        for line in introduction(options, data, folder, trained, saved):
            say(line)
        loop.Run(options, data, folder, devices, stop, int(state.step)).train(state)
    return folder


def _with_recorded_rate(options: TrainOptions, folder: RunFolder) -> TrainOptions:
    """The options with the learning rate that a run of version 0.1 began with, and say so."""
    if not folder.train_config.exists():
        return options
    recorded = run.with_recorded_rate(options, read_options(folder))
    if recorded.optimizer.rate != options.optimizer.rate:
        say(f"{folder.path}: keeps the learning rate that it began with, version 0.1's default")
    return recorded


def _devices(options: TrainOptions, stop: Stop) -> "Devices":
    """The devices to train on. Loads JAX, so it is called after the text was checked."""
    from jax_transformer.training.devices import Devices, use_cache

    use_cache(options.compilation_cache)
    # JAX waits for the devices of every process: none leaves meanwhile, and none is late
    with stop.put_off() if distributed.count() > 1 else contextlib.nullcontext():
        distributed.barrier("devices")
        return Devices.take(options.devices, options.mesh.fsdp, options.mesh.tensor)


def _check_trainable(options: TrainOptions, data: Corpus) -> None:
    """Raise ConfigError for a pattern of ``freeze`` or ``lora`` that fits no parameter."""
    if options.freeze or options.lora.rank:
        from jax_transformer.training import trainable

        trainable.check(options, data.config)


def _check_devices(options: TrainOptions, data: Corpus, devices: "Devices") -> None:
    """Raise ConfigError for a mesh that cannot divide the model, an attention backend that the
    devices do not have, or a state that does not fit their memory.
    """
    from jax_transformer.nn import fused_attention
    from jax_transformer.training import loop, partitioning

    partitioning.check(data.config, options.mesh)
    fused_attention.check_device(data.config)
    devices.check_memory(loop.abstract_state(options, data.config, devices))


def _check_equal(data: Corpus) -> None:
    """Raise InputError if this process has read another text than the first one."""
    about = distributed.from_first("data", data.about)
    changed = [name for name in data.about if data.about[name] != about.get(name)]
    if changed:
        raise InputError(
            f"process {distributed.index()} reads other data than process 0: "
            f"{', '.join(changed)} differ"
        )
    distributed.barrier("equal data")


def _newest_intact(folder: RunFolder) -> Checkpoint | None:
    """The checkpoint to continue from, None if there is none; the first process decides.

    Newer checkpoints, which are damaged, are named and quarantined. Raises CheckpointError if there
    are checkpoints and none is intact.
    """
    if distributed.first():
        saved = _verified(folder)
        distributed.from_first("checkpoint", None if saved is None else saved.step)
        return saved
    step = distributed.from_first("checkpoint", None)
    return None if step is None else checkpoint.open(folder.checkpoints, step, verified=True)


def _verified(folder: RunFolder) -> Checkpoint | None:
    checkpoint.remove_unfinished(folder.checkpoints)
    saved, errors = run_folder.newest_intact(folder.checkpoints)
    step = 0 if saved is None else saved.step
    newer = [each for each in checkpoint.steps(folder.checkpoints) if each > step]
    for each, error in zip(reversed(newer), errors, strict=True):
        quarantined = run_folder.quarantine(folder.checkpoints, each)
        say(f"warning: {error}; renamed to {quarantined.name}; continuing from step {step}")
    return saved


def _warn_of_changes(options: TrainOptions, folder: RunFolder, saved: Checkpoint | None) -> None:
    """Name the options, versions and devices that changed since the run was stopped."""
    if saved is None:
        return
    from jax_transformer.training.devices import environment, environment_changes

    _, changed = run.option_changes(options, read_options(folder))
    changed += environment_changes(environment(), dict(saved.about))
    if changed:
        say(
            f"warning: changed since this run was stopped: {', '.join(changed)}; "
            "the result will not be bit for bit that of an uninterrupted run"
        )


def introduction(
    options: TrainOptions,
    data: Corpus,
    folder: RunFolder,
    trained: int,
    saved: Checkpoint | None = None,
) -> Iterator[str]:
    """Yield the first lines of a run: its model, text and learning rate, and where it continues."""
    about, config, source = data.about, data.config, data.init_source
    shapes = ", ".join(
        f"{rows}x{width}" for rows, width in zip(data.plan.rows, data.plan.widths, strict=True)
    )
    sizes = dict.fromkeys((config.source_vocab_size, config.target_vocab_size))
    name = options.model.preset if source is None else f"from {options.init}"
    vocabulary = " and ".join(map(str, sizes))
    size = f"{trained:,} parameters"
    if options.lora.rank:
        size = f"{trained:,} parameters of adapters (rank {options.lora.rank}) are trained"
    elif options.freeze:
        size = f"{trained:,} parameters are trained, without {' '.join(options.freeze)}"
    yield f"{folder.path}: {name}, {size}, vocabulary {vocabulary}"
    if source is not None:
        yield from source.lines()
    elif options.data.tokenizer is None and min(sizes) < options.data.vocab_size:
        yield (
            f"warning: data.vocab_size={options.data.vocab_size} is not reached: the training text "
            f"yields a vocabulary of {vocabulary}"
        )
    pairs = counted(about["train_pairs"], "pair")
    yield f"{pairs} in batches of {shapes}, {about['fill']:.0%} full"
    if about["dropped_empty"] or about["dropped_long"] or about["cut_long"]:
        cut = f"; cut: {about['cut_long']} too long" if about["cut_long"] else ""
        yield (
            f"dropped: {counted(about['dropped_empty'], 'pair')} with an empty side, "
            f"{about['dropped_long']} too long{cut}"
        )
    yield from _rate_lines(options)
    if saved is not None and run.finished(options, folder):
        yield f"finished at step {saved.step}: nothing is left to do (a higher --steps extends it)"
    elif saved is not None:
        yield f"continuing at step {saved.step}"


def _rate_lines(options: TrainOptions) -> Iterator[str]:
    """Yield the learning rate and its origin, and a warning if it does not reach its peak."""
    rate, default = options.optimizer.rate._asdict(), options.default_rate._asdict()
    changed = [f"optimizer.{name}" for name in rate if rate[name] != default[name]]
    kind = "low-rank adapters" if options.lora.rank else "fine-tuning"
    origin = "default" if options.init is None else f"default for {kind}"
    if len(changed) == len(rate):
        origin = "as given"
    elif changed:
        origin = f"{' and '.join(changed)} as given, the rest by {origin}"
    yield f"{', '.join(f'{name} {value}' for name, value in rate.items())} ({origin})"
    peak, _, warmup = options.optimizer.rate
    if warmup >= options.steps:
        yield (
            f"warning: the learning rate never reaches {peak:g}: optimizer.warmup_steps={warmup} "
            f"are not fewer than steps={options.steps}"
        )


def say(message: str) -> None:
    """Print a line on stderr, in the first of several processes."""
    if distributed.first():
        print(message, file=sys.stderr, flush=True)
