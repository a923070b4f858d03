"""Every validation shows new examples, and each is shown once before any repeats."""

import pytest

from jax_transformer.training.evaluation import choose_examples


@pytest.mark.parametrize(("pairs", "count"), [(10, 3), (9, 3), (7, 5), (5, 5), (1, 1), (1000, 3)])
def test_successive_samples_go_through_the_set(pairs, count):
    shown = [
        index for number in range(2 * pairs) for index in choose_examples(number, pairs, count)
    ]
    assert shown == [i % pairs for i in range(2 * pairs * count)]
    assert [len(set(choose_examples(number, pairs, count))) for number in range(pairs)] == [
        count
    ] * pairs


def test_a_small_set_gives_fewer_samples():
    assert sorted(choose_examples(3, 2, 5)) == [0, 1]
    assert choose_examples(3, 2, 0) == choose_examples(3, 0, 3) == []
