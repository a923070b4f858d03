"""Recording of a JAX model on one batch: each module's inputs, outputs and gradients.

The model is traced once, with its modules' arrays marked. The jaxpr is then evaluated under jit,
in float64 in every place if float64 is asked for. ``torch_reference.recording`` is the counterpart.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend import core

from jax_transformer.errors import ConfigError, Refusal, is_out_of_memory
from jax_transformer.parity import evaluation, jaxprs, points
from jax_transformer.parity.evaluation import Evaluation, Iterations, Point, itemsize

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class ModelFunction:
    """A model as a function of its arrays."""

    parameters: Mapping[str, Any]
    """Arrays that gradients are taken of, by dotted path."""
    others: Mapping[str, Any]
    run: Callable[[Mapping[str, Any], Sequence[Any]], Any]
    """Calls the model with the given arrays and batch, and marks its modules' arrays."""
    constants: frozenset[str] = frozenset()
    """Those of ``others`` that training never changes, such as a table of sines."""

    def __post_init__(self) -> None:
        for name, x in (*self.parameters.items(), *self.others.items()):
            if isinstance(x, jax.ShapeDtypeStruct):
                raise ConfigError(
                    f"{name} of the JAX model has a shape and no numbers, as from eval_shape: fill"
                    " the model first, with weights.from_torch"
                )


calls = itertools.count()
"""Numbers of calls, each taken once."""


def tap(name: str, x: jax.Array) -> jax.Array:
    """Return ``x``, to be compared under ``name`` in a comparison of models without Flax modules.

    ``{}`` in the name stands for the number of an iteration of the scan around it, as in
    ``layers.{}.mlp``. Outside a comparison this does nothing, also under jit.
    """
    return evaluation.mark(x, Point(next(calls), name, "point"))


@dataclass
class Recording:
    """Arrays of one run, as in ``torch_reference.recording``.

    ``arrays`` are named ``CALL/input`` and so on, ``order`` lists the calls in the order in which
    they ended, and ``parameters`` holds gradients by path. The outputs of ``points`` are arrays
    that :func:`jax_transformer.parity.tap` names, or if ``of_arrays``, what comes out where arrays
    are used: they belong to no module. ``biases`` are the arrays that are added there, by the
    point's name; "" for none. ``narrow`` has the dtypes below float64 that modules compute in by
    themselves, the model as "", if the run replaced these by float64; it is None if the run was
    left as it is. ``note`` says why it was. ``rounded`` names those with a constant that was
    rounded to such a dtype.
    """

    order: list[str] = field(default_factory=list)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    parameters: dict[str, np.ndarray] = field(default_factory=dict)
    result: np.ndarray | None = None
    points: set[str] = field(default_factory=set)
    biases: dict[str, set[str]] = field(default_factory=dict)
    of_arrays: bool = False
    narrow: dict[str, str] | None = None
    rounded: list[str] = field(default_factory=list)
    note: str = ""
    callers: dict[str, str] = field(default_factory=dict)
    """The call in which each call was made; the model's is ""."""
    masks: dict[str, list[np.ndarray]] = field(default_factory=dict)
    """The booleans and integers that go into each call."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Sizes of PyTorch's parameters by name."""
    outputs: list[str] = field(default_factory=list)
    """Names of the floating-point tensors that the PyTorch model returns; those after the first are
    ``#0/result NAME`` in ``arrays``."""

    def get(self, name: str) -> np.ndarray | None:
        """Return the array of that name, or None."""
        return self.arrays.get(name)

    @classmethod
    def of_file(
        cls, arrays: Arrays, dtype: str, order: Sequence[str], about: Mapping[str, Any]
    ) -> "Recording":
        """Return the recording of one dtype in a file, whose arrays are ``DTYPE/arrays/...``,
        ``DTYPE/parameters/...`` and ``DTYPE/result``; ``about`` has other fields, if written.
        """
        values, gradients = (
            below(f"{dtype}/{group}", arrays) for group in ("arrays", "parameters")
        )
        more = {"sizes": {name: x.size for name, x in gradients.items()}} | dict(about)
        return cls(list(order), values, gradients, arrays[f"{dtype}/result"], **more)


def below(group: str, arrays: Arrays) -> dict[str, np.ndarray]:
    """Return the arrays whose names begin with ``GROUP/``, without it."""
    start = f"{group}/"
    return {name.removeprefix(start): x for name, x in arrays.items() if name.startswith(start)}


Replacements = Mapping[str, tuple[bool, np.ndarray]]
"""Arrays by name, and True if the model goes on with them instead of its own of these names."""


@dataclass
class Recorder:
    """Runs of a model on one batch, each dtype traced once."""

    function: ModelFunction
    batch: Sequence[Any]
    positions: np.ndarray | None = None
    """Those at which the result counts for gradients; all if None."""
    _programs: dict[Any, "Program"] = field(default_factory=dict)

    def record(
        self,
        *,
        dtype: str = "float64",
        seed: int | None = 0,
        wide: bool = True,
        replacements: Replacements | None = None,
    ) -> Recording:
        """Run the model in ``dtype`` in one jitted function and record it.

        The model's and the batch's floating-point and complex arrays are cast. float64 needs JAX in
        64-bit mode; what the model computes in narrower floats is then computed in float64 too, if
        ``wide`` and as far as that is possible. ``seed`` is that of
        ``torch_reference.recording.record``. Raises ConfigError if the model returns no such array,
        or a module is called inside a while loop or a condition.
        """
        theirs = {
            name: (chosen, _in_range(x, dtype))
            for name, (chosen, x) in (replacements or {}).items()
        }
        recording, note = self.attempt(lambda program: program.record(seed, theirs), dtype, wide)
        return dataclasses.replace(recording, note=note)

    def attempt(
        self, run: Callable[["Program"], Any], dtype: str, wide: bool = True
    ) -> tuple[Any, str]:
        """Return ``run(program)`` for the model in ``dtype``, and the reason why it does not
        compute in float64 in every place; "" if it does, or need not.
        """
        if dtype != "float64" or not wide:
            return run(self._program(dtype, wide=False)), ""
        try:
            program = self._program("float64")
        except ConfigError:
            raise
        except Exception as error:  # of the model's own code
            try:
                result = run(self._program("float64", traced_in="float32"))
            except Exception:
                raise error from None
            return result, f"the JAX model cannot be traced in float64 ({line_of(error)})"
        try:
            return run(program), ""
        except ConfigError:
            raise
        except Exception as error:  # of a primitive's rules or its compilation
            reason = f"the JAX model is not run in float64 everywhere ({line_of(error)})"
            return run(self._program("float64", wide=False)), reason

    def _program(self, dtype: str, **options: Any) -> "Program":
        key = dtype, *options.items()
        if key not in self._programs:
            options |= {"positions": self.positions}
            self._programs[key] = Program(self.function, self.batch, dtype, **options)
        return self._programs[key]


def in_each_dtype(
    run_torch: Callable[[str], Any], run_jax: Callable[[Any, str], Any], dtypes: Sequence[str]
) -> tuple[dict[str, Any], str, list[str]]:
    """Return the runs of both models by dtype, and the widest dtype in which they run: if float64
    fails, it is float32, whose run takes its place, and a note says so. ``run_jax`` gets the run of
    the PyTorch model too. Raises ConfigError if a model fails in another dtype."""
    runs, failure = dict[str, Any](), None
    for dtype in dict.fromkeys(dtypes):
        model = "PyTorch"
        try:
            theirs = run_torch(dtype)
            model = "JAX"
            runs[dtype] = run_jax(theirs, dtype), theirs
        except ConfigError:
            raise
        except Exception as error:  # of a model's own code
            failure = failure or (model, error)
            if dtype != "float64":
                with failures_of(failure[0]):
                    raise failure[1] from None
    if failure is None:
        return runs, "float64", []
    note = f"compared in float32: float64 fails with {line_of(failure[1])}"
    return runs | {"float64": runs["float32"]}, "float32", [note]


@contextlib.contextmanager
def failures_of(model: str) -> Iterator[None]:
    """Raise ConfigError with one line for an error of a model's own code."""
    try:
        yield
    except Exception as error:
        if isinstance(error, Refusal) or is_out_of_memory(error):
            raise
        raise ConfigError(f"the {model} model fails on this batch: {line_of(error)}") from error


def line_of(error: Exception) -> str:
    """Return the first line of an error."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:200]


class Program:
    """A model that is traced once, and compiled once for each set of names in ``replacements``."""

    def __init__(
        self,
        function: ModelFunction,
        batch: Sequence[Any],
        dtype: str,
        *,
        traced_in: str | None = None,
        wide: bool = True,
        positions: np.ndarray | None = None,
    ):
        every = dict(function.parameters), dict(function.others), list(batch)
        self.cast = partial(jax.tree.map, partial(_cast, dtype=dtype))

        def call(parameters: Mapping[str, Any], others: Mapping[str, Any], inputs: Any) -> Any:
            return first_array(function.run({**parameters, **others}, inputs))

        self.wide, self.positions = wide, positions
        self.arrays = jax.tree.map(partial(_not_wider, dtype=dtype), every)
        """Those that are narrower than ``dtype`` are cast where they are used."""
        constants = ((name, function.others[name]) for name in function.constants)
        self.tables = sorted({name.rpartition(".")[0] for name, x in constants if _rounded(x)})
        self.traced_in = traced_in
        # In 32-bit mode integers are as in the model's own runs
        with jax.enable_x64(traced_in is None and bool(jax.config.read("jax_enable_x64"))):
            if traced_in:
                traced = jax.tree.map(partial(_cast, dtype=traced_in), every)
            else:
                traced = jax.eval_shape(self.cast, self.arrays)
            self.jaxpr = jax.make_jaxpr(call)(*traced)
            with jaxprs.on_one_device():
                if jaxprs.is_sharded(self.jaxpr):
                    self.jaxpr = jaxprs.inlined(self.jaxpr)
                self.of_arrays = not any(map(_is_point, self.jaxpr.jaxpr.eqns))
                if self.of_arrays:
                    self.jaxpr = _with_points(self.jaxpr, function)
        self.arrays = jax.tree.map(
            lambda x, as_traced: x if is_inexact(x) else x.astype(as_traced.dtype),
            self.arrays,
            traced,
        )
        with jaxprs.on_one_device():
            self.arrays = jax.tree.map(jaxprs.array_on_one_device, self.arrays)
        self._compiled = jax.jit(self._run, static_argnums=0, compiler_options=_options())

    def _run(
        self,
        seed: int | None,
        parameters: Mapping[str, Any],
        rest: Any,
        perturbations: Mapping[str, Any],
        replacements: Mapping[str, Any],
    ) -> tuple[Any, tuple[dict[str, Any], Any, dict[str, Any]]]:
        tables = dict.fromkeys(self.tables, "float32")
        self.traced = Recording(narrow=tables, rounded=[*tables], of_arrays=self.of_arrays)
        visitor = Visitor(self.traced, perturbations, replacements)
        leaves = jax.tree.leaves(self.cast((parameters, *rest)))
        (output,) = Evaluation(visitor, self.wide).run(self.jaxpr, leaves)
        if seed is None:
            return jnp.zeros((), output.dtype), (self.traced.arrays, output, self.traced.masks)
        weights = np.random.default_rng(seed).standard_normal(output.shape)
        at = self.positions
        if at is not None and at.shape == output.shape[: at.ndim]:
            weights[~at] = 0
        loss = (output * jnp.asarray(weights, output.dtype)).sum()
        return loss, (self.traced.arrays, output, self.traced.masks)

    def record(
        self,
        seed: int | None,
        replacements: Replacements,
        values: Mapping[str, Any] | None = None,
    ) -> Recording:
        """Return the recording; ``values`` take the places of the model's weights."""
        with jaxprs.on_one_device():
            return self._record(seed, replacements, values or {})

    def _record(
        self, seed: int | None, replacements: Replacements, new: Mapping[str, Any]
    ) -> Recording:
        *groups, batch = self.arrays
        parameters, others = (
            {name: new.get(name, array) for name, array in group.items()} for group in groups
        )
        rest = others, batch
        gradients: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        if seed is None:
            _, (recorded, output, seen) = self._compiled(None, parameters, rest, {}, replacements)
        else:
            run = partial(self._run, seed)
            shapes = jax.eval_shape(run, parameters, rest, {}, {})[1][0]
            zeros = {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in shapes.items()}
            differentiate = jax.grad(run, argnums=(0, 2), has_aux=True)

            @partial(jax.jit, compiler_options=_options())
            def differentiated(parameters: Any, *others: Any) -> Any:
                return differentiate(self.cast(parameters), *others)

            gradients, (recorded, output, seen) = differentiated(parameters, rest, zeros, {})
        of_parameters, of_arrays = (
            {name: _to_numpy(array, gradient=True) for name, array in group.items()}
            for group in gradients
        )
        arrays = {name: _to_numpy(array) for name, array in recorded.items()}
        narrow = self.traced.narrow if self.wide else None
        return dataclasses.replace(
            self.traced,
            arrays=arrays | {f"{name} gradient": array for name, array in of_arrays.items()},
            parameters=of_parameters,
            masks={key: list(map(np.asarray, arrays)) for key, arrays in seen.items()},
            result=_to_numpy(output),
            narrow=narrow,
            rounded=[*(narrow or ())] if self.traced_in else self.traced.rounded,
        )

    def result(self, parameters: Mapping[str, Any], rest: Any) -> jax.Array:
        """Return the model's first result, as a function to differentiate; ``parameters`` and
        ``rest`` are shaped like ``arrays``."""
        return self._run(None, parameters, rest, {}, {})[1][1]


def _is_point(equation: core.JaxprEqn) -> bool:
    """Return True if an array of a module, or a tap, is marked in an equation."""
    every = jaxprs.equations(equation)
    return any(each.primitive is evaluation.TAP and each.params["point"].name for each in every)


def _with_points(jaxpr: core.ClosedJaxpr, function: ModelFunction) -> core.ClosedJaxpr:
    """Return a jaxpr with a point for each use of a parameter; for a model without modules."""
    shapes = {name: np.shape(x) for name, x in sorted(function.parameters.items())}
    names = [points.module(name, shapes) for name in shapes]
    names += [""] * (len(jaxpr.in_avals) - len(names))
    return points.marked(jaxpr, names, shapes, lambda: next(calls))


@functools.cache
def _options() -> dict[str, str]:
    """Return options with which XLA casts a weight when it is used: by itself, its compiler for
    CPUs casts all of them first. Empty if this release of it has no such option."""
    options = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
    try:
        jax.jit(lambda: jnp.zeros(()), compiler_options=options)()
    except jax.errors.JaxRuntimeError:
        return {}
    return options


def first_array(output: Any) -> jax.Array:
    """Return the first floating-point array of a result, or the parts of its first complex one."""
    array = jnp.asarray(inexact(output)[0])
    return jnp.stack([array.real, array.imag], axis=-1) if jnp.iscomplexobj(array) else array


@dataclass
class Visitor:
    """Notes the marked arrays of one evaluation in a recording. ``perturbations`` (zeros) are added
    to them: their gradients are those of the arrays. ``replacements`` take their places then.
    """

    recording: Recording
    perturbations: Mapping[str, Any]
    replacements: Mapping[str, Any]
    _counts: Counter[str] = field(default_factory=Counter)
    _open: dict[Any, str] = field(default_factory=dict)
    """The calls that are going on, the innermost last."""

    def compute_narrow(self, dtype: str) -> None:
        """Note that the model computes in a dtype below float64 here."""
        module, narrow = self._innermost().rpartition("#")[0], self.recording.narrow
        if narrow is not None:
            narrow[module] = min(dtype, narrow.get(module, dtype), key=itemsize)

    def round_constant(self) -> None:
        """Note that a constant of the model was rounded to such a dtype here."""
        module = self._innermost().rpartition("#")[0]
        if module not in self.recording.rounded:
            self.recording.rounded.append(module)

    def _innermost(self) -> str:
        return next(reversed(self._open.values()), "")

    def visit(self, point: Point, iterations: Iterations, array: Any, narrow: str | None) -> Any:
        """Return the array to go on with; ``narrow`` is its dtype in the model below float64."""
        call = (point.call, iterations)
        if call not in self._open:
            name = point.path(iterations)
            key = f"{name}#{self._counts[name]}"
            self._counts[name] += 1
            self.recording.callers[key] = self._innermost()
            self._open[call] = key
        key = self._open[call]
        if narrow and self.recording.narrow is not None:
            self.recording.narrow.setdefault(key.rpartition("#")[0], narrow)
        kind = point.kind
        if kind == "point":
            self.recording.points.add(key)
            if point.narrow and self.recording.narrow is not None:
                self.recording.narrow[key.rpartition("#")[0]] = point.narrow
            biases = self.recording.biases.setdefault(point.path(iterations), set())
            biases.add(point._replace(name=point.bias).path(iterations))
            kind = "output"
        if kind == "output":
            self.recording.order.append(key)
            while self._open.popitem()[1] != key:  # calls in it that returned no such array
                pass
        if kind.startswith("mask"):
            self.recording.masks.setdefault(key, []).append(array)
        if not is_inexact(array):
            return array
        name = f"{key}/{kind}"
        if name in self.perturbations:
            array = array + self.perturbations[name]
        self.recording.arrays[name] = array
        if name not in self.replacements:
            return array
        chosen, theirs = self.replacements[name]
        if jnp.iscomplexobj(array):
            theirs = theirs[..., 0] + 1j * theirs[..., 1]
        return jnp.where(chosen, jnp.asarray(theirs, array.dtype), array)


def _in_range(array: np.ndarray, dtype: str) -> np.ndarray:
    """Return an array in a dtype, its finite numbers within that dtype's range."""
    largest = float(jnp.finfo(dtype).max)
    clipped = np.where(np.isfinite(array), np.clip(array, -largest, largest), array)
    return clipped.astype(jnp.dtype(dtype))


def _rounded(value: Any) -> bool:
    """Return True for float32 numbers that other models may have in float64; see
    ``torch_reference.recording.float32_buffers``."""
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return False
    wide = np.asarray(value, np.float64)
    wide = wide[np.isfinite(wide)]
    return bool((wide.astype(np.float32) == wide).all() and (wide * 256 % 1).any())


def _not_wider(value: Any, dtype: str) -> jax.Array:
    """Return an array in a dtype, or as it is if that is narrower."""
    array = jnp.asarray(value)
    wide = jax.eval_shape(partial(_cast, dtype=dtype), array)
    return array if array.dtype.itemsize < wide.dtype.itemsize else _cast(array, dtype)


def _cast(value: Any, dtype: str) -> jax.Array:
    array = jnp.asarray(value)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return array.astype("complex128" if dtype == "float64" else "complex64")
    return array.astype(dtype) if jnp.issubdtype(array.dtype, jnp.floating) else array


def _to_numpy(array: Any, *, gradient: bool = False) -> np.ndarray:
    """Return a NumPy array. 16-bit floats become float32, which holds them exactly; complex numbers
    their parts, and a complex gradient the parts' gradient, as in PyTorch (JAX's is its conjugate).
    """
    array = np.asarray(array)
    if np.iscomplexobj(array):
        array = np.conj(array) if gradient else array
        return np.stack([array.real, array.imag], axis=-1)
    return array.astype(np.float32) if array.dtype.itemsize == 2 else array


# Arrays in nested containers: pytrees and dataclasses


def inexact(tree: Any) -> list[Any]:
    """Return the floating-point and complex arrays, in order; see :func:`map_arrays`."""
    return [array for _, array in named(tree, is_inexact)]


def is_inexact(array: Any) -> bool:
    """Return True if an array has floating-point or complex numbers."""
    return jnp.issubdtype(array.dtype, jnp.inexact)


def masks(tree: Any) -> list[Any]:
    """Return the arrays of booleans and integers, in order; see :func:`map_arrays`."""
    kinds = jnp.bool_, jnp.integer
    return [x for _, x in named(tree) if any(jnp.issubdtype(x.dtype, kind) for kind in kinds)]


def named(
    tree: Any, accept: Callable[[Any], bool] = lambda _: True, name: str = ""
) -> Iterator[tuple[str, Any]]:
    """Return the arrays of nested containers in their own order, with dotted names; see
    :func:`map_arrays`."""
    items: Any = ()
    if isinstance(tree, jax.Array | np.ndarray):
        if accept(tree):
            yield name, tree
    elif isinstance(tree, Mapping):
        items = tree.items()
    elif hasattr(tree, "_fields"):
        items = zip(tree._fields, tree, strict=True)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type | nnx.Pytree):
        items = [(f.name, getattr(tree, f.name)) for f in dataclasses.fields(tree)]
    elif not isinstance(tree, nnx.Pytree):
        below = jax.tree.leaves(tree, is_leaf=lambda x: x is not tree)
        items = [] if any(each is tree for each in below) else enumerate(below)
    for key, value in items:
        yield from named(value, accept, f"{name}.{key}".lstrip("."))


def map_arrays(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return the tree with ``function(array)`` for each array, but those of NNX modules: one that
    is passed as an argument must stay that object.
    """

    def mapped(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array | np.ndarray):
            return function(leaf)
        if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type | nnx.Pytree):
            return leaf
        fields = {f.name: getattr(leaf, f.name) for f in dataclasses.fields(leaf) if f.init}
        changed = {name: map_arrays(function, value) for name, value in fields.items()}
        same = all(changed[name] is value for name, value in fields.items())
        return leaf if same else dataclasses.replace(leaf, **changed)

    return jax.tree.map(mapped, tree, is_leaf=lambda value: isinstance(value, nnx.Pytree))
