"""Prepare a conversion: the request, the source, its model, and the plan. No weights are read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax_transformer.architectures import registry, tensor_names
from jax_transformer.architectures.base import Architecture
from jax_transformer.architectures.tensor_names import NameChanges
from jax_transformer.config import TransformerConfig
from jax_transformer.convert import (
    config_file,
    export_files,
    infer,
    planning,
    writing,
)
from jax_transformer.convert.planning import Plan
from jax_transformer.convert.writing import ExtraFiles
from jax_transformer.errors import ConfigError, InputError
from jax_transformer.extras.deploy.ctranslate2 import checks, folder
from jax_transformer.extras.toolkits import word_tokenizer
from jax_transformer.extras.toolkits.marian import marian_conversion
from jax_transformer.extras.toolkits.t5x import gin_config, t5x_checkpoint, t5x_conversion
from jax_transformer.extras.toolkits.t5x.t5x_names import Layout
from jax_transformer.formats import kinds, pretrained, pretrained_files
from jax_transformer.formats.kinds import DEPLOYED, Kind
from jax_transformer.formats.pretrained import Pretrained
from jax_transformer.storage import huggingface_folder as folders
from jax_transformer.storage import safetensors, tensors
from jax_transformer.storage.run_folder import RunFolder

if TYPE_CHECKING:
    from jax_transformer.architectures.model_weights import ModelWeights


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
        if source.t5x is not None:
            return t5x_conversion.settle(self, source, source.t5x)
        if (self.config is None) == (self.preset is None):
            match = tensor_names.closest(source.tensors) if source.kind.has_torch_names else None
            fits = f" (most of its names are those of {match.preset})" if match else ""
            raise ConfigError(
                "a file of weights does not tell its architecture: "
                f"give either --config config.json or --preset NAME{fits}"
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
        config = config_file.read(Path(self.config or ""), source.tensors)
        return infer.Inferred(config.with_sizes(**self.changes), {}, {})

    def torch_names(
        self, source: Pretrained, architecture: Architecture | str | None = None
    ) -> set[str]:
        """Return PyTorch's names of the model's tensors; of a preset, those of one layer."""
        if self.preset is not None:
            config = registry.find_preset(self.preset, architecture).with_sizes(num_layers=1)
        else:
            config = self.settle(source, architecture).config
        return torch_names(config, architecture)


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
    """Kind of folder to write, ``hf``, ``run``, ``t5x``, ``ct2`` or ``stablehlo``."""
    shard_size: str | None = None
    """Maximum size of one file of weights in a Hugging Face folder, e.g. ``5GB``."""
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
    layout: Layout | None = None
    """The layout of a checkpoint of T5X that is written."""

    def refuse(self, others: Sequence[str] = ()) -> None:
        """Raise one InputError with all problems, and with ``others``, if there are any."""
        try:
            tensors.refuse([*self.problems, *others])
        except InputError as error:
            names = self.source.tensors if self.source.kind.has_torch_names else ()
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
    request = Request(
        str(source),
        str(destination),
        description,
        dtype,
        weights,
        key,
        NameChanges(strip_prefix, ignore=tuple(ignore), rename=rename or {}),
        force,
        architecture=architecture,
    )
    prepared = prepare(request)
    prepared.refuse()
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
    _check_quantization(request, kind)
    shard_size = (
        folders.SHARD_SIZE if request.shard_size is None else folders.size(request.shard_size)
    )
    writing.check_free(target, kind, force=request.force)
    scan_axis = None if request.scan_layers else request.param_scan_axis
    source = pretrained.open(
        request.source, weights=request.weights, key=request.key, scan_axis=scan_axis
    )
    if kind in (Kind.SAFETENSORS, Kind.HUGGINGFACE):
        _check_dtypes(source, target)
    if target.exists() and target.resolve() == source.path.resolve():
        raise ConfigError(f"{target}: is the source, too")
    source = marian_conversion.as_for(source, kind)
    own_config = _own_config(request, source, target, kind)
    source, prefix = _named(request, source, own_config, kind)
    settled = _settle(request, source, own_config, kind)
    model = None if settled is None else _model_weights(settled.config, request.architecture)
    if kind is Kind.CTRANSLATE2 and model is not None:
        checks.check(model.config)
    problems = _problems(source, model)
    layout = t5x_conversion.layout_to_write(request, kind, model.config if model else None)
    inferred = settled.sizes if settled is not None else {}
    planned = Plan(source.title, str(target), ())
    if not problems:
        planned = planning.plan(source, request.destination, kind, model, request.dtype, layout)
    files = _files(request, source, target, kind, model, layout)
    return Prepared(
        request,
        source,
        target,
        kind,
        model,
        replace(planned, inferred=inferred, stripped_prefix=prefix),
        settled.from_preset if settled is not None else {},
        problems,
        ExtraFiles(files, shard_size),
        layout,
    )


def _check_quantization(request: Request, kind: Kind) -> None:
    """Raise ConfigError for options that contradict the kind of folder, or without its library."""
    if kind is Kind.STABLEHLO:
        from jax_transformer.extras.deploy.stablehlo import folder as programs  # loads jax

        programs.check_installed()
    if kind is not Kind.CTRANSLATE2:
        if request.quantization is not None:
            raise ConfigError(f"--quantization {request.quantization} is for --to ct2")
        return
    folder.quantization(request.quantization)
    folder.check_installed("--to ct2")
    if request.dtype is not None:
        raise ConfigError(
            f"--dtype {request.dtype}: a CTranslate2 folder has --quantization float32, float16 "
            "or int8"
        )


def _files(
    request: Request,
    source: Pretrained,
    target: Path,
    kind: Kind,
    model: "ModelWeights | None",
    layout: Layout | None,
) -> Mapping[str, bytes]:
    """Return the files that go into a folder with the weights."""
    if layout is not None and model is not None:
        return {t5x_checkpoint.CONFIG: gin_config.to_gin(model.config, layout).encode()}
    if source.vocabularies is not None:
        needed = kind in (Kind.RUN, *DEPLOYED)
        return word_tokenizer.files(source.title, source.vocabularies) if needed else {}
    if source.marian is not None:
        return marian_conversion.files(source, source.marian, kind, target, request.dtype)
    if kind is Kind.HUGGINGFACE and model is not None:
        return export_files.for_huggingface(
            source, model.config, target.absolute().name, request.dtype
        )
    if kind is Kind.RUN and source.extra_files:
        return export_files.for_run(source, request.dtype)
    if kind in DEPLOYED:
        return export_files.tokenizer_files(source)
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


def _own_config(
    request: Request, source: Pretrained, target: Path, kind: Kind
) -> TransformerConfig | None:
    """Return the configuration of the source's or of the target's folder."""
    if kind is Kind.STEP and RunFolder(target.absolute().parent.parent).train_config.is_file():
        raise ConfigError(
            f"{target}: is in a trained run, which cannot be resumed from weights only: give "
            "--training"
        )
    own_config = source.config or (
        pretrained_files.config_around(target) if kind is Kind.STEP else None
    )
    if source.t5x is not None and request.description != ModelDescription():
        return None  # config.gin is only what is taken if nothing else is given
    if own_config is not None and request.description != ModelDescription():
        owner = request.source if source.config is not None else target.absolute().parent.parent
        raise ConfigError(
            f"{owner} has its own config.json: --config, --preset and --set are for bare files "
            "of weights"
        )
    return own_config


def _named(
    request: Request, source: Pretrained, own_config: TransformerConfig | None, kind: Kind
) -> tuple[Pretrained, str]:
    """Return the source under its model's names, and the prefix that was found before them."""
    if not source.kind.is_file or _is_copy(request, source, kind):
        return source.with_names(request.names), ""
    return with_model_names(
        source,
        request.names,
        request.description.torch_names(source, request.architecture)
        if own_config is None
        else torch_names(own_config, request.architecture),
    )


def with_model_names(
    source: Pretrained, changes: NameChanges, names: set[str]
) -> tuple[Pretrained, str]:
    """Return a file's tensors under the names that its model has, and a prefix that was found.

    If no name is one of the model's ``names``, a prefix before most of them is removed as well.
    """
    prefix = ""
    if not changes.strip_prefix and names.isdisjoint(source.tensors):
        prefix = tensor_names.common_prefix(source.tensors, names)
        changes = replace(changes, strip_prefix=prefix, prefix_required=False)
    return source.with_names(changes), prefix


def torch_names(
    config: TransformerConfig, architecture: Architecture | str | None = None
) -> set[str]:
    """Return PyTorch's names of the tensors of a model."""
    return {
        rule.torch for rule in registry.weight_table(architecture or config.architecture, config)
    }


def _is_copy(request: Request, source: Pretrained, kind: Kind) -> bool:
    """Return True if a file becomes a file under the same names."""
    return request.description == ModelDescription() and source.kind.is_file and kind.is_file


def _settle(
    request: Request, source: Pretrained, own_config: TransformerConfig | None, kind: Kind
) -> infer.Inferred | None:
    """Return the configuration; None if files become files and none was requested."""
    if own_config is not None:
        return infer.Inferred(own_config, {}, {})
    if _is_copy(request, source, kind):
        return None
    return request.description.settle(source, request.architecture)


def _problems(source: Pretrained, model: "ModelWeights | None") -> list[str]:
    return (
        tensors.problems(
            source.tensors, model.shapes["torch" if source.kind.has_torch_names else "flax"]
        )
        if model is not None
        else []
    )


def _model_weights(
    config: TransformerConfig, architecture: Architecture | str | None
) -> "ModelWeights":
    from jax_transformer.architectures import model_weights

    return model_weights.model_weights(config, architecture)
