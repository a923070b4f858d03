"""Tensors to arrays, modules to fill and run: the only file of the package that imports torch."""

from collections.abc import Callable, Mapping

import ml_dtypes
import numpy as np
import torch
from torch import nn

from jax_transformer.errors import InputError


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Return a copy of the tensor's values, bit for bit."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:  # which torch cannot pass to NumPy: its bits are
        return tensor.contiguous().view(torch.uint16).numpy().copy().view(ml_dtypes.bfloat16)
    return np.array(tensor.numpy(), order="C")


def to_tensor(array: np.ndarray) -> torch.Tensor:
    """Return a tensor with a copy of the array's values, bit for bit."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(array, order="C"))


def fill(module: nn.Module, state: dict[str, np.ndarray]) -> nn.Module:
    """Load ``state`` strictly into the module, and return it: ties stay, dtypes become the arrays'.
    Raises InputError that names everything missing, unexpected and mis-shaped.
    """
    tensors, parameters = {}, module.state_dict(keep_vars=True)
    for name, array in state.items():
        tensors[name] = to_tensor(array)
        if name in parameters:
            parameters[name].data = parameters[name].data.to(tensors[name].dtype)
    try:
        module.load_state_dict(tensors, strict=True)
    except RuntimeError as error:
        raise InputError(" ".join(str(error).split())) from None
    return module


def trained_parameters(make: Callable[[], nn.Module]) -> list[str]:
    """List a module's trained parameters in torch.optim's order; no weights are allocated."""
    with torch.device("meta"):
        module = make()
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad]


def outputs(
    module: nn.Module,
    state: dict[str, np.ndarray],
    inputs: tuple[np.ndarray, ...],
    parts: Mapping[str, str],
) -> dict[str, np.ndarray]:
    """Return the outputs of ``parts`` (names of modules by key), in the order in which they end,
    and of the module as ``logits``, in float64 and without dropout. ``state`` replaces its weights.
    """
    fill(module, state).double().eval()
    results: dict[str, np.ndarray] = {}
    for key, name in parts.items():

        def record(_: nn.Module, __: object, result: torch.Tensor | tuple, key: str = key) -> None:
            results[key] = to_numpy(result[0] if isinstance(result, tuple) else result)

        part = module.get_submodule(name)
        if isinstance(part, nn.ModuleList):  # a block whose weights all lie in a list of its own
            part = module.get_submodule(name.rpartition(".")[0])
        part.register_forward_hook(record)
    # With gradients on, PyTorch takes no fast path that leaves modules out
    logits = to_numpy(module(*map(torch.from_numpy, inputs)))
    return results | {"logits": logits}
