"""The models of weights in files: described by the user, read from shapes, loaded and saved."""

import operator
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from jax_transformer.architectures import registry, tensor_names
from jax_transformer.architectures.base import Architecture, Preset
from jax_transformer.architectures.registry import ModelWeights
from jax_transformer.architectures.tensor_names import NameChanges
from jax_transformer.config import TransformerConfig, Tying
from jax_transformer.errors import ConfigError, InputError
from jax_transformer.formats import registry as formats
from jax_transformer.formats.base import Destination, Pretrained, Settled
from jax_transformer.storage import tensors, untrusted
from jax_transformer.storage.tensors import LazyState
from jax_transformer.weights import rules
from jax_transformer.weights.rules import Alias, Shape, Table

Shapes = Mapping[str, Shape]
# Each size has its own prime factor, so that the length of an axis identifies its size
_PROBE = {"source_vocab_size": 10007, "target_vocab_size": 20011, "d_model": 2 * 1009}
_PROBE |= {"d_ff": 4001, "max_length": 6007, "head_dim": 3001}
_PROBE_OF_SOUND = {"mel_bins": 5003, "mel_frames": 2 * 8009}
# Fields that a shorthand sets
_SHORTHANDS = {
    "vocab_size": ("source_vocab_size", "target_vocab_size"),
    "num_layers": ("encoder.layers", "decoder.layers"),
    "encoder_layers": ("encoder.layers",),
    "decoder_layers": ("decoder.layers",),
}
_SIZES = {*_PROBE, *_PROBE_OF_SOUND, *_SHORTHANDS, "num_heads", "encoder.layers", "decoder.layers"}


# Loading and saving


def load(
    path: str | Path,
    config: TransformerConfig | None = None,
    *,
    preset: str | None = None,
    dtype: str | None = None,
    weights: str = "auto",
    key: str | None = None,
    strip_prefix: str = "",
    ignore: Sequence[str] = (),
    rename: Mapping[str, str] | None = None,
    architecture: Architecture | str | None = None,
    scan_axis: int | None = None,
    **sizes: Any,
) -> Any:
    """Load the ``Transformer`` at ``path``.

    Every file or folder that :func:`jax_transformer.formats.registry.open` opens can be loaded.

    Args:
        path: a file or folder; its content shows its kind, and no code in it is run.
        config: the configuration of a bare file of weights, unless ``preset`` names one.
        preset: the name of a preset. Its sizes are read from the shapes, or set by ``sizes`` as in
            :func:`jax_transformer.preset`. A run folder needs neither.
        dtype: dtype to which every array is cast; None keeps their own.
        weights: the checkpoint of a run folder, as for ``translate --weights``.
        key: the key of the state_dict in a PyTorch file, e.g. ``model``; needed only if there are
            several.
        strip_prefix: prefix to remove from every name, e.g. ``module.``. By default a prefix that
            stands before most of the model's names is removed.
        ignore: patterns of names to leave out, e.g. ``criterion.*``; see
            :class:`jax_transformer.architectures.tensor_names.NameChanges`.
        rename: new names by old ones, or by the words before a dot of old ones.
        architecture: the architecture whose names the PyTorch weights have, or its registered
            name; that of the configuration if None.
        scan_axis: T5X's ``param_scan_axis``, if the shapes of a checkpoint fit several.

    Raises:
        ConfigError: neither a configuration nor a preset describes the model, or both do.
        InputError: names are missing or unexpected, shapes are wrong, or tied tensors differ, all
            in one message; or the weights are float64 in JAX's 32-bit mode.
        UnsafeFileError: the file tries to run code, or declares more data than it has.
    """
    tensors.check_dtype(dtype)
    changes = NameChanges(strip_prefix, ignore=tuple(ignore), rename=rename or {})
    source = formats.open(path, weights, key=key, scan_axis=scan_axis)
    if source.config_gives_way and (config is not None or preset is not None):
        source = replace(source, config=None)
    if source.config is not None and (config is not None or preset is not None or sizes):
        raise ConfigError(
            f"{path} has its own config.json: config, preset and sizes are for bare files of "
            "weights"
        )
    if source.config is None and (config is None) == (preset is None):
        raise ConfigError(f"{path} does not tell its architecture: give either config or preset")
    if config is not None and sizes:
        raise ConfigError(f"{', '.join(sizes)}: sizes go with a preset; a config has its own")
    description = ModelDescription(None, preset, sizes)
    names: set[str] = set()
    if source.format.is_file and source.config is None:
        named = description.named_config(source, architecture) if config is None else config
        source, _, names = with_model_names(source, changes, named, architecture)
    else:
        source = source.with_names(changes)
    if config is None and preset is not None:
        config = description.settle(source, architecture).config
    try:
        return source.model(config, dtype=dtype, architecture=architecture)
    except InputError as error:
        raise tensor_names.explained(error, source.tensors, names) from None


def save(
    model: Any,
    path: str | Path,
    *,
    force: bool = False,
    architecture: Architecture | str | None = None,
) -> Path:
    """Save a ``Transformer`` and return its path.

    The name of ``path`` decides: a .safetensors or PyTorch file with PyTorch's names, or a new run
    folder. Equal weights give equal files. ``path`` appears after it was read back and compared, or
    stays as it was. Raises InputError if it exists and ``force`` is not set.
    """
    from jax_transformer import transformer

    format = formats.to_write(Path(path))
    names = registry.model_weights(model.config, architecture)
    to = Destination(format, Path(path), config=model.config, frozen=names.frozen)
    formats.check_free(format, to.path, force=force)
    leaves = {name: np.asarray(leaf) for name, leaf in transformer.flatten(model).items()}
    to_torch = format.has_torch_names
    state = renamed(tensors.in_memory(leaves), names, from_torch=False, to_torch=to_torch)
    format.write(to, state, lambda read_back: None)
    return to.path


def renamed(
    state: LazyState, model: ModelWeights | None, *, from_torch: bool, to_torch: bool
) -> LazyState:
    """Rename the weights for the destination; tensors that the model ties become one."""
    if model is None:
        return state
    if from_torch and not to_torch:
        return rules.to_flax_lazily(model.table, state, model.shapes["flax"])
    if not from_torch and to_torch:
        return rules.to_torch_lazily(model.table, state)
    if to_torch:
        state = {rule.torch: state[rule.torch] for rule in model.table}
        for first, *others in ties_of(model.table):
            state |= dict.fromkeys(others, state[first])
    return state


def ties_of(table: Table) -> list[tuple[str, ...]]:
    """Group the PyTorch names that are one tensor in the model's module."""
    groups: dict[str, list[str]] = {}
    for rule in table:
        if isinstance(rule, Alias):
            groups.setdefault(rule.of, [rule.of]).append(rule.torch)
    return list(map(tuple, groups.values()))


# Descriptions


@dataclass(frozen=True)
class ModelDescription:
    """A configuration file, or a preset with sizes that no shape shows."""

    config: str | None = None
    """Path of a config.json, of this package or of transformers."""
    preset: str | None = None
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
            names = "torch" if has_torch_names else "flax"
            shapes = {name: tensor.shape for name, tensor in source.tensors.items()}
            return infer(
                registry.find_preset(self.preset, architecture),
                self.changes,
                shapes,
                lambda config: registry.model_weights(config, architecture).shapes[names],
            )
        config = read_config(Path(self.config or ""), source.tensors)
        return Settled(config.with_sizes(**self.changes), {}, {})

    def named_config(
        self, source: Pretrained, architecture: Architecture | str | None
    ) -> TransformerConfig:
        """Return a configuration with the model's names: a preset's of one layer, or its own."""
        if self.preset is not None:
            return registry.find_preset(self.preset, architecture).with_sizes(num_layers=1)
        return self.settle(source, architecture).config


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


def with_model_names(
    source: Pretrained,
    changes: NameChanges,
    config: TransformerConfig,
    architecture: Architecture | str | None,
) -> tuple[Pretrained, str, set[str]]:
    """Return a file's tensors under the names of ``config``'s model in PyTorch, the prefix that was
    removed because no name was one of these, and these names.
    """
    table = registry.unchecked_table(architecture or config.architecture, config)
    names, prefix = set(map(operator.attrgetter("torch"), table)), ""
    if not changes.strip_prefix and names.isdisjoint(source.tensors):
        prefix = tensor_names.common_prefix(source.tensors, names)
        if prefix:
            changes = replace(changes, strip_prefix=prefix, prefix_required=False)
    return source.with_names(changes), prefix, names


# Sizes


def infer(
    preset: Preset,
    settings: Mapping[str, Any],
    shapes: Shapes,
    shapes_of: Callable[[TransformerConfig], Shapes],
) -> Settled:
    """Return the preset at the sizes that ``shapes``, those of a file's tensors by name, show.

    ``settings`` are fields that the user sets, which are not inferred; ``shapes_of`` returns the
    shapes of the weights of a configuration. Raises ConfigError if no model can have these sizes.
    """
    structure = {name: value for name, value in settings.items() if name not in _SIZES}
    probe_sizes = dict[str, Any](_PROBE, num_heads=1, num_layers=1)
    if preset.with_sizes(**structure).tying is Tying.ALL:
        probe_sizes["source_vocab_size"] = _PROBE["target_vocab_size"]
    if preset.config.mel_bins is not None:
        probe_sizes |= _PROBE_OF_SOUND
    probe = preset.with_sizes(**structure, **probe_sizes)
    known: dict[str, Any] = {}
    for name, value in settings.items():
        known |= dict.fromkeys(_SHORTHANDS.get(name, (name,)), value)
    sizes: dict[str, int] = {}
    for stack in ("encoder", "decoder"):
        if f"{stack}.layers" not in known:
            one, two = shapes_of(probe), shapes_of(probe.with_sizes(**{f"{stack}.layers": 2}))
            if count := _count_layers(one, two, shapes):
                sizes[f"{stack}.layers"] = count
    shown = _shown_sizes(shapes_of(probe), shapes, probe)
    all_heads = shown.pop("head_dim", None)
    if "mel_frames" in shown:
        shown["mel_frames"] *= 2  # the table of positions has a row for two frames
    one_vocabulary = probe.tying is Tying.ALL or probe.mel_bins is not None
    if one_vocabulary and "target_vocab_size" in shown:
        shown["source_vocab_size"] = shown["target_vocab_size"]
    sizes |= {name: size for name, size in shown.items() if name not in known}
    if all_heads is not None:
        sizes |= _heads(preset, known, sizes, all_heads)
    try:
        config = preset.with_sizes(**{**sizes, **settings})
    except ConfigError as error:
        text = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise ConfigError(
            f"{error} (sizes from the shapes: {text or 'none'}; set others with --set name=value)"
        ) from None
    from_preset = {
        name: getattr(config, name)
        for name in ("num_heads", "max_length")
        if name not in sizes and name not in known
    }
    return Settled(config, sizes, from_preset)


def _count_layers(one: Shapes, two: Shapes, shapes: Shapes) -> int:
    """Return the number of a stack's layers, from the names that its second layer adds."""
    numbers: Counter[int] = Counter()
    for name in two.keys() - one.keys():
        words = name.split(".")
        for i in (i for i, word in enumerate(words) if word == "1"):
            count = 0
            while ".".join([*words[:i], str(count), *words[i + 1 :]]) in shapes:
                count += 1
            if ".".join([*words[:i], "0", *words[i + 1 :]]) in one:
                numbers[count] += 1
    return max(numbers, default=0)


def _shown_sizes(probed: Shapes, shapes: Shapes, probe: TransformerConfig) -> dict[str, int]:
    """Return each size: the length that most of its axes have."""
    values = {getattr(probe, name): name for name in (*_PROBE, "mel_bins")}
    if probe.mel_frames is not None:
        values[probe.rows(probe.encoder)] = "mel_frames"
    votes: dict[str, Counter[int]] = {name: Counter() for name in values.values()}
    for name, shape in probed.items():
        if len(shapes.get(name, ())) != len(shape):
            continue
        for probed_length, length in zip(shape, shapes[name], strict=True):
            if probed_length in values:
                votes[values[probed_length]][length] += 1
    return {name: counter.most_common(1)[0][0] for name, counter in votes.items() if counter}


def _heads(
    preset: Preset, known: Mapping[str, Any], sizes: Mapping[str, int], all_heads: int
) -> dict[str, int]:
    """Return the number of heads if the head width is known; otherwise an unusual head width."""
    d_model = known.get("d_model", sizes.get("d_model"))
    multiple = preset.multiples.get("head_dim")
    width = known.get("head_dim") or (
        multiple * d_model if multiple and d_model else preset.config.head_dim
    )
    if width and "num_heads" not in known and isinstance(width, int) and all_heads % width == 0:
        return {"num_heads": all_heads // width}
    heads = known.get("num_heads", preset.config.num_heads)
    if width or not isinstance(heads, int) or heads <= 0 or all_heads == d_model:
        return {}
    return {} if all_heads % heads else {"head_dim": all_heads // heads}
