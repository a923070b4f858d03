"""Negative controls of interruptions.py: wrong ways to resume that the comparison must notice."""

from collections.abc import Callable
from typing import Any


def going_on(start: Callable, control: str) -> Callable:
    """The product's start of a run, wrong where it goes on and right where it begins."""

    def started(options: Any, corpus: Any, folder: Any, devices: Any, intact: int | None) -> Any:
        state = start(options, corpus, folder, devices, intact)
        return state if intact is None else CONTROLS[control](state)

    return started


def other_dropout(state: Any) -> Any:
    """The key is another one than before the interruption."""
    import jax

    key = jax.random.key
    jax.random.key = lambda seed: key(seed + 1)  # from here on, only dropout asks for one
    return state


def zero_moments(state: Any) -> Any:
    """Adam's moments are lost, its counts are not."""
    import jax
    import jax.numpy as jnp

    return state._replace(
        opt_state=jax.tree.map(
            lambda leaf: jnp.zeros_like(leaf) if leaf.ndim else leaf, state.opt_state
        )
    )


def zero_schedule(state: Any) -> Any:
    """The learning rate's schedule begins again."""
    import jax
    import optax

    def again(part: Any) -> Any:
        return (
            part._replace(count=part.count * 0)
            if isinstance(part, optax.ScaleByScheduleState)
            else part
        )

    return state._replace(
        opt_state=jax.tree.map(
            again,
            state.opt_state,
            is_leaf=lambda part: isinstance(part, optax.ScaleByScheduleState),
        )
    )


def other_average(state: Any) -> Any:
    """The moving average begins again at the weights."""
    import jax
    import jax.numpy as jnp

    return state._replace(ema=jax.tree.map(jnp.copy, state.params))


def other_batch(state: Any) -> Any:
    """The data goes on one batch further than where it was."""
    from jax_transformer.data import batches

    stream = batches.train_stream
    batches.train_stream = lambda encoded, plan, start, stop: stream(
        encoded, plan, start + 1, stop + 1
    )
    return state


CONTROLS: dict[str, Callable[[Any], Any]] = {
    "dropout drawn from another key": other_dropout,
    "moments set to zero": zero_moments,
    "schedule begun again": zero_schedule,
    "moving average begun again": other_average,
    "data one batch further": other_batch,
}
