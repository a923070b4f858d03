"""The validation during training: its loss weighs every token, its scores are of a few pairs."""

import types

import numpy as np
import pytest

from jax_transformer import transformer
from jax_transformer.data import batches
from jax_transformer.data.batches import Batch
from jax_transformer.data.options import DataOptions, Task
from jax_transformer.errors import ConfigError
from jax_transformer.inference import translation
from jax_transformer.training import evaluation, step
from jax_transformer.training.corpus import Corpus
from jax_transformer.training.devices import Devices
from jax_transformer.training.options import Criterion, TrainOptions
from parity_tests.unit import helpers

PAIRS = [("one", "eins"), ("two", "zwei"), ("three", "drei")]
SUMS = [(6.0, 2), (1.0, 8)]
"""The loss and the tokens of each batch."""


@pytest.fixture
def corpus(monkeypatch) -> Corpus:
    """Two batches, and a translator that returns every line in capitals."""
    nothing = dict.fromkeys(("config", "tokenizer", "valid"))
    corpus = helpers.stand_in(
        Corpus, **nothing, valid_pairs=PAIRS, valid_tasks={}, valid_shapes=((4,), (1,))
    )
    numbered = [Batch(*[np.full((1, 1), number, np.int32)] * 3) for number in range(len(SUMS))]
    monkeypatch.setattr(batches, "eval_batches", lambda *_: [(None, each) for each in numbered])
    monkeypatch.setattr(
        step, "make_evaluation", lambda *_: lambda weights, batch: SUMS[int(batch.source[0, 0])]
    )
    monkeypatch.setattr(transformer, "unflatten", lambda *_: None)
    monkeypatch.setattr(
        translation, "Translator", lambda *_, **__: lambda lines: [line.upper() for line in lines]
    )
    return corpus


def test_the_loss_is_of_all_pairs_and_scores_of_the_first(corpus):
    options = TrainOptions(eval_pairs=2)
    report = evaluation.Validation(options, corpus, Devices.take(1))({})
    assert report.figures["valid_loss"] == pytest.approx(7 / 10)
    assert report.lines == [("one", "eins", "ONE"), ("two", "zwei", "TWO")]
    assert report.figures["exact_match"] == 0


def test_examples_walk_through_the_pairs_and_show_the_reference_of_a_wrong_one():
    lines = [("one", "eins", "eins"), ("two", "zwei", "drei"), ("six", "sechs", "sechs")]
    figures = {"valid_loss": 1.0, "bleu": 2.0, "chrf": 3.0, "exact_match": 4.0}
    report = evaluation.ValidationReport(figures, lines)
    shown = [f"    {source}\n      -> {hypothesis}" for source, _, hypothesis in lines]
    shown[1] += "\n         (reference: zwei)"
    first, *examples = report.describe("step 3", 0, 2)
    assert first == "step 3  validation loss 1.000  BLEU 2.0  chrF 3.0  exact match 4.0 %"
    assert examples == shown[:2]
    assert [*report.describe("step 6", 1, 2)][1:] == [shown[2], shown[0]]
    assert [*report.describe("step 6", 1, 5)][1:] == [shown[2], shown[0], shown[1]]
    assert len([*report.describe("step 6", 1, 0)]) == 1


def test_texts_without_translations_have_a_loss_alone(corpus):
    vars(corpus).update(valid_pairs=[])
    report = evaluation.Validation(TrainOptions(), corpus, Devices.take(1))({})
    assert report == evaluation.ValidationReport({"valid_loss": pytest.approx(7 / 10)}, [])
    assert list(report.describe("step 3", 1, 3)) == ["step 3  validation loss 0.700"]


def test_each_task_has_its_loss(corpus, monkeypatch):
    numbers = {"span-corruption": np.array([0]), "prefix-lm": np.array([1])}
    valid = types.SimpleNamespace(take=lambda chosen: chosen)
    vars(corpus).update(valid_pairs=[], valid=valid, valid_tasks=numbers)
    monkeypatch.setattr(
        batches, "eval_batches", lambda chosen, *_: [(None, Batch(*[chosen[None]] * 3))]
    )
    report = evaluation.Validation(TrainOptions(), corpus, Devices.take(1))({})
    assert list(report.describe("step 3", 1, 3)) == [
        "step 3  validation loss 0.700  span-corruption 3.000  prefix-lm 0.125"
    ]
    assert report.figures == {
        "valid_loss": pytest.approx(0.7),
        "valid_loss_span-corruption": 3.0,
        "valid_loss_prefix-lm": 0.125,
    }


def test_the_best_checkpoint_of_a_denoising_run_has_the_lowest_loss():
    denoising = DataOptions(task=Task.SPAN_CORRUPTION)
    assert TrainOptions(data=denoising).best_by is Criterion.LOSS
    assert TrainOptions().best_by is Criterion.BLEU
    with pytest.raises(ConfigError, match="best_by=chrf: data"):
        TrainOptions(data=denoising, best_by=Criterion.CHRF)


def test_the_loss_of_a_validation_is_in_as_many_chunks_as_that_of_training(corpus, monkeypatch):
    """And its translations have the settings of the run's source, in every width."""
    calls = []

    def record(*arguments, **more):
        calls.append((*arguments, more))
        return (lambda *_: (1.0, 1)) if len(calls) == 1 else lambda lines: lines

    monkeypatch.setattr(step, "make_evaluation", record)
    monkeypatch.setattr(translation, "Translator", record)
    source = types.SimpleNamespace(generation_config="its own")
    vars(corpus).update(valid_shapes=((4, 8), (1, 1)), init_source=source)
    evaluation.Validation(TrainOptions(loss_chunks=3), corpus, Devices.take(1))({})
    assert calls == [(None, 3, {}), (None, None, "its own", {"widths": (4, 8)})]


# The examples that are shown: each once before any repeats

FIGURES = dict.fromkeys("valid_loss bleu chrf exact_match".split(), 0.0)


def shown(number: int, pairs: int, count: int) -> list[int]:
    """Return the examples that validation ``number`` shows of so many pairs."""
    lines = [(f"line {i}", "yes", "yes") for i in range(pairs)]
    _, *examples = evaluation.ValidationReport(FIGURES, lines).describe("step 1", number, count)
    return [int(example.split()[1]) for example in examples]


@pytest.mark.parametrize(("pairs", "count"), [(10, 3), (9, 3), (7, 5), (5, 5), (1, 1), (1000, 3)])
def test_successive_samples_go_through_the_set(pairs, count):
    some = [shown(number, pairs, count) for number in range(min(2 * pairs, 20))]
    assert [i for each in some for i in each] == [i % pairs for i in range(len(some) * count)]
    assert {len(set(each)) for each in some} == {count}


def test_a_small_set_gives_fewer_samples():
    assert sorted(shown(3, 2, 5)) == [0, 1]
    assert shown(3, 2, 0) == shown(3, 0, 3) == []
