"""Each pair of a test set is scored, excluded from the loss or completely, and counted."""

import json
import math
import os
import sys
import types
from unittest import mock

import pytest

from jax_transformer import inference
from jax_transformer.data.tokenizer import Tokenizer, TokenizerPair
from jax_transformer.errors import ConfigError, InputError
from jax_transformer.formats import registry
from jax_transformer.inference import translation
from jax_transformer.training import evaluation
from parity_tests.unit import runs
from parity_tests.unit.helpers import random_model, tiny

PAD, BOS, EOS = 1, 2, 3
LONG = "ABCDEFGHIJKLMNOPQRST"
SOURCES = ["one two", "three", "", "four five", "six"]
TARGETS = ["two one", LONG, "nothing", "five four", " "]


@pytest.fixture(scope="module")
def translator() -> translation.Translator:
    """A translator whose model generates at most 16 tokens."""
    text = ["one two three four five six"] * 9
    tokenizer = Tokenizer.train(text, 300, pad_id=PAD, bos_id=BOS, eos_id=EOS)
    config = tiny("lesson10_repaired", vocab_size=tokenizer.vocab_size, max_length=16, num_layers=1)
    return translation.Translator(random_model(config, dtype="float32"), tokenizer, widths=(16,))


pytestmark = pytest.mark.usefixtures("as_a_user")


@pytest.fixture
def evaluate(translator, monkeypatch, tmp_path):
    """Evaluate on these lines, with translations from a table."""
    translations = {"one two": "two one", "three": "three", "four five": "five"}
    opened = mock.Mock(registry.Pretrained, weights="last", step=7)

    def call(self, lines, **options):
        return [translations[line] for line in lines]

    monkeypatch.setattr(registry, "open", lambda path, weights: opened)
    monkeypatch.setattr(translation.Translator, "from_opened", lambda *_, **languages: translator)
    monkeypatch.setattr(translation.Translator, "__call__", call)

    def run(sources: list[str], targets: list[str], **options) -> evaluation.Evaluation:
        files = [tmp_path / "source", tmp_path / "target"]
        for path, lines in zip(files, (sources, targets), strict=True):
            path.write_text("".join(line + "\n" for line in lines))
        return evaluation.evaluate("run", str(files[0]), str(files[1]), **options)

    return run


def test_excluded_pairs_are_counted(evaluate, translator):
    report, hypotheses = evaluate(SOURCES, TARGETS)
    counts = {"step": 7, "pairs": 3, "dropped_empty": 2, "left_out_of_loss": 1}
    assert {name: report[name] for name in counts} == counts
    assert report["exact_match"] == pytest.approx(100 / 3)
    assert hypotheses == ["two one", "three", "", "five", ""]
    pairs = [("one two", "two one"), ("four five", "five four")]
    total, tokens, counted = evaluation.loss(translator, pairs)
    expected = sum(len(translator.tokenizer.encode(target)) + 1 for _, target in pairs)
    assert (counted, tokens) == (2, expected)
    assert report["loss"] == pytest.approx(total / tokens, rel=1e-6)
    assert report["perplexity"] == pytest.approx(math.exp(total / tokens))


def test_no_loss_is_reported_if_no_reference_fits(evaluate):
    report, _ = evaluate(["one two"], [LONG])
    expected = {"loss": None, "perplexity": None, "left_out_of_loss": 1, "pairs": 1}
    assert {name: report[name] for name in expected} == expected


def test_intervals_by_resampling(evaluate):
    assert "confidence" not in evaluate(SOURCES, TARGETS).report
    report = evaluate(SOURCES, TARGETS, bootstrap=10).report
    assert report["confidence"].keys() == {"bleu", "chrf", "ter"}


def test_text_may_come_from_pipes(evaluate, tmp_path):
    """Pipes, as of the shell's <(...), can be read only once."""
    expected, pipes = evaluate(SOURCES, TARGETS), []
    for side in ("source", "target"):
        ours, theirs = os.pipe()
        pipes.append(ours)
        with open(theirs, "wb") as end:
            end.write((tmp_path / side).read_bytes())
    try:
        assert evaluation.evaluate("run", *(f"/dev/fd/{pipe}" for pipe in pipes)) == expected
    finally:
        for pipe in pipes:
            os.close(pipe)


def test_a_source_that_is_too_long_is_named_by_its_line(evaluate):
    message = r"source: line 2 is 21 tokens long, over the model's max_length=16$"
    with pytest.raises(InputError, match=message):
        evaluate(["one two", LONG], ["two one", "x"])


@pytest.mark.parametrize("suffix", ["tsv", "jsonl"])
def test_files_of_pairs_are_scored_as_files_of_lines(evaluate, tmp_path, suffix):
    expected = evaluate(SOURCES, TARGETS)
    path = tmp_path / f"pairs.{suffix}"
    rows = list(zip(SOURCES, TARGETS, strict=True))
    objects = [json.dumps({"en": {"a": s}, "b": t}) for s, t in rows]
    lines = objects if suffix == "jsonl" else ["\t".join(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines))
    result = evaluation.evaluate("run", None, None, pairs=str(path), fields=("en.a", "b"))
    assert result == expected


def test_several_references_are_those_of_sacrebleu(evaluate, tmp_path):
    report, hypotheses = evaluate(SOURCES, TARGETS)
    (tmp_path / "more").write_text("".join(line + "\n" for line in hypotheses))
    more = evaluate(SOURCES, TARGETS, references=[str(tmp_path / "more")])
    assert more.report["exact_match"] == 100 > report["exact_match"]
    assert more.report["chrf"] > report["chrf"] and more.report["loss"] == report["loss"]
    assert "nrefs:2" in more.report["signatures"]["bleu"] and more.hypotheses == hypotheses
    (tmp_path / "more").write_text("one\n")
    with pytest.raises(InputError, match=rf"source has {len(SOURCES)} lines and .*more has 1$"):
        evaluate(SOURCES, TARGETS, references=[str(tmp_path / "more")])


def test_comet_scores_what_is_translated(evaluate, tmp_path, monkeypatch):
    """The package is replaced by a stub with its documented functions."""
    calls = []

    def predict(data, *, batch_size, gpus, progress_bar):
        calls.append(data)
        return types.SimpleNamespace(system_score=0.5)

    comet = types.SimpleNamespace(
        load_from_checkpoint=lambda path: types.SimpleNamespace(predict=predict)
    )
    monkeypatch.setitem(sys.modules, "comet", comet)
    path = tmp_path / "model.ckpt"
    with pytest.raises(InputError, match=r"model\.ckpt: no such file"):
        evaluate(SOURCES, TARGETS, comet=str(path))
    path.touch()
    assert evaluate(SOURCES, TARGETS, comet=str(path)).report["comet"] == 0.5
    assert calls[0][1] == {"src": "three", "mt": "three", "ref": LONG} and len(calls[0]) == 3
    monkeypatch.setitem(sys.modules, "comet", None)
    with pytest.raises(ConfigError, match=r"unbabel-comet: docs/your-text\.md"):
        evaluate(SOURCES, TARGETS, comet=str(path))


def test_every_model_of_an_ensemble_has_the_chosen_weights(evaluate, translator, monkeypatch):
    opened, loaded = [], []

    def load(*models, **options):
        loaded.append((len(models), options))
        return translator

    noted = mock.Mock(weights="best", step=3)
    monkeypatch.setattr(registry, "open", lambda *call: opened.append(call) or noted)
    monkeypatch.setattr(translation, "load", load)
    same = {"engine": inference.Engine.JAX, "quantization": None, "tokens_per_batch": 7}
    same["precision"] = "bfloat16"
    more = {"languages": ("en", "de"), "overrides": {"num_beams": 3}, "ensemble": ["b", "c"]}
    report = evaluate(SOURCES, TARGETS, weights="30", **same, **more).report
    assert opened == [("run", "30"), ("b", "30"), ("c", "30")]
    assert report["ensemble"] == ["b", "c"] and report["weights"] == "best"
    same |= {"source_lang": "en", "target_lang": "de", "num_beams": 3}
    assert loaded == [(3, same)]


@pytest.mark.parametrize("count", [1, 2])
def test_the_loss_counts_the_target_s_tokens_of_two_tokenizers(count):
    """The pad ids differ, and so do the tokens of the same text."""
    texts = (["one two"] * 9, ["zwei drei"] * 9)
    sides = zip(texts, (1, 0), strict=True)
    both = (Tokenizer.train(lines, 300, pad_id=pad, bos_id=2, eos_id=3) for lines, pad in sides)
    both = TokenizerPair(*both)
    sizes = dict(source_vocab_size=300, target_vocab_size=300, num_layers=1)
    config = tiny(**sizes, source_pad_id=1, target_pad_id=0, bos_id=2, eos_id=3)
    model = random_model(config, dtype="float32")
    pairs = [("one two", "zwei"), ("two", "drei zwei zwei")]
    losses = [
        evaluation.loss(translation.Translator(models, both, widths=(8, 20)), pairs)
        for models in ([model] * count, model)
    ]
    expected = sum(len(both.target.encode(target)) + 1 for _, target in pairs)
    assert losses[0] == (pytest.approx(losses[1][0], rel=1e-5), expected, 2)


def test_the_scores_of_pairs_are_printed(monkeypatch, capsys):
    calls = []

    def record(*arguments, **options):
        calls.append((*arguments[:3], options["pairs"]))
        figures = {"ensemble": ["s", "t"], "bleu": 12.5, "pairs": 3}
        figures |= {"signatures": {"bleu": "nrefs:1"}}
        figures |= {"confidence": {"bleu": {"mean": 11.0, "half_width": 2.25}}}
        return evaluation.Evaluation(figures, [])

    monkeypatch.setattr(evaluation, "evaluate", record)
    assert runs.main("evaluate", "--run", "r", "--pairs", "p.jsonl") == 0
    assert calls == [("r", None, None, "p.jsonl")]
    assert capsys.readouterr().out.splitlines() == [
        "ensemble         s t",
        "bleu             12.5000 (μ = 11.0000 ± 2.2500)",
        "pairs            3",
        "bleu signature   nrefs:1",
    ]
