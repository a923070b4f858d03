"""Batches of named arrays, and results that are dicts, dataclasses, tuples or named tuples."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_transformer.errors import ConfigError
from jax_transformer.parity import evaluation, recording
from jax_transformer.parity.evaluation import Point
from jax_transformer.parity.recording import ModelFunction


def positional(batch: Any, *calls: Callable[..., Any] | None) -> list[Any]:
    """Return a batch's arrays, and calls that take them in that order; those of a dict by name."""
    if not isinstance(batch, Mapping):
        return [arrays_of(batch), *calls]
    names = [*batch]

    def by_name(call: Callable[..., Any] | None) -> Callable[..., Any]:
        def called(*values: Any) -> Any:
            count = len(values) - len(names)
            first, arrays = values[:count], values[count:]
            function, *more = first if call is None else (call, *first)
            return function(*more, **dict(zip(names, arrays, strict=True)))

        return called

    return [arrays_of(batch.values(), names), *map(by_name, calls)]


def arrays_of(batch: Any, names: list[str] | None = None) -> list[np.ndarray]:
    """Return a batch's arrays, or its only one. Raises ConfigError if it has anything else."""
    if isinstance(batch, Mapping):
        raise ConfigError(
            "the batch is a dict: pass a list of arrays in the order of the models' arguments, and"
            " call_flax= and call_torch= if a model takes them by name"
        )
    if not isinstance(batch, Iterable):
        raise ConfigError(f"the batch is a {type(batch).__name__}: pass a list of arrays")
    arrays = []
    for i, value in enumerate([batch] if hasattr(batch, "shape") else batch):
        problem = f"argument {repr(names[i]) if names else i} of the batch is not an array"
        try:
            arrays.append(np.asarray(value))
        except Exception as error:  # lists of unequal lengths, a tensor without a dtype of NumPy's
            raise ConfigError(f"{problem}: {recording.line_of(error)}") from error
        if arrays[-1].dtype.kind not in "biufcV":
            raise ConfigError(f"{problem} of numbers")
    return arrays


def check_torch(module: Any) -> None:
    """Raise ConfigError if this is not an instance of torch.nn.Module."""
    if isinstance(module, type) or not hasattr(module, "named_modules"):
        raise ConfigError(
            f"the PyTorch model is {kind(module)}: pass an instance of torch.nn.Module (the second"
            " argument of parity.compare, the first one of weights.propose)"
        )


def kind(model: Any) -> str:
    """Return the words for what was passed in place of a model."""
    is_class = isinstance(model, type)
    return f"the class {model.__name__}" if is_class else f"a {type(model).__name__}"


def other_shapes(ours: Any, theirs: Any, name: str = "") -> ConfigError:
    """Return the error of results, by their name, that differ in shape."""
    of_name = f"{name} of " if name else ""
    return ConfigError(
        f"the Flax model returns {of_name}shape {ours.shape} and the PyTorch model {theirs.shape}:"
        " pass call_flax= or call_torch= to make them equal"
    )


@dataclass
class Results:
    """The names of the floating-point arrays that two models return; a lone one's is ""."""

    theirs: list[str] = field(default_factory=list)
    """Empty if they are not known."""
    ours: list[str] = field(default_factory=list)
    """In the order in which they correspond to theirs."""

    def chosen(self, function: ModelFunction) -> ModelFunction:
        """Return the model with :meth:`choose` of its result."""
        return replace(function, run=lambda *values: self.choose(function.run(*values)))

    def choose(self, result: Any) -> Any:
        """Return the array of the JAX model's result that is the PyTorch model's first, and mark
        the others that it returns too. Raises ConfigError if the model returns none, or both return
        several under other names.
        """
        every = dict(recording.named(result))
        arrays = dict(recording.named(result, recording.is_inexact))
        if not arrays:
            kinds = ", ".join(f"{name or 'its result'} is {x.dtype}" for name, x in every.items())
            raise ConfigError(
                f"the JAX model returns no floating-point array ({kinds or type(result).__name__}):"
                " pass call_flax= a function that does"
            )
        named = self.theirs if {*self.theirs} <= arrays.keys() else []
        self.ours = [*dict.fromkeys([*named, *arrays])]
        self._check()
        first, *others = (arrays[name] for name in self.ours)
        call = next(recording.calls)
        for name, array in zip(self.theirs[1:], others, strict=False):
            evaluation.mark(jnp.asarray(array), Point(call, "", f"result {name}"))
        return first

    def _check(self) -> None:
        both = self.theirs, self.ours
        if min(map(len, both)) < 2:
            return
        numbered = any(name[0].isdecimal() for side in both for name in side)
        different = (
            len(self.theirs) != len(self.ours) if numbered else {*self.theirs} ^ {*self.ours}
        )
        if different:
            raise ConfigError(
                f"the PyTorch model returns {', '.join(self.theirs)} and the JAX model"
                f" {', '.join(self.ours)}: pass call_torch= or call_flax= to make them equal"
            )

    def note(self, compared: Collection[str]) -> list[str]:
        """Return the words for what is returned and not compared."""
        rest = [name for name in self.theirs[1:] if name not in compared]
        rest = rest or self.ours[max(1, len(self.theirs)) :]
        return [f"not compared: {', '.join(rest)}, which a model also returns"] if rest else []
