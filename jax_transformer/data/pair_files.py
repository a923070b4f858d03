"""Files of pairs: ``.tsv`` (source, tab, target), ``.jsonl`` (an object per line), or gzipped."""

import json
from typing import Any

from jax_transformer import errors
from jax_transformer.data import parallel_text

SUFFIXES = (".tsv", ".jsonl")


def suffix(path: str) -> str | None:
    """Return the suffix of a path among SUFFIXES, with or without ``.gz``; None if it has
    another.
    """
    name = path.lower().removesuffix(".gz")
    return next((known for known in SUFFIXES if name.endswith(known)), None)


def read_pairs(path: str, source_field: str, target_field: str) -> parallel_text.Pairs:
    """Return the pairs of a file without those with an empty side, see :func:`read_all`."""
    return parallel_text.checked(read_all(path, source_field, target_field), path)


def read_all(path: str, source_field: str, target_field: str) -> list[tuple[str, str]]:
    """Return a pair for each line of a file; the fields are a ``.jsonl`` object's.

    A blank line is a pair with two empty sides.

    Raises InputError that names file and line.
    """
    is_table = suffix(path) == ".tsv"
    pairs = []
    for number, line in enumerate(parallel_text.read_lines(path), 1):
        where = f"{path}: line {number}"
        if not line.strip(" "):
            pairs.append(("", ""))
        elif is_table:
            pairs.append(_columns(line, where))
        else:
            value = _parsed(line, where)
            pairs.append((field(value, source_field, where), field(value, target_field, where)))
    return pairs


def field(value: Any, name: str, where: str) -> str:
    """Return the text of a dotted field in nested objects.

    Raises InputError that begins with ``where`` if there is no text.
    """
    inside = value
    for depth, key in enumerate(name.split("."), 1):
        so_far = ".".join(name.split(".")[:depth])
        if not isinstance(inside, dict):
            raise errors.InputError(
                f"{where} has no {so_far!r}: expected an object, not {_kind(inside)}"
            )
        if key not in inside:
            known = list(map(str, inside))
            raise errors.InputError(
                f"{where} has no {so_far!r}{errors.nearest(key, known)}; known: {', '.join(known)}"
            )
        inside = inside[key]
    if not isinstance(inside, str):
        raise errors.InputError(f"{where}: {name!r} is {_kind(inside)}, not text")
    try:
        inside.encode()
    except UnicodeEncodeError:  # JSON can write it, as "\\ud83d"
        raise errors.InputError(
            f"{where}: {name!r} has half of a surrogate pair, which is not a character"
        ) from None
    return inside


def _columns(line: str, where: str) -> tuple[str, str]:
    columns = line.split("\t")
    if len(columns) != 2:
        raise errors.InputError(
            f"{where} has {len(columns) - 1} tabs; one must stand between source and target"
        )
    return columns[0], columns[1]


def _parsed(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise errors.InputError(f"{where} is not JSON: {error}") from None


def _kind(value: Any) -> str:
    names = {
        dict: "an object",
        list: "a list",
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "text",
        type(None): "null",
    }
    return names.get(type(value), type(value).__name__)
