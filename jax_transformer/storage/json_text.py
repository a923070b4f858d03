"""JSON of untrusted files: no key twice, and no more nesting and brackets than weights and
configurations need.
"""

import collections
import functools
import json
from pathlib import Path
from typing import Any

from jax_transformer.errors import InputError, UnsafeFileError
from jax_transformer.storage import untrusted
from jax_transformer.storage.untrusted import shown

MOST_BRACKETS = 600_000  # three a tensor
LONGEST = 100_000_000  # as the header of a .safetensors file


def read(path: Path, *, longest: int = LONGEST) -> Any:
    """Read a JSON file. Raises UnsafeFileError if it has more than ``longest`` bytes, and as
    :func:`parse`.
    """
    untrusted.check_readable(path)
    with open(path, "rb") as file:
        content = file.read(longest + 1)
    if len(content) > longest:
        raise UnsafeFileError(f"{path}: refused: JSON of {path.stat().st_size:,} bytes")
    return parse(path, content)


def parse(path: Path, content: bytes) -> Any:
    """Parse ``content`` of the file ``path``. Raises InputError if it is not JSON, UnsafeFileError
    if it has too many brackets, too deep nesting or a key twice.
    """
    if content.count(b"{") + content.count(b"[") > MOST_BRACKETS:
        raise UnsafeFileError(f"{path}: refused: JSON of more than {MOST_BRACKETS:,} brackets")

    try:
        return json.loads(content.decode("utf-8"), object_pairs_hook=functools.partial(_once, path))
    except RecursionError:
        raise UnsafeFileError(f"{path}: refused: JSON within JSON, too deep") from None
    except (ValueError, OverflowError) as error:
        if isinstance(error, UnsafeFileError):
            raise
        raise InputError(
            f"{path}: not readable JSON: {shown(str(error).splitlines()[0], 120)}"
        ) from None


def _once(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        counts = collections.Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise UnsafeFileError(f"{path}: refused: the key {shown(twice)} appears twice")
    return result
