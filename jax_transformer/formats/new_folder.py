"""New folders of weights: hashed as they are written, read back and compared."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from jax_transformer.errors import InputError
from jax_transformer.storage import atomic, huggingface_folder, read_back
from jax_transformer.storage.lazy import LazyState
from jax_transformer.storage.read_back import Digests


@dataclass(frozen=True)
class NewFolder:
    """A folder that is written under a temporary name."""

    target: Path
    """Its name when it is complete, for messages."""
    path: Path
    """Its temporary name."""
    state: LazyState
    """The tensors to write; each is hashed when it is read."""
    digests: Digests

    def compare(self, again: LazyState) -> None:
        """Raise InputError naming every tensor that differs between disk and memory, by SHA-256."""
        written = self.digests.result()
        differing = sorted(written.keys() ^ again.keys())
        if not differing:
            with read_back.digests() as digests:
                for name, tensor in again.items():
                    digests.watched(name, tensor).read()
            hashes = digests.result()
            differing = [name for name in again if hashes[name] != written[name]]
        self._refuse(", ".join(differing))

    def add(self, files: Mapping[str, bytes], folder: str = "") -> None:
        """Write files by their names, and compare them."""
        if files:
            huggingface_folder.write_files(self.path / folder, files)
            self.compare_files(files, folder)

    def compare_files(self, files: Mapping[str, bytes], folder: str = "") -> None:
        """Raise InputError if a file differs between disk and memory."""
        for name, content in files.items():
            if (self.path / folder / name).read_bytes() != content:
                self._refuse(name)

    def _refuse(self, differing: str) -> None:
        if differing:
            raise InputError(
                f"{self.target}: {differing} reads back different; nothing was changed"
            )

    def sha256(self) -> str:
        """Hash every tensor's name, dtype, shape and SHA-256, in the order of names."""
        digest, digests = hashlib.sha256(), self.digests.result()
        for name in sorted(self.state):
            tensor = self.state[name]
            digest.update(f"{name}\0{tensor.dtype}\0{tensor.shape}\0{digests[name]}\0".encode())
        return digest.hexdigest()


@contextmanager
def new_folder(target: Path, state: LazyState) -> Iterator[NewFolder]:
    """Give a folder its name when the block ends without an exception."""
    with atomic.folder(target) as temporary, read_back.digests() as digests:
        hashed = {name: digests.watched(name, tensor) for name, tensor in state.items()}
        yield NewFolder(target, temporary, hashed, digests)
