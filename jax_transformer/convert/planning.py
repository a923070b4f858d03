"""Plans of conversions: map every tensor of source and target exactly once."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from jax_transformer.architectures import huggingface_state as states
from jax_transformer.convert import export_files
from jax_transformer.extras.toolkits.marian import marian_conversion
from jax_transformer.extras.toolkits.t5x import t5x_conversion, t5x_names
from jax_transformer.extras.toolkits.t5x.t5x_names import Layout
from jax_transformer.formats.kinds import DEPLOYED, Kind
from jax_transformer.formats.pretrained import Pretrained
from jax_transformer.storage import huggingface_folder as folders
from jax_transformer.storage.tensors import Note, TensorInfo, is_float
from jax_transformer.storage.untrusted import plain
from jax_transformer.weights.rules import Alias, Each, Rule, Several, Shape, Table, torch_shapes

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


def plan(
    source: Pretrained,
    destination: str,
    kind: Kind,
    model: "ModelWeights | None",
    dtype: str | None,
    layout: Layout | None = None,
) -> Plan:
    """Map every tensor of the source, which fits the model, to a destination of this kind.

    Without a model names stay as they are. ``layout`` is that of a checkpoint of T5X to write.
    """
    dropped, ties = source.dropped, source.ties
    derived: tuple[Note, ...] = ()
    if model is None or source.kind.has_torch_names == kind.has_torch_names:
        moves = unchanged(source.tensors, dtype)
    elif source.kind.has_torch_names:
        moves, repeated = to_flax(model.table, source.tensors, model.shapes["flax"], dtype)
        dropped += repeated
    else:
        moves, derived = to_torch(model.table, source.tensors, model.shapes["flax"], dtype)
    if model is not None:
        ties = tuple(ties_of(model.table))
    if kind not in (Kind.RUN, Kind.HUGGINGFACE):
        others = "other folders" if kind in DEPLOYED else "folders"
        dropped += tuple(
            Note(name, f"goes with {others}, and {destination} is a {kind.value}")
            for name in source.extra_files
            if kind not in DEPLOYED or name not in folders.TOKENIZER
        )
    planned = without_completed(
        Plan(source.title, destination, moves, derived, dropped, ties), source.derived
    )
    planned = _with_names_of_t5x(planned, source, kind, model, layout)
    if source.marian is not None:
        notes = marian_conversion.notes(source, source.marian, kind)
        planned = replace(planned, dropped=planned.dropped + notes)
    if kind is not Kind.HUGGINGFACE or model is None:
        return planned
    planned = replace(planned, dropped=planned.dropped + export_files.not_exported(source))
    stored = states.saved(dict.fromkeys(model.shapes["torch"]), model.config)
    return left_out(
        planned,
        {
            name: states.why_completed(name, model.config)
            for name in model.shapes["torch"]
            if name not in stored
        },
    )


def _with_names_of_t5x(
    plan: Plan,
    source: Pretrained,
    kind: Kind,
    model: "ModelWeights | None",
    layout: Layout | None,
) -> Plan:
    """Name the arrays of a checkpoint of T5X as it does, with the layer that is meant."""
    ours, theirs = (_places(each) for each in (source.t5x, layout))
    moves = tuple(
        replace(
            move,
            source=tuple(ours.get(name, name) for name in move.source),
            target=tuple(theirs.get(name, name) for name in move.target),
        )
        for move in plan.moves
    )
    note = None if model is None else t5x_conversion.scale_note(source, kind, model.config)
    notes = () if note is None else (Note("the scale of the logits", note),)
    return replace(plan, moves=moves, dropped=(*plan.dropped, *notes))


def _places(layout: Layout | None) -> dict[str, str]:
    rules = () if layout is None else t5x_names.table(layout)
    return {name: rule.place(number) for rule in rules for number, name in enumerate(rule.flax)}


def to_flax(
    table: Table, tensors: Tensors, flax_shapes: Mapping[str, Shape], dtype: str | None = None
) -> tuple[tuple[Move, ...], tuple[Note, ...]]:
    """Return the moves from PyTorch's tensors to Flax's arrays.

    The notes are on tensors that repeat others and are dropped.
    """
    moves, dropped = [], []
    for rule in table:
        if isinstance(rule, Alias):
            dropped.append(
                Note(
                    rule.torch,
                    f"repeats {rule.of}, with which the model ties it; that the two are equal is "
                    "checked",
                )
            )
            continue
        before = tensors[rule.torch]
        after = tuple(
            TensorInfo(flax_shapes[name], cast(before.dtype, dtype)) for name in rule.flax
        )
        moves.append(
            Move(
                (rule.torch,),
                rule.flax,
                _operation(rule, back=False, changes=before.dtype != after[0].dtype),
                (before,),
                after,
            )
        )
    return tuple(moves), tuple(dropped)


def to_torch(
    table: Table, tensors: Tensors, flax_shapes: Mapping[str, Shape], dtype: str | None = None
) -> tuple[tuple[Move, ...], tuple[Note, ...]]:
    """Return the moves from Flax's arrays to PyTorch's tensors, and notes on repeated ones."""
    shapes = torch_shapes(table, flax_shapes)
    moves, derived = [], []
    for rule in table:
        if isinstance(rule, Alias):
            derived.append(Note(rule.torch, f"repeats {rule.of}, with which the model ties it"))
            continue
        before = tuple(tensors[name] for name in rule.flax)
        after = TensorInfo(shapes[rule.torch], cast(before[0].dtype, dtype))
        moves.append(
            Move(
                rule.flax,
                (rule.torch,),
                _operation(rule, back=True, changes=before[0].dtype != after.dtype),
                before,
                (after,),
            )
        )
    return tuple(moves), tuple(derived)


def unchanged(tensors: Tensors, dtype: str | None = None) -> tuple[Move, ...]:
    """Return a move of every tensor to its own name."""
    moves = []
    for name, before in tensors.items():
        after = TensorInfo(before.shape, cast(before.dtype, dtype))
        moves.append(
            Move((name,), (name,), "same" if after == before else "cast", (before,), (after,))
        )
    return tuple(moves)


def without_completed(plan: Plan, completed: Sequence[Note]) -> Plan:
    """Return the plan for stored tensors only.

    The move of a tensor that the source leaves out becomes a note on its computation.
    """
    reasons = {note.name: note.reason for note in completed}
    computed = [
        Note(name, reasons[move.source[0]])
        for move in plan.moves
        if move.source[0] in reasons
        for name in move.target
    ]
    moves = tuple(move for move in plan.moves if move.source[0] not in reasons)
    dropped = tuple(note for note in plan.dropped if note.name not in reasons)
    return replace(plan, moves=moves, derived=(*plan.derived, *computed), dropped=dropped)


def left_out(plan: Plan, reasons: Mapping[str, str]) -> Plan:
    """Remove the tensors that the target leaves out because its reader computes them."""
    computed = [
        Note(name, reasons[move.target[0]])
        for move in plan.moves
        if move.target[0] in reasons
        for name in move.source
    ]
    moves = tuple(move for move in plan.moves if move.target[0] not in reasons)
    return replace(
        plan,
        moves=moves,
        derived=tuple(note for note in plan.derived if note.name not in reasons),
        dropped=(*plan.dropped, *computed),
    )


def cast(dtype: str, target: str | None) -> str:
    """Return the dtype after a cast; integers and booleans stay as they are."""
    return dtype if target is None or not is_float(dtype) else target


def _operation(rule: Rule, *, back: bool, changes: bool) -> str:
    steps = []
    if len(rule.flax) > 1:
        names = {
            Several.SPLIT: ("split", "join"),
            Several.COPY: ("copy to each", "one of equals"),
            Several.PER_HEAD: ("split by head", "join by head"),
        }
        steps.append(names[rule.several][back])
    if rule.each is not Each.SAME:
        steps.append(
            rule.each.value
            if not back or rule.each is Each.TRANSPOSE
            else f"undo {rule.each.value}"
        )
    return (
        ", ".join([*(reversed(steps) if back else steps), *(["cast"] if changes else [])]) or "same"
    )


def ties_of(table: Table) -> list[tuple[str, ...]]:
    """Group the PyTorch names that are one tensor in the model's module."""
    groups: dict[str, list[str]] = {}
    for rule in table:
        if isinstance(rule, Alias):
            groups.setdefault(rule.of, [rule.of]).append(rule.torch)
    return [tuple(names) for names in groups.values()]
