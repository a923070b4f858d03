"""A run: state, and the loop of steps, metrics, validations and checkpoints, from any step on."""

import contextlib
import itertools
import math
import time
from functools import partial
from operator import attrgetter
from typing import Any

import jax
from flax import nnx

from jax_transformer import transformer
from jax_transformer.config import TransformerConfig
from jax_transformer.data import batches
from jax_transformer.errors import CheckpointError, Preempted, counted
from jax_transformer.nn.embeddings import Frozen
from jax_transformer.runtime import distributed, process
from jax_transformer.runtime.process import Stop
from jax_transformer.storage import checkpoint, run_files, saving
from jax_transformer.storage.checkpoint import Checkpoint
from jax_transformer.storage.run_folder import RunFolder
from jax_transformer.storage.saving import BackgroundSaver
from jax_transformer.training import curves, optimizer, resume, step
from jax_transformer.training.corpus import Corpus
from jax_transformer.training.devices import Devices, StopVotes, shardings
from jax_transformer.training.evaluation import Validation
from jax_transformer.training.metrics_logger import MetricsLogger
from jax_transformer.training.options import TrainOptions
from jax_transformer.training.step import Arrays, TrainState, TrainStep
from jax_transformer.transformer import Transformer

AHEAD = 2
"""Steps that may be running at once: enough to keep a device busy while the next batch is copied to
it, few enough to end soon after a request to stop."""


def abstract_state(
    options: TrainOptions, config: TransformerConfig, devices: Devices | None = None
) -> TrainState:
    """Return the shapes and dtypes of a run's state, and with ``devices`` the shardings."""
    weights = _weights(transformer.abstract(config))
    state = jax.eval_shape(partial(_state_of, options), *weights)
    return state if devices is None else devices.abstract(state)


def _weights(model: Any) -> list[dict[str, Any]]:
    """Return the parameters and the frozen arrays of a model by dotted path."""
    return [transformer.flatten(model, nnx.Param), transformer.flatten(model, Frozen)]


def start(
    options: TrainOptions, corpus: Corpus, devices: Devices, saved: Checkpoint | None
) -> TrainState:
    """Return the state of a checkpoint, divided over the devices; a new one if None.

    Neither is ever complete on one device, unless there is only one.
    """
    abstract = abstract_state(options, corpus.config, devices)
    if saved is not None:
        state = saved.load(abstract)
        if int(state.step) != saved.step:
            raise CheckpointError(f"{saved.path}: holds step {int(state.step)}")
        return state
    with devices.context():
        if corpus.init_source is None:
            weights = _weights(Transformer(corpus.config, rngs=nnx.Rngs(params=options.seed)))
        else:
            arrays = corpus.init_source.arrays()  # in the memory of the host
            weights = _weights(transformer.abstract(corpus.config))
            for each in weights:
                for name in each:
                    each[name] = arrays[name]
        params, frozen = devices.place(weights)
        laid = shardings(abstract, devices.mesh)
        begin = jax.jit(partial(_state_of, options), donate_argnums=(0, 1), out_shardings=laid)
        return begin(params, frozen)


def _state_of(options: TrainOptions, params: Arrays, frozen: Arrays) -> TrainState:
    if options.freeze or options.lora.rank:
        from jax_transformer.training import trainable

        params, not_trained = trainable.divide(params, options)
        frozen = frozen | not_trained
    tx = optimizer.make(options.optimizer, options.steps)
    return step.state_of(params, frozen, tx, ema=options.optimizer.ema > 0)


def make_step(options: TrainOptions, config: TransformerConfig, state: TrainState) -> TrainStep:
    """Return the step of a run with these options, for states that lie as this one."""
    return step.make_step(
        config,
        optimizer.make(options.optimizer, options.steps),
        options.optimizer.label_smoothing,
        options.optimizer.ema,
        options.loss_chunks,
        jax.tree.map(attrgetter("sharding"), state),
    )


class Run:
    """One process's part of a run: from a state to the last step, or to a request to stop."""

    def __init__(
        self,
        options: TrainOptions,
        corpus: Corpus,
        folder: RunFolder,
        devices: Devices,
        stop: Stop,
        began: int,
    ):
        self.options, self.corpus, self.folder = options, corpus, folder
        self.devices, self.stop = devices, stop
        self.validation = Validation(options, corpus, devices)
        about = checkpoint.read_manifest(folder.checkpoints, began) if began else {}
        due = began % options.eval_every == 0 or began == options.steps
        self.validated = not began or "figures" in about or not due
        if distributed.first():
            average = checkpoint.steps(folder.averaged)
            # Averages of later steps are out of date: those steps are made again
            saving.prune(folder.averaged, range(began + 1))
            folder.keep_metrics(began, validated="figures" in about, averaged=began in average)
        schedule = optimizer.schedule(options.optimizer, options.steps)
        self.logger = MetricsLogger(options, folder, schedule, began, about.get("unrecorded", []))
        self.progress = self.logger.progress
        self.saver = BackgroundSaver()
        self.votes = StopVotes(devices, AHEAD) if distributed.count() > 1 else None

    def train(self, state: TrainState) -> None:
        """Train to the end. Raises Preempted after SIGTERM or Ctrl-C, with the state saved."""
        try:
            self._prune()  # the last process may have ended between saving and pruning
            with self.devices.context():
                with self.saver:
                    if not self.validated:  # it ended between the step and its validation
                        self._pause(state, validate=True)
                    if not self._patience_ended():
                        state = self._steps(state)
                self._average(state)
            if not self.folder.curves.exists():  # the last write of it may have failed
                curves.draw(self.folder)
        finally:
            self.logger.close()

    def _steps(self, state: TrainState) -> TrainState:
        options, corpus, began = self.options, self.corpus, int(state.step)
        train_step = make_step(options, corpus.config, state)
        key, each = self.devices.key(options.seed), options.optimizer.accumulate
        first, end = began * each, options.steps * each
        stream = batches.train_stream(
            corpus.train,
            corpus.plan,
            first,
            end,
            drawn=corpus.drawn,
            local_rows=self.devices.local_rows,
        )
        placed = map(self.devices.divide, stream)
        with contextlib.closing(stream):  # type: ignore[type-var]
            while group := list(itertools.islice(placed, each)):
                state, metrics = train_step(state, group, key)
                process.started()  # the first step has been traced
                self.progress.step = now = self.progress.step + 1
                if self.progress.bar is not None:
                    self.progress.bar.update()
                self.logger.pending.append(metrics)
                jax.block_until_ready(self.logger.pending[-AHEAD - 1 : -AHEAD])
                stop = self.stop.asked  # read once: a later request is for the next step
                if self.votes is not None:
                    stop = self.votes(stop)
                if now % options.log_every == 0 or now == options.steps:
                    self.logger.flush(now)
                if self.votes is None:  # several notice an error when all wait for the checkpoint
                    self.saver.check()
                due = now % options.eval_every == 0 or now == options.steps
                if due or stop:
                    self._pause(state, validate=due)
                    if self._patience_ended():
                        break
        return state

    def _patience_ended(self) -> bool:
        ended = resume.stops_early(self.options, self.folder.validations())
        return bool(distributed.from_first("patience", ended))

    def _pause(self, state: TrainState, *, validate: bool) -> None:
        """Validate if ``validate``, begin to save, and stop if requested.

        The checkpoint is written while training goes on.
        """
        now = self.progress.step
        self.logger.wait(now)  # a state after a loss that is not finite is never saved
        about = {**resume.environment(), "unrecorded": list(self.logger.values)}
        if validate:
            # A validation that is cut short is made when the run is resumed
            with contextlib.suppress(Preempted):
                about["figures"] = self._validate(state.weights, f"step {now}", {"step": now})
        self.logger.sync()
        about |= run_files.about(self.folder.checkpoints / str(now))
        self.saver.save(self.folder.checkpoints, now, state, about=about, then=self._prune)
        self.logger.since = time.monotonic()  # the time since the last line does not count
        ended = "figures" in about and (now == self.options.steps or self._patience_ended())
        stop = self.stop.asked
        if not ended and (stop if self.votes is None else self.votes.now(stop)):
            self.saver.wait()
            raise Preempted(
                f"stopped at step {now}, saved in {self.folder.path}; "
                "the same command continues from there"
            )

    def _prune(self) -> None:
        """Remove the checkpoints that need not be kept."""
        steps = checkpoint.steps(self.folder.checkpoints)
        if steps and distributed.first():
            keep = resume.to_keep(self.options, self.folder.figures(), steps)
            saving.prune(self.folder.checkpoints, keep)

    def _validate(self, weights: Arrays, name: str, entry: dict) -> dict:
        """Validate, record and show; returns the figures. Raises Preempted on a request to stop.

        Several processes validate together, so a request has to come before that.
        """
        message = f"stopped after step {entry['step']}; the same command continues from there"
        if self.votes is not None and self.votes.now(self.stop.asked):
            raise Preempted(message)
        with self.stop.at_once(message) if self.votes is None else contextlib.nullcontext():
            report = self.validation(weights)
        now = entry["step"]
        if not math.isfinite(report.figures["valid_loss"]):
            raise self.logger.not_finite("validation loss", now, report.figures["valid_loss"])
        self.logger.add({**entry, **report.figures})
        number = -(-now // self.options.eval_every)
        for line in report.describe(name, number, self.options.samples):
            self.progress.say(line)
        curves.draw(self.folder)
        return report.figures

    def _average(self, state: TrainState) -> None:
        """Average, validate and save the weights of several checkpoints, unless already done."""
        now = int(state.step)
        steps = resume.to_average(self.options, self.folder.figures())
        if now in checkpoint.steps(self.folder.averaged):
            if distributed.first():  # it may have ended before it did this
                saving.remove_unfinished(self.folder.averaged)
                saving.prune(self.folder.averaged, [now])
            steps = []
        steps = distributed.from_first("checkpoints to average", steps)
        if not steps:
            return
        averaged = self.devices.place(resume.mean_weights(self.folder, steps, state))
        others = {name: array for name, array in state.weights.items() if name not in averaged}
        name = f"average of {counted(len(steps), 'checkpoint')} ({', '.join(map(str, steps))})"
        figures = self._validate(averaged | others, name, {"step": now, "weights": "averaged"})
        self.logger.sync()  # the line of a saved average is not written again
        about = {**resume.environment(), "of": steps, "figures": figures}
        about |= run_files.about(self.folder.averaged / str(now))
        saving.save(self.folder.averaged, now, {"params": averaged, "frozen": others}, about=about)
        if distributed.first():
            saving.prune(self.folder.averaged, [now])
