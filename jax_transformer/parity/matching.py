"""Matches of PyTorch tensors and arrays: a first answer from shapes, names, the order in which
modules run, and the numbers of layers. Nothing here is proven."""

import difflib
import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from jax_transformer.weights.layouts import Layout, layouts
from jax_transformer.weights.rules import Rule, Shape

_SAME_WORDS = """
    weight kernel scale gamma w table g gain; bias beta b offset; attn attention mha selfattn sa;
    cross encoderattn encdecattention crossattention crossattn xattn; q query wq; k key wk;
    v value wv;
    out o output; mlp ffn ff feedforward densereludense;
    up fc1 wi wi1 intermediate linear1 lin1 fc cfc w3;
    down fc2 linear2 lin2 wo w2; gate wi0; norm ln layernorm rms rmsnorm groupnorm normalization;
    bn batchnorm; embed embedding embeddings emb embedder wte tokens token tok shared; inner input;
    pos position positions positional wpe; encoder enc; decoder dec; final last f post;
    head lmhead lm classifier logits unembed; conv convolution conv2d; mean runningmean;
    var runningvar; forward fwd; backward reverse bwd; ih ii ig io ir iz densei;
    hh hi hf hg ho hn hr hz denseh
"""
_SYNONYMS = {
    word: group.split()[0] for group in _SAME_WORDS.split(";") for word in group.split()[1:]
}
_MOST_PARTS = 16
ROLES = {"weight", "bias", "mean", "var"}
_SKIPPED = {"model", "module", "layers", "layer", "blocks", "block", "h", "proj", "self", "modules"}


class Part(NamedTuple):
    """A tensor or an array."""

    name: str
    shape: Shape
    rank: int
    """The place of its module in the order of execution."""
    kind: str = ""
    """The class of its module."""


@dataclass(frozen=True)
class Match:
    """A tensor, its arrays, and the layouts that their shapes allow."""

    torch: str
    flax: tuple[str, ...]
    layouts: Sequence[Layout]
    kind: str
    reason: str
    choice: int = 0

    @property
    def rule(self) -> Rule:
        return Rule(self.torch, self.flax, *self.layouts[self.choice])

    def output(self, theirs: np.ndarray, shape: Shape) -> np.ndarray:
        """Return the output of their module with its features in the order of our array, which has
        this shape."""
        if not self.rule.axes or self.rule.cuts or self.kind in ("Conv1D", "Embedding"):
            return theirs
        rows = self.rule.rows(shape)
        same = theirs.size % len(rows) or (rows[1:] > rows[:-1]).all()
        return theirs if same else theirs.reshape(-1, len(rows))[:, rows].reshape(theirs.shape)


def numbers(name: str) -> tuple[int, ...]:
    """Return the numbers of layers: ``layers.3``; if there are none, those at the ends of words,
    as ``block_3`` and ``conv1``."""
    layers = re.findall(r"(?<![^._/])\d+(?=[._/]|$)", name)
    return tuple(map(int, layers or re.findall(r"\d+(?=[._/]|$)", name)))


def template(name: str) -> str:
    """Return a name with ``{}`` for the numbers of layers."""
    return re.sub(r"(^|[._/])\d+(?=[._/]|$)", r"\1{}", name)


def words(name: str) -> set[str]:
    """Return what a name says, in the words that both sides have for it."""
    result = set()
    for part in name.split("."):
        joined = part.replace("_", "").lower()
        if joined in ("bq", "bk", "bv", "bo"):
            result |= {"bias", _SYNONYMS.get(joined[1], joined[1])}
            continue
        bare = joined.rstrip("0123456789")  # after all of it: fc2 and wi_0 are words of their own
        if (known := _SYNONYMS.get(joined) or _SYNONYMS.get(bare)) is not None:
            result |= {known, *([] if joined in _SYNONYMS else re.findall(r"\d+$", joined))}
            continue
        for word in re.findall(r"[A-Z]?[a-z]+\d*|[A-Z]+(?![a-z])\d*|(?<=[a-z])\d+", part):
            word = word.lower()
            bare = word.rstrip("0123456789")
            result.add(_SYNONYMS.get(word, _SYNONYMS.get(bare, bare)))
            if word != bare and word not in _SYNONYMS:
                result.add(word.removeprefix(bare))
    return result - _SKIPPED or result


def matched(torch: Sequence[Part], flax: Sequence[Part]) -> list[Match]:
    """Return the likeliest matches. Tensors and arrays without one are left out.

    First come tensors of sizes that no array has, which several arrays hold together, of sizes that
    more arrays than tensors have; then modules with the same arrays; then what is left.
    """
    table = _Likeness(torch, flax)
    tensors, arrays = (Counter(map(_size, side)) for side in (torch, flax))
    joined, more = [part for part in torch if _size(part) not in arrays], arrays - tensors
    matches = table.packed(joined, [part for part in flax if _size(part) in more])
    matches += table.modules(*unmatched(matches, torch, flax))
    theirs, ours = unmatched(matches, torch, flax)
    for size in {math.prod(part.shape) for part in theirs}:
        same = ([[p] for p in side if math.prod(p.shape) == size] for side in (theirs, ours))
        matches += table.assigned(*same)
    return _alike(matches + table.packed(*unmatched(matches, torch, flax)))


def _alike(matches: Sequence[Match]) -> list[Match]:
    """Return matches whose square matrices have the layout that all others of their class have."""
    sure: dict[tuple[str, str], set[str]] = defaultdict(set)
    for match in matches:
        if len(match.layouts) == 1 and match.rule.axes in ("", "o i -> i o"):
            sure[match.kind, match.torch.rpartition(".")[2]].add(match.rule.axes)
    result = []
    for match in matches:
        same = sure[match.kind, match.torch.rpartition(".")[2]]
        fitting = [n for n, layout in enumerate(match.layouts) if {layout.axes} == same]
        result.append(replace(match, choice=fitting[0]) if fitting else match)
    return result


def unmatched(
    matches: Sequence[Match], torch: Sequence[Part], flax: Sequence[Part]
) -> tuple[list[Part], list[Part]]:
    """Return the tensors and the arrays that are in no match."""
    names = {match.torch for match in matches}, {n for match in matches for n in match.flax}
    return [p for p in torch if p.name not in names[0]], [p for p in flax if p.name not in names[1]]


class _Likeness:
    """Likeness of names: a rare word that both have counts for more than a frequent one."""

    def __init__(self, torch: Sequence[Part], flax: Sequence[Part]):
        self.words = {part.name: words(part.name) for part in (*torch, *flax)}
        self.counts = Counter(word for group in self.words.values() for word in group)
        self.torch = torch

    def of(self, one: Iterable[str], other: Iterable[str]) -> float:
        """Return a score of two groups of names."""
        a, b = (set().union(*(self.words[name] for name in names)) for names in (one, other))
        common = 2 * self._weight(a & b) / ((self._weight(a) + self._weight(b)) or 1)
        theirs, ours = (numbers(next(iter(names))) for names in (one, other))
        return 3 * common + difflib.SequenceMatcher(None, theirs, ours).ratio()

    def _weight(self, group: Iterable[str]) -> float:
        return sum(math.log(1 + len(self.words) / self.counts[word]) for word in group)

    def modules(self, theirs: Sequence[Part], ours: Sequence[Part]) -> list[Match]:
        """Return the best matches of modules whose arrays have the same sizes."""
        sides: list[dict[Any, list[list[Part]]]] = [defaultdict(list), defaultdict(list)]
        for side, parts in zip(sides, (theirs, ours), strict=True):
            owners: dict[str, list[Part]] = defaultdict(list)
            for part in parts:
                owners[owner(part.name)].append(part)
            for owned in owners.values():
                owned.sort(key=_kind)
                side[tuple(map(_kind, owned))].append(owned)
        both = [(sides[0][key], sides[1][key]) for key in sides[0] if key in sides[1]]
        return [match for pair in both for match in self.assigned(*pair)]

    def assigned(self, theirs: list[list[Part]], ours: list[list[Part]]) -> list[Match]:
        """Return the matches of modules for which the sum of the scores is highest."""
        from scipy.optimize import linear_sum_assignment

        for side in (theirs, ours):
            side[:] = _in_order(side)
        ordered = len({parts[0].rank for parts in ours}) > 1 or len(ours) == 1
        scores = np.full((len(theirs), len(ours)), -1e3)
        options: dict[tuple[int, int], list[tuple[Part, Part, list[Layout]]]] = {}
        for (i, one), (j, other) in itertools.product(enumerate(theirs), enumerate(ours)):
            pairs = _by_name(one, other)
            allowed = [layouts(a.shape, [b.shape], a.kind) for a, b in pairs]
            if all(allowed):
                options[i, j] = [(*pair, each) for pair, each in zip(pairs, allowed, strict=True)]
                likeness = self.of([p.name for p in one], [p.name for p in other])
                near = (1.5 if ordered else 0.1) / (1 + abs(i - j * len(theirs) / len(ours)))
                roles = [{role(part.name) for part in pair} - {""} for pair in pairs]
                apart = any(len(each) > 1 for each in roles) or any(_unlike(*p) for p in pairs)
                # Parts of a joined array in the usual order have the highest sum of products
                piece = re.search(r"\.(\d+)$", other[0].name)
                usual = 0.05 * int(piece[1]) * self._usual(one[0].name) if piece else 0.0
                turned = any(a.kind == "Linear" and a.shape[::-1] == b.shape for a, b in pairs)
                scores[i, j] = likeness + usual + near - 3 * apart + 0.5 * turned
        matches = []
        for i, j in zip(*linear_sum_assignment(-scores), strict=True):
            alone = len(theirs) == 1 == len(ours)
            for a, b, each in options.get((i, j), []):
                why = "only one of this size" if alone else self._reason(a.name, b.name)
                matches.append(Match(a.name, (b.name,), each, a.kind, why))
        return matches

    def _reason(self, theirs: str, ours: str) -> str:
        common = ", ".join(sorted(self.words[theirs] & self.words[ours]))
        reasons = [f"names ({common})"] if common else []
        reasons += ["numbers"] if numbers(theirs) and numbers(theirs) == numbers(ours) else []
        return " and ".join([*reasons, "order"] if len(reasons) < 2 else reasons)

    def packed(self, theirs: Sequence[Part], ours: Sequence[Part]) -> list[Match]:
        """Return the matches of tensors that arrays of several modules hold together.

        The modules' other arrays are parts of the other tensors of the same PyTorch module.
        """
        free = {part.name: part for part in ours}
        chosen: dict[str, tuple[str, ...]] = {}
        matches = []
        by_size = itertools.groupby(sorted(theirs, key=lambda p: -_size(p)), key=_size)
        for size, tensors in by_size:
            options: list[tuple[float, Part, tuple[str, ...], list[Layout]]] = []
            for tensor in tensors:
                owners = chosen.get(tensor.name.rpartition(".")[0])
                near = [*self._groups(list(free.values()), owners)] if owners else []
                # A module may have several layers, as an RNN
                for names in (*near, *self._groups(list(free.values()), None)):
                    shapes = [free[name].shape for name in names]
                    if sum(map(math.prod, shapes)) != size:
                        continue
                    if allowed := layouts(tensor.shape, shapes, tensor.kind):
                        place = abs(_place(tensor, self.torch) - _place(free[names[0]], ours))
                        score = self.of([tensor.name], names) - place + 9 * (names in near)
                        options.append((score, tensor, names, allowed))
            ended = set()
            for _, tensor, names, allowed in sorted(options, key=lambda each: -each[0]):
                if tensor.name not in ended and free.keys() >= {*names}:
                    ended.add(tensor.name)
                    around = tuple(name.rpartition(".")[0] for name in names)
                    chosen.setdefault(tensor.name.rpartition(".")[0], around)
                    reason = "the sum of the sizes"
                    matches.append(Match(tensor.name, names, allowed, tensor.kind, reason))
                    for name in names:
                        del free[name]
        return matches

    def _groups(
        self, free: Sequence[Part], owners: tuple[str, ...] | None
    ) -> Iterator[tuple[str, ...]]:
        """Return arrays of the same name in modules that are next to one another when they run, or
        in these modules; and arrays of one module and one shape, such as those of experts."""
        siblings: dict[Any, list[Part]] = defaultdict(list)
        for part in sorted(free, key=lambda part: part.rank):
            *around, _, leaf = ["", "", *part.name.split(".")]
            module = part.name.rpartition(".")[0]
            for key in ((*around, leaf), (*around, leaf, part.shape), (module, part.shape)):
                siblings[key].append(part)
        for group in siblings.values():
            if owners is not None and len({*owners}) > 1:
                inside = {part.name.rpartition(".")[0]: part.name for part in group}
                if inside.keys() >= {*owners}:
                    yield tuple(map(inside.__getitem__, owners))
                continue
            for count in range(2, min(len(group), _MOST_PARTS) + 1):
                for start in range(len(group) - count + 1):
                    parts = group[start : start + count]
                    yield tuple(sorted((p.name for p in parts), key=self._usual))

    def _usual(self, name: str) -> int:
        """Return the usual place of a part in a packed tensor."""
        order = ("q", "k", "v", "gate", "up")
        return next((order.index(word) for word in order if word in self.words[name]), len(order))


def _in_order(side: Sequence[list[Part]]) -> Iterator[list[Part]]:
    """Return modules' arrays in the order of execution; those of one place by the last number that
    not all of them have, and those without such a number at the end."""
    for rank in sorted({parts[0].rank for parts in side}):
        group = [parts for parts in side if parts[0].rank == rank]
        same = [(numbers(parts[0].name), parts) for parts in group]
        levels = itertools.zip_longest(*(each for each, _ in same))
        common = sum(1 for _ in itertools.takewhile(lambda level: len({*level}) == 1, levels))
        last = [(each[common:] or (math.inf,))[-1] for each, _ in same]
        yield from (same[i][1] for i in sorted(range(len(same)), key=last.__getitem__))


def _size(part: Part) -> int:
    return math.prod(part.shape)


def _is_vector(part: Part) -> bool:
    """Return True for a scale or an offset; a bias may have an axis of heads."""
    return is_bias(part.name) or sum(length > 1 for length in part.shape) < 2


def role(name: str) -> str:
    """Return what a tensor is in its module, as far as its name says so."""
    return next(iter(sorted(ROLES & words(_leaf(name)))), "")


def _kind(part: Part) -> tuple[str, bool, int]:
    return role(part.name), _is_vector(part), _size(part)


def _by_name(theirs: Sequence[Part], ours: Sequence[Part]) -> list[tuple[Part, Part]]:
    """Return the pairs of two modules' arrays, which are sorted by kind: those of one kind by what
    they are called if that is the same, and the others in their order."""

    def key(part: Part) -> tuple[Any, ...]:
        return *_kind(part), *sorted(words(_leaf(part.name)))

    names = {key(part): part for part in reversed(ours)}
    same = [names.pop(key(part), None) for part in theirs]
    others = (part for part in ours if part not in same)
    return [(one, other or next(others)) for one, other in zip(theirs, same, strict=True)]


def _unlike(tensor: Part, array: Part) -> bool:
    """Return True if one of them is an embedding, and the other the matrix of a product."""
    leaf, table = array.name.rpartition(".")[2], "Embedding" in tensor.kind
    return (table and leaf == "kernel") or (tensor.kind == "Linear" and leaf == "embedding")


def owner(name: str) -> str:
    """Return the module of an array: without the collection of Linen's statistics, and ``qkv.0`` of
    ``qkv.kernel.0``, a part of a joined array."""
    module, _, last = name.removeprefix("batch_stats.").rpartition(".")
    return f"{module.rpartition('.')[0]}.{last}" if last.isdecimal() else module


def _leaf(name: str) -> str:
    """Return what an array is called in its module."""
    module, _, last = name.rpartition(".")
    return module.rpartition(".")[2] if last.isdecimal() else last


def is_bias(name: str) -> bool:
    """Return True if the last part of a name says bias."""
    return "bias" in words(_leaf(name))


def _place(part: Part, parts: Sequence[Part]) -> float:
    """Return where a part runs among those with the same numbers, from 0 to 1."""
    ranks = sorted({p.rank for p in parts if numbers(p.name)[:1] == numbers(part.name)[:1]})
    return ranks.index(part.rank) / len(ranks)


def stacks(
    arrays: Mapping[str, Shape], modules: Iterable[str], tensors: Iterable[Part]
) -> dict[str, tuple[int, int]]:
    """Return the axis and the parts of :class:`.Stacked` for modules and arrays of several layers.

    The calls of ``modules`` are numbered where their arrays are not. An array with no tensor of its
    size, but with enough of the size of its parts, holds these along its first axis, an inner one,
    or one after the other along its last one.
    """
    tensors = list(tensors)
    sizes = Counter((is_bias(part.name), math.prod(part.shape)) for part in tensors)
    result: dict[str, tuple[int, int]] = {}
    counts: dict[str, int] = {}
    for module in modules:
        parts = module.split(".")
        for i, part in enumerate(parts):
            root = ".".join(parts[:i])
            if part.isdecimal() and i and not any(n.startswith(f"{root}.{part}.") for n in arrays):
                counts[root] = max(counts.get(root, 0), int(part) + 1)
                break
    for root, count in counts.items():
        inside = [shape for name, shape in arrays.items() if name.startswith(f"{root}.")]
        axes = [
            a for a in range(min(map(len, inside), default=0)) if {s[a] for s in inside} == {count}
        ]
        if axes:
            result[root] = axes[0], 0
    near, more = set[tuple[str, Shape]](), _more_than_tensors(arrays, sizes)
    shapes = {tuple(sorted(part.shape)) for part in tensors}
    for name, shape in sorted(arrays.items(), key=lambda each: -len(each[1])):
        bias, size = is_bias(name), math.prod(shape)
        free = more.get(name, Counter() if (bias, size) in sizes else sizes)
        if any(name.startswith(f"{root}.") for root in result):
            continue
        packed = any((bias, size * n) in sizes for n in (2, 3, 4))  # a part of a tensor itself
        layers = name.rpartition(".")[0], shape[:1]
        # Scales of layers look like a matrix, unless they are next to matrices of layers
        stacked = len(shape) > 2 - bias or (len(shape) == 2 and layers in near)
        options = [(0, 0, shape[0])] if stacked else []
        if not packed:
            options += [(a, 0, n) for a, n in enumerate(shape[1:-1], 1) if n in (2, 3, 4)]
            options += _pieces(shape, shapes)
        for axis, pieces, count in options:
            fits = count > 1 and shape[axis] % count == 0
            if fits and free[bias, size // count] >= count:
                result[name] = axis, pieces
                if axis == pieces == 0:
                    near.add(layers)
                break
    return {name: result[name] for name in (*counts, *arrays) if name in result}


def _more_than_tensors(
    arrays: Mapping[str, Shape], sizes: Counter[tuple[bool, int]]
) -> dict[str, Counter[tuple[bool, int]]]:
    """Return the arrays that are more than the tensors of their size, with the numbers of tensors
    of each size for which there is no array: joined keys and values may be as large as the queries.
    """
    alike: dict[tuple[bool, int], list[str]] = defaultdict(list)
    for name in sorted(arrays, key=lambda name: ("kv" not in name.lower(), -len(arrays[name]))):
        alike[is_bias(name), math.prod(arrays[name])].append(name)
    short = sizes - Counter({key: len(names) for key, names in alike.items()})
    return {
        name: short
        for key, names in alike.items()
        if key in sizes
        for name in names[: max(0, len(names) - sizes[key])]
    }


def _pieces(shape: Shape, shapes: Collection[Shape]) -> list[tuple[int, int, int]]:
    """Return the cuts of an array into equal parts along its last axis; also along its first one,
    which may be that of outputs, if the parts have the shape of a tensor."""

    def alike(axis: int, count: int) -> bool:
        part = [n // count if a == axis else n for a, n in enumerate(shape)]
        return tuple(sorted(part)) in shapes

    last = [(len(shape) - 1, n, n) for n in (2, 3, 4) if shape]
    first = [(0, n, n) for n in (2, 3, 4) if len(shape) > 1 and alike(0, n)]
    return sorted([*last, *first], key=lambda each: not alike(*each[:2]))
