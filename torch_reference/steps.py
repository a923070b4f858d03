"""Optimizer steps of a PyTorch model on one batch: the loss, gradients and parameters of each.

``jax_transformer.parity`` compares them with the steps of a JAX model.
"""

import contextlib
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from torch_reference import recording

Arrays = dict[str, np.ndarray]


@dataclass
class Training:
    """Arrays of each step. Tied parameters have all their names."""

    losses: list[np.ndarray] = field(default_factory=list)
    gradients: list[Arrays] = field(default_factory=list)
    """Those of parameters that require one; zeros if the loss does not depend on a parameter."""
    parameters: list[Arrays] = field(default_factory=list)
    """Before the first step, and after each."""
    outputs: list[str] = field(default_factory=list)
    """Names of the floating-point tensors that the model returns; a lone one's is ""."""
    shape: tuple[int, ...] = ()
    """The shape of the first of them."""
    rounded: bool = False
    """True if a constant of the model may be rounded to a dtype below float64."""
    note: str = ""
    """The reason why it was not run in float64 everywhere; empty if it was, or need not."""


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    """AdamW with the defaults of PyTorch."""
    return torch.optim.AdamW(module.parameters(), lr=1e-3)


def train(
    module: nn.Module,
    batch: Sequence[np.ndarray],
    optimizer: Callable[[nn.Module], Any],
    *,
    steps: int,
    dtype: str,
    seed: int,
    call: Callable[..., Any] | None = None,
) -> Training:
    """Train a copy of ``module`` in ``dtype`` on ``batch``.

    The first tensor of the model's result is the loss if it is a scalar. Otherwise the loss is the
    mean of ``(tensor - R)**2``, with R standard normal of ``seed``.

    Args:
        module: not changed. It runs in the mode (train, eval) that it is in.
        batch: arguments of the call; floating-point arrays are cast to ``dtype``, a name.
        optimizer: returns the optimizer of a module, or another object that has its methods
            ``zero_grad`` and ``step``.
        steps: number of updates.
        dtype: dtype of the parameters.
        seed: seed of R.
        call: ``call(module, *tensors)`` instead of ``module(*tensors)``.
    """
    kind = getattr(torch, dtype)

    def run(*, wide: bool) -> Training:
        trained = copy.deepcopy(module)
        trained._apply(lambda tensor: recording.in_dtype(tensor, kind))
        tensors = [recording.as_tensor(array, kind) for array in batch]
        update, result, narrow = optimizer(trained), Training(), set[torch.dtype]()
        named = [*trained.named_parameters(remove_duplicate=False)]

        def note_parameters() -> None:
            result.parameters.append({name: recording.as_array(p) for name, p in named})

        note_parameters()
        for _ in range(steps):
            update.zero_grad()
            with recording.Wide(narrow.add) if wide else contextlib.nullcontext():
                loss = _loss((call or nn.Module.__call__)(trained, *tensors), seed, result)
                loss.backward()
            result.losses.append(recording.as_array(loss))
            gradients = ((name, p, p.grad) for name, p in named if p.requires_grad)
            result.gradients.append(
                {
                    name: recording.as_array(torch.zeros_like(p) if gradient is None else gradient)
                    for name, p, gradient in gradients
                }
            )
            update.step()
            note_parameters()
        constants = narrow and recording.with_constants(trained)
        result.rounded = bool(constants or recording.float32_buffers(trained))
        return result

    return recording.in_float64(run) if dtype == "float64" else run(wide=False)


def _loss(returned: Any, seed: int, result: Training) -> torch.Tensor:
    output = recording.first_output(returned)
    if output.is_complex():
        output = torch.view_as_real(output)
    result.outputs, result.shape = [*recording.named_floats(returned)], tuple(output.shape)
    if not output.ndim:
        return output
    goal = np.random.default_rng(seed).standard_normal(output.shape)
    return (output - torch.from_numpy(goal).to(output.dtype)).square().mean()
