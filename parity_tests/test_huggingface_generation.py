"""Decoding against transformers' own ``generate``, token for token.

transformers scores tokens in float32 whatever dtype a model has. Here it does so in float64, so
that no near tie is decided by rounding: the module ``torch`` that its loops see has float64 in
place of float32, and nothing else of their code is changed. The same stand-in records the smallest
difference between scores of which one was chosen. If it is almost zero, equal tokens would be luck,
and the test fails instead of passing.

Compiling takes nearly all of the time, so models have one layer, and each family is searched in one
of sixteen ways here and in all of them by ``pytest -m slow``.
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
from jax_transformer.generate import logits
from jax_transformer.generate import transformers_config as generation
from jax_transformer.generate.generation_config import EarlyStopping, GenerationConfig
from jax_transformer.generate.prepare import Inputs, StaticArgs
from jax_transformer.inference import translation
from parity_tests import huggingface, huggingface_folders
from parity_tests.huggingface import CASES, Pair
from parity_tests.unit import runs

# Scores closer than this are a tie: rounding in float64 is 1e-15 of them
TIE = 1e-9
# transformers gives hypotheses that do not exist scores below this
EXCLUDED = -5e8

MAX_NEW_TOKENS = 12
# Arguments of `generate`, each searched with every number of beams. `min_length` counts the start
# token
CONSTRAINTS: list[dict[str, Any]] = [
    {
        **{"repetition_penalty": 1.4, "min_length": 5, "suppress_tokens": [7, 11]},
        **{"bad_words_ids": [[9], [12, 13]]},
    },
    {
        **{"no_repeat_ngram_size": 2, "forced_eos": True, "renormalize_logits": True},
        **{"bad_words_ids": [[9], [12, 13], [3, 4, 5]]},
    },
    {
        **{"no_repeat_ngram_size": 3, "encoder_no_repeat_ngram_size": 2, "min_new_tokens": 3},
        **{"forced_bos_token_id": 6, "begin_suppress_tokens": [8]},
    },
    {
        **{"no_repeat_ngram_size": 1, "forced_bos_token_id": 10, "forced_eos": True},
        **{"repetition_penalty": 0.9},
    },
]
SEARCHES: dict[int, list[dict[str, Any]]] = {1: [{}]} | {
    beams: [{"length_penalty": penalty, "early_stopping": stopping} for penalty in penalties]
    for beams, stopping, penalties in (
        (2, False, (1.0, -1.5)),
        (4, True, (2.0, 0.0)),
        (5, "never", (0.6, -0.5)),
    )
}


class Float64(types.ModuleType):
    """torch with float64 for float32, recording the smallest difference to a next score."""

    float32 = float = torch.float64

    def __init__(self) -> None:
        super().__init__("torch")
        self.margin = float("inf")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def record(self, scores: torch.Tensor) -> None:
        """Record the smallest gap of sorted ``scores``; excluded ones do not count."""
        gaps = (scores[:, :-1] - scores[:, 1:])[scores[:, 1:] > EXCLUDED]
        self.margin = min(self.margin, gaps.min().item() if len(gaps) else float("inf"))

    def topk(self, scores: torch.Tensor, k: int) -> Any:
        self.record(torch.topk(scores, min(k + 1, scores.shape[1]))[0])
        return torch.topk(scores, k)

    def argmax(self, scores: torch.Tensor, dim: int) -> torch.Tensor:
        self.record(torch.topk(scores, 2)[0])
        return torch.argmax(scores, dim)


@pytest.fixture
def loops(monkeypatch, in_float64) -> Float64:
    """transformers' loops in float64."""
    stand_in = Float64()
    monkeypatch.setattr(their_loops, "torch", stand_in)
    return stand_in


LOUD = ("out_proj", "v_proj", "Attention.o", "Attention.v")


@functools.cache
def lively(name: str) -> Pair:
    """A model of the case whose output depends on its source, uncertain enough for hypotheses of
    many lengths: with :func:`huggingface.pair`'s weights the last norm determines every token.
    """
    values = CASES[name].values
    # One layer is enough: the choice of tokens does not depend on the number of layers
    values = values | {key: 1 for key in values if key.endswith("_layers")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CASES, name, dataclasses.replace(CASES[name], values=values))
        theirs, config, _ = huggingface.pair(name)
    with torch.no_grad():
        for key, weight in theirs.named_parameters():
            if "norm" in key:
                weight.copy_(1 + weight if key.endswith("weight") else 0.3 * weight)
            elif any(f"{part}.weight" in key for part in LOUD):
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
def likely_end(name: str, index: int) -> int:
    """A token that ends some hypotheses and not others: the late one of the fewest rows."""
    both = lively(name)
    settings = without_end(both, index) | {"forced_eos_token_id": None}
    settings["suppress_tokens"] = [*settings.get("suppress_tokens", []), both.config.eos_id]
    inputs = huggingface.inputs(both.config, sources(both.config)[0])
    rows = both.theirs.generate(**inputs, num_beams=1, max_new_tokens=8, **settings)[:, 1:].tolist()
    late = sorted({token for row in rows for token in row[4:]})
    return min(late, key=lambda token: sum(token in row for row in rows))


def without_end(both: Pair, index: int) -> dict[str, Any]:
    """The constraints at ``index`` without ``forced_eos``.

    With two vocabularies ``encoder_no_repeat_ngram_size`` is left out as well: transformers looks
    for the source's tokens among the target's, and raises. FSMT never generates padding: with a
    cache transformers masks and counts it otherwise than without one.
    """
    left_out = {"forced_eos"}
    if both.config.source_vocab_size != both.config.target_vocab_size:
        left_out.add("encoder_no_repeat_ngram_size")
    settings = {key: value for key, value in CONSTRAINTS[index].items() if key not in left_out}
    if both.config.architecture == "fsmt":
        suppressed = settings.get("suppress_tokens", [])
        settings["suppress_tokens"] = [*suppressed, both.config.target_pad_id]
    return settings


def generate_arguments(name: str, index: int, **settings: Any) -> dict[str, Any]:
    """Return the arguments of `generate`, with a likely end."""
    end = likely_end(name, index)
    always = {
        "eos_token_id": end,
        "max_length": MAX_NEW_TOKENS + 1,
        "forced_eos_token_id": end if "forced_eos" in CONSTRAINTS[index] else None,
    }
    return always | without_end(lively(name), index) | settings


def generation_config(both: Pair, settings: dict[str, Any]) -> GenerationConfig:
    """Return the same settings as our own configuration, converted from transformers'."""
    values = transformers.GenerationConfig.from_dict(
        both.theirs.generation_config.to_dict() | settings
    ).to_dict()
    return generation.from_generation_config(values, both.config)


def sources(config: TransformerConfig, seeds: int = 1) -> list[np.ndarray]:
    return [huggingface.batch(config, rows=6, source=13, seed=seed)[0] for seed in range(seeds)]


def without_padding(rows: np.ndarray, end: int) -> list[list[int]]:
    """Return the tokens before the padding, which may be the end token in transformers."""
    ends = [np.flatnonzero(row == end) for row in rows]
    return [
        row[: end_indices[0] + 1 if len(end_indices) else None].tolist()
        for row, end_indices in zip(rows, ends, strict=True)
    ]


def ours_and_theirs(
    both: Pair, source: np.ndarray, settings: dict[str, Any]
) -> tuple[list[list[int]], list[list[int]]]:
    theirs = both.theirs.generate(**huggingface.inputs(both.config, source), **settings)
    tokens, _ = jt.generate.generate(both.ours, source, generation_config(both, settings))
    end = settings["eos_token_id"]
    ours = without_padding(tokens.reshape(-1, tokens.shape[2]), end)
    return ours, without_padding(theirs[:, 1:].numpy(), end)


# Whisper's own ``generate`` is met in test_huggingface_whisper.py
GRID = [
    (name, beams, index)
    for name in CASES
    if "whisper" not in name
    for beams in SEARCHES
    for index in range(len(CONSTRAINTS))
]
# Five families with beams, greedy search for either kind of logits; the whole grid under `-m slow`
QUICK = {
    (name, (2, 4, 5)[i % 3], i % len(CONSTRAINTS))
    for i, name in enumerate(CASES)
    if name in ("marian", "bart", "mbart", "m2m_100", "t5")
}
QUICK |= {("marian", 1, 1), ("t5", 1, 3)}


def _marks(name: str, beams: int, index: int) -> list[pytest.MarkDecorator]:
    proved = pytest.mark.proves("greedy" if beams == 1 else "beam")
    return [proved] if (name, beams, index) in QUICK else [proved, pytest.mark.slow]


@pytest.mark.parametrize(
    ("name", "beams", "index"), [pytest.param(*case, marks=_marks(*case)) for case in GRID]
)
def test_tokens_are_those_of_generate(name, beams, index, loops):
    both, lengths = lively(name), set()
    for search, source in itertools.product(SEARCHES[beams], sources(both.config)):
        settings = generate_arguments(
            name, index, num_beams=beams, num_return_sequences=min(beams, 2), **search
        )
        ours, theirs = ours_and_theirs(both, source, settings)
        assert loops.margin > TIE, (
            f"scores {loops.margin:.1e} apart: a tie, which the frameworks may break differently"
        )
        assert ours == theirs, settings
        lengths |= {len(row) for row in ours}
    assert len(lengths) > 1 or (name, beams, index) not in QUICK, (
        "all hypotheses have one length, so this test proves nothing about lengths"
    )


# Each constraint by itself, and some together
SINGLE_CONSTRAINTS: list[dict[str, Any]] = [
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
    {"forced_eos_token_id": [2, 3], "suppress_tokens": [2]},
    {
        "repetition_penalty": 1.7,
        "no_repeat_ngram_size": 2,
        "forced_eos_token_id": 2,
        "forced_bos_token_id": 4,
        "suppress_tokens": [3],
    },
]


# Constraints that depend on where the generated tokens begin, after a prompt of three tokens
AFTER_A_PROMPT = [
    {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2, "forced_eos_token_id": 2},
    {"min_new_tokens": 4, "begin_suppress_tokens": [3, 1]},
    {"begin_suppress_tokens": [3, 1], "forced_bos_token_id": 4},
]


@pytest.mark.parametrize(
    ("settings", "prompt"),
    [
        pytest.param(each, prompt, id=f"{prompt}:" + ",".join(f"{k}={v}" for k, v in each.items()))
        for prompt, cases in (([4], SINGLE_CONSTRAINTS), ([4, 3, 5], AFTER_A_PROMPT))
        for each in cases
    ],
)
def test_scores_under_each_constraint_are_those_of_the_logits_processors(settings, prompt):
    both, shape, length, vocabulary = lively("bart"), (4, 3), 6, 6
    random = np.random.default_rng(0)
    source, tokens = random.integers(1, 5, (4, 5)), random.integers(1, 5, (*shape, length))
    tokens[0, 0] = 3  # repeated at every position
    eos, changed = 2, False
    usual = {"eos_token_id": eos, "decoder_start_token_id": prompt[0], "forced_eos_token_id": None}
    usual["max_length"] = length + len(prompt)
    theirs_config = transformers.GenerationConfig(**usual | settings)
    config = generation.from_generation_config(theirs_config.to_dict(), both.config)
    both.theirs._prepare_special_tokens(theirs_config, True, device="cpu")
    processors = both.theirs._get_logits_processor(
        theirs_config, len(prompt), torch.from_numpy(source)
    )
    first = config.forced_bos_token_id
    first = None if first is None else jnp.full(4, first, jnp.int32)
    start = np.broadcast_to(np.array(prompt), (4, len(prompt)))
    several = None if len(prompt) == 1 else jnp.asarray(start, jnp.int32)
    inputs = Inputs(jnp.asarray(source, jnp.int32), first, several)
    static_args = StaticArgs(config, length, prompt[0], eos, pad_id=1)
    ours_tokens = jnp.asarray(tokens, jnp.int32)
    apply = jax.jit(lambda x, step: logits.constrain(x, ours_tokens, step, inputs, static_args))
    # Log-probabilities, and logits, some of which are above 0
    for step, highest in itertools.product(range(length), (0, 3)):
        scores = random.normal(size=(*shape, vocabulary)) - 3 + highest
        starts = np.broadcast_to(start[:, None], (*shape, len(prompt)))
        ids = np.concatenate([starts, tokens[:, :, :step]], axis=2).reshape(12, -1)
        flat = torch.from_numpy(scores.reshape(12, -1).copy())
        theirs = processors(torch.from_numpy(ids), flat).numpy().reshape(scores.shape)
        # Tokens after the step must not matter
        ours = apply(jnp.asarray(scores), jnp.asarray(step, jnp.int32))
        np.testing.assert_allclose(np.asarray(ours), theirs, rtol=1e-14, atol=0)
        changed |= bool((theirs != scores).any())
    assert changed, "this constraint changed no score, so the test proves nothing"


STOPS = {EarlyStopping.HEURISTIC: False, EarlyStopping.FULL: True, EarlyStopping.NEVER: "never"}


def test_early_stopping_has_three_meanings_that_differ(loops):
    """Each equals transformers' own, and no two of them are equal."""
    both, results = lively("bart"), {}
    for ours, theirs in STOPS.items():
        search = {"num_beams": 3, "length_penalty": 3.0, "early_stopping": theirs}
        settings, results[ours] = generate_arguments("bart", 0, **search), []
        for source in sources(both.config, 2):
            ours_tokens, theirs_tokens = ours_and_theirs(both, source, settings)
            assert ours_tokens == theirs_tokens, ours
            results[ours].append(ours_tokens)
    assert loops.margin > TIE
    assert all(results[one] != results[other] for one, other in itertools.combinations(STOPS, 2))


def test_a_tie_is_detected(loops):
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
    """A new one upstream fails here until it is handled, ignored with a reason or refused."""
    upstream = set(transformers.GenerationConfig().to_dict())
    new = sorted(upstream - generation.KNOWN)
    assert not new, f"new in transformers: {new}"
    assert generation.KNOWN - upstream <= set(
        "_commit_hash penalty_alpha num_beam_groups diversity_penalty low_memory".split()
    )
    everything = transformers.GenerationConfig().to_dict()
    everything |= transformers.GenerationConfig._get_default_generation_params()
    assert generation.from_generation_config(everything, lively("bart").config).num_beams == 1


def test_a_written_configuration_has_the_same_settings_in_transformers():
    model_config = lively("bart").config
    values = {"num_beams": 3, "length_penalty": 2, "max_length": 9, "forced_eos_token_id": [2]}
    config = generation.from_generation_config(values, model_config)
    written = generation.to_generation_config(config, model_config)
    read = transformers.GenerationConfig.from_dict(written)
    assert {name: getattr(read, name) for name in values} == values | {"forced_eos_token_id": 2}
    assert generation.from_generation_config(read.to_dict(), model_config) == config


def test_python_translates_as_the_command_and_as_transformers(tmp_path, capsys, monkeypatch):
    """With a forced language token, and the number of beams in the folder."""
    lines, folder = ["the quick dog", "", "a red house", "the"], tmp_path / "m2m_100"
    module = huggingface_folders.save_model("m2m_100", folder)
    with torch.no_grad():  # with weights as initialised, all lines have one translation
        for name, weight in module.named_parameters():
            if "encoder_attn" in name and name.endswith("weight"):
                weight.mul_(20)
    module.generation_config.update(num_beams=3, max_length=20, length_penalty=0.4)
    module.save_pretrained(folder)
    tokenizer = huggingface_folders.tokenizer("m2m_100", folder)
    forced, expected = {"forced_bos_token_id": tokenizer.get_lang_id("de")}, []
    for line in lines:
        ids = module.generate(**tokenizer([line], return_tensors="pt"), **forced)[0]
        expected.append(tokenizer.decode(ids, skip_special_tokens=True) if line else "")
    with runs.as_a_user():
        translator = jt.Translator.load(folder, source_lang="en", target_lang="de")
        assert translator(lines) == expected and len(set(expected)) > 2
        best = translator(["the"], num_hypotheses=2)[0]
        assert best[0].ids[0] == forced["forced_bos_token_id"] and best[0].text == expected[3]
        command = ("--run", folder, "--source-lang", "en", "--target-lang", "de")
        stdin = "".join(line + "\n" for line in lines).encode()
        code, out, _ = runs.Console(capsys, monkeypatch).say("translate", *command, stdin=stdin)
    assert (code, out) == (0, "".join(line + "\n" for line in expected))


@pytest.mark.parametrize("name", ["marian", "mbart50"])
def test_flags_change_the_settings_of_the_folder(name, tmp_path, capsys, monkeypatch):
    """With four beams in the folder, ``--n-best 2`` needs no ``--beam``."""
    folder, case = tmp_path / name, huggingface_folders.FOLDERS[name]
    module = huggingface_folders.save_model(name, folder)
    module.generation_config.update(num_beams=4, max_length=8)
    module.save_pretrained(folder)
    languages = dict(zip(("source_lang", "target_lang"), case.languages or (), strict=False))
    flags = [f"--{key.replace('_', '-')}={code}" for key, code in languages.items()]
    with runs.as_a_user():
        console = runs.Console(capsys, monkeypatch)
        command, lines = ("translate", "--run", folder, *flags), ["a red house", "\t", "the"]
        stdin = "".join(line + "\n" for line in lines).encode()
        translator = jt.Translator.load(folder, **languages, num_hypotheses=2)
        ready = [line for batch in translator.stream([lines], len(lines) + 1) for line in batch]
        expected = [text for line in ready for text in translation.n_best_lines(line)]
        assert len(expected) == 5, "a line of one tab is a blank line, with one hypothesis"
        code, out, _ = console.say(*command, "--n-best", "2", stdin=stdin)
        assert (code, out.splitlines()) == (0, expected)
        full = jt.Translator.load(folder, **languages)(lines, early_stopping=EarlyStopping.FULL)
        code, out, _ = console.say(*command, "--early-stopping", "full", stdin=stdin)
        assert (code, out.split("\n")) == (0, [*full, ""])
        for text in (b"", stdin):
            console.refused(2, ["max_length=0"], *command, "--max-length", "0", stdin=text)
        console.refused(2, ["of at least 5"], *command, "--n-best", "5", stdin=stdin)
