"""Turn the log of a command into the operations on the files of a folder.

A call that is not modelled is refused with one line: a list of operations is complete or there is
none.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from campaigns.crashes import strace
from campaigns.crashes.states import ROOT, Entry, Names, Operation, Resize, State, Sync, Write
from campaigns.crashes.strace import Call, NotModelled


def checked(folder: Path, start: State, log: Path) -> list[Operation]:
    """The operations of a log whose command has just ended in ``folder``.

    Exits unless they lead from the start to exactly the files that are there.
    """
    operations = parse(log.read_text(), folder, start)
    expected, recorded = State.read(folder).tree(), start.after(operations).tree()
    differing = [
        path
        for path in sorted(expected.keys() | recorded.keys())
        if path not in expected or path not in recorded or expected[path] != recorded[path]
    ]
    if differing:
        raise SystemExit(f"{log}: the operations do not lead to {', '.join(differing[:5])}")
    return operations


def parse(text: str, folder: Path, start: State) -> list[Operation]:
    """The operations below ``folder`` in the log of a command that began in it.

    Files that are there at the start have the numbers of that state.
    """
    lines = list(strace.calls(text))
    parents = {line.result: line.thread for line in lines if line.call in strace.PROCESSES}
    parser = Parser(str(folder.resolve()), start, parents)
    for line in lines:
        parser.take(line)
    return parser.operations


@dataclass
class Opened:
    """An open file, perhaps of several descriptors."""

    number: int
    position: int = 0
    appends: bool = False


@dataclass
class Process:
    """The current folder and the open files of a process."""

    folder: str
    opened: dict[str, Opened]


class Parser:
    """Follows names, descriptors and positions, as the kernel does."""

    def __init__(self, root: str, start: State, parents: Mapping[str, str]):
        self.root, self.state, self.parents = root, start.copy(), parents
        self.operations: list[Operation] = []
        self.processes: dict[str, Process] = {}
        """The process of each thread."""
        self.count = max([ROOT, *self.state.names.values()])

    def take(self, line: Call) -> None:
        """Add the operation of a call, if it is one below the root."""
        process = self._process(line.thread)
        call, arguments = line.call, line.arguments
        if call in strace.PROCESSES:
            if "CLONE_THREAD" in line.text:
                self.processes[line.result] = process
        elif call == "chdir":
            (process.folder,) = self._paths(process, arguments)
        elif call in strace.NAMES:
            paths = self._paths(process, arguments)
            below = [self._below(path) for path in paths]
            if any(below):
                if line.result == "?" or not all(below):
                    raise NotModelled(f"{call} of {' and '.join(paths)}")
                self._names(process, line, [self._entry(path) for path in paths], arguments)
        elif any(map(self._below, self._mentioned(process, line))):
            if line.result == "?":
                raise NotModelled(f"{call} that did not return")
            if call == "mmap" and not ("PROT_WRITE" in line.text and "MAP_SHARED" in line.text):
                return
            if call not in strace.DATA:
                raise NotModelled(f"{call} in {self.root}")
            self._data(process, line, arguments)
        elif call == "sync":
            raise NotModelled(call)

    def _process(self, thread: str) -> Process:
        """The process of a thread; a new one has the descriptors of its parent."""
        if thread not in self.processes:
            parent = self.processes.get(self.parents.get(thread, ""))
            self.processes[thread] = (
                Process(parent.folder, dict(parent.opened)) if parent else Process(self.root, {})
            )
        return self.processes[thread]

    def _add(self, operation: Operation) -> None:
        self.operations.append(operation)
        self.state.apply(operation)

    # Names

    def _below(self, path: str) -> bool:
        return f"{path}/".startswith(f"{self.root}/")

    def _paths(self, process: Process, arguments: Sequence[str]) -> list[str]:
        """The absolute paths among the arguments of a call."""
        paths, folder = [], process.folder
        for argument in arguments:
            if string := strace.STRING.fullmatch(argument):
                paths.append(os.path.normpath(os.path.join(folder, strace.decoded(string[1]))))
            descriptor = strace.PATH.search(argument)
            folder = strace.decoded(descriptor[1]) if descriptor else process.folder
        return paths

    def _mentioned(self, process: Process, line: Call) -> list[str]:
        """The paths of a call's descriptors, and others if they decide."""
        paths = [strace.decoded(path) for path in strace.PATH.findall(line.text)]
        return paths + (self._paths(process, line.arguments) if line.call in strace.REFUSED else [])

    def _entry(self, path: str) -> Entry:
        """The number of a path's folder, and its name there; the root is called "" in itself."""
        parent, (*folders, name) = ROOT, os.path.relpath(path, self.root).split("/")
        if name == ".":
            return ROOT, ""
        for folder in folders:
            if (parent, folder) not in self.state.names:
                raise NotModelled(f"{path}: the log does not show how its folder came to be")
            parent = self.state.names[parent, folder]
        return parent, name

    def _number(self, entry: Entry) -> int | None:
        return ROOT if entry == (ROOT, "") else self.state.names.get(entry)

    def _names(
        self, process: Process, line: Call, entries: list[Entry], arguments: list[str]
    ) -> None:
        first, number = entries[0], self._number(entries[0])
        text = f"{line.call} {' '.join(name for _, name in entries)}"
        if line.call in ("openat", "open", "creat"):
            self._open(process, line, first, text)
            return
        if line.call in ("mkdir", "mkdirat"):
            self.count += 1
            self._add(Names(text, ((first, self.count),), new_folder=True))
        elif number is None:
            raise NotModelled(f"{text}: the log does not show how it came to be")
        elif line.call in ("unlink", "unlinkat", "rmdir"):
            self._add(Names(text, ((first, None),)))
        elif line.call in ("link", "linkat"):
            self._add(Names(text, ((entries[1], number),)))
        elif arguments[-1] == "RENAME_EXCHANGE":
            self._add(Names(text, ((first, self._number(entries[1])), (entries[1], number))))
        elif "RENAME_WHITEOUT" in arguments[-1]:
            raise NotModelled(text)
        elif self._number(entries[1]) != number:  # a rename to itself does nothing
            self._add(Names(text, ((first, None), (entries[1], number))))

    def _open(self, process: Process, line: Call, entry: Entry, text: str) -> None:
        flags = "O_CREAT|O_TRUNC" if line.call == "creat" else line.text
        number = self._number(entry)
        if "O_TMPFILE" in flags or (number is None and "O_CREAT" not in flags):
            raise NotModelled(f"{text} with {flags}")
        if number is None:
            self.count += 1
            number = self.count
            self._add(Names(text, ((entry, number),)))
        elif "O_TRUNC" in flags and self.state.contents.get(number):
            self._add(Resize(f"{text} O_TRUNC", number, 0))
        process.opened[line.result] = Opened(number, appends="O_APPEND" in flags)

    # Data

    def _data(self, process: Process, line: Call, arguments: list[str]) -> None:
        descriptor = arguments[0].partition("<")[0]
        opened = process.opened.get(descriptor)
        if opened is None:
            raise NotModelled(f"{line.call} of a descriptor that the log does not show: {line}")
        (path,) = strace.PATH.findall(arguments[0])
        text = f"{line.call} {os.path.basename(strace.decoded(path))}"
        if line.call in strace.WRITES:
            self._write(opened, line, arguments, text)
        elif line.call in ("fsync", "fdatasync"):
            self._add(Sync(text, opened.number))
        elif line.call == "ftruncate":
            self._add(Resize(text, opened.number, int(arguments[1])))
        elif line.call == "fallocate" and arguments[1] == "0":
            end = int(arguments[2]) + int(arguments[3])
            size = len(self.state.contents.get(opened.number, b""))
            self._add(Resize(text, opened.number, max(size, end)))
        elif line.call == "lseek":
            opened.position = int(line.result)
        elif line.call.startswith("dup") or arguments[1].startswith("F_DUPFD"):
            process.opened[line.result] = opened
        elif arguments[1] not in strace.HARMLESS:
            raise NotModelled(f"{line.call} {arguments[1]}")

    def _write(self, opened: Opened, line: Call, arguments: list[str], text: str) -> None:
        data = b"".join(strace.raw(part) for part in strace.STRING.findall(arguments[1]))[
            : int(line.result)
        ]
        if len(data) != int(line.result):
            raise NotModelled(f"{text}: its bytes are not in the log")
        offset = None if line.call in ("write", "writev") else int(arguments[3])
        if offset in (None, -1):
            size = len(self.state.contents.get(opened.number, b""))
            offset = size if opened.appends else opened.position
            opened.position = offset + len(data)
        if data:
            self._add(Write(text, opened.number, offset, data))
