"""Decoding against transformers' own ``generate``, token for token.

transformers scores tokens in float32 whatever dtype a model has. Here it does so in float64, so
that no near tie is decided by rounding: the module ``torch`` that its loops see has float64 in the
place of float32, and nothing else of their code is touched. The same stand-in writes down how far
apart the scores were between which they chose. Where that is next to nothing, equal tokens would be
luck, and a test says so instead of passing.

Compiling takes nearly all of the time, so that models have one layer, and each family is searched
in one of sixteen ways here and in all of them by ``pytest -m slow``.
"""

import dataclasses
import functools
import itertools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from transformers.generation import utils as their_loops

import jax_transformer as jt
from jax_transformer.config import TransformerConfig
from jax_transformer.generate import constraints, scorers
from jax_transformer.generate import huggingface as generation
from jax_transformer.generate.generation_config import EarlyStopping, GenerationConfig
from jax_transformer.generate.prepare import Inputs, StaticArgs
from parity_tests import huggingface, huggingface_folders
from parity_tests.huggingface import CASES, Pair
from parity_tests.unit import runs

# Scores that near are a tie: what float64 rounds is 1e-15 of them
TIE = 1e-9
# Of hypotheses that are not there, transformers has scores below this
OUT = -5e8

PLACES = 12
# What `generate` is told; each with its beams. Lengths count the start token there
RULES: list[dict[str, Any]] = [
    {
        "repetition_penalty": 1.4,
        "min_length": 5,
        "suppress_tokens": [7, 11],
        "bad_words_ids": [[9], [12, 13]],
    },
    {
        "no_repeat_ngram_size": 2,
        "forced_eos": True,
        "renormalize_logits": True,
        "bad_words_ids": [[9], [12, 13], [3, 4, 5]],
    },
    {
        "no_repeat_ngram_size": 3,
        "encoder_no_repeat_ngram_size": 2,
        "forced_bos_token_id": 6,
        "min_new_tokens": 3,
        "begin_suppress_tokens": [8],
    },
    {
        "no_repeat_ngram_size": 1,
        "forced_bos_token_id": 10,
        "forced_eos": True,
        "repetition_penalty": 0.9,
    },
]
SEARCHES: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [
        {"length_penalty": 1.0, "early_stopping": False},
        {"length_penalty": -1.5, "early_stopping": False},
    ],
    4: [
        {"length_penalty": 2.0, "early_stopping": True},
        {"length_penalty": 0.0, "early_stopping": True},
    ],
    5: [
        {"length_penalty": 0.6, "early_stopping": "never"},
        {"length_penalty": -0.5, "early_stopping": "never"},
    ],
}


in_float64 = huggingface.in_float64


class Float64(types.ModuleType):
    """torch with float64 for float32, that knows how near to one another the scores were that
    something was chosen by.
    """

    float32 = float = torch.float64

    def __init__(self) -> None:
        super().__init__("torch")
        self.margin = float("inf")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def near(self, scores: torch.Tensor) -> None:
        """``scores`` are in order; those that are out do not count."""
        gaps = (scores[:, :-1] - scores[:, 1:])[scores[:, 1:] > OUT]
        self.margin = min(self.margin, gaps.min().item() if len(gaps) else float("inf"))

    def topk(self, scores: torch.Tensor, k: int) -> Any:
        self.near(torch.topk(scores, min(k + 1, scores.shape[1]))[0])
        return torch.topk(scores, k)

    def argmax(self, scores: torch.Tensor, dim: int) -> torch.Tensor:
        self.near(torch.topk(scores, 2)[0])
        return torch.argmax(scores, dim)


@pytest.fixture
def loops(monkeypatch, in_float64) -> Float64:
    """transformers' loops in float64."""
    stand_in = Float64()
    monkeypatch.setattr(their_loops, "torch", stand_in)
    return stand_in


@functools.cache
def lively(name: str) -> Pair:
    """A model of the case whose text depends on its source, and which is in doubt enough for
    hypotheses of many lengths: with :func:`huggingface.pair`'s weights the last norm alone decides
    what is said.
    """
    values = CASES[name].values
    with (
        pytest.MonkeyPatch.context() as patch
    ):  # what decides between tokens has nothing to do with the number of layers
        patch.setitem(
            CASES,
            name,
            dataclasses.replace(
                CASES[name], values=values | {key: 1 for key in values if key.endswith("_layers")}
            ),
        )
        theirs, config, _ = huggingface.pair(name)
    with torch.no_grad():
        for key, weight in theirs.named_parameters():
            if "norm" in key:
                weight.copy_(1 + weight if key.endswith("weight") else 0.3 * weight)
            elif any(
                part in key
                for part in (
                    "out_proj.weight",
                    "v_proj.weight",
                    "Attention.o.weight",
                    "Attention.v.weight",
                )
            ):
                weight.mul_(5)
        before_logits = [
            key
            for key, _ in theirs.named_parameters()
            if key.startswith(("model.decoder", "decoder")) and key.endswith("norm.weight")
        ][-1]
        theirs.get_parameter(before_logits).mul_(0.3)
    return huggingface.exact_positions(
        Pair(theirs, config, jt.convert.from_torch(theirs.state_dict(), config))
    )


@functools.cache
def likely_end(name: str, rules: int) -> int:
    """A token that some hypotheses end with and others never: of those that come late, the one that
    the fewest rows have.
    """
    both = lively(name)
    settings = chosen(both, rules) | {"forced_eos_token_id": None}
    settings["suppress_tokens"] = [*settings.get("suppress_tokens", []), both.config.eos_id]
    inputs = huggingface.inputs(both.config, sources(both.config)[0])
    rows = both.theirs.generate(**inputs, num_beams=1, max_new_tokens=8, **settings)[:, 1:].tolist()
    late = sorted({token for row in rows for token in row[4:]})
    return min(late, key=lambda token: sum(token in row for row in rows))


def chosen(both: Pair, rules: int) -> dict[str, Any]:
    """The rules without their end.

    With two vocabularies transformers looks for the source's tokens among the target's, and breaks.
    """
    left_out = {"forced_eos"} | (
        {"encoder_no_repeat_ngram_size"}
        if both.config.source_vocab_size != both.config.target_vocab_size
        else set()
    )
    return {key: value for key, value in RULES[rules].items() if key not in left_out}


def told(name: str, rules: int, **settings: Any) -> dict[str, Any]:
    """Return the arguments of `generate`, with a likely end."""
    end = likely_end(name, rules)
    always = {
        "eos_token_id": end,
        "max_length": PLACES + 1,
        "forced_eos_token_id": end if "forced_eos" in RULES[rules] else None,
    }
    return always | chosen(lively(name), rules) | settings


def decoding(both: Pair, settings: dict[str, Any]) -> GenerationConfig:
    """Return the same settings for ours, through the file."""
    values = transformers.GenerationConfig.from_dict(
        both.theirs.generation_config.to_dict() | settings
    ).to_dict()
    return generation.from_generation_config(values, both.config)


def sources(config: TransformerConfig, seeds: int = 1) -> list[np.ndarray]:
    return [huggingface.batch(config, rows=6, source=13, seed=seed)[0] for seed in range(seeds)]


def said(rows: np.ndarray, end: int) -> list[list[int]]:
    """Return the tokens before the padding, the end included.

    transformers' beams are filled with it, or with the end if padding is 0.
    """
    ends = [np.flatnonzero(row == end) for row in rows]
    return [
        row[: where[0] + 1 if len(where) else None].tolist()
        for row, where in zip(rows, ends, strict=True)
    ]


def ours_and_theirs(
    both: Pair, source: np.ndarray, settings: dict[str, Any]
) -> tuple[list[list[int]], list[list[int]]]:
    theirs = both.theirs.generate(**huggingface.inputs(both.config, source), **settings)
    tokens, _ = jt.generate.generate(both.ours, source, decoding(both, settings))
    return said(tokens.reshape(-1, tokens.shape[2]), settings["eos_token_id"]), said(
        theirs[:, 1:].numpy(), settings["eos_token_id"]
    )


GRID = [(name, beams, rules) for name in CASES for beams in SEARCHES for rules in range(len(RULES))]
# Five families with beams, greedy search for either kind of logits; the whole grid under `-m slow`
QUICK = {
    (name, (2, 4, 5)[i % 3], i % len(RULES))
    for i, name in enumerate(CASES)
    if name in ("marian", "bart", "mbart", "m2m_100", "t5")
}
QUICK |= {("marian", 1, 1), ("t5", 1, 3)}


def _marks(name: str, beams: int, rules: int) -> list[pytest.MarkDecorator]:
    proved = pytest.mark.proves("greedy" if beams == 1 else "beam")
    return [proved] if (name, beams, rules) in QUICK else [proved, pytest.mark.slow]


@pytest.mark.parametrize(
    ("name", "beams", "rules"), [pytest.param(*way, marks=_marks(*way)) for way in GRID]
)
def test_tokens_are_those_of_generate(name, beams, rules, loops):
    both, lengths = lively(name), set()
    for search, source in itertools.product(SEARCHES[beams], sources(both.config)):
        settings = told(name, rules, num_beams=beams, num_return_sequences=min(beams, 2), **search)
        ours, theirs = ours_and_theirs(both, source, settings)
        assert loops.margin > TIE, (
            f"scores {loops.margin:.1e} apart: a tie, which the frameworks may break otherwise"
        )
        assert ours == theirs, settings
        lengths |= {len(row) for row in ours}
    assert len(lengths) > 1 or (name, beams, rules) not in QUICK, (
        "hypotheses of several lengths make this test mean something"
    )


# Each rule by itself, and some together
ALONE: list[dict[str, Any]] = [
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 4},
    {"encoder_no_repeat_ngram_size": 1},
    {"encoder_no_repeat_ngram_size": 3},
    {"bad_words_ids": [[3], [2], [4, 2], [3, 4], [4, 4], [1, 3, 4], [2, 2, 2, 2, 2, 2, 2, 2, 2]]},
    {"min_length": 4},
    {"min_new_tokens": 4},
    {"forced_bos_token_id": 4},
    {"forced_eos_token_id": 2},
    {"forced_eos_token_id": [2, 3]},
    {"suppress_tokens": [0, 4]},
    {"begin_suppress_tokens": [3, 1]},
    {"begin_suppress_tokens": [3, 1], "forced_bos_token_id": 4},
    {"renormalize_logits": True, "suppress_tokens": [3]},
    {
        "repetition_penalty": 1.7,
        "no_repeat_ngram_size": 2,
        "forced_eos_token_id": 2,
        "forced_bos_token_id": 4,
        "suppress_tokens": [3],
    },
]


@pytest.mark.parametrize(
    "settings",
    ALONE,
    ids=[",".join(f"{key}={value}" for key, value in each.items()) for each in ALONE],
)
def test_scores_under_each_rule_are_those_of_the_logits_processors(settings):
    both, shape, places, vocabulary = lively("bart"), (4, 3), 6, 6
    random = np.random.default_rng(0)
    source, tokens = random.integers(1, 5, (4, 5)), random.integers(1, 5, (*shape, places))
    tokens[0, 0] = 3  # repeats as much as can be
    bos, eos, touched = 4, 2, False
    told = transformers.GenerationConfig(
        **{
            "eos_token_id": eos,
            "decoder_start_token_id": bos,
            "max_length": places + 1,
            "forced_eos_token_id": None,
        }
        | settings
    )
    how = generation.from_generation_config(told.to_dict(), both.config)
    both.theirs._prepare_special_tokens(told, True, device="cpu")
    processors = both.theirs._get_logits_processor(told, 1, torch.from_numpy(source))
    first = (
        None if how.forced_bos_token_id is None else jnp.full(4, how.forced_bos_token_id, jnp.int32)
    )
    inputs = Inputs(jnp.asarray(source, jnp.int32), first)
    static_args = StaticArgs(how, places, bos, eos, pad_id=1)
    apply = jax.jit(
        lambda scores, step: constraints.apply(
            scores, jnp.asarray(tokens, jnp.int32), step, inputs, static_args
        )
    )
    for step, highest in itertools.product(
        range(places), (0, 3)
    ):  # log-probabilities, and logits, some of which are above 0
        scores = random.normal(size=(*shape, vocabulary)) - 3 + highest
        ids = np.concatenate([np.full((*shape, 1), bos), tokens[:, :, :step]], axis=2).reshape(
            12, -1
        )
        theirs = (
            processors(torch.from_numpy(ids), torch.from_numpy(scores.reshape(12, -1).copy()))
            .numpy()
            .reshape(scores.shape)
        )
        ours = apply(
            jnp.asarray(scores), jnp.asarray(step, jnp.int32)
        )  # what follows the step must not matter
        np.testing.assert_allclose(np.asarray(ours), theirs, rtol=1e-14, atol=0)
        touched |= bool((theirs != scores).any())
    assert touched, "a rule that does nothing here shows nothing"


STOPS = {EarlyStopping.HEURISTIC: False, EarlyStopping.FULL: True, EarlyStopping.NEVER: "never"}


def test_early_stopping_has_three_meanings_that_differ(loops):
    """Each is transformers' own, and no other: with many lengths, three searches of the same
    batches give three results.
    """
    both, found = lively("bart"), {}
    for ours, theirs in STOPS.items():
        found[ours] = []
        for penalty, source in itertools.product((3.0,), sources(both.config, 2)):
            said_by_both = ours_and_theirs(
                both,
                source,
                told("bart", 0, num_beams=3, length_penalty=penalty, early_stopping=theirs),
            )
            assert said_by_both[0] == said_by_both[1], (ours, penalty)
            found[ours].append(said_by_both[0])
    assert loops.margin > TIE
    assert all(found[one] != found[other] for one, other in itertools.combinations(STOPS, 2))


def test_another_count_of_the_length_is_noticed(loops, monkeypatch):
    """The fault that would be easiest to make: the start token counted in what a score is divided
    by.
    """
    both = lively("bart")
    divisor = scorers.AverageScorer.divisor
    monkeypatch.setattr(
        scorers.AverageScorer, "divisor", lambda self, length: divisor(self, length + 1)
    )
    pairs = []
    for penalty, source in itertools.product((1.0, 3.0, -3.0), sources(both.config, 2)):
        # A length of its own, so that it is compiled anew
        search = {
            "num_beams": 3,
            "num_return_sequences": 3,
            "length_penalty": penalty,
            "early_stopping": False,
            "max_length": PLACES,
        }
        settings = told("bart", 0, **search)
        pairs.append(ours_and_theirs(both, source, settings))
    jax.clear_caches()  # what has the fault in it serves no other test
    assert any(ours != theirs for ours, theirs in pairs)


def test_a_tie_is_seen(loops):
    """Every second token is as likely as the one before it."""
    theirs, config, _ = lively("mt5")
    weight = theirs.get_output_embeddings().weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight[1::2] = weight[0:-1:2]
        source, _ = huggingface.batch(config, rows=2, source=5)
        theirs.generate(**huggingface.inputs(config, source), num_beams=2, max_new_tokens=4)
        weight.copy_(before)
    assert loops.margin < TIE


def test_every_attribute_of_a_generation_config_is_known():
    """A new one upstream fails here, until it is handled, ignored with a reason, or refused where
    it is not its default.
    """
    upstream = set(transformers.GenerationConfig().to_dict())
    assert upstream <= generation.KNOWN, (
        f"new in transformers: {sorted(upstream - generation.KNOWN)}"
    )
    assert generation.KNOWN - upstream <= {
        "_commit_hash",
        "penalty_alpha",
        "num_beam_groups",
        "diversity_penalty",
        "low_memory",
    }
    everything = (
        transformers.GenerationConfig().to_dict()
        | transformers.GenerationConfig._get_default_generation_params()
    )
    assert generation.from_generation_config(everything, lively("bart").config).num_beams == 1


def test_what_is_written_for_transformers_says_the_same_there():
    config = lively("bart").config
    how = generation.from_generation_config(
        {"num_beams": 3, "length_penalty": 2, "max_length": 9, "forced_eos_token_id": [2]}, config
    )
    written = generation.to_generation_config(how, config)
    read = transformers.GenerationConfig.from_dict(written)
    assert (read.num_beams, read.length_penalty, read.max_length, read.forced_eos_token_id) == (
        3,
        2.0,
        9,
        2,
    )
    assert generation.from_generation_config(read.to_dict(), config) == how


def test_python_translates_as_the_command_and_as_transformers(tmp_path, capsys, monkeypatch):
    """A forced language token, and beams of the folder's own."""
    lines, folder = ["the quick dog", "", "a red house", "the"], tmp_path / "m2m_100"
    module = huggingface_folders.save_model("m2m_100", folder)
    with torch.no_grad():  # as it comes, every line has the same translation
        for name, weight in module.named_parameters():
            if "encoder_attn" in name and name.endswith("weight"):
                weight.mul_(20)
    module.generation_config.update(num_beams=3, max_length=20, length_penalty=0.4)
    module.save_pretrained(folder)
    words = huggingface_folders.tokenizer("m2m_100", folder)
    forced = {"forced_bos_token_id": words.get_lang_id("de")}
    expected = [
        words.decode(
            module.generate(**words([line], return_tensors="pt"), **forced)[0],
            skip_special_tokens=True,
        )
        if line
        else ""
        for line in lines
    ]
    with runs.as_a_user(tmp_path):
        translator = jt.Translator.load(folder, source_lang="en", target_lang="de")
        assert translator(lines) == expected and len(set(expected)) > 2
        best = translator(["the"], num_hypotheses=2)[0]
        assert best[0].ids[0] == forced["forced_bos_token_id"] and best[0].text == expected[3]
        command = ("--run", folder, "--source-lang", "en", "--target-lang", "de")
        stdin = "".join(line + "\n" for line in lines).encode()
        code, out, _ = runs.Console(capsys, monkeypatch).say("translate", *command, stdin=stdin)
    assert (code, out) == (0, "".join(line + "\n" for line in expected))
