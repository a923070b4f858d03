"""Run a Flax model and a PyTorch model on one batch, and compare them module by module."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import linen, nnx

from jax_transformer import transformer
from jax_transformer.architectures import registry
from jax_transformer.architectures.base import Architecture
from jax_transformer.config import MatmulPrecision
from jax_transformer.errors import ConfigError
from jax_transformer.parity import coverage, difference, functions, pairs, recording, structures
from jax_transformer.parity.difference import Entry
from jax_transformer.parity.evaluation import itemsize
from jax_transformer.parity.functions import ModelFunction
from jax_transformer.parity.isolation import Isolation
from jax_transformer.parity.measuring import PairedRuns
from jax_transformer.parity.pairs import Called, Pair, Patterns
from jax_transformer.parity.recording import Recording, Replacements
from jax_transformer.parity.report import Report
from jax_transformer.transformer import Encoder, Transformer
from jax_transformer.weights.rules import Table

TRAIN_MODE = "the PyTorch module is in train mode: call its eval() unless that is meant"
_GUESSED = "the pairs of modules are guessed from order, shapes and names: pass rules to set them"
_ONLY_RESULTS = "the JAX model has no modules: only results are compared; tap names points of it"
_PART = "its output is a part of the other module's: it is not compared"
TorchRecorder = Callable[[str, int | None, Sequence[np.ndarray]], Any]
"""Records a PyTorch model for a dtype, a seed and a batch, in this process or in another one."""


def compare(
    flax_model: Any,
    torch_module: Any,
    batch: Sequence[np.ndarray] | np.ndarray | Mapping[str, np.ndarray],
    rules_or_pairs: Patterns | None = None,
    *,
    dtype: str | None = None,
    gradients: bool = True,
    seed: int = 0,
    call_flax: Callable[..., Any] | None = None,
    call_torch: Callable[..., Any] | None = None,
    positions: np.ndarray | None = None,
    architecture: Architecture | str | None = None,
) -> Report:
    """Return a report on the first module in which two models that should be equal differ.

    Both run in float64 and in float32, to tell a fault from rounding, and in ``dtype`` if that is
    another one. Neither model is changed.

    Args:
        flax_model: an NNX module, a Linen module as ``(module, variables)``, or any JAX function
            as ``(function, parameters)``, called as ``function(parameters, *batch)``, whose points
            to compare are named by :func:`jax_transformer.parity.tap`.
        torch_module: the PyTorch module with the corresponding weights, in the mode (train, eval)
            that it is meant to run in; if the models differ, train mode is named.
        batch: the arguments of both models' calls, as NumPy arrays; one array for one argument; a
            dict for arguments by name, which ``call_flax`` and ``call_torch`` get by name too.
        rules_or_pairs: ``{"encoder.layer.{i}": "encoder.layers_{i}"}``: names of PyTorch modules to
            names of Flax modules; each ``{word}`` stands for one part of a name. Without rules, the
            modules of this project's models are paired by the weight table, others are guessed from
            order, shapes and names, and a note says so.
        dtype: dtype of the figures that are shown; the Flax model's own if None.
        gradients: compare the gradients of ``sum(R * output)`` too, with R standard normal.
        seed: seed of R.
        call_flax: ``call_flax(model, *batch)`` instead of ``model(*batch)``: another method, or
            dropout with given masks.
        call_torch: the same for the PyTorch module.
        positions: booleans, such as (b, t): arrays that begin with these axes are compared where
            they are True, and only there the result counts for gradients. Padding may differ.
        architecture: whose names the PyTorch module has, as an Architecture or a registered name;
            ``flax_model.config.architecture`` if None. Only for this project's models.

    Raises:
        ConfigError: modules cannot be paired, a model has no weights or fails on the batch, the
            models' outputs differ in shape, or the dtype is not one of float64, float32, float16
            and bfloat16.
    """
    from jax_transformer.architectures import twins

    structures.check_torch(torch_module)
    ordered, call_flax, call_torch = structures.positional(batch, call_flax, call_torch)

    def record(dtype: str, seed: int | None, batch: Sequence[np.ndarray]) -> Any:
        options = {"seed": seed, "call": call_torch, "positions": positions}
        return twins.recorded(torch_module, batch, dtype=dtype, **options)

    options: dict[str, Any] = {"dtype": dtype, "gradients": gradients, "seed": seed}
    options |= {"positions": positions, "call": call_flax, "architecture": architecture}
    report = compare_recorded(flax_model, record, ordered, rules_or_pairs, **options)
    notes = [TRAIN_MODE] if torch_module.training and not report.agrees else []
    if (fault := report.first_gradient_fault) is not None and fault.gradients is not None:
        row = getattr(torch_module.get_submodule(fault.theirs), "padding_idx", None)
        if fault.gradients.wide.where[:1] == (row,):
            notes.append(f"PyTorch does not train row {row}, its padding_idx")
    return dataclasses.replace(report, notes=(*report.notes, *notes))


def compare_recorded(
    flax_model: Any,
    recorder: TorchRecorder,
    batch: Sequence[np.ndarray] | np.ndarray,
    rules_or_pairs: Patterns | None = None,
    *,
    dtype: str | None = None,
    gradients: bool = True,
    seed: int = 0,
    call: Callable[..., Any] | None = None,
    positions: np.ndarray | None = None,
    architecture: Architecture | str | None = None,
) -> Report:
    """Return a report as :func:`compare` returns it, for a PyTorch model that may run anywhere.

    ``recorder(dtype, seed, batch)`` returns what ``torch_reference.recording.record`` returns, with
    gradients at the same ``positions``.
    """
    table = weight_table(flax_model, architecture)
    function = model_function(flax_model, call)
    if table is not None:  # fills constants too
        function = dataclasses.replace(function, constants=frozenset())
    dtypes = {np.dtype(array.dtype).name for array in function.parameters.values()}
    known = dtypes.intersection(difference.DTYPES)
    native_dtype = dtype or min(known, key=itemsize, default="float32")
    if native_dtype not in difference.DTYPES:
        raise ConfigError(f"dtype {native_dtype!r}: must be one of {', '.join(difference.DTYPES)}")
    gradient_seed = seed if gradients else None
    batch, results = structures.arrays_of(batch), structures.Results()
    ours = recording.Recorder(results.chosen(function), batch, positions)

    def record_ours(dtype: str, **options: Any) -> Recording:
        x64 = dtype == "float64" or bool(jax.config.read("jax_enable_x64"))
        with jax.enable_x64(x64), jax.default_matmul_precision("highest"):
            return ours.record(dtype=dtype, **options)

    def run_ours(theirs: Any, dtype: str) -> Recording:
        results.theirs = theirs.outputs
        return record_ours(dtype, seed=gradient_seed, wide=theirs.narrow is not None)

    runs, widest, notes = recording.in_each_dtype(
        lambda dtype: recorder(dtype, gradient_seed, batch),
        run_ours,
        ("float64", "float32", native_dtype),
    )
    paired = _pairs(table, rules_or_pairs, function, *runs["float64"])
    guessed = table is None and rules_or_pairs is None
    compared = PairedRuns(runs, native_dtype, widest, positions)
    getters = pairs.gradient_getters(table, function, paired, runs["float64"][0].biases)
    entries, shapes = tuple(compared.entries(paired, getters)), [[*x.shape] for x in batch]
    measured = compared.results()
    if runs["float64"][0].of_arrays:
        agree = not any(map(difference.differs, measured.values()))
        entries = tuple(_if_whole(e) if agree or compared.only_added(e) else e for e in entries)
    about = {"jax": jax.__version__, "batch": shapes, "seed": gradient_seed}
    about |= {"pairs": len(paired), "guessed": guessed}
    note = _GUESSED if paired else _ONLY_RESULTS
    notes += [*([note] if guessed else []), *results.note(measured)]
    report = Report(entries, measured, native_dtype, about, tuple(notes))
    outside = compared.outside_in_16_bits(entries, measured)
    report = dataclasses.replace(report, outside_in_16_bits=outside)

    def covered(report: Report) -> Report:
        reached = coverage.of(report.entries, getters, runs["float64"][1], gradients)
        return dataclasses.replace(report, coverage=reached)

    if report.agrees:
        return covered(report)

    def run(arrays: Replacements, dtype: str) -> Recording:
        wide = runs["float64"][1].narrow is not None
        return record_ours(dtype, seed=None, wide=wide, replacements=arrays)

    options = [(report, compared)]
    if (reordered := compared.in_our_order(entries)) is not None:
        other = dataclasses.replace(report, entries=tuple(reordered.entries(paired, getters)))
        if other.agrees:
            return covered(other)
        # A kernel that was permuted by mistake leaves its attention wrong, however it is read
        options.append((other, reordered))
    reports = [
        each if each.same_outputs else Isolation(each, of_each, run).report_of_faults()
        for each, of_each in options
    ]
    report = min(
        reports,
        key=lambda each: (
            len(each.faults) + (each.first_fault is None),
            sum(entry.output is None for entry in each.entries),
        ),
    )
    as_it_is = (one.note for one in runs["float64"] if one.note)
    return covered(dataclasses.replace(report, notes=(*report.notes, *as_it_is)))


def _if_whole(entry: Entry) -> Entry:
    """Return an entry of an array's use, without its output if that differs: it is more or less
    than what the other module computes, if the results agree."""
    if not difference.differs(entry.output):
        return entry
    pair = entry.ours, entry.theirs, entry.call
    return Entry(*pair, parameters=entry.parameters, note=_PART)


def model_function(model: Any, call: Callable[..., Any] | None) -> ModelFunction:
    """Return a JAX model of any kind as a function. Raises ConfigError if it is none."""
    if isinstance(model, Transformer | Encoder):
        # With a compute_dtype every run would be in that dtype
        config = dataclasses.replace(
            model.config, compute_dtype=None, matmul_precision=MatmulPrecision.HIGHEST
        )
        if config != model.config:
            model = transformer.unflatten_part(config, transformer.flatten(model), type(model))
    if isinstance(model, nnx.Module):
        return functions.from_nnx(model, call)
    if isinstance(model, tuple) and len(model) == 2:
        if isinstance(model[0], linen.Module):
            return functions.from_linen(*model, call)
        if callable(model[0]) and not isinstance(model[0], type):
            return functions.from_function(*model, call)
    raise ConfigError(
        f"{structures.kind(model)} is neither an nnx.Module, nor (linen.Module, variables), nor"
        " (function, parameters)"
    )


def weight_table(model: Any, architecture: Architecture | str | None = None) -> Table | None:
    """Return the weight table of one of this project's models; None for another model."""
    if isinstance(model, Transformer | Encoder):
        part = "encoder" if isinstance(model, Encoder) else "model"
        return registry.weight_table(model.config, part, architecture=architecture)
    if architecture is not None:
        raise ConfigError("architecture= is for models of this project: pass rules for others")
    return None


def _pairs(
    table: Table | None, rules: Patterns | None, model: ModelFunction, ours: Recording, theirs: Any
) -> list[Pair]:
    orders = ours.order, theirs.order
    called = [dict.fromkeys(key.rpartition("#")[0] for key in order) for order in orders]
    if rules is not None:
        return pairs.from_patterns(rules, *called)
    if table is not None:
        return pairs.from_table(table, *called)
    sizes = {name: np.broadcast_to(0, size) for name, size in theirs.sizes.items()} or None
    parameters = None if sizes is None else model.parameters
    guessed = pairs.guessed(_called(ours, parameters, ours.points), _called(theirs, sizes))
    if not guessed and called[0] and not ours.points:
        raise ConfigError(
            "no modules correspond by order and shape: pass {'torch.name.{i}': 'flax.name.{i}'}"
        )
    return guessed


def _called(
    recording: Any, arrays: Mapping[str, Any] | None, points: Collection[str] = ()
) -> list[Called]:
    """Return the modules that return an array, as their first calls ended, with their sizes."""
    outputs = {
        key.rpartition("#")[0]: recording.get(f"{key}/output") for key in reversed(recording.order)
    }

    def sizes(name: str) -> tuple[int, ...] | None:
        is_point = f"{name}#0" in points
        known = None if arrays is None else pairs.sizes(arrays, name, is_point)
        return None if not known and is_point else known

    return [
        Called(name, x.shape, sizes(name), _figures(x))
        for name in dict.fromkeys(key.rpartition("#")[0] for key in recording.order)
        if (x := outputs[name]) is not None
    ]


def _figures(x: np.ndarray) -> tuple[float, ...]:
    return tuple(float((np.abs(x.astype(np.float64)) ** n).sum()) for n in (1, 2, 3))
