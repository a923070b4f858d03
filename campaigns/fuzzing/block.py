"""One block of fuzzing: a number of inputs for one target, found by their coverage.

``python -m campaigns.fuzzing.block TARGET --corpus FOLDER --scratch FOLDER --seed S --inputs N`` is
what the campaign ``fuzz`` starts, in a process of its own. Needs the extra ``fuzz`` (Atheris,
Python's libFuzzer). The same seed and corpus give the same inputs.
"""

import argparse
import json
import mmap
import os
import resource
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections import Counter
from pathlib import Path
from random import Random

import atheris

with atheris.instrument_imports(include=["jax_transformer", "wave", "chunk"]):
    from campaigns.fuzzing import harness, targets

    targets.TARGETS.get(sys.argv[1])

ROOM = 600_000_000  # bytes of address space, beyond what is used when the block begins
HANGS = 60  # seconds
LONGEST = 900  # seconds, after which a block ends with fewer inputs, as on a busy machine
_SHM = Path("/dev/shm")


class Block:
    """Reads inputs until their number is reached, and writes what became of them."""

    def __init__(self, name: str, scratch: Path, inputs: int, folder: Path) -> None:
        self.name, self.scratch, self.inputs = name, scratch, inputs
        self.watcher = harness.Watcher(targets.TARGETS[name], folder)
        self.outcomes: Counter[str] = Counter()
        self.findings: dict[str, tuple[str, bytes]] = {}
        self.count = self.checksum = 0
        self.began = time.monotonic()
        self._stderr = 0
        # The input that is read, for a process that dies over it
        with open(scratch / "current", "wb") as file:
            file.truncate(8 + self.watcher.target.longest)
        with open(scratch / "current", "r+b") as file:
            self._current = mmap.mmap(file.fileno(), 0)

    def __call__(self, content: bytes) -> None:
        """Read one input; called by libFuzzer."""
        if not self.count:
            self._separate_stderr()
        self.count += 1
        self.checksum = zlib.crc32(content, self.checksum)
        self._current[: 8 + len(content)] = len(content).to_bytes(8, "little") + content
        verdict = self.watcher.judge(content)
        wrong = verdict.wrong or self._printed()
        if wrong:
            self.outcomes["finding"] += 1
            kind = harness.kind_of(wrong)
            if kind not in self.findings or len(content) < len(self.findings[kind][1]):
                self.findings[kind] = (wrong, content)
        else:
            self.outcomes[verdict.outcome] += 1
        if self.count >= self.inputs or time.monotonic() - self.began > LONGEST:
            self._end()

    def _separate_stderr(self) -> None:
        """Give the reader a standard error of its own; libFuzzer has a copy of the former."""
        path = self.scratch / "stderr"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 2)
        os.close(file)

    def _printed(self) -> str:
        size = os.fstat(2).st_size
        if size == self._stderr:
            return ""
        text = (self.scratch / "stderr").read_bytes()[self._stderr : self._stderr + 200]
        self._stderr = size
        return f"stderr: {text!r}"

    def _end(self) -> None:
        """Reduce the findings, write the results, and end the process."""
        seconds = time.monotonic() - self.began
        findings = []
        for kind, (wrong, content) in self.findings.items():
            small = harness.reduced(content, lambda part, kind=kind: self._is_same(part, kind))
            findings.append({"wrong": wrong, "input": small.hex()})
        result = {
            "inputs": self.count,
            "seconds": round(seconds, 2),
            "checksum": self.checksum,
            "slowest": round(self.watcher.slowest, 3),
            "largest": self.watcher.largest,
            "outcomes": self.outcomes,
            "findings": findings,
        }
        temporary = self.scratch / "result.new"
        temporary.write_text(json.dumps(result))
        temporary.rename(self.scratch / "result.json")
        os._exit(0)

    def _is_same(self, content: bytes, kind: str) -> bool:
        judge = self.watcher.traced if kind == "memory" else self.watcher.untraced
        wrong = judge(content).wrong or self._printed()
        return bool(wrong) and harness.kind_of(wrong) == kind


def bound_memory() -> None:
    """Bound the address space, so that a large allocation fails instead of filling the machine."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _entry(word: bytes) -> str:
    """A word as a line of libFuzzer's dictionaries."""
    return '"' + "".join(f"\\x{byte:02x}" for byte in word) + '"\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--corpus", type=Path, required=True, help="inputs to begin with")
    parser.add_argument("--scratch", type=Path, required=True, help="folder for the results")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--inputs", type=int, required=True)
    parser.add_argument("--new", type=Path, help="folder for inputs of new coverage")
    options = parser.parse_args()
    warnings.simplefilter("error")
    with tempfile.TemporaryDirectory(dir=_SHM if _SHM.is_dir() else None) as folder:
        block = Block(options.target, options.scratch, options.inputs, Path(folder))
        bound_memory()
        target, draw = block.watcher.target, Random(options.seed)

        def mutate(content: bytes, longest: int, seed: int) -> bytes:
            flat = lambda part: atheris.Mutate(part, max(longest, len(part)))  # noqa: E731
            try:
                changed = target.mutate(draw, content, flat)
            except BaseException:  # libFuzzer would wait for the end of a process that cannot end
                traceback.print_exc()
                os._exit(3)
            return changed if len(changed) <= longest else changed[:longest]

        dictionary = options.scratch / "words"
        dictionary.write_text("".join(map(_entry, target.words)))
        seeds = options.scratch / "seeds"
        seeds.write_text(",".join(map(str, sorted(options.corpus.iterdir()))))
        arguments = [
            sys.argv[0],
            f"-seed={options.seed % 2**32 or 1}",
            f"-max_len={target.longest}",
            f"-timeout={HANGS}",
            f"-artifact_prefix={options.scratch}/",
            *([f"-dict={dictionary}"] if target.words else []),
            f"-seed_inputs=@{seeds}",
            "-close_fd_mask=2",
            "-rss_limit_mb=0",
            "-reload=0",
            "-len_control=0",
            *([str(options.new)] if options.new else []),
        ]
        atheris.Setup(arguments, block, custom_mutator=mutate)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
