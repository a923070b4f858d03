"""Memory that a process frees and takes again: glibc's settings for it."""

import ctypes
import os
import sys
from collections.abc import Mapping

# Of malloc.h
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -3, -4, -8
_KEEP = {
    _MMAP_MAX: 0,  # large blocks come from the heap, not from mappings that free() takes down
    _ARENA_MAX: 1,  # of all threads: the heaps of further arenas hold no block above 64 MiB
    _TRIM_THRESHOLD: -1,  # never: free memory at the end of the heap stays there
}


def keep_freed_memory() -> bool:
    """Keep what is freed for the next allocation, instead of giving it back to the system.

    XLA allocates the temporary arrays of a training step at its start and frees them at its end.
    By default glibc maps such large blocks anew each time, and the system clears every page of them
    at its first use: a sixth of a step's time on two CPU cores (docs/speed.md).

    Returns False, and changes nothing, without glibc, or if the environment sets ``GLIBC_TUNABLES``
    or a ``MALLOC_`` variable. Call it before other threads start.
    """
    return _set(_KEEP)


def give_back_freed_memory() -> bool:
    """Give every array that is freed back to the system, so that a conversion holds few of them.

    By default glibc learns that blocks of up to 32 MiB come and go, and takes them from the heap of
    each thread, where they stay: 200 MiB in a conversion. Returns as :func:`keep_freed_memory`.
    """
    return _set({_MMAP_THRESHOLD: 1 << 20})


def _set(settings: Mapping[int, int]) -> bool:
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None)
    chosen = any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in os.environ)
    if chosen or not hasattr(libc, "gnu_get_libc_version"):
        return False
    return all(libc.mallopt(name, value) for name, value in settings.items())
