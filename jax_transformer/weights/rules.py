"""Weight tables: lists of reversible rules between PyTorch's tensors and Flax's arrays. NumPy only.

A rule joins one tensor of a PyTorch checkpoint to one or several arrays of the Flax model; an alias
says that a tensor repeats another. The same table converts parameters, gradients and optimizer
moments, in both directions. Nothing is guessed from shapes or ranks.
"""

import enum
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

    def numbered(self, i: int) -> "Rule":
        return replace(
            self,
            torch=self.torch.replace("{i}", str(i)),
            flax=tuple(name.replace("{i}", str(i)) for name in self.flax),
        )

    def torch_shape(self, flax_shapes: Sequence[Shape]) -> Shape:
        """Return the tensor's shape from its parts'."""
        shapes = [self.each.torch_shape(shape) for shape in flax_shapes]
        if self.several is Several.COPY:
            return shapes[0]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def to_flax(self, tensor: np.ndarray, flax_shapes: Sequence[Shape]) -> list[np.ndarray]:
        """Return the parts, each contiguous and owning its memory."""
        parts = [self.part(number, tensor, flax_shapes) for number in range(len(self.flax))]
        return [_owned(part, tensor) for part in parts]

    def part(self, number: int, tensor: np.ndarray, flax_shapes: Sequence[Shape]) -> np.ndarray:
        """Return one of the parts, contiguous; it may share the tensor's memory."""
        if self.several is not Several.COPY and len(flax_shapes) > 1:
            lengths = [self.each.torch_shape(shape)[0] for shape in flax_shapes]
            tensor = self._cut(tensor, lengths, number)
        return tensors.contiguous(self.each.to_flax(tensor))

    def to_torch(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Return the tensor, contiguous and owning its memory."""
        return _owned(self.joined(arrays), arrays[0])

    def joined(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Return the tensor, contiguous; it may share the memory of an array."""
        parts = [self.each.to_torch(array) for array in arrays]
        if self.several is Several.COPY:
            for name, array in zip(self.flax[1:], arrays[1:], strict=True):
                if not tensors.same(array, arrays[0]):
                    raise InputError(
                        f"{name} and {self.flax[0]} differ, but {self.torch} holds both"
                    )
            parts = parts[:1]
        return tensors.contiguous(self._join(parts) if len(parts) > 1 else parts[0])

    def holds(self, tensor: np.ndarray, arrays: Sequence[np.ndarray]) -> bool:
        """Return True if the tensor is made of the arrays, bit for bit. A single one is not
        copied.
        """
        if len(arrays) == 1:
            return tensors.same(self.each.to_torch(arrays[0]), tensor)
        return tensors.same(self.joined(arrays), tensor)

    def _cut(self, tensor: np.ndarray, lengths: Sequence[int], number: int) -> np.ndarray:
        if self.several is not Several.PER_HEAD:
            return np.split(tensor, np.cumsum(lengths)[:-1])[number]
        cuts = np.cumsum([length // self.heads for length in lengths])[:-1]
        part = np.split(tensor.reshape(self.heads, -1, *tensor.shape[1:]), cuts, axis=1)[number]
        return part.reshape(lengths[number], *tensor.shape[1:])

    def _join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        if self.several is not Several.PER_HEAD:
            return np.concatenate(parts)
        rest = parts[0].shape[1:]
        return np.concatenate(
            [part.reshape(self.heads, -1, *rest) for part in parts], axis=1
        ).reshape(-1, *rest)


def _owned(array: np.ndarray, origin: np.ndarray) -> np.ndarray:
    """Return the array, or a copy if its memory is not its own."""
    is_own = array.flags.owndata and not np.may_share_memory(array, origin)
    return array if is_own else array.copy()


@dataclass(frozen=True)
class Alias:
    """A tensor that repeats another one, bit for bit, because the PyTorch module ties them."""

    torch: str
    of: str

    def numbered(self, i: int) -> "Alias":
        return Alias(self.torch.replace("{i}", str(i)), self.of.replace("{i}", str(i)))


Table = list[Rule | Alias]


def repeat(layers: int, rules: Iterable[Rule | Alias]) -> Table:
    """Return ``rules`` once for each layer, with its number for ``{i}`` on both sides."""
    rules = list(rules)
    return [rule.numbered(i) for i in range(layers) for rule in rules]


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
    names = {
        rule: (rule.torch, *(rule.flax if isinstance(rule, Rule) else (rule.of,))) for rule in table
    }
    crossing = [
        rule.torch for rule in table if len({name.startswith(prefix) for name in names[rule]}) > 1
    ]
    if crossing:
        raise ConfigError(
            f"{prefix.rstrip('.')} does not stand by itself in this architecture:"
            f" {', '.join(crossing)}"
        )
    cut = len(prefix)
    return [
        replace(rule, torch=rule.torch[cut:], flax=tuple(name[cut:] for name in rule.flax))
        if isinstance(rule, Rule)
        else Alias(rule.torch[cut:], rule.of[cut:])
        for rule in table
        if rule.torch.startswith(prefix)
    ]


def torch_shapes(table: Table, flax_shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the shape of every PyTorch tensor that the table names."""
    shapes = {
        rule.torch: rule.torch_shape([flax_shapes[name] for name in rule.flax])
        for rule in table
        if isinstance(rule, Rule)
    }
    return shapes | {name: shapes[other] for name, other in aliases(table).items()}


def check_complete(table: Table, flax_names: Iterable[str]) -> None:
    """Check that the table names every PyTorch tensor once and every Flax array exactly once.

    Raises ValueError if it does not: a fault of the table, not of a file.
    """
    used = [name for rule in table if isinstance(rule, Rule) for name in rule.flax]
    torch = [rule.torch for rule in table]
    repeated = {name for names in (used, torch) for name in names if names.count(name) > 1}
    unknown = {*aliases(table).values()} - {rule.torch for rule in table if isinstance(rule, Rule)}
    covered, expected = set(used), set(flax_names)
    problems = {
        "named twice": repeated,
        "aliases of tensors without a rule": unknown,
        "arrays of the model without a rule": expected - covered,
        "not arrays of the model": covered - expected,
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
            parts = rule.to_flax(state[rule.torch], [flax_shapes[name] for name in rule.flax])
            arrays.update(zip(rule.flax, parts, strict=True))
    return arrays


def to_torch(table: Table, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the PyTorch tensors by name, in the table's order."""
    state: dict[str, np.ndarray] = {}
    for rule in table:
        state[rule.torch] = (
            state[rule.of].copy()
            if isinstance(rule, Alias)
            else rule.to_torch([arrays[name] for name in rule.flax])
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
            for number, (name, shape) in enumerate(zip(rule.flax, shapes, strict=True)):
                info = TensorInfo(shape, state[rule.torch].dtype)
                arrays[name] = LazyTensor(
                    info, partial(_part, rule, number, state[rule.torch], shapes)
                )
    return arrays


def to_torch_lazily(table: Table, arrays: LazyState) -> dict[str, LazyTensor]:
    """Return the PyTorch tensors by name, none of them read, in the table's order.

    Tensors that the model ties are one LazyTensor.
    """
    state: dict[str, LazyTensor] = {}
    for rule in table:
        if isinstance(rule, Rule):
            parts = [arrays[name] for name in rule.flax]
            shape = rule.torch_shape([part.shape for part in parts])
            state[rule.torch] = LazyTensor(
                TensorInfo(shape, parts[0].dtype), partial(_joined, rule, parts)
            )
    names = {rule.torch: rule.of if isinstance(rule, Alias) else rule.torch for rule in table}
    return {name: state[of] for name, of in names.items()}


def _part(rule: Rule, number: int, tensor: LazyTensor, shapes: list[Shape]) -> np.ndarray:
    return rule.part(number, tensor.read(), shapes)


def _joined(rule: Rule, parts: list[LazyTensor]) -> np.ndarray:
    return rule.joined([part.read() for part in parts])
