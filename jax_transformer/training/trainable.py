"""The arrays that a run trains: all, all but those frozen by name, or low-rank adapters."""

import fnmatch
import math
from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from jax_transformer import transformer
from jax_transformer.config import TransformerConfig
from jax_transformer.errors import ConfigError
from jax_transformer.training.options import TrainOptions
from jax_transformer.weights.arrays import LORA_A, LORA_B, LORA_SCALE

Arrays = dict[str, jax.Array]


def check(options: TrainOptions, config: TransformerConfig) -> None:
    """Raise ConfigError for a pattern that fits no parameter, or if none is left to train."""
    shapes = transformer.shapes(config, of=nnx.Param)
    frozen = _matching("freeze", options.freeze, shapes)
    if len(frozen) == len(shapes):
        raise ConfigError(f"freeze={' '.join(options.freeze)}: no parameter is left to train")
    if options.lora.rank:
        for name in _matching("lora.targets", options.lora.targets, shapes):
            shape = shapes[name]
            if len(shape) != 2 or options.lora.rank > min(shape):
                raise ConfigError(
                    f"lora.rank={options.lora.rank} does not fit {name}, which lora.targets "
                    f"names: its shape is {shape}"
                )


def divide(params: Arrays, options: TrainOptions) -> tuple[Arrays, Arrays]:
    """Divide the model's parameters into those that are trained and those that are not.

    With ``lora.rank`` the trained ones are new adapters, whose product is zero at first.
    """
    if options.lora.rank:
        trained, scales = _adapters(params, options)
        return trained, params | scales
    frozen = set(_matching("freeze", options.freeze, params))
    return (
        {name: array for name, array in params.items() if name not in frozen},
        {name: array for name, array in params.items() if name in frozen},
    )


def _adapters(params: Mapping[str, jax.Array], options: TrainOptions) -> tuple[Arrays, Arrays]:
    """New adapters, ``a`` uniform as PyTorch draws a linear layer and ``b`` zero, and scales."""
    rank, trained, scales = options.lora.rank, {}, {}
    names = _matching("lora.targets", options.lora.targets, params)
    keys = jax.random.split(jax.random.fold_in(jax.random.key(options.seed), 1), len(names))
    for name, key in zip(names, keys, strict=True):
        (rows, columns), dtype = params[name].shape, params[name].dtype
        bound = 1 / math.sqrt(rows)
        trained[name + LORA_A] = jax.random.uniform(key, (rows, rank), dtype, -bound, bound)
        trained[name + LORA_B] = jnp.zeros((rank, columns), dtype)
        scales[name + LORA_SCALE] = jnp.asarray(options.lora.alpha / rank, dtype)
    return trained, scales


def _matching(option: str, patterns: Sequence[str], names: Iterable[str]) -> list[str]:
    """Return names that fit any of the shell-style patterns. Raises ConfigError for one without."""
    names = list(names)
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ConfigError(
                f"{option}: {pattern} fits no parameter; names are such as {names[0]}"
            )
    return [name for name in names if any(fnmatch.fnmatchcase(name, p) for p in patterns)]
