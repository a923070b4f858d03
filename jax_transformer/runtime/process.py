"""A whole process: its memory, its cache of compiled programs, its signals, requests to stop, and
the entry points of the packages that are installed for it.

Nothing here imports JAX before it is needed: a request may come while JAX is being imported.
"""

import contextlib
import ctypes
import functools
import gc
import hashlib
import importlib.metadata
import os
import platform
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jax_transformer.errors import ConfigError, Preempted
from jax_transformer.runtime import distributed

# Of malloc.h
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -3, -4, -8
_KEEP = {
    _MMAP_MAX: 0,  # large blocks come from the heap, not from mappings that free() takes down
    _ARENA_MAX: 1,  # of all threads: the heaps of further arenas hold no block above 64 MiB
    _TRIM_THRESHOLD: -1,  # never: free memory at the end of the heap stays there
}
_GIVE_BACK = {_MMAP_THRESHOLD: 32 << 20, _ARENA_MAX: 1, _TRIM_THRESHOLD: 64 << 20}
STOPPING = (signal.SIGTERM, signal.SIGINT)
_AGAIN = 0.01
"""Seconds, after which the callback that dropped a KeyboardInterrupt has ended."""


def keep_freed_memory(keep: bool = True) -> bool:
    """Keep what is freed for the next allocation, or give freed arrays of more than 32 MiB back to
    the system, by settings of glibc.

    XLA allocates the temporary arrays of a training step at its start and frees them at its end.
    By default glibc maps such large blocks anew each time, and the system clears every page of them
    at its first use: a sixth of a step's time on two CPU cores (docs/speed-details.md).

    A conversion should hold few arrays. By default glibc takes blocks of up to 32 MiB from the heap
    of each thread, where they stay: 200 MiB in a conversion. From one heap of all threads the next
    array gets the memory of the last, which saves a million page faults for 2 GB.

    Tokenizers, whose threads would wait for each other at the one heap, then use one thread.

    Returns False, and changes nothing, without glibc, or if the environment sets ``GLIBC_TUNABLES``
    or a ``MALLOC_`` variable. Call it before other threads start.
    """
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None)
    is_set = any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in os.environ)
    if is_set or not hasattr(libc, "gnu_get_libc_version"):
        return False
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    settings = _KEEP if keep else _GIVE_BACK
    return all(libc.mallopt(setting, value) for setting, value in settings.items())


def start() -> None:
    """Collect no cyclic garbage until :func:`started`.

    Imports and traced programs stay, and looking through them took a seventh of the time until a
    first translation. Most garbage is freed without the collector.
    """
    gc.disable()
    _starting.append(True)


def started() -> None:
    """Collect garbage again, after :func:`start`; otherwise do nothing."""
    if _starting:
        _starting.clear()
        gc.enable()


_starting: list[bool] = []


def use_program_cache(folder: str | None = None) -> None:
    """Keep JAX's compiled programs in ``folder`` for the next start; ``none`` turns the cache off.

    By default they are in JAX_COMPILATION_CACHE_DIR, or in the user's cache folder if that is not
    set. A program fits one kind of processor, so each kind has its own subfolder, named after its
    instruction set if the system lists it.
    """
    import tempfile

    import jax

    current = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if folder == "none" or (folder is None and current):
        return
    try:
        listed = Path("/proc/cpuinfo").read_text()
    except OSError:
        listed = ""
    features = re.findall(r"^(?:flags|Features|model name).*", listed, re.MULTILINE)[:2]
    processor = "\n".join([platform.machine(), platform.processor(), *features])
    kind = f"{platform.machine()}-{hashlib.sha256(processor.encode()).hexdigest()[:8]}"
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = (Path(folder) if folder else home / "jax_transformer" / "compiled") / kind
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        if folder is not None:
            raise
        distributed.say(
            f"compiled programs are not stored: {path}: {error.strerror}; "
            "JAX_COMPILATION_CACHE_DIR can name another folder"
        )
        return
    jax.config.update("jax_compilation_cache_dir", str(path.absolute()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


@contextlib.contextmanager
def on_signals(
    action: Callable[[], None],
    *,
    raising: type[BaseException],
    numbers: Sequence[int] = STOPPING,
    once: bool = False,
) -> Iterator[None]:
    """Call ``action`` at these signals. Only the main thread can: in others, nothing changes.

    ``action`` may raise ``raising``, which Python drops, and would report, if the signal comes in a
    finalizer or a callback of the garbage collector. It is not reported; the block has to look for
    the request by itself. With ``once``, the first signal brings back the handlers that were in
    place, so that a second one has its usual effect, and a KeyboardInterrupt that Python drops is
    raised again.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in numbers}
    report = sys.unraisablehook

    def handle(number: int, frame: Any) -> None:
        for each, handler in before.items() if once else ():
            signal.signal(each, handler)
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
        for number, handler in before.items():
            signal.signal(number, handler)


class Stop:
    """A request to stop, which a run looks for after every step."""

    asked = False
    _at_once: str | None = None

    def request(self) -> None:
        """Ask the run to stop. Raises Preempted inside :meth:`at_once`."""
        self.asked = True
        if self._at_once is not None:
            raise Preempted(self._at_once)

    @contextlib.contextmanager
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

    @contextlib.contextmanager
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


@contextlib.contextmanager
def stop_requests() -> Iterator[Stop]:
    """Yield a Stop that SIGTERM and Ctrl-C request; a second signal has its usual effect."""
    stop = Stop()
    with on_signals(stop.request, raising=Preempted, once=True):  # `at_once` raises it again
        yield stop


def entry_points(group: str) -> dict[str, importlib.metadata.EntryPoint]:
    """Return a group's entry points by name, of packages installed now and of our own extras."""
    folders = [path or "." for path in sys.path if os.path.isdir(path or ".")]
    every = _entry_points(tuple((path, os.stat(path).st_mtime_ns) for path in folders))
    return {point.name: point for point in sorted(every.select(group=group))}


@functools.lru_cache(maxsize=1)
def _entry_points(folders: tuple[tuple[str, int], ...]) -> Any:
    """Those of all groups: reading the packages' metadata takes 6 ms. It is read again if one of
    the folders changed."""
    return importlib.metadata.entry_points()


def load_entry_point(entry_point: importlib.metadata.EntryPoint, kind: type = object) -> Any:
    """Return the value of an entry point. Raises ConfigError unless it is there and a ``kind``."""
    where = f"entry point {entry_point.name} = {entry_point.value}"
    try:
        value = entry_point.load()
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{where}: {text}") from error
    if not isinstance(value, kind):
        raise ConfigError(f"{where}: is a {type(value).__name__}, not a {kind.__name__}")
    return value
