"""The result of a comparison of optimizer steps."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax_transformer.errors import DifferentError
from jax_transformer.parity import report
from jax_transformer.parity.difference import Measurement

_SHOWN = 8
"""Parameters that are shown, the furthest apart first."""


class Step(NamedTuple):
    """The measurements of one step, by the names of a parameter, ``ours | theirs``."""

    loss: Measurement
    gradients: Mapping[str, Measurement]
    parameters: Mapping[str, Measurement]
    """The parameters after the update."""


class Fault(NamedTuple):
    """The first difference of two models in training."""

    step: int
    """Counted from 1."""
    kind: str
    """``loss``, ``gradient`` or ``parameter``."""
    differing: Mapping[str, Measurement]
    """The measurements of this kind that differ in that step, the furthest apart first; that of the
    loss is ""."""


@dataclass(frozen=True)
class TrainingReport:
    """A comparison of the steps of two models.

    As text: :meth:`lines`; as JSON: :meth:`to_json`.
    """

    steps: tuple[Step, ...]
    notes: tuple[str, ...] = ()
    moved: Mapping[str, str] | None = None
    """The model, JAX or PyTorch, that alone changes a parameter, for such parameters."""

    @property
    def first_fault(self) -> Fault | None:
        """The first difference: of the loss, then of gradients, then of parameters, step by step;
        None if the models agree.
        """
        for number, (loss, gradients, parameters) in enumerate(self.steps, 1):
            kinds = {"loss": {"": loss}, "gradient": gradients, "parameter": parameters}
            for kind, measured in kinds.items():
                ordered = sorted(measured.items(), key=lambda pair: -pair[1].times)
                if differing := {name: each for name, each in ordered if not each.agrees}:
                    return Fault(number, kind, differing)
        return None

    @property
    def agrees(self) -> bool:
        """True if rounding explains every difference."""
        return self.first_fault is None

    def check(self) -> None:
        """Raise DifferentError, in one line, unless the models agree."""
        if not self.agrees:
            raise DifferentError(self.summary())

    def summary(self) -> str:
        """Return the verdict in one line."""
        fault, last = self.first_fault, self.steps[-1]
        if fault is None:
            furthest = max(self._all(), key=lambda each: each.times)
            return (
                f"the models train alike for {len(self.steps)} steps: largest difference"
                f" {furthest.wide.max_abs:.2g} in {furthest.wide.dtype},"
                f" {report.multiple(furthest.times)} rounding; compared: the loss,"
                f" {len(last.gradients)} gradients and {len(last.parameters)} parameters"
            )
        (name, worst), *others = fault.differing.items()
        count = len(last.parameters if fault.kind == "parameter" else last.gradients)
        more = f"; so do {len(others)} others of {count}" if others else ""
        words = f"{report.in_words(worst)}; the bound is {worst.bound:.3g}{more}"
        begin = {
            "loss": f"step {fault.step}: the loss differs",
            "gradient": f"{name}: the loss of step {fault.step} agrees, its gradient differs",
            "parameter": f"{name}: the gradients of step {fault.step} agree, and after the update"
            " the parameter differs",
        }[fault.kind]
        if fault.kind == "loss" and fault.step == 1:
            words += "; compare the models module by module first"
        if alone := (self.moved or {}).get(name):
            words += f"; it changes in {alone} only"
        return "; ".join((f"{begin}, {words}", *self.notes))

    def _all(self) -> Iterator[Measurement]:
        for loss, gradients, parameters in self.steps:
            yield from (loss, *gradients.values(), *parameters.values())

    def lines(self) -> Iterator[str]:
        """Return a table of at most 100 columns, what differs first, and the verdict."""
        yield (
            f"{'step':<6}{'loss here':>14}{'loss there':>14}{'× floor':>9}{'gradients':>12}"
            f"{'× floor':>9}{'parameters':>12}{'× floor':>9}"
        )
        for number, (loss, *groups) in enumerate(self.steps, 1):
            row = f"{number:<6}{loss.wide.ours:>14.8g}{loss.wide.theirs:>14.8g}"
            row += f"{report.multiple(loss.times):>9}"
            yield row + "".join(map(_column, groups))
        several = [*self.first_fault.differing.items()] if self.first_fault else []
        for name, each in several[:_SHOWN] if len(several) > 1 else ():
            yield from report.wrapped(f"  {name}: {report.in_words(each)}")
        if self.agrees:
            yield from self.notes
        yield self.summary()

    def to_json(self) -> str:
        """Return the whole report; NaN and infinities become text."""
        return json.dumps(self.to_data(), indent=1)

    def to_data(self) -> dict[str, Any]:
        """Return the whole report for JSON."""
        fault = self.first_fault
        return {
            "agrees": self.agrees,
            "summary": self.summary(),
            "first_fault": None
            if fault is None
            else {"step": fault.step, "kind": fault.kind, "names": [*fault.differing]},
            "notes": list(self.notes),
            "steps": [
                {
                    "loss": step.loss.to_data(),
                    "gradients": {n: each.to_data() for n, each in step.gradients.items()},
                    "parameters": {n: each.to_data() for n, each in step.parameters.items()},
                }
                for step in self.steps
            ],
        }


def _column(measured: Mapping[str, Measurement]) -> str:
    worst: Sequence[Measurement] = sorted(measured.values(), key=lambda each: each.times)[-1:]
    if not worst:
        return f"{'-':>12}{'':>9}"
    verdict = "agree" if all(each.agrees for each in measured.values()) else "DIFFER"
    return f"{verdict:>12}{report.multiple(worst[0].times):>9}"
