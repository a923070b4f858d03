"""Recording of a JAX model on one batch: each module's inputs, outputs and gradients.

The model is traced once, its modules' arrays are marked, and the jaxpr is evaluated under jit.
``torch_reference.recording`` is the counterpart.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_transformer.errors import ConfigError
from jax_transformer.parity import taps
from jax_transformer.parity.functions import ModelFunction
from jax_transformer.parity.taps import Iteration, Point


@dataclass
class Recording:
    """Arrays of one run, as in ``torch_reference.recording``.

    ``arrays`` are named ``CALL/input`` and so on, ``order`` lists the calls in the order in which
    they ended, and ``parameters`` holds gradients by path. The outputs of ``points`` are arrays
    that :func:`jax_transformer.parity.tap` names: they belong to no module.
    """

    order: list[str] = field(default_factory=list)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    parameters: dict[str, np.ndarray] = field(default_factory=dict)
    result: np.ndarray | None = None
    points: frozenset[str] = frozenset()

    def get(self, name: str) -> np.ndarray | None:
        """Return the array of that name, or None."""
        return self.arrays.get(name)

    @classmethod
    def of_file(
        cls, arrays: Mapping[str, np.ndarray], dtype: str, order: Sequence[str]
    ) -> "Recording":
        """Return the recording of one dtype in a file's arrays.

        Their names are ``DTYPE/arrays/...``, ``DTYPE/parameters/...`` and ``DTYPE/result``.
        """
        values, gradients = (
            below(f"{dtype}/{group}", arrays) for group in ("arrays", "parameters")
        )
        return cls(list(order), values, gradients, arrays[f"{dtype}/result"])


def below(group: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays whose names begin with ``GROUP/``, without it."""
    return {
        name.removeprefix(f"{group}/"): array
        for name, array in arrays.items()
        if name.startswith(f"{group}/")
    }


def record(
    function: ModelFunction,
    batch: Sequence[Any],
    *,
    dtype: str = "float64",
    seed: int | None = 0,
) -> Recording:
    """Run the model in ``dtype`` in one jitted function and record it.

    The model's and the batch's floating-point and complex arrays are cast. The other arguments are
    those of ``torch_reference.recording.record``. float64 needs JAX in 64-bit mode. Raises
    ConfigError if the model returns no such array, or a module is called inside a while loop or a
    condition.
    """
    parameters, others = (
        {name: _cast(array, dtype) for name, array in group.items()}
        for group in (function.parameters, function.others)
    )
    inputs = [_cast(array, dtype) for array in batch]

    def call(parameters: Mapping[str, Any], others: Mapping[str, Any], inputs: Any) -> Any:
        return _first_array(function.run({**parameters, **others}, inputs))

    jaxpr = jax.make_jaxpr(call)(parameters, others, inputs)
    order: list[str] = []
    points: set[str] = set()

    def run(
        parameters: Mapping[str, Any], perturbations: Mapping[str, Any]
    ) -> tuple[Any, tuple[dict[str, Any], Any]]:
        visitor = _Visitor(perturbations)
        leaves = jax.tree.leaves((parameters, others, inputs))
        (output,) = taps.evaluate(jaxpr, leaves, visitor.visit)
        order[:] = visitor.order
        points.update(visitor.points)
        if seed is None:
            return jnp.zeros((), output.dtype), (visitor.arrays, output)
        weights = np.random.default_rng(seed).standard_normal(output.shape)
        return (output * jnp.asarray(weights, output.dtype)).sum(), (visitor.arrays, output)

    gradients: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    if seed is None:
        _, (arrays, output) = jax.jit(run)(parameters, {})
    else:
        shapes = jax.eval_shape(run, parameters, {})[1][0]
        zeros = {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in shapes.items()}
        differentiate = jax.grad(run, argnums=(0, 1), has_aux=True)
        gradients, (arrays, output) = jax.jit(differentiate)(parameters, zeros)
    of_parameters, of_arrays = (
        {name: _to_numpy(array, gradient=True) for name, array in group.items()}
        for group in gradients
    )
    named = {name: _to_numpy(array) for name, array in arrays.items()}
    named |= {f"{name} gradient": array for name, array in of_arrays.items()}
    return Recording(order, named, of_parameters, _to_numpy(output), frozenset(points))


def _first_array(output: Any) -> jax.Array:
    """Return the model's result: its first floating-point array, or the parts of its first complex
    one.
    """
    array = next(taps.inexact(output), None)
    if array is None:
        raise ConfigError(
            "the JAX model returns no floating-point array: pass call_flax= a function that does"
        )
    array = jnp.asarray(array)
    return _parts(array) if jnp.iscomplexobj(array) else array


def _parts(array: Any) -> Any:
    """Return a complex array as real and imaginary parts, on a new last axis."""
    return jnp.stack([array.real, array.imag], axis=-1)


class _Visitor:
    """Records the marked arrays of one evaluation.

    ``perturbations`` (zeros) are added to them, so that the gradient with respect to a perturbation
    is the gradient with respect to that array.
    """

    def __init__(self, perturbations: Mapping[str, Any]):
        self.perturbations = perturbations
        self.order: list[str] = []
        self.points: set[str] = set()
        self.arrays: dict[str, Any] = {}
        self._counts: dict[str, int] = {}
        self._open: dict[Any, str] = {}

    def visit(self, point: Point, iterations: tuple[Iteration, ...], array: Any) -> Any:
        call = (point.call, iterations)
        if call not in self._open:
            name = point.path(iterations)
            self._open[call] = f"{name}#{self._counts.get(name, 0)}"
            self._counts[name] = self._counts.get(name, 0) + 1
        key = self._open[call]
        kind = point.kind
        if kind == "point":
            self.points.add(key)
            kind = "output"
        if kind == "output":
            self.order.append(self._open.pop(call))
        if not jnp.issubdtype(array.dtype, jnp.inexact):
            return array
        name = f"{key}/{kind}"
        if name in self.perturbations:
            array = array + self.perturbations[name]
        self.arrays[name] = array
        return array


def _cast(value: Any, dtype: str) -> jax.Array:
    array = jnp.asarray(value)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return array.astype("complex128" if dtype == "float64" else "complex64")
    return array.astype(dtype) if jnp.issubdtype(array.dtype, jnp.floating) else array


def _to_numpy(array: Any, *, gradient: bool = False) -> np.ndarray:
    """Return a copy. 16-bit floats become float32, which holds them exactly; complex numbers their
    parts, and a complex gradient the parts' gradient, as in PyTorch (JAX's is its conjugate).
    """
    copied = np.array(array)
    if np.iscomplexobj(copied):
        copied = np.conj(copied) if gradient else copied
        return np.stack([copied.real, copied.imag], axis=-1)
    return copied.astype(np.float32) if copied.dtype.itemsize == 2 else copied
