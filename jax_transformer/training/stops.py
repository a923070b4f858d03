"""SIGTERM and Ctrl-C in a training run: the first asks it to save and stop, the second ends it at
once."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jax_transformer.errors import Preempted


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
        finally:
            self._at_once = None


@contextmanager
def requests() -> Iterator[Stop]:
    """A Stop that SIGTERM and Ctrl-C request; a second signal has its usual effect."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread can handle signals
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def ask(number: int, frame: Any) -> None:
        for each, handler in previous.items():
            signal.signal(each, handler)
        stop.request()

    unraisable = sys.unraisablehook

    def lost(what: Any) -> None:
        if not isinstance(what.exc_value, Preempted):  # `at_once` raises that again
            unraisable(what)

    for number in previous:
        signal.signal(number, ask)
    sys.unraisablehook = lost
    try:
        yield stop
    finally:
        sys.unraisablehook = unraisable
        for number, handler in previous.items():
            signal.signal(number, handler)
