"""The verdict of the comparison on a model with a fault: the module that it names, and by how much
it is off."""

import importlib
from typing import Any

from campaigns.mutants.faults import Mutant


def tried(mutant: Mutant) -> tuple[str | None, float | None]:
    """The result of :func:`compared`; a message instead of the module if the comparison fails."""
    try:
        return compared(mutant)
    except Exception as e:
        return f"not compared: {type(e).__name__}", None


def compared(mutant: Mutant) -> tuple[str | None, float | None]:
    """The module that the comparison with the twin names, and the largest difference of its output.

    Runs in the process with the fault.
    """
    import jax
    import torch

    from jax_transformer import parity

    jax.config.update("jax_enable_x64", True)
    torch.set_num_threads(1)
    flax, module, batch, call = _pair(mutant.case)
    report = parity.compare(flax, module, batch, gradients=mutant.backward, call_torch=call)
    fault = report.first_gradient_fault if report.result.agrees else report.first_fault
    measured = report.result
    if fault is not None and not report.result.agrees and fault.output is not None:
        measured = fault.output
    elif fault is not None:
        measured = next(
            m
            for m in (fault.input_gradient, *fault.parameters.values())
            if m is not None and not m.agrees
        )
    return None if report.agrees or fault is None else fault.ours, measured.wide.max_abs


def _pair(name: str) -> tuple[Any, Any, tuple, Any]:
    from parity_tests import cases, twins

    for case in cases.CASES:
        if case.name == name:
            both = twins.pair(case.config)
            return both.flax, both.torch, (both.source, both.target), None
    from parity_tests import huggingface

    _in_float64()
    family = huggingface.exact_positions(huggingface.pair(name))
    pad = family.config.source_pad_id

    def call(model: Any, source: Any, target: Any) -> Any:
        return model(
            input_ids=source, attention_mask=(source != pad).long(), decoder_input_ids=target
        ).logits

    return family.ours, family.theirs, huggingface.batch(family.config), call


def _in_float64() -> None:
    """T5's norm in the dtype of its input, as parity_tests.huggingface.in_float64 has it."""
    import torch

    for family, prefix in (("t5", "T5"), ("mt5", "MT5"), ("umt5", "UMT5")):
        modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")

        def norm(self: Any, x: Any) -> Any:
            return self.weight * (
                x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
            )

        getattr(modeling, f"{prefix}LayerNorm").forward = norm
