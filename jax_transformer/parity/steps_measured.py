"""Measurements of the steps of two models, in PyTorch's layout."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jax_transformer.parity import difference, measuring
from jax_transformer.parity.difference import Measurement, loosened
from jax_transformer.parity.functions import ModelFunction
from jax_transformer.parity.steps_report import Step, TrainingReport
from jax_transformer.weights import any_model, rules
from jax_transformer.weights.rules import Rule


class Steps(NamedTuple):
    """Arrays of each step, by the names of the model's arrays."""

    losses: list[np.ndarray]
    gradients: list[dict[str, np.ndarray]]
    parameters: list[dict[str, np.ndarray]]
    """Before the first step, and after each."""


class Runs(NamedTuple):
    """The steps of a JAX model, and those from weights that are changed by rounding."""

    steps: Steps
    nudged: Steps
    rounded: bool
    """True if a constant of the model was rounded to a dtype below float64."""


class _Tensor(NamedTuple):
    """A PyTorch parameter and its arrays: one rule, or one for each array if all hold it."""

    name: str
    rules: list[Rule]

    @property
    def title(self) -> str:
        return f"{', '.join(name for rule in self.rules for name in rule.flax)} | {self.name}"

    def values(self, arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Return the parameter as the arrays have it, once for each rule."""
        return [rule.joined([arrays[name] for name in rule.flax]) for rule in self.rules]

    def gradient(self, arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Return the gradient: of a parameter that several arrays hold, their sum."""
        return [np.sum(self.values(arrays), axis=0)]


class ComparedSteps:
    """The steps of both models by dtype, in PyTorch's layout."""

    def __init__(
        self,
        runs: Mapping[str, tuple[Runs, Any]],
        widest: str,
        table: Sequence[Any],
        function: ModelFunction,
    ):
        self.runs, self.widest = runs, widest
        self.parts = any_model.Parts(table)
        every = {**function.parameters, **function.others}
        self.still = {name: np.asarray(x, np.float64) for name, x in every.items()}
        layers = self.parts.layers(self.still)
        trained = {layer for layer, (origin, _) in layers.items() if origin in function.parameters}
        known, self.theirs = runs["float64"][1].parameters[0], list[_Tensor]()
        ties = rules.aliases(self.parts.rules)
        for rule in rules.without_aliases(self.parts.rules):
            single = [Rule(rule.torch, name, rule.axes, rule.sizes) for name in rule.flax]
            several = [rule] if rule.cuts else single
            names = [rule.torch, *(name for name, other in ties.items() if other == rule.torch)]
            self.theirs += [_Tensor(name, several) for name in names if name in known]
        self.trained = [each.name for each in self.theirs if trained >= {*each.rules[0].flax}]

    def report(self, notes: list[str]) -> TrainingReport:
        ours, theirs = self.runs["float64"]
        steps = tuple(map(self._step, range(len(theirs.losses))))
        first = steps[0].loss
        limit = difference.AFTER_FLOAT32 * difference.IN_FLOAT32
        if difference.FAULT <= first.times < limit and (ours.rounded or theirs.rounded):
            steps = tuple(Step(*(loosened(each, limit) for each in step)) for step in steps)
            notes.append("a constant is rounded to float32 in one of the models only")
        without = [
            tensor.title
            for tensor in self.theirs
            if not any(np.any(each.get(tensor.name)) for each in theirs.gradients)
        ]
        if without:
            notes.append(f"no gradient in PyTorch: {', '.join(without)}")
        return TrainingReport(steps, tuple(notes), self._moved())

    def _moved(self) -> dict[str, str]:
        """Return the model in which a parameter changes, of those that change in one only."""
        ours, theirs = self.runs["float64"]
        sides = [*self._layers(ours.steps.parameters)]
        moved = {}
        for tensor in self.theirs:
            here = [np.stack(tensor.values(each)) for each in sides]
            there = [each[tensor.name] for each in theirs.parameters]
            changes = [any(np.any(x != side[0]) for x in side) for side in (here, there)]
            if changes[0] != changes[1]:
                moved[tensor.title] = "JAX" if changes[0] else "PyTorch"
        return moved

    def _layers(self, steps: Sequence[Mapping[str, np.ndarray]]) -> Iterator[dict[str, np.ndarray]]:
        for arrays in steps:
            layers = self.parts.layers(self.still | dict(arrays))
            yield {name: layer for name, (_, layer) in layers.items()}

    def _step(self, number: int) -> Step:
        losses = {
            dtype: (
                [ours.steps.losses[number]],
                theirs.losses[number],
                [ours.nudged.losses[number]],
            )
            for dtype, (ours, theirs) in self.runs.items()
        }
        return Step(
            self._measured(losses),
            self._named("gradients", number, _Tensor.gradient),
            self._named("parameters", number + 1, _Tensor.values),
        )

    def _named(self, kind: str, number: int, values: Callable[..., Any]) -> dict[str, Measurement]:
        sides = {}
        for dtype, (ours, theirs) in self.runs.items():
            steps = (getattr(run, kind)[number] for run in (ours.steps, ours.nudged))
            sides[dtype] = [*self._layers([*steps]), getattr(theirs, kind)[number]]
        measured = {}
        for tensor in self.theirs:
            there = {dtype: theirs.get(tensor.name) for dtype, (*_, theirs) in sides.items()}
            known = kind == "parameters" or tensor.name in self.trained
            if known and all(x is not None for x in there.values()):
                measured[tensor.title] = self._measured(
                    {
                        dtype: (values(tensor, ours), there[dtype], values(tensor, nudged))
                        for dtype, (ours, nudged, _) in sides.items()
                    }
                )
        return measured

    def _measured(self, both: Mapping[str, Any]) -> Measurement:
        """Return the measurement of the copy of an array that is furthest from PyTorch's. ``both``
        has the copies here, the array there, and the copies of nudged weights, by dtype.
        """
        measured = []
        for i in range(len(both["float64"][0])):
            arrays = {dtype: (ours[i], theirs) for dtype, (ours, theirs, _) in both.items()}
            floor = difference.rounding_error(both["float64"][2][i], arrays["float64"][0])
            measured.append(measuring.measured(arrays, self.widest, "float32", floor))
        return max(measured, key=lambda each: each.times)
