"""Weights take memory once in a comparison: they are cast where they are used."""

import copy
import mmap
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from benchmarks import parity_memory
from torch_reference import recording


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_comparison_takes_little_more_memory_than_its_models():
    assert parity_memory.in_another_process(192, gradients=False) < 2.8


def test_a_large_weight_is_cast_in_memory_of_its_own():
    """Arrays that malloc returns do not begin with a page."""
    weights = [torch.randn(300, 400).T for _ in range(3)]
    cast = [recording._cast(weight, torch.float64) for weight in weights]
    assert not any(tensor.data_ptr() % mmap.PAGESIZE for tensor in cast)
    for tensor, weight in zip(cast, weights, strict=True):
        assert torch.equal(tensor, weight.double()) and tensor.stride() == weight.stride()
    rows = weights[0][:1].expand(400, 300)
    assert torch.equal(recording._cast(rows, torch.float64), rows.double())


class Calls(nn.Module):
    """A function of a module's weights."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.function(self, x)


def tied(model, x):
    return functional.linear(model.up(x), model.up.weight.T) + model.up.weight[0].sum()


def complex_numbers(model, x):
    numbers = torch.view_as_complex(model.up.weight.view(4, 3, 2))
    return (x.to(numbers.dtype) @ numbers).abs() * model.up.weight.norm()


def split(model, x):
    return sum(x @ part.T for part in model.up.weight.chunk(2)) + torch.stack([model.up.bias[:3]])


def asks_for_the_dtype(model, x):
    assert isinstance(model.up.weight, nn.Parameter) and x.dtype == model.up.weight.dtype
    return model.up(x.to(next(model.parameters()).dtype))


def changes(model, x):
    model.up.weight.data.mul_(2)
    return model.up(x)


def changes_an_entry(model, x):
    with torch.no_grad():
        torch.add(model.up.bias, 1, out=model.up.bias)
    return model.up(x)


def reads_memory(model, x):
    return x * float(model.up.weight.detach().numpy().sum()) + model.up.weight.data_ptr() % 1


def limits_rows(model, x):
    return model.embedding(x.argmax(-1))


LINEAR = nn.Linear(4, 6)
USES = {
    "tied": Calls(tied, up=LINEAR),
    "complex_numbers": Calls(complex_numbers, up=LINEAR),
    "split": Calls(split, up=LINEAR),
    "asks_for_the_dtype": Calls(asks_for_the_dtype, up=LINEAR),
    "lstm": Calls(lambda model, x: model.cell(x)[0], cell=nn.LSTM(4, 3, bidirectional=True)),
    "attention": nn.TransformerEncoderLayer(4, 2, 6, batch_first=True),
    "convolution": Calls(lambda model, x: model.part(x[None]), part=nn.Conv1d(5, 3, 2)),
}
CHANGES = {
    "changes": Calls(changes, up=LINEAR),
    "changes_an_entry": Calls(changes_an_entry, up=LINEAR),
    "reads_memory": Calls(reads_memory, up=LINEAR),
    "limits_rows": Calls(limits_rows, embedding=nn.Embedding(4, 6, max_norm=0.5)),
}


def recorded(module: nn.Module, dtype: str, *, shared: bool) -> recording.Recording:
    batch = [np.random.default_rng(0).standard_normal((5, 4))]
    part = recording._copy(module, dtype, shared=shared)
    return recording._record(part, batch, None, dtype, 0, None, None, wide=dtype == "float64")


def assert_equal(a: recording.Recording, b: recording.Recording) -> None:
    assert (a.order, a.narrow, a.sizes, a.rounded) == (b.order, b.narrow, b.sizes, b.rounded)
    ours, theirs = dict(a.named_arrays()), dict(b.named_arrays())
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        assert array.dtype == theirs[name].dtype and array.strides == theirs[name].strides, name
        np.testing.assert_allclose(array, theirs[name], rtol=1e-14, atol=0, err_msg=name)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("name", USES)
def test_weights_that_are_cast_when_used_give_what_a_copy_gives(name, dtype):
    if (name, dtype) == ("complex_numbers", "bfloat16"):
        pytest.skip("PyTorch has no such complex numbers")
    module = USES[name].eval()
    assert_equal(*(recorded(module, dtype, shared=shared) for shared in (True, False)))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_module_that_changes_or_reads_the_memory_of_its_weights_is_copied(name, dtype):
    module = CHANGES[name].eval()
    before = copy.deepcopy(module.state_dict())
    with pytest.raises((TypeError, RuntimeError)):
        recorded(module, dtype, shared=True)
    batch = [np.random.default_rng(0).standard_normal((5, 4))]
    assert_equal(
        recording.record(module, batch, dtype=dtype), recorded(module, dtype, shared=False)
    )
    for key, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[key]), key
