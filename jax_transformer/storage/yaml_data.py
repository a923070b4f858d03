"""YAML as plain maps, lists and text, within bounds: ``no`` and ``1`` stay text, as vocabularies
need it. Tags, anchors and aliases are refused, so that nothing is constructed and no small file is
a huge tree.
"""

from pathlib import Path
from typing import Any

import yaml

from jax_transformer.errors import InputError, UnsafeFileError
from jax_transformer.storage import untrusted
from jax_transformer.storage.untrusted import shown

LONGEST = 64_000_000  # bytes
_DEEPEST = 20
_LOADER = getattr(yaml, "CBaseLoader", yaml.BaseLoader)


def read(path: Path, *, longest: int = LONGEST) -> Any:
    """Read a YAML file. Raises as :func:`parse`, and UnsafeFileError above ``longest`` bytes."""
    return parse(str(path), untrusted.read_bytes(path, longest))


def parse(where: str, content: bytes) -> Any:
    """Return the one document in ``content``: dicts, lists and text. Raises InputError if it is not
    one of YAML in UTF-8, UnsafeFileError for a tag, an alias, a key twice, or too deep nesting.
    """
    try:
        return _document(where, content.decode("utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f" (line {mark.line + 1})"
        problem = getattr(error, "problem", None) or str(error)
        raise InputError(f"{where}: not readable YAML{line}: {shown(problem, 120)}") from None


def _document(where: str, text: str) -> Any:
    values: list[Any] = []  # the documents
    open_nodes: list[list[Any]] = [values]  # innermost last
    for event in yaml.parse(text, Loader=_LOADER):
        if getattr(event, "anchor", None) is not None:
            raise UnsafeFileError(f"{_line(where, event)}: refused: an anchor or alias")
        if getattr(event, "tag", None) not in (None, "!"):
            raise UnsafeFileError(f"{_line(where, event)}: refused: the tag {shown(event.tag)}")
        if isinstance(event, yaml.ScalarEvent):
            open_nodes[-1].append(event.value)
        elif isinstance(event, yaml.CollectionStartEvent):
            if len(open_nodes) > _DEEPEST:
                raise UnsafeFileError(f"{_line(where, event)}: refused: more than {_DEEPEST} deep")
            open_nodes.append([])
        elif isinstance(event, yaml.CollectionEndEvent):
            items = open_nodes.pop()
            if isinstance(event, yaml.MappingEndEvent):
                open_nodes[-1].append(_mapping(where, event, items))
            else:
                open_nodes[-1].append(items)
    if len(values) != 1:
        raise InputError(f"{where}: {len(values)} YAML documents, and not one")
    return values[0]


def _mapping(where: str, event: Any, items: list[Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in zip(items[::2], items[1::2], strict=True):
        if not isinstance(key, str):
            raise InputError(f"{_line(where, event)}: a key that is not text")
        if key in result:
            raise UnsafeFileError(
                f"{_line(where, event)}: refused: the key {shown(key)} appears twice"
            )
        result[key] = value
    return result


def _line(where: str, event: Any) -> str:
    return f"{where}: line {event.start_mark.line + 1}"
