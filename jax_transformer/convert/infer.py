"""Infer the sizes of a model from the shapes of its weights, if a shape shows them."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from jax_transformer.architectures.base import Preset
from jax_transformer.config import TransformerConfig, Tying
from jax_transformer.errors import ConfigError
from jax_transformer.formats.base import Settled
from jax_transformer.weights.rules import Shape

Shapes = Mapping[str, Shape]
_VOCABULARIES = ("source_vocab_size", "target_vocab_size")
# Each size has its own prime factor, so that the length of an axis identifies its size
_PROBE = {
    "source_vocab_size": 10007,
    "target_vocab_size": 20011,
    "d_model": 2 * 1009,
    "d_ff": 4001,
    "max_length": 6007,
    "head_dim": 3001,
}
_PROBE_OF_SOUND = {"mel_bins": 5003, "mel_frames": 2 * 8009}
_HEADS = 1


def infer(
    preset: Preset,
    settings: Mapping[str, Any],
    shapes: Shapes,
    shapes_of: Callable[[TransformerConfig], Shapes],
) -> Settled:
    """Return the preset at the sizes that the shapes of its weights show.

    Args:
        preset: the model at some sizes.
        settings: fields that the user sets; they are not inferred.
        shapes: the shape of every tensor of the file, by name.
        shapes_of: returns the shapes of the weights of a configuration.

    Raises:
        ConfigError: no model can have these sizes.
    """
    structure = {name: value for name, value in settings.items() if name not in _SIZES}
    probe = preset.with_sizes(**(structure | _probe_sizes(preset, structure) | {"num_layers": 1}))
    known = _by_field(settings)
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


_SIZES = frozenset(
    [
        *_PROBE,
        *_PROBE_OF_SOUND,
        "num_heads",
        "num_layers",
        "encoder_layers",
        "decoder_layers",
        "encoder.layers",
        "decoder.layers",
        "vocab_size",
    ]
)


def _by_field(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Replace shorthands by the names of the fields that they set."""
    shorthands = {
        "vocab_size": _VOCABULARIES,
        "num_layers": ("encoder.layers", "decoder.layers"),
        "encoder_layers": ("encoder.layers",),
        "decoder_layers": ("decoder.layers",),
    }
    return {
        field: value for name, value in settings.items() for field in shorthands.get(name, (name,))
    }


def _probe_sizes(preset: Preset, structure: Mapping[str, Any]) -> dict[str, Any]:
    tied = preset.with_sizes(**structure).tying is Tying.ALL
    return (
        dict[str, Any](_PROBE)
        | {"num_heads": _HEADS}
        | ({"source_vocab_size": _PROBE["target_vocab_size"]} if tied else {})
        | ({} if preset.config.mel_bins is None else _PROBE_OF_SOUND)
    )


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
    if (
        not width
        and isinstance(heads, int)
        and heads > 0
        and all_heads != d_model
        and all_heads % heads == 0
    ):
        return {"head_dim": all_heads // heads}
    return {}
