"""Requests to stop a run.

Nothing here imports JAX before it is needed: a request may come while JAX is being imported.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from jax_transformer.errors import Preempted
from jax_transformer.runtime import process


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
