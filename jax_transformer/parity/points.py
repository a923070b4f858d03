"""Points of a JAX model without modules: what comes out where each of its arrays is used.

An array meets what depends on the batch in one equation, such as a product. Its output, with the
bias that is added, is what the module of another model returns that holds the same weight.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from jax_transformer.parity import evaluation, jaxprs, matching
from jax_transformer.parity.evaluation import Point

Shapes = Mapping[str, tuple[int, ...]]
_MOVES = ("convert_element_type", "reshape", "transpose", "squeeze", "broadcast_in_dim")
"""Primitives that do not change the numbers, but for rounding."""


def root_of_layers(path: str, layers: int, shapes: Shapes) -> str:
    """Return the outermost module with several parts whose arrays all have so many layers."""
    root = path
    while "." in root:
        parent = root.rpartition(".")[0]
        inside = {
            name.removeprefix(f"{parent}."): shape
            for name, shape in shapes.items()
            if name.startswith(f"{parent}.")
        }
        parts = {name.partition(".")[0] for name in inside}
        if len(parts) < 2 or any(layers not in shape for shape in inside.values()):
            break
        root = parent
    return root


def module(name: str, shapes: Shapes) -> str:
    """Return the module of an array if the names of all its arrays only say what they are in it,
    as a weight and a bias; the array's name otherwise."""
    around = name.rpartition(".")[0]
    inside = [each.removeprefix(f"{around}.") for each in shapes if each.startswith(f"{around}.")]
    plain = all("." not in leaf and matching.words(leaf) <= matching.ROLES for leaf in inside)
    return around if around and plain else name


def marked(
    closed: core.ClosedJaxpr, names: Sequence[str], shapes: Shapes, call: Callable[[], int]
) -> core.ClosedJaxpr:
    """Return a jaxpr with a point for each use of an array, named as its :func:`module`.

    Args:
        names: those of the arrays, by the jaxpr's inputs; "" for what is none of the model's.
        shapes: of the model's arrays.
        call: returns a new number of a call.
    """
    closed = jaxprs.inlined(closed)
    uses = _Uses(closed.jaxpr, names, shapes)

    def step(equation: core.JaxprEqn, inputs: Sequence[Any]) -> Sequence[Any]:
        inner = uses.of_scans.get(equation.outvars[0]) if equation.outvars else None
        if inner is not None:
            body = marked(equation.params["jaxpr"], inner, shapes, call)
            return equation.primitive.bind(*inputs, **equation.params | {"jaxpr": body})
        makers = [uses.points.get(v) for v in equation.outvars]
        points = [make and make(call(), narrow=uses.in_16_bits(equation)) for make in makers]
        if equation.primitive.name == "add" and points[0] is not None:
            added = points[0]._replace(kind="added")
            inputs = [
                evaluation.mark(x, added) if uses.is_source(atom) else x
                for atom, x in zip(equation.invars, inputs, strict=True)
            ]
        outputs = jaxprs.bind(equation, inputs)
        return [
            x if point is None else evaluation.mark(x, point)
            for point, x in zip(points, outputs, strict=True)
        ]

    return jaxprs.retraced(closed, step)


class _Uses:
    """The uses of arrays in a jaxpr: ``points`` make Points by the variable that comes out, and
    ``of_scans`` the names of the inputs of the body, by the first output of a scan over layers.
    """

    def __init__(self, jaxpr: core.Jaxpr, names: Sequence[str], shapes: Shapes):
        self.shapes = shapes
        self.sources = {v: name for v, name in zip(jaxpr.invars, names, strict=True) if name}
        """Variables that depend on arrays alone, and the first one's name."""
        self.makers = {v: each for each in jaxpr.eqns for v in each.outvars}
        self.users: dict[Any, list[core.JaxprEqn | None]] = defaultdict(list)
        for equation in jaxpr.eqns:
            for atom in _variables(equation.invars):
                self.users[atom].append(equation)
        for atom in _variables(jaxpr.outvars):
            self.users[atom].append(None)
        self.points: dict[Any, Callable[..., Point]] = {}
        self.of_scans: dict[Any, list[str]] = {}
        uses = list[tuple[core.JaxprEqn, str]]()
        for equation in jaxpr.eqns:
            inputs = _variables(equation.invars)
            names = [self.sources[v] for v in inputs if v in self.sources]
            if names and len(names) == len(inputs) and equation.primitive.name != "scan":
                self.sources |= dict.fromkeys(equation.outvars, self._named(equation, names[0]))
            elif names:
                uses.append((equation, names[0]))
        ended = set[int]()
        for equation, name in uses:
            self._visit(equation, name, ended)

    def is_source(self, atom: Any) -> bool:
        """Return True if a value depends on arrays alone."""
        return isinstance(atom, core.Var) and atom in self.sources

    def in_16_bits(self, equation: core.JaxprEqn) -> str:
        """Return the dtype of 16 bits in an equation, or in what it makes of other points; ""
        if there is none."""
        reached, equations = {id(equation)}, [equation]
        for each in equations:  # which grow meanwhile
            if "16" in (dtype := evaluation.narrow_dtype(each) or ""):
                return dtype
            for v in _variables(each.invars):
                maker = None if v in self.points or v in self.sources else self.makers.get(v)
                if maker is not None and id(maker) not in reached:
                    reached.add(id(maker))
                    equations.append(maker)
        return ""

    def _visit(self, equation: core.JaxprEqn, name: str, ended: set[int]) -> None:
        if (inner := self._of_layers(equation)) is not None:
            self.of_scans[equation.outvars[0]] = inner
        elif id(equation) not in ended:
            outputs: Any = equation.outvars
            floats = [v for v in outputs if jnp.issubdtype(v.aval.dtype, jnp.floating)]
            if floats:
                value = max(floats, key=lambda v: v.aval.size)
                end, bias = self._end(value, equation, ended)
                self.points[end] = partial(Point, name=name, kind="point", bias=bias)

    def _named(self, equation: core.JaxprEqn, name: str) -> str:
        """Return the name of what an equation makes of an array: that of a layer, if it is the only
        one that is left of an array of several."""
        if equation.primitive.name != "squeeze" or "{}" in name:
            return name
        v: Any = equation.invars[0]
        if (maker := self.makers.get(v)) is None:
            return name
        stacked: Any = maker.invars[0]
        starts = maker.params.get("start_indices")
        if 0 not in equation.params["dimensions"] or not starts:
            return name
        if stacked.aval.shape[0] == 1 or stacked.aval.shape[1:] != v.aval.shape[1:]:
            return name
        return self._layered(name, stacked.aval.shape[0]).replace("{}", str(starts[0]))

    def _layered(self, name: str, layers: int) -> str:
        root = root_of_layers(name, layers, self.shapes)
        return f"{root}.{{}}{name.removeprefix(root)}"

    def _of_layers(self, equation: core.JaxprEqn) -> list[str] | None:
        """Return the names of the inputs of the body of a scan over layers; None if it is none."""
        if equation.primitive.name != "scan":
            return None
        names = [
            self.sources.get(v, "") if isinstance(v, core.Var) else "" for v in equation.invars
        ]
        constants, carry, xs = jaxprs.parts_of_scan(equation.params, names)
        if not any(xs):
            return None
        length = equation.params["length"]
        layered = [
            self._layered(name, length) if name and "{}" not in name else name for name in xs
        ]
        return [*constants, *[""] * len(carry), *layered]

    def _end(self, value: Any, equation: core.JaxprEqn, ended: set[int]) -> tuple[Any, str]:
        """Return what the whole of a layer makes of a value: a bias is added to a product, and a
        scale may be multiplied before the division of a norm, or by its factor alone. The second
        result is the name of the bias."""
        kind, last, bias = equation.primitive.name, value, ""
        if kind not in ("dot_general", "conv_general_dilated", "mul"):
            return value, bias
        inputs = [atom for atom in _variables(equation.invars) if atom not in self.sources]
        is_factor = kind == "mul" and all(map(self._is_by_row, inputs))
        while len(users := self.users[value]) == 1 and (user := users[0]) is not None:
            name = user.primitive.name
            others = [atom for atom in user.invars if atom is not value]
            arrays = [atom for atom in _variables(others) if atom in self.sources]
            by_row = kind == "mul" and name in ("mul", "div") and all(map(self._is_by_row, others))
            if name in _MOVES:
                value = user.outvars[0]
                last = value if name == "transpose" else last
            elif (name in ("add", "sub") and arrays) or by_row or (name == "mul" and is_factor):
                is_factor = is_factor and name != "mul"
                bias = bias or (self._unchanged(arrays[0]) if name == "add" else "")
                value = last = user.outvars[0]
                ended.add(id(user))
            else:
                break
        return last, bias

    def _unchanged(self, atom: Any) -> str:
        """Return the name of an array that is used as it is, and nowhere else: where it is added,
        its gradient is that of a bias. Return "" otherwise."""
        name = self.sources[atom]
        while True:
            users = [each and each.primitive.name for each in self.users[atom]]
            if len(users) > 1 and {*users} != {"slice"}:
                return ""
            if (maker := self.makers.get(atom)) is None:
                return name
            if maker.primitive.name not in (*_MOVES, "slice", "stop_gradient"):
                return ""
            atom = maker.invars[0]

    def _is_by_row(self, atom: Any) -> bool:
        """Return True if a value is the same along the last axis."""
        if isinstance(atom, core.Literal) or not atom.aval.ndim:
            return False
        maker = self.makers.get(atom)
        if maker is not None and maker.primitive.name == "broadcast_in_dim":
            narrow: Any = maker.invars[0]
            axes = maker.params["broadcast_dimensions"]
            return dict(zip(axes, narrow.aval.shape, strict=True)).get(atom.aval.ndim - 1, 1) == 1
        return atom.aval.shape[-1] == 1


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if isinstance(atom, core.Var)]
