"""A weight table proposed from two models, and its proof: what it makes of one model's weights
gives the other's outputs and gradients."""

import copy
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jax_transformer.architectures import twins
from jax_transformer.errors import ConfigError
from jax_transformer.parity import comparison, difference, matching, measuring, pairs, structures
from jax_transformer.parity.functions import ModelFunction
from jax_transformer.parity.matching import Match, Part, template
from jax_transformer.parity.proposal import SAME, Entry, Line, Proposal
from jax_transformer.parity.recording import Program, Recording, failures_of
from jax_transformer.weights import any_model, arrays, layouts
from jax_transformer.weights.any_model import Stacked, Unused
from jax_transformer.weights.layouts import FeatureOrder
from jax_transformer.weights.rules import Alias, Rule

SAME_GRADIENT = 3e-2
"""Relative difference below which gradients are equal; a small fault of a port changes them more
than outputs."""
NOTHING = 1e-10
"""Relative size below which a gradient is rounding: the array does not act on the result."""
_INERT = "does not act on the result"
_TRIES = 600
"""Tables that are tried at most."""
_MOST_COMBINED = 256
_ATTENTION = re.compile("attn|attention|qkv", re.IGNORECASE)
_CUT = re.compile(r"\([^()]*\bpart\b[^()]*\)|\bpart\b")


def propose(
    module: Any,
    flax_module: Any,
    batch: Sequence[np.ndarray] | np.ndarray,
    *,
    call_flax: Callable[..., Any] | None = None,
    call_torch: Callable[..., Any] | None = None,
) -> Proposal:
    """Return a weight table between two models of one architecture, whatever their weights are.

    Tensors and arrays are matched by shape, names, numbers of layers and the order of execution.
    Then the table is proven: with random weights, converted by it, every module must return what
    its counterpart returns. Where one does not, other layouts and other matches within it are
    tried. A rule is proven if the models' outputs are equal, and the gradients of its arrays are
    equal by the rule and not zero. Neither model is changed.

    Args:
        module: the PyTorch module, in eval mode.
        flax_module: an NNX module, ``(linen.Module, variables)`` or ``(function, parameters)``, as
            for :func:`jax_transformer.parity.compare`.
        batch: the arguments of both models' calls, as NumPy arrays, or a dict of them by name. Axes
            should differ in length, and all of a model should act on the result.
        call_flax: ``call_flax(model, *batch)`` instead of ``model(*batch)``.
        call_torch: the same for the PyTorch module.

    Raises:
        ConfigError: the models cannot be run, or no tensor has the size of any array.
    """
    structures.check_torch(module)
    inputs, call_flax, call_torch = structures.positional(batch, call_flax, call_torch)
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        return _Search(module, flax_module, inputs, call_flax, call_torch).run()


class _Search:
    def __init__(
        self,
        module: Any,
        flax_module: Any,
        batch: Sequence[np.ndarray],
        call_flax: Callable[..., Any] | None,
        call_torch: Callable[..., Any] | None,
    ):
        self.module, self.batch, self.call_torch = module, batch, call_torch
        self.model = flax_module[1] if isinstance(flax_module, tuple) else flax_module
        function = comparison.model_function(flax_module, call_flax)
        every = {**function.parameters, **function.others}
        self.floating = {
            name: np.asarray(x)
            for name, x in every.items()
            if jax.numpy.issubdtype(x.dtype, jax.numpy.floating)
        }
        others = {name: x for name, x in every.items() if name not in self.floating}
        self.others = sorted(others)
        self.state = {name: arrays.of(name, x) for name, x in module.state_dict().items()}
        with failures_of("PyTorch"):
            theirs = self._torch(self.state, None)
        chosen = structures.Results(theirs.outputs).chosen(function)
        model = ModelFunction(self.floating, others, chosen.run)
        with failures_of("JAX"):
            self.program, self.x64 = _program(model, batch)
            self.ours = self._flax(None, {})
        assert self.ours.result is not None
        recorded = self.ours.arrays.items()
        self.own = {name: (False, x) for name, x in recorded if name.endswith("/output")}
        if self.ours.result.shape != theirs.result.shape:
            raise structures.other_shapes(self.ours.result, theirs.result)
        self.tensors, self.first = self._tensors(theirs), self._first_of_ties()
        self.usual: dict[int, tuple[int, ...]] = {}
        self.tried = 0
        self.stacks: list[Stacked] = []
        modules = [key.rpartition("#")[0] for key in self.ours.order]
        for _ in range(2):  # experts may be stacked in stacked layers
            self._stack(self._parts(), modules, self.tensors)
        self.matches = matching.matched(self.tensors, self._parts())
        # An array that joins tensors may have the size of another tensor
        tensors, free = matching.unmatched(self.matches, self.tensors, self._parts())
        if self._stack(free, (), tensors):
            self.matches = matching.matched(self.tensors, self._parts())
        self.shapes = {part.name: part.shape for part in self._parts()}
        if not self.matches:
            raise ConfigError("no tensor of the PyTorch module has the size of an array")

    # What there is

    def _flax(self, seed: int | None, *arrays: Any) -> Recording:
        with jax.enable_x64(self.x64):
            return self.program.record(seed, *arrays)

    def _torch(self, state: Mapping[str, np.ndarray], seed: int | None) -> Any:
        module = self.module
        if seed is not None:
            from jax_transformer.weights import torch_bridge

            module = torch_bridge.fill(copy.deepcopy(module), dict(state))
        options: dict[str, Any] = {"dtype": "float64", "seed": seed, "call": self.call_torch}
        return twins.recorded(module, self.batch, **options)

    def _tensors(self, theirs: Any) -> list[Part]:
        ranks = _ranks(theirs.order, self.state)
        kinds = {name: type(part).__name__ for name, part in self.module.named_modules()}
        return [
            Part(name, x.shape, ranks[name], kinds.get(name.rpartition(".")[0], ""))
            for name, x in self.state.items()
            if x.dtype.kind == "f" or x.dtype.name == "bfloat16"
        ]

    def _stack(
        self, parts: Sequence[Part], modules: Sequence[str], tensors: Sequence[Part]
    ) -> bool:
        """Add those of these arrays that hold several layers or tensors; False if none does."""
        axes = matching.stacks({part.name: part.shape for part in parts}, modules, tensors)
        new = {template(name).replace("{}", "{i}"): each for name, each in axes.items()}
        self.stacks += [Stacked(name, *each) for name, each in new.items()]
        return bool(new)

    def _parts(self) -> list[Part]:
        layers = any_model.layers_of(self.floating, self.stacks)
        ranks = _ranks(self.ours.order, layers)
        return [Part(name, layer.shape, ranks[name]) for name, (_, layer) in layers.items()]

    # The comparison of a table's result

    def values(
        self,
        matches: Sequence[Match],
        state: Mapping[str, np.ndarray],
        spoilt: Collection[str] = (),
    ) -> dict[str, Any]:
        """Return the arrays that matches make of tensors, the others as they are; those of
        ``spoilt`` with other numbers."""
        result = {name: np.array(x, np.float64) for name, x in self.floating.items()}
        layers = any_model.layers_of(result, self.stacks)
        for match in matches:
            shapes = [layers[name][1].shape for name in match.flax]
            for number, name in enumerate(match.flax):
                layers[name][1][...] = match.rule.part(number, state[match.torch], shapes)
        for name in spoilt:
            layers[name][1][...] += np.random.default_rng(1).uniform(1, 2, layers[name][1].shape)
        return result

    def judged(self, matches: Sequence[Match], spoilt: Collection[str] = ()) -> dict[str, bool]:
        """Return for each call of a paired module, and for the model (""), if it returns what its
        counterpart does when all modules inside go on with the counterparts' outputs.

        The arrays of ``spoilt`` have other numbers.
        """
        self.tried += 1
        table: Any = [match.rule for match in matches]
        sides = self.ours.order, self.theirs.order
        names = [dict.fromkeys(key.rpartition("#")[0] for key in side) for side in sides]
        partners = {pair.ours: self._alike(pair.theirs) for pair in pairs.from_table(table, *names)}
        layers = sorted(matches, key=lambda match: len(self.shapes[match.flax[0]]))
        owners = {match.flax[0].rpartition(".")[0]: match for match in layers}
        owners |= {match.flax[0]: match for match in layers}  # points of arrays
        calls: dict[str, list[np.ndarray]] = {}
        for key in self.ours.order:
            name, _, number = key.rpartition("#")
            if f"{key}/output" in self.own and name in partners:
                ours, fitted = self.own[f"{key}/output"][1], []
                for each in partners[name]:
                    theirs = self.theirs.get(f"{each}#{number}/output")
                    if theirs is not None and (match := owners.get(name)) is not None:
                        theirs = match.output(theirs, self.shapes[match.flax[0]])
                    order = None if theirs is None else measuring.axes(ours, theirs, self.usual)
                    if order is not None:
                        fitted.append(measuring.as_ours(theirs, order, ours.shape))
                if fitted:
                    calls[key] = fitted
        new = {f"{key}/output": (True, each[0]) for key, each in calls.items()}
        run = self._flax(None, self.own | new, self.values(matches, self.weights, spoilt))
        verdicts = {
            key: any(_off(run.arrays[f"{key}/output"], x) < SAME for x in each)
            for key, each in calls.items()
        }
        return verdicts | {"": max(self._distances(run)) < SAME}

    def _alike(self, module: str) -> list[str]:
        """Return a PyTorch module and those around it that have no weights of their own: one of
        them may add a residual, or be what the other model calls an attention."""

        def weights(name: str) -> list[str]:
            return [tensor for tensor in self.state if tensor.startswith(f"{name}.")]

        return [each for each in _around(module)[:-1] if weights(each) == weights(module)]

    def _distances(self, run: Recording) -> list[float]:
        """Return the difference of each result that both models return."""
        results = [(run.result, self.theirs.result)]
        results += [
            (array, self.theirs.arrays[name])
            for name, array in run.arrays.items()
            if name.startswith("#0/result ") and name in self.theirs.arrays
        ]
        return [self._distance(ours, theirs) for ours, theirs in results]

    def _distance(self, ours: Any, theirs: np.ndarray) -> float:
        """Return the difference of two outputs, divided by the largest number."""
        order = measuring.axes(ours, theirs, self.usual)
        if order is None:
            return float("inf")
        off = _off(measuring.as_theirs(ours, order, theirs.shape), theirs)
        if off < SAME and theirs.ndim == ours.ndim > 2:
            self.usual.setdefault(ours.ndim, order)
        return off

    # The search

    def run(self) -> Proposal:
        self.weights = self._random()
        self.theirs = self._torch(self.weights, 0)
        while max(self._results()) >= SAME and self.tried < _TRIES:
            better = self._better(self.judged(self.matches))
            if better is None:
                break
            self.matches = better
        return self._proposal()

    def _results(self, spoilt: Collection[str] = ()) -> list[float]:
        values = self.values(self.matches, self.weights, spoilt)
        return self._distances(self._flax(None, self.own, values))

    def _random(self) -> dict[str, np.ndarray]:
        """Return the weights, each changed: zeros and ones would hide an exchange, and matrices of
        small numbers a wrong attention, whose weights are then all the same."""
        rng, state = np.random.default_rng(0), dict[str, np.ndarray]()
        known = {self.first[match.torch] for match in self.matches}
        parameters = dict(self.module.named_parameters())
        for name, x in self.state.items():
            state[name] = state.get(self.first[name], x)
            if name in known and x.size:
                wide = x.astype(np.float64)
                spread, mean = float(wide.std()), float(np.abs(wide).mean())
                scale = spread if spread > 1e-6 * mean else 0.1
                if wide.ndim > 1:
                    scale = max(scale, 2 * wide[0].size ** -0.5)
                state[name] = wide + 0.5 * scale * rng.uniform(-1, 1, wide.shape)
            elif name in parameters and matching.is_bias(name):  # the second one of PyTorch's RNNs
                state[name] = np.zeros_like(x)
        return state

    def _first_of_ties(self) -> dict[str, str]:
        """Return the first tensor that has the same memory, by tensor; its own if no other has."""
        first: dict[Any, str] = {}
        return {
            name: first.setdefault((x.data_ptr(), x.shape), name) if x.numel() else name
            for name, x in self.module.state_dict(keep_vars=True).items()
        }

    def _better(self, verdicts: Mapping[str, bool]) -> list[Match] | None:
        """Return the first change with which more calls agree."""
        agreeing = sum(verdicts.values())
        wrong = dict.fromkeys(
            template(key.rpartition("#")[0]) for key, same in verdicts.items() if not same
        )
        innermost = sorted(wrong, key=lambda name: -name.count("."))
        near = [scope for name in innermost for scope in _around(name)[:2]]
        scopes = dict.fromkeys((*near, *itertools.chain.from_iterable(map(_around, wrong)), ""))
        wide = itertools.chain.from_iterable(map(self._changes, scopes))
        for changed in itertools.chain(self._another_layout(verdicts), wide):
            if self.tried >= _TRIES:
                return None
            if sum(self.judged(changed).values()) > agreeing:
                return changed
        return None

    def _with(self, changed: Mapping[int, Match]) -> list[Match]:
        return [changed.get(i, match) for i, match in enumerate(self.matches)]

    def _groups(self, scope: str = "") -> list[list[int]]:
        """Return the matches within modules of one name, grouped by tensors of one name."""
        alike: dict[Any, list[int]] = defaultdict(list)
        for i, match in enumerate(self.matches):
            name = template(match.flax[0])
            if not scope or name.startswith(f"{scope}."):
                alike[template(match.torch), len(match.layouts), match.kind].append(i)
        return list(alike.values())

    def _another_layout(self, verdicts: Mapping[str, bool]) -> Iterator[list[Match]]:
        """Return another layout of one group of tensors, for each; then those after a flattened
        image, of kernels whose modules are wrong; then other orders of features."""
        for group in self._groups():
            first = self.matches[group[0]]
            for number in range(len(first.layouts)):
                if number != first.choice:
                    yield self._with({i: replace(self.matches[i], choice=number) for i in group})
        for i, match in enumerate(self.matches):
            name = match.flax[0]
            if match.kind == "Linear" and not verdicts.get(f"{name.rpartition('.')[0]}#0", True):
                for layout in layouts.flattened(self.state[match.torch].shape, self.shapes[name]):
                    options = [*match.layouts, layout]
                    other = replace(match, layouts=options, choice=len(options) - 1)
                    yield self._with({i: other})
        yield from self._other_features()

    def _other_features(self) -> Iterator[list[Match]]:
        """Return other orders of features: of the queries and keys of a module, with their biases
        and norms, and of a module in an attention that may join both; for each size of a head."""
        around: dict[str, dict[int, set[str]]] = defaultdict(dict)
        alone: dict[str, list[int]] = defaultdict(list)
        for i, match in enumerate(self.matches):
            owner = match.torch.rpartition(".")[0]
            role = matching.words(owner) & {"q", "k"}
            module = template(match.flax[0].rpartition(".")[0])
            if len(match.flax) != 1 or self.state[match.torch].ndim not in (1, 2):
                continue
            if len(role) == 1:
                around[module.rpartition(".")[0]][i] = role
            elif _ATTENTION.search(f"{owner} {module}"):
                alone[module].append(i)
        for group in around.values():
            counts = [len(self.state[self.matches[i].torch]) for i in group]
            even = [n for n in range(4, min(counts) + 1, 2) if not any(x % n for x in counts)]
            both = set().union(*group.values()) == {"q", "k"}
            for size, number in itertools.product(even if both else (), range(2)):
                orders = [layouts.rotary(count, size)[number] for count in counts]
                yield self._in_order([*group], orders, "features of rotary positions")
        for same in alone.values():
            lengths = {len(self.state[self.matches[i].torch]) for i in same}
            for order in layouts.joined(*lengths) if len(lengths) == 1 else ():
                yield self._in_order(same, [order] * len(same), "heads of joined tensors")

    def _in_order(
        self, group: Sequence[int], orders: Sequence[FeatureOrder], reason: str
    ) -> list[Match]:
        """Return the matches with the features of some in another order, if their shapes fit."""
        changed = {}
        for i, order in zip(group, orders, strict=True):
            match = self.matches[i]
            shape = self.state[match.torch].shape
            layout = order.layout(shape, self.shapes[match.flax[0]], same=not match.rule.axes)
            if layout is not None:
                about = f"{match.reason}; {reason}"
                changed[i] = replace(match, layouts=[layout], choice=0, reason=about)
        return self._with(changed)

    def _changes(self, scope: str) -> Iterator[list[Match]]:
        """Return other matches within modules of one name, the same in all of them."""
        groups = self._groups(scope)
        yield from self._other_layouts(groups)
        if any(len(self.matches[group[0]].flax) > 1 for group in groups):
            yield from self._other_parts(groups)
        yield from self._exchanges(groups)

    def _other_layouts(self, groups: Sequence[list[int]]) -> Iterator[list[Match]]:
        """Return other layouts: of one group of tensors, of two, and of all."""
        several = [group for group in groups if len(self.matches[group[0]].layouts) > 1]
        counts = [range(len(self.matches[group[0]].layouts)) for group in several]
        now = tuple(self.matches[group[0]].choice for group in several)
        choices: list[tuple[int, ...]] = []
        for few in (1, 2):  # groups that change, then all if that is not too many
            for changing in itertools.combinations(range(len(several)), few):
                each = [counts[i] if i in changing else [now[i]] for i in range(len(several))]
                choices += itertools.product(*each)
        if math.prod(map(len, counts)) <= _MOST_COMBINED:
            choices += itertools.product(*counts)
        for choice in dict.fromkeys(choices):
            if choice != now:
                numbers = {i: n for g, n in zip(several, choice, strict=True) for i in g}
                yield self._with(
                    {i: replace(self.matches[i], choice=n) for i, n in numbers.items()}
                )

    def _other_parts(self, groups: Sequence[list[int]]) -> Iterator[list[Match]]:
        """Return the orders of the parts of packed tensors, with each of their layouts: first those
        that cut all tensors of a module in the same way."""
        packed = [group for group in groups if len(self.matches[group[0]].flax) > 1]
        firsts = [self.matches[group[0]] for group in packed]
        choices = itertools.product(*(range(len(match.layouts)) for match in firsts))

        def ways(choice: Sequence[int]) -> int:
            chosen = [match.layouts[k] for match, k in zip(firsts, choice, strict=True)]
            return len({(_CUT.findall(axes)[0], *sizes.items()) for axes, sizes in chosen})

        for choice in sorted(itertools.islice(choices, _TRIES), key=ways):
            for order in itertools.permutations(range(max(len(match.flax) for match in firsts))):
                changed = {}
                for group, number in zip(packed, choice, strict=True):
                    for i in group:
                        names = self.matches[i].flax
                        flax = tuple(names[k] for k in order if k < len(names))
                        changed[i] = replace(self.matches[i], flax=flax, choice=number)
                yield self._with(changed)

    def _exchanges(self, groups: Sequence[list[int]]) -> Iterator[list[Match]]:
        """Return exchanges of the arrays of modules with arrays of the same shapes."""
        owned: dict[str, list[int]] = defaultdict(list)
        for i in itertools.chain.from_iterable(groups):
            if len(self.matches[i].flax) == 1:
                owned[self.matches[i].torch.rpartition(".")[0]].append(i)
        layers: dict[str, list[list[int]]] = defaultdict(list)
        for owner, row in owned.items():
            layers[template(owner)].append(row)
        alike: dict[Any, list[list[list[int]]]] = defaultdict(list)
        for rows in layers.values():
            keys = [tuple(self.shapes[self.matches[i].flax[0]] for i in row) for row in rows]
            alike[tuple(keys)].append(rows)
            for key, row in zip(keys, rows, strict=True) if len(rows) > 1 else ():
                alike["alone", key].append([row])  # numbers that count no layers of one kind
        for same in alike.values():
            orders: Iterable[tuple[int, ...]] = (
                itertools.permutations(range(len(same))) if len(same) <= 4 else _swaps(len(same))
            )
            for order in orders:
                changed = list(self.matches)
                for rows, other in zip(same, (same[k] for k in order), strict=True):
                    for row, source in zip(rows, other, strict=True):
                        for i, j in zip(row, source, strict=True):
                            changed[i] = replace(changed[i], flax=self.matches[j].flax)
                if changed != self.matches:
                    yield changed

    # The result

    def _proposal(self) -> Proposal:
        final = self._flax(0, {}, self.values(self.matches, self.weights))
        off = max(self._distances(final))
        zeros = {name: np.zeros(x.shape) for name, x in self.floating.items()}
        gradients = any_model.layers_of(zeros | final.parameters, self.stacks)
        self.joined: dict[str, np.ndarray] = {}  # the gradient of a tensor is that of all its ties
        for match in self.matches:
            total = match.rule.joined([gradients[name][1] for name in match.flax])
            first = self.first[match.torch]
            self.joined[first] = self.joined.get(first, 0) + total
        self.largest = max(np.abs(array).max(initial=0) for _, array in gradients.values())
        lines = [Line(stack, "its arrays hold several layers", True) for stack in self.stacks]
        right = self.judged(self.matches)
        for match in sorted(self.matches, key=lambda match: list(self.state).index(match.torch)):
            ours = [gradients[name][1] for name in match.flax]
            lines.append(self._line(match, off, ours, right))
        lines = self._by_modules(lines, right)
        lines += self._without_rule({match.torch for match in self.matches})
        covered = {name for match in self.matches for name in match.flax}
        missing = [name for name in self.shapes if name not in covered] + self.others
        back = not missing and self._comes_back([line.entry for line in lines])
        wrong = [call.rpartition("#")[0] for call, same in right.items() if call and not same]
        first = wrong[0] if wrong and off >= SAME else ""
        note = f"; {comparison.TRAIN_MODE}" if self.module.training and off >= SAME else ""
        return Proposal(lines, missing, off, back, self.tried, first, note)

    def _line(
        self, match: Match, off: float, ours: Sequence[np.ndarray], right: Mapping[str, bool]
    ) -> Line:
        """Return a match's entry, with what proves it: the result, and its arrays' gradient."""
        rule = match.rule
        every = [layout.axes or "the same axes" for layout in match.layouts]
        others = tuple(axes for i, axes in enumerate(every) if i != match.choice)[:4]
        acting = max(np.abs(array).max(initial=0) for array in ours) / self.largest
        first = self.first[match.torch]
        gradient = self.theirs.parameters.get(first, self.joined[first])
        differs = _off(self.joined[first], gradient) > SAME_GRADIENT
        either = max(acting, np.abs(gradient).max(initial=0) / self.largest)
        if off >= SAME:
            owner = match.flax[0].rpartition(".")[0]
            but = f", but not that of {owner}" if right.get(f"{owner}#0") else ""
            problem = f"the outputs differ{but}"
        elif differs and either >= max(off, NOTHING):
            problem = "the gradients differ"
        elif differs or acting < NOTHING:
            problem = _INERT
        else:
            return Line(rule, match.reason, True)
        return Line(rule, f"{match.reason}; {problem}", False, others)

    def _without_rule(self, ruled: Collection[str]) -> Iterator[Line]:
        """Return the entries of tensors that no array holds."""
        every = dict(self.module.named_parameters())
        # A table of positions may be a parameter that is not trained, beside others that are
        parameters = {name: x for name, x in every.items() if x.requires_grad} or every
        for name in [name for name in self.state if name not in ruled]:
            same = [n for n in self.state if n in ruled and self.first[n] == self.first[name]]
            shape = self.state[name].shape
            if same:
                yield Line(Alias(name, same[0]), "the same memory", True)
            elif name in parameters:
                zeros = "; the rest is compared with zeros in it" * matching.is_bias(name)
                yield Line(Unused(name), f"no array for its shape {shape}{zeros}", False)
            else:
                yield Line(Unused(name), "no parameter", True)

    def _by_modules(self, lines: Sequence[Line], right: Mapping[str, bool]) -> list[Line]:
        """Return the lines; a rule without a gradient is proven if a result is wrong with other
        numbers, or its module's output, as for a bias of keys."""
        inert, spoilt, result = dict[str, int](), list[str](), list(lines)
        for i, line in enumerate(lines):
            if not isinstance(line.entry, Rule) or not line.reason.endswith(_INERT):
                continue
            if max(self._results(line.entry.flax)) >= SAME:
                reason = line.reason.replace(_INERT, "by a result")
                result[i] = Line(line.entry, reason, True)
            else:
                inert[line.entry.flax[0].rpartition(".")[0]] = i
                spoilt += line.entry.flax
        if not inert:
            return result
        wrong = self.judged(self.matches, spoilt)
        for owner, i in inert.items():
            rules = [(each.entry, each.proven) for each in lines if isinstance(each.entry, Rule)]
            own = [proven for rule, proven in rules if rule.flax[0].rpartition(".")[0] == owner]
            beside = sum(own) == len(own) - 1 > 0
            if beside and right.get(f"{owner}#0") and not wrong[f"{owner}#0"]:
                reason = lines[i].reason.replace(_INERT, f"by the output of {owner}")
                result[i] = Line(lines[i].entry, reason, True)
        return result

    def _comes_back(self, table: Sequence[Entry]) -> bool:
        converted = any_model.from_torch(self.state, table, into=self.model)
        unused = {e.torch: self.state[e.torch] for e in table if isinstance(e, Unused)}
        back = any_model.to_torch(converted, table, unused=unused)
        return back.keys() == self.state.keys() and all(
            back[name].tobytes() == np.ascontiguousarray(x).tobytes()
            for name, x in self.state.items()
        )


def _program(function: ModelFunction, batch: Sequence[np.ndarray]) -> tuple[Program, bool]:
    """Return the model in float64, and True; in float32 if its own code fails in float64."""
    try:
        return Program(function, batch, "float64"), True
    except ConfigError:
        raise
    except Exception as error:
        try:
            with jax.enable_x64(False):
                return Program(function, batch, "float32", wide=False), False
        except Exception:
            raise error from None


def _off(ours: np.ndarray, theirs: np.ndarray) -> float:
    return difference.difference(ours, theirs).max_relative


def _ranks(order: Sequence[str], names: Iterable[str]) -> dict[str, int]:
    """Return the place of each name's module in the order of execution: that of the array's point
    or the first call in the module, or in the one around a part; that of the name before if there
    is none."""
    first_calls: dict[str, int] = {}
    for i, key in enumerate(order):
        parts = key.rpartition("#")[0].split(".")
        for end in range(1, len(parts) + 1):
            first_calls.setdefault(".".join(parts[:end]), i)
    ranks, last = {}, 0
    for name in names:
        module = matching.owner(name)
        near = [each for each in (name, module, module.rpartition(".")[0]) if each in first_calls]
        last = first_calls[near[0]] if near else last
        ranks[name] = last
    return ranks


def _around(name: str) -> list[str]:
    """Return a module and those around it, the innermost first; the model is ""."""
    parts = name.split(".") if name else []
    return [".".join(parts[:end]) for end in range(len(parts), -1, -1)]


def _swaps(count: int) -> Iterator[tuple[int, ...]]:
    for a, b in itertools.combinations(range(count), 2):
        order = list(range(count))
        order[a], order[b] = b, a
        yield tuple(order)
