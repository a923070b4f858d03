"""Encoder, Decoder and Transformer: the whole model, described by a TransformerConfig."""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jax_transformer.config import EmbeddingScale, Mask, Part, Residual, StackConfig, TransformerConfig, Tying
from jax_transformer.errors import ConfigError, InputError
from jax_transformer.nn import cache as caches
from jax_transformer.nn import masks
from jax_transformer.nn.blocks import Block, BlockResult, Context
from jax_transformer.nn.cache import Cache
from jax_transformer.nn.dropout import Dropout, from_rngs
from jax_transformer.nn.embedding import Embedding
from jax_transformer.nn.linear import output
from jax_transformer.nn.norm import LayerNorm
from jax_transformer.nn.positions import PositionTable
from jax_transformer.shapes import AnyArray, Hidden, Logits, Memory, SourceIds, TargetIds, Weights

Randomness = nnx.Rngs | PRNGKeyArray | Dropout | None


def _places(count: int) -> Int[Array, " n"]:
    return jnp.arange(count, dtype=jnp.int32)


class Attention(NamedTuple):
    """The attention weights of a call, one array a layer; in a call with dropout they are the weights after it."""

    encoder: tuple[Weights, ...]
    decoder: tuple[Weights, ...]
    cross: tuple[Weights, ...]


class Stack(nnx.Module):
    """Positions, blocks and, where there is one, a final norm: an encoder or a decoder without its embedding."""

    def __init__(self, config: TransformerConfig, stack: StackConfig, *, rngs: nnx.Rngs):
        self.embedding_rate = config.embedding_dropout
        self.positions = PositionTable(config, stack.positions, rngs=rngs)
        self.blocks = nnx.List([Block(config, stack, rngs=rngs) for _ in range(stack.layers)])
        self.final_norm = LayerNorm(config) if stack.final_norm else None

    def __call__(
        self, x: Hidden, positions: Int[Array, " n"], context: Context, dropout: Dropout, cache: Cache | None = None
    ) -> tuple[Hidden, list[BlockResult]]:
        """The last block's output, normed where configured, and every block's result."""
        x = dropout.scope("embedding")(self.positions(x, positions), self.embedding_rate)
        results: list[BlockResult] = []
        for i, block in enumerate(self.blocks):
            results.append(block(x, context, dropout.scope(f"blocks.{i}"), cache and cache.blocks[i]))
            x = results[-1].x
        return (self.final_norm(x) if self.final_norm is not None else x), results


class Encoder(Stack):
    """The stack that reads the source."""


class Decoder(Stack):
    """The stack that reads the target so far and the memory."""


class Transformer(nnx.Module):
    """An encoder-decoder. It holds weights only: randomness comes through ``rngs``, the decode cache goes in and out of :meth:`decode_step`."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        tied = config.tying is Tying.ALL
        self.source_embedding = None if tied else Embedding(config, config.source_vocab_size, rngs=rngs)
        self.target_embedding = Embedding(config, config.target_vocab_size, rngs=rngs)
        self.encoder = Encoder(config, config.encoder, rngs=rngs)
        self.decoder = Decoder(config, config.decoder, rngs=rngs)
        self.output = output(config, rngs=rngs) if config.tying is Tying.NONE else None
        if config.tying is not Tying.NONE and config.output_bias:
            self.output_bias = nnx.Param(jnp.zeros(config.target_vocab_size, jnp.float32))

    def __call__(
        self, source: SourceIds, target: TargetIds, *, rngs: Randomness = None, return_attention: bool = False
    ) -> Logits | tuple[Logits, Attention]:
        """Logits (b, t, v) of the token after each target position. Deterministic unless ``rngs`` is given.

        Raises InputError for ids outside the vocabulary (where they are concrete), sequences over ``max_length`` and empty batches.
        """
        dropout = from_rngs(rngs, self.config.dropout_masks)
        memory, encoded = self._encode(source, dropout)
        target = self._checked(target, self.config.target_vocab_size, "target")
        if len(target) != len(source):
            raise InputError(f"source has {len(source)} rows and target {len(target)}")
        positions = _places(target.shape[1])
        valid = self._valid(source, target)
        context = Context(
            memory,
            self._mask(self.config.decoder.self_mask, valid, positions, positions),
            self._mask(self.config.decoder.cross_mask, valid, positions, _places(memory.shape[1])),
        )
        x, decoded = self.decoder(self._embed(self.target_embedding, target), positions, context, dropout.scope("decoder"))
        logits = self._logits(x)
        if not return_attention:
            return logits
        return logits, Attention(
            *(
                tuple(w for w in weights if w is not None)
                for weights in ([r.self_weights for r in encoded], [r.self_weights for r in decoded], [r.cross_weights for r in decoded])
            )
        )

    def encode(self, source: SourceIds, *, rngs: Randomness = None) -> Memory:
        """The encoder's output (b, s, d)."""
        return self._encode(source, from_rngs(rngs, self.config.dropout_masks))[0]

    def init_cache(self, source: SourceIds, places: int, beams: int = 1) -> Cache:
        """Encode ``source`` and make room for ``beams`` hypotheses a row, each of up to ``places`` target tokens.

        The memory's keys and values are projected once, here, and kept once for all beams.
        """
        if places > self.config.max_length:
            raise ConfigError(f"{places} tokens to generate are over max_length={self.config.max_length}")
        decoder = self.config.decoder
        if Part.SELF in decoder.parts and Mask.CAUSAL not in decoder.self_mask:
            raise ConfigError("a decoder whose self-attention is not causal cannot be cached")
        if sum(branch.parts.count(Part.SELF) for branch in decoder.branches) > 1:
            raise ConfigError("a decoder block that attends to itself twice has two sets of keys, and the cache one")
        if any(branch.residual is Residual.MEMORY for branch in decoder.branches):
            raise ConfigError("a decoder whose residual is the memory cannot be cached: the cache holds no memory")
        memory, _ = self._encode(source, Dropout())
        source_valid, _ = self._valid(source, None)
        batch, entries = memory.shape[0], places * beams
        blocks = tuple(caches.block_cache(*block.cross_attention.keys_values(memory), entries) for block in self.decoder.blocks)
        valid, none = jnp.zeros((batch, entries), bool), jnp.zeros((), jnp.int32)
        return Cache(blocks, valid, source_valid, none, caches.own_lineage(batch, beams, places))

    def decode_step(self, tokens: Int[Array, "b k"], cache: Cache) -> tuple[Float[Array, "b k v"], Cache]:
        """Logits of the token that follows each beam's last one, and the cache with these last ones in it, at place ``cache.length``.

        The beams are so many queries at one position: each sees the memory of its row, and of the row's entries those it descends from.
        """
        length, beams = cache.length, tokens.shape[1]
        here = tokens != self.config.target_pad_id
        target_valid = jax.lax.dynamic_update_slice_in_dim(cache.target_valid, here, length * beams, axis=1)
        valid, position = (cache.source_valid, target_valid), jnp.broadcast_to(length, beams)
        self_mask = self._mask(self.config.decoder.self_mask, valid, position, _places(target_valid.shape[1]) // beams)
        if beams > 1:
            self_mask = cache.ancestors() if self_mask is None else self_mask & cache.ancestors()
        cross_mask = self._mask(self.config.decoder.cross_mask, valid, position, _places(cache.source_valid.shape[1]))
        x = self._embed(self.target_embedding, tokens)
        x, results = self.decoder(x, position, Context(None, self_mask, cross_mask, length), Dropout(), cache)
        blocks = tuple(r.cache for r in results if r.cache is not None)
        return self._logits(x), cache._replace(blocks=blocks, target_valid=target_valid, length=length + 1)

    def check_source(self, source: SourceIds) -> Int[Array, "b s"]:
        """The source ids as int32. Raises InputError where the model cannot read them."""
        return self._checked(source, self.config.source_vocab_size, "source")

    def _encode(self, source: SourceIds, dropout: Dropout) -> tuple[Memory, list[BlockResult]]:
        source = self.check_source(source)
        positions = _places(source.shape[1])
        mask = self._mask(self.config.encoder.self_mask, self._valid(source, None), positions, positions)
        table = self.target_embedding if self.source_embedding is None else self.source_embedding
        return self.encoder(self._embed(table, source), positions, Context(None, mask, None), dropout.scope("encoder"))

    def _embed(self, table: Embedding, ids: Int[Array, "b n"]) -> Hidden:
        x = table(ids)
        if self.config.embedding_scale is EmbeddingScale.SQRT_D_MODEL:
            x = x * jnp.asarray(math.sqrt(self.config.d_model), x.dtype)
        return x

    def _logits(self, x: Hidden) -> Logits:
        if self.output is not None:
            return self.output(x)
        logits = self.target_embedding.attend(x)
        return logits + self.output_bias[...].astype(logits.dtype)[None, None] if self.config.output_bias else logits

    def _valid(self, source: AnyArray, target: AnyArray | None) -> tuple[Bool[Array, "b s"], Bool[Array, "b t"] | None]:
        source_valid = jnp.asarray(source) != self.config.source_pad_id
        return source_valid, None if target is None else jnp.asarray(target) != self.config.target_pad_id

    def _mask(self, kinds, valid, query_positions, key_positions) -> Bool[Array, "#b 1 #q k"] | None:
        source_valid, target_valid = valid
        return masks.visible(
            kinds, source_valid=source_valid, target_valid=target_valid, query_positions=query_positions, key_positions=key_positions
        )

    def _checked(self, ids: AnyArray, vocab_size: int, name: str) -> Int[Array, "b n"]:
        """The ids as int32, refused where they cannot be looked up (values only where they are concrete, not while tracing)."""
        ids = ids if isinstance(ids, jax.Array) else np.asarray(ids)
        shape = ids.shape
        if len(shape) != 2 or not jnp.issubdtype(ids.dtype, jnp.integer):
            raise InputError(f"{name} ids must be integers of shape (batch, length), not {ids.dtype} of shape {shape}")
        if 0 in shape:
            raise InputError(f"{name} ids have shape {shape}: empty")
        if shape[1] > self.config.max_length:
            raise InputError(f"{name} is {shape[1]} tokens long, over max_length={self.config.max_length}")
        if not isinstance(ids, jax.core.Tracer):
            values = np.asarray(ids)  # not jnp: under jit, even a concrete array's minimum would be traced
            low, high = int(values.min()), int(values.max())
            if low < 0 or high >= vocab_size:
                raise InputError(f"{name} id {low if low < 0 else high} is outside the vocabulary of {vocab_size}")
        return jnp.asarray(ids, jnp.int32)


def flatten(model: nnx.Module, kind: type[nnx.Variable] = nnx.Variable) -> dict[str, Any]:
    """The model's arrays of one kind by dotted path, as ``encoder.blocks.0.self_attention.query.kernel``."""
    return {".".join(map(str, path)): variable.get_value() for path, variable in nnx.to_flat_state(nnx.state(model, kind))}


def abstract(config: TransformerConfig) -> Transformer:
    """The model with shapes in the place of arrays: takes no memory however big it is."""
    return nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))


@lru_cache(maxsize=32)
def _skeleton(config: TransformerConfig) -> tuple[nnx.GraphDef, tuple[tuple[tuple[Any, ...], nnx.Variable], ...]]:
    graphdef, state = nnx.split(abstract(config))
    return graphdef, tuple(nnx.to_flat_state(state))


def unflatten(config: TransformerConfig, arrays: Mapping[str, Any]) -> Transformer:
    """The model of ``config`` with these arrays, by the paths of :func:`flatten`; all and no others must be given. Works under jit."""
    graphdef, flat = _skeleton(config)
    names = [".".join(map(str, path)) for path, _ in flat]
    if set(names) != set(arrays):
        raise ConfigError(f"these arrays do not fit the configuration: {', '.join(sorted(set(names) ^ set(arrays)))}")
    pairs = [(path, variable.replace(arrays[name])) for (path, variable), name in zip(flat, names, strict=True)]
    return nnx.merge(graphdef, nnx.from_flat_state(pairs))
