"""The weights of a model between PyTorch and Flax, as functions over ``{name: array}``."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, overload

import numpy as np

from jax_transformer import transformer
from jax_transformer.architectures import registry, tensor_names
from jax_transformer.architectures.base import Architecture
from jax_transformer.architectures.tensor_names import NameChanges
from jax_transformer.config import TransformerConfig
from jax_transformer.errors import ConfigError, InputError, nearest
from jax_transformer.nn.embeddings import Frozen
from jax_transformer.transformer import Encoder, Transformer
from jax_transformer.weights import arrays, rules

_PARTS: dict[str, Callable[..., Transformer | Encoder]] = {"model": Transformer, "encoder": Encoder}


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

    Raises:
        ConfigError: the architecture is not known or has no names for this configuration, or its
            encoder does not stand by itself.
    """
    if part not in _PARTS:
        raise ConfigError(
            f"unknown part {part!r}{nearest(part, list(_PARTS))}; known: {', '.join(_PARTS)}"
        )
    known = registry.resolve(architecture or config.architecture)
    table = registry.weight_table(known, config)
    try:
        rules.check_complete(table, transformer.shapes(config))
    except ValueError as error:  # such as tied weights, which the architecture's module has not
        raise ConfigError(
            f"architecture {known.name!r} has no names for this configuration: {error}"
        ) from None
    if part == "encoder":
        table = rules.within(table, "encoder.")
        rules.check_complete(table, transformer.shapes(config, _PARTS[part]))
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
    return _model_weights(config, registry.resolve(architecture or config.architecture))


@lru_cache(maxsize=32)
def _model_weights(config: TransformerConfig, architecture: Architecture) -> ModelWeights:
    flax, table = transformer.shapes(config), weight_table(config, architecture=architecture)
    shapes = {"torch": rules.torch_shapes(table, flax), "flax": flax}
    return ModelWeights(config, table, shapes, frozenset(transformer.shapes(config, of=Frozen)))


@overload
def from_torch(
    state_dict: Mapping[str, Any],
    config: TransformerConfig,
    *,
    dtype: Any = None,
    part: Literal["model"] = "model",
    architecture: Architecture | str | None = None,
    strip_prefix: str = "",
    ignore: Sequence[str] = (),
    rename: Mapping[str, str] | None = None,
) -> Transformer: ...


@overload
def from_torch(
    state_dict: Mapping[str, Any],
    config: TransformerConfig,
    *,
    dtype: Any = None,
    part: Literal["encoder"],
    architecture: Architecture | str | None = None,
    strip_prefix: str = "",
    ignore: Sequence[str] = (),
    rename: Mapping[str, str] | None = None,
) -> Encoder: ...


def from_torch(
    state_dict: Mapping[str, Any],
    config: TransformerConfig,
    *,
    dtype: Any = None,
    part: str = "model",
    architecture: Architecture | str | None = None,
    strip_prefix: str = "",
    ignore: Sequence[str] = (),
    rename: Mapping[str, str] | None = None,
) -> Transformer | Encoder:
    """Return the Flax model with the weights of a PyTorch state_dict.

    Args:
        state_dict: name -> np.ndarray (or torch tensor, if torch is installed), with exactly the
            names and shapes of the architecture.
        config: the architecture and its sizes.
        dtype: cast every array to this; None keeps each array's own.
        part: "encoder" for the state_dict of an encoder that the document prints without a decoder;
            the result is then an ``Encoder``.
        architecture: whose names ``state_dict`` has, as an Architecture or a registered name;
            ``config.architecture`` if None.
        strip_prefix: removed from the beginning of every name, such as ``module.``.
        ignore: patterns of names to leave out, such as ``criterion.*``.
        rename: new names by old ones. These three are explained at
            :class:`jax_transformer.architectures.tensor_names.NameChanges`.

    Raises:
        InputError: one message on everything missing, unexpected and mis-shaped (both shapes), and
            on tied copies that differ: the first dozen; all are the error's ``details``. Or float64
            arrays while JAX is in 32-bit mode and no dtype is given.
    """
    changes = NameChanges(strip_prefix, ignore=tuple(ignore), rename=rename or {})
    changed = changes.apply(state_dict)
    state = {changed[name]: arrays.of(name, state_dict[name]) for name in changed}
    table = weight_table(config, part, architecture=architecture)
    try:
        flax = rules.to_flax(table, state, transformer.shapes(config, _PARTS[part]))
    except InputError as error:
        names = {rule.torch for rule in table}
        raise tensor_names.explained(error, state, names) from None
    return transformer.unflatten_part(
        config,
        {name: arrays.as_jax(name, array, dtype) for name, array in flax.items()},
        _PARTS[part],
    )


def to_torch(
    model: Transformer | Encoder, *, architecture: Architecture | str | None = None
) -> dict[str, np.ndarray]:
    """Return the weights of a model, or of an encoder, under PyTorch's names.

    The inverse of :func:`from_torch`, bit for bit. Each array is contiguous and shares no memory.
    ``architecture`` is whose names they get, as an Architecture or a registered name; the
    model's own if None.
    """
    flax = {name: np.asarray(leaf) for name, leaf in transformer.flatten(model).items()}
    part = "encoder" if isinstance(model, Encoder) else "model"
    return rules.to_torch(weight_table(model.config, part, architecture=architecture), flax)


def into_torch(
    model: Transformer, module: Any, *, architecture: Architecture | str | None = None
) -> Any:
    """Fill a torch module with the model's weights, strictly, and return it. Needs torch.

    The module takes the weights' dtypes. ``architecture`` is as for :func:`to_torch`.
    """
    from jax_transformer.weights import torch_bridge

    return torch_bridge.fill(module, to_torch(model, architecture=architecture))
