"""The method of a training run, in order. ``train.py`` and ``jax-transformer train`` are this."""

import contextlib
import dataclasses
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from jax_transformer.config import codec
from jax_transformer.data.options import Task
from jax_transformer.errors import counted
from jax_transformer.runtime import distributed, process
from jax_transformer.runtime.process import Stop
from jax_transformer.storage import run_files
from jax_transformer.storage.checkpoint import Checkpoint
from jax_transformer.storage.run_folder import RunFolder
from jax_transformer.training import corpus, metrics_logger, resume
from jax_transformer.training.corpus import Corpus
from jax_transformer.training.options import Attention, TrainOptions

if TYPE_CHECKING:
    from jax_transformer.architectures.base import Architecture
    from jax_transformer.training.devices import Devices


def train(
    options: TrainOptions, stop: Stop | None = None, *, architecture: "Architecture | None" = None
) -> RunFolder:
    """Train from the start, or from the run's newest checkpoint, and return the run folder.

    ``options`` are what ``train --help`` lists, ``stop`` can request to save and stop. An
    ``architecture`` is registered for this process before the options are used, so that
    ``options.model.preset`` can be a preset of it. Raises a :class:`Refusal` if options, text,
    folder or checkpoint cannot be used, or the loss is not finite.
    """
    if architecture is not None:
        from jax_transformer.architectures import registry

        registry.register(architecture)
    stop = stop or Stop()
    if options.tensorboard or options.wandb:
        metrics_logger.check_trackers(options)
    (text, of_training), to_prepare = options.data.parted(), None
    if text is not None:
        to_prepare = dataclasses.replace(options, data=text)
        options = dataclasses.replace(options, data=of_training)
    with resume.open_run(options) as folder:
        options = resume.recorded_options(options, folder)
        with stop.at_once("stopped before the first step; the same command begins again"):
            if to_prepare is not None and of_training.prepared:
                from jax_transformer.training import preparation

                preparation.complete(to_prepare, Path(of_training.prepared))
            data = corpus.prepare(options, folder, lambda: _devices(options, stop).row_shards)
            corpus.check(data, folder)
            devices = _devices(options, stop)
            from jax_transformer.training import run, trainable
            from jax_transformer.training.devices import automatic_attention, check

            if options.freeze or options.lora.rank:
                trainable.check(options, data.config)
            with devices.context():
                check(data.config, options.mesh)
                if options.model.attention_backend is Attention.AUTO:
                    packed = options.data.packing is not None
                    config = automatic_attention(data.config, packed=packed)
                    data = dataclasses.replace(data, config=config)
            devices.check_memory(run.abstract_state(options, data.config, devices))
            saved = resume.newest_intact(folder)
            if saved is not None:
                resume.warn_of_changes(options, folder, saved)
            distributed.barrier("ready")
        if distributed.first():
            run_files.replace(folder.path, run_files.TRAIN_CONFIG, codec.to_json(options))
            corpus.record(data, folder)
            run_files.record(folder.path)
        distributed.barrier("folder written")

        state = run.start(options, data, devices, saved)
        trained = sum(map(operator.attrgetter("size"), state.params.values()))
        for line in introduction(options, data, folder, trained, saved):
            distributed.say(line)
        run.Run(options, data, folder, devices, stop, int(state.step)).train(state)
    return folder


def _devices(options: TrainOptions, stop: Stop) -> "Devices":
    """Return the devices to train on. Loads JAX, so it is called after the text was checked."""
    from jax_transformer.training.devices import Devices

    process.use_program_cache(options.compilation_cache)
    # JAX waits for the devices of every process: none leaves meanwhile, and none is late
    with stop.put_off() if distributed.count() > 1 else contextlib.nullcontext():
        distributed.barrier("devices")
        return Devices.take(options.devices, options.mesh.fsdp, options.mesh.tensor)


def introduction(
    options: TrainOptions,
    data: Corpus,
    folder: RunFolder,
    trained: int,
    saved: Checkpoint | None = None,
) -> Iterator[str]:
    """Yield the first lines of a run: its model, text and learning rate, and where it continues."""
    about, config, source = data.about, data.config, data.init_source
    plan = data.plan
    others = plan.target_widths or plan.widths
    shapes = [
        f"{n}x{width}" if width == other else f"{n}x({width}+{other})"
        for n, width, other in zip(plan.rows, plan.widths, others, strict=True)
    ]
    sizes = dict.fromkeys((config.source_vocab_size, config.target_vocab_size))
    name = options.model.preset if source is None else f"from {options.init}"
    vocabulary = " and ".join(map(str, sizes))
    size = f"{trained:,} parameters"
    tokenizer = options.data.tokenizer or options.data.prepared
    if options.lora.rank:
        size = f"{trained:,} parameters of adapters (rank {options.lora.rank}) are trained"
    elif options.freeze:
        size = f"{trained:,} parameters are trained, without {' '.join(options.freeze)}"
    yield f"{folder.path}: {name}, {size}, vocabulary {vocabulary}"
    if source is not None:
        yield from source.lines()
    elif not tokenizer and min(sizes) < options.data.vocab_size:
        yield (
            f"warning: data.vocab_size={options.data.vocab_size} is not reached: the training text "
            f"yields a vocabulary of {vocabulary}"
        )
    task = options.data.task
    pairs = counted(about["train_pairs"], "pair" if task is Task.TRANSLATION else "text")
    # The texts of these two are shorter than the longest that batches are planned for
    most = {Task.DENOISING, Task.PREFIX_LM}.intersection(options.data.tasks) and "at most "
    yield f"{pairs} in batches of {', '.join(shapes)}, {most or ''}{about['fill']:.0%} full"
    if about["dropped_empty"] or about["dropped_long"] or about["cut_long"]:
        cut = f"; cut: {about['cut_long']} too long" if about["cut_long"] else ""
        yield (
            f"dropped: {counted(about['dropped_empty'], 'pair')} with an empty side, "
            f"{about['dropped_long']} too long{cut}"
        )
    yield from _rate_lines(options)
    if saved is not None and resume.finished(options, folder):
        yield f"finished at step {saved.step}: nothing is left to do (a higher --steps extends it)"
    elif saved is not None:
        yield f"continuing at step {saved.step}"


def _rate_lines(options: TrainOptions) -> Iterator[str]:
    """Yield the learning rate and its origin, and a warning if it does not reach its peak."""
    rate, default = options.optimizer.rate._asdict(), options.default_rate._asdict()
    shown = [f"{name} {value}" for name, value in rate.items()]
    changed = [f"optimizer.{name}" for name, value in rate.items() if value != default[name]]
    kind = "low-rank adapters" if options.lora.rank else "fine-tuning"
    origin = "default" if options.init is None else f"default for {kind}"
    if len(changed) == len(rate):
        origin = "as given"
    elif changed:
        origin = f"{' and '.join(changed)} as given, the rest by {origin}"
    yield f"{', '.join(shown)} ({origin})"
    peak, _, warmup = options.optimizer.rate
    if warmup >= options.steps:
        yield (
            f"warning: the learning rate never reaches {peak:g}: optimizer.warmup_steps={warmup} "
            f"are not fewer than steps={options.steps}"
        )
