"""Tiny models with random weights everywhere, ragged batches, and calls as a user makes them."""

import contextlib
import dataclasses
import enum
import functools
import os
import resource
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import jaxtyping
import numpy as np
from flax import nnx

import jax_transformer as jt
from jax_transformer import transformer
from jax_transformer.config import Positions, TransformerConfig, Tying
from jax_transformer.errors import ConfigError

# Odd sizes show swapped axes; square ones (d_model = d_ff = vocabulary = max_length) hide nothing
# behind a shape that happens to fit.
ODD: dict[str, Any] = dict(source_vocab_size=11, target_vocab_size=13, d_model=12, num_heads=3)
ODD |= dict(d_ff=20, num_layers=2, max_length=20)
SQUARE: dict[str, Any] = dict(vocab_size=16, d_model=16, d_ff=16, max_length=16)
SQUARE |= dict(num_heads=4, num_layers=2)


@contextlib.contextmanager
def memory_below(most: int):
    """Assert that what runs takes less than this many bytes of Python's memory at once."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


@contextlib.contextmanager
def unchecked():
    """Turn off the tests' runtime type checker, as for a user."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def stand_in(kind: type, **fields: Any) -> Any:
    """Return an object of a class, frozen or not, that has these attributes only."""
    instance = object.__new__(kind)
    vars(instance).update(fields)
    return instance


def failing(number: int) -> Callable[..., Any]:
    """Return a function that raises this error of the operating system."""

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let writes of this process fail, as on a full disk, beyond ``size`` bytes of a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def flip_a_bit(path: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def tiny(name: str = "lesson10_repaired", **changes: Any) -> TransformerConfig:
    """A preset at sizes that compile fast; a tied one with one vocabulary."""
    tied = dict(source_vocab_size=13) if jt.preset(name).tying is Tying.ALL else {}
    return jt.preset(name, **(ODD | tied | changes))


@functools.lru_cache(maxsize=128)
def skeleton(config: TransformerConfig) -> tuple[Any, dict[str, tuple[tuple, nnx.Variable]]]:
    """Return the definition of a model without arrays, and (path, variable) by dotted name."""
    definition, state = nnx.split(transformer.abstract(config))
    return definition, {
        ".".join(map(str, path)): (path, variable) for path, variable in nnx.to_flat_state(state)
    }


def shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    return {name: variable.shape for name, (_, variable) in skeleton(config)[1].items()}


def random_arrays(
    config: TransformerConfig, *, seed: int = 0, dtype: str = "float64"
) -> dict[str, np.ndarray]:
    """Return random arrays by name: two configurations share the arrays that fit both."""
    arrays = {}
    for name, shape in shapes(config).items():
        stack = name.split(".")[0]
        copied = name.endswith("positions.table") and (
            getattr(config, stack).positions is Positions.SINUSOIDAL_STORED
        )
        key = zlib.crc32(b"stored table" if copied else name.encode())
        random = np.random.default_rng([seed, key])
        # Matrices scaled by their input width, so that values stay of order one in every layer
        scale = 0.5
        if len(shape) == 2 and not copied:
            scale = shape[-1 if name.endswith("embedding") else 0] ** -0.5
        arrays[name] = (random.normal(size=shape) * scale + name.endswith("scale")).astype(dtype)
    return arrays


def random_model(
    config: TransformerConfig, *, seed: int = 0, dtype: str = "float64"
) -> transformer.Transformer:
    definition, variables = skeleton(config)
    arrays = random_arrays(config, seed=seed, dtype=dtype)
    state = [
        (path, variable.replace(jnp.asarray(arrays[name])))
        for name, (path, variable) in variables.items()
    ]
    return nnx.merge(definition, nnx.from_flat_state(state))


def ragged(vocab: int, pad: int, batch: int, length: int, seed: int = 0) -> np.ndarray:
    """Return ids (batch, length) with no pad inside a row and 0, 2, 4, ... pads at its end."""
    ids = np.random.default_rng(seed).integers(0, vocab, (batch, length))
    ids[ids == pad] = (pad + 1) % vocab
    for row in range(batch):
        ids[row, max(1, length - 2 * row) :] = pad
    return ids


def batch(
    config: TransformerConfig, *, rows: int = 3, source: int = 7, target: int = 5
) -> tuple[np.ndarray, np.ndarray]:
    sources = ragged(config.source_vocab_size, config.source_pad_id, rows, source, seed=1)
    targets = ragged(config.target_vocab_size, config.target_pad_id, rows, target, seed=2)
    return sources, targets


def furthest(a: Any, b: Any) -> float:
    """The largest absolute difference; a NaN on either side gives NaN, which no bound accepts."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape, f"shapes {a.shape} and {b.shape}"
    return float(np.abs(a - b).max())


def _another(value: Any) -> Any:
    """Return a value of the same kind, or of a field that may be None."""
    match value:
        case bool():
            return not value
        case enum.Enum():
            return next(x for x in type(value) if x is not value)
        case int():
            return 2 * value or 3
        case float():
            return value + 0.07
        case tuple():
            return value[1:]
    return 4


def with_one_field_changed(config: TransformerConfig) -> Iterator[tuple[str, TransformerConfig]]:
    """Yield the names of fields, and valid configurations in which they have another value."""
    for owner in ("", "encoder", "decoder"):
        part = getattr(config, owner) if owner else config
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            name = f"{owner}.{field.name}".removeprefix(".")
            if name not in ("encoder", "decoder", "architecture"):
                with contextlib.suppress(ConfigError):
                    changed = config.with_sizes(**{name: _another(value)})
                    if changed != config:
                        yield name, changed
