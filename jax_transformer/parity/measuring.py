"""Measurements of two models' recordings: the arrays of each pair of calls, compared."""

import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np

from jax_transformer.errors import ConfigError
from jax_transformer.parity import difference, structures
from jax_transformer.parity.difference import FAULT, Entry, Measurement
from jax_transformer.parity.evaluation import itemsize
from jax_transformer.parity.pairs import GradientGetters, Pair, same_but_merged
from jax_transformer.parity.recording import Recording
from jax_transformer.weights import layouts

_ANOTHER_INPUT = "input of another kind: its output is not compared"
_NEARER = 1e-3
"""Only numbers that are closer by this factor tell which axis or call corresponds to which."""


class PairedRuns:
    """Recordings of both models by dtype, float64 among them, or in its place ``widest``.
    ``positions`` are those of :func:`.comparison.compare`.
    """

    def __init__(
        self,
        runs: Mapping[str, tuple[Recording, Any]],
        native_dtype: str,
        widest: str = "float64",
        positions: np.ndarray | None = None,
    ):
        self.runs, self.native_dtype = runs, native_dtype
        self.positions, self.widest = positions, widest
        self.ours, self.theirs = runs["float64"]
        widened = (side.narrow or {} for side in runs["float64"])
        self._narrowest = [min(side.values(), key=itemsize, default="float32") for side in widened]
        self.calls: dict[str, str] = {}
        """The PyTorch model's call for each compared call of a Flax module."""
        self.narrow: dict[str, str] = {}
        """The dtypes below float64 that paired Flax modules or their counterparts compute in by
        themselves; the models' is that of ""."""
        self.rounded: set[str] = set()
        """Those of them that have a constant rounded to that dtype."""
        self.in_16_bits: list[set[str]] = []
        """The modules that compute in 16 bits by themselves, in PyTorch and in Flax."""
        self.reordered: set[str] = set()
        """The calls of Flax modules to whose order the other model's features were brought."""

    def results(self) -> dict[str, Measurement]:
        """Return the measurements of the arrays that both models return, by PyTorch's names. Raises
        ConfigError if their shapes differ.
        """
        first, *others = self.theirs.outputs or [""]
        arrays: dict[str, Any] = {}
        arrays[first] = {d: (one.result, other.result) for d, (one, other) in self.runs.items()}
        for name in others:
            key = f"#0/result {name}"
            if key in self.ours.arrays:
                runs = self.runs.items()
                arrays[name] = {d: (one.arrays[key], other.arrays[key]) for d, (one, other) in runs}
        measured = {}
        for name, both in arrays.items():
            measurement, (ours, theirs) = self._measure(both), both["float64"]
            if measurement is None or ours.shape != theirs.shape:
                raise structures.other_shapes(ours, theirs, name)
            measured[name] = measurement
        at, shape = self.positions, np.shape(self.theirs.result)
        if at is not None and (at.dtype != bool or at.shape != shape[: at.ndim]):
            raise ConfigError(
                f"positions have shape {at.shape} and dtype {at.dtype}: must be booleans for the"
                f" first axes of the result, {shape}"
            )
        return measured

    def entries(self, pairs: Sequence[Pair], getters: GradientGetters) -> Iterator[Entry]:
        """Return an entry for each call of a paired module, in the order in which they ended."""
        for entry in without_other_inputs(self._entries(pairs, getters)):
            shown = shows(entry.output) and not shows(entry.input)
            lower = self.lower(entry.ours) if shown else ""
            narrow = self.narrow.get(entry.ours, "")
            yield dataclasses.replace(entry, narrow=narrow, lower=lower)

    def _entries(self, pairs: Sequence[Pair], getters: GradientGetters) -> Iterator[Entry]:
        by_name = {pair.ours: pair for pair in pairs}
        if self.widest == "float64":
            self._find_narrow(self.theirs, {pair.theirs: pair.ours for pair in pairs})
            self._find_narrow(self.ours, {name: name for name in by_name})
        self.ranks = _ranks(self.ours, {pair.ours for pair in pairs})
        self.their_ranks = _ranks(self.theirs, {pair.theirs for pair in pairs})
        their_calls = {pair.ours: self._corresponding_calls(pair) for pair in pairs}
        for key in self.ours.order:
            name, _, number = key.rpartition("#")
            if name not in by_name:
                continue
            pair, their_key = by_name[name], their_calls[name].get(key)
            if their_key is None:
                note = "called more often than in the PyTorch model"
                yield Entry(*pair, int(number), note=note)
                continue
            self.calls[key] = their_key
            gradients = self._parameters(getters.get(name, {})) if number == "0" else {}
            has_paired_parts = any(other.ours.startswith(f"{name}.") for other in pairs)
            yield self._entry(pair, int(number), (key, their_key), gradients, has_paired_parts)

    def in_our_order(self, entries: Iterable[Entry]) -> "PairedRuns | None":
        """Return the runs with features of the other model in our order where only one model
        rotates neighbouring ones, or joins queries, keys and values by head; None if none does."""
        every, rows = dict[str, np.ndarray](), dict[str, np.ndarray]()
        reordered = set[str]()
        for entry in entries:
            ours, orders = f"{entry.ours}#{entry.call}", dict[str, np.ndarray]()
            theirs = self.calls[ours] if difference.differs(entry.output) else ""
            for name in ("output", "input") if theirs else ():
                a, b = self.ours.get(f"{ours}/{name}"), self.theirs.get(f"{theirs}/{name}")
                if a is not None and b is not None and (order := self._features(a, b)) is not None:
                    orders[f"{theirs}/{name}"] = orders[f"{theirs}/{name} gradient"] = order
            if f"{theirs}/output" in orders:
                reordered.add(ours)
                every |= orders
                rows[entry.theirs] = orders[f"{theirs}/output"]
        if not reordered:
            return None

        def in_order(side: Any) -> Any:
            arrays = {n: x[..., every[n]] if n in every else x for n, x in side.arrays.items()}
            parameters = dict(side.parameters)
            for name, gradient in parameters.items():
                order = rows.get(name.rpartition(".")[0])
                if order is not None and gradient.shape[:1] == order.shape:
                    parameters[name] = gradient[order]
            return dataclasses.replace(side, arrays=arrays, parameters=parameters)

        runs = {dtype: (one, in_order(side)) for dtype, (one, side) in self.runs.items()}
        other = PairedRuns(runs, self.native_dtype, self.widest, self.positions)
        other.reordered = reordered
        return other

    def _features(self, ours: np.ndarray, theirs: np.ndarray) -> np.ndarray | None:
        """Return where in their features each of ours is, if one side has another order."""
        order, count = axes(ours, theirs), theirs.shape[-1] if theirs.ndim else 1
        if order is None:
            return None
        both = as_theirs(ours, order, theirs.shape), theirs
        ours, theirs = (self._compared(x).reshape(-1, count) for x in both)
        off = difference.difference(ours, theirs)
        furthest = off.where[0] if off.where else 0
        rows = slice(furthest, furthest + 1)  # it refuses nearly all orders by itself

        def fits(index: np.ndarray, rows: slice) -> bool:
            there = difference.difference(ours[rows], theirs[rows, index])
            return there.max_abs < _NEARER * off.max_abs

        orders = [layouts.rotary(count, size) for size in range(4, count + 1, 2)]
        every = itertools.chain(*orders, layouts.joined(count))
        indices = (each.indices(count) for each in every)
        return next((i for i in indices if fits(i, rows) and fits(i, slice(None))), None)

    def only_added(self, entry: Entry) -> bool:
        """Return True if the other module returns the array that is added at a point, as rows of
        positions: the sum is none of its outputs."""
        call = f"{entry.ours}#{entry.call}"
        if f"{call}/added" not in self.ours.arrays or not difference.differs(entry.output):
            return False
        arrays = {}
        for dtype, (one, other) in self.runs.items():
            added, total = (one.arrays[f"{call}/{name}"] for name in ("added", "output"))
            theirs = other.get(f"{self.calls[call]}/output")
            arrays[dtype] = np.broadcast_to(added, total.shape), theirs
        measured = self._measure(arrays)
        return measured is not None and measured.agrees

    def _find_narrow(self, side: Any, names: Mapping[str, str]) -> None:
        """Find what computes below float64 in one of the models; ``names`` are ours by its own."""
        narrow: dict[str, str] = {}
        # A paired module's parameter has a counterpart, also if it is not trained
        compared = {name for name in side.sizes if name.rpartition(".")[0] in names}
        for module, dtype in _narrow(side).items():
            if module in compared:
                continue
            owner = _owner(module, names)
            for each in (narrow, self.narrow):
                each[owner] = min(dtype, each.get(owner, dtype), key=itemsize)
        self.in_16_bits.append({owner for owner, dtype in narrow.items() if "16" in dtype})
        known = side.narrow is not None
        constants = (_owner(name, names) for name in side.rounded if name not in compared)
        self.rounded |= {*constants} if known else {*narrow}

    def lower(self, module: str) -> str:
        """Return the model, Flax or PyTorch, in which only a module computes in 16 bits itself."""
        sides = [module in names for names in self.in_16_bits]
        around = any(each.startswith(f"{module}.") for names in self.in_16_bits for each in names)
        # Code before a point may be that of any module
        of_any = f"{module}#0" in self.ours.points and "" in self.in_16_bits[0]
        if len({*sides}) < 2 or around or of_any or self.native_dtype != "float32":
            return ""
        return "PyTorch" if sides[0] else "Flax"

    def outside_in_16_bits(
        self, entries: Iterable[Entry], results: Mapping[str, Measurement]
    ) -> str:
        """Return the words for code of no paired module that computes in 16 bits, if its effect
        shows in float32 and the other model has no such code at all; "" otherwise."""
        alone = [side for side in self.in_16_bits if side]
        if len(alone) != 1 or "" not in alone[0] or self.native_dtype != "float32":
            return ""
        model = "PyTorch" if self.in_16_bits[0] else "Flax"
        reached = [(f"the input of {each.ours}", each.input, each.output) for each in entries]
        reached += [("the result", each, None) for each in results.values()]
        first = (each for each in reached if any(map(shows, each[1:])))
        place, before, _ = next(first, ("", None, None))
        if before is None or not shows(before):
            return ""
        return (
            f"code outside of the paired modules computes in {self.narrow['']} in the {model} model"
            f" only, and {place} is the first that differs, by {before.narrow.max_abs:.3g} in"
            " float32"
        )

    def _corresponding_calls(self, pair: Pair) -> dict[str, str]:
        """Return the PyTorch model's call for each call of the Flax module: in order, or after the
        same modules if one side calls it more often, as a dropout for each residual; unless the
        shapes or numbers of another fit, as if one table embeds source and target in either order.
        """
        ours, free = (
            sorted((key for key in order if key.rpartition("#")[0] == name), key=_number)
            for order, name in ((self.ours.order, pair.ours), (self.theirs.order, pair.theirs))
        )
        calls, as_often = {}, len(ours) == len(free)

        def off(key: str, call: str) -> float:
            if as_often:
                return abs(_number(key) - _number(call))
            return abs(self.ranks[key] - self.their_ranks[call])

        for key in ours[: len(free)]:
            in_order = min(free, key=partial(off, key))
            calls[key] = in_order
            if len(free) > 1:
                nearest = min(free, key=lambda call: self._distance(key, call))
                if self._distance(key, nearest) < _NEARER * self._distance(key, in_order):
                    calls[key] = nearest
            free.remove(calls[key])
        return calls

    def _distance(self, ours: str, theirs: str) -> float:
        """Return the largest difference of two calls' inputs; of their outputs if they take ids."""
        for kind in ("input", "output"):
            a, b = self.ours.get(f"{ours}/{kind}"), self.theirs.get(f"{theirs}/{kind}")
            if a is not None and b is not None:
                order = axes(a, b)
                if order is None:
                    return math.inf
                return difference.difference(as_theirs(a, order, b.shape), b).max_abs
        return math.inf

    def _entry(
        self,
        pair: Pair,
        number: int,
        calls: tuple[str, str],
        gradients: dict[str, Measurement],
        has_paired_parts: bool,
    ) -> Entry:
        ours, theirs = calls
        inputs = [(f"{ours}/{a}", f"{theirs}/{b}") for a, b in self.inputs(ours, theirs)]
        sides = self.ours, self.theirs
        further = (
            side.get(f"{call}/{name} gradient")
            for side, call, paired in zip(sides, calls, zip(*inputs, strict=True), strict=True)
            for name in _further_inputs(side.arrays, call)
            if f"{call}/{name}" not in paired
        )
        # An attention may take projected keys and values, that on the other side are its own part
        divided = any(gradient is not None and gradient.any() for gradient in further)
        outputs = (f"{ours}/output", f"{theirs}/output")
        into = self._worst(inputs)
        takes_floats = ours not in self.ours.points and (
            f"{ours}/input" in self.ours.arrays or f"{theirs}/input" in self.theirs.arrays
        )
        if into is None and takes_floats and not has_paired_parts:
            # For example a position table that adds its rows to x on one side and returns them on
            # the other
            return Entry(*pair, number, parameters=gradients, note=_ANOTHER_INPUT)
        input_gradients = [(f"{a} gradient", f"{b} gradient") for a, b in inputs]
        a, b, note, layout = self.ours.get(outputs[0]), self.theirs.get(outputs[1]), "", ""
        if a is not None and b is not None:
            order = axes(a, b)
            if order is None:
                note = f"outputs {a.shape} and {b.shape} are not compared"
            elif a.ndim != b.ndim:
                layout = f"of shape {a.shape}, there {b.shape}"
            elif order != tuple(range(a.ndim)):
                layout = f"with axes in the order {order} there"
            if ours in self.reordered:
                layout = f"{layout}{', ' * bool(layout)}in another order of features"
        exact = [*map(_masks, sides, calls)]
        return Entry(
            *pair,
            number,
            mask=difference.mask_difference(*exact),
            ids=difference.ids_difference(*exact),
            input=into,
            output=self._worst([outputs]),
            input_gradient=None if divided else self._worst(input_gradients),
            output_gradient=self._worst([(f"{outputs[0]} gradient", f"{outputs[1]} gradient")]),
            parameters=gradients,
            note=note,
            layout=layout,
        )

    def _parameters(
        self, getters: Mapping[str, tuple[Callable[[Any], list[np.ndarray]], str]]
    ) -> dict[str, Measurement]:
        """Return the measurement of each parameter, in the layout in which it is nearest."""
        measured = {}
        for leaf, (in_layouts, theirs) in getters.items():
            arrays = (
                {
                    dtype: (in_layouts(ours)[i], of_torch.parameters.get(theirs))
                    for dtype, (ours, of_torch) in self.runs.items()
                }
                for i in range(len(in_layouts(self.ours)))
            )
            each = [m for m in map(self._measure, arrays) if m is not None]
            if each:
                measured[leaf] = min(each, key=attrgetter("times"))
        return measured

    def inputs(self, ours: str, theirs: str) -> list[tuple[str, str]]:
        """Pair inputs: the first with the first, others with the first free one of their shape.

        Of arrays with heads and without, one may be projected already: they are paired if alike.
        """
        pairs = [("input", "input")]
        our_arrays, their_arrays = self.ours.arrays, self.theirs.arrays
        free = list(_further_inputs(their_arrays, theirs))
        for name in _further_inputs(our_arrays, ours):
            array = our_arrays[f"{ours}/{name}"]
            fitting = (b for b in free if _alike(array, their_arrays[f"{theirs}/{b}"]))
            if (other := next(fitting, None)) is not None:
                free.remove(other)
                pairs.append((name, other))
        return pairs

    def _worst(self, names: Sequence[tuple[str, str]]) -> Measurement | None:
        """Return the measurement of the pair of arrays that is furthest apart."""
        runs = self.runs.items()
        arrays = ({d: (one.get(a), other.get(b)) for d, (one, other) in runs} for a, b in names)
        present = (m for m in map(self._measure, arrays) if m is not None)
        return max(present, key=attrgetter("times"), default=None)

    def _measure(self, arrays: Mapping[str, tuple[Any, Any]]) -> Measurement | None:
        """Return the measurement of an array, by dtype; None if it is missing or shapes differ."""
        ours, theirs = arrays["float64"]
        order = None if ours is None or theirs is None else axes(ours, theirs)
        return None if order is None else self.measurement(arrays, order, self.native_dtype)

    def measurement(
        self, arrays: Mapping[str, tuple[Any, Any]], order: Sequence[int], native_dtype: str
    ) -> Measurement:
        """Return the measurement of an array, by dtype, with our axes in that order."""
        both = {
            dtype: [self._compared(x) for x in (as_theirs(ours, order, theirs.shape), theirs)]
            for dtype, (ours, theirs) in arrays.items()
        }
        return measured(both, self.widest, native_dtype, narrowest=self._narrowest)

    def _compared(self, array: np.ndarray) -> np.ndarray:
        """Return an array with zeros at the positions that are not compared."""
        if self.positions is None or array.shape[: self.positions.ndim] != self.positions.shape:
            return array
        ones = [1] * (array.ndim - self.positions.ndim)
        return np.where(self.positions.reshape(*self.positions.shape, *ones), array, 0)


def measured(
    both: Mapping[str, Sequence[np.ndarray]],
    widest: str,
    native_dtype: str,
    floor: float = 0.0,
    narrowest: Sequence[str] | None = None,
) -> Measurement:
    """Return the measurement of an array of both models, by dtype. ``floor`` is a difference in
    ``widest`` that rounding explains in any case, ``narrowest`` that of ``rounding_floor``.
    """
    sides = list(zip(both["float32"], both["float64"], strict=True))

    def in_dtype(
        key: str, dtype: str, least: float = 0.0, narrowest: Sequence[str] | None = None
    ) -> tuple[difference.Difference, float]:
        ours, theirs = both[key]
        measured = difference.difference(ours, theirs, dtype)
        allowed = max(least, difference.rounding_floor(sides, dtype, narrowest))
        return measured, difference.times_floor(measured, allowed)

    errors = (
        difference.rounding_error(narrow, wide)
        for narrow, wide in zip(both[native_dtype], both["float64"], strict=True)
    )
    wide = in_dtype("float64", widest, floor, narrowest)
    return Measurement(*wide, *in_dtype(native_dtype, native_dtype), *errors)


def without_other_inputs(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Return entries without the inputs that differ before any output does: their caller does
    another part of the work on each side, as an encoder that adds positions itself.
    """
    agree = True
    for entry in entries:
        agree &= not difference.differs(entry.output)
        other = agree and entry.output is not None and difference.differs(entry.input)
        yield dataclasses.replace(entry, input=None, input_gradient=None) if other else entry


def shows(measurement: Measurement | None) -> bool:
    """Return True if a difference in float32 is too large for rounding in float32."""
    if measurement is None:
        return False
    return measurement.narrow.max_relative > FAULT * difference.epsilon("float32")


def _narrow(recording: Any) -> dict[str, str]:
    """Return the dtypes below float64 of modules; as arrays show, if the run was left as it is."""
    if recording.narrow is not None:
        return recording.narrow
    return {
        name.rpartition("#")[0]: array.dtype.name
        for name, array in recording.arrays.items()
        if array.dtype != np.float64
    }


def _owner(module: str, names: Mapping[str, str]) -> str:
    """Return ``names[name]`` of the innermost named module around one, or "" for the model's."""
    around = [name for name in names if f"{module}.".startswith(f"{name}.")]
    return names[max(around, key=len)] if around else ""


def _ranks(side: Any, paired: Collection[str]) -> dict[str, int]:
    """Return the number of paired modules that have been called before each call."""
    called, ranks = set[str](), {}
    for key in side.order:
        ranks[key] = len(called)
        called |= {key.rpartition("#")[0]} & {*paired}
    return ranks


def _masks(side: Any, call: str) -> list[np.ndarray]:
    """Return the arrays that may be masks or ids of a call."""
    further = (side.arrays[f"{call}/{name}"] for name in _further_inputs(side.arrays, call))
    return [*side.masks.get(call, ()), *further]


def _further_inputs(arrays: Mapping[str, np.ndarray], call: str) -> Iterator[str]:
    return itertools.takewhile(
        lambda name: f"{call}/{name}" in arrays, (f"input {i}" for i in itertools.count(1))
    )


def _alike(ours: np.ndarray, theirs: np.ndarray) -> bool:
    """Return True for inputs of one shape; of which one has axes of the other as one, if they have
    much in common."""
    order = axes(ours, theirs)
    if order is None or ours.ndim == theirs.ndim:
        return order is not None
    return difference.difference(as_theirs(ours, order, theirs.shape), theirs).cosine > 0.5


def as_theirs(ours: np.ndarray, order: Sequence[int], shape: Sequence[int]) -> np.ndarray:
    """Return our array with its axes in their order, and in their shape."""
    return ours.transpose(order).reshape(shape)


def as_ours(theirs: np.ndarray, order: Sequence[int], shape: Sequence[int]) -> np.ndarray:
    """Return their array with its axes in our order, and in our shape."""
    return theirs.reshape([shape[i] for i in order]).transpose(np.argsort(order))


def axes(
    ours: np.ndarray, theirs: np.ndarray, usual: Mapping[int, tuple[int, ...]] | None = None
) -> tuple[int, ...] | None:
    """Return the order of our axes that is theirs: the same, the length before the batch, the
    channels after the batch, or if none of these fits the heads before the length. One side may
    have axes of the other as one, such as heads or the two of an image. None if their shape is
    none of these.

    If several have their shape, only the numbers tell: another than the same must be much nearer.
    If these do not tell either, the order is the usual one of so many axes.
    """
    same = tuple(range(ours.ndim))
    further = [(1, 0, *same[2:]), (0, same[-1], *same[1:-1])] if ours.ndim >= 2 else []
    orders = dict.fromkeys([same, *further])
    fits = operator.eq if ours.ndim == theirs.ndim else same_but_merged
    fitting = [order for order in orders if fits(ours.transpose(order).shape, theirs.shape)]
    if not fitting and ours.ndim == 4 and fits(ours.swapaxes(1, 2).shape, theirs.shape):
        return 0, 2, 1, 3
    if len(fitting) < 2:
        return fitting[0] if fitting else None

    def distance(order: tuple[int, ...]) -> float:
        return difference.difference(as_theirs(ours, order, theirs.shape), theirs).max_abs

    nearest, other = min(fitting, key=distance), (usual or {}).get(ours.ndim)
    if distance(nearest) < _NEARER * distance(fitting[0]):
        return nearest
    undecided = other in fitting and distance(fitting[0]) >= _NEARER * distance(other)
    return other if undecided else fitting[0]


def _number(call: str) -> int:
    return int(call.rpartition("#")[2])
