"""Transformer: the whole model, described by a TransformerConfig, and its arrays by name."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jax_transformer.config import StackConfig, TransformerConfig, enums
from jax_transformer.errors import ConfigError
from jax_transformer.nn import sharding, stacks
from jax_transformer.nn.attention import (
    BlockCache,
    Cache,
    Prefix,
    cache_layout,
    segment_positions,
    within_segments,
)
from jax_transformer.nn.blocks import BlockResult, Context
from jax_transformer.nn.dropout import Dropout, from_rngs
from jax_transformer.nn.embeddings import Embedding, Frozen, input_layer
from jax_transformer.nn.layers import linear
from jax_transformer.nn.sharding import ROWS, TENSOR
from jax_transformer.nn.stacks import Decoder, Encoder, Randomness
from jax_transformer.shapes import (
    AnyArray,
    Features,
    Hidden,
    Logits,
    Memory,
    Segments,
    Source,
    TargetIds,
    Weights,
)

Module = TypeVar("Module", bound=nnx.Module)
_BLOCK = ".blocks.0."
_MANY_LAYERS = 24
"""Layers of both stacks: building more of them for their shapes takes most of a second."""


class Attention(NamedTuple):
    """The attention weights of a call, one array per layer, after dropout if there is any.

    Those of local attention are over each query's window: column j, of a query in block n of
    ``local_radius + 1`` tokens, is the token (n − 1) · (local_radius + 1) + j; the sums follow.
    """

    encoder: tuple[Weights, ...]
    decoder: tuple[Weights, ...]
    cross: tuple[Weights, ...]


class Transformer(nnx.Module):
    """An encoder-decoder, described by its configuration.

    It holds only weights: randomness comes through ``rngs``, and the KV cache goes in and out of
    :meth:`decode_step`.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        shared = config.tying.one_embedding
        self.stem = input_layer(config).layer(config, rngs=rngs) if config.input_layer else None
        source = config.source_vocab_size, config.source_pad_id, config.encoder.init
        target = config.target_vocab_size, config.target_pad_id, config.decoder.init
        none = shared or config.input_layer
        self.source_embedding = None if none else Embedding(config, *source, rngs=rngs)
        self.target_embedding = Embedding(config, *target, rngs=rngs)
        self.encoder = Encoder(config, rngs=rngs)
        self.decoder = Decoder(config, rngs=rngs)
        # The output layer is not part of the stacks: TORCH_TRANSFORMER draws it as torch.nn.Linear
        init = enums.Init.XAVIER if config.init is enums.Init.XAVIER else enums.Init.TORCH
        sizes, bias = (config.d_model, config.target_vocab_size), config.output_bias
        tied = config.tying.tied_output
        self.output = None if tied else linear(config, init, *sizes, bias=bias, rngs=rngs)
        if self.output is None and config.output_bias:
            self.output_bias = nnx.Param(jnp.zeros(config.target_vocab_size, jnp.float32))
        if config.logits_bias:
            self.logits_bias = Frozen(jnp.zeros(config.target_vocab_size, jnp.float32))

    def __call__(
        self,
        source: Source,
        target: TargetIds,
        *,
        rngs: Randomness = None,
        return_attention: bool = False,
    ) -> Logits | tuple[Logits, Attention]:
        """Return logits (b, t, v) of the token after each target position.

        The source are ids (b, s), unless ``config.input_layer`` reads others. Deterministic unless
        ``rngs`` is given.

        Raises InputError for ids outside the vocabulary (unless they are traced), sequences longer
        than ``config.longest``, empty batches, and sides that do not belong together; ConfigError
        for attention weights that ``config.attention_backend`` does not return.
        """
        backend = self.config.attention_backend
        if return_attention and backend is not enums.AttentionBackend.XLA:
            returns = f"attention_backend='{backend}' returns no attention weights"
            raise ConfigError(f"{returns}: use attention_backend='xla'")
        x, decoded, encoded = self._run(source, target, rngs, return_attention)
        logits = self.logits(x)
        if not return_attention:
            return logits
        own = [[block.self_weights for block in stack] for stack in (encoded, decoded)]
        cross = [block.cross_weights for block in decoded]
        kinds = (tuple(w for w in weights if w is not None) for weights in (*own, cross))
        return logits, Attention(*kinds)

    def hidden(
        self,
        source: Source,
        target: TargetIds,
        *,
        rngs: Randomness = None,
        segments: Segments | None = None,
    ) -> Hidden:
        """Return the decoder's output (b, t, d), which :meth:`logits` makes a call's result.

        With ``segments``, rows are packed: each holds several pairs, one after another, and gives
        the output that each of them has alone. Raises ConfigError if ``config.unpackable`` gives a
        reason why not.
        """
        if segments is not None and self.config.unpackable:
            raise ConfigError(f"rows cannot be packed: {self.config.unpackable}")
        return self._run(source, target, rngs, False, segments)[0]

    def _run(
        self,
        source: Source,
        target: TargetIds,
        rngs: Randomness,
        attention: bool,
        segments: Segments | None = None,
    ) -> tuple[Hidden, list[BlockResult], list[BlockResult]]:
        dropout = from_rngs(rngs, self.config.dropout_masks)
        source = stacks.check_source(source, self.config)
        target = stacks.check_ids(target, self.config, self.config.target_vocab_size, "target")
        stacks.check_pair(source.shape, target.shape, self.config)
        of_source = None if segments is None else jnp.asarray(segments[0])
        memory, valid, encoded = self._encode(source, dropout, attention, of_source)
        return *self._decode(memory, valid, target, dropout, attention, segments), encoded

    def encode(self, source: Source, *, rngs: Randomness = None) -> Memory:
        """Return the encoder's output (b, s, d)."""
        source = stacks.check_source(source, self.config)
        return self._encode(source, from_rngs(rngs, self.config.dropout_masks))[0]

    def encode_embeddings(
        self,
        x: Float[AnyArray, "b s d"],
        valid: Bool[AnyArray, "b s"] | None = None,
        *,
        rngs: Randomness = None,
    ) -> Memory:
        """Return the encoder's output (b, s, d), see :meth:`Encoder.encode_embeddings`."""
        return self.encoder.encode_embeddings(x, valid, rngs=rngs)

    def init_cache(self, source: Source, length: int, beams: int = 1) -> Cache | Prefix:
        """Encode ``source`` and make room for ``beams`` hypotheses per row, of ``length`` tokens.

        The memory's keys and values are projected once, here, and kept once for all beams. If
        ``config.uncacheable`` gives a reason why not, the tokens so far are kept instead.
        """
        config = self.config
        if not 1 <= length <= config.longest:
            most = config.longest
            raise ConfigError(f"max_length={length} must be between 1 and the model's {most}")
        source = stacks.check_source(source, self.config)
        memory, source_valid, _ = self._encode(source, Dropout())
        batch, none = memory.shape[0], jnp.zeros((), jnp.int32)
        if config.equal_lengths and length > (most := source.shape[1]):
            over = f"max_length={length} is over the source's {most} tokens"
            raise ConfigError(f"{over}, and this decoder needs equal lengths")
        if config.uncacheable:
            width = source.shape[1] if config.equal_lengths else length
            tokens = jnp.full((batch, beams, width), config.target_pad_id, jnp.int32)
            return Prefix(memory, source_valid, tokens, none)
        entries, blocks = length * beams, []
        for block in self.decoder.blocks:
            keys, values = block.cross_attention.keys_values(memory)
            room = jnp.zeros((batch, *keys.shape[2:], entries), keys.dtype)
            blocks.append(BlockCache(room, room, cache_layout(keys), cache_layout(values)))
        valid = jnp.zeros((batch, entries), bool)
        own = jnp.arange(beams, dtype=jnp.int32)[None, :, None]
        indices = jnp.broadcast_to(own, (batch, beams, length))
        return Cache(tuple(blocks), valid, source_valid, none, indices)

    def decode_step(
        self, tokens: Int[Array, "b k"], cache: Cache | Prefix
    ) -> tuple[Float[Array, "b k v"], Cache | Prefix]:
        """Return logits of the token after each beam's last, and the cache with these last ones.

        With cached keys and values the beams are queries at one position, ``cache.length``: each
        sees the memory of its row, and those of the row's entries that hold its own past.
        """
        if isinstance(cache, Prefix):
            return self._decode_prefix(tokens, cache)
        length, beams = cache.length, tokens.shape[1]
        here = tokens != self.config.target_pad_id
        update = jax.lax.dynamic_update_slice_in_dim
        target_valid = update(cache.target_valid, here, length * beams, axis=1)
        position = jnp.broadcast_to(length, beams)
        key_positions = jnp.arange(target_valid.shape[1], dtype=jnp.int32) // beams
        self_mask, cross_mask = self.decoder.masks(
            cache.source_valid, target_valid, position, key_positions, here
        )
        if beams > 1:
            own = cache.beam_mask()
            self_mask = own if self_mask is None else self_mask & own
        x = self._embed(self.target_embedding, tokens, here, self.config.decoder)
        context = Context(None, self_mask, cross_mask, position, length, here, key_positions)
        x, results = self.decoder(x, context, Dropout(), cache)
        blocks = tuple(map(attrgetter("cache"), results))
        after = cache._replace(blocks=blocks, target_valid=target_valid, length=length + 1)
        return self.logits(x), after

    def _decode_prefix(
        self, tokens: Int[Array, "b k"], prefix: Prefix
    ) -> tuple[Float[Array, "b k v"], Prefix]:
        """Return the result of :meth:`decode_step`, by running the decoder over all positions."""
        beams = tokens.shape[1]
        update = jax.lax.dynamic_update_slice_in_dim
        so_far = update(prefix.tokens, tokens[:, :, None], prefix.length, axis=2)
        memory, valid = (jnp.repeat(x, beams, axis=0) for x in (prefix.memory, prefix.source_valid))
        x, _ = self._decode(memory, valid, so_far.reshape(-1, so_far.shape[2]), Dropout())
        logits = self.logits(jax.lax.dynamic_slice_in_dim(x, prefix.length, 1, axis=1))
        after = prefix._replace(tokens=so_far, length=prefix.length + 1)
        return logits.reshape(*tokens.shape, -1), after

    def _encode(
        self,
        source: Array,
        dropout: Dropout,
        attention: bool = False,
        segments: Int[Array, "b s"] | None = None,
    ) -> tuple[Memory, Bool[Array, "b s"], list[BlockResult]]:
        """Return the memory, the mask that is False at source padding, and each block's result."""
        table = self.target_embedding if self.source_embedding is None else self.source_embedding
        if self.stem is None:
            valid = source != self.config.source_pad_id
            x = self._embed(table, source, valid, self.config.encoder)
        else:
            x = sharding.constrain(self.stem(source), ROWS, None, None)
            valid = jnp.ones(x.shape[:2], bool)
        memory, results = self.encoder.read(
            x, valid, dropout.scope("encoder"), attention=attention, segments=segments
        )
        return memory, valid, results

    def _decode(
        self,
        memory: Memory,
        source_valid: Bool[Array, "b s"],
        target: Int[Array, "b t"],
        dropout: Dropout,
        attention: bool = False,
        segments: Segments | None = None,
    ) -> tuple[Hidden, list[BlockResult]]:
        positions = jnp.arange(target.shape[1], dtype=jnp.int32)
        valid = target != self.config.target_pad_id
        self_mask, cross_mask = self.decoder.masks(source_valid, valid, positions, positions, valid)
        context = Context(memory, self_mask, cross_mask, positions, valid=valid)
        if segments is not None:
            of_source, of_target = map(jnp.asarray, segments)
            context = context._replace(
                self_mask=within_segments(self_mask, of_target, of_target),
                cross_mask=within_segments(cross_mask, of_target, of_source),
                segment_positions=segment_positions(of_target),
            )
        x = self._embed(self.target_embedding, target, valid, self.config.decoder)
        return self.decoder(x, context, dropout.scope("decoder"), attention=attention)

    def _embed(
        self, table: Embedding, ids: Int[Array, "b n"], valid: Bool[Array, "b n"], to: StackConfig
    ) -> Hidden:
        x = sharding.constrain(table(ids, valid), ROWS, None, None)
        normed = to.embedding_norm and to.embedding_norm_of is enums.EmbeddingNormOf.TOKENS
        if self.config.embedding_scale is enums.EmbeddingScale.SQRT_D_MODEL and not normed:
            x = x * jnp.asarray(math.sqrt(self.config.d_model), x.dtype)
        return x

    def logits(self, x: Hidden) -> Logits:
        """Return the logits (b, t, v) of the decoder's output."""
        if self.config.logit_scale is enums.LogitScale.INVERSE_SQRT_D_MODEL:
            x = x * jnp.asarray(self.config.d_model**-0.5, x.dtype)
        logits = self.target_embedding.attend(x) if self.output is None else self.output(x)
        logits = sharding.constrain(logits, ROWS, None, TENSOR)
        if self.output is None and self.config.output_bias:
            logits = logits + self.output_bias[...].astype(logits.dtype)[None, None]
        if self.config.logits_bias:
            logits = logits + self.logits_bias[...].astype(logits.dtype)[None, None]
        return logits

    def encode_features(self, features: Features, *, rngs: Randomness = None) -> Memory:
        """Return the encoder's output (b, s, d) for features (b, c, w), such as spectrograms.

        Raises ConfigError if the model reads text.
        """
        if self.stem is None:
            raise ConfigError(f"encode_features: {self.config.architecture} reads ids of text")
        return self.encode(features, rngs=rngs)


def flatten(model: nnx.Module, kind: type[nnx.Variable] = nnx.Variable) -> dict[str, Any]:
    """Return the arrays of one kind by path: ``encoder.blocks.0.self_attention.query.kernel``."""
    variables = nnx.to_flat_state(nnx.state(model, kind))
    return {".".join(map(str, path)): variable.get_value() for path, variable in variables}


def abstract(config: TransformerConfig) -> Transformer:
    """Return the model with shapes instead of arrays: takes no memory, however big it is."""
    return unflatten_part(config, {}, Transformer, complete=False)


def shapes(
    config: TransformerConfig,
    kind: Callable[..., Any] = Transformer,
    of: type[nnx.Variable] = nnx.Variable,
) -> dict[str, tuple[int, ...]]:
    """Return the shape of every array of one kind by its path in :func:`flatten`."""
    layers = config.encoder.layers + config.decoder.layers
    if kind is Transformer and layers > _MANY_LAYERS:
        return _repeated(config, of)
    variables = _skeleton(config, kind)[1].items()
    return {name: tuple(leaf.shape) for name, (_, leaf) in variables if isinstance(leaf, of)}


def _repeated(config: TransformerConfig, of: type[nnx.Variable]) -> dict[str, tuple[int, ...]]:
    """Return :func:`shapes` of a model of one layer, repeated: the blocks of a stack are equal."""
    one = {name: replace(getattr(config, name), layers=1) for name in ("encoder", "decoder")}
    first = shapes(replace(config, **one), of=of)
    result: dict[str, tuple[int, ...]] = {}
    for (stack, block), group in groupby(first, lambda name: name.partition(_BLOCK)[:2]):
        names = list(group)
        for i in range(getattr(config, stack).layers if block else 1):
            start = stack + block.replace("0", str(i))
            result |= {start + name.partition(_BLOCK)[2]: first[name] for name in names}
    return result


def head_names(config: TransformerConfig) -> list[str]:
    """Return the names of the arrays that :meth:`Transformer.logits` reads."""
    tied = config.tying.tied_output
    own = ("target_embedding.embedding",) if tied else ("output.kernel", "output.bias")
    return [name for name in shapes(config) if name in (*own, "output_bias", "logits_bias")]


def logits_of(
    config: TransformerConfig, head: Mapping[str, Any], x: Float[Array, "b t d"]
) -> Logits:
    """Return the logits of the decoder's output, from the arrays of :func:`head_names` alone."""
    return unflatten_part(config, head, Transformer, complete=False).logits(x)


def unflatten(config: TransformerConfig, arrays: Mapping[str, Any]) -> Transformer:
    """Return the model of ``config`` with these arrays, by the paths of :func:`flatten`.

    Works under jit. Raises ConfigError unless all arrays of the model are there, and no others.
    """
    return unflatten_part(config, arrays, Transformer)


def unflatten_part(
    config: TransformerConfig,
    arrays: Mapping[str, Any],
    kind: Callable[..., Module],
    *,
    complete: bool = True,
) -> Module:
    """Return the Transformer, or only its Encoder, with these arrays; see :func:`unflatten`.

    Unless they must be ``complete``, those that are not given are shapes.
    """
    graphdef, variables = _skeleton(config, kind)
    if complete and variables.keys() != arrays.keys():
        wrong = ", ".join(sorted(variables.keys() ^ arrays.keys()))
        raise ConfigError(f"these arrays do not fit the configuration: {wrong}")
    pairs = [
        (path, variable.replace(arrays.get(name, variable.get_value())))
        for name, (path, variable) in variables.items()
    ]
    return nnx.merge(graphdef, nnx.from_flat_state(pairs))


class _OneKey(nnx.Rngs):
    """One key for all arrays: if only shapes are needed, drawing keys took most of the time."""

    def params(self) -> Any:
        return self.default.key[...]


@lru_cache(maxsize=32)
def _skeleton(
    config: TransformerConfig, kind: Callable[..., Any]
) -> tuple[nnx.GraphDef, dict[str, tuple[tuple[Any, ...], nnx.Variable]]]:
    """Return the model without arrays, and the path and the abstract variable of each by name."""
    graphdef, state = jax.eval_shape(lambda: nnx.split(kind(config, rngs=_OneKey(0))))
    variables = nnx.to_flat_state(state)
    return graphdef, {".".join(map(str, path)): (path, variable) for path, variable in variables}
