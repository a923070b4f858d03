"""The files of a run next to its checkpoints, and their SHA-256.

``SHA256SUMS`` lists those that are written once, or at each start. Each checkpoint records which
run it is of, as the hash of data.json, which only runs of the same text and first options share,
and the length and hash of metrics.jsonl when it was saved.
:mod:`.integrity` compares.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax_transformer.storage import atomic, checksums, huggingface_folder

CONFIG, DATA = "config.json", "data.json"
TRAIN_CONFIG, METRICS = "train_config.json", "metrics.jsonl"
SHARED_FILE = "tokenizer.json"
SIDE_FILES = ("tokenizer.source.json", "tokenizer.target.json")
LANGUAGES_FILE = "languages.json"
"""The languages that a Hugging Face tokenizer was loaded with."""
CHECKPOINTS = ("checkpoints", "averaged")
TRAINING = (TRAIN_CONFIG, DATA)
_FOR_PEOPLE = (huggingface_folder.CARD, "LICENSE", "LICENSE.md", "LICENSE.txt")
HUGGINGFACE = tuple(
    f"{huggingface_folder.IN_RUN}/{name}"
    for name in huggingface_folder.EXTRA_FILES
    if name not in _FOR_PEOPLE
)
TOKENIZER = (
    SHARED_FILE,
    *SIDE_FILES,
    LANGUAGES_FILE,
    *(f"{huggingface_folder.IN_RUN}/{name}" for name in huggingface_folder.TOKENIZER),
)
LISTED = tuple(dict.fromkeys((*TRAINING, *TOKENIZER, *HUGGINGFACE, CONFIG)))
"""The files that SHA256SUMS lists, if a run has them. The last is one that every run has, so that
the end of the list is never missed.
"""


def record(run: Path) -> None:
    """List the files that a run has; the listed ones keep the SHA-256 that they had."""
    before, sums = checksums.read(run), {}
    for name in LISTED:
        if (run / name).is_file():
            sums[name] = before.get(name) or [checksums.sha256(run / name)]
    if sums != before:
        checksums.write(run, sums)


def replace(run: Path, name: str, text: str) -> None:
    """Write a file of the run. Its old and its new content are both listed meanwhile, so that the
    process may be killed at any moment.
    """
    sums, new = checksums.read(run), hashlib.sha256(text.encode()).hexdigest()
    if sums.get(name) == [new]:
        return
    if name in sums:
        checksums.write(run, sums | {name: [*sums[name], new]})
    atomic.write_text(run / name, text)
    if name in sums:
        checksums.write(run, sums | {name: [new]})


def about_run(path: Path) -> dict[str, Any]:
    """Return the record of its run that the checkpoint ``path`` gets; empty if it is not in a run
    that has SHA256SUMS.
    """
    place = _place(path)
    return {"run": place[0], "folder": place[1]} if place else {}


def about(path: Path) -> dict[str, Any]:
    """Return the record of its run and of metrics.jsonl for the checkpoint ``path`` of training."""
    metrics = path.parent.parent / METRICS
    content = metrics.read_bytes() if metrics.exists() else b""
    covered = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    return {**about_run(path), "metrics": covered}


def is_foreign(path: Path, about: Mapping[str, Any]) -> bool:
    """Return True if the checkpoint ``path`` with this manifest was saved in another run, or is an
    average in the place of a checkpoint.
    """
    here = _place(path) if "run" in about else None
    return here is not None and (about["run"], about.get("folder", here[1])) != here


def _place(path: Path) -> tuple[str | None, str] | None:
    """Return the SHA-256 of data.json (None for a run that was converted) and the folder of a
    checkpoint; None if it is not in a run that has SHA256SUMS.
    """
    folder = path.absolute().parent
    sums = checksums.read(folder.parent) if folder.name in CHECKPOINTS else {}
    return (next(iter(sums.get(DATA, ())), None), folder.name) if sums else None
