"""The registry of architectures: this package's own, installed packages', and the user's.

A file of this folder that defines ``ARCHITECTURE`` is named after it, so that :func:`find` imports
no other; there is no list to edit. An installed package adds its own by an entry point of the group
``jax_transformer.architectures``, named after the architecture. :func:`register` adds one for this
process, and :func:`load_from` one of a file that the user names. A checkpoint never causes the
import of a file.
"""

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import itertools
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

from jax_transformer.architectures.base import Architecture, Preset
from jax_transformer.config import TransformerConfig
from jax_transformer.errors import ConfigError, InputError, Refusal, nearest
from jax_transformer.runtime import process
from jax_transformer.weights import rules

ENTRY_POINTS = f"{__package__}"  # jax_transformer.architectures

PARTS = ["model", "encoder"]
"""The parts of a model whose weights can stand by themselves."""
_FOLDER = Path(__file__).parent
_added: dict[str, Architecture] = {}
_skipped: set[str] = set()
"""Messages of installed architectures that cannot be loaded; each is printed once."""


def register(architecture: Architecture, *, replace: bool = False) -> Architecture:
    """Add an architecture for this process, and return it.

    Args:
        architecture: its name and the names of its presets must be new.
        replace: allow the name of an architecture that was registered before (in a notebook, after
            a change).

    Raises:
        ConfigError: another architecture has the name, or a preset of that name.
    """
    _check(architecture)
    ours, known = built_in(), built_in() | _added
    other = known.get(architecture.name)
    if other is not None and other is not architecture and (not replace or other.name in ours):
        registered = f"registered as {architecture.name!r} ({other.source})"
        raise ConfigError(f"another architecture is {registered}: choose another name")
    for name, owner in itertools.product(architecture.presets, known.values()):
        if name in owner.presets and owner.name != architecture.name:
            has = f"{owner.name!r} has a preset {name!r}"
            raise ConfigError(f"architecture {architecture.name!r}: {has}: choose another name")
    _added[architecture.name] = architecture
    return architecture


def find(name: str) -> Architecture | None:
    """Return the architecture of that name, or None. No other architecture is imported.

    Raises ConfigError if an installed package has one of that name, which cannot be loaded.
    """
    known = _added.get(name) or _of_file(name.replace("-", "_"))
    if known is not None and known.name == name:
        return known
    entry_point = process.entry_points(ENTRY_POINTS).get(name)
    return None if entry_point is None else _installed(entry_point)


def resolve(architecture: Architecture | str) -> Architecture:
    """Return the architecture itself, or the one of that name; ConfigError if there is none."""
    if not isinstance(architecture, str):
        return architecture
    known = find(architecture)
    if known is None:
        raise ConfigError(
            f"unknown architecture {architecture!r}{nearest(architecture, names())}; known:"
            f" {', '.join(names())}."
            " Name the file that describes it (--architecture FILE.py:NAME, in Python"
            " jax_transformer.register), or install its package"
        )
    return known


def usual_length(config: TransformerConfig) -> int:
    """Return the longest source and target of a model's architecture if no length is given."""
    with contextlib.suppress(ConfigError):  # a package that cannot be loaded need not be
        if (known := find(config.architecture)) is not None:
            return known.usual_length(config)
    return config.longest  # one that is passed as an object need not be registered


def architectures() -> list[Architecture]:
    """Return every architecture: built in, registered, and of installed packages."""
    for name, entry_point in process.entry_points(ENTRY_POINTS).items():
        if name not in built_in() | _added:
            try:
                _installed(entry_point)
            except ConfigError as error:
                if str(error) not in _skipped:
                    _skipped.add(str(error))
                    print(f"skipped an installed architecture: {error}", file=sys.stderr)
    return list((built_in() | _added).values())


def names() -> list[str]:
    return [architecture.name for architecture in architectures()]


def presets() -> dict[str, Preset]:
    """Return every preset by name."""
    return {name: entry for each in architectures() for name, entry in each.presets.items()}


def preset_names() -> list[str]:
    """List the names that :func:`preset` takes."""
    return list(presets())


def find_preset(name: str, architecture: Architecture | str | None = None) -> Preset:
    """Return the preset of that name: of ``architecture`` if it has one, else of any.

    The architecture of a configuration that names none, and the one after which a preset is named,
    are asked before all others are imported. Raises ConfigError if no preset has the name.
    """
    if architecture is not None and name in resolve(architecture).presets:
        return resolve(architecture).presets[name]
    for likely in (TransformerConfig.architecture, name, name.removesuffix("_repaired")):
        known = find(likely)
        if known is not None and name in known.presets:
            return known.presets[name]
    every = presets()
    if architecture is not None:
        every |= resolve(architecture).presets
    if name not in every:
        close = nearest(name, list(every))
        raise ConfigError(f"unknown preset {name!r}{close}; known: {', '.join(every)}")
    return every[name]


def preset(name: str, **sizes: Any) -> TransformerConfig:
    """Return a preset's configuration with fields changed as by ``TransformerConfig.with_sizes``.

    A size that is not given keeps the number of the source, or its rule (such as ``d_ff`` = 4
    ``d_model``). Raises ConfigError if no preset has the name, or a field is unknown or has a value
    that cannot be.
    """
    return find_preset(name).with_sizes(**sizes)


def load_from(spec: str) -> Architecture:
    """Import the architecture that the user names, register it, and return it.

    Args:
        spec: ``path/to/file.py:NAME``, ``package.module:NAME``, or the name of a registered
            architecture. The folder of a file is added to the end of ``sys.path``, so that it can
            import its neighbours.

    Raises:
        InputError: the file does not exist.
        ConfigError: it raises an exception, has no such name, or the name is not an Architecture.
    """
    if ":" not in spec:
        if spec.endswith(".py"):
            raise ConfigError(f"--architecture {spec}: name the Architecture too, {spec}:NAME")
        return resolve(spec)
    if not isinstance(value := load_object(spec), Architecture):
        raise ConfigError(f"{spec} is a {type(value).__name__}, not a jax_transformer.Architecture")
    return register(value)


def load_object(spec: str) -> Any:
    """Return the object that ``path/to/file.py:NAME`` or ``package.module:NAME`` names.

    Raises InputError if the file does not exist, and ConfigError if it raises an exception or has
    no such name.
    """
    where, _, name = spec.rpartition(":")
    if not where or not name:
        raise ConfigError(f"{spec}: give my_file.py:NAME or package.module:NAME")
    module = _import_file(Path(where)) if where.endswith(".py") else _import_module(where)
    if not hasattr(module, name):
        raise ConfigError(f"{where} has no {name!r}{nearest(name, list(vars(module)))}")
    return getattr(module, name)


@functools.cache
def built_in() -> dict[str, Architecture]:
    """Return the architectures of this folder by name, in the order of their files."""
    defined = [_of_file(path.stem) for path in sorted(_FOLDER.glob("*.py"))]
    return {each.name: each for each in defined if each is not None}


@functools.cache
def _of_file(stem: str) -> Architecture | None:
    """Return the architecture that a file of this folder defines, which is named after it."""
    if not stem.isidentifier() or not (_FOLDER / f"{stem}.py").is_file():
        return None
    module = importlib.import_module(f"{__package__}.{stem}")
    architecture: Architecture | None = getattr(module, "ARCHITECTURE", None)
    if architecture is not None:
        _check(architecture)
        if architecture.name.replace("-", "_") != stem:
            raise ConfigError(f"{stem}.py: name the file after {architecture.name!r}")
    return architecture


def _check(architecture: Architecture) -> None:
    for name, entry in architecture.presets.items():
        if entry.config.architecture != architecture.name:
            raise ConfigError(
                f"architecture {architecture.name!r}: preset {name!r} has the configuration of"
                f" another, architecture={entry.config.architecture!r}: set"
                f" architecture={architecture.name!r}"
            )


def _installed(entry_point: EntryPoint) -> Architecture:
    value = process.load_entry_point(entry_point)
    if not isinstance(value, Architecture) or value.name != entry_point.name:
        entry = f"entry point {entry_point.name} = {entry_point.value}"
        raise ConfigError(f"{entry}: not an Architecture of that name")
    return register(value)


def _import_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"cannot import {name}: {_one_line(error)}") from error


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    path = path.resolve()
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(f"{path}: {_one_line(error)}") from error
    return module


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


# Names and shapes of weights, which an architecture describes


def unchecked_table(architecture: Architecture | str, config: TransformerConfig) -> rules.Table:
    """Return the rules that an architecture has for a configuration, unchecked.

    Raises ConfigError if the architecture is not known, or its function raises an exception.
    """
    known = resolve(architecture)
    try:
        return known.weight_table(config)
    except Refusal:
        raise
    except Exception as error:  # in a user's file
        raised = f"its weight_table raised {_one_line(error)}"
        raise ConfigError(f"architecture {known.name!r}: {raised}") from error


def weight_table(
    config: TransformerConfig,
    part: str = "model",
    *,
    architecture: Architecture | str | None = None,
) -> rules.Table:
    """Return the checked rules that join the PyTorch and the Flax weights of a model.

    Args:
        config: the model.
        part: "model", or "encoder" for its encoder only, whose names then have no ``encoder.``.
        architecture: whose names the PyTorch weights have, as an Architecture or a registered name;
            ``config.architecture`` if None.

    Raises ConfigError if the architecture is not known or has no names for this configuration, or
    its encoder does not stand by itself.
    """
    if part not in PARTS:
        raise ConfigError(f"unknown part {part!r}{nearest(part, PARTS)}; known: {', '.join(PARTS)}")
    from jax_transformer import transformer  # loads jax

    known = resolve(architecture or config.architecture)
    table = unchecked_table(known, config)
    try:
        rules.check_complete(table, transformer.shapes(config))
    except ValueError as error:  # such as tied weights, which the architecture's module has not
        raise ConfigError(
            f"architecture {known.name!r} has no names for this configuration: {error}"
        ) from None
    if part == "encoder":
        table = rules.within(table, "encoder.")
        rules.check_complete(table, transformer.shapes(config, transformer.Encoder))
    return table


@dataclass(frozen=True)
class ModelWeights:
    """Names and shapes of a model's weights in PyTorch and here; no memory is taken."""

    config: TransformerConfig
    table: rules.Table
    """Rules between the two sides."""
    shapes: Mapping[str, Mapping[str, rules.Shape]]
    """Shapes by name, under ``torch`` and under ``flax``."""
    frozen: frozenset[str]
    """The Flax names of arrays that are never trained."""


def model_weights(
    config: TransformerConfig, architecture: Architecture | str | None = None
) -> ModelWeights:
    """Return the names and shapes of a model of ``config``, without allocating weights.

    ``architecture`` and errors are as for :func:`weight_table`.
    """
    from jax_transformer import transformer
    from jax_transformer.nn.embeddings import Frozen

    flax, table = transformer.shapes(config), weight_table(config, architecture=architecture)
    shapes = {"torch": rules.torch_shapes(table, flax), "flax": flax}
    return ModelWeights(config, table, shapes, frozenset(transformer.shapes(config, of=Frozen)))
