"""Decoding with a cache equals decoding without one; beam search equals a plain loop."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_transformer as jt
from jax_transformer import generate, transformer
from jax_transformer.config import Branch, Part, Residual
from jax_transformer.errors import ConfigError
from jax_transformer.nn.attention import Prefix
from parity_tests.unit.helpers import furthest, ragged, random_model, tiny
from parity_tests.unit.speakers import loud

ROWS, LENGTH = 4, 8
PAD, BOS, EOS = 1, 2, 3  # lesson10's


@pytest.fixture(scope="module", autouse=True)
def steps():
    """A list that grows by one in every step of a freshly compiled decoding loop."""
    jax.clear_caches()
    seen: list[int] = []
    decode_step = transformer.Transformer.decode_step

    def counted(self, tokens, cache):
        jax.debug.callback(lambda _: seen.append(1), tokens)
        return decode_step(self, tokens, cache)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformer.Transformer, "decode_step", counted)
        yield seen
    jax.clear_caches()


@functools.cache
def compiled(definition):
    """Return a full pass without a cache, compiled once per configuration."""
    return jax.jit(lambda state, source, target: nnx.merge(definition, state)(source, target))


def forward(model: transformer.Transformer):
    definition, state = nnx.split(model)
    return lambda source, target: np.asarray(compiled(definition)(state, source, target))


def width(config: jt.TransformerConfig, source: np.ndarray, new_tokens: int) -> int:
    """Return the target's width in every step: the result's, or the source's if both must be
    equally long.

    In a causal decoder later tokens change no earlier logit (see test_model).
    """
    return source.shape[1] if config.equal_lengths else new_tokens


def plain_greedy(
    model: transformer.Transformer, source: np.ndarray, bos: int, eos: int, new_tokens: int = LENGTH
) -> np.ndarray:
    pad, logits = model.config.target_pad_id, forward(model)
    target = np.full((ROWS, width(model.config, source, new_tokens) + 1), pad)
    target[:, 0] = bos
    done = np.zeros(ROWS, bool)
    for i in range(new_tokens):
        token = logits(source, target[:, :-1])[:, i].argmax(axis=-1)
        target[:, i + 1] = np.where(done, pad, token)
        done |= target[:, i + 1] == eos
    return target[:, 1 : new_tokens + 1]


def sources(config: jt.TransformerConfig, seed: int) -> np.ndarray:
    return ragged(config.source_vocab_size, config.source_pad_id, ROWS, 7, seed)


FAITHFUL = tiny("lesson10", encoder_layers=1)
PRE_NORM = tiny(
    "lesson10_repaired",
    encoder_layers=1,
    architecture="torch_nn",
    norm_placement="pre",
    **{"decoder.positions": "learned", "decoder.final_norm": False},
)


@pytest.mark.parametrize(
    "config", [FAITHFUL, PRE_NORM], ids=["lesson10", "pre-norm, learned positions"]
)
def test_greedy_is_the_plain_loop_without_a_cache(config):
    seen = []
    for seed in range(8):
        model, source = loud(config, seed), sources(config, seed)
        tokens = np.asarray(generate.greedy(model, source, max_length=LENGTH))
        assert tokens.dtype == np.int32
        assert (tokens == plain_greedy(model, source, config.bos_id, config.eos_id)).all()
        seen.append(tokens)
    seen = np.concatenate(seen)
    ended = (seen == config.eos_id).any(axis=1)
    inside = (seen[:, :-1] == config.target_pad_id) & (seen[:, 1:] != config.target_pad_id)
    assert (
        0 < ended.sum() < len(seen)
        and inside.any()
        and len(np.unique(seen, axis=0)) > len(seen) / 2
    )  # every case occurred


def steps_match_the_whole(model: transformer.Transformer, source: np.ndarray, target: np.ndarray):
    definition, state = nnx.split(model)

    @jax.jit
    def run(state, tokens):
        model = nnx.merge(definition, state)
        start = model.init_cache(source, len(tokens))
        cache, logits = jax.lax.scan(
            lambda cache, t: model.decode_step(t[:, None], cache)[::-1], start, tokens
        )
        return logits[:, :, 0].swapaxes(0, 1), cache.length, cache.target_valid

    logits, length, valid = run(state, jnp.asarray(target.T, jnp.int32))
    full = forward(model)(source, target)
    assert furthest(logits, full) <= 1e-12 * np.abs(full).max()
    assert int(length) == target.shape[1]
    assert (np.asarray(valid) == (target != model.config.target_pad_id)).all()


@pytest.mark.parametrize(
    "config", [FAITHFUL, PRE_NORM], ids=["lesson10", "pre-norm, learned positions"]
)
def test_each_cached_step_gives_the_logits_of_a_full_pass(config):
    target = np.random.default_rng(3).integers(0, config.target_vocab_size, (ROWS, LENGTH))
    # a row that begins with padding sees no key
    target[0, :3], target[1, 2] = (config.target_pad_id, config.target_pad_id)
    steps_match_the_whole(loud(config, 0), sources(config, 0), target)


# The rules of T5 and M2M100. In M2M100 padding within a target counts as a token with a cache, as
# in transformers
BY_DISTANCE = PRE_NORM.with_sizes(
    **{
        f"{stack}.{field}": value
        for stack in ("encoder", "decoder")
        for field, value in (("positions", "relative"), ("relative_buckets", 4))
    },
    **{"decoder.self_mask": ["causal"], "decoder.relative_max_distance": 5},
)
BY_COUNT = PRE_NORM.with_sizes(
    **{
        f"{stack}.{field}": value
        for stack in ("encoder", "decoder")
        for field, value in (
            ("positions", "sinusoidal"),
            ("position_index", "not_padding"),
            ("position_offset", 2),
        )
    },
    **{"decoder.self_mask": ["causal"]},
)


@pytest.mark.parametrize(
    "config", [BY_DISTANCE, BY_COUNT], ids=["relative positions", "positions that skip padding"]
)
def test_every_position_rule_decodes_from_a_cache(config):
    """Step by step, and in a beam, whose hypotheses share the cache."""
    target = np.random.default_rng(3).integers(0, config.target_vocab_size, (ROWS, LENGTH))
    target[target == config.target_pad_id] = EOS
    model, source = loud(config, 0), sources(config, 0)
    steps_match_the_whole(model, source, target)
    tokens, scores = generate.beam(
        model, source, beam_size=3, max_length=LENGTH, length_penalty=0.6
    )
    for row in range(ROWS):
        expected, score = plain_beam(model, source[row], 3, 0.6)
        assert np.asarray(tokens)[row].tolist() == expected
        assert abs(float(scores[row]) - score) <= 1e-12 * abs(score)


# Models without a KV cache

SELF, CROSS, FFN = Branch((Part.SELF,)), Branch((Part.CROSS,)), Branch((Part.FFN,))
TO_MEMORY = dataclasses.replace(CROSS, residual=Residual.MEMORY)
UNCACHED = {
    name: PRE_NORM.with_sizes(num_layers=1, **changes)
    for name, changes in {
        "not causal": {"decoder.self_mask": ("target_padding",)},
        "values summed": {"decoder.mixing": "summed", "score_scale": "none"},
        "heads merged raw": {"decoder.head_merge": "raw"},
        "heads merged raw, cross-attention alone": {
            "decoder.head_merge": "raw",
            "decoder.branches": (CROSS, FFN),
        },
        "self-attention twice": {"decoder.branches": (SELF, SELF, CROSS)},
        "memory as residual": {"decoder.branches": (SELF, TO_MEMORY, FFN)},
    }.items()
} | {"blog2023": tiny("blog2023", num_layers=1)}


@pytest.mark.parametrize("name", UNCACHED)
def test_greedy_without_a_cache_is_the_plain_loop(name):
    """Each step sees the tokens so far, then padding, which matters without a causal mask."""
    config, seen = UNCACHED[name], []
    for seed in range(4):
        model, source = loud(config, seed), sources(config, seed)
        new_tokens = min(LENGTH, source.shape[1]) if config.equal_lengths else LENGTH
        assert isinstance(
            jax.eval_shape(lambda m=model, s=source, p=new_tokens: m.init_cache(s, p)), Prefix
        )
        tokens = np.asarray(generate.greedy(model, source, max_length=LENGTH))
        assert tokens.dtype == np.int32 and tokens.shape == (ROWS, new_tokens)
        assert (
            tokens == plain_greedy(model, source, config.bos_id, config.eos_id, new_tokens)
        ).all()
        seen.append(tokens)
    assert len(np.unique(np.concatenate(seen), axis=0)) > ROWS


@pytest.mark.parametrize("name", ["not causal", "memory as residual", "blog2023"])
def test_beam_without_a_cache_is_the_plain_search(name):
    config = UNCACHED[name]
    for seed, alpha, eos in SEARCHES[1:3]:
        model, source = loud(config, seed, eos=eos), sources(config, seed)
        new_tokens = min(LENGTH, source.shape[1]) if config.equal_lengths else LENGTH
        tokens, scores = generate.beam(
            model, source, beam_size=3, max_length=LENGTH, length_penalty=alpha
        )
        for row in range(ROWS):
            expected, score = plain_beam(model, source[row], 3, alpha, new_tokens)
            assert np.asarray(tokens)[row].tolist() == expected, f"seed {seed}, row {row}"
            assert abs(float(scores[row]) - score) <= 1e-12 * abs(score)


def test_the_source_length_limits_generation_if_sides_must_be_equally_long():
    config = UNCACHED["memory as residual"]
    model, source = loud(config, 0), sources(config, 0)
    decoders = {
        "greedy": generate.greedy,
        "beam": lambda *a, **k: generate.beam(*a, beam_size=2, **k)[0],
        "sample": lambda *a, **k: generate.sample(*a, jax.random.key(0), **k),
    }
    for name, decode in decoders.items():
        for new_tokens, expected in ((None, 7), (3, 3), (7, 7), (20, 7)):
            assert jax.eval_shape(
                lambda d=decode, p=new_tokens: d(model, source, max_length=p)
            ).shape == (ROWS, expected), name
        message = r"^max_length=21 must be between 1 and the model's 20$"
        with pytest.raises(ConfigError, match=message):
            decode(model, source, max_length=21)
    few = np.asarray(generate.greedy(model, source, max_length=3))
    assert (
        few == np.asarray(generate.greedy(model, source))[:, :3]
    ).all()  # max_length does not shorten the source
    message = r"^max_length=8 is over the source's 7 tokens, and this decoder needs equal lengths$"
    with pytest.raises(ConfigError, match=message):
        model.init_cache(source, 8)


def test_start_and_end_tokens_can_be_set():
    model, source = loud(FAITHFUL, 4), sources(FAITHFUL, 4)
    usual = np.asarray(generate.greedy(model, source, max_length=LENGTH))
    end = int(usual[0, 1])
    other = np.asarray(generate.greedy(model, source, max_length=LENGTH, bos_id=9, eos_id=end))
    assert (other == plain_greedy(model, source, 9, end)).all() and (other != usual).any()


def test_an_end_token_is_followed_by_padding_and_the_loop_stops_early(steps):
    model, source = loud(FAITHFUL, 0, eos=99.0), sources(FAITHFUL, 0)
    for decode, expected in (
        (generate.greedy, 1),
        (lambda *a, **k: generate.beam(*a, beam_size=2, **k)[0], 2),
    ):
        steps.clear()
        tokens = np.asarray(decode(model, source, max_length=LENGTH))
        jax.effects_barrier()
        assert (tokens == [[EOS] + [PAD] * (LENGTH - 1)] * ROWS).all()
        # with a beam of two, the second hypothesis ends one step later
        assert len(steps) == expected


def test_the_number_of_tokens_is_bounded_by_the_model():
    model, source = loud(FAITHFUL, 0), sources(FAITHFUL, 0)
    assert jax.eval_shape(lambda: generate.greedy(model, source)).shape == (ROWS, 20)
    assert jax.eval_shape(lambda: generate.beam(model, source))[0].shape == (ROWS, 20)


def test_beam_refuses_invalid_arguments():
    model, source = random_model(FAITHFUL), sources(FAITHFUL, 0)
    for size in (0, -2, 7):
        message = f"^num_beams={size} must be (between 1 and half .* 13|at least 1)$"
        with pytest.raises(ConfigError, match=message):
            generate.beam(model, source, beam_size=size)
    for penalty in (-0.5, float("nan")):
        with pytest.raises(ConfigError, match=f"^length_penalty={penalty} must not be negative"):
            generate.beam(model, source, length_penalty=penalty)


def test_scores_of_a_16_bit_model_add_up_in_float32():
    model = random_model(
        tiny("lesson10", encoder_layers=1, compute_dtype="bfloat16"), dtype="float32"
    )
    actual = jax.eval_shape(lambda: model(sources(FAITHFUL, 0), sources(FAITHFUL, 0))).dtype
    assert actual == jnp.bfloat16
    assert (
        jax.eval_shape(lambda: generate.beam(model, sources(FAITHFUL, 0)))[1].dtype == jnp.float32
    )


def test_an_n_best_list_begins_with_the_best():
    model, source = loud(FAITHFUL, 1, eos=2.0), sources(FAITHFUL, 1)
    tokens, scores = map(
        np.asarray, generate.n_best(model, source, 3, beam_size=4, max_length=LENGTH)
    )
    best, score = map(np.asarray, generate.beam(model, source, beam_size=4, max_length=LENGTH))
    assert tokens.shape == (ROWS, 3, LENGTH)
    assert (tokens[:, 0] == best).all()
    assert (scores[:, 0] == score).all()
    assert all(len(np.unique(row, axis=0)) == 3 for row in tokens)
    for count in (0, 5):
        message = f"^num_return_sequences={count} (must be at least 1|.* not 4$)"
        with pytest.raises(ConfigError, match=message):
            generate.n_best(model, source, count)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def penalty(length: int, alpha: float) -> float:
    """Wu et al. 2016, equation 14; the length counts the end token."""
    return ((5 + length) / 6) ** alpha


def plain_beam(
    model: transformer.Transformer,
    source: np.ndarray,
    size: int,
    alpha: float,
    new_tokens: int = LENGTH,
) -> tuple[list[int], float]:
    """Search one row with lists: of the 2k best, those with an end finish, k others go on."""
    logits, config = forward(model), model.config
    live: list[tuple[float, list[int]]] = [(0.0, [])]
    finished: list[tuple[float, list[int]]] = []
    for step in range(new_tokens):
        target = np.full((ROWS, width(config, source[None], new_tokens)), config.target_pad_id)
        for row, (_, tokens) in enumerate(live):
            target[row, : step + 1] = [config.bos_id, *tokens]
        log_probs = log_softmax(logits(np.repeat(source[None], ROWS, axis=0), target)[:, step])
        grown = [
            (score + log_probs[row, v], [*tokens, v])
            for row, (score, tokens) in enumerate(live)
            for v in range(log_probs.shape[1])
        ]
        best = sorted(grown, key=lambda hypothesis: -hypothesis[0])[: 2 * size]
        finished += [
            (score / penalty(step + 1, alpha), tokens)
            for score, tokens in best
            if tokens[-1] == config.eos_id
        ]
        finished = sorted(finished, key=lambda hypothesis: -hypothesis[0])[:size]
        live = [hypothesis for hypothesis in best if hypothesis[1][-1] != config.eos_id][:size]
        if len(finished) == size and live[0][0] / penalty(new_tokens, alpha) <= finished[-1][0]:
            break
    score, tokens = finished[0] if finished else (live[0][0] / penalty(step + 1, alpha), live[0][1])
    return tokens + [config.target_pad_id] * (new_tokens - len(tokens)), score


# Seed, length penalty, bonus of the end token's logit. The last two reward longer hypotheses
# although every step costs.
SEARCHES = [
    (0, 0.0, 2.0),
    (1, 0.6, 2.0),
    (2, 1.0, 1.0),
    (4, 2.5, 2.0),
    (5, 0.6, 3.0),
    (6, 0.6, -99.0),
    (0, 4.0, 4.0),
    (10, 4.0, 2.0),
]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_beam_is_the_plain_search(size):
    lengths = set()
    for seed, alpha, eos in SEARCHES:
        model, source = loud(FAITHFUL, seed, eos=eos), sources(FAITHFUL, seed)
        tokens, scores = generate.beam(
            model, source, beam_size=size, max_length=LENGTH, length_penalty=alpha
        )
        assert tokens.dtype == np.int32 and tokens.shape == (ROWS, LENGTH)
        for row in range(ROWS):
            expected, score = plain_beam(model, source[row], size, alpha)
            assert np.asarray(tokens)[row].tolist() == expected, f"seed {seed}, row {row}"
            assert abs(float(scores[row]) - score) <= 1e-12 * abs(score)
            lengths.add(expected.index(EOS) + 1 if EOS in expected else None)
        if (
            eos < 0 and size == 1
            # only without an early end: a beam of one weighs that against continuing, greedy does
            # not
        ):
            assert (
                np.asarray(tokens) == np.asarray(generate.greedy(model, source, max_length=LENGTH))
            ).all()
    assert len(lengths) > 3 and None in lengths  # early, late and never-ending hypotheses occurred


def test_the_score_is_that_of_the_tokens():
    model, source = loud(FAITHFUL, 1, eos=2.0), sources(FAITHFUL, 1)
    tokens, scores = generate.beam(
        model, source, beam_size=3, max_length=LENGTH, length_penalty=0.6
    )
    tokens = np.asarray(tokens)
    target = np.concatenate([np.full((ROWS, 1), BOS), tokens[:, :-1]], axis=1)
    log_probs = log_softmax(forward(model)(source, target))
    for row in range(ROWS):
        length = tokens[row].tolist().index(EOS) + 1 if EOS in tokens[row] else LENGTH
        total = sum(log_probs[row, i, tokens[row, i]] for i in range(length))
        assert abs(float(scores[row]) - total / penalty(length, 0.6)) < 1e-12


def test_a_row_s_beam_does_not_depend_on_other_rows():
    model, source = loud(FAITHFUL, 2, eos=2.0), sources(FAITHFUL, 2)
    tokens, scores = generate.beam(model, source, beam_size=2, max_length=LENGTH)
    again, others = generate.beam(model, source[::-1].copy(), beam_size=2, max_length=LENGTH)
    assert (np.asarray(again)[::-1] == np.asarray(tokens)).all()
    assert furthest(others[::-1], scores) < 1e-12


# Ensembles


@pytest.mark.parametrize(
    "config",
    [PRE_NORM, pytest.param(UNCACHED["not causal"], marks=pytest.mark.slow)],
    ids=["cache", "no cache"],
)
def test_an_ensemble_of_one_model_with_itself_is_the_model(config):
    model, source = loud(config, 0), sources(config, 0)
    for decode in (
        lambda model: (generate.greedy(model, source, max_length=LENGTH), np.zeros(0)),
        lambda model: generate.n_best(model, source, 2, beam_size=3, max_length=LENGTH),
        lambda model: (
            generate.sample(model, source, jax.random.key(0), max_length=LENGTH, top_p=0.9),
            np.zeros(0),
        ),
    ):
        alone, together = ([np.asarray(x) for x in decode(m)] for m in (model, [model, model]))
        assert (alone[0] == together[0]).all() and len(np.unique(alone[0], axis=0)) > 1
        np.testing.assert_allclose(alone[1], together[1], rtol=1e-12)


def test_an_ensemble_needs_one_vocabulary_and_reads_what_its_shortest_model_reads():
    models = [loud(PRE_NORM.with_sizes(max_length=length), 0) for length in (20, 12)]
    assert generate.split(models).config.longest == 12
    for name, value in (("target_vocab_size", 14), ("eos_id", 4)):
        other = transformer.abstract(PRE_NORM.with_sizes(**{name: value}))
        first = getattr(PRE_NORM, name)
        message = f"^model 2 of .* {name}={value}, and the first {first}"
        with pytest.raises(ConfigError, match=message):
            generate.split([models[0], other])
