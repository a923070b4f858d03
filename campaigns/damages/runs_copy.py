"""The copy of the runs that each process of the campaign ``damages`` damages and mends."""

import functools
import os
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

from campaigns.damages.damage import files
from jax_transformer.config import codec
from jax_transformer.storage import checkpoint, run_files, run_folder

HARMLESS = {
    ".lock": "the operating system's lock of it counts, not its content",
    "curves.png": "drawn again from metrics.jsonl, and read by people only",
    "huggingface/README.md": "a text for people, which an export copies",
    "metrics.jsonl, lengthened": "train drops what no checkpoint covers, and makes it again",
    "another file": "no command looks for its name",
}
"""Files whose damage nothing notices, and why that does no harm."""


def kind_of(name: str) -> str:
    """The row of the table for a file of a run."""
    top, *rest = Path(name).parts
    if top in run_files.CHECKPOINTS and len(rest) > 1:
        return f"{top}/{checkpoint.MANIFEST if rest[-1] == checkpoint.MANIFEST else 'arrays'}"
    if name in (*run_files.LISTED, run_files.METRICS, run_files.SHA256SUMS):
        return "huggingface/" if rest else name
    return name if name in HARMLESS else "another file"


class Copy:
    """A copy of the shared runs, which this process damages and mends."""

    def __init__(self, shared: Path, folder: Path):
        from jax_transformer.training.options import read_options

        self.shared, self.folder = shared, folder
        shutil.copytree(shared, folder)
        self.files = {path: path.read_bytes() for path in files(folder)}
        self.runs = {
            path.name: [each for each in self.files if each.is_relative_to(path)]
            for path in sorted(folder.iterdir())
            if (path / "checkpoints").is_dir()
        }
        self.options = {
            name: read_options(run_folder.RunFolder(folder / name))
            for name in self.runs
            if (folder / name / run_files.TRAIN_CONFIG).exists()
        }
        self._remembered = [
            Remembered(module, name)
            for module, name in (
                (run_files, "sha256"),
                (checkpoint, "verify"),
                (checkpoint, "read_manifest"),
            )
        ]
        # Without threads, which take longer to start than these files to hash
        checkpoint._hashes = lambda path, names: {
            name: run_files.sha256(path / name) for name in names
        }
        # Of a checkpoint that was found intact, so its content is always the same
        checkpoint.open_arrays = functools.cache(checkpoint.open_arrays)
        codec.from_json = functools.cache(codec.from_json)

    @functools.cache  # noqa: B019 (a copy lives as long as its process)
    def by_kind(self, run: Path) -> dict[str, list[Path]]:
        """The files of a run by the row of the table."""
        grouped: dict[str, list[Path]] = {}
        for path in self.runs[run.name]:
            grouped.setdefault(kind_of(str(path.relative_to(run))), []).append(path)
        return grouped

    def forget(self, touched: list[Path]) -> None:
        """Let files be read again."""
        for remembered in self._remembered:
            for path in touched:
                remembered.forget(path)

    def mend(self, touched: list[Path]) -> None:
        """Write the content that files had."""
        for path in touched:
            if path in self.files:
                path.write_bytes(self.files[path])
            else:
                path.unlink(missing_ok=True)
        self.forget(touched)


class Remembered:
    """A function of a file or a checkpoint, called again only after a damage to it."""

    def __init__(self, module: ModuleType, name: str):
        self._function, self._known = getattr(module, name), dict[str, Any]()
        setattr(module, name, self)

    def __call__(self, *path: Path | int) -> Any:
        key = os.path.join(*map(str, path))
        if key not in self._known:
            self._known[key] = self._function(*path)
        return self._known[key]

    def forget(self, touched: Path) -> None:
        """Forget a file and the checkpoint that it is in; with SHA256SUMS, the whole run."""
        for path in (touched, *touched.parents):
            self._known.pop(str(path), None)
        if touched.name == run_files.SHA256SUMS:
            run = str(touched.parent)
            self._known = {key: each for key, each in self._known.items() if run not in key}


@functools.cache
def open_copy(shared: Path, folder: Path) -> Copy:
    """The copy of this process."""
    return Copy(shared, folder)
