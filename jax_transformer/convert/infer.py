"""Sizes of a model from the shapes of its weights: only those that a shape shows, each with the tensor that showed it."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jax_transformer.architectures import presets
from jax_transformer.config import TransformerConfig, Tying
from jax_transformer.errors import ConfigError
from jax_transformer.weights.rules import Shape

Shapes = Mapping[str, Shape]
_VOCABULARIES = ("source_vocab_size", "target_vocab_size")
# A length that stands in a shape tells which size it is, since each of these is another prime
_PROBE = {
    "source_vocab_size": 10007,
    "target_vocab_size": 20011,
    "d_model": 2 * 1009,
    "d_ff": 4001,
    "max_length": 6007,
    "head_dim": 3001,
}
_HEADS = 1


@dataclass(frozen=True)
class Inferred:
    """A configuration that was found."""

    config: TransformerConfig
    sizes: dict[str, int]
    """What the shapes said."""
    kept: dict[str, Any]
    """What they do not say, and so is the preset's."""


def infer(
    preset: str,
    given: Mapping[str, Any],
    found: Shapes,
    shapes_of: Callable[[TransformerConfig], Shapes],
) -> Inferred:
    """The preset at the sizes of ``found``. What is ``given`` is not inferred; ``shapes_of`` tells what shapes the weights of a configuration have.

    Raises ConfigError where the sizes that were found are none that a model can have.
    """
    structure = {name: value for name, value in given.items() if name not in _SIZES}
    probe = presets.preset(
        preset, **(structure | _probe_sizes(preset, structure) | {"num_layers": 1})
    )
    known = _expanded(given)
    sizes: dict[str, int] = {}
    for stack in ("encoder", "decoder"):
        if f"{stack}.layers" not in known:
            one, two = shapes_of(probe), shapes_of(probe.with_sizes(**{f"{stack}.layers": 2}))
            if count := _layers(one, two, found):
                sizes[f"{stack}.layers"] = count
    seen = _seen(shapes_of(probe), found, probe)
    inner = seen.pop("head_dim", None)
    if probe.tying is Tying.ALL and "target_vocab_size" in seen:
        seen["source_vocab_size"] = seen["target_vocab_size"]
    sizes |= {name: size for name, size in seen.items() if name not in known}
    if inner is not None:
        sizes |= _heads(preset, known, sizes, inner)
    try:
        config = presets.preset(preset, **{**sizes, **given})
    except ConfigError as error:
        said = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise ConfigError(
            f"{error} (from the shapes: {said or 'nothing'}; --set name=value says what they do not)"
        ) from None
    kept = {
        name: getattr(config, name)
        for name in ("num_heads", "max_length")
        if name not in sizes and name not in known
    }
    return Inferred(config, sizes, kept)


_SIZES = frozenset(
    [
        *_PROBE,
        "num_heads",
        "num_layers",
        "encoder_layers",
        "decoder_layers",
        "encoder.layers",
        "decoder.layers",
        "vocab_size",
    ]
)


def _expanded(given: Mapping[str, Any]) -> dict[str, Any]:
    """What is given, under the names of the fields."""
    both = {"vocab_size": _VOCABULARIES, "num_layers": ("encoder.layers", "decoder.layers")}
    single = {"encoder_layers": ("encoder.layers",), "decoder_layers": ("decoder.layers",)}
    return {
        field: value
        for name, value in given.items()
        for field in (both | single).get(name, (name,))
    }


def _probe_sizes(preset: str, structure: Mapping[str, Any]) -> dict[str, Any]:
    tied = presets.preset(preset, **structure).tying is Tying.ALL
    return (
        dict[str, Any](_PROBE)
        | {"num_heads": _HEADS}
        | ({"source_vocab_size": _PROBE["target_vocab_size"]} if tied else {})
    )


def _layers(one: Shapes, two: Shapes, found: Shapes) -> int:
    """How many layers of a stack are there, from the names that its second one adds."""
    numbers: Counter[int] = Counter()
    for name in two.keys() - one.keys():
        words = name.split(".")
        for place in (place for place, word in enumerate(words) if word == "1"):
            count = 0
            while ".".join([*words[:place], str(count), *words[place + 1 :]]) in found:
                count += 1
            if ".".join([*words[:place], "0", *words[place + 1 :]]) in one:
                numbers[count] += 1
    return max(numbers, default=0)


def _seen(probed: Shapes, found: Shapes, probe: TransformerConfig) -> dict[str, int]:
    """Each size by the value that most lengths of that size have."""
    values = {getattr(probe, name): name for name in _PROBE}
    votes: dict[str, Counter[int]] = {name: Counter() for name in _PROBE}
    for name, shape in probed.items():
        if len(found.get(name, ())) != len(shape):
            continue
        for length, is_ in zip(shape, found[name], strict=True):
            if length in values:
                votes[values[length]][is_] += 1
    return {name: counter.most_common(1)[0][0] for name, counter in votes.items() if counter}


def _heads(
    preset: str, known: Mapping[str, Any], sizes: Mapping[str, int], inner: int
) -> dict[str, int]:
    """What the width of all heads together says: their number where the width of one is known, else that width where it is not the usual one."""
    d_model = known.get("d_model", sizes.get("d_model"))
    times = presets.PRESETS[preset].multiples.get("head_dim")
    width = known.get("head_dim") or (
        times * d_model if times and d_model else presets.PRESETS[preset].config.head_dim
    )
    if width and "num_heads" not in known and isinstance(width, int) and inner % width == 0:
        return {"num_heads": inner // width}
    heads = known.get("num_heads", presets.PRESETS[preset].config.num_heads)
    if (
        not width
        and isinstance(heads, int)
        and heads > 0
        and inner != d_model
        and inner % heads == 0
    ):
        return {"head_dim": inner // heads}
    return {}
