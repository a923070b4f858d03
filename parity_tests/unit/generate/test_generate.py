"""Decoding with a cache equals decoding without one; beam search equals a plain loop."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_transformer as jt
from jax_transformer import generate, transformer
from jax_transformer.config import Branch, Part, Residual
from jax_transformer.errors import ConfigError, InputError
from jax_transformer.generate import ensemble, prepare
from jax_transformer.nn.attention import Prefix
from parity_tests.marks import quick_if
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


Models = transformer.Transformer | list[transformer.Transformer]


def first(model: Models) -> transformer.Transformer:
    return model[0] if isinstance(model, list) else model


def forward(model: Models):
    if isinstance(model, list):
        each = [forward(one) for one in model]
        return lambda *ids: np.log(np.mean([np.exp(log_softmax(f(*ids))) for f in each], axis=0))
    definition, state = nnx.split(model)
    return lambda source, target: np.asarray(compiled(definition)(state, source, target))


def width(config: jt.TransformerConfig, source: np.ndarray, new_tokens: int) -> int:
    """Return the target's width in every step: the result's, or the source's if both must be
    equally long.

    In a causal decoder later tokens change no earlier logit (see test_model).
    """
    return source.shape[1] if config.equal_lengths else new_tokens


def plain_greedy(
    model: Models, source: np.ndarray, bos: int, eos: int, new_tokens: int = LENGTH
) -> np.ndarray:
    config, logits = first(model).config, forward(model)
    pad = config.target_pad_id
    target = np.full((ROWS, width(config, source, new_tokens) + 1), pad)
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
LEARNED = {"decoder.positions": "learned", "decoder.final_norm": False}
STOCK = dict(architecture="torch_nn", norm_placement="pre")
PRE_NORM = tiny("lesson10_repaired", encoder_layers=1, **STOCK, **LEARNED)


KINDS = pytest.mark.parametrize(
    "config", [FAITHFUL, PRE_NORM], ids=["lesson10", "pre-norm, learned positions"]
)


@KINDS
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
    assert 0 < ended.sum() < len(seen) and inside.any()  # every case occurred
    assert len(np.unique(seen, axis=0)) > len(seen) / 2


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


@KINDS
def test_each_cached_step_gives_the_logits_of_a_full_pass(config):
    target = np.random.default_rng(3).integers(0, config.target_vocab_size, (ROWS, LENGTH))
    # a row that begins with padding sees no key
    target[0, :3], target[1, 2] = (config.target_pad_id, config.target_pad_id)
    steps_match_the_whole(loud(config, 0), sources(config, 0), target)


# The rules of T5 and M2M100. In M2M100 padding within a target counts as a token with a cache, as
# in transformers
def positioned(**fields) -> jt.TransformerConfig:
    """The configuration with these fields in both stacks."""
    both = {f"{stack}.{key}": x for stack in ("encoder", "decoder") for key, x in fields.items()}
    return PRE_NORM.with_sizes(**both, **{"decoder.self_mask": ["causal"]})


BY_DISTANCE = positioned(positions="relative", relative_buckets=4)
BY_DISTANCE = BY_DISTANCE.with_sizes(**{"decoder.relative_max_distance": 5})
BY_COUNT = positioned(positions="sinusoidal", position_index="not_padding", position_offset=2)


@pytest.mark.parametrize(
    "config", [BY_DISTANCE, BY_COUNT], ids=["relative positions", "positions that skip padding"]
)
def test_every_position_rule_decodes_from_a_cache(config):
    """Step by step, and in a beam, whose hypotheses share the cache."""
    target = np.random.default_rng(3).integers(0, config.target_vocab_size, (ROWS, LENGTH))
    target[target == config.target_pad_id] = EOS
    model, source = loud(config, 0), sources(config, 0)
    steps_match_the_whole(model, source, target)
    assert_plain(model, source, 3, 0.6)


# Models without a KV cache

SELF, CROSS, FFN = Branch((Part.SELF,)), Branch((Part.CROSS,)), Branch((Part.FFN,))
TO_MEMORY, RAW = dataclasses.replace(CROSS, residual=Residual.MEMORY), {"decoder.head_merge": "raw"}
UNCACHED = {
    name: PRE_NORM.with_sizes(num_layers=1, **changes)
    for name, changes in {
        "not causal": {"decoder.self_mask": ("target_padding",)},
        "values summed": {"decoder.mixing": "summed", "score_scale": "none"},
        "heads merged raw": RAW,
        "heads merged raw, cross-attention alone": RAW | {"decoder.branches": (CROSS, FFN)},
        "self-attention twice": {"decoder.branches": (SELF, SELF, CROSS)},
        "memory as residual": {"decoder.branches": (SELF, TO_MEMORY, FFN)},
    }.items()
} | {"blog2023": tiny("blog2023", num_layers=1)}


@pytest.mark.parametrize(
    "name", [quick_if(name in ("not causal", "blog2023"), name) for name in UNCACHED]
)
def test_greedy_without_a_cache_is_the_plain_loop(name):
    """Each step sees the tokens so far, then padding, which matters without a causal mask."""
    config, seen = UNCACHED[name], []
    for seed in range(4):
        model, source = loud(config, seed), sources(config, seed)
        new_tokens = min(LENGTH, source.shape[1]) if config.equal_lengths else LENGTH
        assert isinstance(
            jax.eval_shape(functools.partial(model.init_cache, source, new_tokens)), Prefix
        )
        tokens = np.asarray(generate.greedy(model, source, max_length=LENGTH))
        assert tokens.dtype == np.int32 and tokens.shape == (ROWS, new_tokens)
        plain = plain_greedy(model, source, config.bos_id, config.eos_id, new_tokens)
        assert (tokens == plain).all()
        seen.append(tokens)
    assert len(np.unique(np.concatenate(seen), axis=0)) > ROWS


@pytest.mark.parametrize("name", ["not causal", "memory as residual"])
def test_beam_without_a_cache_is_the_plain_search(name):
    config = UNCACHED[name]
    for seed, alpha, eos in SEARCHES[1:3]:
        model, source = loud(config, seed, eos=eos), sources(config, seed)
        new_tokens = min(LENGTH, source.shape[1]) if config.equal_lengths else LENGTH
        assert_plain(model, source, 3, alpha, new_tokens=new_tokens)


def test_the_source_length_limits_generation_if_sides_must_be_equally_long():
    config = UNCACHED["memory as residual"]
    model, source = loud(config, 0), sources(config, 0)
    for new_tokens, expected in ((None, 7), (3, 3), (7, 7), (20, 7)):
        decode = functools.partial(generate.greedy, model, source, max_length=new_tokens)
        assert jax.eval_shape(decode).shape == (ROWS, expected)
    few = np.asarray(generate.greedy(model, source, max_length=3))
    # max_length does not shorten the source
    assert (few == np.asarray(generate.greedy(model, source))[:, :3]).all()


def test_start_and_end_tokens_can_be_set():
    model, source = loud(FAITHFUL, 4), sources(FAITHFUL, 4)
    usual = np.asarray(generate.greedy(model, source, max_length=LENGTH))
    end = int(usual[0, 1])
    other = np.asarray(generate.greedy(model, source, max_length=LENGTH, bos_id=9, eos_id=end))
    assert (other == plain_greedy(model, source, 9, end)).all() and (other != usual).any()


def test_an_end_token_is_followed_by_padding_and_the_loop_stops_early(steps):
    model, source = loud(FAITHFUL, 0, eos=99.0), sources(FAITHFUL, 0)
    beam = functools.partial(generate.beam, beam_size=2)
    for decode, expected in ((generate.greedy, 1), (lambda *a, **k: beam(*a, **k)[0], 2)):
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
    for width, expected in ((1, 2), (9, 18), (10, 20), (11, 20), (20, 20)):
        assert prepare.max_new_tokens(FAITHFUL, width, None) == expected


def test_a_prompt_and_its_text_fill_all_positions():
    """Without a length; each token is the likeliest after those before it, or scores as they do."""
    model, source = loud(PRE_NORM, 0, eos=-99.0), sources(PRE_NORM, 0)
    prompt = np.array([[BOS, 5, 7], [BOS, 4, 9], [BOS, 5, 7], [9, 9, 9]], np.int32)
    greedy = np.asarray(generate.greedy(model, source, prompt=prompt))
    tokens, scores = generate.beam(model, source, prompt=prompt, beam_size=2)
    assert greedy.shape == tokens.shape == (ROWS, 18)
    inputs = np.concatenate([prompt, greedy[:, :-1]], axis=1)
    assert (forward(model)(source, inputs)[:, 2:].argmax(axis=2) == greedy).all()
    inputs = np.concatenate([prompt, tokens[:, :-1]], axis=1)
    log_probs = log_softmax(forward(model)(source, inputs))[:, 2:]
    total = np.take_along_axis(log_probs, np.asarray(tokens)[:, :, None], axis=2).sum(axis=(1, 2))
    np.testing.assert_allclose(scores, total / penalty(18, 0.6), rtol=1e-12)
    jax.eval_shape(lambda: generate.greedy(model, source, prompt=prompt, max_length=18))
    message = r"max_length=19 .* model's 18 after a prompt of 3 tokens"
    with pytest.raises(ConfigError, match=message):
        generate.greedy(model, source, prompt=prompt, max_length=19)
    with pytest.raises(InputError, match="prompt id 13 is outside the vocabulary"):
        generate.greedy(model, source, prompt=prompt + 4)


def test_beam_refuses_invalid_arguments():
    model, source = random_model(FAITHFUL), sources(FAITHFUL, 0)
    for size in (0, -2, 7):
        message = f"^num_beams={size} must be (between 1 and half .* 13|at least 1)$"
        with pytest.raises(ConfigError, match=message):
            generate.beam(model, source, beam_size=size)
    assert jax.eval_shape(lambda: generate.beam(model, source, beam_size=6))[0].shape == (4, 20)
    for penalty in (-0.5, float("nan")):
        with pytest.raises(ConfigError, match=f"^length_penalty={penalty} must not be negative"):
            generate.beam(model, source, length_penalty=penalty)


def test_scores_of_a_16_bit_model_add_up_in_float32():
    model = random_model(FAITHFUL.with_sizes(compute_dtype="bfloat16"), dtype="float32")
    ids = sources(FAITHFUL, 0)
    assert jax.eval_shape(lambda: model(ids, ids)).dtype == jnp.bfloat16
    assert jax.eval_shape(lambda: generate.beam(model, ids))[1].dtype == jnp.float32


def test_an_n_best_list_begins_with_the_best():
    model, source = loud(FAITHFUL, 1, eos=2.0), sources(FAITHFUL, 1)
    options = dict(beam_size=4, max_length=LENGTH)
    tokens, scores = map(np.asarray, generate.n_best(model, source, 3, **options))
    best, score = map(np.asarray, generate.beam(model, source, **options))
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
    model: Models, source: np.ndarray, size: int, alpha: float, new_tokens: int = LENGTH
) -> tuple[list[list[int]], list[float]]:
    """Search one row with lists: of the 2k best, those with an end finish, k others go on.

    Return ``size`` hypotheses, finished ones first, and their scores.
    """
    logits, config = forward(model), first(model).config
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
        ended = [hypothesis for hypothesis in best if hypothesis[1][-1] == config.eos_id]
        finished += [(score / penalty(step + 1, alpha), tokens) for score, tokens in ended]
        finished = sorted(finished, key=lambda hypothesis: -hypothesis[0])[:size]
        live = [hypothesis for hypothesis in best if hypothesis[1][-1] != config.eos_id][:size]
        if len(finished) == size and live[0][0] / penalty(new_tokens, alpha) <= finished[-1][0]:
            break
    finished += [(score / penalty(step + 1, alpha), tokens) for score, tokens in live]
    rows = [row + [config.target_pad_id] * (new_tokens - len(row)) for _, row in finished[:size]]
    return rows, [score for score, _ in finished[:size]]


def assert_plain(model, source: np.ndarray, size: int, alpha: float, **lengths: int) -> np.ndarray:
    """Assert that an n-best list of a beam search is the plain search's, and return its tokens."""
    tokens, scores = generate.n_best(
        model, source, size, beam_size=size, max_length=LENGTH, length_penalty=alpha
    )
    assert tokens.dtype == np.int32
    for row in range(ROWS):
        expected, expected_scores = plain_beam(model, source[row], size, alpha, **lengths)
        assert np.asarray(tokens)[row].tolist() == expected, f"row {row}"
        np.testing.assert_allclose(scores[row], expected_scores, rtol=1e-12)
    return np.asarray(tokens)


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


@pytest.mark.parametrize("size", [1, 2, 4])
def test_beam_is_the_plain_search(size):
    lengths = set()
    for seed, alpha, eos in SEARCHES:
        model, source = loud(FAITHFUL, seed, eos=eos), sources(FAITHFUL, seed)
        tokens = assert_plain(model, source, size, alpha)
        lengths |= {row.index(EOS) + 1 if EOS in row else None for row in tokens[:, 0].tolist()}
        # only without an early end: a beam of one weighs that against continuing, greedy does not
        if eos < 0 and size == 1:
            greedy = np.asarray(generate.greedy(model, source, max_length=LENGTH))
            assert (tokens[:, 0] == greedy).all()
    assert len(lengths) > 3 and None in lengths  # early, late and never-ending hypotheses occurred


# Ensembles


def test_an_ensemble_of_one_model_with_itself_draws_as_the_model():
    model, source, key = loud(PRE_NORM, 0), sources(PRE_NORM, 0), jax.random.key(0)
    alone, together = (
        np.asarray(generate.sample(models, source, key, max_length=LENGTH, top_p=0.9))
        for models in (model, [model, model])
    )
    assert (alone == together).all() and len(np.unique(alone, axis=0)) > 1


def test_an_ensemble_is_the_plain_search_over_mean_probabilities():
    """Three models differ in depth and length, and their beams cross."""
    shapes = [{}, {"decoder.layers": 1, "max_length": 15}, {"max_length": LENGTH}]
    for seed in range(3):
        configs = [PRE_NORM.with_sizes(**each) for each in shapes]
        models = [loud(config, seed + i, eos=2.0) for i, config in enumerate(configs)]
        source = sources(PRE_NORM, seed)
        assert len(np.unique(assert_plain(models, source, 3, 1.0)[:, 0], axis=0)) > 2
        greedy = generate.greedy(models, source, max_length=LENGTH)
        assert (np.asarray(greedy) == plain_greedy(models, source, BOS, EOS)).all()


def test_mean_probabilities_are_normalised_in_the_widest_dtype():
    logits = np.random.default_rng(0).normal(size=(3, 2, 5)) * 4
    mean = np.mean(np.exp(log_softmax(logits)), axis=0)
    mixed = ("bfloat16", "float32", "bfloat16")
    for dtypes, bound in ((("float64",) * 3, 1e-14), (mixed, 0.05), (("bfloat16",) * 3, 0.05)):
        each = [jnp.asarray(x, dtype) for x, dtype in zip(logits, dtypes, strict=True)]
        together = ensemble.mean_log_probs(each)
        assert together.dtype == ("float64" if dtypes[0] == "float64" else "float32")
        np.testing.assert_allclose(jnp.exp(together), mean, atol=bound)
        np.testing.assert_allclose(jnp.exp(together).sum(axis=-1), 1, atol=1e-6)


def test_an_ensemble_shares_vocabularies_and_reads_what_its_shortest_model_reads():
    lengths = (20, 12, 16)
    models = [transformer.abstract(PRE_NORM.with_sizes(max_length=length)) for length in lengths]
    for order in itertools.permutations(models):
        assert ensemble.common_config(order).longest == 12
    ends = PRE_NORM.with_sizes(max_length=60, **{"decoder.position_index": "truncated_cosine"})
    both = [transformer.abstract(each) for each in (PRE_NORM.with_sizes(max_length=55), ends)]
    assert ensemble.common_config(both).longest == 50
    changes = dict(source_vocab_size=12, target_vocab_size=14, source_pad_id=4, target_pad_id=4)
    for name, value in (changes | dict(bos_id=4, eos_id=4)).items():
        other = transformer.abstract(PRE_NORM.with_sizes(**{name: value}))
        first = getattr(PRE_NORM, name)
        message = f"^model {{}} of .* {name}={value}, and the first {first}"
        for i in (1, 2):
            with pytest.raises(ConfigError, match=message.format(i + 1)):
                generate.split([*models[:i], other, *models[i + 1 :]])
    with pytest.raises(ConfigError, match=r"model 2 of .* equal_lengths=True"):
        generate.split([models[0], transformer.abstract(UNCACHED["memory as residual"])])


def test_only_equal_ensembles_share_a_program():
    configs = [PRE_NORM.with_sizes(**{"decoder.activation": name}) for name in ("relu", "gelu")]
    relu, gelu = (loud(config, 0) for config in configs)
    pairs = [generate.split([relu, other]).structure for other in (relu, gelu, gelu)]
    assert pairs[0] != pairs[1] == pairs[2]
