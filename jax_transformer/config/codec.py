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
    """Return a dataclass from nested dicts; at every depth, a missing key keeps its default.

    A string may stand for a list of one string.

    ``where`` is the dotted key of ``data``, for messages. ``checked=False`` skips the checks of
    ``__post_init__``: for values that are yet to be completed.
    """
    if not isinstance(data, dict):
        raise ConfigError(
            f"{where or 'the configuration'} must be an object, not {type(data).__name__}"
        )
    data, prefix = dict(data), f"{where}." if where else ""
    for old, new in getattr(cls, "RENAMED", {}).items():
        if old in data:
            data.setdefault(new, data.pop(old))
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in data:
        if key not in fields:
            raise ConfigError(f"unknown key {prefix + key!r}{nearest(key, list(fields))}")
    missing = [
        repr(f"{prefix}{name}")
        for name, field in fields.items()
        if field.default is field.default_factory is dataclasses.MISSING and name not in data
    ]
    if missing:
        raise ConfigError(f"missing key {', '.join(missing)}")
    hints = typing.get_type_hints(cls)
    values = {key: _decode(hints[key], data[key], f"{prefix}{key}", checked) for key in data}
    if checked:
        return cls(**values)
    instance = object.__new__(cls)
    for name, field in fields.items():
        default, factory = field.default, field.default_factory
        default = default if factory is dataclasses.MISSING else factory()
        object.__setattr__(instance, name, values.get(name, default))
    return instance


def flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested dicts by dotted key."""
    values: dict[str, Any] = {}
    for name, value in data.items():
        name = f"{prefix}{name}"
        values |= flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return values


def names(cls: type, where: str = "") -> list[str]:
    """Return the dotted keys, such as ``model.d_model``, of a dataclass and those nested in it."""
    keys = []
    for name, kind in typing.get_type_hints(cls).items():
        key = f"{where}.{name}" if where else name
        nested = isinstance(kind, type) and dataclasses.is_dataclass(kind)
        keys += names(kind, key) if nested else [key]
    return keys


def _decode(kind: Any, value: Any, where: str, checked: bool) -> Any:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        members = set(typing.get_args(kind))
        if value is None and type(None) in members:
            return None
        members -= {type(None)}
        number = float in members and type(value) in (int, float)
        (kind,) = {float} if number else members if len(members) == 1 else members - {float}
    if typing.get_origin(kind) is tuple:
        item_kind = typing.get_args(kind)[0]
        if item_kind is str and isinstance(value, str):
            return (value,)
        if not isinstance(value, list):
            raise ConfigError(f"{where} must be a list, not {value!r}")
        items = enumerate(value)
        return tuple(_decode(item_kind, item, f"{where}[{i}]", checked) for i, item in items)
    if dataclasses.is_dataclass(kind):
        return from_dict(kind, value, where, checked=checked)  # type: ignore[arg-type]
    if issubclass(kind, enum.Enum):
        try:
            return kind(value)
        except ValueError:
            known = [member.value for member in kind]
            raise ConfigError(
                f"{where}={value!r} is not one of {', '.join(known)}{nearest(str(value), known)}"
            ) from None
    if kind is float and type(value) is int and abs(value) < _EXACT:
        return float(value)
    if type(value) is not kind:
        quotes = "; YAML reads yes, no, on and off so, unless they are in quotes"
        quotes = quotes if kind is str and type(value) is bool else ""
        raise ConfigError(f"{where} must be {kind.__name__}, not {value!r}{quotes}")
    return value
