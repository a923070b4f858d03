"""Run a Flax model and a PyTorch model on one batch, and compare them module by module."""

import contextlib
import dataclasses
import itertools
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import linen, nnx

from jax_transformer import convert, transformer
from jax_transformer.convert import rules as tables
from jax_transformer.errors import ConfigError
from jax_transformer.nn.attention import MultiHeadAttention
from jax_transformer.parity import difference, pairs, recording
from jax_transformer.parity.pairs import Pair
from jax_transformer.parity.recording import Recording, Subject
from jax_transformer.parity.report import Entry, Measured, Report
from jax_transformer.transformer import Encoder, Transformer

Rules = Mapping[str, str] | Sequence[tuple[str, str]]
Theirs = Callable[[str, int | None, Sequence[np.ndarray]], Any]
"""A PyTorch model as what it records, of a dtype, a seed and a batch: in this process or in another."""


def compare(
    flax_model: Any,
    torch_module: Any,
    batch: Sequence[np.ndarray],
    rules_or_pairs: Rules | None = None,
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

    Raises ConfigError where modules cannot be paired, or the models do not give outputs of one shape.
    """
    from jax_transformer.convert import torch_bridge

    def record(kind: str, seed: int | None, batch: Sequence[np.ndarray]) -> Any:
        return torch_bridge.recorded(torch_module, batch, dtype=kind, seed=seed, call=call_torch)

    return compare_recorded(flax_model, record, batch, rules_or_pairs, dtype=dtype, gradients=gradients, seed=seed, call=call_flax)


def compare_recorded(
    flax_model: Any,
    theirs: Theirs,
    batch: Sequence[np.ndarray],
    rules_or_pairs: Rules | None = None,
    *,
    dtype: str | None = None,
    gradients: bool = True,
    seed: int = 0,
    call: Callable[..., Any] | None = None,
) -> Report:
    """As :func:`compare`, with a PyTorch model that runs anywhere: ``theirs`` gives what ``torch_reference.recording`` records."""
    subject = _subject(flax_model, call)
    native = dtype or _native(subject)
    drawn = seed if gradients else None
    batch = [np.asarray(array) for array in batch]
    runs: dict[str, tuple[Recording, Any]] = {}
    for kind in dict.fromkeys(("float64", "float32", native)):
        with _precisely(kind):
            runs[kind] = recording.record(subject, batch, dtype=kind, seed=drawn), theirs(kind, drawn, batch)
    ours, other = runs["float64"]
    found = _pairs(flax_model, rules_or_pairs, ours, other)
    notes = []
    if narrow := sorted({place for place, array in ours.arrays.items() if array.dtype != np.float64}):
        notes.append(
            f"{narrow[0]} and {len(narrow) - 1} more are computed below float64 whatever they are given: their rounding is not known"
        )
    made = _Comparison(runs, native, _split(flax_model))
    return Report(
        entries=tuple(made.entries(found, _parameters(flax_model, subject, found, other))),
        result=made.result(),
        dtype=native,
        about={"jax": jax.__version__, "batch": [list(array.shape) for array in batch], "seed": drawn, "pairs": len(found)},
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
    raise ConfigError(f"a {type(model).__name__} is neither an nnx.Module nor (linen.Module, variables)")


def _split(model: Any) -> set[str]:
    """Modules that are called with a part of their work done: this project's attention is given keys and values, so that a cache can hold them.
    The gradient of its input is then that of the queries alone; those of its weights, and of what stands before it, are compared."""
    if not isinstance(model, Transformer | Encoder):
        return set()
    return {".".join(map(str, path)) for path, part in nnx.iter_modules(model) if isinstance(part, MultiHeadAttention)}


def _native(subject: Subject) -> str:
    kinds = {np.dtype(array.dtype).name for array in subject.parameters.values()} & {"float64", "float32", "bfloat16", "float16"}
    return min(kinds, key=lambda name: np.dtype(jax.numpy.dtype(name)).itemsize, default="float32")


@contextlib.contextmanager
def _precisely(kind: str) -> Iterator[None]:
    with jax.enable_x64(kind == "float64" or bool(jax.config.read("jax_enable_x64"))), jax.default_matmul_precision("highest"):
        yield


def _pairs(model: Any, rules: Rules | None, ours: Recording, theirs: Any) -> list[Pair]:
    called = [dict.fromkeys(key.rpartition("#")[0] for key in order) for order in (ours.order, theirs.order)]
    if rules is not None:
        return pairs.of_rules(rules, *called)
    if isinstance(model, Transformer | Encoder):
        return pairs.of_table(convert.weight_table(model.config, "encoder" if isinstance(model, Encoder) else "model"), *called)
    raise ConfigError("say which modules are which: only this project's models have a weight table; {'torch.name.{i}': 'flax.name.{i}'}")


Parameters = dict[str, dict[str, tuple[Callable[[Any], np.ndarray | None], Callable[[Any], np.ndarray | None]]]]
_LEAVES = {"kernel": ("weight", True), "bias": ("bias", False), "scale": ("weight", False), "embedding": ("weight", False)}


def _parameters(model: Any, subject: Subject, found: Sequence[Pair], theirs: Any) -> Parameters:
    """Of each paired module's own parameters, how to get the gradients of either side: by the weight table, or as Flax names them."""
    made: Parameters = {}
    if isinstance(model, Transformer | Encoder):
        table = convert.weight_table(model.config, "encoder" if isinstance(model, Encoder) else "model")
        for rule in tables.restrict(table, subject.parameters):
            assert isinstance(rule, tables.Rule)
            owner = min(
                (pair.ours for pair in found if all(n.startswith(f"{pair.ours}.") for n in rule.flax)), key=lambda n: -len(n), default=None
            )
            if owner is not None:
                made.setdefault(owner, {})[rule.torch] = (_ruled(rule), _named(rule.torch))
        return made
    for pair in found:
        for name in subject.parameters:
            owner, _, leaf = name.rpartition(".")
            if owner == pair.ours and leaf in _LEAVES and np.ndim(subject.parameters[name]) <= 2:
                their_leaf, transposed = _LEAVES[leaf]
                made.setdefault(owner, {})[leaf] = (_leaf(name, transposed), _named(f"{pair.theirs}.{their_leaf}"))
    return made


def _ruled(rule: tables.Rule) -> Callable[[Any], np.ndarray | None]:
    def get(run: Any) -> np.ndarray | None:
        return rule.to_torch([run.parameters[name] for name in rule.flax]) if all(name in run.parameters for name in rule.flax) else None

    return get


def _named(name: str) -> Callable[[Any], np.ndarray | None]:
    return lambda run: run.parameters.get(name)


def _leaf(name: str, transposed: bool) -> Callable[[Any], np.ndarray | None]:
    def get(run: Any) -> np.ndarray | None:
        array = run.parameters.get(name)
        return array.T if array is not None and transposed else array

    return get


class _Comparison:
    """Runs of both models by dtype, and what is measured of them."""

    def __init__(self, runs: Mapping[str, tuple[Recording, Any]], native: str, split: Collection[str]):
        self.runs, self.native, self.split = runs, native, split

    def result(self) -> Measured:
        shapes = [None if run.result is None else run.result.shape for run in self.runs["float64"]]
        if shapes[0] != shapes[1]:
            raise ConfigError(
                f"the Flax model gives {shapes[0]} and the PyTorch model {shapes[1]}: give call_flax= or call_torch= to make them one"
            )
        measured = self._measured(lambda run: run.result, lambda run: run.result)
        assert measured is not None
        return measured

    def entries(self, found: Sequence[Pair], parameters: Parameters) -> Iterator[Entry]:
        by_name = {pair.ours: pair for pair in found}
        calls = set(self.runs["float64"][1].order)
        for key in self.runs["float64"][0].order:
            name, _, number = key.rpartition("#")
            if name not in by_name:
                continue
            other = f"{by_name[name].theirs}#{number}"
            if other not in calls:
                yield Entry(name, by_name[name].theirs, int(number), note="called more often here than there")
                continue
            own = {leaf: self._measured(*get) for leaf, get in parameters.get(name, {}).items()} if number == "0" else {}
            parameters_found = {leaf: measured for leaf, measured in own.items() if measured is not None}
            inputs = self._inputs(key, other)
            given = self._worst([(f"{key}/{a}", f"{other}/{b}") for a, b in inputs])
            if given is None and self._takes_numbers(key, other) and not any(pair.ours.startswith(f"{name}.") for pair in found):
                # As a table of positions whose rows one side adds to what it is given, and the other gives alone
                note = "what goes in is of another kind here than there: what comes out is not compared"
                yield Entry(name, by_name[name].theirs, int(number), parameters=parameters_found, note=note)
                continue
            yield Entry(
                name,
                by_name[name].theirs,
                int(number),
                input=given,
                output=self._worst([(f"{key}/output", f"{other}/output")]),
                input_gradient=None
                if name in self.split
                else self._worst([(f"{key}/{a} gradient", f"{other}/{b} gradient") for a, b in inputs]),
                output_gradient=self._worst([(f"{key}/output gradient", f"{other}/output gradient")]),
                parameters=parameters_found,
                note=self._note(f"{key}/output", f"{other}/output"),
            )

    def _takes_numbers(self, ours: str, theirs: str) -> bool:
        """Whether either call took floating-point numbers, and not ids alone."""
        return any(f"{call}/input" in run.arrays for run, call in zip(self.runs["float64"], (ours, theirs), strict=True))

    def _inputs(self, ours: str, theirs: str) -> list[tuple[str, str]]:
        """Which input is which: the first of either call, then of the others the first with the first of its shape, and so on."""
        pairs = [("input", "input")]
        mine, other = (run.arrays for run in self.runs["float64"])
        free = list(_further(other, theirs))
        for name in _further(mine, ours):
            meant = next((b for b in free if _aligned(mine[f"{ours}/{name}"], other[f"{theirs}/{b}"]) is not None), None)
            if meant is not None:
                free.remove(meant)
                pairs.append((name, meant))
        return pairs

    def _worst(self, places: Sequence[tuple[str, str]]) -> Measured | None:
        """Of the arrays at these places, what is measured of the one that is furthest apart."""
        found = [self._measured(operator.methodcaller("at", a), operator.methodcaller("at", b)) for a, b in places]
        return max((measured for measured in found if measured is not None), key=lambda measured: measured.times, default=None)

    def _note(self, ours: str, theirs: str) -> str:
        a, b = (run.arrays.get(place) for run, place in zip(self.runs["float64"], (ours, theirs), strict=True))
        return "" if a is None or b is None or _aligned(a, b) is not None else f"outputs of shapes {a.shape} and {b.shape} are not compared"

    def _measured(self, get_ours: Callable[[Any], Any], get_theirs: Callable[[Any], Any]) -> Measured | None:
        arrays = {kind: (get_ours(run[0]), get_theirs(run[1])) for kind, run in self.runs.items()}
        wide_ours, wide_theirs = arrays["float64"]
        if wide_ours is None or wide_theirs is None:
            return None
        aligned = _aligned(wide_ours, wide_theirs)
        if aligned is None:
            return None
        swapped = aligned is not wide_ours
        sides = list(zip(arrays["float32"], arrays["float64"], strict=True))

        def measured(kind: str) -> tuple[difference.Difference, float]:
            ours, theirs = arrays[kind]
            found = difference.difference(np.swapaxes(ours, 0, 1) if swapped else ours, theirs, kind)
            return found, difference.times(found, difference.floor(sides, kind))

        errors = (difference.error(narrow, wide) for narrow, wide in zip(arrays[self.native], arrays["float64"], strict=True))
        return Measured(*measured("float64"), *measured(self.native), *errors)


def _further(arrays: Mapping[str, np.ndarray], call: str) -> Iterator[str]:
    return itertools.takewhile(lambda place: f"{call}/{place}" in arrays, (f"input {i}" for i in itertools.count(1)))


def _aligned(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray | None:
    """Ours in the shape of theirs: some PyTorch modules put the length before the batch. None where that does not make them one shape."""
    if ours.ndim < 2 or np.swapaxes(ours, 0, 1).shape != theirs.shape:
        return ours if ours.shape == theirs.shape else None
    swapped = np.swapaxes(ours, 0, 1)
    # As many rows as places: only the numbers tell which order it is
    return ours if ours.shape == theirs.shape and not _nearer(swapped, ours, theirs) else swapped


def _nearer(one: np.ndarray, other: np.ndarray, theirs: np.ndarray) -> bool:
    return difference.difference(one, theirs).max_abs < 1e-3 * difference.difference(other, theirs).max_abs
