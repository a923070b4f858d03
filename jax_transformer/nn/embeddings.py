"""Tables that are looked up: token embeddings, positions, and biases of relative positions.

A source that is not ids of text, such as sound, has a layer of its own in place of an embedding:
an :class:`InputLayer`, found by its entry point.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jax_transformer.config import StackConfig, TransformerConfig, enums
from jax_transformer.config.fields import position_row
from jax_transformer.errors import ConfigError
from jax_transformer.nn import sharding
from jax_transformer.nn.layers import normal
from jax_transformer.nn.products import product
from jax_transformer.nn.sharding import FSDP, TENSOR
from jax_transformer.runtime import process
from jax_transformer.shapes import Source

ENTRY_POINTS = "jax_transformer.input_layers"


class Frozen(nnx.Variable):
    """An array of the checkpoint that is never trained: loaded, used and written back unchanged."""


@dataclass(frozen=True)
class InputLayer:
    """A layer that takes the place of the source's embedding."""

    layer: Callable[..., nnx.Module]
    """Called with the configuration and ``rngs``. The module returns the encoder's input (b, s, d)
    for a checked source, without positions, in the dtype of its weights.
    """
    check: Callable[[Source, TransformerConfig], Array]
    """Returns a source as an array, or raises InputError if the model cannot read it."""
    check_length: Callable[[int, TransformerConfig], None]
    """Raises InputError for a number of positions that the encoder does not have."""


def input_layer(config: TransformerConfig) -> InputLayer:
    """Return the input layer of a model. Raises ConfigError if it is not installed."""
    entry_point = process.entry_points(ENTRY_POINTS).get(config.input_layer or "")
    if entry_point is None:
        raise ConfigError(f"no installed package has the input layer {config.input_layer!r}")
    value: InputLayer = process.load_entry_point(entry_point, InputLayer)
    return value


def deviation(config: TransformerConfig, init: enums.Init | None) -> float:
    """Return the deviation of a new table's numbers; without ``init`` the model's decides."""
    return config.d_model**-0.5 if (init or config.init) is enums.Init.XAVIER else 1.0


class Embedding(nnx.Module):
    """A table (v, d) that is looked up by id, and is also the output layer if that is tied to it.

    flax.nnx.Embed rounds to the dtype that it was built in, whatever dtype its table was loaded in.
    """

    def __init__(
        self,
        config: TransformerConfig,
        size: int,
        pad_id: int,
        init: enums.Init | None = None,
        *,
        rngs: nnx.Rngs,
    ):
        self.padding_trained = config.padding_trained
        self.frozen_id = pad_id if config.padding_frozen else None
        self.dtype, self.matmul_precision = config.compute_dtype, config.matmul_precision
        table = normal(deviation(config, init), rngs.params(), (size, config.d_model), TENSOR, FSDP)
        self.embedding = nnx.Param(table if self.padding_trained else table.at[pad_id].set(0))

    def __call__(self, ids: Int[Array, "b n"], valid: Bool[Array, "b n"]) -> Float[Array, "b n d"]:
        """Return the rows of ``ids``, all inside the table; ``valid`` is False at padding."""
        rows = jnp.take(self._table(), ids, axis=0, mode="clip")
        if self.padding_trained:
            return rows
        return jnp.where(valid[..., None], rows, jax.lax.stop_gradient(rows))

    def attend(self, x: Float[Array, "b n d"]) -> Float[Array, "b n v"]:
        """Return the logits: the product of ``x`` with every row."""
        rows = x.reshape(-1, x.shape[-1])
        flat = product(rows, self._table(), self.matmul_precision, transposed=True)
        logits = flat.reshape(*x.shape[:-1], -1)
        if self.frozen_id is None:
            return logits
        frozen = jnp.arange(logits.shape[-1]) == self.frozen_id
        return jnp.where(frozen[None, None], jax.lax.stop_gradient(logits), logits)

    def _table(self) -> Float[Array, "v d"]:
        """Return the table in the computation's dtype, which looks up rows that are complete."""
        table = self.embedding[...]
        table = table if self.dtype is None else table.astype(self.dtype)
        return sharding.constrain(table, TENSOR, None)


@lru_cache(maxsize=8)
def sinusoids(
    length: int,
    width: int,
    exponent: float = 1.0,
    layout: enums.Sinusoids = enums.Sinusoids.INTERLEAVED,
) -> Float[np.ndarray, "n d"]:
    """Return sinusoids of positions from 0 on, in float64: Vaswani et al. 2017, section 3.5.

    Column 2i is sin(p / 10000^(exponent · 2i/d)), column 2i+1 the cosine; other layouts put all
    sines into the first half.
    """
    last = width - 2 if layout is enums.Sinusoids.TENSOR2TENSOR else width
    powers = np.arange(0, width, 2) / last
    angle = np.arange(length)[:, None] / 10_000.0 ** (exponent * powers)
    if layout is enums.Sinusoids.INTERLEAVED:
        return np.stack([np.sin(angle), np.cos(angle)], axis=-1).reshape(length, width)
    return np.concatenate([np.sin(angle), np.cos(angle)], axis=-1)


def position_sinusoids(config: TransformerConfig, stack: StackConfig) -> Float[np.ndarray, "n d"]:
    """Return the rows of a stack's table of sinusoids, in float64.

    If padding gets no position, its row is that before the first, with zeros (fairseq).
    """
    table = sinusoids(
        config.rows(stack) + stack.position_offset,
        config.d_model,
        stack.position_exponent,
        stack.sinusoids,
    )
    if stack.position_index is enums.PositionIndex.NOT_PADDING and stack.position_offset:
        table = table.copy()
        table[stack.position_offset - 1] = 0
    return table


class PositionTable(nnx.Module):
    """A table with one row per position, added to embeddings or to a feed-forward's input."""

    def __init__(self, config: TransformerConfig, stack: StackConfig, *, rngs: nnx.Rngs):
        self.config, self.stack = config, stack
        self.kind, self.index = stack.positions, stack.position_index
        self.offset = stack.position_offset
        self.length = config.rows(stack) + self.offset
        self.table: nnx.Variable
        if self.kind is enums.Positions.SINUSOIDAL_STORED:
            table = position_sinusoids(config, stack)
            self.table = Frozen(jnp.asarray(table.astype(np.float32)))
        if self.kind is enums.Positions.LEARNED:
            shape, own = (self.length, config.d_model), deviation(config, stack.init)
            self.table = nnx.Param(normal(own, rngs.params(), shape, None, FSDP))

    def __call__(
        self,
        x: Float[Array, "b n d"],
        positions: Int[Array, "#b n"],
        valid: Bool[Array, "b n"] | None = None,
        *,
        from_start: bool = True,
    ) -> Float[Array, "b n d"]:
        """Return ``x`` plus the rows at ``positions``.

        ``valid`` is False at padding; ``from_start`` says that each row is one text and begins
        with its first token.
        """
        if self.kind is enums.Positions.SINUSOIDAL:
            table = jnp.asarray(position_sinusoids(self.config, self.stack).astype(x.dtype))
        elif self.kind in (enums.Positions.SINUSOIDAL_STORED, enums.Positions.LEARNED):
            table = self.table[...].astype(x.dtype)
        else:
            return x
        shown = valid if self.index is enums.PositionIndex.NOT_PADDING else None
        rows = positions
        if shown is not None and from_start:
            rows = jnp.maximum(jnp.cumsum(shown.astype(jnp.int32), axis=1) - 1, 0)
        elif self.index is enums.PositionIndex.TRUNCATED_COSINE:
            known = [position_row(self.index, i) for i in range(self.length)]
            rows = jnp.asarray(known, jnp.int32)[positions]
        added = jnp.take(table, rows + self.offset, axis=0)
        return x + (added if shown is None else jnp.where(shown[..., None], added, 0))


@lru_cache(maxsize=8)
def relative_buckets(length: int, count: int, max_distance: int) -> Int[np.ndarray, " n"]:
    """Return the bucket of each distance below ``length``, of ``count`` buckets for one direction.

    The first half of them are for single distances. The others grow logarithmically up to
    ``max_distance``; all longer distances share the last bucket. In float32 and in this order of
    operations, as transformers computes it: an edge between two buckets depends on its rounding.
    """
    single = count // 2
    distances = np.arange(length)
    ratios = np.maximum(distances, 1).astype(np.float32) / np.float32(single)
    powers = np.log(ratios) / np.float32(math.log(max_distance / single))
    far = single + (powers * np.float32(count - single)).astype(np.int64)
    return np.where(distances < single, distances, np.minimum(far, count - 1)).astype(np.int32)


class RelativeBias(nnx.Module):
    """Biases of the attention scores for every head and bucket: Raffel et al. 2020, section 2.1.

    If a query may see keys after it, half of the buckets are for those.
    """

    def __init__(self, config: TransformerConfig, stack: StackConfig, *, rngs: nnx.Rngs):
        self.max_distance = stack.relative_max_distance
        self.directions = 1 if enums.Mask.CAUSAL in stack.self_mask else 2
        self.dtype = config.compute_dtype
        shape = (stack.relative_buckets, config.heads(stack))
        self.embedding = nnx.Param(normal(config.d_model**-0.5, rngs.params(), shape, None, TENSOR))

    def __call__(
        self, query_positions: Int[Array, " q"], key_positions: Int[Array, " k"]
    ) -> Float[Array, "1 h q k"]:
        """Return the bias of the attention scores."""
        return self.of_distances(key_positions[None, None, :] - query_positions[None, :, None])

    def of_distances(self, distances: Int[Array, "b q k"]) -> Float[Array, "b h q k"]:
        """Return the bias of scores whose keys are this far after their queries."""
        table = self.embedding[...]
        count = table.shape[0] // self.directions
        last = self.max_distance  # longer distances share its bucket
        known = jnp.asarray(relative_buckets(last + 1, count, last))
        index, after = known[jnp.minimum(jnp.abs(distances), last)], distances > 0
        both = self.directions == 2
        index = index + jnp.where(after, count, 0) if both else jnp.where(after, 0, index)
        bias = jnp.take(table if self.dtype is None else table.astype(self.dtype), index, axis=0)
        return bias.transpose(0, 3, 1, 2)
