"""Attention masks: True at the keys that a query may see."""

from collections.abc import Collection

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jax_transformer.config import Mask


def visible(
    kinds: Collection[Mask],
    *,
    source_valid: Bool[Array, "b s"] | None,
    target_valid: Bool[Array, "b t"] | None,
    query_positions: Int[Array, " q"],
    key_positions: Int[Array, " k"],
) -> Bool[Array, "#b 1 #q k"] | None:
    """The conjunction of ``kinds``, or None if nothing is masked.

    ``source_valid`` and ``target_valid`` are False at padding; None if there are no ids to tell by.
    """
    masks = []
    if Mask.SOURCE_PADDING in kinds and source_valid is not None:
        masks.append(source_valid[:, None, None, :])
    if Mask.TARGET_PADDING in kinds and target_valid is not None:
        masks.append(target_valid[:, None, None, :])
    if Mask.CAUSAL in kinds:
        masks.append((key_positions[None, :] <= query_positions[:, None])[None, None])
    if not masks:
        return None
    result = masks[0]
    for mask in masks[1:]:
        result = jnp.logical_and(result, mask)
    return result
