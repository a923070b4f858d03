"""Record every change that a command makes to the files of a folder, also from C++.

The command runs under ``strace``; :mod:`.parser` makes a list of operations of its log.
"""

import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

NAMES = (
    "openat open creat rename renameat renameat2 mkdir mkdirat unlink unlinkat rmdir link linkat"
).split()
WRITES = "write pwrite64 writev pwritev pwritev2".split()
DATA = [*WRITES, *"ftruncate fallocate fsync fdatasync lseek dup dup2 dup3 fcntl".split()]
PROCESSES = "clone clone3 fork vfork".split()
REFUSED = (
    "symlink symlinkat mknod mknodat truncate msync copy_file_range sendfile splice fchdir sync "
    "syncfs"
).split()
"""Calls that would change files in ways that the model does not have, or sync all of them. What a
command wrote through io_uring would not be in its log, and so found missing at its end.
"""
CALLS = [*NAMES, *DATA, *PROCESSES, *REFUSED, "chdir", "mmap"]
HARMLESS = "F_GETFL F_SETFD F_GETFD F_SETLK F_GETLK F_SETLKW F_OFD_SETLK F_OFD_SETLKW".split()
STRACE = "strace -f -qq --seccomp-bpf -y -xx -s 1000000000 -e signal=none"
_LINE = re.compile(
    r"(\d+) +(\w+)\((.*)\) += (-?\d+|0x[0-9a-f]+|\?)(?:<(.*?)>(?:\(deleted\))?)?(?: .*)?"
)
_UNFINISHED = " <unfinished ...>"
_RESUMED = re.compile(r"(\d+) +<\.\.\. \w+ resumed>(.*)")
STRING = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
PATH = re.compile(r"<((?:\\x[0-9a-f]{2})+)>")


class NotModelled(Exception):
    """A call in a log that the model does not have."""


def record(
    command: Sequence[str], folder: Path, log: Path, environment: Mapping[str, str]
) -> subprocess.CompletedProcess:
    """Run a command in ``folder`` and write the log of its calls."""
    return subprocess.run(
        [*STRACE.split(), "-o", str(log), "-e", f"trace={','.join(CALLS)}", "--", *command],
        cwd=folder,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


@dataclass(frozen=True)
class Call:
    """A system call that has returned without an error."""

    thread: str
    call: str
    text: str
    """The arguments as strace prints them: strings, also in <> after descriptors, as bytes."""
    result: str
    path: str
    """The path of the result, if it is a descriptor."""

    @property
    def arguments(self) -> list[str]:
        """The arguments; a list or a structure is one."""
        parts, depth = [""], 0
        for part in re.split(r"([\[\]{}]|, )", self.text):
            depth += (part in ("[", "{")) - (part in ("]", "}"))
            if part == ", " and not depth:
                parts.append("")
            else:
                parts[-1] += part
        return parts


def calls(text: str) -> Iterator[Call]:
    """Yield the calls of a log in the order in which they returned."""
    begun: dict[str, str] = {}
    for line in text.splitlines():
        if line.endswith(_UNFINISHED):
            begun[line.split(maxsplit=1)[0]] = line.removesuffix(_UNFINISHED)
            continue
        if resumed := _RESUMED.fullmatch(line):
            line = begun.pop(resumed[1]) + resumed[2]
        match = _LINE.fullmatch(line)
        if match is None:
            raise NotModelled(f"not a call: {line[:200]}")
        if not match[4].startswith("-"):
            yield Call(match[1], match[2], match[3], match[4], decoded(match[5] or ""))


def decoded(text: str) -> str:
    """A path."""
    return os.fsdecode(raw(text))


def raw(text: str) -> bytes:
    """The bytes of a string."""
    return bytes.fromhex(text.replace("\\x", ""))
