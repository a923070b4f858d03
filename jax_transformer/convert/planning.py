"""Plans of conversions: map every tensor of source and target exactly once."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from jax_transformer.formats.base import Destination, Layout, Pretrained
from jax_transformer.storage.tensors import Note, TensorInfo, is_float
from jax_transformer.storage.untrusted import plain
from jax_transformer.weights.rules import Alias, Each, Rule, Several, Table, torch_shapes

if TYPE_CHECKING:
    from jax_transformer.architectures.model_weights import ModelWeights

Tensors = Mapping[str, TensorInfo]


@dataclass(frozen=True)
class Move:
    """Tensors of the source and the tensors of the target that are made from them."""

    source: tuple[str, ...]
    target: tuple[str, ...]
    operation: str
    before: tuple[TensorInfo, ...]
    after: tuple[TensorInfo, ...]


@dataclass(frozen=True)
class Plan:
    """A conversion, tensor by tensor."""

    source: str
    target: str
    moves: tuple[Move, ...]
    derived: tuple[Note, ...] = ()
    """Tensors of the target that repeat other tensors of it."""
    dropped: tuple[Note, ...] = ()
    """Parts of the source that are not converted."""
    ties: tuple[tuple[str, ...], ...] = ()
    """Groups of PyTorch names that are one tensor."""
    inferred: Mapping[str, Any] = field(default_factory=dict)
    """Sizes read from the shapes."""
    stripped_prefix: str = ""
    """A prefix that stood before most of the source's names, and was removed without being asked.
    """

    @property
    def nbytes(self) -> int:
        """Size of all converted tensors in the target, in bytes."""
        return sum(part.nbytes for move in self.moves for part in move.after)

    def lines(self) -> Iterator[str]:
        """Yield the plan as text."""
        yield from map(plain, self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"plan: {self.source} -> {self.target}"
        yield from (f"  {line}" for line in self.prefix_lines())
        for move in self.moves:
            after = ", ".join(dict.fromkeys(map(str, move.after)))
            size = f"{sum(part.nbytes for part in move.after):,} bytes"
            before = ", ".join(dict.fromkeys(map(str, move.before)))
            yield (
                f"  {' + '.join(move.source)} [{before}] -> {' + '.join(move.target)} [{after}]: "
                f"{move.operation}, {size}"
            )
        yield from (f"  derived {note.name}: {note.reason}" for note in self.derived)
        yield from (f"  dropped {note.name}: {note.reason}" for note in self.dropped)
        yield from (f"  tied {' = '.join(names)}" for names in self.ties)
        yield f"  {len(self.moves)} moves, {self.nbytes:,} bytes"

    def prefix_lines(self) -> Iterator[str]:
        """Yield a line on the prefix that was removed, if there was one."""
        if self.stripped_prefix:
            prefix = plain(self.stripped_prefix)
            yield f"names without the prefix {prefix!r}, as with --strip-prefix {prefix}"

    def to_data(self) -> dict[str, Any]:
        """Return the plan as plain containers, as for JSON."""
        return asdict(self) | {"inferred": dict(self.inferred), "bytes": self.nbytes}


def plan(source: Pretrained, to: Destination, model: "ModelWeights | None") -> Plan:
    """Map every tensor of the source, which fits the model, to the destination.

    Without a model names stay as they are. A tensor that the source leaves out, or that the reader
    of the destination computes, becomes a note on its computation.
    """
    from_torch, to_torch = source.format.has_torch_names, to.format.has_torch_names
    layout = Layout() if model is None else to.format.layout(to, model.shapes["torch"])
    completed = {note.name: note.reason for note in source.derived}
    infos = source.tensors
    moves, derived, dropped, ties = [], [], list(source.dropped), source.ties
    rules: Sequence[Rule | Alias] = ()
    if model is not None:
        ties = tuple(ties_of(model.table))
        if from_torch != to_torch:
            rules = model.table
            target_shapes = torch_shapes(model.table, model.shapes["flax"])
            target_shapes = dict(target_shapes) if to_torch else dict(model.shapes["flax"])
    pairs: list[tuple[tuple[str, ...], tuple[str, ...], Rule | None]] = []
    for rule in rules:
        if not isinstance(rule, Alias):
            names = (rule.torch,), rule.flax
            pairs.append((*(names if from_torch else names[::-1]), rule))
        elif from_torch and rule.torch not in completed:
            reason = f"repeats {rule.of}, with which the model ties it; that the two are equal is"
            dropped.append(Note(rule.torch, f"{reason} checked"))
        elif not from_torch and rule.torch not in layout.computed:
            reason = f"repeats {rule.of}, with which the model ties it"
            derived.append(Note(rule.torch, reason))
    for old, new, applied in pairs or [((name,), (name,), None) for name in infos]:
        if old[0] in completed:
            derived += [Note(name, completed[old[0]]) for name in new]
            continue
        if new[0] in layout.computed:
            dropped += [Note(name, layout.computed[new[0]]) for name in old]
            continue
        before = tuple(infos[name] for name in old)
        dtype = cast(before[0].dtype, to.dtype)
        after = tuple(
            TensorInfo(infos[name].shape if applied is None else target_shapes[name], dtype)
            for name in new
        )
        operation = _operation(applied, back=to_torch, changes=dtype != before[0].dtype)
        ours, theirs = source.stored_names, layout.names
        moves.append(
            Move(
                tuple(ours.get(name, name) for name in old),
                tuple(theirs.get(name, name) for name in new),
                operation,
                before,
                after,
            )
        )
    others = "other folders" if any(map(to.format.takes, source.extra_files)) else "folders"
    dropped += [
        Note(name, f"goes with {others}, and {to.path} is a {to.format.title}")
        for name in source.extra_files
        if not to.format.takes(name)
    ]
    dropped += [*source.notes_for(to), *layout.notes]
    return Plan(
        source.title, str(to.path), tuple(moves), tuple(derived), tuple(dropped), tuple(ties)
    )


def cast(dtype: str, target: str | None) -> str:
    """Return the dtype after a cast; integers and booleans stay as they are."""
    return dtype if target is None or not is_float(dtype) else target


def _operation(rule: Rule | None, *, back: bool, changes: bool) -> str:
    steps = []
    if rule is not None and len(rule.flax) > 1:
        names = {
            Several.SPLIT: ("split", "join"),
            Several.COPY: ("copy to each", "one of equals"),
            Several.PER_HEAD: ("split by head", "join by head"),
        }
        steps.append(names[rule.several][back])
    if rule is not None and rule.each is not Each.SAME:
        undo = back and rule.each is not Each.TRANSPOSE
        steps.append(f"undo {rule.each.value}" if undo else rule.each.value)
    if back:
        steps.reverse()
    return ", ".join([*steps, *(["cast"] if changes else [])]) or "same"


def ties_of(table: Table) -> list[tuple[str, ...]]:
    """Group the PyTorch names that are one tensor in the model's module."""
    groups: dict[str, list[str]] = {}
    for rule in table:
        if isinstance(rule, Alias):
            groups.setdefault(rule.of, [rule.of]).append(rule.torch)
    return [tuple(names) for names in groups.values()]
