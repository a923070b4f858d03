"""A PyTorch file (.pt, .pth, .bin), with PyTorch's names."""

from pathlib import Path
from typing import Any

from jax_transformer.errors import InputError
from jax_transformer.formats import registry
from jax_transformer.formats.base import Check, Destination, Format, Pretrained, Written
from jax_transformer.formats.contents import Contents
from jax_transformer.storage import atomic, pt, untrusted
from jax_transformer.storage.pt import zip_archive
from jax_transformer.storage.tensors import LazyState, TensorInfo

_PICKLES = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


class PtFile(Format):
    name, title, mark = "pt", "PyTorch file", "a zip"
    suffixes = (".pt", ".pth", ".bin")
    is_file = True
    open_options = ("key",)
    write_options = ()

    def recognises(self, path: Path) -> bool:
        if (name := zip_archive.first_member(path)) is not None:
            return not name.endswith(b".npy")  # a zip of NumPy's arrays is not a PyTorch file
        with open(path, "rb") as file:
            return file.read(2) in _PICKLES  # a bare pickle is refused by its reader

    def open(self, path: Path, key: str | None = None, **options: Any) -> Pretrained:
        content = pt.scan(path)
        checkpoint = None if key is not None else _checkpoint_format(content)
        if checkpoint is not None:
            return checkpoint.open_content(path, pt.describe(path))
        state = pt.open_state(path, key, content)
        return Pretrained(
            self,
            path,
            f"{path} ({'.'.join(state.keys)})" if state.keys else str(path),
            {name: tensor.info for name, tensor in state.state.items()},
            state.state.copy,
            files=(path,),
            ties=state.ties,
            dropped=state.others,
        )

    def scan(self, path: Path) -> LazyState:
        parts = {file: pt.scan(file) for file in untrusted.files(path)}
        for file, state in parts.items():
            if not isinstance(state, dict) or not all(
                isinstance(name, str) and hasattr(leaf, "shape") for name, leaf in state.items()
            ):
                raise InputError(f"{file}: is not a plain state_dict, from names to tensors")
        if path not in parts:
            untrusted.check_shards(path, parts)
        return {name: tensor for part in parts.values() for name, tensor in part.items()}

    def inspect(self, path: Path) -> Contents:
        described = pt.describe(path)
        leaves = dict(pt.leaves(described))
        tensors = {
            name: TensorInfo(tuple(leaf.shape), str(leaf.dtype))
            for name, leaf in leaves.items()
            if isinstance(leaf, pt.TensorView)
        }
        values = {name: leaf for name, leaf in leaves.items() if name not in tensors}
        checkpoint = _checkpoint_format(described)
        kind = self.title if checkpoint is None else f"{self.title}, a {checkpoint.title}"
        hashes = {path.name: pt.verify(path)}
        return Contents(str(path), kind, tensors, hashes, values, pt.tied(described))

    def write(self, to: Destination, state: LazyState, check: Check) -> Written:
        from jax_transformer.storage.pt import writer

        with atomic.file(to.path) as temporary:
            sha256 = writer.save(temporary, dict(state), target=to.path)
            check(pt.scan(temporary))
        return Written(sha256)


def _checkpoint_format(content: Any) -> Format | None:
    """Return the format of another toolkit's checkpoint; None if no format knows the content."""
    if not isinstance(content, dict) or not any(isinstance(v, dict) for v in content.values()):
        return None
    return next((each for each in registry.others() if each.recognises_content(content)), None)


FORMAT = PtFile()
