"""The index of several files of weights (``*.index.json``): which of them holds which tensor."""

from collections.abc import Collection, Mapping
from pathlib import Path

from jax_transformer.errors import InputError, UnsafeFileError, nearest
from jax_transformer.storage import json_text
from jax_transformer.storage.untrusted import shown


def is_index(path: str | Path) -> bool:
    """Whether this is JSON (which has no NUL, where a .safetensors file begins with its header's length in eight bytes) with a weight_map."""
    path = Path(path)
    if not path.is_file() or path.stat().st_size > json_text.LONGEST:
        return False
    content = path.read_bytes()
    return content.lstrip()[:1] == b"{" and b"\0" not in content[:8] and b'"weight_map"' in content


def weight_map(path: Path) -> dict[str, str]:
    """The name of its file for every tensor. Raises UnsafeFileError where one is no plain name of a file beside the index."""
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
                f"{path}: refused: {shown(file)} is no plain name of a file beside it"
            )
    return names


def shards(path: Path) -> list[Path]:
    """The files that it names, each once, in order. Raises InputError where one is not there."""
    found = [path.parent / file for file in sorted(set(weight_map(path).values()))]
    for shard in found:
        if not shard.is_file():
            beside = sorted(other.name for other in path.parent.iterdir())
            raise InputError(
                f"{path}: names {shown(shard.name)}, which is not there{nearest(shard.name, beside)}"
            )
    return found


def check(path: Path, found: Mapping[Path, Collection[str]]) -> None:
    """Raises InputError unless each file holds the tensors that the index says, and no others."""
    wanted = weight_map(path)
    missing = sorted(name for name, file in wanted.items() if name not in found[path.parent / file])
    unexpected = sorted(
        name
        for file, names in found.items()
        for name in names
        if path.parent / wanted.get(name, "") != file
    )
    if missing or unexpected:
        several = (("without", missing), ("with unexpected", unexpected))
        raise InputError(
            f"{path}: its files are {', '.join(f'{word} {_few(names)}' for word, names in several if names)}"
        )


def _few(names: list[str]) -> str:
    return ", ".join(shown(name) for name in names[:5]) + (
        f" and {len(names) - 5:,} more" if len(names) > 5 else ""
    )
