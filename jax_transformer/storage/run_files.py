"""The files of a run next to its checkpoints, and their SHA-256.

``SHA256SUMS``, as ``sha256sum`` writes it and ``sha256sum --check`` checks it, lists those that are
written once, or at each start. Each checkpoint records which run it is of, as the hash of
data.json, which only runs of the same text and first options share, and the length and hash of
metrics.jsonl when it was saved. :mod:`.run_folder` compares.
"""

import hashlib
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from jax_transformer.errors import InputError
from jax_transformer.storage import atomic, huggingface_folder
from jax_transformer.storage.untrusted import shown

SHA256SUMS = "SHA256SUMS"
_LINE = r"([0-9a-f]{64})  (\S+)"
Sums = Mapping[str, Collection[str]]
"""The SHA-256 that a file may have, by its name: two while it is replaced."""
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
    for name in (*huggingface_folder.EXTRA_FILES, huggingface_folder.LAYOUT)
    if name not in _FOR_PEOPLE
)
TOKENIZER = (
    SHARED_FILE,
    *SIDE_FILES,
    LANGUAGES_FILE,
    *(f"{huggingface_folder.IN_RUN}/{name}" for name in huggingface_folder.TOKENIZER),
)
LISTED = tuple(dict.fromkeys((*TRAINING, *TOKENIZER, *HUGGINGFACE, CONFIG)))
"""The files that SHA256SUMS lists, if a run has them; every run has the last, so that the end of
the list is never missed."""


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_sums(folder: Path) -> dict[str, list[str]]:
    """Return the sums a folder lists; empty without a list. Raises InputError naming a bad line."""
    path = folder / SHA256SUMS
    try:
        text = path.read_bytes().decode("utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    sums: dict[str, list[str]] = {}
    lines = text.split("\n")
    for number, line in enumerate(lines[:-1] if not lines[-1] else lines, 1):
        match = re.fullmatch(_LINE, line)
        outside = match and (match[2].startswith("/") or ".." in PurePosixPath(match[2]).parts)
        if not match or number == len(lines) or outside:
            raise InputError(f"{path}: line {number} is damaged: {shown(line)}")
        sums.setdefault(match[2], []).append(match[1])
    return sums


def write_sums(folder: Path, sums: Sums) -> None:
    """Write the sums of a folder, in their order."""
    lines = [f"{each}  {name}\n" for name, listed in sums.items() for each in listed]
    atomic.write_text(folder / SHA256SUMS, "".join(lines))


def changed(folder: Path, sums: Sums) -> Iterator[str]:
    """Name every file that is missing or that has none of the SHA-256 that are listed for it."""
    for name, listed in sums.items():
        path = folder / name
        if not path.is_file():
            yield f"{path}: missing, and {SHA256SUMS} lists it"
        elif sha256(path) not in listed:
            yield f"{path}: damaged or edited (its SHA-256 is not the one in {SHA256SUMS})"


def record(run: Path) -> None:
    """List the files that a run has; the listed ones keep the SHA-256 that they had."""
    before, existing = read_sums(run), [name for name in LISTED if (run / name).is_file()]
    sums = {name: before.get(name) or [sha256(run / name)] for name in existing}
    if sums != before:
        write_sums(run, sums)


def replace(run: Path, name: str, text: str) -> None:
    """Write a file of the run; meanwhile both contents are listed, so that a kill does no harm."""
    sums, new = read_sums(run), hashlib.sha256(text.encode()).hexdigest()
    if sums.get(name) == [new]:
        return
    if name in sums:
        write_sums(run, sums | {name: [*sums[name], new]})
    atomic.write_text(run / name, text)
    if name in sums:
        write_sums(run, sums | {name: [new]})


def about_run(path: Path) -> dict[str, Any]:
    """Return the record of its run that the checkpoint ``path`` gets: the SHA-256 of data.json
    (None for a run that was converted) and the folder of its checkpoints. Empty if it is not in a
    run that has SHA256SUMS.
    """
    folder = path.absolute().parent
    sums = read_sums(folder.parent) if folder.name in CHECKPOINTS else {}
    return {"run": next(iter(sums.get(DATA, ())), None), "folder": folder.name} if sums else {}


def about(path: Path) -> dict[str, Any]:
    """Return the record of its run and of metrics.jsonl for the checkpoint ``path`` of training."""
    metrics = path.parent.parent / METRICS
    content = metrics.read_bytes() if metrics.exists() else b""
    covered = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    return {**about_run(path), "metrics": covered}
