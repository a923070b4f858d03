"""The index of several files of weights (``*.index.json``), which names the file of each tensor."""

from collections.abc import Collection, Mapping
from pathlib import Path

from jax_transformer.errors import InputError, UnsafeFileError, nearest
from jax_transformer.storage import json_text
from jax_transformer.storage.untrusted import shown


def is_index(path: str | Path) -> bool:
    """True for JSON with a weight_map. A .safetensors file begins with eight bytes of length, one
    of them NUL; JSON has no NUL.
    """
    path = Path(path)
    if not path.is_file() or path.stat().st_size > json_text.LONGEST:
        return False
    content = path.read_bytes()
    return content.lstrip()[:1] == b"{" and b"\0" not in content[:8] and b'"weight_map"' in content


def weight_map(path: Path) -> dict[str, str]:
    """The file name of every tensor. Raises UnsafeFileError if one is not a plain name in the same
    folder.
    """
    if path.stat().st_size > json_text.LONGEST:
        raise UnsafeFileError(f"{path}: refused: an index of {path.stat().st_size:,} bytes")
    index = json_text.parse(path, path.read_bytes())
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise InputError(f"{path}: its weight_map is no object of names")
    for file in set(names.values()):
        plain = (
            file.isprintable()
            and file not in ("", ".", "..")
            and not any(sign in file for sign in "/\\:")
        )
        if not plain or len(file.encode("utf-8")) > 255:
            raise UnsafeFileError(
                f"{path}: refused: {shown(file)} is not a plain file name in the same folder"
            )
    return names


def shards(path: Path) -> list[Path]:
    """The files that the index names, each once, in order. Raises InputError if one is missing."""
    paths = [path.parent / file for file in sorted(set(weight_map(path).values()))]
    for shard in paths:
        if not shard.is_file():
            names = sorted(other.name for other in path.parent.iterdir())
            raise InputError(
                f"{path}: names {shown(shard.name)}, which is missing{nearest(shard.name, names)}"
            )
    return paths


def check(path: Path, stored: Mapping[Path, Collection[str]]) -> None:
    """Raise InputError unless each file has the tensors that the index names, and no others."""
    expected = weight_map(path)
    missing = sorted(
        name for name, file in expected.items() if name not in stored[path.parent / file]
    )
    unexpected = sorted(
        name
        for file, names in stored.items()
        for name in names
        if path.parent / expected.get(name, "") != file
    )
    if missing or unexpected:
        several = (("without", missing), ("with unexpected", unexpected))
        raise InputError(
            f"{path}: its files are "
            f"{', '.join(f'{word} {_few(names)}' for word, names in several if names)}"
        )


def _few(names: list[str]) -> str:
    return ", ".join(shown(name) for name in names[:5]) + (
        f" and {len(names) - 5:,} more" if len(names) > 5 else ""
    )
