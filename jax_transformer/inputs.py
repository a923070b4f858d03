"""Checks of model inputs: shapes and dtypes always, values unless they are being traced."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jax_transformer.config import TransformerConfig
from jax_transformer.config.model import position_row
from jax_transformer.errors import InputError
from jax_transformer.shapes import AnyArray


def check_ids(
    ids: AnyArray, config: TransformerConfig, vocab_size: int, name: str
) -> Int[Array, "b n"]:
    """The ids as int32. Raises InputError, with the side's ``name``, for ids out of range."""
    ids = ids if isinstance(ids, jax.Array) else np.asarray(ids)
    shape = ids.shape
    if len(shape) != 2 or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise InputError(
            f"{name} ids must be integers of shape (batch, length), "
            f"not {ids.dtype} of shape {shape}"
        )
    if 0 in shape:
        raise InputError(f"{name} ids have shape {shape}: empty")
    check_length(shape[1], config, name)
    if not isinstance(ids, jax.core.Tracer):
        # Not jnp: under jit, the minimum even of a concrete array would be traced
        values = np.asarray(ids)
        low, high = int(values.min()), int(values.max())
        if low < 0 or high >= vocab_size:
            raise InputError(
                f"{name} id {low if low < 0 else high} is outside the vocabulary of {vocab_size}"
            )
    return jnp.asarray(ids, jnp.int32)


def check_length(length: int, config: TransformerConfig, name: str) -> None:
    """Raise InputError for more tokens than there are positions."""
    if length > config.max_length:
        raise InputError(f"{name} is {length} tokens long, over max_length={config.max_length}")
    if length > config.longest:
        rows = [
            position_row(stack.position_index, config.longest)
            for stack in (config.encoder, config.decoder)
        ]
        row = next(row for row in rows if not 0 <= row < config.max_length)
        rule = f"position {config.longest} takes row {row} of its table, which does not exist"
        raise InputError(f"{name} is {length} tokens long, but {rule}")


def check_pair(source: tuple[int, ...], target: tuple[int, ...], config: TransformerConfig) -> None:
    """Raise InputError if these shapes of ids do not belong together."""
    if source[0] != target[0]:
        raise InputError(f"source has {source[0]} rows and target {target[0]}")
    if config.equal_lengths and source[1] != target[1]:
        lengths = f"source has {source[1]} tokens and target {target[1]}"
        raise InputError(
            f"{lengths}: this decoder adds the memory position by position, "
            "so both must be equally long"
        )


def check_embeddings(
    x: Float[AnyArray, "b s d"], valid: Bool[AnyArray, "b s"] | None, config: TransformerConfig
) -> tuple[Float[Array, "b s d"], Bool[Array, "b s"] | None]:
    """The embeddings and their mask. Raises InputError for wrong shapes or dtypes, or if empty."""
    x = x if isinstance(x, jax.Array) else np.asarray(x)
    if x.ndim != 3 or x.shape[-1] != config.d_model or not jnp.issubdtype(x.dtype, jnp.floating):
        raise InputError(
            "embeddings must be floating-point numbers of shape "
            f"(batch, length, {config.d_model}), not {x.dtype} of shape {x.shape}"
        )
    if 0 in x.shape:
        raise InputError(f"embeddings have shape {x.shape}: empty")
    check_length(x.shape[1], config, "source")
    if valid is not None and not isinstance(valid, jax.Array):
        valid = np.asarray(valid)
    if valid is not None and (valid.shape != x.shape[:2] or valid.dtype != bool):
        raise InputError(
            f"the mask of embeddings of shape {x.shape} must be bool of shape {x.shape[:2]}, "
            f"not {valid.dtype} of shape {valid.shape}"
        )
    return jnp.asarray(x, config.compute_dtype), None if valid is None else jnp.asarray(valid)
