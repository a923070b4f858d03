"""Plan a conversion: each tensor of source and destination, exactly once; no weights are read."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from jax_transformer.architectures import registry, tensor_names
from jax_transformer.architectures.base import Architecture
from jax_transformer.architectures.registry import ModelWeights
from jax_transformer.architectures.tensor_names import NameChanges
from jax_transformer.config import TransformerConfig
from jax_transformer.convert import models
from jax_transformer.convert.models import ModelDescription
from jax_transformer.errors import ConfigError, InputError
from jax_transformer.formats import registry as formats
from jax_transformer.formats.base import Destination, Layout, Pretrained, Settled
from jax_transformer.storage import tensors
from jax_transformer.storage.tensors import Note, TensorInfo
from jax_transformer.storage.untrusted import plain
from jax_transformer.weights.rules import Alias, Rule


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
    """A prefix that stood before most of the source's names, and was removed unasked."""

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


@dataclass(frozen=True)
class Request:
    """Arguments of a conversion, as on the command line."""

    source: str
    destination: str
    description: ModelDescription = ModelDescription()
    dtype: str | None = None
    weights: str = "auto"
    key: str | None = None
    names: NameChanges = NameChanges()
    force: bool = False
    check: bool = True
    to: str | None = None
    """Format of a folder to write: ``hf``, ``run``, ``t5x``, ``ct2``, ``stablehlo`` or another."""
    shard_size: str | None = None
    """Maximum size of one file of weights in a Hugging Face folder, for example ``5GB``."""
    quantization: str | None = None
    """Numbers of a CTranslate2 folder: ``float32``, ``float16`` or ``int8``."""
    architecture: Architecture | str | None = None
    """The architecture whose names the PyTorch weights have; that of the configuration if None."""
    scan_layers: bool = False
    """Put all layers of a stack into one array of a checkpoint of T5X that is written."""
    param_scan_axis: int | None = None
    """The axis of the layers in such an array, of the source or of the destination."""


@dataclass(frozen=True)
class Prepared:
    """A planned conversion, which prints its plan (``--dry-run``)."""

    source: Pretrained
    to: Destination
    model: ModelWeights | None
    """The model's weight table and shapes; None if files are copied under the same names."""
    plan: Plan
    preset_sizes: Mapping[str, Any]
    problems: list[str]
    """Reasons to refuse the conversion."""

    def lines(self) -> Iterator[str]:
        yield from self.size_lines()
        yield from self.plan.lines()
        yield "nothing was written"

    def to_data(self) -> dict[str, Any]:
        return {"plan": self.plan.to_data(), "kept": dict(self.preset_sizes)}

    def size_lines(self) -> Iterator[str]:
        """Yield the sizes that were read from the shapes, and those taken from the preset."""
        inferred, preset_sizes = (
            ", ".join(f"{name}={value}" for name, value in sizes.items())
            for sizes in (self.plan.inferred, self.preset_sizes)
        )
        if inferred:
            yield f"from the shapes: {inferred}"
        if preset_sizes:
            yield f"the preset's, as no shape shows it: {preset_sizes} (--set changes it)"

    def refuse(self, others: Sequence[str] = ()) -> None:
        """Raise one InputError with all problems, and with ``others``, if there are any."""
        try:
            tensors.refuse([*self.problems, *others])
        except InputError as error:
            names = self.source.tensors if self.source.format.has_torch_names else ()
            assert self.model is not None  # a copy has no problems
            raise tensor_names.explained(error, names, self.model.shapes["torch"]) from None


def plan(
    source: str | Path,
    destination: str | Path,
    config: str | None = None,
    *,
    preset: str | None = None,
    dtype: str | None = None,
    weights: str = "auto",
    key: str | None = None,
    strip_prefix: str = "",
    ignore: Sequence[str] = (),
    rename: Mapping[str, str] | None = None,
    force: bool = False,
    architecture: Architecture | str | None = None,
    **sizes: Any,
) -> Plan:
    """Map every tensor once, as ``jax-transformer convert SOURCE DESTINATION`` does.

    No weights are read. ``config`` is the path of a config.json; the other arguments are those of
    :func:`jax_transformer.convert.load`. Raises the errors of the conversion, except for tied
    copies that differ, which are seen only when they are read.
    """
    description = ModelDescription(config, preset, sizes)
    names = NameChanges(strip_prefix, ignore=tuple(ignore), rename=rename or {})
    request = Request(str(source), str(destination), description, dtype, weights, key, names, force)
    prepared = prepare(replace(request, architecture=architecture))
    prepared.refuse()
    return prepared.plan


def prepare(request: Request) -> Prepared:
    """Open the source, find its model and plan. Raises ConfigError or InputError if it cannot."""
    tensors.check_dtype(request.dtype)
    to = _destination(request)
    formats.check_free(to.format, to.path, force=request.force)
    scan_axis = None if request.scan_layers else request.param_scan_axis
    options: dict[str, Any] = {"key": request.key, "scan_axis": scan_axis}
    source = formats.open(request.source, request.weights, **options)
    if to.path.exists() and to.path.resolve() == source.path.resolve():
        raise ConfigError(f"{to.path}: is the source as well")
    source = source.converted_to(to.format)
    between_files = source.format.is_file and to.format.is_file
    described, architecture = request.description, request.architecture
    is_copy = between_files and described == ModelDescription()
    own_config = _own_config(request, source, to)
    prefix = ""
    if source.format.is_file and not is_copy:
        named = own_config or described.named_config(source, architecture)
        source, prefix, _ = models.with_model_names(source, request.names, named, architecture)
    else:
        source = source.with_names(request.names)
    to = replace(to, source=source)
    to.format.check(to)
    if own_config is None and is_copy:
        return Prepared(source, to, None, _map_tensors(source, to, None), {}, [])
    settled = Settled(own_config, {}, {}) if own_config else described.settle(source, architecture)
    model = registry.model_weights(settled.config, architecture)
    to = replace(to, config=model.config, frozen=model.frozen)
    names = "torch" if source.format.has_torch_names else "flax"
    problems = tensors.problems(source.tensors, model.shapes[names])
    to.format.check(to)
    planned = Plan(source.title, str(to.path), ()) if problems else _map_tensors(source, to, model)
    files = source.files_for(to)
    to = replace(to, files=to.format.files(to) if files is None else files)
    planned = replace(planned, inferred=settled.sizes, stripped_prefix=prefix)
    return Prepared(source, to, model, planned, settled.from_preset, problems)


def _destination(request: Request) -> Destination:
    """Return the destination. Raise ConfigError for options that do not go with its format."""
    path = Path(request.destination)
    format = formats.to_write(path, request.to)
    values = {
        "shard_size": request.shard_size,
        "quantization": request.quantization,
        "scan_layers": request.scan_layers or None,
        "param_scan_axis": request.param_scan_axis if request.scan_layers else None,
    }
    options = {name: value for name, value in values.items() if value is not None}
    for name, value in options.items():
        if name not in (format.write_options or ()):
            flag, text = name.replace("_", "-"), "" if value is True else f" {value}"
            of = next((f for f in formats.others() if name in (f.write_options or ())), None)
            of = of or formats.get("hf")
            raise ConfigError(
                f"--{flag}{text}: {path} is not a {of.title}, which --to {of.name} makes"
            )
    to = Destination(format, path, dtype=request.dtype, options=options, self_check=request.check)
    format.check_options(to)
    return to


def _own_config(request: Request, source: Pretrained, to: Destination) -> TransformerConfig | None:
    """Return the configuration of the source's or of the target's folder."""
    described = request.description != ModelDescription()
    if described and source.config_gives_way:
        return None
    own_config = source.config or to.format.own_config(to.path)
    if own_config is not None and described:
        owner = request.source if source.config else to.path.absolute().parent.parent
        raise ConfigError(
            f"{owner} has its own config.json: --config, --preset and --set are for bare files "
            "of weights"
        )
    return own_config


# Tensors


def _map_tensors(source: Pretrained, to: Destination, model: ModelWeights | None) -> Plan:
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
        ties = tuple(models.ties_of(model.table))
        if from_torch != to_torch:
            rules = model.table
            target_shapes = model.shapes["torch" if to_torch else "flax"]
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
        before = [infos[name] for name in old]
        dtype = before[0].dtype
        if to.dtype is not None and dtype in tensors.FLOATS:
            dtype = to.dtype
        shapes = [infos[name].shape if applied is None else target_shapes[name] for name in new]
        after = [TensorInfo(shape, dtype) for shape in shapes]
        operation = _operation(applied, back=to_torch, is_cast=dtype != before[0].dtype)
        ours = [source.stored_names.get(name, name) for name in old]
        theirs = [layout.names.get(name, name) for name in new]
        moves.append(Move(tuple(ours), tuple(theirs), operation, tuple(before), tuple(after)))
    others = "other folders" if any(map(to.format.takes, source.extra_files)) else "folders"
    for name in source.extra_files:
        if not to.format.takes(name):
            reason = f"goes with {others}, and {to.path} is a {to.format.title}"
            dropped.append(Note(name, reason))
    dropped += [*source.notes_for(to), *layout.notes]
    notes = tuple(derived), tuple(dropped)
    return Plan(source.title, str(to.path), tuple(moves), *notes, tuple(ties))


def _operation(rule: Rule | None, *, back: bool, is_cast: bool) -> str:
    steps = []
    if rule is not None and len(rule.flax) > 1:
        cuts = ("split by head", "join by head") if rule.sizes else ("split", "join")
        steps.append((cuts if rule.cuts else ("copy to each", "one of equals"))[back])
    if rule is not None and (layout := rule.layout):
        steps.append(f"undo {layout}" if back and layout != "transpose" else layout)
    if back:
        steps.reverse()
    return ", ".join([*steps, *(["cast"] if is_cast else [])]) or "same"
