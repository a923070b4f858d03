"""Weights round-trip with torch tensors."""

import numpy as np
import pytest
import torch

import jax_transformer as jt
from jax_transformer.architectures import twins
from jax_transformer.errors import InputError
from jax_transformer.weights import torch_bridge
from parity_tests.cases import CASES, ODD
from parity_tests.twins import as_torch, pair, random_twin

DTYPES = [(case, torch.float64) for case in CASES] + [
    (CASES[0], dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)
]


@pytest.mark.parametrize(("case", "dtype"), DTYPES, ids=str)
def test_weights_round_trip_bit_for_bit(case, dtype):
    state = random_twin(case.config).to(dtype).state_dict()
    again = jt.convert.to_torch(jt.convert.from_torch(state, case.config))
    assert sorted(again) == sorted(state)
    for name, tensor in state.items():
        assert again[name].shape == tuple(tensor.shape)
        assert again[name].tobytes() == torch_bridge.to_numpy(tensor).tobytes(), name
        assert torch.equal(
            torch_bridge.to_tensor(again[name]).view(torch.uint8),
            tensor.contiguous().view(torch.uint8),
        ), name


def test_into_torch_fills_a_module():
    both = pair(jt.preset("lesson10", **ODD))
    module = jt.convert.into_torch(both.flax, twins.twin(both.config).double().eval())
    with torch.no_grad():
        assert torch.equal(
            module(as_torch(both.source), as_torch(both.target)),
            as_torch(both.logits()[1]),
        )


def test_into_torch_keeps_parameters_tied():
    both = pair(jt.preset("vaswani2017_base", **(ODD | {"target_vocab_size": 11})))
    module = twins.twin(both.config)
    before = sum(parameter.numel() for parameter in module.parameters())
    jt.convert.into_torch(both.flax, module)
    assert module.src_emb.weight is module.tgt_emb.weight
    assert module.linear.weight is module.tgt_emb.weight
    assert sum(parameter.numel() for parameter in module.parameters()) == before


def test_into_torch_refuses_another_module():
    both = pair(jt.preset("lesson10", **ODD))
    with pytest.raises(InputError, match=r"Missing key.*tgt_emb\.weight"):
        jt.convert.into_torch(both.flax, torch.nn.Linear(2, 2))


def test_training_the_torch_module_does_not_change_the_flax_model():
    """JAX on CPU may alias NumPy's memory, and NumPy may alias torch's."""
    both = pair(jt.preset("lesson10", **ODD))
    before = np.asarray(both.flax(both.source, both.target)).copy()
    with torch.no_grad():
        for parameter in both.torch.parameters():
            parameter.mul_(0)
    np.testing.assert_array_equal(np.asarray(both.flax(both.source, both.target)), before)


def test_the_position_buffer_of_a_checkpoint_is_used():
    """A checkpoint's unusual table is used in both directions, and is not a parameter."""
    both = pair(jt.preset("lesson10", **ODD))
    state = both.torch.state_dict() | {"pos_enc.pe": torch.zeros_like(both.torch.pos_enc.pe)}
    model = jt.convert.from_torch(state, both.config)
    actual = np.abs(
        np.asarray(model(both.source, both.target))
        - np.asarray(both.flax(both.source, both.target))
    ).max()
    assert actual > 1e-2
    assert not jt.convert.to_torch(model)["pos_enc.pe"].any()


def test_a_configuration_without_a_twin_is_refused():
    with pytest.raises(ValueError, match="head_dim"):
        twins.twin(jt.preset("small", head_dim=8))
    with pytest.raises(ValueError, match="norm_placement"):
        twins.twin(jt.preset("lesson10", norm_placement="pre"))
