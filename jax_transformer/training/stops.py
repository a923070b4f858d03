"""What SIGTERM and Ctrl-C do to a training run: the first asks it to save and stop, the second ends it at once."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jax_transformer.errors import Preempted


class Stop:
    """Whether the run was asked to stop."""

    def __init__(self) -> None:
        self.asked = False
        self._at_once: str | None = None

    def request(self) -> None:
        """Ask. Raises Preempted inside :meth:`at_once`."""
        self.asked = True
        if self._at_once is not None:
            raise Preempted(self._at_once)

    @contextmanager
    def at_once(self, message: str) -> Iterator[None]:
        """While there is nothing to save, a request ends the work where it stands, with this message."""
        self._at_once = message
        try:
            if self.asked:
                raise Preempted(message)
            yield
        finally:
            self._at_once = None


@contextmanager
def requests() -> Iterator[Stop]:
    """A Stop that SIGTERM and Ctrl-C ask; a second one of either does what it would have done without us."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # Python hands signals to the main thread alone
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def ask(number: int, frame: Any) -> None:
        for each, handler in previous.items():
            signal.signal(each, handler)
        stop.request()

    for number in previous:
        signal.signal(number, ask)
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
