"""Each module's own difference: further runs of the Flax model, in which modules go on with the
other model's arrays instead of their own."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jax_transformer.parity import difference, measuring
from jax_transformer.parity.difference import FAULT, Entry, Measurement, differs
from jax_transformer.parity.measuring import PairedRuns, axes, shows
from jax_transformer.parity.recording import Recording, Replacements
from jax_transformer.parity.report import Report

_OUTPUT = [("output", "output")]
_WORSE = 1000
"""Only numbers that are further off by this factor tell that an array is not what follows takes."""
_OTHERS = "code outside makes up for its output: that is not compared"
Runner = Callable[[Replacements, str], Recording]
"""Records the Flax model with these replacements in a dtype, without gradients."""


class _Theirs(NamedTuple):
    """An array of the other model that replaces one of ours."""

    name: str
    """The name of ours; "" for the result."""
    array: np.ndarray
    order: tuple[int, ...]
    """The order of our axes that is theirs."""
    shape: tuple[int, ...]
    """The shape of ours."""

    def ours(self, run: Recording) -> np.ndarray | None:
        return run.get(self.name) if self.name else run.result

    def as_ours(self) -> np.ndarray:
        return measuring.as_ours(self.array, self.order, self.shape)


class Isolation:
    """Runs of the Flax model in which every paired module returns the other model's output.

    A module's input is replaced only if it differs and what the module makes of it differs too:
    a module may take an input of another kind, as an encoder that adds positions itself.
    """

    def __init__(self, report: Report, compared: PairedRuns, run: Runner):
        self.report, self.compared, self.run = report, compared, run
        self.entries = {_key(entry): entry for entry in report.entries if entry.output is not None}
        agreeing = [key for key, entry in self.entries.items() if not differs(entry.output)]
        self.usual: dict[int, tuple[int, ...]] = {}
        orders = [each.order for key in agreeing for each in self._theirs(key, _OUTPUT)]
        for order, _ in reversed(Counter(orders).most_common()):
            self.usual[len(order)] = order
        ours, theirs = compared.ours.arrays, compared.theirs.arrays
        results = {name: theirs[name] for name in theirs if name.startswith("#0/") and name in ours}
        self.results = [
            _Theirs(name, x, tuple(range(x.ndim)), x.shape)
            for name, x in {"": compared.theirs.result, **results}.items()
        ]
        self.decisions = 0
        self.others: set[str] = set()
        """Calls that do another part of the work than their counterparts."""
        self.outputs = {key: self._theirs(key, _OUTPUT) for key in self.entries}
        self.inputs = {
            key: self._theirs(key, compared.inputs(key, compared.calls[key]))
            for key in self.entries
        }

    def _theirs(self, key: str, names: Sequence[tuple[str, str]]) -> list[_Theirs]:
        arrays = []
        for name, other in names:
            a = self.compared.ours.get(f"{key}/{name}")
            b = self.compared.theirs.get(f"{self.compared.calls[key]}/{other}")
            if a is not None and b is not None and (order := axes(a, b, self.usual)) is not None:
                arrays.append(_Theirs(f"{key}/{name}", b, order, a.shape))
        return arrays

    def report_of_faults(self) -> Report:
        """Return the report with the own difference of each module."""
        self._leave_out_others()
        replaced: set[str] = set()
        while True:
            outputs, inputs, result = self._measured(replaced)
            differing = [key for key, each in inputs.items() if each.times >= FAULT]
            wrong = {key for key, each in outputs.items() if each.times >= FAULT}
            wrong |= {self._around(key)[0] for key in differing}
            new = {key for key in differing if key in wrong} - replaced
            if not new:
                break
            # The outermost ones first: then those in them may be right
            replaced |= {key for key in new if not new.intersection(self._around(key))}
        own = {key: [(each, "")] for key, each in outputs.items()} | {"": [(result, "")]}
        for key, each in inputs.items():
            if key in replaced or each.times < FAULT:
                own.setdefault(self._around(key)[0], []).append((each, self.entries[key].ours))

        def share(each: tuple[Measurement, str]) -> tuple[bool, float]:
            return differs(each[0]), each[0].times / each[0].limit

        return self._report({key: max(each, key=share) for key, each in own.items()})

    def _leave_out_others(self) -> None:
        """Leave out calls whose output differs although what follows agrees, and would not with the
        other model's output: code outside does the rest, as a scale of embeddings."""

        def contradicted(own: Collection[str] = ()) -> set[str]:
            _, inputs, result = self._measured((), own)
            known = {key: (self.entries[key].input, each) for key, each in inputs.items()}
            known[""] = self.report.result, result
            return {
                key
                for key, (plain, each) in known.items()
                if plain and differs(each) and _WORSE * plain.wide.max_abs < each.wide.max_abs
            }

        if not (before := contradicted()):
            return
        order = [*self.entries, ""]
        first = order[: max(map(order.index, before))]
        self.others = {key for key in first if differs(self.entries[key].output)}
        left = contradicted(self.others)
        for key in [*self.others]:
            if left == before or contradicted(self.others - {key}) <= left:
                self.others.discard(key)
        for key in self.others:
            del self.outputs[key], self.inputs[key], self.entries[key]

    def _measured(
        self, replaced: Collection[str], own: Collection[str] = ()
    ) -> tuple[dict[str, Measurement], dict[str, Measurement], Measurement]:
        arrays = {
            x.name: (key not in own, x.as_ours()) for key, g in self.outputs.items() for x in g
        }
        for key, group in self.inputs.items():  # all, so that nothing is compiled anew
            arrays |= {each.name: (key in replaced, each.as_ours()) for each in group}
        runs = {"float64": self.run(arrays, self.compared.widest)}
        if self.decisions < 3 and self._decide_axes(runs["float64"]):
            self.decisions += 1
            return self._measured(replaced, own)
        runs["float32"] = self.run(arrays, "float32")

        def worst(group: Sequence[_Theirs], modules: Collection[str]) -> Measurement:
            all_ = (self._measure(runs, each, modules) for each in group)
            return max(all_, key=lambda measured: measured.times)

        outputs = {
            key: worst(group, (key.rpartition("#")[0], "")) for key, group in self.outputs.items()
        }
        # Only first outputs are replaced: others, and what is computed outside of modules, may go
        # into any input
        inputs = {key: worst(g, self.compared.narrow) for key, g in self.inputs.items() if g}
        return outputs, inputs, worst(self.results, [""])

    def _decide_axes(self, run: Recording) -> bool:
        """Decide the orders of axes anew on arrays that no fault before them has changed; return
        True if one is another than before."""
        changed = False
        for group in (self.results, *self.outputs.values(), *self.inputs.values()):
            for i, each in enumerate(group):
                ours = each.ours(run)
                order = None if ours is None else axes(ours, each.array, self.usual)
                if order is not None and order != each.order:
                    group[i], changed = each._replace(order=order), True
        return changed

    def _measure(
        self, runs: Mapping[str, Recording], theirs: _Theirs, modules: Collection[str]
    ) -> Measurement:
        """Return a measurement with the limit for what these modules compute."""
        with np.errstate(over="ignore"):
            arrays = {
                dtype: (theirs.ours(run), theirs.array.astype(dtype)) for dtype, run in runs.items()
            }
            measured = self.compared.measurement(arrays, theirs.order, "float32")
        if self.compared.rounded & self.compared.narrow.keys() & {*modules}:
            positions = max(theirs.array.shape[:-1], default=1)
            return dataclasses.replace(measured, limit=difference.IN_FLOAT32 * positions)
        return measured

    def _around(self, key: str) -> list[str]:
        """Return the measured calls around a call, the innermost first; the model's is ""."""
        callers, around = self.compared.ours.callers, []
        while key:
            key = callers.get(key, "")
            if key in self.entries or not key:
                around.append(key)
        return around

    def _report(self, own: Mapping[str, tuple[Measurement, str]]) -> Report:
        """Return the report with these own differences. If one is float32's, in a module that
        computes in it, all that the module reaches may differ as much.
        """
        report, notes = self.report, self.report.notes
        entries, results = list(report.entries), report.results
        rounded = {key: x for key, (x, _) in own.items() if FAULT <= x.times < x.limit}
        if rounded:
            limit = difference.AFTER_FLOAT32 * max(each.limit for each in rounded.values())
            loosened = (difference.loosened(each, limit) for each in entries)
            entries = [*measuring.without_other_inputs(loosened)]
            results = difference.loosened(results, limit)
            names = ", ".join(sorted({key.rpartition("#")[0] or "the model" for key in rounded}))
            notes += (f"a constant of {names} is rounded to float32 in one of the models only",)
        for i, entry in enumerate(entries):
            if _key(entry) in self.others:
                entries[i] = Entry(
                    entry.ours, entry.theirs, entry.call, parameters=entry.parameters, note=_OTHERS
                )
                continue
            measured, place = own.get(_key(entry), (None, ""))
            lower = self.compared.lower(entry.ours) if shows(measured) else ""
            lower = entry.lower or (lower if lower == "Flax" and not differs(measured) else "")
            entries[i] = dataclasses.replace(entry, own=measured, own_place=place, lower=lower)
        return dataclasses.replace(
            report, entries=tuple(entries), results=results, own_result=own[""], notes=notes
        )


def _key(entry: Entry) -> str:
    return f"{entry.ours}#{entry.call}"
