"""SIGTERM and Ctrl-C, handled for as long as a block runs."""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

STOPPING = (signal.SIGTERM, signal.SIGINT)
_AGAIN = 0.01
"""Seconds, after which the callback that dropped a KeyboardInterrupt has ended."""


@contextlib.contextmanager
def handled(
    action: Callable[[], None],
    *,
    raising: type[BaseException],
    numbers: Sequence[int] = STOPPING,
    once: bool = False,
) -> Iterator[None]:
    """Call ``action`` at these signals. Only the main thread can: in others, nothing changes.

    Args:
        action: may raise ``raising``.
        raising: an exception that Python drops, and would report, if the signal comes in a
            finalizer or a callback of the garbage collector. It is not reported; the block has to
            look for the request by itself.
        numbers: the signals.
        once: the first signal brings back the handlers that were in place, so that a second one
            has its usual effect. A KeyboardInterrupt that Python drops is raised again.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in numbers}
    report = sys.unraisablehook

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def handle(number: int, frame: Any) -> None:
        if once:
            restore()
        action()

    def dropped(what: Any) -> None:
        if isinstance(what.exc_value, raising):
            return
        if isinstance(what.exc_value, KeyboardInterrupt):  # the second Ctrl-C, in such a callback
            main = threading.main_thread().ident
            threading.Timer(_AGAIN, signal.pthread_kill, [main, signal.SIGINT]).start()
        else:
            report(what)

    for number in numbers:
        signal.signal(number, handle)
    sys.unraisablehook = dropped
    try:
        yield
    finally:
        if sys.unraisablehook is dropped:  # a failed save keeps a hook that silences its threads
            sys.unraisablehook = report
        restore()
