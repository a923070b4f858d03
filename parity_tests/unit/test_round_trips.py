"""There and back: what a conversion of random weights of a random configuration brings home is what went out, to the bit."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks import round_trips
from jax_transformer.weights import rules
from parity_tests.unit import helpers

CONFIGURATIONS = 200
INDEPENDENT = dict(
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def test_there_and_back_is_byte_equal_for_200_configurations(tmp_path):
    """Of every architecture and dtype, half of them with all sizes the same."""
    seen = []

    @settings(max_examples=CONFIGURATIONS, **INDEPENDENT)
    @given(st.randoms(use_true_random=False), st.sampled_from(round_trips.ARCHITECTURES))
    def check(choose, architecture):
        config, dtype = round_trips.draw(choose, architecture, most_layers=2)
        seen.append(
            (
                architecture,
                dtype,
                config.d_model
                == config.max_length
                == config.source_vocab_size
                == config.target_vocab_size,
            )
        )
        assert round_trips.by_files(config, dtype, tmp_path) == []

    with helpers.unchecked():
        check()
    architectures, dtypes, square = (set(each) for each in zip(*seen, strict=True))
    assert (architectures, dtypes, square) == (
        set(round_trips.ARCHITECTURES),
        set(round_trips.DTYPES),
        {True, False},
    )
    assert len(seen) >= CONFIGURATIONS


@pytest.mark.parametrize("architecture", ["lesson10", "blog2023"])
def test_there_and_back_by_every_kind_of_file_and_folder(architecture, tmp_path):
    """A file, a run folder, the other kind of file, a single checkpoint, and the first kind again; ``benchmarks/round_trips.py`` does many."""
    config, dtype = round_trips.draw(random.Random(architecture), architecture, most_layers=1)
    assert round_trips.by_command(config, dtype, tmp_path) == []


def test_what_comes_back_otherwise_is_seen(tmp_path, monkeypatch):
    """Negative control: a square matrix of each block is turned on the way home, and turned back by the same way gone twice."""
    config, dtype = round_trips.draw(random.Random(7), "lesson10", most_layers=1)
    to_torch = rules.to_torch

    def turned(table, arrays):
        return {
            name: array.T.copy() if name.endswith("out_proj.weight") else array
            for name, array in to_torch(table, arrays).items()
        }

    monkeypatch.setattr(rules, "to_torch", turned)
    wrong = round_trips.by_files(config, dtype, tmp_path)
    assert "Flax encoder.blocks.0.self_attention.out.kernel" in wrong, wrong
