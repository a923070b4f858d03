"""Run a Flax model and a PyTorch model on one batch, and compare them module by module."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import linen, nnx

from jax_transformer import convert, transformer
from jax_transformer.errors import ConfigError
from jax_transformer.nn.attention import MultiHeadAttention
from jax_transformer.parity import difference, pairs, parameters, recording
from jax_transformer.parity.measuring import Measuring
from jax_transformer.parity.pairs import Pair
from jax_transformer.parity.recording import Recording, Subject
from jax_transformer.parity.report import Report
from jax_transformer.transformer import Encoder, Transformer

Constraints = Mapping[str, str] | Sequence[tuple[str, str]]
Theirs = Callable[[str, int | None, Sequence[np.ndarray]], Any]
"""A PyTorch model as what it records, of a dtype, a seed and a batch: in this process or in another."""


def compare(
    flax_model: Any,
    torch_module: Any,
    batch: Sequence[np.ndarray],
    rules_or_pairs: Constraints | None = None,
    *,
    dtype: str | None = None,
    gradients: bool = True,
    seed: int = 0,
    call_flax: Callable[..., Any] | None = None,
    call_torch: Callable[..., Any] | None = None,
) -> Report:
    """Where two models that should be one begin to differ.

    Both run twice, in float64 and in float32, to tell a fault from rounding, and in ``dtype`` where that is another. Neither is changed.

    Args:
        flax_model: an NNX module, or a Linen one as ``(module, variables)``. Of this project's models the weight table pairs the modules.
        torch_module: the PyTorch module with the weights that should give the same, in the mode (train, eval) that it is meant to run in.
        batch: the arguments of both models' calls, as NumPy arrays.
        rules_or_pairs: ``{"encoder.layer.{i}": "encoder.layers_{i}"}``: names of PyTorch modules to names of Flax modules; each ``{word}``
            stands for one part of a name. Needed for models of others.
        dtype: of the figures that are shown; the Flax model's own where None.
        gradients: whether to compare those of ``sum(R * output)``, R normal numbers of ``seed``.
        call_flax, call_torch: ``call(model, *batch)`` in the place of ``model(*batch)``: another method, or dropout with masks that are given.

    Raises ConfigError where modules cannot be paired, the models do not give outputs of one shape, or the dtype is none to compare in.
    """
    from jax_transformer import torch_bridge

    def record(kind: str, seed: int | None, batch: Sequence[np.ndarray]) -> Any:
        return torch_bridge.recorded(torch_module, batch, dtype=kind, seed=seed, call=call_torch)

    return compare_recorded(
        flax_model,
        record,
        batch,
        rules_or_pairs,
        dtype=dtype,
        gradients=gradients,
        seed=seed,
        call=call_flax,
    )


def compare_recorded(
    flax_model: Any,
    theirs: Theirs,
    batch: Sequence[np.ndarray],
    rules_or_pairs: Constraints | None = None,
    *,
    dtype: str | None = None,
    gradients: bool = True,
    seed: int = 0,
    call: Callable[..., Any] | None = None,
) -> Report:
    """As :func:`compare`, with a PyTorch model that runs anywhere: ``theirs`` gives what ``torch_reference.recording`` records."""
    subject = _subject(flax_model, call)
    native = dtype or _native(subject)
    if native not in difference.DTYPES:
        raise ConfigError(f"dtype {native!r}: give one of {', '.join(difference.DTYPES)}")
    drawn = seed if gradients else None
    batch = [np.asarray(array) for array in batch]
    runs: dict[str, tuple[Recording, Any]] = {}
    for kind in dict.fromkeys(("float64", "float32", native)):
        with _precisely(kind):
            runs[kind] = (
                recording.record(subject, batch, dtype=kind, seed=drawn),
                theirs(kind, drawn, batch),
            )
    ours, other = runs["float64"]
    found = _pairs(flax_model, rules_or_pairs, ours, other)
    notes = []
    if narrow := sorted(
        {place for place, array in ours.arrays.items() if array.dtype != np.float64}
    ):
        notes.append(
            f"{narrow[0]} and {len(narrow) - 1} more are computed below float64 whatever they are given: their rounding is not known"
        )
    made = Measuring(runs, native, _split(flax_model))
    return Report(
        entries=tuple(made.entries(found, parameters.of_pairs(flax_model, subject, found))),
        result=made.result(),
        dtype=native,
        about={
            "jax": jax.__version__,
            "batch": [list(array.shape) for array in batch],
            "seed": drawn,
            "pairs": len(found),
        },
        notes=tuple(notes),
    )


def _subject(model: Any, call: Callable[..., Any] | None) -> Subject:
    if isinstance(model, Transformer | Encoder) and model.config.compute_dtype is not None:
        # A compute_dtype would make every run one of that dtype
        config = dataclasses.replace(model.config, compute_dtype=None)
        model = transformer.unflatten_part(config, transformer.flatten(model), type(model))
    if isinstance(model, nnx.Module):
        return recording.of_nnx(model, call)
    if isinstance(model, tuple) and len(model) == 2 and isinstance(model[0], linen.Module):
        return recording.of_linen(*model, call)
    raise ConfigError(
        f"a {type(model).__name__} is neither an nnx.Module nor (linen.Module, variables)"
    )


def _split(model: Any) -> set[str]:
    """Modules that are called with a part of their work done: this project's attention is given keys and values, so that a cache can hold them.
    The gradient of its input is then that of the queries alone; those of its weights, and of what stands before it, are compared."""
    if not isinstance(model, Transformer | Encoder):
        return set()
    return {
        ".".join(map(str, path))
        for path, part in nnx.iter_modules(model)
        if isinstance(part, MultiHeadAttention)
    }


def _native(subject: Subject) -> str:
    kinds = {np.dtype(array.dtype).name for array in subject.parameters.values()} & {
        "float64",
        "float32",
        "bfloat16",
        "float16",
    }
    return min(kinds, key=lambda name: np.dtype(jax.numpy.dtype(name)).itemsize, default="float32")


@contextlib.contextmanager
def _precisely(kind: str) -> Iterator[None]:
    with (
        jax.enable_x64(kind == "float64" or bool(jax.config.read("jax_enable_x64"))),
        jax.default_matmul_precision("highest"),
    ):
        yield


def _pairs(model: Any, rules: Constraints | None, ours: Recording, theirs: Any) -> list[Pair]:
    called = [
        dict.fromkeys(key.rpartition("#")[0] for key in order)
        for order in (ours.order, theirs.order)
    ]
    if rules is not None:
        return pairs.of_rules(rules, *called)
    if isinstance(model, Transformer | Encoder):
        return pairs.of_table(
            convert.weight_table(
                model.config, "encoder" if isinstance(model, Encoder) else "model"
            ),
            *called,
        )
    raise ConfigError(
        "say which modules are which: only this project's models have a weight table; {'torch.name.{i}': 'flax.name.{i}'}"
    )
