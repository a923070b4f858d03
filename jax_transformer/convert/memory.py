"""The memory that this process may still take."""

import os
from pathlib import Path


def available() -> int | None:
    """Bytes that are free, or that the system would free; None if it does not say.

    A container's limit counts as well.
    """
    free = [_meminfo(), _cgroup()]
    known = [number for number in free if number is not None]
    return min(known) if known else None


def _meminfo() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if "MemAvailable:" in line)
    except (OSError, StopIteration, ValueError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _cgroup() -> int | None:
    """Bytes that this process's group (version 2) may still take."""
    try:
        folder = Path("/sys/fs/cgroup")
        limit, used = ((folder / name).read_text() for name in ("memory.max", "memory.current"))
        statistics = dict(
            line.split() for line in (folder / "memory.stat").read_text().splitlines()
        )
        # Pages of files that were not used lately are given up first
        return int(limit) - int(used) + int(statistics.get("inactive_file", 0))
    except (OSError, ValueError):
        return None
