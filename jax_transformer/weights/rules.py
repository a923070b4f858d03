"""Weight tables: lists of reversible rules between PyTorch's tensors and Flax's arrays. NumPy only.

A rule joins one tensor of a PyTorch checkpoint to one or several arrays of the Flax model; an alias
says that a tensor repeats another. The same table converts parameters, gradients and optimizer
moments, in both directions. Nothing is guessed from shapes or ranks.
"""

import enum
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from jax_transformer.errors import ConfigError, InputError
from jax_transformer.storage import tensors
from jax_transformer.storage.tensors import LazyState, LazyTensor, TensorInfo
from jax_transformer.storage.tensors import Shape as Shape


class Each(enum.Enum):
    """The operation on each part of a tensor. Each has an inverse."""

    SAME = "same"
    TRANSPOSE = "transpose"  # torch.nn.Linear keeps (outputs, inputs), Flax (inputs, outputs)
    SQUEEZE_1 = "squeeze axis 1"  # a table kept with a batch axis in the middle, (length, 1, d)
    SQUEEZE_0 = "squeeze axis 0"  # a vector kept as a row, (1, v)

    def to_flax(self, part: np.ndarray) -> np.ndarray:
        match self:
            case Each.TRANSPOSE:
                return part.T
            case Each.SQUEEZE_1:
                return part[:, 0]
            case Each.SQUEEZE_0:
                return part[0]
        return part

    def to_torch(self, part: np.ndarray) -> np.ndarray:
        match self:
            case Each.TRANSPOSE:
                return part.T
            case Each.SQUEEZE_1:
                return part[:, None]
            case Each.SQUEEZE_0:
                return part[None]
        return part

    def torch_shape(self, shape: Shape) -> Shape:
        shapes = {
            Each.SAME: shape,
            Each.TRANSPOSE: shape[::-1],
            Each.SQUEEZE_1: (*shape[:1], 1, *shape[1:]),
            Each.SQUEEZE_0: (1, *shape),
        }
        return shapes[self]


class Several(enum.Enum):
    """The relation of one tensor to several arrays."""

    SPLIT = "split"  # cut along axis 0 into consecutive parts
    COPY = "copy"  # the same values for all, which must be equal on the way back
    PER_HEAD = "per head"  # axis 0 holds head after head; each head's rows are cut into the parts


@dataclass(frozen=True)
class Rule:
    """One PyTorch tensor and the Flax arrays that it becomes.

    ``{i}`` in a name stands for a layer's number, see :func:`repeat`.
    """

    torch: str
    flax: tuple[str, ...]
    each: Each = Each.SAME
    several: Several = Several.SPLIT
    heads: int = 1
    """Number of heads that axis 0 holds, for ``PER_HEAD``."""

    def torch_shape(self, flax_shapes: Sequence[Shape]) -> Shape:
        """Return the tensor's shape from its parts'."""
        first, *others = map(self.each.torch_shape, flax_shapes)
        rows = first[0]
        if self.several is not Several.COPY:
            for shape in others:
                rows += shape[0]
        return (rows, *first[1:])

    def part(
        self,
        number: int,
        tensor: np.ndarray | LazyTensor,
        flax_shapes: Sequence[Shape],
        *,
        own: bool = False,
    ) -> np.ndarray:
        """Return a part, contiguous; it may share the tensor's memory unless ``own`` is set."""
        full = cut = tensor.read() if isinstance(tensor, LazyTensor) else tensor
        if self.several is not Several.COPY and len(flax_shapes) > 1:
            lengths = [self.each.torch_shape(shape)[0] // self.heads for shape in flax_shapes]
            start = sum(lengths[:number])
            heads = full.reshape(self.heads, -1, *full.shape[1:])
            cut = heads[:, start : start + lengths[number]].reshape(-1, *full.shape[1:])
        part = tensors.contiguous(self.each.to_flax(cut))
        return _owned(part, full) if own else part

    def joined(self, arrays: Sequence[np.ndarray | LazyTensor], *, own: bool = False) -> np.ndarray:
        """Return the tensor, contiguous; it may share an array's memory unless ``own`` is set."""
        read = [array.read() if isinstance(array, LazyTensor) else array for array in arrays]
        if self.several is Several.COPY:
            for name, array in zip(self.flax[1:], read[1:], strict=True):
                if not tensors.same(array, read[0]):
                    raise InputError(
                        f"{name} and {self.flax[0]} differ, but {self.torch} holds both"
                    )
        elif len(read) > 1:
            parts = [tensors.contiguous(self.each.to_torch(array)) for array in read]
            rest = parts[0].shape[1:]
            tensor = np.empty((sum(map(len, parts)), *rest), np.result_type(*parts))
            by_head = [part.reshape(self.heads, -1, *rest) for part in parts]
            np.concatenate(by_head, axis=1, out=tensor.reshape(self.heads, -1, *rest))
            return tensor
        tensor = tensors.contiguous(self.each.to_torch(read[0]))
        return _owned(tensor, read[0]) if own else tensor

    def holds(self, tensor: np.ndarray, arrays: Sequence[np.ndarray]) -> bool:
        """Return True if the tensor is made of the arrays, bit for bit. One alone is not copied."""
        if len(arrays) == 1:
            return tensors.same(self.each.to_torch(arrays[0]), tensor)
        return tensors.same(self.joined(arrays), tensor)


def _owned(array: np.ndarray, origin: np.ndarray) -> np.ndarray:
    """Return the array, or a copy if its memory is not its own."""
    is_own = array.flags.owndata and not np.may_share_memory(array, origin)
    return array if is_own else array.copy()


@dataclass(frozen=True)
class Alias:
    """A tensor that repeats another one, bit for bit, because the PyTorch module ties them."""

    torch: str
    of: str


Table = list[Rule | Alias]


def repeat(layers: int, rules: Iterable[Rule | Alias]) -> Table:
    """Return ``rules`` once for each layer, with its number for ``{i}`` on both sides."""
    rules = list(rules)
    table: Table = []
    for i in map(str, range(layers)):
        for rule in rules:
            torch = rule.torch.replace("{i}", i)
            if isinstance(rule, Alias):
                table.append(Alias(torch, rule.of.replace("{i}", i)))
            else:
                flax = tuple(name.replace("{i}", i) for name in rule.flax)
                table.append(replace(rule, torch=torch, flax=flax))
    return table


def linear(torch: str, flax: str, *, bias: bool = True) -> Table:
    """Return the rules of a torch.nn.Linear."""
    biases: Table = [Rule(f"{torch}.bias", (f"{flax}.bias",))] if bias else []
    return [Rule(f"{torch}.weight", (f"{flax}.kernel",), Each.TRANSPOSE), *biases]


def layer_norm(
    torch: str, flax: str, *, bias: bool = True, names: tuple[str, str] = ("weight", "bias")
) -> Table:
    """Return the rules of a torch.nn.LayerNorm, or of another norm by its parameters' ``names``."""
    scale, shift = names
    biases: Table = [Rule(f"{torch}.{shift}", (f"{flax}.bias",))] if bias else []
    return [Rule(f"{torch}.{scale}", (f"{flax}.scale",)), *biases]


def embedding(torch: str, flax: str) -> Table:
    """Return the rule of a torch.nn.Embedding."""
    return [Rule(f"{torch}.weight", (f"{flax}.embedding",))]


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
    kernels = tuple(f"{flax}.{part}.kernel" for part in ("query", "key", "value"))
    biases = tuple(f"{flax}.{part}.bias" for part in ("query", "key", "value"))
    packed: Table = [Rule(f"{torch}.in_proj_weight", kernels, Each.TRANSPOSE)]
    return [
        *packed,
        *([Rule(f"{torch}.in_proj_bias", biases)] if bias else []),
        *linear(f"{torch}.out_proj", f"{flax}.out", bias=bias),
    ]


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
    kernels = tuple(f"{flax}.{part}.kernel" for part in ("query", "key", "value"))
    biases = tuple(f"{flax}.{part}.bias" for part in ("query", "key", "value"))
    fused: Table = [Rule(f"{torch}.{qkv}.weight", kernels, Each.TRANSPOSE, Several.PER_HEAD, heads)]
    fused += (
        [Rule(f"{torch}.{qkv}.bias", biases, several=Several.PER_HEAD, heads=heads)] if bias else []
    )
    return [*fused, *linear(f"{torch}.{out}", f"{flax}.out", bias=bias)]


def aliases(table: Table) -> dict[str, str]:
    """Return the tensor that each alias repeats, by the alias."""
    return {rule.torch: rule.of for rule in table if isinstance(rule, Alias)}


def restrict(table: Table, flax_names: Iterable[str]) -> Table:
    """Return the rules of the named arrays, without aliases.

    They convert gradients and moments of the trained parameters.
    """
    names = set(flax_names)
    return [rule for rule in table if isinstance(rule, Rule) and names.issuperset(rule.flax)]


def within(table: Table, prefix: str) -> Table:
    """Return the rules whose names begin with ``prefix`` on both sides, without the prefix.

    Raises ConfigError if a rule has the prefix on one side only.
    """
    cut, crossing = len(prefix), []
    inner: Table = []
    for rule in table:
        ours = rule.flax if isinstance(rule, Rule) else (rule.of,)
        inside = {name.startswith(prefix) for name in (rule.torch, *ours)}
        if len(inside) > 1:
            crossing.append(rule.torch)
        elif True in inside and isinstance(rule, Rule):
            flax = tuple(name[cut:] for name in ours)
            inner.append(replace(rule, torch=rule.torch[cut:], flax=flax))
        elif True in inside:
            inner.append(Alias(rule.torch[cut:], ours[0][cut:]))
    if crossing:
        raise ConfigError(
            f"{prefix.rstrip('.')} does not stand by itself in this architecture:"
            f" {', '.join(crossing)}"
        )
    return inner


def torch_shapes(table: Table, flax_shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the shape of every PyTorch tensor that the table names."""
    shapes = {}
    for rule in table:
        if isinstance(rule, Rule):
            shapes[rule.torch] = rule.torch_shape([flax_shapes[name] for name in rule.flax])
    for name, other in aliases(table).items():
        shapes[name] = shapes[other]
    return shapes


def check_complete(table: Table, flax_names: Iterable[str]) -> None:
    """Check that the table names every PyTorch tensor once and every Flax array exactly once.

    Raises ValueError if it does not: a fault of the table, not of a file.
    """
    torch, flax = Counter[str](), Counter[str]()
    ruled, of_aliases = set(), set()
    for rule in table:
        torch[rule.torch] += 1
        if isinstance(rule, Rule):
            ruled.add(rule.torch)
            flax.update(rule.flax)
        else:
            of_aliases.add(rule.of)
    expected = set(flax_names)
    problems = {
        "named twice": {*(torch - Counter(set(torch))), *(flax - Counter(set(flax)))},
        "aliases of tensors without a rule": of_aliases - ruled,
        "arrays of the model without a rule": expected - flax.keys(),
        "not arrays of the model": flax.keys() - expected,
    }
    if any(problems.values()):
        raise ValueError(
            "the weight table does not cover the model exactly once: "
            + "; ".join(
                f"{problem}: {', '.join(sorted(names))}"
                for problem, names in problems.items()
                if names
            )
        )


def to_flax(
    table: Table, state: Mapping[str, np.ndarray], flax_shapes: Mapping[str, Shape]
) -> dict[str, np.ndarray]:
    """Return the Flax arrays by path.

    Raises one InputError that names every tensor that is missing, unexpected or mis-shaped, and
    every alias that differs.
    """
    infos = {name: TensorInfo(array.shape, array.dtype.name) for name, array in state.items()}
    problems = tensors.problems(infos, torch_shapes(table, flax_shapes), floating=False)
    tensors.refuse(problems + tensors.differing_ties(aliases(table), state))
    arrays: dict[str, np.ndarray] = {}
    for rule in table:
        if isinstance(rule, Rule):
            shapes = [flax_shapes[name] for name in rule.flax]
            for number, name in enumerate(rule.flax):
                arrays[name] = rule.part(number, state[rule.torch], shapes, own=True)
    return arrays


def to_torch(table: Table, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the PyTorch tensors by name, in the table's order."""
    state: dict[str, np.ndarray] = {}
    for rule in table:
        state[rule.torch] = (
            state[rule.of].copy()
            if isinstance(rule, Alias)
            else rule.joined([arrays[name] for name in rule.flax], own=True)
        )
    return state


# The same for tensors that are read one at a time


def to_flax_lazily(
    table: Table, state: LazyState, flax_shapes: Mapping[str, Shape]
) -> dict[str, LazyTensor]:
    """Return the Flax arrays by path, none of them read.

    The tensors fit the table: see :func:`.tensors.problems` and :func:`.lazy.differing_ties`.
    """
    arrays = {}
    for rule in table:
        if isinstance(rule, Rule):
            shapes = [flax_shapes[name] for name in rule.flax]
            tensor = state[rule.torch]
            for number, name in enumerate(rule.flax):
                read = partial(rule.part, number, tensor, shapes)
                arrays[name] = LazyTensor(TensorInfo(shapes[number], tensor.dtype), read)
    return arrays


def to_torch_lazily(table: Table, arrays: LazyState) -> dict[str, LazyTensor]:
    """Return the PyTorch tensors by name, none of them read, in the table's order.

    Tensors that the model ties are one LazyTensor.
    """
    joined = {}
    for rule in table:
        if isinstance(rule, Rule):
            parts = [arrays[name] for name in rule.flax]
            info = TensorInfo(rule.torch_shape([part.shape for part in parts]), parts[0].dtype)
            joined[rule.torch] = LazyTensor(info, partial(rule.joined, parts))
    state = {}
    for rule in table:
        state[rule.torch] = joined[rule.of if isinstance(rule, Alias) else rule.torch]
    return state
