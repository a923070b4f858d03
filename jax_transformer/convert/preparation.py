"""Prepare a conversion: the request, the source, its model, and the plan. No weights are read."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax_transformer.architectures import registry, tensor_names
from jax_transformer.architectures.base import Architecture
from jax_transformer.architectures.tensor_names import NameChanges
from jax_transformer.config import TransformerConfig
from jax_transformer.convert import infer, planning
from jax_transformer.convert.planning import Plan
from jax_transformer.errors import ConfigError, InputError
from jax_transformer.formats import pretrained
from jax_transformer.formats import registry as formats
from jax_transformer.formats.base import Destination, Pretrained, Settled
from jax_transformer.storage import tensors, untrusted

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

    def settle(self, source: Pretrained, architecture: Architecture | str | None = None) -> Settled:
        """Return the configuration; the sizes of a preset are read from the source's shapes.

        PyTorch names are those of ``architecture``, or of the preset's own if it is None.
        Raises ConfigError unless there is either a file or a preset.
        """
        if (settled := source.settle(self)) is not None:
            return settled
        has_torch_names = source.format.has_torch_names
        if (self.config is None) == (self.preset is None):
            match = tensor_names.closest(source.tensors) if has_torch_names else None
            fits = f" (most of its names are those of {match.preset})" if match else ""
            raise ConfigError(
                "a file of weights does not tell its architecture: "
                f"give either --config config.json or --preset NAME{fits}"
            )
        if self.preset is not None:
            from jax_transformer.architectures import model_weights  # loads jax

            names = "torch" if has_torch_names else "flax"
            shapes = {name: tensor.shape for name, tensor in source.tensors.items()}
            return infer.infer(
                registry.find_preset(self.preset, architecture),
                self.changes,
                shapes,
                lambda config: model_weights.model_weights(config, architecture).shapes[names],
            )
        config = read_config(Path(self.config or ""), source.tensors)
        return Settled(config.with_sizes(**self.changes), {}, {})

    def torch_names(
        self, source: Pretrained, architecture: Architecture | str | None = None
    ) -> set[str]:
        """Return PyTorch's names of the model's tensors; of a preset, those of one layer."""
        if self.preset is not None:
            config = registry.find_preset(self.preset, architecture).with_sizes(num_layers=1)
        else:
            config = self.settle(source, architecture).config
        return torch_names(config, architecture)


def read_config(path: Path, names: Collection[str]) -> TransformerConfig:
    """Read a config.json of this package, or of transformers for a file with these tensors."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    try:
        data = untrusted.read_json(path)
        if isinstance(data, dict) and "model_type" in data:
            from jax_transformer.architectures import huggingface_config

            return huggingface_config.from_config(data, names=names)
        return TransformerConfig.from_json(text)
    except ConfigError as error:
        raise InputError(f"{path}: {error}") from None


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

    def format_options(self) -> dict[str, Any]:
        """Return the options that only some formats have, those that were given."""
        options = {
            "shard_size": self.shard_size,
            "quantization": self.quantization,
            "scan_layers": self.scan_layers or None,
            "param_scan_axis": self.param_scan_axis if self.scan_layers else None,
        }
        return {name: value for name, value in options.items() if value is not None}


@dataclass(frozen=True)
class Prepared:
    """A planned conversion."""

    request: Request
    source: Pretrained
    to: Destination
    model: "ModelWeights | None"
    """The model's weight table and shapes; None if files are copied under the same names."""
    plan: Plan
    preset_sizes: Mapping[str, Any]
    """Sizes that no shape shows, taken from the preset."""
    problems: list[str]
    """Reasons to refuse the conversion."""

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
    to = _destination(request)
    to.format.check_free(to.path, force=request.force)
    scan_axis = None if request.scan_layers else request.param_scan_axis
    source = pretrained.open(
        request.source, weights=request.weights, key=request.key, scan_axis=scan_axis
    )
    to = replace(to, source=source)
    to.format.check(to)
    if to.path.exists() and to.path.resolve() == source.path.resolve():
        raise ConfigError(f"{to.path}: is the source as well")
    source = source.converted_to(to.format)
    is_copy = (
        request.description == ModelDescription() and source.format.is_file and to.format.is_file
    )
    own_config = _own_config(request, source, to)
    prefix = ""
    if source.format.is_file and not is_copy:
        source, prefix = with_model_names(
            source,
            request.names,
            request.description.torch_names(source, request.architecture)
            if own_config is None
            else torch_names(own_config, request.architecture),
        )
    else:
        source = source.with_names(request.names)
    if own_config is not None:
        settled = Settled(own_config, {}, {})
    elif not is_copy:
        settled = request.description.settle(source, request.architecture)
    else:
        planned = planning.plan(source, to, None)
        return Prepared(request, source, to, None, planned, {}, [])
    from jax_transformer.architectures import model_weights  # loads jax

    model = model_weights.model_weights(settled.config, request.architecture)
    to = replace(to, source=source, config=model.config, frozen=model.frozen)
    problems = tensors.problems(
        source.tensors, model.shapes["torch" if source.format.has_torch_names else "flax"]
    )
    to.format.check(to)
    planned = Plan(source.title, str(to.path), ()) if problems else planning.plan(source, to, model)
    files = source.files_for(to)
    to = replace(to, files=to.format.files(to) if files is None else files)
    planned = replace(planned, inferred=settled.sizes, stripped_prefix=prefix)
    return Prepared(request, source, to, model, planned, settled.from_preset, problems)


def _destination(request: Request) -> Destination:
    """Return the destination. Raise ConfigError for options that do not go with its format."""
    path, options = Path(request.destination), request.format_options()
    format = formats.to_write(path, request.to)
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
