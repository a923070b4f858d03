"""Arguments that all generation loops share, checked: the split model, and those of a call."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from jax_transformer.config import TransformerConfig
from jax_transformer.errors import ConfigError
from jax_transformer.generate.ensemble import AnyModel, Ensemble, common_config
from jax_transformer.generate.generation_config import GenerationConfig
from jax_transformer.nn import sharding
from jax_transformer.nn.stacks import check_ids, check_source
from jax_transformer.shapes import AnyArray, Source
from jax_transformer.transformer import Transformer


class ModelStructure:
    """A model, or the models of an ensemble, without arrays: a static argument.

    It is hashed once, not in every call.
    """

    def __init__(self, graphdefs: tuple[nnx.GraphDef, ...], treedef: jax.tree_util.PyTreeDef):
        self.graphdefs, self.treedef = graphdefs, treedef
        self._hash = hash((graphdefs, treedef))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, ModelStructure)
            and (self.graphdefs, self.treedef) == (other.graphdefs, other.treedef)
        )

    def merge(self, arrays: Sequence[Array]) -> AnyModel:
        """The model, or the ensemble, with these arrays."""
        states = jax.tree.unflatten(self.treedef, arrays)
        models = tuple(map(nnx.merge, self.graphdefs, states))
        return models[0] if len(models) == 1 else Ensemble(models)


class SplitModel(NamedTuple):
    """A model as jitted loops take it.

    Splitting takes milliseconds: with many batches, do it once.
    """

    config: TransformerConfig
    structure: ModelStructure
    arrays: list[Array]


Models = Transformer | SplitModel | Sequence[Transformer]
"""The models that a loop takes: one, or several as an ensemble."""


def split(model: Models) -> SplitModel:
    """The model split by ``nnx.split``; a split one is returned as it is.

    Several models are an ensemble: at each step, the mean of their probabilities decides. Later
    changes of a model are not seen. Raises ConfigError if they do not share a vocabulary.
    """
    if isinstance(model, SplitModel):
        return model
    models = (model,) if isinstance(model, Transformer) else tuple(model)
    configs = [each.config for each in models]
    config = common_config(configs) if len(configs) > 1 else configs[0]
    graphdefs, states = zip(*map(nnx.split, models), strict=True)
    arrays, treedef = jax.tree.flatten(states)
    return SplitModel(config, ModelStructure(graphdefs, treedef), arrays)


class StaticArgs(NamedTuple):
    """Everything that a loop is compiled for."""

    config: GenerationConfig
    """Without the fields below, and without those that are traced: other values compile nothing."""
    max_new_tokens: int
    bos_id: int
    eos_id: int
    pad_id: int


class Inputs(NamedTuple):
    """Arrays that a loop is called with."""

    source: Array
    """Ids (b, s), or spectrograms (b, c, w)."""
    forced_bos_ids: Int[Array, " b"] | None = None
    """The first token of each row; None forces none."""
    prompt: Int[Array, "b p"] | None = None
    """The decoder's inputs before the generated tokens, from the start token on; None is the start
    token alone.
    """


def prepare(
    model: SplitModel,
    source: Source,
    config: GenerationConfig,
    forced_bos_ids: int | Int[AnyArray, " b"] | None = None,
    prompt: Int[AnyArray, "b p"] | None = None,
) -> tuple[Inputs, StaticArgs]:
    """The arguments of a loop. ``forced_bos_ids`` wins over the config's ``forced_bos_token_id``,
    and ``prompt`` over its ``decoder_start_token_id``.

    Raises InputError for a source that the model cannot read, and ConfigError for a length or a
    token that it does not have.
    """
    sizes = model.config
    source = check_source(source, sizes)
    ngram = config.constraints.encoder_no_repeat_ngram_size
    if ngram and sizes.mel_bins is not None:
        raise ConfigError(
            f"encoder_no_repeat_ngram_size={ngram} needs a source of tokens, and this model reads"
            " sound"
        )
    vocabulary = sizes.target_vocab_size
    forced = config.forced_bos_token_id if forced_bos_ids is None else forced_bos_ids
    static_args = StaticArgs(
        dataclasses.replace(config, **_TRACED, **_RESOLVED),
        max_new_tokens(sizes, source.shape[1], config.max_new_tokens, prompt_length(prompt)),
        _token("bos_id", config.decoder_start_token_id, sizes.bos_id, vocabulary),
        _token("eos_id", config.eos_token_id, sizes.eos_id, vocabulary),
        sizes.target_pad_id,
    )
    for name, tokens in config.constraints.tokens.items():
        for token in tokens:
            _check_token(f"{name} has {token}, which", token, vocabulary)
    inputs = Inputs(
        source,
        _forced_bos_ids(forced, source.shape[0], vocabulary),
        None if prompt is None else check_ids(prompt, sizes, vocabulary, "prompt"),
    )
    return jax.tree.map(sharding.divide_rows, inputs), static_args


_TRACED: dict[str, Any] = {"length_penalty": 0.0, "temperature": 1.0, "top_p": 1.0, "seed": 0}
_RESOLVED: dict[str, Any] = dict.fromkeys(
    ("max_new_tokens", "decoder_start_token_id", "eos_token_id", "forced_bos_token_id")
)


def default_length(config: TransformerConfig, source_width: int) -> int:
    """Maximum number of tokens for a source of this width, if a config has none."""
    return min(config.longest, 2 * source_width) if config.mel_bins is None else config.longest


def prompt_length(prompt: Int[AnyArray, "b p"] | None) -> int:
    """The number of the decoder's inputs before the generated tokens."""
    return 1 if prompt is None else prompt.shape[1]


def start_tokens(inputs: Inputs, static_args: StaticArgs) -> Int[Array, "b p"]:
    """The decoder's inputs before the generated tokens."""
    if inputs.prompt is not None:
        return inputs.prompt
    return jnp.full((inputs.source.shape[0], 1), static_args.bos_id, jnp.int32)


def longest(model: SplitModel, prompt: Int[AnyArray, "b p"] | None) -> int:
    """The most tokens that the model can generate."""
    return model.config.longest - prompt_length(prompt) + 1


def primed_cache(model: AnyModel, inputs: Inputs, static_args: StaticArgs, beams: int = 1) -> Any:
    """The cache of a loop's first step, which holds the prompt but its last token."""
    start = start_tokens(inputs, static_args)
    before = start.shape[1] - 1
    cache = model.init_cache(inputs.source, static_args.max_new_tokens + before, beams)
    if not before:
        return cache

    def step(i: Int[Array, ""], cache: Any) -> Any:
        token = jax.lax.dynamic_slice_in_dim(start, i, 1, axis=1)
        return model.decode_step(jnp.broadcast_to(token, (start.shape[0], beams)), cache)[1]

    return jax.lax.fori_loop(0, before, step, cache)


def max_new_tokens(
    config: TransformerConfig, source_width: int, length: int | None, prompt: int = 1
) -> int:
    """The length of a loop's result after a ``prompt`` of so many tokens; at most the source's, if
    both must be equally long.

    Raises ConfigError for a length that the model does not have.
    """
    most = config.longest - prompt + 1
    length = min(most, default_length(config, source_width)) if length is None else length
    if not 1 <= length <= most:
        after = f" after a prompt of {prompt} tokens" if prompt > 1 else ""
        raise ConfigError(f"max_length={length} must be between 1 and the model's {most}{after}")
    return min(length, source_width) if config.equal_lengths else length


def _token(name: str, token: int | None, default: int, vocabulary: int) -> int:
    token = default if token is None else token
    _check_token(f"{name}={token}", token, vocabulary)
    return token


def _check_token(subject: str, token: int, vocabulary: int) -> None:
    if not 0 <= token < vocabulary:
        raise ConfigError(f"{subject} is outside the vocabulary of {vocabulary}")


def _forced_bos_ids(
    forced: int | Int[AnyArray, " b"] | None, batch: int, vocabulary: int
) -> Int[Array, " b"] | None:
    """One token for each row: an array, so that another language compiles nothing."""
    if forced is None:
        return None
    if not isinstance(forced, jax.core.Tracer):
        for token in np.unique(np.asarray(forced)).tolist():
            _check_token(f"forced_bos_token_id={token}", token, vocabulary)
    return jnp.broadcast_to(jnp.asarray(forced, jnp.int32), batch)
