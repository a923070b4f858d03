"""Encoder and decoder stacks: positions, blocks and norms around them; checks of their inputs.

Shapes and dtypes are always checked, values unless they are being traced.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jax_transformer.config import StackConfig, TransformerConfig, enums
from jax_transformer.config.fields import position_row
from jax_transformer.errors import ConfigError, InputError
from jax_transformer.nn.attention import Cache, segment_positions, visible_keys, within_segments
from jax_transformer.nn.blocks import Block, BlockResult, Context
from jax_transformer.nn.dropout import Dropout, from_rngs
from jax_transformer.nn.embeddings import PositionTable, RelativeBias, input_layer
from jax_transformer.nn.layers import Normalization
from jax_transformer.nn.local_attention import Window, window
from jax_transformer.shapes import AnyArray, Hidden, Memory, Source

Randomness = nnx.Rngs | PRNGKeyArray | Dropout | None


_SAVEABLE = {
    enums.Remat.MINIMAL: jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    enums.Remat.FULL: None,
}
"""The policy of a block that is computed again: the values that it stores; None is its input
only."""


class Stack(nnx.Module):
    """An encoder or a decoder without its embedding: positions, blocks and norms around them."""

    side: ClassVar[str]
    """The field of the configuration that describes it."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        stack: StackConfig = getattr(config, self.side)
        self.config = config
        here = stack.positions_at is enums.PositionsAt.EMBEDDING
        self.positions = PositionTable(config, stack, rngs=rngs) if here else None
        relative = stack.positions is enums.Positions.RELATIVE
        self.relative = RelativeBias(config, stack, rngs=rngs) if relative else None
        has_sums = stack.attention_span is enums.AttentionSpan.TRANSIENT_GLOBAL
        self.global_relative = RelativeBias(config, stack, rngs=rngs) if has_sums else None
        self.stack = stack
        self.embedding_norm = Normalization(config) if stack.embedding_norm else None
        self.embedding_norm_of = stack.embedding_norm_of
        self.blocks = nnx.List(map(partial(Block, config, rngs=rngs), [stack] * stack.layers))
        self.final_norm = Normalization(config) if stack.final_norm else None

    def __call__(
        self,
        x: Hidden,
        context: Context,
        dropout: Dropout,
        cache: Cache | None = None,
        *,
        attention: bool = False,
    ) -> tuple[Hidden, list[BlockResult]]:
        """Return the last block's output, normed if configured, and every block's result.

        ``x`` are token embeddings. A loop over layers (``config.scan_layers``) has no results: it
        is for calls without a cache and without ``attention``, the weights of each layer.
        """
        x = self._embedded(x, context)
        if self.stack.attention_span is not enums.AttentionSpan.FULL:
            context = context._replace(window=self._window(x, context))
        elif self.relative is not None:
            bias = self.relative(context.positions, context.keys_at)
            context = context._replace(self_bias=bias)
        for i in range(self.config.embedding_dropouts):
            site = dropout.scope(f"embedding.{i}" if i else "embedding")
            x = site(x, self.config.embedding_dropout)
        results: list[BlockResult] = []
        if self.config.scan_layers and cache is None and not attention:
            x = self._scan(x, context, dropout)
        else:
            for i, block in enumerate(self.blocks):
                inside, own = dropout.scope(f"blocks.{i}"), cache and cache.blocks[i]
                run = partial(block, context=context, dropout=inside, cache=own)
                results.append(self._remat(run)(x))
                x = results[-1].x
        if self.final_norm is not None:
            x = self.final_norm(x)
        if self.config.final_dropout:
            x = dropout.scope("final")(x, self.config.dropout)
        return x, results

    def _window(self, x: Hidden, context: Context) -> Window:
        valid = context.valid if enums.Mask.SOURCE_PADDING in self.stack.self_mask else None
        valid = jnp.ones(x.shape[:2], bool) if valid is None else valid
        return window(self.stack, valid, self.relative, self.global_relative)

    def _scan(self, x: Hidden, context: Context, dropout: Dropout) -> Hidden:
        """Return the last block's output, by one loop over the stacked arrays of all blocks."""
        graphdefs, states = zip(*(nnx.split(block) for block in self.blocks), strict=True)
        check_alike(states)
        count = len(states)

        def run(x: Hidden, layer: tuple[Int[Array, ""], Any]) -> tuple[Hidden, None]:
            i, state = layer
            here = dropout.layer("blocks", i, count)
            return nnx.merge(graphdefs[0], state)(x, context, here).x, None

        stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *states)
        layers = jnp.arange(count, dtype=jnp.int32), stacked
        return jax.lax.scan(self._remat(run, prevent_cse=False), x, layers)[0]

    def _remat(self, function: Callable[..., Any], prevent_cse: bool = True) -> Callable[..., Any]:
        """Return the function; ``config.remat`` says what in it is not stored for the gradient."""
        if self.config.remat is enums.Remat.NONE:
            return function
        policy = _SAVEABLE[self.config.remat]
        return jax.checkpoint(function, prevent_cse=prevent_cse, policy=policy)

    def _embedded(self, x: Hidden, context: Context) -> Hidden:
        """Return token embeddings with positions, and with their norm if there is one."""
        of_tokens = self.embedding_norm_of is enums.EmbeddingNormOf.TOKENS
        if self.embedding_norm is not None and of_tokens:
            x = self.embedding_norm(x)
        if self.positions is not None:
            from_start = context.length is None and context.segment_positions is None
            x = self.positions(x, context.table_positions, context.valid, from_start=from_start)
        if self.embedding_norm is not None and not of_tokens:
            x = self.embedding_norm(x)
        return x


class Encoder(Stack):
    """The stack that reads the source."""

    side = "encoder"

    def encode_embeddings(
        self,
        x: Float[AnyArray, "b s d"],
        valid: Bool[AnyArray, "b s"] | None = None,
        *,
        rngs: Randomness = None,
    ) -> Memory:
        """Return the encoder's output (b, s, d) for ``x`` (b, s, d) in place of scaled embeddings.

        ``valid`` (b, s) is False at padding; nothing is padding if None. Deterministic unless
        ``rngs`` is given. Raises InputError for wrong shapes and dtypes, and for more positions
        than there are.
        """
        x, valid = check_embeddings(x, valid, self.config)
        return self.read(x, valid, from_rngs(rngs, self.config.dropout_masks))[0]

    def read(
        self,
        x: Hidden,
        valid: Bool[Array, "b s"] | None,
        dropout: Dropout,
        *,
        attention: bool = False,
        segments: Int[Array, "b s"] | None = None,
    ) -> tuple[Memory, list[BlockResult]]:
        """Return the output and every block's result, see :meth:`Stack.__call__`."""
        positions = jnp.arange(x.shape[1], dtype=jnp.int32)
        mask = visible_keys(
            self.config.encoder.self_mask,
            source_valid=valid,
            target_valid=None,
            query_positions=positions,
            key_positions=positions,
            query_valid=valid,
        )
        context = Context(None, mask, None, positions, valid=valid)
        if segments is not None:
            context = context._replace(
                self_mask=within_segments(mask, segments, segments),
                segment_positions=segment_positions(segments),
            )
        return self(x, context, dropout, attention=attention)


class Decoder(Stack):
    """The stack that reads the target so far and the memory."""

    side = "decoder"

    def masks(
        self,
        source_valid: Bool[Array, "b s"],
        target_valid: Bool[Array, "b m"],
        query_positions: Int[Array, " q"],
        key_positions: Int[Array, " m"],
        query_valid: Bool[Array, "b q"],
    ) -> tuple[Bool[Array, "#b 1 #q m"] | None, Bool[Array, "#b 1 #q s"] | None]:
        """Return the masks of self- and cross-attention: True at the keys that a query may see."""
        valid = {
            "source_valid": source_valid,
            "target_valid": target_valid,
            "query_positions": query_positions,
            "query_valid": query_valid,
        }
        own = visible_keys(self.stack.self_mask, **valid, key_positions=key_positions)
        of_source = jnp.arange(source_valid.shape[1], dtype=jnp.int32)
        return own, visible_keys(self.stack.cross_mask, **valid, key_positions=of_source)


def check_alike(states: Sequence[Any]) -> None:
    """Raise ConfigError if the arrays of a stack's blocks differ in shape or dtype."""
    layers = [dict(nnx.to_flat_state(state)) for state in states]
    for i, layer in enumerate(layers):
        for path, variable in layer.items():
            array, first = variable.get_value(), layers[0][path].get_value()
            if (array.dtype, array.shape) != (first.dtype, first.shape):
                raise ConfigError(
                    "scan_layers=True needs blocks that are alike: blocks."
                    f"{i}.{'.'.join(map(str, path))} is {array.dtype} of shape {array.shape}, and"
                    " blocks.0's is not"
                )


def check_ids(
    ids: AnyArray, config: TransformerConfig, vocab_size: int, name: str
) -> Int[Array, "b n"]:
    """Return the ids as int32. Raises InputError with the side's ``name`` for ids out of range."""
    ids = ids if isinstance(ids, jax.Array) else np.asarray(ids)
    shape = ids.shape
    if len(shape) != 2 or not jnp.issubdtype(ids.dtype, jnp.integer):
        must = f"{name} ids must be integers of shape (batch, length)"
        raise InputError(f"{must}, not {ids.dtype} of shape {shape}")
    if 0 in shape:
        raise InputError(f"{name} ids have shape {shape}: empty")
    if shape[1] > config.longest:
        raise InputError(_too_long(shape[1], config, name))
    if not isinstance(ids, jax.core.Tracer):
        # Not jnp: under jit, the minimum even of a concrete array would be traced
        values = np.asarray(ids)
        low, high = int(values.min()), int(values.max())
        if low < 0 or high >= vocab_size:
            wrong = f"{name} id {low if low < 0 else high}"
            raise InputError(f"{wrong} is outside the vocabulary of {vocab_size}")
    return jnp.asarray(ids, jnp.int32)


def check_source(source: Source, config: TransformerConfig) -> Array:
    """Return the ids (b, s) as int32. Raises InputError for a source that the model cannot read."""
    if config.input_layer is not None:
        return input_layer(config).check(source, config)
    return check_ids(source, config, config.source_vocab_size, "source")


def _too_long(length: int, config: TransformerConfig, name: str) -> str:
    if length > config.max_length:
        return f"{name} is {length} tokens long, over max_length={config.max_length}"
    stacks = (config.encoder, config.decoder)
    rows = (position_row(stack.position_index, config.longest) for stack in stacks)
    row = next(row for row in rows if not 0 <= row < config.max_length)
    rule = f"position {config.longest} takes row {row} of its table, which does not exist"
    return f"{name} is {length} tokens long, but {rule}"


def check_pair(source: tuple[int, ...], target: tuple[int, ...], config: TransformerConfig) -> None:
    """Raise InputError if these shapes of ids do not belong together."""
    if source[0] != target[0]:
        raise InputError(f"source has {source[0]} rows and target {target[0]}")
    if config.equal_lengths and source[1] != target[1]:
        lengths = f"source has {source[1]} tokens and target {target[1]}"
        adds = "this decoder adds the memory position by position"
        raise InputError(f"{lengths}: {adds}, so both must be equally long")


def check_embeddings(
    x: Float[AnyArray, "b s d"], valid: Bool[AnyArray, "b s"] | None, config: TransformerConfig
) -> tuple[Float[Array, "b s d"], Bool[Array, "b s"] | None]:
    """Return embeddings and mask. Raises InputError for wrong shapes or dtypes, or if empty."""
    x = x if isinstance(x, jax.Array) else np.asarray(x)
    if x.ndim != 3 or x.shape[-1] != config.d_model or not jnp.issubdtype(x.dtype, jnp.floating):
        must = f"be floating-point numbers of shape (batch, length, {config.d_model})"
        raise InputError(f"embeddings must {must}, not {x.dtype} of shape {x.shape}")
    if 0 in x.shape:
        raise InputError(f"embeddings have shape {x.shape}: empty")
    if config.input_layer is None:
        if x.shape[1] > config.longest:
            raise InputError(_too_long(x.shape[1], config, "source"))
    else:
        input_layer(config).check_length(x.shape[1], config)
    x = jnp.asarray(x, config.compute_dtype)
    if valid is None:
        return x, None
    valid = valid if isinstance(valid, jax.Array) else np.asarray(valid)
    if valid.shape != x.shape[:2] or valid.dtype != bool:
        must = f"the mask of embeddings of shape {x.shape} must be bool of shape {x.shape[:2]}"
        raise InputError(f"{must}, not {valid.dtype} of shape {valid.shape}")
    return x, jnp.asarray(valid)
