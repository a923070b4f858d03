"""Pairs of Flax and PyTorch modules, by a weight table, by patterns or guessed; gradients."""

import difflib
import itertools
import math
import operator
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jax_transformer.errors import ConfigError, nearest
from jax_transformer.parity import matching
from jax_transformer.parity.functions import ModelFunction
from jax_transformer.weights import rules
from jax_transformer.weights.rules import Rule, Table

Patterns = Mapping[str, str] | Sequence[tuple[str, str]]
"""Names of PyTorch modules to names of Flax modules, with placeholders in braces."""


_MORE = 0.9
"""The score by which pairs in another order must be better: less than for one equal output or name,
and more than similar names have."""


class Pair(NamedTuple):
    """Two modules that should be equal, by their dotted names."""

    ours: str
    theirs: str


def from_table(table: Table, ours: Collection[str], theirs: Collection[str]) -> list[Pair]:
    """Return the pairs that a weight table implies among the modules that were called.

    Two modules are a pair if they hold exactly the same weights, so blocks, attentions, norms and
    linear layers are paired whatever their names are. Of several modules around the same weights
    the innermost is taken. Modules without weights, and those whose weights the other side packs
    into a larger tensor, are not paired. The point of an array is paired with the module of its
    tensor.
    """
    # Tables of relative positions are left out: T5 keeps the stack's in its first block
    arrays = rules.without_aliases(table)
    arrays = [rule for rule in arrays if not any(".relative." in name for name in rule.flax)]
    our_modules = _by_weights(ours, [rule.flax for rule in arrays])
    their_modules = _by_weights(theirs, [(rule.torch,) for rule in arrays])
    result = {
        their_modules[weights]: module
        for weights, module in our_modules.items()
        if weights in their_modules
    }
    for rule in arrays:
        if rule.flax[0] in ours and (module := rule.torch.rpartition(".")[0]) in theirs:
            result.setdefault(module, rule.flax[0])
    return [Pair(*names) for names in map(reversed, result.items())]


def _by_weights(
    modules: Collection[str], weights: Sequence[Sequence[str]]
) -> dict[frozenset[int], str]:
    """Return the innermost module that holds some of the weights, by the numbers of these.

    Modules that hold some of one weight's names, but not all, are left out.
    """
    innermost = {}
    for module in sorted(modules, key=lambda name: name.count(".")):
        inside = [[name.startswith(f"{module}.") for name in names] for names in weights]
        numbers = frozenset(i for i, each in enumerate(inside) if any(each))
        if numbers and all(all(inside[i]) for i in numbers):
            innermost[numbers] = module
    return innermost


def from_patterns(patterns: Patterns, ours: Collection[str], theirs: Collection[str]) -> list[Pair]:
    """Return the pairs that patterns such as ``{"their.layers.{i}": "our.blocks.{i}"}`` name.

    Each ``{word}`` stands for one part of a dotted name, the same on both sides. Raises one
    ConfigError that lists every pattern that matches no module, with the nearest name.
    """
    pairs: list[Pair] = []
    problems: list[str] = []
    for torch_pattern, flax_pattern in (
        patterns.items() if isinstance(patterns, Mapping) else patterns
    ):
        placeholders = re.findall(r"\{(\w+)\}", torch_pattern)
        if sorted(placeholders) != sorted(re.findall(r"\{(\w+)\}", flax_pattern)):
            rule = f"the rule {torch_pattern!r}: {flax_pattern!r}"
            problems.append(f"{rule} has different placeholders on its two sides")
            continue
        regex = re.compile(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>[^.]+)", re.escape(torch_pattern)))
        matches = [match for match in map(regex.fullmatch, theirs) if match]
        if not matches:
            close = nearest(torch_pattern, sorted(theirs))
            problems.append(f"the PyTorch model has no module {torch_pattern!r}{close}")
        for match in matches:
            name = flax_pattern.format(**match.groupdict())
            if name not in ours:
                close = nearest(name, sorted(ours))
                problems.append(f"the Flax model has no module {name!r}{close}")
            pairs.append(Pair(name, match.string))
    if problems:
        raise ConfigError("; ".join(problems))
    return pairs


class Called(NamedTuple):
    """A module that was called, for a guess of its counterpart."""

    name: str
    shape: tuple[int, ...]
    """The shape of its first output."""
    sizes: tuple[int, ...] | None
    """The sizes of its parameters, in ascending order; None if they are not known."""
    figures: tuple[float, ...] = ()
    """Sums of that output's numbers, which no order of axes changes."""


def guessed(ours: Sequence[Called], theirs: Sequence[Called]) -> list[Pair]:
    """Return the pairs of modules that were called in the same order and return arrays of the same
    shape, up to the order of axes, and to axes that are one on the other side. Modules with
    parameters are paired with such only, those without if their names or outputs are equal.

    Of all such lists the one is taken whose pairs have the most equal parameters, then parameters
    but no parts, then the same words in their names, then equal outputs, in another layer too (the
    alignment of Needleman and Wunsch 1970, without a cost for a gap). The parts of two modules may
    then correspond in another order, if that is clearly more. A module without parts is no pair of
    one around its counterpart. Modules whose outputs are not equal are no pair if a part of one
    corresponds to a module outside of the other, as a norm.
    """
    scores = _scores(ours, theirs)
    pairs = _aligned(scores)
    owners = [[called.name.rpartition(".")[0] for called in side] for side in (ours, theirs)]
    for group in dict.fromkeys((owners[0][i], owners[1][j]) for i, j in pairs):
        inside = [(i, j) for i, j in pairs if (owners[0][i], owners[1][j]) == group]
        others = [pair for pair in pairs if pair not in inside]
        free = [[k for k, owner in enumerate(owners[n]) if owner == group[n]] for n in (0, 1)]
        chosen = list[tuple[int, int]]()
        for i, j in sorted(itertools.product(*free), key=lambda pair: -scores[pair[0]][pair[1]]):
            taken = any(i == a or j == b for a, b in (*others, *chosen))
            chosen += [(i, j)] if scores[i][j] and not taken else []
        totals = [sum(scores[i][j] for i, j in some) for some in (inside, chosen)]
        pairs = others + (chosen if totals[1] > totals[0] + _MORE else inside)
    every = [(ours[i], theirs[j]) for i, j in sorted(pairs)]
    return [
        Pair(one.name, other.name)
        for one, other in every
        if _equal_outputs(one, other)
        or all(_is_inside(a, one) == _is_inside(b, other) for a, b in every if a.sizes)
    ]


def _scores(ours: Sequence[Called], theirs: Sequence[Called]) -> list[list[float]]:
    """Return the score of each module with each other one; 0 if they cannot be a pair."""
    leaves = {
        each
        for side in (ours, theirs)
        for each in side
        if not any(_is_inside(part, each) for part in side)
    }
    names = [_last_words(side) for side in (ours, theirs)]
    scores = [
        [
            _similarity(one, other, a == b, {one, other} <= leaves)
            for other, b in zip(theirs, names[1], strict=True)
        ]
        for one, a in zip(ours, names[0], strict=True)
    ]
    both = [*itertools.product(enumerate(ours), enumerate(theirs))]
    for (i, one), (j, other) in both:
        if _is_around(other, one, theirs, leaves) or _is_around(one, other, ours, leaves):
            scores[i][j] = 0.0
    in_layers = {
        (matching.template(one.name), matching.template(other.name))
        for (i, one), (j, other) in both
        if scores[i][j] and _equal_outputs(one, other)
    }
    for (i, one), (j, other) in both:
        if (matching.template(one.name), matching.template(other.name)) in in_layers:
            scores[i][j] += 0.5 * bool(scores[i][j])
    return scores


def _aligned(scores: Sequence[Sequence[float]]) -> list[tuple[int, int]]:
    """Return the pairs, in order on both sides, whose scores have the highest sum."""
    rows, columns = len(scores), len(scores[0]) if scores else 0
    # By row and column, the highest sum from there on, and its pairs as (pair, (pair, ...))
    best: Any = [[(0.0, ())] * (columns + 1) for _ in range(rows + 1)]
    for i, j in itertools.product(reversed(range(rows)), reversed(range(columns))):
        total, more = best[i + 1][j + 1]
        pair = total + scores[i][j], ((i, j), more)
        # Of alternatives the last: a joined product comes before the one that both sides have
        best[i][j] = max(best[i + 1][j], best[i][j + 1], pair, key=operator.itemgetter(0))
    pairs, more = [], best[0][0][1]
    while more:
        pair, more = more
        pairs.append(pair)
    return pairs


def _is_inside(part: Called, module: Called) -> bool:
    return part.name.startswith(f"{module.name}.")


def _is_around(
    module: Called, leaf: Called, side: Sequence[Called], leaves: Collection[Called]
) -> bool:
    """Return True if a part of a module may be the counterpart of a module without parts."""
    return leaf in leaves and any(
        _is_inside(part, module) and part in leaves and part.sizes == leaf.sizes
        for part in side
        if leaf.sizes
    )


def _equal_outputs(ours: Called, theirs: Called) -> bool:
    both = ours.figures, theirs.figures
    return all(both) and bool(np.allclose(*both, rtol=1e-6, atol=0))


def _last_words(side: Sequence[Called]) -> list[set[str]]:
    """Return the words of the last part of each name. A number in it is its place among those of
    the modules next to it: one side may count norms from 0, and the other from 1."""
    numbers: dict[Any, set[int]] = defaultdict(set)
    divided = []
    for called in side:
        owner, _, leaf = called.name.rpartition(".")
        words = matching.words(leaf)
        plain = frozenset(word for word in words if not word.isdecimal())
        own = {int(word) for word in words - plain}
        numbers[owner, plain] |= own
        divided.append((owner, plain, own))
    return [
        {*plain, *(str(sorted(numbers[owner, plain]).index(number)) for number in own)}
        for owner, plain, own in divided
    ]


def _similarity(ours: Called, theirs: Called, same_name: bool, innermost: bool) -> float:
    """Return 0 if the modules cannot be a pair, otherwise more for equal parameters than names.
    ``innermost`` is True if no part of either was called.
    """
    shapes = ours.shape, theirs.shape
    if sorted(ours.shape) != sorted(theirs.shape) and not (
        same_but_merged(*shapes) or same_but_merged(*map(_heads_last, shapes))
    ):
        return 0.0
    known = ours.sizes is not None and theirs.sizes is not None
    if known and bool(ours.sizes) != bool(theirs.sizes):
        return 0.0
    same_output = _equal_outputs(ours, theirs)
    if known and not (ours.sizes or same_name or same_output):
        return 0.0
    score = 0.1 + difflib.SequenceMatcher(None, ours.name.lower(), theirs.name.lower()).ratio()
    score += 2.0 * same_name + same_output
    return score + bool(ours.sizes) * (3.0 * innermost + 4.0 * (ours.sizes == theirs.sizes))


def _heads_last(shape: Sequence[int]) -> Sequence[int]:
    """Return the shape of (b, h, t, e) as (b, t, h, e), other shapes as they are."""
    return (shape[0], shape[2], shape[1], shape[3]) if len(shape) == 4 else shape


def same_but_merged(ours: Sequence[int], theirs: Sequence[int]) -> bool:
    """Return True if one shape has neighbouring axes of the other as one, such as heads."""
    sizes = [{*itertools.accumulate(shape, operator.mul)} for shape in (ours, theirs)]
    return math.prod(ours) == math.prod(theirs) and (sizes[0] <= sizes[1] or sizes[1] <= sizes[0])


# Gradients of parameters, from the weight table or by Flax's usual names

GradientGetters = dict[str, dict[str, tuple[Callable[[Any], list[np.ndarray]], str]]]
"""By Flax module and by parameter: a function that takes a recording of the Flax model and returns
the gradient in each layout that it may have in PyTorch, and the parameter's name there."""
_KNOWN = ("bias", "scale", "embedding")
"""Flax's names of parameters that have PyTorch's axes."""


def gradient_getters(
    table: Table | None,
    function: ModelFunction,
    pairs: Sequence[Pair],
    biases: Mapping[str, Collection[str]],
) -> GradientGetters:
    """Return the getters of each module's own parameters, by the weight table or usual names;
    ``biases`` are those of points."""
    getters: GradientGetters = {}
    if table is None:
        for pair in pairs:
            name, at = _stored(function.parameters, pair.ours, pair.ours in biases)
            for path in function.parameters:
                leaf = path.removeprefix(f"{name}.")
                if not _is_of(path, name) or (path != name and "." in leaf):
                    continue
                is_weight = path == name or leaf == "embedding"
                torch_leaf = "weight" if is_weight else matching.role(leaf)
                if torch_leaf:
                    get = partial(_layouts_of_array, path, at)
                    getters.setdefault(pair.ours, {})[leaf] = get, f"{pair.theirs}.{torch_leaf}"
            bias, *more = biases.get(pair.ours, ("",))
            path, at = _stored(function.parameters, bias, is_point=True)
            # The gradient of an array that several points add is a sum
            shared = sum(bias in each for each in biases.values()) > 1
            if path in function.parameters and not (more or shared):
                get = partial(_layouts_of_array, path, at)
                getters.setdefault(pair.ours, {})[path] = get, f"{pair.theirs}.bias"
        return getters
    for rule in rules.restrict(table, function.parameters):
        names = [p.ours for p in pairs if all(name.startswith(f"{p.ours}.") for name in rule.flax)]
        if names:
            get = partial(_layout_of_rule, rule)
            getters.setdefault(max(names, key=len), {})[rule.torch] = get, rule.torch
    return getters


def sizes(parameters: Mapping[str, Any], module: str, is_point: bool) -> tuple[int, ...]:
    """Return the sizes of a module's parameters and those of its parts, in ascending order."""
    name, at = _stored(parameters, module, is_point)
    shapes = [np.shape(x) for path, x in parameters.items() if _is_of(path, name)]
    layers = [1 if at is None else shape[at[0]] for shape in shapes]
    return tuple(sorted(math.prod(s) // n for s, n in zip(shapes, layers, strict=True)))


def _stored(
    parameters: Mapping[str, Any], module: str, is_point: bool = False
) -> tuple[str, tuple[int, int] | None]:
    """Return the path of a module's parameters; if they hold all layers of a scan, also the axis of
    the layers, the first one if the module is a point, and the module's layer."""
    if any(_is_of(path, module) for path in parameters):
        return module, None
    parts = module.split(".")
    for i, part in enumerate(parts):
        if part.isdecimal():
            root = "".join(f"{around}." for around in parts[:i])
            stacked = ".".join(parts[:i] + parts[i + 1 :])
            if any(_is_of(path, stacked) for path in parameters):
                if is_point:
                    return stacked, (0, int(part))
                inside = [np.shape(x) for p, x in parameters.items() if p.startswith(root)]
                # The one that all arrays have; if it is several, layers are few
                axes = [a for a in range(min(map(len, inside))) if len({s[a] for s in inside}) == 1]
                return stacked, (min(axes, key=lambda a: inside[0][a], default=0), int(part))
    return module, None


def _is_of(path: str, module: str) -> bool:
    """Return True for an array of a module, or the array itself."""
    return f"{path}.".startswith(f"{module}.")


def _layout_of_rule(rule: Rule, recording: Any) -> list[np.ndarray]:
    gradients = [recording.parameters.get(name) for name in rule.flax]
    return [] if any(x is None for x in gradients) else [rule.joined(gradients)]


def _layouts_of_array(name: str, at: tuple[int, int] | None, recording: Any) -> list[np.ndarray]:
    array, leaf = recording.parameters.get(name), name.rpartition(".")[2]
    if array is None:
        return []
    array = array if at is None else array.take(at[1], at[0])
    same = [] if leaf == "kernel" else [array]
    return same if leaf in _KNOWN else [*same, *_kernel_layouts(array)]


def _kernel_layouts(kernel: np.ndarray) -> list[np.ndarray]:
    """Return a kernel's gradient as PyTorch may have it: of a linear layer, also with several axes
    of inputs or outputs (heads); of a convolution; of a transposed convolution, whose window
    PyTorch turns round.
    """
    if kernel.ndim < 2:
        return [kernel]
    if kernel.ndim == 2:
        return [kernel.T]
    *window, inputs, outputs = range(kernel.ndim)
    layouts = [
        kernel.transpose(outputs, inputs, *window),
        np.flip(kernel, tuple(window)).transpose(inputs, outputs, *window),
    ]
    layouts += [kernel.reshape(-1, kernel.shape[-1]).T, kernel.reshape(len(kernel), -1).T]
    return layouts
