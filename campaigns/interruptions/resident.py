"""A process that runs one command after another.

It has imported everything and compiled or read every program, so that a start costs no more than
its work. It is forked by the server of :mod:`.fork_server`, and takes the same requests.
"""

import atexit
import functools
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from campaigns.interruptions import (
    child,
    fork_server,
    kept_programs,
    processes,
    reports,
    system_calls,
)
from campaigns.interruptions.fork_server import READY, Command, Forked, ForkServer

COMPILED = "compiled"
"""The folder of compiled programs."""
SERVE = "serve"
"""The command that makes a forked process one of these."""
GOES_ON = (0, 3, 5, 75)
"""Exit codes after which the process can run another command, in another folder."""


class Resident:
    """Starts commands as a :class:`ForkServer` does, in a process that stays."""

    def __init__(self, server: ForkServer, environment: Mapping[str, str]):
        self._server, self._environment = server, environment
        self._folder = tempfile.TemporaryDirectory(prefix="interruptions-resident-")
        self._process: Forked | None = None
        self._command: Forked | None = None
        self.begun = 0
        """The number of processes so far."""

    def start(self, command: Command) -> Forked:
        """Start a command as :meth:`ForkServer.start` does.

        A new process begins if the last command has ended the former one, or could not end as it
        should.
        """
        if self._command is not None and self._command.returncode not in GOES_ON:
            self.close()
        if self._process is None or self._process.poll() is not None:
            self._begin()
        self._command = Forked(self._path, command, self._process)
        return self._command

    @property
    def _path(self) -> str:
        return str(Path(self._folder.name) / str(self.begun))

    def _begin(self) -> None:
        self.begun += 1
        command = Command([SERVE, self._path], None, Path(self._folder.name), self._environment)
        self._process = self._server.start(command)
        deadline = time.monotonic() + READY
        while not os.path.exists(self._path):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no process that stays: {self._process.communicate(0)[1]}")
            time.sleep(0.01)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


@functools.cache
def server_of(compiled: Path) -> ForkServer:
    """The server of this process that forks the runs."""
    server = ForkServer(processes.environment(compiled))
    atexit.register(server.close)
    return server


@functools.cache
def resident_of(compiled: Path) -> Resident:
    """The starter of this process whose runs share one process."""
    return Resident(server_of(compiled), processes.environment(compiled))


def serve(path: str) -> None:
    """Run the command of each request in this process. Never returns."""
    from jax_transformer import cli

    nowhere = os.open(os.devnull, os.O_RDWR)
    pipe, watch = child.prepare(reports.Task(nowhere))
    child.wrap(pipe, watch)
    listener = fork_server.listen(path)
    with kept_programs.shared_programs():
        while True:
            connection, _ = listener.accept()
            request = fork_server.received(connection)
            connection.send(str(os.getpid()).encode())
            fork_server.become(request)
            assert request.task is not None
            pipe.aim(reports.Task(**request.task))
            watch.aim()
            pipe.begin("imports")
            code = cli.main(request.arguments)
            sys.stdout.flush()
            sys.stderr.flush()
            pipe.aim(None)
            os.close(request.task["pipe"])
            system_calls.limit_files(None)
            for number in (1, 2):
                os.dup2(nowhere, number)
            connection.send(str(code).encode())
            connection.recv(64)
            connection.close()
