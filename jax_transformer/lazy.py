"""Names of packages that are looked up on first use, so that importing a package loads no jax."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def attributes(package: str, names: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return a package's ``__getattr__`` for these names of its modules and of others."""
    modules = {name: module for module in names for name in names[module]}

    def look_up(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"jax_transformer.{modules[name]}"), name)

    return look_up
