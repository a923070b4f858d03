"""Every preset and entry point refuses invalid input in one line: no NaN, no silent wrap."""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_transformer as jt
from jax_transformer import generate
from jax_transformer.config import Mask, TransformerConfig
from jax_transformer.errors import ConfigError, InputError
from jax_transformer.nn import stacks
from jax_transformer.transformer import Transformer
from parity_tests import preset_names
from parity_tests.marks import quick_if
from parity_tests.unit.helpers import ODD, random_model, tiny, unchecked

NAMES = preset_names.TEXT
ROWS, LENGTH = 3, 5
WIDTH = ODD["d_model"]


def small(name: str) -> TransformerConfig:
    """Return a small configuration, with enough positions to pass the end of a position rule."""
    config = tiny(name, num_layers=1)
    if jt.preset(name).longest < jt.preset(name).max_length:
        return config.with_sizes(max_length=60)
    return config


def good(config: TransformerConfig, length: int = LENGTH) -> tuple[np.ndarray, np.ndarray]:
    """Return ids that every preset accepts: equally long on both sides, no padding."""
    sizes = (config.source_vocab_size, config.target_vocab_size)
    return tuple(np.random.default_rng(length).integers(4, size, (ROWS, length)) for size in sizes)


def edited(ids: np.ndarray, value: int) -> np.ndarray:
    ids = ids.copy()
    ids[1, 2] = value
    return ids


def refused(call: Callable[[], object], message: str, error: type[Exception] = InputError) -> None:
    """Assert that the call raises this one-line message, without the tests' type checker."""
    with unchecked(), pytest.raises(error) as caught:
        call()
    assert str(caught.value) == message and "\n" not in message and re.search(r"\d", message)


@pytest.fixture(scope="module", params=preset_names.different_quick(NAMES))
def model(request) -> Transformer:
    return random_model(small(request.param))


def too_long(config: TransformerConfig, side: str) -> str:
    """Return the message about one token too many."""
    over = config.longest + 1
    if config.longest == config.max_length:
        return f"{side} is {over} tokens long, over max_length={config.max_length}"
    rule = f"position {config.longest} takes row -1 of its table, which does not exist"
    return f"{side} is {over} tokens long, but {rule}"


def test_valid_input_is_accepted_up_to_the_last_position(model):
    config = model.config
    for length in (1, LENGTH, config.longest):
        logits = jax.eval_shape(lambda n=length: model(*good(config, n)))
        assert logits.shape == (ROWS, length, config.target_vocab_size)
    source, target = good(config)
    assert np.isfinite(model(source, target)).all()
    x = np.random.default_rng(0).normal(size=(ROWS, config.longest, WIDTH))
    for valid in (None, np.ones(x.shape[:2], bool)):
        assert jax.eval_shape(lambda v=valid: model.encode_embeddings(x, v)).shape == x.shape


# Ids


def bad_ids(
    config: TransformerConfig, side: str, vocab: int, ids: np.ndarray
) -> list[tuple[object, str]]:
    """Return ids that are invalid on either side, with the messages about them."""
    shaped = f"{side} ids must be integers of shape (batch, length), not"
    return [
        (edited(ids, vocab), f"{side} id {vocab} is outside the vocabulary of {vocab}"),
        (edited(ids, 2**40), f"{side} id {2**40} is outside the vocabulary of {vocab}"),
        (edited(ids, -1), f"{side} id -1 is outside the vocabulary of {vocab}"),
        (jnp.asarray(edited(ids, -7)), f"{side} id -7 is outside the vocabulary of {vocab}"),
        (ids.astype(np.float32), f"{shaped} float32 of shape {ids.shape}"),
        (ids > 3, f"{shaped} bool of shape {ids.shape}"),
        (ids.astype(str), f"{shaped} {ids.astype(str).dtype} of shape {ids.shape}"),
        (ids[0], f"{shaped} int64 of shape {ids[0].shape}"),
        (ids[None], f"{shaped} int64 of shape {(1, *ids.shape)}"),
        (ids[0, 0], f"{shaped} int64 of shape ()"),
        (ids[:0], f"{side} ids have shape {ids[:0].shape}: empty"),
        (ids[:, :0], f"{side} ids have shape {ids[:, :0].shape}: empty"),
        ([], f"{shaped} float64 of shape (0,)"),
        (np.tile(ids, 20)[:, : config.longest + 1], too_long(config, side)),
    ]


def test_invalid_source_ids_are_refused_by_every_entry_point(model):
    source, target = good(model.config)
    key = jax.random.key(0)
    ways: list[Callable[[object], object]] = [
        lambda ids: model(ids, target),
        lambda ids: model(ids, target, rngs=key, return_attention=True),
        model.encode,
        lambda ids: stacks.check_source(ids, model.config),
        lambda ids: model.init_cache(ids, 2),
        lambda ids: generate.greedy(model, ids),
        lambda ids: generate.beam(model, ids),
        lambda ids: generate.n_best(model, ids, 2),
        lambda ids: generate.sample(model, ids, key),
    ]
    for ids, message in bad_ids(model.config, "source", model.config.source_vocab_size, source):
        for way in ways:
            refused(lambda w=way, i=ids: w(i), message)


def test_invalid_target_ids_are_refused(model):
    source, target = good(model.config)
    for ids, message in bad_ids(model.config, "target", model.config.target_vocab_size, target):
        refused(lambda i=ids: model(source, i), message)


def test_source_and_target_of_different_batches_are_refused(model):
    source, target = good(model.config)
    refused(lambda: model(source[:2], target), "source has 2 rows and target 3")
    refused(lambda: model(source, target[:1]), "source has 3 rows and target 1")
    if model.config.equal_lengths:
        for s, t in ((source, target[:, :4]), (source[:, :1], target), (source, target[:, :1])):
            lengths = rf"source .*{s.shape[1]} tokens.* target {t.shape[1]}\b.*"
            with pytest.raises(InputError, match=f"{lengths} both must be equally long"):
                model(s, t)
    else:
        assert jax.eval_shape(lambda: model(source, target[:, :2])).shape[:2] == (ROWS, 2)


def test_invalid_shapes_are_refused_under_jit(model):
    """Values are unknown there: an id outside the vocabulary reads the last or first row."""
    config = model.config
    source, target = good(config)

    def call(*shapes):
        jax.eval_shape(model, *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes))

    call(source.shape, target.shape)
    over = (ROWS, config.longest + 1)
    refused(lambda: call(over, over), too_long(config, "source"))
    refused(lambda: call(source.shape, over), too_long(config, "target"))
    refused(lambda: call((2, LENGTH), target.shape), "source has 2 rows and target 3")


@pytest.mark.parametrize("name", ["deep_dive", "part2_encoder", "small"])
def test_ids_outside_the_vocabulary_give_no_nan_under_jit(name):
    model = random_model(small(name))
    source, target = good(model.config)
    logits = jax.jit(lambda s, t: model(s, t))
    assert np.isfinite(logits(edited(source, -1), edited(target, -99))).all()
    sizes = model.config.source_vocab_size, model.config.target_vocab_size
    last = [edited(ids, size - 1) for ids, size in zip((source, target), sizes, strict=True)]
    beyond = logits(edited(source, 99), edited(target, 99))
    assert np.array_equal(beyond, logits(*last))


# Embeddings


def test_invalid_embeddings_are_refused(model):
    config, (b, s) = model.config, (ROWS, LENGTH)
    x = np.random.default_rng(0).normal(size=(b, s, WIDTH))
    shaped = f"embeddings must be floating-point numbers of shape (batch, length, {WIDTH}), not"
    bad = [
        (x[..., :-1], f"{shaped} float64 of shape {(b, s, WIDTH - 1)}"),
        (np.concatenate([x, x], axis=2), f"{shaped} float64 of shape {(b, s, 2 * WIDTH)}"),
        (x[0], f"{shaped} float64 of shape {(s, WIDTH)}"),
        (x[None], f"{shaped} float64 of shape {(1, b, s, WIDTH)}"),
        (x.astype(np.int32), f"{shaped} int32 of shape {x.shape}"),
        (x + 1j, f"{shaped} complex128 of shape {x.shape}"),
        (good(config)[0], f"{shaped} int64 of shape {(b, s)}"),
        (x[:0], f"embeddings have shape {(0, s, WIDTH)}: empty"),
        (x[:, :0], f"embeddings have shape {(b, 0, WIDTH)}: empty"),
        (np.tile(x, (1, 20, 1))[:, : config.longest + 1], too_long(config, "source")),
    ]
    for encode in (model.encode_embeddings, model.encoder.encode_embeddings):
        for inputs, message in bad:
            refused(lambda e=encode, g=inputs: e(g), message)


def test_a_mask_of_embeddings_that_does_not_fit_is_refused(model):
    x = np.random.default_rng(0).normal(size=(ROWS, LENGTH, WIDTH))
    ones = np.ones((ROWS, LENGTH), bool)
    fits = f"the mask of embeddings of shape {x.shape} must be bool of shape {(ROWS, LENGTH)}, not"
    bad = [
        (ones[:, :-1], f"{fits} bool of shape {(ROWS, LENGTH - 1)}"),
        (ones[:1], f"{fits} bool of shape {(1, LENGTH)}"),
        (ones.T, f"{fits} bool of shape {(LENGTH, ROWS)}"),
        (ones[0], f"{fits} bool of shape {(LENGTH,)}"),
        (ones[:, None], f"{fits} bool of shape {(ROWS, 1, LENGTH)}"),
        (ones.astype(int), f"{fits} int64 of shape {ones.shape}"),
        (ones.astype(int).tolist(), f"{fits} int64 of shape {ones.shape}"),
        (jnp.asarray(ones)[:, :2], f"{fits} bool of shape {(ROWS, 2)}"),
    ]
    for encode in (model.encode_embeddings, model.encoder.encode_embeddings):
        for mask, message in bad:
            refused(lambda e=encode, m=mask: e(x, m), message)


def test_a_cache_is_as_long_as_the_source_if_lengths_are_equal():
    configs = [config for config in map(small, NAMES) if config.equal_lengths]
    assert configs
    for config in configs:
        model, (source, _) = random_model(config), good(config)
        assert model.init_cache(source, LENGTH).tokens.shape == (ROWS, 1, LENGTH)
        message = f"max_length=6 is over the source's {LENGTH} tokens, and this decoder needs equal"
        with pytest.raises(ConfigError, match=message):
            model.init_cache(source, LENGTH + 1)


@pytest.mark.parametrize(
    "dtype", ["bfloat16", quick_if(False, "float32"), quick_if(False, "float64")]
)
def test_given_embeddings_are_computed_in_the_model_s_dtype(dtype):
    """An encoder without blocks' norms would otherwise add in the dtype that was given."""
    config = dataclasses.replace(small("lesson10"), compute_dtype=dtype)
    model = random_model(config, dtype="float32")
    x = np.random.default_rng(0).normal(size=(ROWS, LENGTH, WIDTH))
    for dtype_of_x in ("float64", "float32", "bfloat16"):
        cast = jnp.asarray(x, dtype_of_x)
        with jax.numpy_dtype_promotion("standard"):  # as for a user
            memory, same = map(model.encode_embeddings, (cast, cast.astype(dtype)))
        assert memory.dtype == dtype
        assert (np.asarray(memory) == np.asarray(same)).all()


def test_a_mask_given_with_embeddings_hides_its_positions():
    """Without a mask in the encoder, as in one document, every position is visible."""
    for name in ("part2_encoder", "part2_encoder_repaired"):
        model = random_model(small(name))
        x = np.random.default_rng(0).normal(size=(ROWS, LENGTH, WIDTH))
        valid = np.ones((ROWS, LENGTH), bool)
        valid[1, 3:] = False
        other = np.where(valid[..., None], x, 7.0)
        before, after = (np.asarray(model.encode_embeddings(each, valid)) for each in (x, other))
        hidden = Mask.SOURCE_PADDING in model.config.encoder.self_mask
        assert (before[valid] == after[valid]).all() == hidden


# Other arguments that generation refuses


def test_more_tokens_than_positions_are_refused_by_every_decoder(model):
    (source, _), config = good(model.config), model.config
    sample = functools.partial(generate.sample, key=jax.random.key(0))
    decoders = generate.greedy, generate.beam, sample
    for max_length in (0, -1, config.longest + 1):
        message = f"max_length={max_length} must be between 1 and the model's {config.longest}"
        refused(lambda n=max_length: model.init_cache(source, n), message, ConfigError)
        for decode in decoders:
            call = functools.partial(decode, model, source, max_length=max_length)
            refused(call, message, ConfigError)
    size = config.target_vocab_size
    for name, value in itertools.product(("bos_id", "eos_id"), (-1, size)):
        message = f"{name}={value} is outside the vocabulary of {size}"
        for decode in decoders:
            refused(lambda d=decode, o={name: value}: d(model, source, **o), message, ConfigError)
