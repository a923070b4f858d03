"""Scores equal sacreBLEU's, with its signatures and intervals."""

import pytest
from sacrebleu.metrics import BLEU, CHRF, TER

from jax_transformer.errors import ConfigError, InputError
from jax_transformer.training import evaluation

WORDS = "one two three four five six seven eight".split()
REFERENCES = [f"the {word} cat sees {word} red houses and a small bird" for word in WORDS]
WORSE = [line.replace("small ", "").replace("sees", "saw") for line in REFERENCES]
HYPOTHESES = [*REFERENCES[:3], *WORSE[3:]]
KINDS = {"bleu": BLEU, "chrf": CHRF, "ter": TER}


def test_validation_has_bleu_chrf_and_exact_match():
    figures = evaluation.score(HYPOTHESES, REFERENCES)
    assert figures.keys() == {"bleu", "chrf", "exact_match", "signatures"}
    assert figures["exact_match"] == 37.5
    assert figures["bleu"] == BLEU().corpus_score(HYPOTHESES, [REFERENCES]).score != figures["chrf"]
    assert figures["signatures"].keys() == {"bleu", "chrf"}
    assert "tok:13a" in figures["signatures"]["bleu"]


def test_intervals_are_those_of_sacrebleu():
    figures = evaluation.score(HYPOTHESES, REFERENCES, names=tuple(KINDS), bootstrap=50)
    assert figures["confidence"].keys() == KINDS.keys()
    for name, kind in KINDS.items():
        result = kind().corpus_score(HYPOTHESES, [REFERENCES], n_bootstrap=50)
        assert figures[name] == result.score and "bs:50" in figures["signatures"][name]
        interval = {"mean": float(result._mean), "half_width": float(result._ci)}
        # sacreBLEU rounds the interval of chrF to float32
        assert figures["confidence"][name] == pytest.approx(interval, rel=1e-6, abs=0)
        assert result._ci > 0
    assert "confidence" not in evaluation.score(HYPOTHESES, REFERENCES, names=("ter",))


def test_unscorable_input_is_refused():
    with pytest.raises(InputError, match=r"^there are no translations to score$"):
        evaluation.score([], [])
    poor = evaluation.score(["a b"] * 3 + ["zzz"] * 9, ["the cat"] * 12, bootstrap=100)
    assert 0 < poor["confidence"]["chrf"]["mean"] < 3  # some resamplings have no match at all
    for bootstrap in (-5, 1):
        with pytest.raises(ConfigError, match=f"^bootstrap={bootstrap} must be 0 or at least 2$"):
            evaluation.score(HYPOTHESES, REFERENCES, bootstrap=bootstrap)


def test_an_empty_translation_is_not_equal_to_a_reference_that_a_line_does_not_have():
    more = ["", REFERENCES[1]]
    assert evaluation.score(["", REFERENCES[1]], ["one", "two"], more)["exact_match"] == 50
