"""Several processes train one run: options, errors and deaths, and two real ones."""

import itertools
import pickle
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jax_transformer import cli
from jax_transformer.errors import CheckpointError, ConfigError, ReportedError
from jax_transformer.runtime import distributed, supervisor
from jax_transformer.runtime.distributed import DistributedOptions
from jax_transformer.storage import checkpoint
from parity_tests.unit import helpers, runs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((None, 2), "distributed.coordinator_address, distributed.process_id: missing"),
        ((None, 2, None, False), "missing; or give distributed.auto"),
        (("a:1", 2, 2), "must be at least 0 and b"),
        (("a", 2, 0), "give HOST:PORT"),
        (("a:1", 0, 0), "must be at least 1"),
        (("a:1", 2, 0, None, 0), "heartbeat_timeout=0 must be at least 1"),
    ],
)
def test_options_that_describe_no_run_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        DistributedOptions(*options)


@pytest.mark.parametrize(
    ("environment", "several"),
    [
        ({}, False),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, False),  # a batch script, not a step of srun
        ({"SLURM_STEP_NUM_TASKS": "1"}, False),
        ({"SLURM_STEP_NUM_TASKS": "4"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, True),
        ({"TPU_WORKER_HOSTNAMES": "a"}, False),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "x"}, False),
    ],
)
def test_only_a_launcher_of_several_processes_begins_a_distributed_run(environment, several):
    assert DistributedOptions().several(environment) is several
    assert not DistributedOptions(auto=False).several(environment)
    assert DistributedOptions(auto=True).several(environment)
    assert DistributedOptions(auto=True, process_id=1).several(environment), "the rest is asked for"
    for count in (1, 2):
        named = DistributedOptions("a:1", num_processes=count, process_id=0)
        assert named.several(environment) is (count == 2)


@pytest.mark.parametrize("count", [1, 2])
def test_an_error_of_the_runtime_may_be_the_death_of_another_process(count, monkeypatch):
    monkeypatch.setattr(distributed, "count", lambda: count)
    lost = jax.errors.JaxRuntimeError("UNAVAILABLE: connection reset")
    full = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
    assert distributed.may_be_lost(lost) == (count > 1)
    assert not any(map(distributed.may_be_lost, (full, ValueError(), None)))


def test_one_process_waits_for_nobody():
    assert (distributed.index(), distributed.count(), distributed.first()) == (0, 1, True)
    distributed.barrier("anything")
    assert distributed.from_first("anything", [1]) == [1]


class Store:
    """The coordinator of processes that are threads: values that are set once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, processes: int):
        self.values: dict[str, str] = {}
        self.thread, self.processes = threading.local(), processes
        monkeypatch.setattr(distributed, "_POLL", 20)
        monkeypatch.setattr(distributed, "_state", lambda: self.thread.state)
        monkeypatch.setattr(distributed, "_rounds", self)

    def __getitem__(self, name: str) -> int:
        return self.thread.rounds[name]

    def __setitem__(self, name: str, value: int) -> None:
        self.thread.rounds[name] = value

    def key_value_set(self, key: str, value: str) -> None:
        if self.values.setdefault(key, value) is not value:
            raise jax.errors.JaxRuntimeError("ALREADY_EXISTS")

    def blocking_key_value_get(self, key: str, wait: int) -> str:
        time.sleep(0 if key in self.values else wait / 1000)
        return self.key_value_try_get(key, "DEADLINE_EXCEEDED")

    def key_value_try_get(self, key: str, error: str = "NOT_FOUND") -> str:
        if key not in self.values:
            raise jax.errors.JaxRuntimeError(error)
        return self.values[key]

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """The results of all processes, or their errors."""

        def one(index: int) -> Any:
            names = dict(process_id=index, num_processes=self.processes, client=self)
            self.thread.state, self.thread.rounds = SimpleNamespace(**names), Counter[str]()
            try:
                return work(index)
            except Exception as error:
                return error

        with ThreadPoolExecutor(self.processes) as pool:
            return list(pool.map(one, range(self.processes)))


def test_all_wait_for_each_other_and_take_the_first_one_s_value(monkeypatch):
    """Again and again by the same name."""
    arrived: list[int] = []

    def work(index: int) -> list[tuple]:
        rounds = []
        for number in range(3):
            time.sleep(0.02 * index)
            arrived.append(number)
            value = distributed.from_first("x", [index, number])
            rounds.append((value, arrived.count(number)))
        return rounds

    expected = [([0, number], 3) for number in range(3)]
    assert Store(monkeypatch, 3).run(work) == [expected] * 3


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (CheckpointError("x"), 5),
        (OSError(28, "No space left on device"), 3),
        (MemoryError(), 2),
        (ValueError("x"), 1),
    ],
)
def test_the_first_error_of_a_process_is_the_exit_code_of_all(monkeypatch, error, code):
    """Those that wait end with it; a refusal of another one is not reported as well."""

    def work(index: int) -> None:
        if index == 1:
            return distributed._report(error)
        with pytest.raises(ReportedError) as ended:
            distributed.barrier("x")
        distributed._report(ended.value)
        distributed._report(ValueError("its own fault"))
        if index == 2:
            distributed._report(ConfigError("too late"))
        raise ended.value

    first, reporting, refused = Store(monkeypatch, 3).run(work)
    assert (first.exit_code, reporting, refused.exit_code) == (code, None, code)
    assert isinstance(refused.__cause__, ConfigError)


def test_only_the_first_process_speaks(monkeypatch, capsys):
    Store(monkeypatch, 2).run(lambda index: distributed.say(f"process {distributed.index()}"))
    assert capsys.readouterr().err == "process 0\n"


def test_processes_meet_as_the_options_say(monkeypatch):
    asked: dict[str, Any] = {}
    monkeypatch.setattr(jax.distributed, "initialize", lambda **options: asked.update(options))
    before = jax.config.jax_enable_preemption_service
    options = DistributedOptions("host:1", 4, 3, heartbeat_timeout=7)
    with distributed.joined(options):
        assert jax.config.jax_enable_preemption_service is False, "SIGTERM stays ours"
    monkeypatch.setattr(distributed, "count", lambda: 2)
    monkeypatch.setattr(distributed, "_report", lambda error: None)
    slept: list[int] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    for error in (ValueError("x"), jax.errors.JaxRuntimeError("UNAVAILABLE: connection reset")):
        with pytest.raises(type(error)), distributed.joined(options):
            raise error
    assert slept == [14], "JAX ends this process meanwhile if another one has died"
    jax.config.update("jax_enable_preemption_service", before)
    expected = dict(coordinator_address="host:1", num_processes=4, process_id=3)
    expected |= dict(heartbeat_timeout_seconds=7, shutdown_timeout_seconds=20)
    assert asked == expected


# The parent of a process


SUPERVISED = """
import os, signal, sys, time
from jax_transformer.cli import supervisor
from jax_transformer.errors import LostProcessError

def work():
    {work}

before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
try:
    code = supervisor.supervise()
except LostProcessError as error:
    print(error.exit_code, error)
else:
    if code is None:
        supervisor.end(work())
    else:
        print("code", code)
        assert before == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
"""
UNHEALTHY = (
    "E1127 20:13:18.4 33 coordination_service.cc:1549] The following tasks are unhealthy:",
    "1",
    "The tasks have crashed. Check the task logs for an earlier error",
)
FATAL = (
    *UNHEALTHY,
    "E1127 20:13:18.4 33 coordination_service_agent.cc:289] Polled an error",
    "F1127 20:13:18.4 33 client.h:80] The JAX distributed service detected fatal errors",
    "*** Check failure stack trace: ***",
)
OTHERS = "step 3\n1\nW1127 20:13:19.0 33 a.cc:1] a warning of XLA\n"


@pytest.mark.parametrize(
    ("work", "out", "err"),
    [
        ("print('out'); print('err', file=sys.stderr); return 3", "out\ncode 3\n", "err\n"),
        ("os.write(2, b'a warning of XLA\\n'); return 0", "code 0\n", "a warning of XLA\n"),
        (
            f"os.write(2, {chr(10).join((*UNHEALTHY, OTHERS)).encode()!r}); return 0",
            "code 0\n",
            OTHERS,
        ),
        ("os.kill(os.getpid(), signal.SIGKILL)", "code 137\n", ""),
        (
            f"os.write(2, {chr(10).join(FATAL).encode()!r}); os.abort()",
            "8 another process of this run has died; started again everywhere, the same command "
            "continues from the last checkpoint\n",
            "",
        ),
        ("raise ValueError('a fault')", "code 1\n", "ValueError: a fault\n"),
    ],
)
def test_the_parent_ends_as_its_child(work, out, err):
    done = runs.python("-c", SUPERVISED.format(work=work))
    assert done.stdout == out
    assert done.stderr == err or ("Traceback" in done.stderr and done.stderr.endswith(err))


@pytest.mark.parametrize(("code", "result"), [(0, 0), (8, 8), (None, 5)])
def test_only_the_child_runs_the_command(code, result, monkeypatch):
    options = SimpleNamespace(distributed=DistributedOptions(auto=True))
    command = SimpleNamespace(kind=None, calls_started=True, run=lambda _: 5)
    monkeypatch.setattr(cli, "COMMANDS", {"train": command})
    monkeypatch.setattr(cli, "parse", lambda *_: options)
    monkeypatch.setattr(supervisor, "supervise", lambda: code)
    assert cli.main(["train"]) == result


def test_the_parent_passes_signals_on_and_its_death_ends_the_child():
    work = """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os.write(1, b"%d\\n" % number))
    print("ready", flush=True)
    while True:
        time.sleep(60)
"""
    with runs.start(program=("-c", SUPERVISED.format(work=work.strip()))) as process:
        assert process.stdout.readline() == "ready\n"
        for number in (signal.SIGTERM, signal.SIGINT):
            process.send_signal(number)
            assert process.stdout.readline() == f"{number.value}\n"
        process.kill()
        began = time.monotonic()
        assert process.stdout.read() == ""  # the pipe is closed when the child has ended
        assert time.monotonic() - began < 30


TRAIN = (str(runs.ROOT / "train.py"),)


class Processes:
    """Some processes with four devices together, which train in one folder."""

    def __init__(
        self, run: Path, arguments: list[str], count: int = 2, program: tuple[str, ...] = TRAIN
    ):
        self.run = run
        flags = [f"coordinator-address=127.0.0.1:{runs.free_port()}", f"num-processes={count}"]
        command = ["--run", run, *arguments]
        command += [f"--distributed.{flag}" for flag in (*flags, "heartbeat-timeout=8")]
        env = runs.environment() | {"JAX_NUM_CPU_DEVICES": str(4 // count), "JAX_ENABLE_X64": "0"}
        self.processes = [
            runs.start(*command, f"--distributed.process-id={i}", program=program, env=env)
            for i in range(count)
        ]

    def wait_for_step(self, step: int) -> None:
        """Wait until metrics.jsonl has a line of a later step."""
        deadline = time.monotonic() + 240
        metrics = self.run / "metrics.jsonl"
        while not metrics.exists() or f'"step": {step + 1},' not in metrics.read_text():
            ended = [process for process in self.processes if process.poll() is not None]
            assert not ended and time.monotonic() < deadline, self.end()
            time.sleep(0.05)

    def end(self) -> list[tuple[int, str, list[str]]]:
        """Exit code, standard output and lines of standard error of each."""
        ended = []
        for process in self.processes:
            try:
                out, err = process.communicate(timeout=300)
            finally:
                process.kill()
            # Gloo's threads write their lines piece by piece, so two may be mixed
            lines = [x for x in out.splitlines() if "[Gloo]" not in x and "peer ranks" not in x]
            ended.append((process.returncode, "\n".join(lines), err.splitlines()))
        return ended


def stopped(run: Path) -> int:
    """The step of the newest checkpoint, whose files are as its manifest says."""
    newest = max(checkpoint.steps(run / "checkpoints"))
    assert int(checkpoint.open(run / "checkpoints", newest).arrays({"step"})["step"]) == newest
    return newest


@pytest.fixture(scope="module")
def arguments(tmp_path_factory) -> list[str]:
    return [*runs.write_text(tmp_path_factory.mktemp("text")), *runs.OPTIONS]


pytestmark = pytest.mark.usefixtures("as_a_user")


def after_a_stop(run: Path, arguments: list[str]) -> int:
    """Stop two processes, whose weights are divided, and return the step of their checkpoint."""
    pair = Processes(run, [*arguments, "--mesh.fsdp", "4"])
    pair.wait_for_step(3)
    pair.processes[1].send_signal(signal.SIGTERM)
    (code, out, err), (code_1, out_1, err_1) = pair.end()
    assert (code, code_1, out, out_1) == (75, 75, "", ""), (err, err_1)
    step = stopped(run)
    message = f"jax-transformer: stopped at step {step}, saved in {run}; the same command continues"
    assert sum(line.startswith(message) for line in (*err, *err_1)) == 1
    assert [line["step"] for line in runs.metrics(run)] == [*range(1, step + 1)]
    return step


def test_two_processes_stop_as_one_and_one_process_resumes(arguments, tmp_path, tmp_path_factory):
    step = after_a_stop(tmp_path / "run", arguments)
    result = runs.train("--run", tmp_path / "run", *arguments)
    assert result.code == 0 and f"continuing at step {step}" in result.err, result.err
    assert stopped(tmp_path / "run") == runs.STEPS
    expected = runs.metrics(runs.trained(tmp_path_factory.getbasetemp()).path)
    for ours, theirs in zip(runs.metrics(tmp_path / "run"), expected, strict=True):
        assert ours["step"] == theirs["step"]
        if "loss" in theirs and ours["step"] <= 20:  # the same batches; rounding grows later
            rel = 1e-5 if ours["step"] <= step else 1e-3
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=rel)


@pytest.mark.slow
@pytest.mark.parametrize("dying", [0, 1])
def test_the_death_of_one_process_ends_the_other(arguments, tmp_path, dying):
    """They resume with the weights divided in another way, and the checkpoint stays."""
    run = tmp_path / "run"
    step = after_a_stop(run, arguments)
    before = runs.arrays(run, step)
    pair = Processes(run, [*arguments, "--mesh.fsdp", "2", "--mesh.tensor", "2"])
    pair.wait_for_step(step + 3)
    pair.processes[dying].kill()
    code, _, err = pair.end()[1 - dying]
    assert code == 8 and err[-1].startswith("jax-transformer: another process of this run has died")
    if dying == 1:  # only the first process says it
        assert f"continuing at step {step}" in err
    assert not [line for line in err if "Trace" in line]
    assert runs.differing(runs.arrays(run, step), before) == []


@pytest.mark.slow
def test_a_refusal_of_one_process_is_the_exit_code_of_all(arguments, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "file").touch()
    ended = Processes(tmp_path / "run", arguments).end()
    assert [code for code, _, _ in ended] == [2, 2]
    (line,) = [line for _, _, err in ended for line in err]
    assert "is not a run folder" in line


# State and arithmetic of several processes with four devices together, in float64

JOIN = """
import runpy, sys, jax
path, address, count, index = sys.argv[1:]
jax.distributed.initialize(address, int(count), int(index))
runpy.run_module("parity_tests.unit.on_meshes", run_name="__main__")
"""


def results_of(count: int, cases: list[tuple], folder: Path) -> list[dict[tuple, Any]]:
    """The results of the cases of :mod:`on_meshes` in each of ``count`` processes."""
    folder.mkdir()
    (folder / "cases").write_text(repr(cases))
    address, started = f"127.0.0.1:{runs.free_port()}", []
    variables = {"JAX_NUM_CPU_DEVICES": str(4 // count), "JAX_ENABLE_X64": "1"}
    for i in range(count):
        with open(folder / "cases") as stdin, open(folder / f"errors-{i}", "w") as stderr:
            program = ("-c", JOIN, str(folder / f"{i}"), address, str(count), str(i))
            options = dict(stdin=stdin, stdout=subprocess.DEVNULL, stderr=stderr)
            env = runs.environment() | variables
            started.append(runs.start(program=program, env=env, **options))
    codes = [process.wait(timeout=900) for process in started]
    errors = [(folder / f"errors-{i}").read_text() for i in range(count)]
    assert codes == [0] * count, "\n".join(errors)
    return [pickle.loads((folder / f"{i}").read_bytes()) for i in range(count)]


@pytest.mark.slow
def test_axes_across_processes_make_the_updates_of_one_device(tmp_path):
    """Layout and bytes are those of one process with four devices (test_mesh.py)."""
    one_case = ("updates", "small", (1, 1, 1))
    one = results_of(1, [one_case], tmp_path / "one")[0][one_case]
    cases = [("updates", "small", mesh) for mesh in ((1, 4, 1), (2, 2, 1), (1, 2, 2), (1, 1, 4))]
    for results in results_of(2, cases, tmp_path / "two"):
        for case in cases:
            several = results[case]
            assert several["programs"] == 1
            np.testing.assert_allclose(several["losses"], one["losses"], rtol=0, atol=1e-13)
            for name, array in one["arrays"].items():
                assert helpers.furthest(several["arrays"][name], array) <= 1e-9, name


@pytest.mark.slow
def test_a_state_is_the_same_for_any_number_of_processes(tmp_path):
    """A run goes from one process to two and back, each time to another mesh."""
    parts = [(1, (2, 2, 1)), (2, (1, 4, 1)), (2, (1, 2, 2)), (1, (1, 1, 1))]
    results = []
    for began, (count, mesh) in enumerate(parts):
        case = ("saved", str(tmp_path / "run"), mesh, began)
        first, *others = (
            each[case] for each in results_of(count, [case], tmp_path / f"part-{began}")
        )
        assert all(other == first for other in others)
        assert first["loaded"] == first["ends"] != first["begins"]
        results.append(first)
    for before, after in itertools.pairwise(results):
        assert after["begins"] == before["ends"]


@pytest.mark.slow
def test_runs_go_from_one_process_to_two_and_back(arguments, tmp_path):
    """Data, validations, translations and averages agree to rounding, whoever computes them."""
    one, two = tmp_path / "one", tmp_path / "two"
    arguments = [*runs.with_option(arguments, "--eval-every", 4), "--average", "2"]
    first, longer = (runs.with_option(arguments, "--steps", steps) for steps in (8, 12))
    done = runs.train("--run", one, *first)
    assert done.code == 0, done.err
    ended = Processes(two, [*first, "--mesh.fsdp", "4"]).end()
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert "average of 2 checkpoints (4, 8)  validation loss" in "\n".join(ended[0][2])
    done = runs.train("--run", two, *longer)
    assert done.code == 0 and "continuing at step 8" in done.err, done.err
    ended = Processes(one, [*longer, "--mesh.fsdp", "2", "--mesh.tensor", "2"]).end()
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert "continuing at step 8" in ended[0][2]
    assert stopped(one) == stopped(two) == 12
    for ours, theirs in zip(runs.metrics(two), runs.metrics(one), strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            if isinstance(value, float):
                assert ours[name] == pytest.approx(value, rel=1e-4), (theirs["step"], name)
            else:
                assert ours[name] == value


READS = """
import os, sys
from jax_transformer import cli
from jax_transformer.data import batches, prepared
from jax_transformer.runtime import distributed

batches.WINDOW, folder, take = 1, sys.argv.pop(1), prepared.PreparedPairs.take

def recorded(self, numbers):
    with open(f"{folder}/{distributed.index()}", "a") as file:
        print(*numbers, file=file)
    return take(self, numbers)

prepared.PreparedPairs.take = recorded
cli.process("train")
"""


@pytest.mark.slow
def test_a_prepared_corpus_is_read_alike_by_1_2_4_and_1_processes(arguments, tmp_path):
    """Each reads its rows and no others; the losses are those of one process that never stops."""
    text, corpus = len(arguments) - len(runs.OPTIONS), tmp_path / "corpus"
    named, options = arguments[:text], [*arguments[text:], "--data.prepared", corpus]
    vocabulary = options.index("--data.vocab-size")
    assert runs.main("prepare", corpus, *named, *options[vocabulary : vocabulary + 2]) == 0
    del options[vocabulary : vocabulary + 2]
    options = runs.with_option([*options, "--optimizer.schedule", "constant"], "--eval-every", 4)

    def train(run: Path, count: int, steps: int) -> list[str]:
        """The pairs of each step, in the order of the processes whose rows they are."""
        reads = run.with_name(f"{run.name}-{steps}")
        reads.mkdir()
        more = runs.with_option(options, "--steps", steps)
        ended = Processes(run, more, count, ("-c", READS, str(reads))).end()
        assert [code for code, _, _ in ended] == [0] * count, ended
        lines = [(reads / f"{i}").read_text().splitlines() for i in range(count)]
        return [" ".join(step).strip() for step in zip(*lines, strict=True)]

    read = [train(tmp_path / "run", *part) for part in ((1, 4), (2, 8), (4, 12), (1, 16))]
    assert list(itertools.chain(*read)) == train(tmp_path / "one", 1, 16)
    for ours, theirs in zip(*map(runs.metrics, (tmp_path / "run", tmp_path / "one")), strict=True):
        assert ours.keys() == theirs.keys() and ours["step"] == theirs["step"]
        for name in theirs.keys() & {"loss", "valid_loss"}:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5), (theirs["step"], name)
