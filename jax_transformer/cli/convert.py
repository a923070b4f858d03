"""``jax-transformer convert``: weights from one kind of file or folder to another."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated

from jax_transformer.cli import arguments
from jax_transformer.cli.arguments import Command
from jax_transformer.config import option
from jax_transformer.config.option import Option
from jax_transformer.errors import ConfigError
from jax_transformer.runtime import process


@dataclass(frozen=True)
class ConvertOptions:
    """Convert weights between PyTorch, safetensors, Hugging Face folders, runs and checkpoints."""

    source: Annotated[option.Positional[str], Option(group="input and output")]
    """A .pt, .pth, .bin or .safetensors file, a Hugging Face folder, hf:owner/name, a run folder,
    one checkpoint of a run, or one of T5X; recognised by its content."""
    destination: option.Positional[str]
    """A .safetensors, .pt, .pth or .bin file, a folder, or RUN/checkpoints/STEP."""
    to: Annotated[str | None, Option(metavar="KIND")] = None
    """Kind of folder to write: hf, which transformers loads, t5x, ct2 for CTranslate2, stablehlo,
    whose programs need only jax, or run (default: run)."""
    config: Annotated[option.PathText | None, Option(group="model, if the files do not say")] = None
    """The model's config.json, if neither source nor destination has one."""
    preset: option.Name | None = None
    """The model's preset, if there is no config.json; sizes are read from the shapes."""
    architecture: option.Architecture | None = None
    """Register an architecture of yours, my_file.py:NAME or package.module:NAME."""
    set: Annotated[tuple[str, ...], Option(metavar="NAME=VALUE")] = ()
    """Fields of the preset that shapes do not show, for example num_heads=4 max_length=40."""
    dtype: Annotated[option.Dtype | None, Option(group="input and output")] = None
    """Cast the weights to this dtype and report what is lost (default: keep their own)."""
    weights: Annotated[option.Weights, Option(group="source")] = "auto"
    """Weights of a run: averaged, best, last, a step, or auto (the first that exists)."""
    key: Annotated[str | None, Option(metavar="KEY")] = None
    """Key of the state_dict in a PyTorch file, for example model (default: the only one)."""
    strip_prefix: Annotated[str, Option(metavar="PREFIX")] = ""
    """Strip this prefix from all names, for example module. (default: one that most names have)."""
    ignore: Annotated[option.Repeatable[tuple[str, ...]], Option(metavar="PATTERN")] = ()
    """Leave out tensors whose names fit this pattern, for example criterion.*; may be repeated."""
    rename: Annotated[option.Repeatable[tuple[str, ...]], Option(metavar="OLD=NEW")] = ()
    """Rename a tensor, or all whose names begin with OLD and a dot; may be repeated."""
    training: bool = False
    """Also convert optimizer state and data position, between a run and a PyTorch checkpoint."""
    dry_run: Annotated[bool, Option(group="input and output")] = False
    """Print what would be done with every tensor, and write nothing."""
    force: bool = False
    """Replace the destination: a file, or a folder that holds only weights."""
    shard_size: Annotated[str | None, Option(metavar="SIZE")] = None
    """Most bytes of weights in one file, for example 200MB, with --to hf (default: 5GB)."""
    scan_layers: bool = False
    """Write all layers of a stack into one array, with --to t5x."""
    param_scan_axis: int | None = None
    """The axis of the layers in such arrays of T5X (default: 1, or what a source's shapes show)."""
    quantization: option.Dtype | None = None
    """Numbers of a CTranslate2 folder: float32, float16 or int8 (default: float32)."""
    check: bool = True
    """Compare the result with the PyTorch twin in float64 (or round-trip it) before it is kept."""
    json: bool = False
    """Print one JSON object instead of lines."""


def run(options: ConvertOptions) -> int:
    """Convert, print the outcome, and return the exit code."""
    from jax_transformer.architectures.tensor_names import NameChanges
    from jax_transformer.convert.conversion import convert
    from jax_transformer.convert.models import ModelDescription
    from jax_transformer.convert.planning import Request, prepare

    process.keep_freed_memory(False)
    description = ModelDescription(
        options.config, options.preset, arguments.assignments("--set", options.set)
    )
    renamed = arguments.assignments("--rename", options.rename, text=True)
    names = NameChanges(options.strip_prefix, ignore=options.ignore, rename=renamed)
    shared = {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(Request)
        if field.name not in ("description", "names", "architecture")  # it is registered by now
    }
    request = Request(description=description, names=names, **shared)
    if options.training:
        if options.dry_run:
            raise ConfigError("--dry-run and --training exclude each other: it only plans weights")
        from jax_transformer.convert.training_state import training_states

        report: arguments.Printable = training_states.convert(request)
    else:
        report = prepared = prepare(request)
        if options.dry_run:
            prepared.refuse()
        else:
            report = convert(prepared)
    arguments.show(report, as_json=options.json)
    return 0


COMMAND = Command(
    ConvertOptions,
    run,
    examples=(
        "convert opus-mt-en-de runs/opus",
        "convert model.pt model.safetensors --preset lesson10 --set num_heads=4",
    ),
    synonyms="export import",
)
