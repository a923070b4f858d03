"""Each module's own difference: further runs of the Flax model, in which modules go on with the
other model's arrays instead of their own."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jax_transformer.parity.difference import (
    AFTER_FLOAT32,
    FAULT,
    IN_FLOAT32,
    Entry,
    Measurement,
    differs,
)
from jax_transformer.parity.measuring import PairedRuns, axes, measurement
from jax_transformer.parity.recording import Recording
from jax_transformer.parity.report import Report

Runner = Callable[[Mapping[str, np.ndarray], str], Recording]
"""Records the Flax model with these replacements in a dtype, without gradients."""


class _Theirs(NamedTuple):
    """An array of the other model that replaces one of ours."""

    array: np.ndarray
    order: tuple[int, ...]
    """The order of our axes that is theirs."""

    def as_ours(self) -> np.ndarray:
        return self.array.transpose(np.argsort(self.order))


class Isolation:
    """Runs of the Flax model in which every paired module returns the other model's output.

    A module's input is replaced only if it differs and what the module makes of it differs too:
    a module may take an input of another kind, as an encoder that adds positions itself.
    """

    def __init__(self, report: Report, compared: PairedRuns, run: Runner):
        self.report, self.compared, self.run = report, compared, run
        self.entries = {_key(entry): entry for entry in report.entries if entry.output is not None}
        self.outputs = {key: self._theirs(key, [("output", "output")]) for key in self.entries}
        self.inputs = {
            key: self._theirs(key, compared.inputs(key, compared.calls[key]))
            for key in self.entries
        }

    def _theirs(self, key: str, names: Sequence[tuple[str, str]]) -> dict[str, _Theirs]:
        ours, theirs = self.compared.ours.arrays, self.compared.theirs.arrays
        found = {}
        for name, other in names:
            a = ours.get(f"{key}/{name}")
            b = theirs.get(f"{self.compared.calls[key]}/{other}")
            if a is not None and b is not None and (order := axes(a, b)) is not None:
                found[f"{key}/{name}"] = _Theirs(b, order)
        return found

    def report_of_faults(self) -> Report:
        """Return the report with the own difference of each module."""
        replaced: set[str] = set()
        while True:
            outputs, inputs, result = self._measured(replaced)
            differing = [key for key, each in inputs.items() if differs(each)]
            wrong = {key for key, each in outputs.items() if differs(each)}
            wrong |= {self._caller(key) for key in differing}
            new = {key for key in differing if key in wrong} - replaced
            if not new:
                break
            # The outermost ones first: then those in them may be right
            replaced |= {key for key in new if not new.intersection(self._around(key))}
        own = {key: [(each, "")] for key, each in outputs.items()} | {"": [(result, "")]}
        for key, each in inputs.items():
            if key in replaced or not differs(each):
                own[self._caller(key)].append((each, self.entries[key].ours))
        return self._report({key: max(each, key=_share) for key, each in own.items()})

    def _measured(
        self, replaced: Collection[str]
    ) -> tuple[dict[str, Measurement], dict[str, Measurement], Measurement]:
        """Return the measurements of outputs, of inputs, and of the result."""
        theirs = {name: each for key in self.outputs for name, each in self.outputs[key].items()}
        for key in replaced:
            theirs |= self.inputs[key]
        arrays = {name: each.as_ours() for name, each in theirs.items()}
        runs = {dtype: self.run(arrays, dtype) for dtype in ("float64", "float32")}

        def worst(key: str, which: Mapping[str, _Theirs], owner: str) -> Measurement | None:
            all_ = [
                self._measure({d: run.get(name) for d, run in runs.items()}, each, key, owner)
                for name, each in which.items()
            ]
            return max(all_, key=lambda each: each.times, default=None)

        outputs = {key: worst(key, each, key) for key, each in self.outputs.items()}
        inputs = {key: worst(key, each, self._caller(key)) for key, each in self.inputs.items()}
        result = self.compared.theirs.result
        assert result is not None
        return (
            {key: each for key, each in outputs.items() if each is not None},
            {key: each for key, each in inputs.items() if each is not None},
            self._measure(
                {dtype: run.result for dtype, run in runs.items()},
                _Theirs(result, tuple(range(result.ndim))),
                "",
                "",
            ),
        )

    def _measure(
        self, ours: Mapping[str, Any], theirs: _Theirs, key: str, owner: str
    ) -> Measurement:
        arrays = {dtype: (x, theirs.array.astype(dtype)) for dtype, x in ours.items()}
        with np.errstate(over="ignore"):
            measured = measurement(arrays, theirs.order, "float32")
        names = {each.rpartition("#")[0] for each in (key, owner)}
        narrow = any(name in self.compared.narrow for name in names)
        return dataclasses.replace(measured, limit=IN_FLOAT32 if narrow else FAULT)

    def _around(self, key: str) -> list[str]:
        """Return the measured calls around a call, the innermost first; the model's is ""."""
        callers, around = self.compared.ours.callers, []
        while key:
            key = callers.get(key, "")
            if key in self.entries or not key:
                around.append(key)
        return around

    def _caller(self, key: str) -> str:
        return self._around(key)[0]

    def _report(self, own: Mapping[str, tuple[Measurement, str]]) -> Report:
        """Return the report with these own differences.

        If one of them is a difference of float32 in a module that computes in it, all that the
        module reaches may differ as much.
        """
        loose = any(FAULT <= each.times < each.limit for each, _ in own.values())

        def loosened(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: loosened(each) for name, each in value.items()}
            is_measured = loose and isinstance(value, Measurement)
            return dataclasses.replace(value, limit=AFTER_FLOAT32) if is_measured else value

        entries = []
        for entry in self.report.entries:
            fields = {f.name: loosened(getattr(entry, f.name)) for f in dataclasses.fields(entry)}
            measured, place = own.get(_key(entry), (None, ""))
            entries.append(Entry(**fields | {"own": measured, "own_place": place}))
        return dataclasses.replace(
            self.report,
            entries=tuple(entries),
            result=loosened(self.report.result),
            own_result=own[""][0],
        )


def _key(entry: Entry) -> str:
    return f"{entry.ours}#{entry.call}"


def _share(each: tuple[Measurement, str]) -> tuple[bool, float]:
    return differs(each[0]), each[0].times / each[0].limit
