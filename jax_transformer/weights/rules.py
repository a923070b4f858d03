"""Weights are a table of reversible rules: the engine that applies one. NumPy only.

A rule joins one tensor of a PyTorch checkpoint to one or several arrays of the Flax model and says how; an alias says that a tensor repeats
another. The same table carries parameters, gradients and optimizer moments, in both directions. Nothing is guessed from shapes or ranks.
"""

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jax_transformer.errors import ConfigError, InputError, nearest

Shape = tuple[int, ...]


class Each(enum.Enum):
    """What is done to each part. Every one can be undone."""

    SAME = "same"
    TRANSPOSE = "transpose"  # torch.nn.Linear keeps (outputs, inputs), Flax (inputs, outputs)
    SQUEEZE_1 = "squeeze axis 1"  # a table kept with a batch axis in the middle, (length, 1, d)
    SQUEEZE_0 = "squeeze axis 0"  # a vector kept as a row, (1, v)

    def to_flax(self, part: np.ndarray) -> np.ndarray:
        return {
            Each.SAME: lambda: part,
            Each.TRANSPOSE: lambda: part.T,
            Each.SQUEEZE_1: lambda: part[:, 0],
            Each.SQUEEZE_0: lambda: part[0],
        }[self]()

    def to_torch(self, part: np.ndarray) -> np.ndarray:
        return {
            Each.SAME: lambda: part,
            Each.TRANSPOSE: lambda: part.T,
            Each.SQUEEZE_1: lambda: part[:, None],
            Each.SQUEEZE_0: lambda: part[None],
        }[self]()

    def torch_shape(self, shape: Shape) -> Shape:
        shapes = {
            Each.SAME: shape,
            Each.TRANSPOSE: shape[::-1],
            Each.SQUEEZE_1: (*shape[:1], 1, *shape[1:]),
            Each.SQUEEZE_0: (1, *shape),
        }
        return shapes[self]


class Several(enum.Enum):
    """How one tensor becomes several arrays."""

    SPLIT = "split"  # cut along axis 0 into parts one behind another
    COPY = "copy"  # the same values for all, which must agree on the way back
    PER_HEAD = "per head"  # axis 0 holds head after head, and each head's rows are cut into the parts one behind another


@dataclass(frozen=True)
class Rule:
    """One PyTorch tensor and the Flax arrays that it becomes. ``{i}`` in a name stands for a layer's number, see :func:`repeat`."""

    torch: str
    flax: tuple[str, ...]
    each: Each = Each.SAME
    several: Several = Several.SPLIT
    heads: int = 1
    """How many heads axis 0 holds, for ``PER_HEAD``."""

    def numbered(self, i: int) -> "Rule":
        return replace(
            self,
            torch=self.torch.replace("{i}", str(i)),
            flax=tuple(name.replace("{i}", str(i)) for name in self.flax),
        )

    def torch_shape(self, flax_shapes: Sequence[Shape]) -> Shape:
        """The tensor's shape, given its parts'."""
        shapes = [self.each.torch_shape(shape) for shape in flax_shapes]
        if self.several is Several.COPY:
            return shapes[0]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def to_flax(self, tensor: np.ndarray, flax_shapes: Sequence[Shape]) -> list[np.ndarray]:
        """The parts, each contiguous and owning its memory."""
        if self.several is Several.COPY:
            parts = [tensor] * len(self.flax)
        else:
            lengths = [self.each.torch_shape(shape)[0] for shape in flax_shapes]
            parts = self._cut(tensor, lengths) if len(lengths) > 1 else [tensor]
        return [np.array(self.each.to_flax(part), order="C") for part in parts]

    def to_torch(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """The tensor, contiguous and owning its memory."""
        parts = [self.each.to_torch(array) for array in arrays]
        if self.several is Several.COPY:
            for name, array in zip(self.flax[1:], arrays[1:], strict=True):
                if array.tobytes() != arrays[0].tobytes():
                    raise InputError(
                        f"{name} and {self.flax[0]} differ, but {self.torch} holds both"
                    )
            parts = parts[:1]
        return np.array(self._join(parts) if len(parts) > 1 else parts[0], order="C")

    def _cut(self, tensor: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
        if self.several is not Several.PER_HEAD:
            return np.split(tensor, np.cumsum(lengths)[:-1])
        cuts = np.cumsum([length // self.heads for length in lengths])[:-1]
        parts = np.split(tensor.reshape(self.heads, -1, *tensor.shape[1:]), cuts, axis=1)
        return [
            part.reshape(length, *tensor.shape[1:])
            for part, length in zip(parts, lengths, strict=True)
        ]

    def _join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        if self.several is not Several.PER_HEAD:
            return np.concatenate(parts)
        rest = parts[0].shape[1:]
        return np.concatenate(
            [part.reshape(self.heads, -1, *rest) for part in parts], axis=1
        ).reshape(-1, *rest)


@dataclass(frozen=True)
class Alias:
    """A tensor that repeats another one, bit for bit, because the PyTorch module ties them."""

    torch: str
    of: str

    def numbered(self, i: int) -> "Alias":
        return Alias(self.torch.replace("{i}", str(i)), self.of.replace("{i}", str(i)))


Table = list[Rule | Alias]


def repeat(layers: int, rules: Iterable[Rule | Alias]) -> Table:
    """``rules`` once for each layer, with ``{i}`` replaced by its number on both sides."""
    rules = list(rules)
    return [rule.numbered(i) for i in range(layers) for rule in rules]


def linear(torch: str, flax: str, *, bias: bool = True) -> Table:
    """A torch.nn.Linear."""
    biases: Table = [Rule(f"{torch}.bias", (f"{flax}.bias",))] if bias else []
    return [Rule(f"{torch}.weight", (f"{flax}.kernel",), Each.TRANSPOSE), *biases]


def layer_norm(
    torch: str, flax: str, *, bias: bool = True, names: tuple[str, str] = ("weight", "bias")
) -> Table:
    """A torch.nn.LayerNorm, or another norm whose scale and bias have these ``names``."""
    scale, shift = names
    biases: Table = [Rule(f"{torch}.{shift}", (f"{flax}.bias",))] if bias else []
    return [Rule(f"{torch}.{scale}", (f"{flax}.scale",)), *biases]


def embedding(torch: str, flax: str) -> Table:
    """A torch.nn.Embedding."""
    return [Rule(f"{torch}.weight", (f"{flax}.embedding",))]


def attention(torch: str, flax: str, names: Mapping[str, str], *, bias: bool = True) -> Table:
    """Four torch.nn.Linear: ``names`` gives each of query, key, value and out the name that the PyTorch module has for it."""
    return [
        rule
        for part in ("query", "key", "value", "out")
        for rule in linear(f"{torch}.{names[part]}", f"{flax}.{part}", bias=bias)
    ]


def packed_attention(torch: str, flax: str, *, bias: bool = True) -> Table:
    """A torch.nn.MultiheadAttention: query, key and value one behind another in ``in_proj_weight`` (3d, d)."""
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
    """One torch.nn.Linear (h·3e, d) that gives head after head its query, key and value, and an output layer."""
    kernels = tuple(f"{flax}.{part}.kernel" for part in ("query", "key", "value"))
    biases = tuple(f"{flax}.{part}.bias" for part in ("query", "key", "value"))
    fused: Table = [Rule(f"{torch}.{qkv}.weight", kernels, Each.TRANSPOSE, Several.PER_HEAD, heads)]
    fused += (
        [Rule(f"{torch}.{qkv}.bias", biases, several=Several.PER_HEAD, heads=heads)] if bias else []
    )
    return [*fused, *linear(f"{torch}.{out}", f"{flax}.out", bias=bias)]


def restrict(table: Table, flax_names: Iterable[str]) -> Table:
    """The rules that concern the named arrays alone, without aliases: what carries gradients and moments of the trained parameters."""
    wanted = set(flax_names)
    return [rule for rule in table if isinstance(rule, Rule) and wanted.issuperset(rule.flax)]


def within(table: Table, prefix: str) -> Table:
    """The rules of what is named ``prefix``… on both sides, without the prefix. Raises ConfigError where a rule crosses that border."""
    names = {
        rule: (rule.torch, *(rule.flax if isinstance(rule, Rule) else (rule.of,))) for rule in table
    }
    crossing = [
        rule.torch for rule in table if len({name.startswith(prefix) for name in names[rule]}) > 1
    ]
    if crossing:
        raise ConfigError(
            f"{prefix.rstrip('.')} does not stand by itself in this layout: {', '.join(crossing)}"
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
    """The shape of every PyTorch tensor that the table names."""
    shapes = {
        rule.torch: rule.torch_shape([flax_shapes[name] for name in rule.flax])
        for rule in table
        if isinstance(rule, Rule)
    }
    return shapes | {alias.torch: shapes[alias.of] for alias in table if isinstance(alias, Alias)}


def check_complete(table: Table, flax_names: Iterable[str]) -> None:
    """Raises ValueError unless the table names every PyTorch tensor once and every Flax array exactly once: a fault of the table, not of a file."""
    used = [name for rule in table if isinstance(rule, Rule) for name in rule.flax]
    torch = [rule.torch for rule in table]
    repeated = {name for names in (used, torch) for name in names if names.count(name) > 1}
    unknown = {rule.of for rule in table if isinstance(rule, Alias)} - {
        rule.torch for rule in table if isinstance(rule, Rule)
    }
    wrong = repeated | unknown | (set(used) ^ set(flax_names))
    if wrong:
        raise ValueError(
            f"the weight table does not cover the model exactly once: {', '.join(sorted(wrong))}"
        )


def to_flax(
    table: Table, state: Mapping[str, np.ndarray], flax_shapes: Mapping[str, Shape]
) -> dict[str, np.ndarray]:
    """The Flax arrays by path. Raises one InputError that names every missing, unexpected and mis-shaped tensor and every alias that differs."""
    expected = torch_shapes(table, flax_shapes)
    problems = []
    for name in sorted(expected.keys() - state.keys()):
        problems.append(f"missing {name} {expected[name]}")
    for name in sorted(state.keys() - expected.keys()):
        problems.append(f"unexpected {name} {state[name].shape}{nearest(name, sorted(expected))}")
    for name in sorted(expected.keys() & state.keys()):
        if state[name].shape != expected[name]:
            problems.append(
                f"mis-shaped {name}: the checkpoint has {state[name].shape}, the model {expected[name]}"
            )
    for alias in table:
        if (
            isinstance(alias, Alias)
            and alias.torch in state
            and alias.of in state
            and _bits(state[alias.torch]) != _bits(state[alias.of])
        ):
            problems.append(f"{alias.torch} differs from {alias.of}, but the model ties them")
    if problems:
        raise InputError(
            f"the weights do not fit the model ({len(problems)} problems): {'; '.join(problems)}"
        )
    arrays: dict[str, np.ndarray] = {}
    for rule in table:
        if isinstance(rule, Rule):
            parts = rule.to_flax(state[rule.torch], [flax_shapes[name] for name in rule.flax])
            arrays.update(zip(rule.flax, parts, strict=True))
    return arrays


def to_torch(table: Table, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The PyTorch tensors by name, in the table's order."""
    state: dict[str, np.ndarray] = {}
    for rule in table:
        state[rule.torch] = (
            state[rule.of].copy()
            if isinstance(rule, Alias)
            else rule.to_torch([arrays[name] for name in rule.flax])
        )
    return state


def _bits(array: np.ndarray) -> tuple[str, Shape, bytes]:
    return str(array.dtype), array.shape, array.tobytes()
