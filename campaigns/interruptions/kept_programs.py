"""Runs of one process that use the compiled programs of the first: a tiny run takes longer to
compile, or to trace and to read from the cache, than to train."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

_programs: dict[Any, Callable[..., Any]] = {}


@contextlib.contextmanager
def shared_programs() -> Iterator[None]:
    """A block in which the step and the validation of equal options are compiled once."""
    from jax_transformer.training import run, step

    make_step, make_evaluation = run.make_step, step.make_evaluation

    def step_of(options: Any, config: Any, state: Any) -> Callable[..., Any]:
        key = (config, options.optimizer, options.steps, options.loss_chunks)
        return _kept(key, lambda: make_step(options, config, state))

    def evaluation_of(*arguments: Any) -> Callable[..., Any]:
        return _kept(arguments, lambda: make_evaluation(*arguments))

    with (
        mock.patch.object(run, "make_step", step_of),
        mock.patch.object(step, "make_evaluation", evaluation_of),
    ):
        yield


def _kept(key: Any, make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    if key not in _programs:
        _programs[key] = make()
    return _programs[key]
