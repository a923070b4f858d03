"""Requests to stop a run, and the agreement of several processes on the step after which they stop.

Nothing here imports JAX before it is needed: a request may come while JAX is being imported.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from jax_transformer.errors import Preempted
from jax_transformer.runtime import distributed, process

if TYPE_CHECKING:
    import jax

    from jax_transformer.training.devices import Devices


class Stop:
    """A request to stop, which a run looks for after every step."""

    def __init__(self) -> None:
        self.asked = False
        self._at_once: str | None = None

    def request(self) -> None:
        """Ask the run to stop. Raises Preempted inside :meth:`at_once`."""
        self.asked = True
        if self._at_once is not None:
            raise Preempted(self._at_once)

    @contextmanager
    def at_once(self, message: str) -> Iterator[None]:
        """Let a request end the work immediately, with this message: there is nothing to save."""
        self._at_once = message
        try:
            if self.asked:
                raise Preempted(message)
            yield
            if self.asked:  # the exception was lost, for example in a finalizer
                raise Preempted(message)
        except Exception as error:
            # A library may have made another of it: jaxlib a ValueError, if it was comparing
            # static arguments
            if self.asked and not isinstance(error, Preempted):
                raise Preempted(message) from error
            raise
        finally:
            self._at_once = None

    @contextmanager
    def put_off(self) -> Iterator[None]:
        """Inside :meth:`at_once`: let a request end the work after this block and not within it.

        It is for what several processes do together, and wait for each other in.
        """
        message, self._at_once = self._at_once, None
        try:
            yield
        finally:
            self._at_once = message
        if message is not None and self.asked:
            raise Preempted(message)


@contextmanager
def stop_requests() -> Iterator[Stop]:
    """Yield a Stop that SIGTERM and Ctrl-C request; a second signal has its usual effect."""
    stop = Stop()
    # `at_once` raises it again
    with process.on_signals(stop.request, raising=Preempted, once=True):
        yield stop


class StopVotes:
    """Every process votes after every step; a vote counts some steps later.

    So it is there when it is read, and no step waits for it. A single process needs no votes.
    """

    def __init__(self, devices: "Devices", delay: int):
        import jax
        import jax.numpy as jnp

        mesh = devices.mesh
        self._everywhere = jax.sharding.NamedSharding(
            mesh, jax.sharding.PartitionSpec(mesh.axis_names)
        )
        self._any = jax.jit(jnp.max, out_shardings=devices.replicated)
        self._delay = delay
        self._votes: deque[jax.Array] = deque()

    def __call__(self, stop: bool) -> bool:
        """Return True if all processes stop after this step; ``stop`` is the vote of this
        process.
        """
        if distributed.count() == 1:
            return stop
        self._votes.append(self._cast(stop))
        return len(self._votes) > self._delay and bool(self._votes.popleft())

    def now(self, stop: bool) -> bool:
        """Return True if any process votes so now: waits for all of them."""
        if distributed.count() == 1:
            return stop
        self._votes.clear()
        return bool(self._cast(stop))

    def _cast(self, stop: bool) -> "jax.Array":
        import jax

        votes = np.full(self._everywhere.mesh.size, stop, np.int32)
        return self._any(
            jax.make_array_from_callback(votes.shape, self._everywhere, lambda index: votes[index])
        )
