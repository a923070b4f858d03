"""Several processes that train one run, by ``jax.distributed``: each computes on its own devices,
the first one writes what is not divided, and the error of one ends all.

Every function may be called without a distributed run, which is one process.
"""

import contextlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from jax_transformer import errors
from jax_transformer.config.option import Option

_POLL = 1000
"""Milliseconds between two looks for a signal or for the error of another process."""
_LEAVE = 20
"""Seconds that a process waits for the others at its end."""
_ERROR = "jax_transformer/error"
_rounds: Counter[str] = Counter()


@dataclass(frozen=True)
class DistributedOptions:
    """The processes of the run, as for jax.distributed.initialize."""

    coordinator_address: Annotated[str | None, Option(metavar="HOST:PORT")] = None
    """HOST:PORT at which process 0 coordinates the others."""
    num_processes: int | None = None
    """Number of processes."""
    process_id: int | None = None
    """Number of this process, from 0 on."""
    auto: bool | None = None
    """Ask SLURM, Open MPI, Kubernetes or the TPU for the three above
    (default: if SLURM, Open MPI or GKE started several processes)."""
    heartbeat_timeout: int = 100
    """Seconds until a silent process counts as dead."""

    def __post_init__(self) -> None:
        missing = [f"distributed.{name}" for name in _ADDRESS if getattr(self, name) is None]
        if 0 < len(missing) < len(_ADDRESS) and not self.auto:
            raise errors.ConfigError(f"{', '.join(missing)}: missing; or give distributed.auto")
        counts = "num_processes heartbeat_timeout"
        errors.check_numbers(self, "distributed.", counts, "be at least 1", lambda x: x >= 1)
        if self.process_id is not None and not 0 <= self.process_id < (self.num_processes or 2**31):
            raise errors.ConfigError(
                f"distributed.process_id={self.process_id} must be at least 0 and below "
                f"distributed.num_processes={self.num_processes}"
            )
        if self.coordinator_address and not self.coordinator_address.rpartition(":")[2].isdecimal():
            raise errors.ConfigError(
                f"distributed.coordinator_address={self.coordinator_address}: give HOST:PORT"
            )

    def several(self, environment: Mapping[str, str] = os.environ) -> bool:
        """Return True if the run has several processes: by these options, or by the environment."""
        if self.auto is not None:
            return self.auto
        if self.num_processes is not None:
            return self.num_processes > 1
        for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"):
            count = environment.get(name, "")
            if count.isdecimal() and int(count) > 1:
                return True
        return "," in environment.get("TPU_WORKER_HOSTNAMES", "")


_ADDRESS = ("coordinator_address", "num_processes", "process_id")


@contextlib.contextmanager
def joined(options: DistributedOptions) -> Iterator[None]:
    """Yield a block in which this process is one of several, if the options say so.

    The first error of a process ends the block in all processes that wait for it, with its exit
    code; only that process reports it. Raises ConfigError if the processes do not meet.
    """
    if not options.several():
        yield
        return
    import jax

    # JAX would take SIGTERM away from our handler
    jax.config.update("jax_enable_preemption_service", False)
    address = {name: getattr(options, name) for name in _ADDRESS}
    try:
        jax.distributed.initialize(
            **address,
            heartbeat_timeout_seconds=options.heartbeat_timeout,
            shutdown_timeout_seconds=_LEAVE,
        )
    except (ValueError, RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())[:300]
        raise errors.ConfigError(f"distributed: the processes do not meet: {reason}") from error
    try:
        yield
    except Exception as error:
        if may_be_lost(error) or may_be_lost(error.__cause__):  # JAX ends this process if so
            time.sleep(2 * options.heartbeat_timeout)
        _report(error)
        raise


def leave() -> None:
    """Leave the run, if there is one: wait for the others to leave as well."""
    if count() > 1:
        import jax

        with contextlib.suppress(RuntimeError):  # a process that has died does not leave
            jax.distributed.shutdown()


def may_be_lost(error: BaseException | None) -> bool:
    """Return True for an error that the death of another process may have caused."""
    import jax

    runtime = isinstance(error, jax.errors.JaxRuntimeError)
    return count() > 1 and runtime and not errors.is_out_of_memory(error)


def index() -> int:
    """Return the number of this process, from 0 on."""
    return int(getattr(_state(), "process_id", 0))


def count() -> int:
    """Return the number of processes."""
    return int(getattr(_state(), "num_processes", 1))


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def first() -> bool:
    """Return True for the process that writes what is not divided among all."""
    return index() == 0


def say(message: str) -> None:
    """Print a line on stderr, in the first of several processes."""
    if first():
        try:
            print(message, file=sys.stderr, flush=True)
        except BrokenPipeError:  # its reader has gone: training goes on without it
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def barrier(name: str) -> None:
    """Wait until every process has come here; each of them uses a name in one thread only.

    Raises ReportedError if a process has failed.
    """
    from_first(name, None)


def from_first(name: str, value: Any) -> Any:
    """Return the first process's value, which JSON can hold, for all; also a barrier."""
    if count() == 1:
        return value
    _rounds[name] += 1
    key = f"jax_transformer/{name}/{_rounds[name]}"
    if not first():
        _client().key_value_set(f"{key}/{index()}", "")
        return json.loads(_wait_for(f"{key}/all"))
    for other in range(1, count()):
        _wait_for(f"{key}/{other}")
    _client().key_value_set(f"{key}/all", json.dumps(value))
    return value


def on_host(array: Any) -> Any:
    """Return a JAX array in NumPy, whole, also with parts in other processes: all call this."""
    import numpy as np

    if count() == 1 or array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(array, tiled=True)


def _wait_for(key: str) -> str:
    import jax

    while True:
        try:
            return str(_client().blocking_key_value_get(key, _POLL))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
        if (code := _reported()) is not None:
            raise errors.ReportedError(code)


def _reported() -> int | None:
    """Return the exit code of the first process that failed; None if none did."""
    import jax

    try:
        return int(_client().key_value_try_get(_ERROR))
    except jax.errors.JaxRuntimeError:
        return None


def _report(error: Exception) -> None:
    """Tell the other processes of an error. Raises ReportedError if another one was first."""
    import jax

    if isinstance(error, errors.ReportedError):
        return
    code = errors.InputError.exit_code if isinstance(error, OSError) else 1
    code = errors.ConfigError.exit_code if errors.is_out_of_memory(error) else code
    try:
        _client().key_value_set(_ERROR, str(getattr(error, "exit_code", code)))
    except jax.errors.JaxRuntimeError:
        if (before := _reported()) is not None and isinstance(error, errors.Refusal):
            raise errors.ReportedError(before) from error


def _client() -> Any:
    return _state().client  # there are several processes


def _state() -> Any:
    """JAX's state of a distributed run, as Orbax finds it; None for a single process."""
    distributed = sys.modules.get("jax._src.distributed")
    if distributed is None or distributed.global_state.client is None:
        return None
    return distributed.global_state
