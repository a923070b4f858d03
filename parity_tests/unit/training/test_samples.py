"""Every validation shows new examples, and each is shown once before any repeats."""

import pytest

from jax_transformer.training.evaluation import ValidationReport

FIGURES = dict.fromkeys("valid_loss bleu chrf exact_match".split(), 0.0)


def shown(number: int, pairs: int, count: int) -> list[int]:
    """Return the examples that validation ``number`` shows of so many pairs."""
    lines = [(f"line {i}", "yes", "yes") for i in range(pairs)]
    _, *examples = ValidationReport(FIGURES, lines).describe("step 1", number, count)
    return [int(example.split()[1]) for example in examples]


@pytest.mark.parametrize(("pairs", "count"), [(10, 3), (9, 3), (7, 5), (5, 5), (1, 1), (1000, 3)])
def test_successive_samples_go_through_the_set(pairs, count):
    some = [shown(number, pairs, count) for number in range(min(2 * pairs, 20))]
    assert [i for each in some for i in each] == [i % pairs for i in range(len(some) * count)]
    assert {len(set(each)) for each in some} == {count}


def test_a_small_set_gives_fewer_samples():
    assert sorted(shown(3, 2, 5)) == [0, 1]
    assert shown(3, 2, 0) == shown(3, 0, 3) == []
