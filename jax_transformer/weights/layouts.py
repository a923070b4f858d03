"""The axes with which a tensor may become one array or several, by their shapes alone."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jax_transformer.errors import ConfigError
from jax_transformer.weights.rules import PART, Rule, Shape

_SINGLE, _SEVERAL = "dikmn", "hefgqrst"
_NAMES = {1: "n", 2: "oi", 3: "oix", 4: "oiyx", 5: "oizyx"}
"""The names of axes that stay whole, by their number: those of a matrix and of convolutions."""
_MOST_HEADS = 64
Groups = tuple[tuple[str, ...], ...]


class Layout(NamedTuple):
    """The last two arguments of a :class:`.Rule`."""

    axes: str
    sizes: Mapping[str, int]


class FeatureOrder(NamedTuple):
    """The features of a row as axes, in PyTorch's order and in Flax's."""

    torch: str
    flax: str
    sizes: Mapping[str, int]

    def indices(self, count: int) -> np.ndarray:
        """Return where in a row of PyTorch's features each of Flax's is."""
        names = self.torch.split()
        features = np.arange(count).reshape([self.sizes.get(name, -1) for name in names])
        return features.transpose([names.index(name) for name in self.flax.split()]).ravel()

    def layout(self, torch: Shape, flax: Shape, *, same: bool) -> Layout | None:
        """Return the layout of a matrix or a vector with such rows; None if the shapes do not fit.

        ``same`` says that the axes of a matrix are in the same order.
        """
        inputs, rest = " i" * (len(torch) - 1), torch[1:]
        flat, divided = (torch[0],), (self.sizes["h"], torch[0] // self.sizes["h"])
        heads = self.flax.partition("h ")[2]
        for features, written in ((flat, f"({self.flax})"), (divided, f"h ({heads})")):
            if features is divided and not self.flax.startswith("h"):
                break
            if (*features, *rest) == tuple(flax) and (same or not rest or features is divided):
                return Layout(f"({self.torch}){inputs} -> {written}{inputs}", self.sizes)
            if (*rest, *features) == tuple(flax) and not same:
                return Layout(f"({self.torch}){inputs} -> {inputs[1:]} {written}", self.sizes)
        return None


def rotary(count: int, size: int) -> list[FeatureOrder]:
    """Return the two orders of queries or keys whose heads are of this size, if one side rotates
    neighbouring features, and the other those that are half a head apart."""
    return _orders(count // size, 2, "h e g") if size % 2 == count % size == 0 else []


def joined(count: int) -> Iterator[FeatureOrder]:
    """Return the orders of joined queries, keys and values, if one side has those of each head
    together, and the other those of all heads."""
    for parts, heads in itertools.product((3, 2), range(2, min(count, _MOST_HEADS) + 1)):
        if count % (heads * parts) == 0:
            yield from _orders(heads, parts, "g h e")


def _orders(heads: int, parts: int, other: str) -> list[FeatureOrder]:
    sizes = {"h": heads, "g": parts}
    return [FeatureOrder("h g e", other, sizes), FeatureOrder(other, "h g e", sizes)]


class _Layout(NamedTuple):
    left: Groups
    right: Groups
    sizes: Mapping[str, int]

    def written(self) -> Layout:
        sides = (
            " ".join(f"({' '.join(g)})" if len(g) > 1 else "".join(g) or "1" for g in groups)
            for groups in (self.left, self.right)
        )
        return Layout("" if self.left == self.right else " -> ".join(sides), self.sizes)


def layouts(torch: Shape, flax: Sequence[Shape], kind: str = "") -> list[Layout]:
    """Return the layouts of a tensor and its arrays, the likeliest first; empty if there are none.

    ``kind`` is the class of the PyTorch module that has the tensor.
    """
    options = _single(torch, flax[0], kind) if len(flax) == 1 else _several(torch, flax, kind)
    written = [layout.written() for layout in options]
    return [layout for i, layout in enumerate(written) if layout not in written[:i]]


def flattened(torch: Shape, flax: Shape) -> list[Layout]:
    """Return the layouts of a kernel behind a flattened image: PyTorch's features are channel by
    channel, and Flax's pixel by pixel, or the other way round. The shapes tell no sizes."""
    if len(torch) != 2 or tuple(flax) != tuple(torch[::-1]):
        return []
    inputs = torch[1]
    counts = [n for n in range(2, inputs // 2 + 1) if inputs % n == 0]
    return [Layout("o (h e) -> (e h) o", {"h": count}) for count in counts]


def _single(torch: Shape, flax: Shape, kind: str) -> Iterator[_Layout]:
    if math.prod(torch) != math.prod(flax):
        return
    if len(torch) == len(flax):
        yield from _permuted(torch, flax, kind)
        if 1 not in torch:
            return
    fine, coarse = ([n for n in shape if n > 1] for shape in (flax, torch))
    swapped = len(fine) < len(coarse)
    if swapped:
        fine, coarse = coarse, fine
    outputs = None if swapped else -1 if kind == "Conv1D" else 0
    for groups in sorted(_divided(fine, coarse), key=lambda groups: _unlikely(groups, outputs)):
        single, several = iter(_SINGLE), iter(_SEVERAL)
        names = {}
        for group in groups:
            for i in sorted(group):
                names[i] = next(single if len(group) == 1 else several)
        grouped, each = (tuple(names[i] for i in group) for group in groups), iter(sorted(names))
        finer = ((names[next(each)],) for _ in fine)
        left, right = (finer, grouped) if swapped else (grouped, finer)
        sizes = {names[i]: fine[i] for g in groups for i in g[1:]} if swapped else {}
        yield _Layout(_with_ones(torch, left), _with_ones(flax, right), sizes)


def _unlikely(groups: Sequence[Sequence[int]], outputs: int | None) -> tuple[bool, int]:
    """Return a key that is small for the layouts of linear layers: the tensor's axis of ``outputs``
    is last in Flax, and an axis that is made of several has neighbours in their order."""
    last = max((i for group in groups for i in group), default=0)
    apart = sum(b - a != 1 for group in groups for a, b in itertools.pairwise(group))
    return (outputs is not None and bool(groups) and last not in groups[outputs]), apart


def _with_ones(shape: Shape, groups: Iterator[tuple[str, ...]]) -> Groups:
    groups = iter(groups)
    return tuple(() if length == 1 else next(groups) for length in shape)


def _permuted(torch: Shape, flax: Shape, kind: str) -> Iterator[_Layout]:
    """Return the orders of axes that make one shape of the other."""
    count = len(torch)
    names = _NAMES.get(count, _SINGLE + _SEVERAL)[:count]
    window = tuple(range(2, count))
    usual = [(*window, 1, 0), (*window, 0, 1)] if count > 1 else []
    if "Embedding" in kind or kind in ("Conv1D", "") or ("Conv" not in kind and count > 2):
        usual.insert(0, tuple(range(count)))
    for order in dict.fromkeys((*usual, *itertools.permutations(range(count)))):
        if tuple(torch[i] for i in order) != tuple(flax):
            continue
        left = tuple((name,) for name in names)
        right = tuple((names[i],) for i in order)
        turned = tuple((f"-{names[i]}",) if i > 1 else (names[i],) for i in order)
        both = [right, turned] if window and "Conv" in kind else [right]
        for each in both[::-1] if "Transpose" in kind else both:
            yield _Layout(left, each, {})


def _divided(fine: Sequence[int], coarse: Sequence[int]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Return the ways to divide axes among others, each the product of its own."""

    def divide(free: tuple[int, ...], rest: Sequence[int]) -> Iterator[tuple[tuple[int, ...], ...]]:
        if not rest:
            if not free:
                yield ()
            return
        for count in range(1, len(free) - len(rest) + 2):
            for group in itertools.permutations(free, count):
                if math.prod(fine[i] for i in group) == rest[0]:
                    for others in divide(tuple(i for i in free if i not in group), rest[1:]):
                        yield (group, *others)

    return divide(tuple(range(len(fine))), coarse)


def _several(torch: Shape, flax: Sequence[Shape], kind: str) -> Iterator[_Layout]:
    """Return the ways to cut a tensor into parts."""
    if sum(map(math.prod, flax)) != math.prod(torch):
        return
    interleaved = []
    for axis, length in sorted(enumerate(torch), reverse=kind == "Conv1D"):
        rest = math.prod(torch) // length
        lengths = [math.prod(shape) // rest for shape in flax]
        if any(n * rest != math.prod(shape) for n, shape in zip(lengths, flax, strict=True)):
            continue
        equal = len({*map(tuple, flax)}) == 1
        for layout in _single((*torch[:axis], lengths[0], *torch[axis + 1 :]), flax[0], kind):
            left, right, sizes = layout
            cut = _Layout(_inserted(left, axis, 0), right, sizes)
            if equal or _fits(cut, torch, flax):
                yield cut
            if equal and len(left[axis]) > 1:
                interleaved.append(_Layout(_inserted(left, axis, 1), right, sizes))
            elif equal and left[axis]:
                interleaved += _by_heads(layout, axis, lengths[0])
    yield from interleaved
    if len({*map(tuple, flax)}) == 1 and torch[0] == len(flax):
        for left, right, sizes in _single(torch[1:], flax[0], kind):
            yield _Layout(((PART,), *left), right, sizes)


def _fits(layout: _Layout, torch: Shape, flax: Sequence[Shape]) -> bool:
    """Return True if a tensor can be cut into parts of several lengths."""
    try:
        return Rule("", [""] * len(flax), *layout.written()).torch_shape(flax) == tuple(torch)
    except ConfigError:
        return False


def _by_heads(layout: _Layout, axis: int, length: int) -> Iterator[_Layout]:
    """Return the layouts in which every head has a part of each array, for every number of heads
    that is possible."""
    name, used = layout.left[axis][0], [n for group in layout.left for n in group]
    h, e = [each for each in _SEVERAL if each not in used][:2]
    halves = {name: (h, e)}
    right = tuple(
        tuple(n for each in group for n in halves.get(each, (each,))) for group in layout.right
    )
    left = tuple((h, PART, e) if i == axis else group for i, group in enumerate(layout.left))
    turned = any(f"-{name}" in group for group in layout.right)
    for heads in range(2, min(length, _MOST_HEADS) + 1):
        if length % heads == 0 and not turned:
            sizes = {n: size for n, size in layout.sizes.items() if n != name} | {h: heads}
            sizes |= {e: length // heads} if name in layout.sizes else {}
            yield _Layout(left, right, sizes)


def _inserted(left: Groups, axis: int, place: int) -> Groups:
    group = (*left[axis][:place], PART, *left[axis][place:])
    return (*left[:axis], group, *left[axis + 1 :])
