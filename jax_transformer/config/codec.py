"""Frozen dataclasses to JSON and back, exactly; a wrong key is refused by name."""

import dataclasses
import enum
import json
import types
import typing
from typing import Any, TypeVar

from jax_transformer.errors import ConfigError, nearest

T = TypeVar("T")
_EXACT = 2**53
"""Whole numbers below are floating-point numbers too."""


def to_json(value: Any) -> str:
    """Return the dataclass as indented JSON; enums by value, tuples as lists."""
    return json.dumps(dataclasses.asdict(value), indent=2) + "\n"


def from_json(cls: type[T], text: str) -> T:
    """Return the dataclass of a JSON text, the inverse of :func:`to_json`.

    Raises ConfigError naming the key that is unknown, missing or of the wrong type.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON: {error}") from None
    return from_dict(cls, data)


def from_dict(cls: type[T], data: Any, where: str = "", *, checked: bool = True) -> T:
    """Return a dataclass from nested dicts; a key that is not there keeps its default, at every
    depth.

    A string may stand for a list of one string.

    ``where`` is the dotted key of ``data``, for messages. ``checked=False`` skips the checks of
    ``__post_init__``: for values that are yet to be completed.
    """
    if not isinstance(data, dict):
        raise ConfigError(
            f"{where or 'the configuration'} must be an object, not {type(data).__name__}"
        )
    renamed = getattr(cls, "RENAMED", {})
    data = {renamed.get(key, key): value for key, value in data.items()}
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in data:
        if key not in fields:
            raise ConfigError(f"unknown key {_join(where, key)!r}{nearest(key, list(fields))}")
    missing = [
        _join(where, name)
        for name, field in fields.items()
        if name not in data
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"missing key {', '.join(map(repr, missing))}")
    values = {
        key: _decode(hints[key], value, _join(where, key), checked) for key, value in data.items()
    }
    return cls(**values) if checked else _unchecked(cls, values)


def names(cls: type, where: str = "") -> list[str]:
    """Return the dotted keys of a dataclass and of those nested in it, such as
    ``model.d_model``.
    """
    keys = []
    for name, kind in typing.get_type_hints(cls).items():
        key = _join(where, name)
        nested = isinstance(kind, type) and dataclasses.is_dataclass(kind)
        keys += names(kind, key) if nested else [key]
    return keys


def _unchecked(cls: type[T], values: dict[str, Any]) -> T:
    instance = object.__new__(cls)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        default = (
            field.default
            if field.default_factory is dataclasses.MISSING
            else field.default_factory()
        )
        object.__setattr__(instance, field.name, values.get(field.name, default))
    return instance


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _decode(kind: Any, value: Any, where: str, checked: bool) -> Any:
    members = (
        typing.get_args(kind)
        if typing.get_origin(kind) in (typing.Union, types.UnionType)
        else (kind,)
    )
    if value is None and type(None) in members:
        return None
    (kind,) = (member for member in members if member is not type(None))
    if typing.get_origin(kind) is tuple:
        item_kind = typing.get_args(kind)[0]
        if item_kind is str and isinstance(value, str):
            return (value,)
        if not isinstance(value, list):
            raise ConfigError(f"{where} must be a list, not {value!r}")
        return tuple(
            _decode(item_kind, item, f"{where}[{i}]", checked) for i, item in enumerate(value)
        )
    if dataclasses.is_dataclass(kind):
        return from_dict(kind, value, where, checked=checked)  # type: ignore[arg-type]
    if issubclass(kind, enum.Enum):
        known = [member.value for member in kind]
        if value not in known:
            raise ConfigError(
                f"{where}={value!r} is not one of {', '.join(known)}{nearest(str(value), known)}"
            )
        return kind(value)
    if kind is float and type(value) is int and abs(value) < _EXACT:
        return float(value)
    if type(value) is not kind:
        quotes = (
            "; YAML reads yes, no, on and off so, unless they are in quotes"
            if kind is str and type(value) is bool
            else ""
        )
        raise ConfigError(f"{where} must be {kind.__name__}, not {value!r}{quotes}")
    return value
