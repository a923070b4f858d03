"""Prepare a conversion: the request, the source, its model, and the plan. No weights are read."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax_transformer import pretrained, pretrained_files
from jax_transformer.architectures import huggingface_config, registry
from jax_transformer.architectures import huggingface_state as states
from jax_transformer.architectures.base import Architecture
from jax_transformer.config import TransformerConfig
from jax_transformer.convert import export_files, infer, planning, writing
from jax_transformer.convert.planning import Plan
from jax_transformer.convert.writing import ExtraFiles
from jax_transformer.errors import ConfigError, InputError
from jax_transformer.pretrained import Pretrained
from jax_transformer.storage import huggingface as folders
from jax_transformer.storage import kinds, safetensors, tensors, untrusted
from jax_transformer.storage.kinds import Kind
from jax_transformer.storage.run_folder import RunFolder
from jax_transformer.storage.tensors import Note

if TYPE_CHECKING:
    from jax_transformer.state_dict import ModelWeights


@dataclass(frozen=True)
class ModelDescription:
    """A configuration file, or a preset with sizes that no shape shows."""

    config: str | None = None
    """Path of a config.json, of this package or of transformers."""
    preset: str | None = None
    """Name of a preset."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Fields to change, by name (``--set``)."""

    def settle(
        self, source: Pretrained, architecture: Architecture | str | None = None
    ) -> infer.Inferred:
        """Return the configuration; the sizes of a preset are read from the source's shapes.

        PyTorch names are those of ``architecture``, or of the preset's own if it is None.
        Raises ConfigError unless there is either a file or a preset.
        """
        if (self.config is None) == (self.preset is None):
            raise ConfigError(
                "a file of weights does not tell its architecture: "
                "give either --config config.json or --preset NAME"
            )
        if self.preset is not None:
            names = "torch" if source.kind.has_torch_names else "flax"
            shapes = {name: tensor.shape for name, tensor in source.tensors.items()}
            return infer.infer(
                registry.find_preset(self.preset, architecture),
                self.changes,
                shapes,
                lambda config: _model_weights(config, architecture).shapes[names],
            )
        config = _from_file(Path(self.config or ""), source)
        return infer.Inferred(config.with_sizes(**self.changes), {}, {})


@dataclass(frozen=True)
class Request:
    """Arguments of a conversion, as on the command line."""

    source: str
    destination: str
    description: ModelDescription = ModelDescription()
    dtype: str | None = None
    weights: str = "auto"
    key: str | None = None
    strip_prefix: str = ""
    force: bool = False
    check: bool = True
    to: str | None = None
    """Kind of folder to write, ``hf`` or ``run``, if the name does not show it."""
    shard_size: str | None = None
    """Maximum size of one file of weights in a Hugging Face folder, e.g. ``5GB``."""
    architecture: Architecture | str | None = None
    """The architecture whose names the PyTorch weights have; that of the configuration if None."""


@dataclass(frozen=True)
class Prepared:
    """A planned conversion."""

    request: Request
    source: Pretrained
    target: Path
    kind: Kind
    """The kind of the target."""
    model: "ModelWeights | None"
    """The model's weight table and shapes; None if files are copied under the same names."""
    plan: Plan
    preset_sizes: Mapping[str, Any]
    """Sizes that no shape shows, taken from the preset."""
    problems: list[str]
    """Reasons to refuse the conversion."""
    extra_files: ExtraFiles


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
    request = Request(
        str(source),
        str(destination),
        description,
        dtype,
        weights,
        key,
        strip_prefix,
        force,
        architecture=architecture,
    )
    prepared = prepare(request)
    tensors.refuse(prepared.problems)
    return prepared.plan


def prepare(request: Request) -> Prepared:
    """Open the source, find its model and plan; no weights are read.

    Raises ConfigError or InputError if the request contradicts itself, the source or the target.
    """
    tensors.check_dtype(request.dtype)
    target = Path(request.destination)
    kind = kinds.to_write(target, request.to)
    if request.shard_size is not None and kind is not Kind.HUGGINGFACE:
        raise ConfigError(
            f"--shard-size {request.shard_size}: {target} is no Hugging Face folder, which --to hf "
            "makes"
        )
    shard_size = (
        folders.SHARD_SIZE if request.shard_size is None else folders.size(request.shard_size)
    )
    writing.check_free(target, kind, force=request.force)
    source = pretrained.open(
        request.source, weights=request.weights, key=request.key, strip_prefix=request.strip_prefix
    )
    if kind in (Kind.SAFETENSORS, Kind.HUGGINGFACE):
        _check_dtypes(source, target)
    if target.exists() and target.resolve() == source.path.resolve():
        raise ConfigError(f"{target}: is the source, too")
    settled = _settle(request, source, target, kind)
    model = None if settled is None else _model_weights(settled.config, request.architecture)
    problems = _problems(source, model)
    if problems and source.kind.is_file and model is not None:
        _check_prefix(source, planning.foreign_prefix([*source.tensors], model.shapes["torch"]))
    inferred = settled.sizes if settled is not None else {}
    planned = Plan(source.title, str(target), ())
    if not problems:
        planned = _plan(request, source, kind, model)
    files = _files(request, source, target, kind, model)
    return Prepared(
        request,
        source,
        target,
        kind,
        model,
        replace(planned, inferred=inferred),
        settled.from_preset if settled is not None else {},
        problems,
        ExtraFiles(files, shard_size),
    )


def _files(
    request: Request, source: Pretrained, target: Path, kind: Kind, model: "ModelWeights | None"
) -> Mapping[str, bytes]:
    """Return the files that go into a folder with the weights."""
    if kind is Kind.HUGGINGFACE and model is not None:
        return export_files.for_huggingface(
            source, model.config, target.absolute().name, request.dtype
        )
    if kind is Kind.RUN and source.extra_files:
        return export_files.for_run(source, request.dtype)
    return {}


def _check_dtypes(source: Pretrained, target: Path) -> None:
    """Raise InputError naming every tensor whose dtype a .safetensors file cannot hold."""
    known = {dtype.name for dtype in safetensors.DTYPES.values()}
    unsupported = [
        f"{name} is {tensor.dtype}"
        for name, tensor in source.tensors.items()
        if tensor.dtype not in known
    ]
    if unsupported:
        raise InputError(f"{target}: a .safetensors file cannot hold {', '.join(unsupported)}")


def _settle(
    request: Request, source: Pretrained, target: Path, kind: Kind
) -> infer.Inferred | None:
    """Return the configuration; None if files become files and none was requested."""
    if kind is Kind.STEP and RunFolder(target.absolute().parent.parent).train_config.is_file():
        raise ConfigError(
            f"{target}: is in a trained run, which cannot be resumed from weights only: give "
            "--training"
        )
    own_config = source.config or (
        pretrained_files.config_around(target) if kind is Kind.STEP else None
    )
    if own_config is not None:
        if request.description != ModelDescription():
            owner = request.source if source.config is not None else target.absolute().parent.parent
            raise ConfigError(
                f"{owner} has its own config.json: --config, --preset and --set are for bare files "
                "of weights"
            )
        return infer.Inferred(own_config, {}, {})
    if request.description == ModelDescription() and source.kind.is_file and kind.is_file:
        return None
    if source.kind.is_file:
        _check_prefix(source, planning.wrapper_prefix([*source.tensors]))
    return request.description.settle(source, request.architecture)


def _check_prefix(source: Pretrained, prefix: str) -> None:
    if prefix:
        raise InputError(
            f"{source.path}: every name begins with {prefix!r}: give --strip-prefix {prefix}"
        )


def _problems(source: Pretrained, model: "ModelWeights | None") -> list[str]:
    return (
        tensors.problems(
            source.tensors, model.shapes["torch" if source.kind.has_torch_names else "flax"]
        )
        if model is not None
        else []
    )


def _plan(request: Request, source: Pretrained, kind: Kind, model: "ModelWeights | None") -> Plan:
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
    if kind not in (Kind.RUN, Kind.HUGGINGFACE):
        dropped += tuple(
            Note(name, f"goes with folders, and {request.destination} is a {kind.value}")
            for name in source.extra_files
        )
    planned = planning.without_completed(
        Plan(source.title, request.destination, moves, derived, dropped, ties), source.derived
    )
    if kind is not Kind.HUGGINGFACE or model is None:
        return planned
    planned = replace(planned, dropped=planned.dropped + export_files.not_exported(source))
    stored = states.saved(dict.fromkeys(model.shapes["torch"]), model.config)
    return planning.left_out(
        planned,
        {
            name: states.why_completed(name, model.config)
            for name in model.shapes["torch"]
            if name not in stored
        },
    )


def _model_weights(
    config: TransformerConfig, architecture: Architecture | str | None
) -> "ModelWeights":
    from jax_transformer import state_dict  # loads jax

    return state_dict.model_weights(config, architecture)


def _from_file(path: Path, source: Pretrained) -> TransformerConfig:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    try:
        data = untrusted.read_json(path)
        if isinstance(data, dict) and kinds.is_huggingface(data):
            return huggingface_config.from_config(data, names=source.tensors)
        return TransformerConfig.from_json(text)
    except ConfigError as error:
        raise InputError(f"{path}: {error}") from None
