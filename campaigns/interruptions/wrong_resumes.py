"""Negative controls: wrong ways to resume that the comparison must notice."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import optax

from jax_transformer.data import batches
from jax_transformer.training import run as training_run


def resume_wrongly(start: Callable, control: str) -> Callable:
    """The package's start of a run, wrong if it resumes and correct if it begins."""

    def started(options: Any, corpus: Any, devices: Any, saved: Any) -> Any:
        state = start(options, corpus, devices, saved)
        return state if saved is None else CONTROLS[control](state)

    return started


@contextlib.contextmanager
def wrong_resume(control: str) -> Iterator[None]:
    """A block in which runs of this process resume wrongly."""
    with (  # what a control changes gets its former value back
        mock.patch.object(training_run, "start", resume_wrongly(training_run.start, control)),
        mock.patch.object(jax.random, "key", jax.random.key),
        mock.patch.object(batches, "train_stream", batches.train_stream),
    ):
        yield


def other_dropout(state: Any) -> Any:
    """Use another key than before the interruption."""
    key = jax.random.key
    jax.random.key = lambda seed: key(seed + 1)  # from here on, only dropout needs one
    return state


def zero_moments(state: Any) -> Any:
    """Lose Adam's moments but not its counts."""
    zeros = jax.tree.map(lambda x: jnp.zeros_like(x) if x.ndim else x, state.opt_state)
    return state._replace(opt_state=zeros)


def zero_schedule(state: Any) -> Any:
    """Restart the learning rate's schedule."""

    def is_schedule(part: Any) -> bool:
        return isinstance(part, optax.ScaleByScheduleState)

    def again(part: Any) -> Any:
        return part._replace(count=part.count * 0) if is_schedule(part) else part

    opt_state = jax.tree.map(again, state.opt_state, is_leaf=is_schedule)
    return state._replace(opt_state=opt_state)


def other_average(state: Any) -> Any:
    """Restart the moving average from the weights."""
    return state._replace(ema=jax.tree.map(jnp.copy, state.params))


def other_batch(state: Any) -> Any:
    """Skip one batch of the data."""
    stream = batches.train_stream
    batches.train_stream = lambda encoded, plan, start, stop, **options: stream(
        encoded, plan, start + 1, stop + 1, **options
    )
    return state


CONTROLS: dict[str, Callable[[Any], Any]] = {
    "dropout drawn from another key": other_dropout,
    "moments set to zero": zero_moments,
    "schedule restarted": zero_schedule,
    "moving average restarted": other_average,
    "one batch skipped": other_batch,
}
