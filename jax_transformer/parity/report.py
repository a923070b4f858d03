"""What a comparison found: module by module, in the order in which the model computes."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jax_transformer.errors import Refusal
from jax_transformer.parity.entries import Entry, Measured


class DifferentError(Refusal):
    """Two models that should be one are not (exit code 1)."""

    exit_code = 1


@dataclass(frozen=True)
class Report:
    """The whole comparison. Its text is :meth:`lines`; as JSON, :meth:`to_json`; as a page, ``jax_transformer.parity.page.render``."""

    entries: tuple[Entry, ...]
    """In the order in which the calls ended, inner modules before those around them."""
    result: Measured
    """What the models gave."""
    dtype: str
    about: dict[str, Any]
    """Versions, shapes and seeds."""
    notes: tuple[str, ...] = ()

    @property
    def first_fault(self) -> Entry | None:
        """The first module whose inputs agree and whose output does not: the innermost of those that begin there.

        None where no module that is paired is the first.
        """
        return next(
            (entry for entry in self.entries if entry.faulty and not self._begun_before(entry)),
            None,
        )

    def _begun_before(self, entry: Entry) -> bool:
        """Whether what goes into a module around it differs because of what was before: a part may get some of that by a way that is not its input.

        Where nothing before differs, the module around it takes something else by nature, as an encoder that adds positions itself. Of a part whose
        inputs cannot be compared, what was before it has to tell.
        """
        if entry.input is None and self._differs_before(entry):
            return True
        around = (
            e for e in self.entries if entry.ours.startswith(f"{e.ours}.") and e.call == entry.call
        )
        return any(
            e.input is not None and not e.input.agrees and self._differs_before(e) for e in around
        )

    def _differs_before(self, outer: Entry) -> bool:
        """Whether a call that ended before this one began gave something else."""
        for entry in self.entries:
            if entry is outer or (
                entry.ours.startswith(f"{outer.ours}.") and entry.call == outer.call
            ):
                return False
            if entry.output is not None and not entry.output.agrees:
                return True
        return False

    @property
    def first_gradient_fault(self) -> Entry | None:
        """The same backwards, where all outputs agree."""
        return (
            next((entry for entry in reversed(self.entries) if entry.faulty_backward), None)
            if self._same_outputs
            else None
        )

    @property
    def _same_outputs(self) -> bool:
        return self.result.agrees and all(
            entry.output is None or entry.output.agrees for entry in self.entries
        )

    @property
    def agrees(self) -> bool:
        """Whether the results, what every paired module gives, and all gradients do.

        A wrong weight can leave the results as they are: what it changes may be stopped by the next activation, on this batch.
        """
        gradients = [
            m
            for e in self.entries
            for m in (e.input_gradient, e.output_gradient, *e.parameters.values())
            if m is not None
        ]
        return self._same_outputs and all(measured.agrees for measured in gradients)

    def check(self) -> None:
        """Raises DifferentError, one line, unless the models agree."""
        if not self.agrees:
            raise DifferentError(self.summary())

    def summary(self) -> str:
        """One line."""
        if self.agrees:
            return f"the models agree: largest difference {self.result.wide.max_abs:.2g} in float64, {_times(self.result.times)} rounding"
        if not self._same_outputs:
            found = self.first_fault
            if found is not None and found.output is not None:
                results = "; the results agree on this batch" if self.result.agrees else ""
                return f"{found.title}: its input agrees and its output differs, {_described(found.output)}{self._within(found)}{results}"
            what = (
                f"the results differ, {_described(self.result)}"
                if not self.result.agrees
                else "the results agree and what modules give differs"
            )
            if not self.entries:
                return f"{what}, and no module of one is paired with any of the other"
            return f"{what}, but no paired module is the first to: pair more of them"
        found = self.first_gradient_fault
        if found is not None:
            wrong = {"input": found.input_gradient, **found.parameters}
            name, worst = next(
                (name, measured)
                for name, measured in wrong.items()
                if measured is not None and not measured.agrees
            )
            return f"{found.title}: outputs agree, and so does the gradient of its output; that of its {name} differs, {_described(worst)}"
        return "outputs agree and gradients differ, but no paired module is the first to: pair more of them"

    def _within(self, found: Entry) -> str:
        """Where inside a module the difference begins: between two of its parts."""
        inner = [
            entry
            for entry in self.entries
            if entry.ours.startswith(f"{found.ours}.") and entry.call == found.call
        ]
        wrong = next(
            (entry for entry in inner if entry.input is not None and not entry.input.agrees), None
        )
        if wrong is None:
            return "; all its parts that are paired agree" if inner else ""
        before = [
            entry
            for entry in inner[: inner.index(wrong)]
            if entry.output is not None and entry.output.agrees
        ]
        behind = f" behind {before[-1].ours.removeprefix(found.ours)[1:]}" if before else ""
        return f"; in it, the input of {wrong.ours.removeprefix(found.ours)[1:]} is the first that differs{behind}"

    def lines(self) -> Iterator[str]:
        """A table of at most 100 columns, then what it means."""
        yield f"{'':<64}{'float64':>9}{self.dtype:>10}"
        yield f"{'module':<40}{'input':>8}{'output':>8}{'grads':>8}{'× floor':>9}{'max abs':>10}{'× floor':>8}{'ulps':>7}"
        for entry in self.entries:
            yield _row(
                entry,
                "<" if entry is self.first_fault or entry is self.first_gradient_fault else " ",
            )
        yield f"{'result':<48}{_verdict(self.result):>8}{'':>8}{_figures(self.result)}"
        yield from self.notes
        yield self.summary()

    def to_json(self) -> str:
        """Everything, for machines; numbers that JSON has no form of are text."""
        return json.dumps(self.to_data(), indent=1)

    def to_data(self) -> dict[str, Any]:
        places = ("input", "output", "input_gradient", "output_gradient")
        fault = self.first_fault or self.first_gradient_fault
        entries = [
            {
                "ours": e.ours,
                "theirs": e.theirs,
                "call": e.call,
                "faulty": e.faulty,
                "faulty_backward": e.faulty_backward,
                "note": e.note,
            }
            | {"first": e is fault}
            | {
                place: found.to_data()
                for place in places
                if (found := getattr(e, place)) is not None
            }
            | {"parameters": {name: found.to_data() for name, found in e.parameters.items()}}
            for e in self.entries
        ]
        return {
            "agrees": self.agrees,
            "summary": self.summary(),
            "first_fault": fault.title if fault else None,
            "dtype": self.dtype,
            "about": self.about,
            "notes": list(self.notes),
            "result": self.result.to_data(),
            "modules": entries,
        }


def _verdict(found: Measured | None) -> str:
    return "-" if found is None else "agrees" if found.agrees else "DIFFERS"


def _times(value: float) -> str:
    return (
        "0"
        if value == 0
        else f"{value:.1f}×"
        if value < 1000
        else f"{value:.0e}×"
        if math.isfinite(value)
        else "inf"
    )


def _short(value: float) -> str:
    return f"{value:.0f}" if value < 1e5 else f"{value:.0e}"


def _described(found: Measured) -> str:
    wide = found.wide
    at = ", ".join(map(str, wide.where))
    missing = (
        f"; NaN: {wide.nan_ours} here, {wide.nan_theirs} there"
        if wide.nan_ours != wide.nan_theirs
        else ""
    )
    return f"by {wide.max_abs:.3g} in float64, {_times(found.times)} rounding, at ({at}): {wide.ours:.6g} here, {wide.theirs:.6g} there{missing}"


def _row(entry: Entry, mark: str) -> str:
    name = entry.ours + (f" #{entry.call + 1}" if entry.call else "")
    name = name if len(name) < 40 else "…" + name[-38:]
    if entry.note:
        return f"{name:<40}{'  ' + entry.note}"[:100]
    verdicts = "".join(
        f"{_verdict(found):>8}" for found in (entry.input, entry.output, entry.gradients)
    )
    return f"{name:<40}{verdicts}{_figures(entry.output)} {mark}".rstrip()


def _figures(found: Measured | None) -> str:
    if found is None:
        return ""
    return f"{_times(found.times):>9}{found.narrow.max_abs:>10.2g}{_times(found.narrow_times):>8}{_short(found.narrow.ulps):>7}"
