"""The loop: steps, records, validations and checkpoints, from any step on."""

import math
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import jax
import numpy as np
from flax import nnx

from jax_transformer import transformer, translation
from jax_transformer.data import batches
from jax_transformer.errors import CheckpointError, NonFiniteLossError, Preempted
from jax_transformer.training import checkpoint, metrics, optimizer, step
from jax_transformer.training.corpus import Corpus
from jax_transformer.training.options import TrainOptions
from jax_transformer.training.progress import Progress
from jax_transformer.training.run_folder import RunFolder
from jax_transformer.training.step import TrainState
from jax_transformer.transformer import Transformer

SAMPLES = 3


def start(options: TrainOptions, corpus: Corpus, folder: RunFolder) -> TrainState:
    """The state of the run's newest checkpoint, or a fresh one."""
    rule = optimizer.make(options.optimizer, options.steps)
    state = step.initial_state(Transformer(corpus.config, rngs=nnx.Rngs(params=options.seed)), rule)
    last = folder.last_step()
    if last is not None:
        state = checkpoint.load(folder.checkpoints, last, state)
        if int(state.step) != last:
            raise CheckpointError(f"{folder.checkpoints / str(last)}: holds step {int(state.step)}")
    return state


def run(options: TrainOptions, corpus: Corpus, folder: RunFolder, state: TrainState) -> TrainState:
    """Train from ``state`` to the last step. Raises Preempted after SIGTERM or Ctrl-C, with the state saved."""
    train_step = step.make_step(corpus.config, optimizer.make(options.optimizer, options.steps), options.optimizer.label_smoothing)
    evaluation = step.make_evaluation(corpus.config)
    key = jax.random.key(options.seed)
    began = int(state.step)
    folder.keep_metrics(began)
    progress, recorder = Progress(began, options.steps), Recorder(options, folder)
    if began:
        recorder.values = checkpoint.manifest(folder.checkpoints, began).get("unrecorded", [])
    with stop_requests() as stopped:
        for batch in batches.train_stream(corpus.train, corpus.plan, began, options.steps):
            state, measured = train_step(state, batch, key)
            progress.advance()
            recorder.pending.append(measured)
            now, stop = progress.step, stopped.is_set()  # asked once: what is said at the end of a step holds for all of it
            if now % options.log_every == 0 or now == options.steps:
                progress.show(recorder.flush(now))
            if now % options.eval_every == 0 or now == options.steps or stop:
                recorder.wait(now)  # nothing is saved behind a loss that is not finite
            if now % options.eval_every == 0 or now == options.steps:
                report = validate(state, corpus, options, evaluation)
                if not math.isfinite(report["figures"]["valid_loss"]):
                    raise recorder.not_finite("validation loss", now, report["figures"]["valid_loss"])
                folder.add_metrics({"step": now, **report["figures"]})
                for line in _report_lines(now, report):
                    progress.say(line)
                recorder.restart_clock()
            if now % options.eval_every == 0 or now == options.steps or stop:
                about = {**environment(), "unrecorded": recorder.values}
                checkpoint.save(folder.checkpoints, now, state, keep=options.keep, about=about)
            if stop and now < options.steps:
                progress.close()
                raise Preempted(f"stopped at step {now}, saved in {folder.path}; the same command goes on from there")
    progress.close()
    return state


class Recorder:
    """Collects what steps measure, without waiting for them, and writes a line of metrics.jsonl now and then."""

    def __init__(self, options: TrainOptions, folder: RunFolder):
        self.folder, self.rates = folder, optimizer.schedule(options.optimizer, options.steps)
        self.pending: list[dict[str, jax.Array]] = []
        """What the last steps measured, perhaps not computed yet."""
        self.values: list[dict[str, float]] = []
        """Of the steps since the last line; a checkpoint keeps them, so that a resumed run writes the same next line."""
        self.restart_clock()

    def restart_clock(self) -> None:
        """What happened since the last line is not training time."""
        self.since = time.monotonic()

    def not_finite(self, what: str, where: int, value: float) -> NonFiniteLossError:
        return NonFiniteLossError(f"the {what} of step {where} is {value}; the checkpoints in {self.folder.checkpoints} are untouched")

    def wait(self, now: int) -> None:
        """Wait for the pending steps. Raises NonFiniteLossError where one of them has a loss or gradient that is not finite."""
        values = [{name: value.item() for name, value in measured.items()} for measured in jax.device_get(self.pending)]
        self.pending = []
        for i, value in enumerate(values):
            for name in ("loss", "gradient_norm"):
                if not math.isfinite(value[name]):
                    raise self.not_finite(name.replace("_", " "), now - len(values) + i + 1, value[name])
        self.values += values

    def flush(self, now: int) -> dict[str, Any]:
        """Wait for the pending steps, check their losses, write and return the line of step ``now``."""
        self.wait(now)
        values, self.values = self.values, []
        tokens = np.array([value["tokens"] for value in values])
        entry = {
            "step": now,
            "loss": float(np.average([value["loss"] for value in values], weights=tokens)),
            "gradient_norm": float(values[-1]["gradient_norm"]),
            "learning_rate": float(self.rates(now - 1)),
            "tokens_per_second": float(tokens.sum() / (time.monotonic() - self.since)),
        }
        self.folder.add_metrics(entry)
        self.restart_clock()
        return entry


def validate(state: TrainState, corpus: Corpus, options: TrainOptions, evaluation: Callable) -> dict[str, Any]:
    """Loss over all validation pairs, scores of the first of them translated greedily, and a few translations."""
    sums = [evaluation(state, batch) for _, batch in batches.eval_batches(corpus.valid, corpus.plan.widths, corpus.plan.rows)]
    losses, tokens = np.array(jax.device_get(sums)).sum(axis=0)
    model = transformer.unflatten(corpus.config, state.params | state.carried)
    pairs = corpus.valid_pairs[: options.eval_pairs]
    sources, references = [source for source, _ in pairs], [target for _, target in pairs]
    hypotheses = translation.translate(model, corpus.tokenizer, sources, widths=corpus.plan.widths)
    figures = {"valid_loss": float(losses / tokens), **metrics.score(hypotheses, references)}
    return {"figures": figures, "samples": list(zip(sources, references, hypotheses, strict=True))[:SAMPLES]}


def _report_lines(now: int, report: dict[str, Any]) -> Iterator[str]:
    figures = report["figures"]
    scores = f"BLEU {figures['bleu']:.1f}  chrF {figures['chrf']:.1f}  exact match {figures['exact_match']:.1f} %"
    yield f"step {now}  validation loss {figures['valid_loss']:.3f}  {scores}"
    for source, reference, hypothesis in report["samples"]:
        yield f"    {source}\n      -> {hypothesis}" + ("" if hypothesis == reference else f"\n         (reference: {reference})")


def environment() -> dict[str, Any]:
    """What a bit-exact continuation depends on beside the run folder."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    return {
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "device": {"kind": jax.devices()[0].device_kind, "count": jax.device_count()},
    }


@contextmanager
def stop_requests() -> Iterator[threading.Event]:
    """An event that SIGTERM or Ctrl-C sets; a second one of either ends the process as usual."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def ask(number: int, frame: Any) -> None:
        event.set()
        signal.signal(number, previous[signal.Signals(number)])

    for number in previous:
        signal.signal(number, ask)
    try:
        yield event
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
