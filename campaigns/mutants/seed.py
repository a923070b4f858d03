"""Seeding a fault into imported modules: the code of functions is exchanged inside them."""

import importlib
import re
from enum import Enum
from types import FunctionType, ModuleType
from typing import Any

from campaigns.mutants.faults import ROOT, Mutant, applied


def seed(mutant: Mutant) -> None:
    """Put the fault into the imported modules. Raises ValueError if that changes nothing."""
    module = importlib.import_module(
        mutant.file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    )
    faulty = dict(module.__dict__)
    exec(compile(applied(mutant), str(ROOT / mutant.file), "exec"), faulty)
    if not sum(
        _exchanged(module, name, old, faulty[name])
        for name, old in list(module.__dict__.items())
        if name in faulty
    ):
        raise ValueError(f"{mutant.name}: no function and no table of {mutant.file} has changed")


def _exchanged(
    module: ModuleType, name: str, old: Any, new: Any, owner: type | None = None
) -> bool:
    """Replace the object of this name in the module, or in its class; True if it has changed.

    The code of functions is exchanged inside them, so references elsewhere change too.
    """
    if old is new or name in "__builtins__ __dict__ __weakref__ __doc__ __annotations__".split():
        return False
    if isinstance(old, type):
        if not _own(old, module):
            return False
        exchanged = [
            _exchanged(module, key, value, vars(new).get(key, value), old)
            for key, value in list(vars(old).items())
        ]
        return any(exchanged)
    before, after = _function(old), _function(new)
    if before is not None and after is not None:
        if not _own(before, module) or _same(before.__code__, after.__code__):
            return False
        before.__code__ = after.__code__
        return True
    if name.startswith("__") or not isinstance(new, type(old)):
        return False
    tables = isinstance(old, dict | list | tuple) and _shown(old) != _shown(new)
    numbers = type(old) in (int, float, str, bytes, frozenset) and old != new
    if tables or numbers:
        setattr(owner or module, name, _adopted(module, new))
        return True
    return False


def _shown(value: Any) -> str:
    """The text of a table, without the addresses of what is in it."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _adopted(module: ModuleType, value: Any) -> Any:
    """A new table of the module's own classes and functions, which its code compares with."""
    if isinstance(value, dict):
        return {_adopted(module, key): _adopted(module, each) for key, each in value.items()}
    if type(value) is tuple:
        return tuple(_adopted(module, each) for each in value)
    if isinstance(value, type | FunctionType):
        return getattr(module, value.__name__, value) if _own(value, module) else value
    kind = getattr(module, type(value).__name__, None)
    if not isinstance(kind, type) or not _own(type(value), module):
        return value
    if isinstance(value, Enum):
        return kind[value.name]
    object.__setattr__(value, "__class__", kind)
    return value


def _function(value: Any) -> FunctionType | None:
    """The function inside a cache, a jit, a property or a decorated function."""
    while True:
        inner = (getattr(value, name, None) for name in ("__wrapped__", "fget", "func"))
        within = next((each for each in inner if each is not None), None)
        if within is None:
            return value if isinstance(value, FunctionType) else None
        value = within


def _own(value: Any, module: ModuleType) -> bool:
    return value.__module__ == module.__name__


def _same(one: Any, other: Any) -> bool:
    """True if two code objects do the same, whatever their line numbers are."""
    if (
        one.co_code != other.co_code
        or one.co_names != other.co_names
        or len(one.co_consts) != len(other.co_consts)
    ):
        return False
    pairs = zip(one.co_consts, other.co_consts, strict=True)
    return all(
        _same(a, b) if hasattr(a, "co_code") and hasattr(b, "co_code") else repr(a) == repr(b)
        for a, b in pairs
    )
