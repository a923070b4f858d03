"""A .safetensors file, or the index of several, with PyTorch's names."""

from functools import partial
from pathlib import Path
from typing import Any

from jax_transformer.formats.base import Check, Destination, Format, Pretrained, Written
from jax_transformer.formats.contents import Contents
from jax_transformer.storage import atomic, run_files, safetensors, untrusted
from jax_transformer.storage.tensors import LazyState


class ArrayFile(Format):
    """A file of arrays by name, or the index of several; :meth:`scan` reads them."""

    is_file = True

    def kind(self, path: Path) -> str:
        """Return the name of the format for ``inspect``."""
        return self.title

    def open(self, path: Path, **options: Any) -> Pretrained:
        infos = {name: tensor.info for name, tensor in self.scan(path).items()}
        files = tuple(dict.fromkeys([path, *untrusted.files(path)]))
        return Pretrained(self, path, str(path), infos, partial(self.scan, path), files=files)

    def inspect(self, path: Path) -> Contents:
        opened = self.open(path)
        hashes = {file.name: run_files.sha256(file) for file in opened.files}
        return Contents(str(path), self.kind(path), opened.tensors, hashes)


class SafetensorsFile(ArrayFile):
    name, title, mark = "safetensors", "safetensors file", ".safetensors, or the index of several"
    suffixes = (".safetensors",)
    write_options = ()

    def recognises(self, path: Path) -> bool:
        with open(path, "rb") as file:
            start = file.read(16)
        of_others = path.name.endswith((".bin.index.json", ".msgpack.index.json"))
        return start[8:9] == b"{" or (untrusted.is_index(path) and not of_others)

    def scan(self, path: Path) -> LazyState:
        return safetensors.scan(path)

    def kind(self, path: Path) -> str:
        return "sharded safetensors" if untrusted.is_index(path) else "safetensors"

    def check(self, to: Destination) -> None:
        safetensors.check_dtypes(to.path, to.source.tensors if to.source else {})

    def write(self, to: Destination, state: LazyState, check: Check) -> Written:
        with atomic.file(to.path) as temporary:
            sha256 = safetensors.save(temporary, state, target=to.path)
            check(safetensors.scan(temporary))
        return Written(sha256)


FORMAT = SafetensorsFile()
