"""A server that forks the processes that are interrupted after it has imported everything.

``python -m campaigns.interruptions.fork_server SOCKET`` imports the package, JAX and Orbax, but no
device, so that it has no threads. Every request becomes a process that goes on as :mod:`.child`
does after its imports: it costs no start of an interpreter.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

MODULES = (
    "jax_transformer.cli jax_transformer.training.recipe jax_transformer.training.run "
    "jax_transformer.training.curves grain sacrebleu tokenizers"
).split()
"""The modules that a run imports before it asks JAX for its devices."""
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
READY = 300.0
"""Seconds that the server may take for its imports."""


class Command(NamedTuple):
    """A call of ``jax_transformer``."""

    arguments: Sequence[str]
    task: Mapping[str, Any] | None
    """The fields of :class:`.reports.Task`; None if nothing is reported."""
    cwd: Path
    environment: Mapping[str, str]
    pipe: int | None = None


class ForkServer:
    """The server's side in the process of the campaign."""

    def __init__(self, environment: Mapping[str, str]):
        self._folder = tempfile.TemporaryDirectory(prefix="interruptions-fork-")
        self._path = str(Path(self._folder.name) / "socket")
        command = [sys.executable, "-m", "campaigns.interruptions.fork_server", self._path]
        self._server = subprocess.Popen(command, env=dict(environment), stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + READY
        while not os.path.exists(self._path):
            if self._server.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the server that forks processes did not start")
            time.sleep(0.05)

    def start(self, command: Command) -> "Forked":
        """Start ``jax_transformer`` in a process of its own."""
        return Forked(self._path, command)

    def close(self) -> None:
        self._server.kill()
        self._server.wait()
        self._folder.cleanup()


class Forked:
    """A forked process, with the part of ``subprocess.Popen`` that the campaign uses."""

    def __init__(self, path: str, command: Command, process: "Forked | None" = None):
        """``process`` runs the command, if that has no process of its own."""
        self.returncode: int | None = None
        self._process = process
        self._lock = threading.Lock()
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.connect(path)
        arguments, task, cwd, environment, pipe = command
        request = [list(arguments), task, str(cwd), dict(environment)]
        pipes = [os.pipe(), os.pipe()]  # not files: the task may limit the size of those
        descriptors = [writer for _, writer in pipes] + ([] if pipe is None else [pipe])
        socket.send_fds(self._connection, [json.dumps(request).encode()], descriptors)
        self._readers = ThreadPoolExecutor(2)
        self._texts = [self._readers.submit(_read, reader) for reader, _ in pipes]
        for _, writer in pipes:
            os.close(writer)
        self.pid = int(self._connection.recv(64))

    def poll(self) -> int | None:
        """The exit code as of Popen; None while the process runs."""
        with self._lock:
            if self.returncode is None and select.select([self._connection], [], [], 0)[0]:
                code = self._connection.recv(64)
                if not code and self._process is not None:  # it has died
                    self.returncode = self._process.wait(READY)
                else:
                    self.returncode = int(code)
                    self._connection.send(b"seen")  # now the server lets go of the number
            return self.returncode

    def wait(self, timeout: float) -> int:
        """The exit code. Raises TimeoutExpired."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired("a forked process", timeout)
            select.select([self._connection], [], [], min(left, 0.5))
        return code

    def send_signal(self, number: int) -> None:
        with self._lock:
            if self.returncode is None:  # its number is its own until we know of its end
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Standard output and error after the end. Raises TimeoutExpired."""
        self.wait(float("inf") if timeout is None else timeout)
        self._connection.close()
        out, err = (text.result() for text in self._texts)
        self._readers.shutdown()
        return out, err


def _read(descriptor: int) -> str:
    with open(descriptor, encoding="utf-8", errors="replace") as file:
        return file.read()


# In the server


class Request(NamedTuple):
    """A command that is to run."""

    arguments: list[str]
    task: dict[str, Any] | None
    cwd: str
    environment: dict[str, str]
    descriptors: list[int]
    """Standard output and error, and the pipe of the task."""


def listen(path: str) -> socket.socket:
    """A socket at ``path``, which appears when it answers."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"{path}.new")
    listener.listen(64)
    os.rename(f"{path}.new", path)
    return listener


def received(connection: socket.socket) -> Request:
    """The request of a connection."""
    message, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    arguments, task, cwd, environment = json.loads(message)
    if task is not None:
        task["pipe"] = descriptors[2]
    return Request(arguments, task, cwd, environment, descriptors)


def requests(path: str) -> Iterator[Request]:
    """Yield the request in every forked process, once; the server itself never ends."""
    listener = listen(path)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the keepers need no wait
    while True:
        connection, _ = listener.accept()
        if os.fork():
            connection.close()
            continue
        _die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        listener.close()
        request = received(connection)
        child = os.fork()
        if not child:
            _die_with_parent()
        else:
            for descriptor in request.descriptors:
                os.close(descriptor)
            _keep(child, connection)
        connection.close()
        become(request)
        yield request
        return


def _die_with_parent() -> None:
    """Have this process killed when the one that started it ends: nothing is left of a campaign."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _keep(child: int, connection: socket.socket) -> None:
    """Report the child's number and its exit code, and let go of both when the client knows."""
    connection.send(str(child).encode())
    ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    with contextlib.suppress(OSError):
        connection.send(str(code).encode())
        connection.recv(64)
    os._exit(0)


def become(request: Request) -> None:
    """Have the standard streams, the folder and the environment of a process of its own."""
    for number, descriptor in enumerate(request.descriptors[:2], 1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(request.cwd)
    os.environ.clear()
    os.environ.update(request.environment)
    import jax

    cache = request.environment["JAX_COMPILATION_CACHE_DIR"]
    jax.config.update("jax_compilation_cache_dir", cache)


def main() -> None:
    from campaigns.interruptions import child, resident

    _die_with_parent()
    for name in MODULES:
        importlib.import_module(name)
    from orbax.checkpoint import v1  # noqa: F401

    gc.collect()
    gc.freeze()
    for request in requests(sys.argv[1]):
        if request.arguments[0] == resident.SERVE:
            resident.serve(request.arguments[1])
        child.forked(request.arguments, request.task)


if __name__ == "__main__":
    main()
