"""Parts of all generation loops: their arguments, checked, and the computation of a batch.

Rows that are done leave a batch, and a CPU decodes two halves at once: XLA divides every operation
of a program over the cores and waits for all of them, and the operations of a decoding step are so
short that a core does more with a program of its own.
"""

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Int

from jax_transformer.config import TransformerConfig
from jax_transformer.errors import ConfigError
from jax_transformer.generate.ensemble import AnyModel, Ensemble, common_config
from jax_transformer.generate.generation_config import Constraints, GenerationConfig
from jax_transformer.nn import sharding
from jax_transformer.nn.stacks import check_ids, check_source
from jax_transformer.runtime import distributed
from jax_transformer.shapes import AnyArray, Source
from jax_transformer.transformer import Transformer

Carry = TypeVar("Carry")

_ROWS_OF_A_LOOP = 8
"""A loop of fewer rows is not worth a program of its own: a step takes nearly as long as before."""
_ROWS_OF_HALVES = 16
"""Smaller batches are not divided."""
_NAMES = """enable_x64 default_matmul_precision default_device default_prng_impl
    threefry_partitionable numpy_dtype_promotion numpy_rank_promotion""".split()
THREAD_SETTINGS: dict[str, Callable[[Any], AbstractContextManager]] = {
    f"jax_{name}": getattr(jax, name) for name in _NAMES
}
"""JAX's settings that change what is computed, and that a thread can have for itself."""


class ModelStructure:
    """A model, or the models of an ensemble, without arrays: a static argument, hashed once."""

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
        """Return the model, or the ensemble, with these arrays."""
        states = jax.tree.unflatten(self.treedef, arrays)
        models = tuple(map(nnx.merge, self.graphdefs, states))
        return models[0] if len(models) == 1 else Ensemble(models)


class SplitModel(NamedTuple):
    """A model as jitted loops take it; splitting takes milliseconds: do it once."""

    config: TransformerConfig
    structure: ModelStructure
    arrays: list[Array]


Models = Transformer | SplitModel | Sequence[Transformer]
"""The models that a loop takes: one, or several as an ensemble."""


def split(model: Models) -> SplitModel:
    """Return the model split by ``nnx.split``; a split one is returned as it is.

    Several models are an ensemble: at each step, the mean of their probabilities decides. Later
    changes of a model are not seen. Raises ConfigError if they do not share a vocabulary.
    """
    if isinstance(model, SplitModel):
        return model
    models = (model,) if isinstance(model, Transformer) else tuple(model)
    config = common_config(models) if len(models) > 1 else models[0].config
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


def keyword_config(
    model: SplitModel,
    base: GenerationConfig,
    options: Mapping[str, Any],
    prompt: Int[AnyArray, "b p"] | None,
) -> GenerationConfig:
    """Return the settings that a function's keywords give; without a length, the model's longest.

    Raises ConfigError for unknown keywords, and for keywords of another way to decode.
    """
    config = base.overridden(options)
    searches = config.num_beams > 1 and base.num_beams == 1
    if searches or config.do_sample != base.do_sample or config.seed:
        raise ConfigError(
            f"{', '.join(options)}: not options of one function: give generate a GenerationConfig"
        )
    if config.max_new_tokens is not None:
        return config
    used = 0 if prompt is None else prompt.shape[1] - 1
    return dataclasses.replace(config, max_new_tokens=model.config.longest - used)


def prepare(
    model: SplitModel,
    source: Source,
    config: GenerationConfig,
    forced_bos_ids: int | Int[AnyArray, " b"] | None = None,
    prompt: Int[AnyArray, "b p"] | None = None,
) -> tuple[Inputs, StaticArgs]:
    """Return the arguments of a loop. ``forced_bos_ids`` wins over the config's
    ``forced_bos_token_id``, and ``prompt`` over its ``decoder_start_token_id``.

    Raises InputError for a source that the model cannot read, and ConfigError for a length or a
    token that it does not have.
    """
    sizes, vocabulary = model.config, model.config.target_vocab_size
    source = check_source(source, sizes)
    ngram = config.constraints.encoder_no_repeat_ngram_size
    if ngram and sizes.mel_bins is not None:
        needs = "needs a source of tokens, and this model reads sound"
        raise ConfigError(f"encoder_no_repeat_ngram_size={ngram} {needs}")
    begin = 1 if prompt is None else prompt.shape[1]
    static_args = StaticArgs(
        dataclasses.replace(config, **_TRACED, **_RESOLVED),
        max_new_tokens(sizes, source.shape[1], config.max_new_tokens, begin),
        *config.start_and_end(sizes),
        sizes.target_pad_id,
    )
    forced = config.forced_bos_token_id if forced_bos_ids is None else forced_bos_ids
    _check_tokens(static_args, config.constraints, forced, vocabulary)
    if forced is not None:  # an array, so that another language compiles nothing
        forced = jnp.broadcast_to(jnp.asarray(forced, jnp.int32), source.shape[0])
    if prompt is not None:
        prompt = check_ids(prompt, sizes, vocabulary, "prompt")
    return jax.tree.map(sharding.divide_rows, Inputs(source, forced, prompt)), static_args


_TRACED: dict[str, Any] = {"length_penalty": 0.0, "temperature": 1.0, "top_p": 1.0, "seed": 0}
_RESOLVED: dict[str, Any] = dict.fromkeys(
    ("max_new_tokens", "decoder_start_token_id", "eos_token_id", "forced_bos_token_id")
)


def _check_tokens(
    static_args: StaticArgs,
    constraints: Constraints,
    forced: int | Int[AnyArray, " b"] | None,
    vocabulary: int,
) -> None:
    tokens = [(f"{name} has {{}}, which", ids) for name, ids in constraints.tokens]
    tokens += [("bos_id={}", (static_args.bos_id,)), ("eos_id={}", (static_args.eos_id,))]
    if forced is not None and not isinstance(forced, jax.core.Tracer):
        tokens.append(("forced_bos_token_id={}", tuple(np.unique(np.asarray(forced)).tolist())))
    for subject, ids in tokens:
        for token in ids:
            if not 0 <= token < vocabulary:
                name = subject.format(token)
                raise ConfigError(f"{name} is outside the vocabulary of {vocabulary}")


def max_new_tokens(
    config: TransformerConfig, source_width: int, length: int | None, prompt: int = 1
) -> int:
    """Return the length of a loop's result after a ``prompt`` of so many tokens.

    Without a ``length``, it is twice the source's width, or the longest for sound; it is at most
    the source's if both must be equally long. Raises ConfigError for a length that the model does
    not have.
    """
    most = config.longest - prompt + 1
    if length is None:
        length = most if config.mel_bins is not None else min(most, 2 * source_width)
    if not 1 <= length <= most:
        after = f" after a prompt of {prompt} tokens" if prompt > 1 else ""
        raise ConfigError(f"max_length={length} must be between 1 and the model's {most}{after}")
    return min(length, source_width) if config.equal_lengths else length


def start_tokens(inputs: Inputs, static_args: StaticArgs) -> Int[Array, "b p"]:
    """Return the decoder's inputs before the generated tokens."""
    if inputs.prompt is not None:
        return inputs.prompt
    return jnp.full((inputs.source.shape[0], 1), static_args.bos_id, jnp.int32)


def primed_cache(model: AnyModel, inputs: Inputs, static_args: StaticArgs, beams: int = 1) -> Any:
    """Return the cache of a loop's first step, which holds the prompt but its last token."""
    start = start_tokens(inputs, static_args)
    before = start.shape[1] - 1
    cache = model.init_cache(inputs.source, static_args.max_new_tokens + before, beams)
    if not before:
        return cache

    def step(i: Int[Array, ""], cache: Any) -> Any:
        token = jax.lax.dynamic_slice_in_dim(start, i, 1, axis=1)
        return model.decode_step(jnp.broadcast_to(token, (start.shape[0], beams)), cache)[1]

    return jax.lax.fori_loop(0, before, step, cache)


def batch_sizes(batch: int) -> tuple[int, ...]:
    """Return the numbers of rows that a loop goes through: all of them, a half, and a quarter.

    A symbolic number, of an exported program, has only itself.
    """
    if not isinstance(batch, int) or batch < 2 * _ROWS_OF_A_LOOP:
        return (batch,)
    halves = (batch, batch // 2)
    return halves if batch < 4 * _ROWS_OF_A_LOOP else (*halves, batch // 4)


def while_loop(
    is_open: Callable[[Carry], Bool[Array, " b"]],
    step: Callable[[Carry], Carry],
    carry: Carry,
    results: Callable[[Carry], Any],
    sizes: Sequence[int],
    rows: Int[Array, " r"] | None = None,
    before: Any = None,
) -> Any:
    """Return the ``results`` of a ``jax.lax.while_loop`` that lasts until no row is open.

    All arrays of the carry and of the results but scalars have the batch as their first axis. When
    no more rows are open than the next of the ``sizes``, see :func:`batch_sizes`, the loop goes on
    with these: it then computes the ``rows`` of the batch, and the results of the others are in
    ``before``. Steps must not change the results of a row that is not open, and no row may open
    again.
    """
    next_size = sizes[1] if len(sizes) > 1 else 0
    carry = jax.lax.while_loop(lambda c: is_open(c).sum() > next_size, step, carry)
    now = results(carry)
    if before is not None:
        now = jax.tree.map(lambda old, new: old.at[rows].set(new), before, now)
    if not next_size:
        return now
    current = jnp.arange(sizes[0], dtype=jnp.int32) if rows is None else rows

    def go_on() -> Any:
        left = jnp.argsort(~is_open(carry), stable=True)[:next_size]
        fewer = jax.tree.map(lambda x: x[left] if x.ndim else x, carry)
        return while_loop(is_open, step, fewer, results, sizes[1:], current[left], now)

    return jax.lax.cond(is_open(carry).any(), go_on, lambda: now)


class Rows(NamedTuple):
    """The arrays of a batch, a row for each source."""

    source: Source
    row_ids: Int[AnyArray, " b"] | None = None
    prompt: Int[AnyArray, "b p"] | None = None


def in_halves(
    decode: Callable[[Rows], Sequence[AnyArray]], batch: Rows, weights: Sequence[Any]
) -> list[np.ndarray]:
    """Return the arrays that ``decode`` returns for a batch, on the host.

    ``decode`` is called for each half, or for all rows if halves would not be faster; it returns
    as soon as its program runs.
    """
    if not _divides(batch, weights):
        return list(map(distributed.on_host, decode(batch)))
    count = len(batch.source)
    numbers = np.arange(count, dtype=np.int32) if batch.row_ids is None else batch.row_ids
    length = -(-count // 2)  # both halves of an odd number have the row in the middle
    prompt = None if batch.prompt is None else np.asarray(batch.prompt)
    arrays = Rows(np.asarray(batch.source), np.asarray(numbers), prompt)
    first, second = (
        jax.tree.map(operator.itemgetter(rows), arrays)
        for rows in (slice(length), slice(count - length, None))
    )
    settings = [(context, getattr(jax.config, name)) for name, context in THREAD_SETTINGS.items()]

    def decode_second() -> Sequence[AnyArray]:
        with contextlib.ExitStack() as stack:
            for context, value in settings:
                stack.enter_context(context(value))
            return decode(second)

    begun = decode(first)  # compiles the program of both
    with ThreadPoolExecutor(1) as pool:  # programs of the same thread would wait for each other
        others = pool.submit(decode_second).result()
    on_host, both = distributed.on_host, 2 * length - count
    pairs = zip(begun, others, strict=True)
    return [np.concatenate([on_host(one), on_host(other)[both:]]) for one, other in pairs]


def _divides(batch: Rows, weights: Sequence[Any]) -> bool:
    """Return True for enough rows on one CPU of several cores."""
    count = np.shape(batch.source)[:1]
    others = [array for array in (batch.row_ids, batch.prompt) if array is not None]
    if any(np.shape(array)[:1] != count for array in others):
        return False
    few = count < (_ROWS_OF_HALVES,)
    if few or distributed.cores() == 1 or distributed.count() > 1:
        return False
    devices = {device for x in weights if isinstance(x, Array) for device in x.devices()}
    return len(devices) == 1 and devices.pop().platform == "cpu"
