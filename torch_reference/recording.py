"""What every module of a PyTorch model takes and gives on one batch, and the gradients there. Plain PyTorch, this one file.

As a function it is called by ``jax_transformer.parity``. As a script it serves an environment that has torch and no JAX::

    python recording.py REQUEST.safetensors RESULT.safetensors package.module:make_model

REQUEST holds the batch as ``batch/0``, ``batch/1``, ..., the weights as ``state/NAME`` (those of ``make_model()`` where there are none) and, as JSON
in its metadata, the dtypes to run in and the seed. RESULT gets the arrays of a :class:`Recording` for each dtype, and versions. It needs
safetensors beside torch.
"""

import copy
import importlib
import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn


@dataclass
class Recording:
    """Arrays by ``CALL/what``, where CALL is a module's name and the number of its call, as ``encoder.layers.0#0``, and what is ``input``,
    ``output``, ``input gradient`` or ``output gradient``. Of several floating-point tensors that go in, the others are ``input 1`` and so on, one
    that goes in at several places counts once; of several that come out, the first is taken."""

    order: list[str] = field(default_factory=list)
    """The calls in the order in which they ended."""
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    parameters: dict[str, np.ndarray] = field(default_factory=dict)
    """The gradients of parameters by name; those of tied ones once."""
    result: np.ndarray | None = None
    """What the model gave."""

    def at(self, place: str) -> np.ndarray | None:
        """The array there, if one was recorded."""
        return self.arrays.get(place)

    def named(self) -> Iterator[tuple[str, np.ndarray]]:
        """Every array, for a file."""
        yield from ((f"arrays/{name}", array) for name, array in self.arrays.items())
        yield from ((f"parameters/{name}", array) for name, array in self.parameters.items())
        assert self.result is not None
        yield "result", self.result


def record(
    module: nn.Module,
    batch: Sequence[np.ndarray],
    *,
    names: Collection[str] | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int | None = 0,
    call: Callable[..., Any] | None = None,
) -> Recording:
    """Run a copy of ``module`` in ``dtype`` on ``batch``, whose floating-point arrays are cast too.

    Args:
        module: left as it is. It runs in the mode that it is in.
        names: of the modules to record; all where None.
        seed: of the normal numbers R in the loss ``sum(R * output)`` whose gradients are recorded; None records no gradients.
        call: ``call(module, *tensors)`` in the place of ``module(*tensors)``.
    """
    module = copy.deepcopy(module).to(dtype)
    module.zero_grad(set_to_none=True)
    made = Recording()
    wanted = {
        id(part): name
        for name, part in module.named_modules()
        if name and (names is None or name in names)
    }
    counts: dict[str, int] = {}
    open_calls: list[str] = []

    def before(part: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        name = wanted[id(part)]
        key = f"{name}#{counts.get(name, 0)}"
        counts[name] = counts.get(name, 0) + 1
        open_calls.append(key)
        for i, tensor in enumerate(
            {id(tensor): tensor for tensor in _floats((args, kwargs))}.values()
        ):
            args, kwargs = _watched(
                (args, kwargs), tensor, f"{key}/input{f' {i}' if i else ''}", made
            )
        return args, kwargs

    def after(part: nn.Module, args: tuple, kwargs: dict, result: Any) -> Any:
        key = open_calls.pop()
        made.order.append(key)
        found = next(_floats(result), None)
        return result if found is None else _watched(result, found, f"{key}/output", made)

    for part in module.modules():
        if id(part) in wanted:
            part.register_forward_pre_hook(before, with_kwargs=True)
            part.register_forward_hook(after, with_kwargs=True)
    tensors = [_tensor(array, dtype) for array in batch]
    result = (call or (lambda model, *given: model(*given)))(module, *tensors)
    output = next(_floats(result), None)
    if output is None:
        raise TypeError(
            "the PyTorch model gives no floating-point tensor: give call_torch= a function that does, or wrap it in a module that does"
        )
    made.result = _array(output)
    if seed is not None and output.requires_grad:
        weights = np.random.default_rng(seed).standard_normal(output.shape)
        (output * torch.from_numpy(weights).to(output.dtype)).sum().backward()
        made.parameters = {
            name: _array(p.grad) for name, p in module.named_parameters() if p.grad is not None
        }
    return made


def _watched(value: Any, found: torch.Tensor, place: str, made: Recording) -> Any:
    """``value`` with a tensor in it recorded, and replaced by an alias whose gradient is this call's alone."""
    made.arrays[place] = _array(found)
    if not found.requires_grad:
        return value
    alias = found.view_as(found)

    def keep(gradient: torch.Tensor) -> None:
        made.arrays[f"{place} gradient"] = _array(gradient)

    alias.register_hook(keep)
    return _replaced(value, found, alias)


def _floats(value: Any) -> Any:
    """The floating-point tensors in nested tuples, lists and dicts, in order."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _floats(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _floats(item)


def _replaced(value: Any, old: torch.Tensor, new: torch.Tensor) -> Any:
    """``value`` with every place of ``old`` taken by ``new``."""
    if value is old:
        return new
    if isinstance(value, dict):
        for name in list(value):
            changed = _replaced(value[name], old, new)
            if changed is not value[name]:
                value = copy.copy(value)
                value[name] = changed
        return value
    if isinstance(value, tuple | list):
        items = [_replaced(item, old, new) for item in value]
        if all(one is other for one, other in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _tensor(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.from_numpy(np.array(array))
    return (
        tensor.to(dtype)
        if tensor.is_floating_point()
        else tensor.long()
        if tensor.dtype == torch.int32
        else tensor
    )


def _array(tensor: torch.Tensor) -> np.ndarray:
    """A copy; 16-bit floats, one kind of which NumPy does not have, as float32, which holds them exactly."""
    tensor = tensor.detach().cpu()
    return (
        (tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor)
        .numpy()
        .copy()
    )


def main(arguments: Sequence[str]) -> None:
    """The script: see the module's text."""
    from safetensors import safe_open
    from safetensors.numpy import save_file
    from safetensors.torch import load_file

    request, result, factory = arguments
    with safe_open(request, "np") as file:
        settings = json.loads((file.metadata() or {})["settings"])
        batch = [file.get_tensor(f"batch/{i}") for i in range(settings["batch"])]
    where, _, name = factory.partition(":")
    torch.manual_seed(0)
    module = getattr(importlib.import_module(where), name)()
    if not isinstance(module, nn.Module):
        raise TypeError(f"it gives {type(module).__name__}, which is no torch.nn.Module")
    state = {
        name.removeprefix("state/"): tensor
        for name, tensor in load_file(request).items()
        if name.startswith("state/")
    }
    if state:
        module.to(
            max(
                (tensor.dtype for tensor in state.values()),
                key=lambda dtype: dtype.itemsize * dtype.is_floating_point,
            )
        )
        module.load_state_dict(state)
    arrays, order = {}, {}
    for dtype in settings["dtypes"]:
        made = record(module, batch, dtype=getattr(torch, dtype), seed=settings["seed"])
        order[dtype] = made.order
        arrays |= {f"{dtype}/{name}": np.ascontiguousarray(array) for name, array in made.named()}
    about = {"torch": torch.__version__, "numpy": np.__version__, "python": sys.version.split()[0]}
    save_file(arrays, result, {"order": json.dumps(order), "versions": json.dumps(about)})


if __name__ == "__main__":
    sys.path[0] = (
        os.getcwd()
    )  # not this file's folder, whose neighbours would go for modules of the same names
    main(sys.argv[1:])
