"""The method of a conversion: find, settle the model, plan, read, move, write, check."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from jax_transformer.architectures import huggingface_state as states
from jax_transformer.architectures import registry
from jax_transformer.architectures.base import Architecture
from jax_transformer.config import TransformerConfig
from jax_transformer.convert import huggingface, infer, planning, report, sources, verify, writing
from jax_transformer.convert.planning import Note, Plan
from jax_transformer.convert.report import Outcome
from jax_transformer.convert.sources import Source
from jax_transformer.convert.writing import ExtraFiles
from jax_transformer.errors import ConfigError, InputError
from jax_transformer.storage import huggingface as folders
from jax_transformer.storage import kinds, safetensors
from jax_transformer.storage.kinds import Kind
from jax_transformer.storage.run_folder import RunFolder
from jax_transformer.weights import casting, rules

State = dict[str, np.ndarray]


@dataclass(frozen=True)
class Description:
    """How the command line says what model a bare file of weights is of."""

    config: str | None = None
    preset: str | None = None
    changes: dict[str, Any] = field(default_factory=dict)

    def settle(
        self, source: Source, architecture: Architecture | str | None = None
    ) -> infer.Inferred:
        """The configuration; a preset's sizes are read from the shapes. Raises ConfigError where it is not said, or said twice."""
        if (self.config is None) == (self.preset is None):
            raise ConfigError(
                "a file of weights does not say its architecture: give either --config config.json or --preset NAME"
            )
        if self.preset is not None:
            names = "torch" if source.kind.has_torch_names else "flax"
            shapes = {name: tensor.shape for name, tensor in source.tensors.items()}
            return infer.infer(
                registry.find_preset(self.preset, architecture),
                self.changes,
                shapes,
                lambda config: model_of(config, architecture).shapes[names],
            )
        try:
            text = Path(self.config or "").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{self.config}: cannot be read: {error}") from None
        try:
            config = huggingface.from_json(
                Path(self.config or ""), source.tensors
            ) or TransformerConfig.from_json(text)
        except ConfigError as error:
            raise InputError(f"{self.config}: {error}") from None
        return infer.Inferred(config.with_sizes(**self.changes), {}, {})


@dataclass(frozen=True)
class Request:
    """What is asked for."""

    source: str
    destination: str
    description: Description = Description()
    dtype: str | None = None
    weights: str = "auto"
    key: str | None = None
    strip_prefix: str = ""
    force: bool = False
    check: bool = True
    to: str | None = None
    """Which kind of folder is made, ``hf`` or ``run``, where the name does not tell."""
    shard_size: str | None = None
    """The most bytes of weights in one file of a Hugging Face folder."""
    architecture: Architecture | str | None = None
    """The architecture whose names the PyTorch weights have; that of the configuration if None."""


@dataclass(frozen=True)
class Model:
    """What weights a configuration has, on both sides."""

    config: TransformerConfig
    table: rules.Table
    shapes: Mapping[str, Mapping[str, rules.Shape]]
    """Of the tensors, by ``torch`` and ``flax``."""
    carried: frozenset[str]
    """The arrays that are never trained."""


def model_of(config: TransformerConfig, architecture: Architecture | str | None = None) -> Model:
    """Return the names and shapes of a configuration's weights, without allocating them.

    Raises ConfigError if the architecture has no names for the configuration.
    """
    return _model_of(config, registry.resolve(architecture or config.architecture))


@lru_cache(maxsize=32)
def _model_of(config: TransformerConfig, architecture: Architecture) -> Model:
    from jax_transformer import convert, transformer
    from jax_transformer.nn.positions import Frozen

    flax, table = (
        transformer.shapes(config),
        convert.weight_table(config, architecture=architecture),
    )
    return Model(
        config,
        table,
        {"torch": rules.torch_shapes(table, flax), "flax": flax},
        frozenset(transformer.shapes(config, of=Frozen)),
    )


@dataclass(frozen=True)
class Prepared:
    """A conversion that can be made."""

    request: Request
    source: Source
    target: Path
    kind: Kind
    model: Model | None
    plan: Plan
    kept: Mapping[str, Any]
    wrong: list[str]
    """Why it cannot."""
    beside: ExtraFiles


def prepare(request: Request) -> Prepared:
    """Find both ends, settle the model and plan; no weights are read. Raises ConfigError or InputError where the request cannot be meant."""
    casting.check(request.dtype)
    target = Path(request.destination)
    kind = kinds.wanted(target, request.to)
    if request.shard_size is not None and kind is not Kind.HUGGINGFACE:
        raise ConfigError(
            f"--shard-size {request.shard_size}: {target} is no Hugging Face folder, which --to hf makes"
        )
    shard_size = (
        folders.SHARD_SIZE if request.shard_size is None else folders.size(request.shard_size)
    )
    writing.check_free(target, kind, force=request.force)
    source = sources.find(
        request.source, weights=request.weights, key=request.key, strip_prefix=request.strip_prefix
    )
    if kind in (Kind.SAFETENSORS, Kind.HUGGINGFACE):
        _check_dtypes(source, target)
    if target.exists() and target.resolve() == source.path.resolve():
        raise ConfigError(f"{target}: is the source, too")
    settled = _settle(request, source, target, kind)
    model = None if settled is None else model_of(settled.config, request.architecture)
    wrong = _wrong(source, model)
    inferred = settled.sizes if settled is not None else {}
    made = _plan(request, source, kind, model) if not wrong else Plan(source.title, str(target), ())
    kept = settled.kept if settled is not None else {}
    files = _files(request, source, target, kind, model)
    return Prepared(
        request,
        source,
        target,
        kind,
        model,
        replace(made, inferred=inferred),
        kept,
        wrong,
        ExtraFiles(files, shard_size),
    )


def _files(
    request: Request, source: Source, target: Path, kind: Kind, model: Model | None
) -> Mapping[str, bytes]:
    """What goes into a folder beside the weights."""
    if kind is Kind.HUGGINGFACE and model is not None:
        return huggingface.exported(source, model.config, target.absolute().name, request.dtype)
    if kind is Kind.RUN and source.beside is not None:
        return huggingface.kept(source, request.dtype)
    return {}


def _check_dtypes(source: Source, target: Path) -> None:
    """Raises InputError that names every tensor of a dtype that a .safetensors file has no name for."""
    known = {dtype.name for dtype in safetensors.DTYPES.values()}
    odd = [
        f"{name} is {tensor.dtype}"
        for name, tensor in source.tensors.items()
        if tensor.dtype not in known
    ]
    if odd:
        raise InputError(f"{target}: a .safetensors file cannot hold {', '.join(odd)}")


def _settle(request: Request, source: Source, target: Path, kind: Kind) -> infer.Inferred | None:
    """The configuration, where one is needed or given."""
    if kind is Kind.STEP and RunFolder(target.absolute().parent.parent).train_config.is_file():
        raise ConfigError(
            f"{target}: lies in a run that was trained, which could not go on from weights alone: give --training"
        )
    around = source.config or (sources.config_around(target) if kind is Kind.STEP else None)
    if around is not None:
        if request.description != Description():
            whose = request.source if source.config is not None else target.absolute().parent.parent
            raise ConfigError(
                f"{whose} has a config.json of its own: --config, --preset and --set are for bare files of weights"
            )
        return infer.Inferred(around, {}, {})
    if request.description == Description() and source.kind.is_file and kind.is_file:
        return None
    prefix = planning.wrapper_prefix(list(source.tensors)) if source.kind.is_file else ""
    if prefix:
        raise InputError(
            f"{source.path}: every name begins with {prefix!r}: give --strip-prefix {prefix}"
        )
    return request.description.settle(source, request.architecture)


def _wrong(source: Source, model: Model | None) -> list[str]:
    return (
        planning.problems(
            source.tensors, model.shapes["torch" if source.kind.has_torch_names else "flax"]
        )
        if model is not None
        else []
    )


def _plan(request: Request, source: Source, kind: Kind, model: Model | None) -> Plan:
    dropped, ties = source.dropped, source.ties
    derived: tuple[Note, ...] = ()
    if model is None or source.kind.has_torch_names == kind.has_torch_names:
        moves = planning.unchanged(source.tensors, request.dtype)
    elif source.kind.has_torch_names:
        moves, repeated = planning.to_flax(
            model.table, source.tensors, model.shapes["flax"], request.dtype
        )
        dropped += repeated
    else:
        moves, derived = planning.to_torch(
            model.table, source.tensors, model.shapes["flax"], request.dtype
        )
    if model is not None:
        ties = tuple(planning.ties_of(model.table))
    if source.kind not in (Kind.RUN, Kind.HUGGINGFACE) or kind not in (Kind.RUN, Kind.HUGGINGFACE):
        dropped += tuple(
            Note(name, f"goes with folders, and {request.destination} is a {kind.value}")
            for name in source.kept
        )
    made = planning.without_completed(
        Plan(source.title, request.destination, moves, derived, dropped, ties), source.derived
    )
    if kind is not Kind.HUGGINGFACE or model is None:
        return made
    made = replace(made, dropped=made.dropped + huggingface.left_behind(source))
    held = states.saved(dict.fromkeys(model.shapes["torch"]), model.config)
    return planning.left_out(
        made,
        {
            name: states.why_completed(name, model.config)
            for name in model.shapes["torch"]
            if name not in held
        },
    )


def convert(prepared: Prepared) -> Outcome:
    """Make it: the destination is there whole, or as it was. Raises InputError with everything that does not fit, and nothing is written."""
    request, source, kind, model = prepared.request, prepared.source, prepared.kind, prepared.model
    state = source.read()
    names_torch, to_torch = source.kind.has_torch_names, kind.has_torch_names
    ties = planning.differing_ties(model.table, state) if model is not None and names_torch else []
    planning.refuse([*prepared.wrong, *ties])
    loss = None
    if request.dtype is not None:
        state, loss = casting.cast(state, request.dtype)
        if model is not None:
            state = states.computed_again(state, model.config)
    result = moved(state, model, to_torch=to_torch, from_torch=names_torch)
    written = (
        states.saved(result, model.config)
        if kind is Kind.HUGGINGFACE and model is not None
        else result
    )
    checked = verify.Checked(
        "read back bit for bit; not run: no architecture was given"
        if model is None
        else "read back bit for bit; not run"
    )

    def check(again: Mapping[str, np.ndarray]) -> None:
        nonlocal checked
        if request.check and model is not None:
            again = _whole(model, result, again) if kind is Kind.HUGGINGFACE else again
            theirs, ours = _sides(model, state, again, from_torch=names_torch, to_torch=to_torch)
            checked = verify.check(model.config, model.table, theirs, ours)

    config = model.config if model is not None else None
    carried = model.carried if model is not None else frozenset()
    writing.write(prepared.target, kind, written, config, carried, check, prepared.beside)
    dtypes = ", ".join(sorted({str(array.dtype) for array in result.values()}))
    summary = f"{source.title} -> {prepared.target}: {len(written)} tensors, {sum(array.size for array in written.values()):,} numbers, {dtypes}"
    sha256 = report.file_sha256(prepared.target) if kind.is_file else report.content_sha256(written)
    return Outcome(
        prepared.plan,
        summary,
        prepared.kept,
        loss,
        checked,
        sha256,
        tuple(sorted(prepared.beside.files)),
    )


def moved(state: State, model: Model | None, *, from_torch: bool, to_torch: bool) -> State:
    """The weights under the names of the destination; what the model ties is one array."""
    if model is not None and from_torch != to_torch:
        state = (
            rules.to_torch(model.table, state)
            if to_torch
            else rules.to_flax(model.table, state, model.shapes["flax"])
        )
    if model is not None and to_torch:
        state = {name: state[name] for rule in model.table for name in (rule.torch,)}
        for first, *others in planning.ties_of(model.table):
            state |= dict.fromkeys(others, state[first])
    return state


def _whole(model: Model, state: State, again: Mapping[str, np.ndarray]) -> State:
    """What was read back under all names of the module. Positions that a file leaves out are taken as they were: transformers computes them, and
    how near they are is checked before they are left out."""
    found = states.complete(again, model.config)
    tied = {name for names in planning.ties_of(model.table) for name in names}
    return found | {
        name: array for name, array in state.items() if name not in again and name not in tied
    }


def _sides(
    model: Model,
    before: State,
    after: Mapping[str, np.ndarray],
    *,
    from_torch: bool,
    to_torch: bool,
) -> tuple[State, State]:
    """The same weights under PyTorch's names and under Flax's, one of them from what was written."""
    if to_torch:
        return dict(after), rules.to_flax(
            model.table, before, model.shapes["flax"]
        ) if from_torch else before
    return before if from_torch else rules.to_torch(model.table, before), dict(after)
