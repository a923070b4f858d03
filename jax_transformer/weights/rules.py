"""Weight tables: lists of reversible rules between PyTorch's tensors and Flax's arrays. NumPy only.

A rule joins one tensor of a PyTorch checkpoint to one or several arrays of the Flax model; an alias
says that a tensor repeats another. The same table converts parameters, gradients and optimizer
moments, in both directions. Nothing is guessed from shapes or ranks.
"""

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from operator import methodcaller
from typing import Any, NamedTuple

import numpy as np

from jax_transformer.errors import ConfigError, InputError
from jax_transformer.storage import tensors
from jax_transformer.storage.tensors import LazyState, LazyTensor, TensorInfo
from jax_transformer.storage.tensors import Shape as Shape

Tensor = np.ndarray | LazyTensor
PART = "part"
"""The axis of a tensor that counts the Flax arrays it becomes."""


@dataclass(frozen=True, init=False)
class Rule:
    """One PyTorch tensor and the Flax arrays that it becomes.

    ``{i}`` in a name stands for a layer's number, see :func:`repeat`.
    """

    torch: str
    flax: tuple[str, ...]
    axes: str
    """The axes of the tensor and of each array, as einops writes them: ``o i -> i o`` transposes a
    matrix, ``(h e) d -> d h e`` divides its rows among heads, ``1 v -> v`` drops an axis of length
    1, and ``-x`` on the right turns an axis round. If empty, the axes are the same.

    With several arrays, ``part`` on the left counts them: ``(part o) i -> i o`` cuts the rows into
    consecutive parts, which may have several lengths, ``(h part e) d -> d (h e)`` does so within
    each head, and ``part o i -> i o`` gives each array one matrix. Without ``part`` every array
    has the same values.
    """
    sizes: Mapping[str, int]
    """Lengths of axes that the shapes of the arrays do not show."""

    def __init__(
        self,
        torch: str,
        flax: str | Sequence[str],
        axes: str = "",
        sizes: Mapping[str, int] | None = None,
    ):
        names = (flax,) if isinstance(flax, str) else tuple(flax)
        for field, value in zip(fields(self), (torch, names, axes, sizes or {}), strict=True):
            object.__setattr__(self, field.name, value)
        if axes:
            _parse(axes)

    @property
    def cuts(self) -> bool:
        """True if each array is a part of the tensor; otherwise each is all of it."""
        return bool(self.axes) and _parse(self.axes).cut is not None

    @property
    def layout(self) -> str:
        """The change of one array's axes in words; empty if there is none."""
        if not self.axes:
            return ""
        left, right, turned, _ = _parse(self.axes)
        plain = [tuple(name for name in group if name != PART) for group in left]
        if turned:
            return self.axes
        if [group for group in plain if group] == list(right):
            return f"squeeze axis {left.index(())}" if () in left else ""
        return "transpose" if len(plain) == 2 and plain[::-1] == list(right) else self.axes

    def torch_shape(self, flax_shapes: Sequence[Shape]) -> Shape:
        """Return the tensor's shape from its parts'."""
        lengths = self._lengths(flax_shapes)
        return tuple(map(math.prod, self._dims(lengths))) if self.axes else flax_shapes[0]

    def rows(self, flax_shape: Shape) -> np.ndarray:
        """Return where in the tensor's first axis those numbers are that follow in the array."""
        axes, (lengths,) = _parse(self.axes), self._lengths([flax_shape])
        names = axes.left[0]
        order = [names.index(name) for name in axes.right_names if name in names]
        sizes = [lengths[name] for name in names]
        return np.arange(math.prod(sizes)).reshape(sizes).transpose(order).ravel()

    def part(
        self, number: int, tensor: Tensor, flax_shapes: Sequence[Shape], *, own: bool = False
    ) -> np.ndarray:
        """Return a part, contiguous; it may share the tensor's memory unless ``own`` is set."""
        full = part = _read(tensor)
        lengths = self._lengths(flax_shapes)
        if self.axes:
            axes = _parse(self.axes)
            cut = self._cut(full, number, lengths)
            cut = cut.reshape([lengths[number][name] for name in axes.left_names])
            part = np.flip(cut.transpose(axes.order), axes.reversed).reshape(flax_shapes[number])
        part = tensors.contiguous(part)
        return _owned(part, full) if own else part

    def joined(self, arrays: Sequence[Tensor], *, own: bool = False) -> np.ndarray:
        """Return the tensor, contiguous; it may share an array's memory unless ``own`` is set."""
        shapes = [array.shape for array in arrays]
        lengths = self._lengths(shapes)
        if self.cuts:
            tensor = np.empty(self.torch_shape(shapes), tensors.DTYPES[self._dtype(arrays)])
            for number, array in enumerate(arrays):
                cut = self._cut(tensor, number, lengths)
                cut[...] = self._uncut(_read(array)).reshape(cut.shape)
            return tensor
        first = _read(arrays[0])
        for name, array in zip(self.flax[1:], arrays[1:], strict=True):
            if not tensors.same(_read(array), first):
                raise InputError(f"{name} and {self.flax[0]} differ, but {self.torch} holds both")
        tensor = tensors.contiguous(self._uncut(first).reshape(self.torch_shape(shapes)))
        return _owned(tensor, first) if own else tensor

    def holds(self, tensor: np.ndarray, arrays: Sequence[np.ndarray]) -> bool:
        """Return True if the tensor is made of the arrays, bit for bit. One alone is not copied."""
        if len(arrays) == 1:
            shape = self.torch_shape([arrays[0].shape])
            return tensors.same(self._uncut(arrays[0]).reshape(shape), tensor)
        return tensors.same(self.joined(arrays), tensor)

    def _dtype(self, arrays: Sequence[Tensor]) -> str:
        """Return the name of the arrays' dtype. Raises InputError if they have several."""
        dtypes = {str(array.dtype) for array in arrays}
        if len(dtypes) > 1:
            raise InputError(f"{self.torch}: its parts are {' and '.join(sorted(dtypes))}")
        return dtypes.pop()

    def _uncut(self, array: np.ndarray) -> np.ndarray:
        """Return an array with the axes that the tensor's are made of, without ``part``."""
        if not self.axes:
            return array
        axes, (lengths,) = _parse(self.axes), self._lengths([array.shape])
        split = array.reshape([lengths[name] for name in axes.right_names])
        return np.flip(split, axes.reversed).transpose(np.argsort(axes.order))

    def _lengths(self, flax_shapes: Sequence[Shape]) -> list[dict[Any, int]]:
        """Return each axis's length, for each array. Raises ConfigError if a shape does not have
        these axes, or if an axis has several lengths that no ``part`` has for itself.
        """
        cut = _parse(self.axes).cut if self.axes else None
        own = cut.inner if cut else ()
        every = [self._match(*each) for each in zip(self.flax, flax_shapes, strict=False)]
        common = [{name: n for name, n in each.items() if name not in own} for each in every]
        if any(each != common[0] for each in common):
            shapes = " and ".join(map(str, dict.fromkeys(flax_shapes)))
            raise ConfigError(f"{self.torch} cannot hold arrays of the shapes {shapes}")
        return every

    def _match(self, name: str, shape: Shape) -> dict[Any, int]:
        """Return the length of each axis on the right for an array of this name and shape."""
        if not self.axes:
            return dict(enumerate(shape))
        right, lengths = _parse(self.axes).right, dict(self.sizes)
        fits = len(right) == len(shape)
        for group, length in zip(right, shape, strict=False):
            unknown = [axis for axis in group if axis not in lengths]
            known = math.prod(lengths[axis] for axis in group if axis in lengths)
            if len(unknown) == 1 and known:
                lengths[unknown[0]] = length // known
            fits &= length == math.prod(lengths.get(axis, -1) for axis in group)
        if not fits:
            sizes = "".join(f", {axis}={length}" for axis, length in self.sizes.items())
            raise ConfigError(
                f"{name} has the shape {shape}, and the rule of {self.torch} is"
                f" '{self.axes}'{sizes}"
            )
        return lengths

    def _dims(self, lengths: Sequence[Mapping[str, int]]) -> list[list[int]]:
        """Return the lengths that each axis of the tensor is made of; those of all parts added."""
        axes, first = _parse(self.axes), lengths[0]
        dims = [[first[name] for name in group if name != PART] for group in axes.left]
        if axes.cut is not None:
            outer = [first[name] for name in axes.cut.outer]
            dims[axes.cut.axis] = [*outer, sum(map(axes.cut.length, lengths))]
        return dims

    def _cut(
        self, tensor: np.ndarray, number: int, lengths: Sequence[Mapping[str, int]]
    ) -> np.ndarray:
        cut, dims = _parse(self.axes).cut, self._dims(lengths)
        if cut is None:
            return tensor
        start, end = (sum(map(cut.length, lengths[:n])) for n in (number, number + 1))
        before = sum(map(len, dims[: cut.axis])) + len(cut.outer)
        view = tensor.reshape([length for group in dims for length in group])
        return view[(slice(None),) * before + (slice(start, end),)]


class _Cut(NamedTuple):
    """The axis of a tensor that has ``part``."""

    axis: int
    outer: tuple[str, ...]
    inner: tuple[str, ...]

    def length(self, lengths: Mapping[str, int]) -> int:
        """Return the length of a part."""
        return math.prod(lengths[name] for name in self.inner)


class _Axes(NamedTuple):
    """The axes of a rule."""

    left: tuple[tuple[str, ...], ...]
    """The axes that each axis of the tensor is made of, outermost first."""
    right: tuple[tuple[str, ...], ...]
    reversed: tuple[int, ...]
    """Numbers of the axes, among all on the right, that are turned round."""
    cut: _Cut | None

    @property
    def left_names(self) -> list[str]:
        return [name for group in self.left for name in group if name != PART]

    @property
    def right_names(self) -> list[str]:
        return [name for group in self.right for name in group]

    @property
    def order(self) -> list[int]:
        """The number on the left of each axis on the right."""
        return [self.left_names.index(name) for name in self.right_names]


@functools.cache
def _parse(axes: str) -> _Axes:
    """Read the notation. Raises ConfigError if it is not one."""
    sides = [re.findall(r"\(([^()]*)\)|(\S+)", side) for side in axes.split("->")]
    groups = [
        tuple(() if word == "1" else tuple((inside or word).split()) for inside, word in side)
        for side in sides
    ]
    names = [[name for group in side for name in group] for side in groups]
    every = [name for side in names for name in side]
    if len(sides) != 2 or not all(re.fullmatch(r"-?[a-z_]\w*", name) for name in every):
        raise ConfigError(f"axes '{axes}': write them as 'o i -> i o' or '(h e) d -> d h e'")
    turned = tuple(i for i, name in enumerate(names[1]) if name.startswith("-"))
    right = tuple(tuple(name.removeprefix("-") for name in group) for group in groups[1])
    once = {name.removeprefix("-") for name in names[1]} - {PART}
    counts = len(names[0]) - (PART in names[0]), len(names[1]), len(once)
    if set(names[0]) - {PART} != once or len(set(counts)) > 1:
        raise ConfigError(
            f"axes '{axes}': every axis stands once on each side, but '{PART}' on the left only"
        )
    cuts = [
        _Cut(axis, group[: group.index(PART)], group[group.index(PART) + 1 :])
        for axis, group in enumerate(groups[0])
        if PART in group
    ]
    return _Axes(groups[0], right, turned, cuts[0] if cuts else None)


def _read(array: Tensor) -> np.ndarray:
    return array.read() if isinstance(array, LazyTensor) else array


def _owned(array: np.ndarray, origin: np.ndarray) -> np.ndarray:
    """Return the array, or a copy if its memory is not its own."""
    is_own = array.flags.owndata and not np.may_share_memory(array, origin)
    return array if is_own else array.copy()


@dataclass(frozen=True)
class Alias:
    """A tensor that repeats another one, bit for bit, because the PyTorch module ties them."""

    torch: str
    of: str


_FUSED, _LEAVES = ("query", "key", "value"), ("kernel", "bias")
Table = list[Rule | Alias]
Rules = Sequence[Rule | Alias]


def repeat(layers: int, rules: Iterable[Rule | Alias]) -> Table:
    """Return ``rules`` once for each layer, with its number for ``{i}`` on both sides."""
    rules = list(rules)
    numbered = [methodcaller("replace", "{i}", str(i)) for i in range(layers)]
    return [_renamed(rule, change) for change in numbered for rule in rules]


def _renamed(rule: Rule | Alias, change: Callable[[str], str]) -> Rule | Alias:
    if isinstance(rule, Alias):
        return Alias(change(rule.torch), change(rule.of))
    return replace(rule, torch=change(rule.torch), flax=tuple(map(change, rule.flax)))


def linear(torch: str, flax: str, *, bias: bool = True, axes: str = "o i -> i o") -> Table:
    """Return the rules of a torch.nn.Linear, or of a layer whose weight has other axes."""
    biases: Table = [Rule(f"{torch}.bias", f"{flax}.bias")] if bias else []
    return [Rule(f"{torch}.weight", f"{flax}.kernel", axes), *biases]


def convolution(torch: str, flax: str, window: str = "y x", *, bias: bool = True) -> Table:
    """Return the rules of a torch.nn.Conv2d, or of one with other axes in its ``window``."""
    return linear(torch, flax, bias=bias, axes=f"o i {window} -> {window} i o")


def layer_norm(
    torch: str, flax: str, *, bias: bool = True, names: tuple[str, str] = ("weight", "bias")
) -> Table:
    """Return the rules of a torch.nn.LayerNorm, or of another norm by its parameters' ``names``."""
    scale, shift = names
    biases: Table = [Rule(f"{torch}.{shift}", f"{flax}.bias")] if bias else []
    return [Rule(f"{torch}.{scale}", f"{flax}.scale"), *biases]


def embedding(torch: str, flax: str) -> Table:
    """Return the rule of a torch.nn.Embedding."""
    return [Rule(f"{torch}.weight", f"{flax}.embedding")]


def attention(
    torch: str, flax: str, names: Mapping[str, str], *, bias: bool = True, key_bias: bool = True
) -> Table:
    """Return the rules of an attention of four torch.nn.Linear.

    ``names`` has PyTorch's name of each of query, key, value and out. ``key_bias`` says if keys
    have a bias where the others have one.
    """
    has_bias = {"query": bias, "key": bias and key_bias, "value": bias, "out": bias}
    return [
        rule
        for part in has_bias
        for rule in linear(f"{torch}.{names[part]}", f"{flax}.{part}", bias=has_bias[part])
    ]


def packed_attention(torch: str, flax: str, *, bias: bool = True) -> Table:
    """Return the rules of a torch.nn.MultiheadAttention.

    Its ``in_proj_weight`` (3d, d) holds query, key and value in this order.
    """
    kernels, biases = ([f"{flax}.{part}.{leaf}" for part in _FUSED] for leaf in _LEAVES)
    packed: Table = [Rule(f"{torch}.in_proj_weight", kernels, "(part o) i -> i o")]
    packed += [Rule(f"{torch}.in_proj_bias", biases, "(part o) -> o")] if bias else []
    return [*packed, *linear(f"{torch}.out_proj", f"{flax}.out", bias=bias)]


def fused_attention(
    torch: str,
    flax: str,
    heads: int,
    *,
    qkv: str = "qkv",
    out: str = "linear_layer",
    bias: bool = True,
) -> Table:
    """Return the rules of an attention with one torch.nn.Linear (h·3e, d) and an output layer.

    The rows of that layer are head after head, in each its query, key and value.
    """
    kernels, biases = ([f"{flax}.{part}.{leaf}" for part in _FUSED] for leaf in _LEAVES)
    sizes = {"h": heads}
    fused: Table = [Rule(f"{torch}.{qkv}.weight", kernels, "(h part e) d -> d (h e)", sizes)]
    fused += [Rule(f"{torch}.{qkv}.bias", biases, "(h part e) -> (h e)", sizes)] if bias else []
    return [*fused, *linear(f"{torch}.{out}", f"{flax}.out", bias=bias)]


def aliases(table: Iterable[Rule | Alias]) -> dict[str, str]:
    """Return the tensor that each alias repeats, by the alias."""
    return {rule.torch: rule.of for rule in table if isinstance(rule, Alias)}


def without_aliases(table: Iterable[Rule | Alias]) -> list[Rule]:
    """Return the rules of arrays."""
    return [rule for rule in table if isinstance(rule, Rule)]


def restrict(table: Iterable[Rule | Alias], flax_names: Iterable[str]) -> list[Rule]:
    """Return the rules of the named arrays: of what is trained, for gradients and moments."""
    names = set(flax_names)
    return [rule for rule in without_aliases(table) if names.issuperset(rule.flax)]


def within(table: Table, prefix: str) -> Table:
    """Return the rules below ``prefix``, without it. Raises ConfigError for one that crosses it."""
    inner, crossing = [], []
    for rule in table:
        ours = rule.flax if isinstance(rule, Rule) else (rule.of,)
        inside = {name.startswith(prefix) for name in (rule.torch, *ours)}
        if len(inside) > 1:
            crossing.append(rule.torch)
        elif True in inside:
            inner.append(_renamed(rule, methodcaller("removeprefix", prefix)))
    if crossing:
        raise ConfigError(
            f"{prefix.rstrip('.')} does not stand by itself in this architecture:"
            f" {', '.join(crossing)}"
        )
    return inner


def torch_shapes(table: Rules, flax_shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the shape of every PyTorch tensor that the table names."""
    shapes = {
        rule.torch: rule.torch_shape([flax_shapes[name] for name in rule.flax])
        for rule in without_aliases(table)
    }
    return shapes | {name: shapes[other] for name, other in aliases(table).items()}


def check_complete(table: Table, flax_names: Iterable[str]) -> None:
    """Raise ValueError unless the table names each PyTorch tensor and each Flax array once."""
    arrays = without_aliases(table)
    torch = Counter(rule.torch for rule in table)
    flax = Counter(name for rule in arrays for name in rule.flax)
    expected = set(flax_names)
    problems = {
        "named twice": {*(torch - Counter(set(torch))), *(flax - Counter(set(flax)))},
        "aliases of tensors without a rule": {*aliases(table).values()} - {r.torch for r in arrays},
        "arrays of the model without a rule": expected - flax.keys(),
        "not arrays of the model": flax.keys() - expected,
    }
    listed = [f"{problem}: {', '.join(sorted(odd))}" for problem, odd in problems.items() if odd]
    if listed:
        summary = "the weight table does not cover the model exactly once"
        raise ValueError(f"{summary}: {'; '.join(listed)}")


def to_flax(
    table: Rules, state: Mapping[str, np.ndarray], flax_shapes: Mapping[str, Shape]
) -> dict[str, np.ndarray]:
    """Return the Flax arrays by path. Raises one InputError that names every tensor that is
    missing, unexpected or mis-shaped, and every alias that differs.
    """
    infos = {name: TensorInfo(array.shape, array.dtype.name) for name, array in state.items()}
    problems = tensors.problems(infos, torch_shapes(table, flax_shapes), floating=False)
    tensors.refuse(problems + tensors.differing_ties(aliases(table), state))
    return {
        name: rule.part(number, state[rule.torch], [flax_shapes[n] for n in rule.flax], own=True)
        for rule in without_aliases(table)
        for number, name in enumerate(rule.flax)
    }


def to_torch(table: Rules, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the PyTorch tensors by name, in the table's order."""
    joined = {
        rule.torch: rule.joined([arrays[name] for name in rule.flax], own=True)
        for rule in without_aliases(table)
    }
    return {
        rule.torch: joined[rule.of].copy() if isinstance(rule, Alias) else joined[rule.torch]
        for rule in table
    }


# The same for tensors that are read one at a time


def to_flax_lazily(
    table: Table, state: LazyState, flax_shapes: Mapping[str, Shape]
) -> dict[str, LazyTensor]:
    """Return the Flax arrays by path, none of them read; the tensors fit the table."""
    arrays = {}
    for rule in without_aliases(table):
        shapes, tensor = [flax_shapes[name] for name in rule.flax], state[rule.torch]
        for number, name in enumerate(rule.flax):
            read = partial(rule.part, number, tensor, shapes)
            arrays[name] = LazyTensor(TensorInfo(shapes[number], tensor.dtype), read)
    return arrays


def to_torch_lazily(table: Table, arrays: LazyState) -> dict[str, LazyTensor]:
    """Return the PyTorch tensors in the table's order, unread; tied ones are one LazyTensor."""
    joined = {}
    for rule in without_aliases(table):
        parts = [arrays[name] for name in rule.flax]
        info = TensorInfo(rule.torch_shape([part.shape for part in parts]), rule._dtype(parts))
        joined[rule.torch] = LazyTensor(info, partial(rule.joined, parts))
    tied = aliases(table)
    return {rule.torch: joined[tied.get(rule.torch, rule.torch)] for rule in table}
