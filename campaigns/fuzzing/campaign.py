"""Give very many inputs to every reader of files from somebody else, guided by their coverage.

A case is a block of inputs of one target, in a process of its own. See docs/untrusted-files.md. A
block needs the extra ``fuzz`` (Atheris); it begins with the targets' valid inputs and the corpus in
``corpus.tar.xz`` in this folder, and its seed decides every input.
"""

import contextlib
import itertools
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

from campaigns.case import Campaign, Case
from campaigns.fuzzing import targets

ROOT = Path(__file__).resolve().parent.parent.parent
CORPUS = ROOT / "campaigns" / "fuzzing" / "corpus.tar.xz"
LONGEST = 1100  # seconds of a block, which ends by itself before that
LARGEST = 16  # times as many inputs as in a target's first block: later ones go deeper


def rounds() -> list[str]:
    """The targets in the order of their blocks, each as often as its share."""
    shares = {name: target.share for name, target in targets.TARGETS.items()}
    most = max(shares.values())
    return [name for turn in range(most) for name, share in shares.items() if turn < share]


def block(number: int) -> tuple[str, int]:
    """The target of a block, and how many inputs it has: twice as many in every round, at most
    :data:`LARGEST` times as many as in the first.
    """
    order = rounds()
    turn, place = divmod(number, len(order))
    name = order[place]
    return name, targets.TARGETS[name].inputs * min(2**turn, LARGEST)


def corpus() -> dict[str, list[bytes]]:
    """The shipped inputs of each target."""
    inputs: dict[str, list[bytes]] = {name: [] for name in targets.TARGETS}
    if CORPUS.is_file():
        with tarfile.open(CORPUS) as archive:
            for member in archive:
                file = archive.extractfile(member)
                name = member.name.rpartition("/")[0]
                if file is not None and name in inputs:
                    inputs[name].append(file.read())
    return inputs


def prepare(shared: Path) -> None:
    """Write the inputs that each target begins with."""
    shipped = corpus()
    for name, target in targets.TARGETS.items():
        folder = shared / name
        folder.mkdir()
        inputs = dict.fromkeys([*target.seeds(), *shipped[name]])
        for number, content in enumerate(inputs):
            (folder / f"{number:05}").write_bytes(content)


def cases(shared: Path, scratch: Path, seed: int, number: int) -> Iterator[Case]:
    """One block: the outcomes of its inputs, and a case for each finding."""
    name, inputs = block(number)
    code = run(name, shared / name, scratch, seed * 1_000_003 + number, inputs)
    result = scratch / "result.json"
    if not result.is_file():
        yield _died(name, scratch, code)
        return
    ended = json.loads(result.read_text())
    facts = {key: ended[key] for key in ("seconds", "checksum", "slowest", "largest")}
    facts |= {"inputs": ended["inputs"], "coverage": _coverage(scratch / "log")}
    for outcome, count in ended["outcomes"].items():
        yield Case(name, outcome, f"{inputs:,} inputs", count=count, facts=facts)
        facts = {}
    for finding in ended["findings"]:
        what = f"{finding['wrong']} for {finding['input'][:200]}"
        yield Case(name, "finding", what, (finding["wrong"],), 0, {"input": finding["input"]})


def run(name: str, inputs: Path, scratch: Path, seed: int, count: int, *options: str) -> int | None:
    """Run a block in a process of its own, with a log in ``scratch``; returns its exit code, or
    None if it hung.
    """
    command = [sys.executable, "-m", "campaigns.fuzzing.block", name, "--corpus", str(inputs)]
    command += ["--scratch", str(scratch), "--seed", str(seed), "--inputs", str(count), *options]
    variables = os.environ | {"PYTHONHASHSEED": "0", "JAX_PLATFORMS": "cpu"}
    with open(scratch / "log", "w") as log, contextlib.suppress(subprocess.TimeoutExpired):
        files = dict(stdout=log, stderr=log)
        return subprocess.run(command, cwd=ROOT, env=variables, timeout=LONGEST, **files).returncode
    return None


def _died(name: str, scratch: Path, code: int | None) -> Case:
    """The finding of a process that died, or hung, with its last input."""
    current = scratch / "current"
    content = current.read_bytes() if current.is_file() else bytes(8)
    last = content[8 : 8 + int.from_bytes(content[:8], "little")]
    log = (scratch / "log").read_text(errors="replace").splitlines()[-5:]
    end = "hung" if code is None else f"died (exit code {code})"
    wrong = f"{name}: the process {end}: {' / '.join(log)[:500]}"
    return Case(name, "finding", wrong, (wrong,), 1, {"input": last.hex()})


def _coverage(log: Path) -> int:
    """The branches that libFuzzer has counted, from the last line that says so."""
    words = log.read_text(errors="replace").split()
    counts = [after for word, after in itertools.pairwise(words) if word == "cov:"]
    return int(counts[-1]) if counts else 0


FUZZ = Campaign(
    "inputs to every reader of files from somebody else, guided by coverage",
    prepare,
    cases,
    small=len(rounds()),
    nightly=6 * len(rounds()),
)
