"""What is measured of two models' recordings: the arrays of each pair of calls, set side by side."""

import itertools
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jax_transformer.errors import ConfigError
from jax_transformer.parity import difference
from jax_transformer.parity.entries import Entry, Measured
from jax_transformer.parity.pairs import Pair
from jax_transformer.parity.parameters import Parameters
from jax_transformer.parity.recording import Recording


class Measuring:
    """Runs of both models by dtype, and what is measured of them."""

    def __init__(
        self, runs: Mapping[str, tuple[Recording, Any]], native: str, split: Collection[str]
    ):
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
                yield Entry(
                    name,
                    by_name[name].theirs,
                    int(number),
                    note="called more often here than there",
                )
                continue
            own = (
                {leaf: self._measured(*get) for leaf, get in parameters.get(name, {}).items()}
                if number == "0"
                else {}
            )
            parameters_found = {
                leaf: measured for leaf, measured in own.items() if measured is not None
            }
            inputs = self._inputs(key, other)
            given = self._worst([(f"{key}/{a}", f"{other}/{b}") for a, b in inputs])
            if (
                given is None
                and self._takes_numbers(key, other)
                and not any(pair.ours.startswith(f"{name}.") for pair in found)
            ):
                # As a table of positions whose rows one side adds to what it is given, and the other gives alone
                note = "what goes in is of another kind here than there: what comes out is not compared"
                yield Entry(
                    name, by_name[name].theirs, int(number), parameters=parameters_found, note=note
                )
                continue
            yield Entry(
                name,
                by_name[name].theirs,
                int(number),
                input=given,
                output=self._worst([(f"{key}/output", f"{other}/output")]),
                input_gradient=None
                if name in self.split
                else self._worst(
                    [(f"{key}/{a} gradient", f"{other}/{b} gradient") for a, b in inputs]
                ),
                output_gradient=self._worst(
                    [(f"{key}/output gradient", f"{other}/output gradient")]
                ),
                parameters=parameters_found,
                note=self._note(f"{key}/output", f"{other}/output"),
            )

    def _takes_numbers(self, ours: str, theirs: str) -> bool:
        """Whether either call took floating-point numbers, and not ids alone."""
        return any(
            f"{call}/input" in run.arrays
            for run, call in zip(self.runs["float64"], (ours, theirs), strict=True)
        )

    def _inputs(self, ours: str, theirs: str) -> list[tuple[str, str]]:
        """Which input is which: the first of either call, then of the others the first with the first of its shape, and so on."""
        pairs = [("input", "input")]
        mine, other = (run.arrays for run in self.runs["float64"])
        free = list(_further(other, theirs))
        for name in _further(mine, ours):
            meant = next(
                (
                    b
                    for b in free
                    if _aligned(mine[f"{ours}/{name}"], other[f"{theirs}/{b}"]) is not None
                ),
                None,
            )
            if meant is not None:
                free.remove(meant)
                pairs.append((name, meant))
        return pairs

    def _worst(self, places: Sequence[tuple[str, str]]) -> Measured | None:
        """Of the arrays at these places, what is measured of the one that is furthest apart."""
        found = [
            self._measured(operator.methodcaller("at", a), operator.methodcaller("at", b))
            for a, b in places
        ]
        return max(
            (measured for measured in found if measured is not None),
            key=lambda measured: measured.times,
            default=None,
        )

    def _note(self, ours: str, theirs: str) -> str:
        a, b = (
            run.arrays.get(place)
            for run, place in zip(self.runs["float64"], (ours, theirs), strict=True)
        )
        return (
            ""
            if a is None or b is None or _aligned(a, b) is not None
            else f"outputs of shapes {a.shape} and {b.shape} are not compared"
        )

    def _measured(
        self, get_ours: Callable[[Any], Any], get_theirs: Callable[[Any], Any]
    ) -> Measured | None:
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
            found = difference.difference(
                np.swapaxes(ours, 0, 1) if swapped else ours, theirs, kind
            )
            return found, difference.times(found, difference.floor(sides, kind))

        errors = (
            difference.error(narrow, wide)
            for narrow, wide in zip(arrays[self.native], arrays["float64"], strict=True)
        )
        return Measured(*measured("float64"), *measured(self.native), *errors)


def _further(arrays: Mapping[str, np.ndarray], call: str) -> Iterator[str]:
    return itertools.takewhile(
        lambda place: f"{call}/{place}" in arrays, (f"input {i}" for i in itertools.count(1))
    )


def _aligned(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray | None:
    """Ours in the shape of theirs: some PyTorch modules put the length before the batch. None where that does not make them one shape."""
    if ours.ndim < 2 or np.swapaxes(ours, 0, 1).shape != theirs.shape:
        return ours if ours.shape == theirs.shape else None
    swapped = np.swapaxes(ours, 0, 1)
    # As many rows as places: only the numbers tell which order it is
    return ours if ours.shape == theirs.shape and not _nearer(swapped, ours, theirs) else swapped


def _nearer(one: np.ndarray, other: np.ndarray, theirs: np.ndarray) -> bool:
    return (
        difference.difference(one, theirs).max_abs
        < 1e-3 * difference.difference(other, theirs).max_abs
    )
