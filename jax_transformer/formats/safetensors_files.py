"""A .safetensors file, or the index of several, with PyTorch's names."""

from functools import partial
from pathlib import Path
from typing import Any

from jax_transformer.formats.base import Check, Destination, Format, Pretrained, Written
from jax_transformer.formats.contents import Contents
from jax_transformer.storage import atomic, run_files, safetensors, untrusted
from jax_transformer.storage.tensors import LazyState


class SafetensorsFile(Format):
    name, title, mark = "safetensors", "safetensors file", ".safetensors, or the index of several"
    suffixes = (".safetensors",)
    is_file = True
    write_options = ()

    def recognises(self, path: Path) -> bool:
        with open(path, "rb") as file:
            start = file.read(16)
        return start[8:9] == b"{" or untrusted.is_index(path)

    def open(self, path: Path, **options: Any) -> Pretrained:
        scan = partial(safetensors.scan, path)
        files = tuple(dict.fromkeys([path, *safetensors.files(path)]))
        return Pretrained(self, path, str(path), safetensors.describe(path), scan, files=files)

    def scan(self, path: Path) -> LazyState:
        return safetensors.scan(path)

    def inspect(self, path: Path) -> Contents:
        files = dict.fromkeys([path, *safetensors.files(path)])
        hashes = {file.name: run_files.sha256(file) for file in files}
        kind = "sharded safetensors" if untrusted.is_index(path) else "safetensors"
        return Contents(str(path), kind, safetensors.describe(path), hashes)

    def check(self, to: Destination) -> None:
        safetensors.check_dtypes(to.path, to.source.tensors if to.source else {})

    def write(self, to: Destination, state: LazyState, check: Check) -> Written:
        with atomic.file(to.path) as temporary:
            sha256 = safetensors.save(temporary, state, target=to.path)
            check(safetensors.scan(temporary))
        return Written(sha256)


FORMAT = SafetensorsFile()
