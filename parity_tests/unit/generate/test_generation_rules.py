"""Constraints on generated tokens hold, and every key of generation_config.json is read."""

import dataclasses
import functools
import inspect
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_transformer import generate
from jax_transformer.data.huggingface_tokenizer import HuggingFaceTokenizer
from jax_transformer.errors import ConfigError, InputError
from jax_transformer.generate import beam_search, decoding, logits, prepare, transformers_config
from jax_transformer.generate.generation_config import (
    BeamScorer,
    Constraints,
    EarlyStopping,
    GenerationConfig,
)
from jax_transformer.generate.prepare import Inputs, StaticArgs
from parity_tests.marks import quick_if
from parity_tests.unit.helpers import ragged, tiny
from parity_tests.unit.speakers import loud

CONFIG = tiny("lesson10", num_layers=1)
SOURCE = ragged(CONFIG.source_vocab_size, CONFIG.source_pad_id, 4, 7, 0)
LENGTH = 8
BOS, PAD = CONFIG.bos_id, CONFIG.target_pad_id
RULES = Constraints(
    no_repeat_ngram_size=2,
    bad_words_ids=((5,), (7, 8)),
    min_new_tokens=3,
    forced_eos_token_ids=(CONFIG.eos_id,),
)


def assert_constrained(rows: np.ndarray) -> None:
    """Assert that rows follow RULES, up to their ends."""
    for row in rows.tolist():
        tokens = row[: row.index(CONFIG.eos_id) + 1]  # forced at the latest
        pairs = list(zip([CONFIG.bos_id, *tokens], tokens, strict=False))
        assert len(tokens) > 3, tokens
        assert 5 not in tokens, tokens
        assert (7, 8) not in pairs, tokens
        assert len(set(pairs)) == len(pairs), tokens


AVERAGE = {"scorer": BeamScorer.AVERAGE}
WAYS = {
    "greedy": lambda model, **k: generate.greedy(model, SOURCE, **k),
    "sample": lambda model, **k: generate.sample(model, SOURCE, jax.random.key(0), **k),
    "gnmt": lambda model, **k: generate.n_best(model, SOURCE, 2, beam_size=3, **k)[0][:, 0],
    "average": lambda model, **k: generate.beam(model, SOURCE, beam_size=3, **AVERAGE, **k)[0],
}
QUICK_WAYS = [quick_if(way != "gnmt", way) for way in WAYS]  # both scorers share their steps


@pytest.mark.parametrize("way", QUICK_WAYS)
def test_every_search_applies_the_constraints(way):
    model = loud(CONFIG, 0)
    free = np.asarray(WAYS[way](model, max_length=LENGTH))
    with pytest.raises((AssertionError, ValueError)):
        assert_constrained(free)
    assert_constrained(np.asarray(WAYS[way](model, max_length=LENGTH, constraints=RULES)))


@dataclass(frozen=True)
class Only:
    """A processor from outside: one token at even positions, and another at odd ones."""

    tokens: tuple[int, ...]

    def __call__(self, scores, tokens, step, eos_id):
        chosen = jnp.asarray(self.tokens)[step % 2]
        return jnp.where(jnp.arange(scores.shape[2])[None, None] == chosen, scores, -jnp.inf)


@pytest.mark.parametrize("way", QUICK_WAYS)
def test_a_processor_from_outside_decides_in_every_search(way):
    model = loud(CONFIG, 0)
    rules = Constraints(processors=(Only((4, 6)),))
    tokens = np.asarray(WAYS[way](model, max_new_tokens=LENGTH, constraints=rules))
    assert (tokens == np.array([4, 6] * (LENGTH // 2))).all()
    with pytest.raises(ConfigError, match="Only has 13, which is outside the vocabulary of 13"):
        WAYS[way](model, constraints=Constraints(processors=(Only((4, 13)), Only((4, 6)))))


def test_every_processor_from_outside_is_applied():
    rules = Constraints(processors=(Only((4, 4)), Only((6, 4))))
    scores = jnp.zeros((1, 1, 13))
    config = GenerationConfig(constraints=rules)
    args = StaticArgs(config, LENGTH, CONFIG.bos_id, CONFIG.eos_id, CONFIG.target_pad_id)
    inputs, tokens = Inputs(jnp.asarray(SOURCE[:1])), jnp.zeros((1, 1, LENGTH), jnp.int32)
    for step, count in ((0, 0), (1, 1)):
        after = logits.constrain(scores, tokens, jnp.asarray(step), inputs, args)
        assert np.isfinite(after).sum() == count


@pytest.mark.parametrize(
    ("before", "word", "forbidden"),
    [
        ([], (PAD, PAD, 7), False),  # tokens that are not there yet
        ([5], (BOS, 5, 7), True),  # as many as there can be
        ([5], (BOS, BOS, 5, 7), False),  # more
    ],
)
def test_a_word_is_forbidden_where_all_but_its_last_token_are_generated(before, word, forbidden):
    config = GenerationConfig(constraints=Constraints(bad_words_ids=(word,)))
    args = StaticArgs(config, 2, BOS, CONFIG.eos_id, PAD)
    tokens = jnp.asarray([[[*before, PAD, PAD][:2]]], jnp.int32)
    step, inputs = jnp.asarray(len(before)), Inputs(jnp.asarray(SOURCE[:1]))
    after = logits.constrain(jnp.zeros((1, 1, 13)), tokens, step, inputs, args)
    assert np.isneginf(after).any() == forbidden and np.isneginf(after[0, 0, 7]) == forbidden


def test_an_ngram_of_the_source_may_be_all_of_it():
    config = GenerationConfig(constraints=Constraints(encoder_no_repeat_ngram_size=3))
    args = StaticArgs(config, 4, BOS, CONFIG.eos_id, PAD)
    inputs = Inputs(jnp.asarray([[5, 6, 7]], jnp.int32))
    tokens = jnp.asarray([[[5, 6, PAD, PAD]]], jnp.int32)
    after = logits.constrain(jnp.zeros((1, 1, 13)), tokens, jnp.asarray(2), inputs, args)
    assert np.flatnonzero(np.isneginf(after)).tolist() == [7]


def test_scores_are_normalised_after_processors_from_outside():
    rules = Constraints(processors=(Only((4, 6)),), renormalize_logits=True)
    scores = generate.beam(loud(CONFIG, 0), SOURCE, max_length=LENGTH, constraints=rules)[1]
    assert (np.asarray(scores) == 0).all()


def test_a_forbidden_end_finishes_nothing():
    """With fewer allowed tokens than continuations that are looked at."""
    others = tuple(token for token in range(1, 13) if token != CONFIG.eos_id)
    rules = Constraints(min_new_tokens=LENGTH, suppress_tokens=others)
    model, options = loud(CONFIG, 0), dict(max_length=LENGTH, constraints=rules)
    tokens, scores = generate.n_best(model, SOURCE, 4, **options)
    assert (np.asarray(tokens)[:, 0] == 0).all() and np.isfinite(scores).all()


def test_older_names_of_options_mean_the_same():
    model = loud(CONFIG, 0)
    new = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": LENGTH}
    new |= {"decoder_start_token_id": 5, "eos_token_id": 7, "beam_scorer": BeamScorer.AVERAGE}
    old = {"beam_size": 3, "num_hypotheses": 2, "max_length": LENGTH}
    old |= {"bos_id": 5, "eos_id": 7, "scorer": BeamScorer.AVERAGE}
    results = [generate.n_best(model, SOURCE, **options) for options in (new, old)]
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)
    assert results[0][0].shape == (len(SOURCE), 2, LENGTH)


def test_options_of_another_function_are_refused():
    model, key = loud(CONFIG, 0), jax.random.key(0)
    for call in (
        lambda: generate.greedy(model, SOURCE, num_beams=2),
        lambda: generate.greedy(model, SOURCE, do_sample=True),
        lambda: generate.beam(model, SOURCE, sample=True),
        lambda: generate.sample(model, SOURCE, key, seed=3),
    ):
        with pytest.raises(ConfigError, match="not options of one function"):
            call()
    with pytest.raises(ConfigError, match="unknown generation option 'num_beems'"):
        generate.beam(model, SOURCE, num_beems=2)


FEW = np.array([[2, 5, 7]] * len(SOURCE), np.int32)
VALUES = dict(max_length=4, bos_id=9, eos_id=7, num_beams=3, length_penalty=1.5, prompt=FEW)
VALUES |= dict(forced_bos_token_id=6, num_return_sequences=3, temperature=0.5, top_k=3, top_p=0.5)
VALUES |= dict(rows=np.arange(len(SOURCE))[::-1], row_ids=np.arange(len(SOURCE))[::-1])


@pytest.mark.parametrize(
    ("function", "first"),
    [
        (generate.greedy, ()),
        (generate.sample, (jax.random.key(0),)),
        (generate.beam, ()),
        (generate.n_best, ()),
        (generate.generate, (GenerationConfig(do_sample=True, max_new_tokens=3),)),
        (generate.generate, (GenerationConfig(num_beams=2, max_new_tokens=3),)),
    ],
)
def test_every_keyword_of_a_function_reaches_its_loop(monkeypatch, function, first):
    class Called(Exception):
        pass

    def loop(structure, arrays, *traced, static_args):
        raise Called(*map(str, jax.tree.leaves(traced)), static_args)

    def call(**options):
        with pytest.raises(Called) as called:
            function(model, SOURCE, *first, **options)
        return called.value.args

    monkeypatch.setattr(decoding, "_decode", loop)
    monkeypatch.setattr(beam_search, "_search", loop)
    model = prepare.split(loud(CONFIG, 0))
    names = [*inspect.signature(function).parameters][2 + len(first) :]
    names = [name for name in names if name != "options"]
    if first and getattr(first[0], "num_beams", 1) > 1:
        names.remove("row_ids")  # of draws
    usual = {} if function is generate.generate else {"max_length": 3}
    before = call(**usual)
    assert names and not [n for n in names if call(**usual | {n: VALUES[n]}) == before]


def test_each_row_has_its_own_first_token_without_recompilation():
    model = loud(CONFIG, 0)
    before = decoding._decode._cache_size()
    for first in (np.array([4, 6, 8, 4]), np.array([5, 5, 5, 5]), 9):
        tokens = generate.greedy(model, SOURCE, max_length=LENGTH, forced_bos_token_id=first)
        np.testing.assert_array_equal(tokens[:, 0], first)
    assert decoding._decode._cache_size() == before + 1


def test_without_constraints_nothing_is_computed_for_them():
    model = loud(CONFIG, 0)
    programs = [
        str(jax.make_jaxpr(lambda k=k: generate.greedy(model, SOURCE, max_length=4, **k))())
        for k in ({}, {"constraints": Constraints()}, {"no_repeat_ngram_size": 2})
    ]
    assert programs[0] == programs[1] and "scatter" not in programs[0] and "scatter" in programs[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"suppress_tokens": (1, 13)}, "suppress_tokens has 13, which is outside {}"),
        ({"begin_suppress_tokens": (-1, 4)}, "begin_suppress_tokens has -1, which is outside {}"),
        ({"bad_words_ids": ((1, 12), (1, -2))}, "bad_words_ids has -2, which is outside {}"),
        ({"forced_eos_token_ids": (12, 13)}, "forced_eos_token_id has 13, which is outside {}"),
        ({"forced_bos_token_id": np.array([4, 13, 4, 4])}, "forced_bos_token_id=13 is outside {}"),
        ({"forced_bos_token_id": 13}, "forced_bos_token_id=13 is outside {}"),
        ({"early_stopping": EarlyStopping.FULL}, "=full needs beam_scorer=average, not gnmt"),
        (AVERAGE | {"length_penalty": float("inf")}, "length_penalty=inf must be finite"),
        (AVERAGE | {"length_penalty": float("-inf")}, "length_penalty=-inf must be finite"),
    ],
)
def test_invalid_settings_are_refused(options, message):
    with pytest.raises(ConfigError, match=message.format("the vocabulary of 13$")):
        generate.beam(loud(CONFIG, 0), SOURCE, **options)


def test_constraints_check_themselves():
    sizes = ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_new_tokens")
    for name, value, message in (
        *(("repetition_penalty", x, "must be above 0 and finite") for x in (0.0, float("inf"))),
        *((name, -1, "=-1 must not be negative") for name in sizes),
        ("bad_words_ids", ((4,), ()), "has an empty sequence of tokens"),
    ):
        with pytest.raises(ConfigError, match=f"^{name}.*{message}"):
            Constraints(**{name: value})


FOLDER = GenerationConfig(
    **dict(num_beams=4, num_return_sequences=2, max_new_tokens=9, constraints=RULES),
    **dict(beam_scorer=BeamScorer.AVERAGE, early_stopping=EarlyStopping.FULL),
)


def test_flags_override_the_generation_config_of_a_folder():
    assert FOLDER.overridden({"beam": None, "max_length": None}) == FOLDER
    config = FOLDER.overridden({"beam": 2, "length_penalty": 1.5, "no_repeat_ngram_size": 0})
    changes = dict(num_beams=2, length_penalty=1.5)
    constraints = dataclasses.replace(RULES, no_repeat_ngram_size=0)
    assert config == dataclasses.replace(FOLDER, **changes, constraints=constraints)
    drawn = FOLDER.overridden({"sample": True, "top_k": 5})
    numbers = drawn.num_beams, drawn.num_return_sequences, drawn.top_k
    assert drawn.do_sample and numbers == (1, 1, 5)
    assert drawn.overridden({"beam": 3}) == FOLDER.overridden({"beam": 3, "n_best": 0})
    assert FOLDER.overridden({"beam": 1}).num_return_sequences == 1
    assert FOLDER.overridden({"penalty": BeamScorer.GNMT}).early_stopping is EarlyStopping.HEURISTIC
    for options, message in (
        ({"beam": 2, "sample": True}, "exclude each other"),
        ({"beam": 1, "n_best": 2}, "num_return_sequences=2 needs num_beams"),
    ):
        with pytest.raises(ConfigError, match=message):
            FOLDER.overridden(options)


@pytest.mark.parametrize("stopping", EarlyStopping)
def test_a_search_may_get_better_until_its_end_with_never_and_a_penalty_above_0(stopping):
    static_args = StaticArgs(dataclasses.replace(FOLDER, early_stopping=stopping), 9, 2, 3, 1)
    for penalty in (-0.5, 0.0, 0.5):
        options = jnp.asarray(penalty), static_args, False, np.dtype(np.float32)
        length = beam_search.AverageScorer(*options).best_length(jnp.asarray(4))
        assert length == (9 if stopping is EarlyStopping.NEVER and penalty > 0 else 4)


def test_names_of_scorers_and_the_early_stopping_of_transformers_are_taken():
    for value in (False, True, "never", *EarlyStopping):
        config = FOLDER.overridden({"early_stopping": value, "penalty": "average"})
        named = {False: EarlyStopping.HEURISTIC, True: EarlyStopping.FULL}.get(value, value)
        assert config.early_stopping is EarlyStopping(named)
        assert config.beam_scorer is BeamScorer.AVERAGE
    assert FOLDER.overridden({"penalty": "gnmt"}).early_stopping is EarlyStopping.HEURISTIC
    for name, value in (("beam_scorer", "mean"), ("early_stopping", 1), ("early_stopping", "")):
        with pytest.raises(ConfigError, match=f"^{name}: {value!r} is not .*; known: .*, "):
            FOLDER.overridden({name: value})


MARIAN = {  # as in OPUS-MT's models
    **{"bad_words_ids": [[12]], "bos_token_id": 0, "decoder_start_token_id": 12},
    **{"eos_token_id": 0, "forced_eos_token_id": 0, "max_length": 512, "num_beams": 4},
    **{"pad_token_id": 12, "renormalize_logits": True, "transformers_version": "4.32.0.dev0"},
}


def test_the_file_of_an_opus_model():
    config = transformers_config.from_generation_config(MARIAN, CONFIG)
    rules = Constraints(bad_words_ids=((12,),), forced_eos_token_ids=(0,), renormalize_logits=True)
    assert config == GenerationConfig(
        **dict(num_beams=4, length_penalty=1.0, max_new_tokens=511, constraints=rules),
        **dict(beam_scorer=BeamScorer.AVERAGE, decoder_start_token_id=12, eos_token_id=0),
    )


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_a_setting_is_named_with_the_file_that_has_it(name, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    (tmp_path / name).write_text('{"model_type": "t5", "num_beams": 0}')
    if name == "generation_config.json":
        (tmp_path / name).write_text('{"num_beams": 0}')
    with pytest.raises(InputError, match=rf"^{tmp_path}/{name}: num_beams=0 must be at least 1"):
        transformers_config.of_folder(tmp_path, CONFIG)


def test_missing_keys_have_transformers_defaults():
    config = transformers_config.from_generation_config({}, CONFIG)
    assert config == GenerationConfig(
        length_penalty=1.0, max_new_tokens=CONFIG.max_length - 1, beam_scorer=BeamScorer.AVERAGE
    )  # 20 within positions for 20
    read = functools.partial(transformers_config.from_generation_config, config=CONFIG)
    assert read({"do_sample": True}).top_k == 50
    others = transformers_config._NEUTRAL_IN_SAMPLING | transformers_config._SAMPLING
    assert read(dict.fromkeys(others, 0.25)) == config  # without sampling they have no effect
    assert read({"max_new_tokens": 7, "max_length": 90, "min_length": 5}).max_new_tokens == 7
    for least, expected in (({}, 4), ({"min_new_tokens": 5}, 5)):
        assert read({"min_length": 5} | least).constraints.min_new_tokens == expected
    own, other = CONFIG.bos_id, {"bos_token_id": 7}
    for starts, expected in (
        (other, 7),
        (other | {"decoder_start_token_id": 5}, 5),
        (other | {"decoder_start_token_id": own}, None),
        ({"bos_token_id": own}, None),
    ):
        assert read(starts).decoder_start_token_id == expected


def test_either_key_of_a_length_counts():
    for keys in (["max_length"], ["max_new_tokens"], ["max_length", "max_new_tokens"]):
        assert transformers_config.has_length(dict.fromkeys(keys, 5))
        assert not transformers_config.has_length(dict.fromkeys(keys))


def test_the_keys_of_an_old_config_json():
    same = {"num_beams": 4, "early_stopping": True, "bos_token_id": 0}
    for forces, more in ((True, {"forced_bos_token_id": 0}), (False, {}), (None, {})):
        old = {"d_model": 16, "force_bos_token_to_be_generated": forces, "top_k": None} | same
        assert transformers_config.from_model_config(old) == same | more


def test_a_value_of_another_type_is_refused_by_its_key():
    """True is no number, and a number no list."""
    settings, sampling = transformers_config._SETTINGS, transformers_config._SAMPLING
    tables = settings | sampling | transformers_config._CONSTRAINTS
    kinds = {key: kind for key, (kind, _) in tables.items()} | {"do_sample": bool}
    lengths = ("max_length", "max_new_tokens", "min_length", "min_new_tokens")
    kinds |= dict.fromkeys((*lengths, "bos_token_id", "decoder_start_token_id"), int)
    lists = (*transformers_config._TOKENS, "eos_token_id", "forced_eos_token_id")
    kinds |= dict.fromkeys(lists, list)
    wrong = {int: (True, False, 1.5, "4", ""), float: (True, False, "0.5", []), bool: (1, 0, "")}
    wrong[list] = (True, 1.5, "4", "", [2, True], [[2]])
    for key, kind in kinds.items():
        for value in wrong[kind]:
            data = {"do_sample": True, key: value}
            with pytest.raises(InputError, match=f"^generation_config.json: {key}="):
                transformers_config.from_generation_config(data, CONFIG)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"no_repeat_ngrams_size": 2}, "(did you mean 'no_repeat_ngram_size'?)"),
        (
            {"stop_strings": ["."], "guidance_scale": 2},
            "stop_strings=['.'] is not supported: leave",
        ),
        ({"stop_strings": ["."], "guidance_scale": 2}, "out; guidance_scale=2 is not supported"),
        ({"do_sample": True, "typical_p": 0.5}, "typical_p=0.5 is not supported"),
        ({"do_sample": True, "typical_p": 0}, "typical_p=0 is not supported"),
        ({"length_penalty": 2**53}, "length_penalty=9007199254740992 is not a float"),
        ({"do_sample": True, "num_beams": 2}, "do_sample with num_beams=2 is not supported"),
        ({"eos_token_id": [1, 2]}, "eos_token_id has 2 tokens; only one end token is supported"),
        ({"early_stopping": "always"}, "early_stopping='always' is not true, false"),
        ({"early_stopping": 1}, "early_stopping=1 is not true, false"),
        ({"early_stopping": [1]}, "early_stopping=[1] is not true, false"),
        ({"bad_words_ids": [3]}, "bad_words_ids=[3] is not a list of lists"),
        ({"bad_words_ids": [["a"]]}, "bad_words_ids=['a'] is neither"),
        ({"max_length": 1}, "max_length=1, which counts the start token, leaves no room"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 leaves no room"),
        ({"num_return_sequences": 2}, "num_return_sequences=2 needs num_beams"),
        ({"repetition_penalty": -1}, "repetition_penalty=-1.0 must be above 0"),
        ({"num_beams": 0}, "num_beams=0"),
    ],
    ids=str,
)
def test_unsupported_settings_are_refused_by_name(data, message):
    with pytest.raises(InputError) as error:
        transformers_config.from_generation_config(data, CONFIG, where="a/generation_config.json")
    assert str(error.value).startswith("a/generation_config.json: ") and message in str(error.value)


def test_a_generation_config_round_trips():
    average = {"length_penalty": 1.0, "beam_scorer": BeamScorer.AVERAGE}
    drawn = GenerationConfig(do_sample=True, top_p=0.5, max_new_tokens=4, **average)
    fields = {"length_penalty": 0.5, "forced_bos_token_id": 4, "decoder_start_token_id": 5}
    fields |= {"eos_token_id": 6, "early_stopping": EarlyStopping.NEVER, "repetition_penalty": 2.0}
    fields |= {"encoder_no_repeat_ngram_size": 3, "suppress_tokens": (4,), "bad_words_ids": ()}
    fields |= {"begin_suppress_tokens": (4, 5), "renormalize_logits": True, "min_new_tokens": 0}
    fields |= {"forced_eos_token_ids": (4, 5), "num_return_sequences": 1, "num_beams": 3}
    for config in (FOLDER, drawn, *(FOLDER.overridden({key: x}) for key, x in fields.items())):
        written = transformers_config.to_generation_config(config, CONFIG)
        assert transformers_config.from_generation_config(written, CONFIG) == config
    usual = transformers_config.to_generation_config(GenerationConfig(), CONFIG)
    ids = {"decoder_start_token_id": CONFIG.bos_id, "eos_token_id": CONFIG.eos_id}
    assert usual == ids | {"pad_token_id": CONFIG.target_pad_id, "max_length": 20}
    drawn = dataclasses.replace(drawn, beam_scorer=BeamScorer.GNMT, length_penalty=2.0)
    written = transformers_config.to_generation_config(drawn, CONFIG)
    assert written.get("top_p") == 0.5 and "length_penalty" not in written
    for config, message in (
        (GenerationConfig(num_beams=2), "transformers has no beam_scorer=gnmt"),
        (GenerationConfig(do_sample=True, seed=3), "seed=3: a generation_config.json has no seed"),
    ):
        with pytest.raises(ConfigError, match=message):
            transformers_config.to_generation_config(config, CONFIG)


@pytest.mark.parametrize(("of_language", "expected"), [(None, 4), (0, 0), (6, 6)])
def test_a_target_language_without_a_token_leaves_the_forced_one(
    of_language, expected, tmp_path, monkeypatch
):
    (tmp_path / "generation_config.json").write_text('{"forced_bos_token_id": 4}')
    monkeypatch.setattr(HuggingFaceTokenizer, "target_lang", "de", raising=False)
    monkeypatch.setattr(HuggingFaceTokenizer, "bos_id", 5)
    monkeypatch.setattr(HuggingFaceTokenizer, "forced_bos_id", lambda _: of_language)
    tokenizer = HuggingFaceTokenizer.__new__(HuggingFaceTokenizer)
    read = transformers_config.of_folder(tmp_path, CONFIG, tokenizer)
    assert (read.forced_bos_token_id, read.decoder_start_token_id) == (expected, 5)


def test_scores_of_the_average_search_are_sums_over_the_length():
    model = loud(CONFIG, 0)
    options = dict(beam_size=3, max_length=LENGTH, scorer=BeamScorer.AVERAGE)
    for penalty in (0.0, 1.0, -1.0):
        tokens, scores = generate.beam(model, SOURCE, length_penalty=penalty, **options)
        target = np.insert(tokens[:, :-1], 0, CONFIG.bos_id, axis=1)
        log_probs = np.asarray(jax.nn.log_softmax(model(SOURCE, target)))
        for row, ids in enumerate(np.asarray(tokens).tolist()):
            length = ids.index(CONFIG.eos_id) + 1 if CONFIG.eos_id in ids else LENGTH
            total = log_probs[row, np.arange(length), ids[:length]].sum()
            np.testing.assert_allclose(scores[row], total / float(length) ** penalty, rtol=1e-12)
