"""Round trips: random weights of random configurations come back bit for bit."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from campaigns import round_trips
from jax_transformer.storage.tensors import LazyTensor
from jax_transformer.weights import rules
from parity_tests.unit import helpers

INDEPENDENT = dict(
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.parametrize("configurations", [30, pytest.param(200, marks=pytest.mark.slow)])
def test_a_round_trip_is_byte_equal_for_many_configurations(tmp_path, configurations):
    """They cover every architecture and dtype; half of them have all sizes equal."""
    seen = []

    @settings(max_examples=configurations, **INDEPENDENT)
    @given(st.randoms(use_true_random=False))
    def check(choose):
        architecture = round_trips.ARCHITECTURES[len(seen) % len(round_trips.ARCHITECTURES)]
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
    assert len(seen) >= configurations


@pytest.mark.parametrize("architecture", ["lesson10", "blog2023"])
def test_a_round_trip_through_every_kind_of_file_and_folder(architecture, tmp_path):
    """File, run folder, the other kind of file, checkpoint, and the first kind again."""
    config, dtype = round_trips.draw(random.Random(architecture), architecture, most_layers=1)
    assert round_trips.by_command(config, dtype, tmp_path) == []


def test_a_changed_tensor_is_detected(tmp_path, monkeypatch):
    """Negative control: a square matrix of each block is transposed on the way back."""
    config, dtype = round_trips.draw(random.Random(7), "lesson10", most_layers=1)
    to_torch = rules.to_torch_lazily

    def transposing(table, arrays):
        return {
            name: transposed(tensor) if name.endswith("out_proj.weight") else tensor
            for name, tensor in to_torch(table, arrays).items()
        }

    def transposed(tensor):
        return LazyTensor(tensor.info, lambda: tensor.read().T.copy())

    monkeypatch.setattr(rules, "to_torch_lazily", transposing)
    wrong = round_trips.by_files(config, dtype, tmp_path)
    assert "Flax encoder.blocks.0.self_attention.out.kernel" in wrong, wrong
