"""Checkpoints that are written while training goes on: one at a time, in a thread."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from jax_transformer.storage import checkpoint


class BackgroundSaver:
    """Saves checkpoints in a thread. An error of the thread is raised by the next call.

    As a context manager it waits for the last checkpoint at the end, unless the user interrupts.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def save(
        self,
        folder: Path,
        step: int,
        tree: Any,
        *,
        about: dict[str, Any],
        then: Callable[[], None],
    ) -> None:
        """Save as :func:`checkpoint.save`, and call ``then``; return after ``tree`` was copied."""
        self.wait()
        complete = checkpoint.begin(folder, step, tree, about=about)

        def write() -> None:
            complete()
            then()

        self._pending = self._thread.submit(write)

    def check(self) -> None:
        """Raise the error of the last save, if it has failed by now."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the last checkpoint is complete. Raises CheckpointError if it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def __enter__(self) -> "BackgroundSaver":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.wait()
        elif error is not None and issubclass(kind, Exception):
            try:  # the checkpoint of an earlier step is as good as without this error
                self.wait()
            except Exception as second:
                error.add_note(str(second))
        self._thread.shutdown(wait=False)
