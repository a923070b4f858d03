"""The description of one architecture, and what the descriptions of this folder share.

An architecture has a source, presets, names of weights, and a twin: the PyTorch module that
computes what the Flax model of the same configuration computes. Shared are the blocks of Vaswani et
al. 2017, and the checks of a twin's arguments. Nothing here imports torch: a twin is named by a
string, or returned by a function that imports it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any

from jax_transformer.config import Branch, Mask, Part, StackConfig, TransformerConfig
from jax_transformer.errors import ConfigError
from jax_transformer.weights.rules import Alias, Rule, Table, linear

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a twin's class."""


@dataclass(frozen=True)
class Preset:
    """A named configuration and where it is published."""

    config: TransformerConfig
    source: str
    multiples: Mapping[str, int] = field(default_factory=dict)
    """Sizes that the source gives as a multiple of ``d_model``, such as ``{"d_ff": 4}``."""
    last_ids: tuple[str, ...] = ()
    """Special ids that are the last of their vocabulary, whatever its size: ``target_pad_id``."""

    def with_sizes(self, **sizes: Any) -> TransformerConfig:
        """Return the configuration with fields changed as by ``TransformerConfig.with_sizes``.

        A size that is not given keeps the number of the source, or its multiple of ``d_model``; a
        special id, the number of the source or the last of its vocabulary.
        """
        d_model = sizes.get("d_model", self.config.d_model)
        derived: dict[str, Any] = {}
        if isinstance(d_model, Integral):
            derived = {name: multiple * d_model for name, multiple in self.multiples.items()}
        for name in self.last_ids:
            vocabulary = "source_vocab_size" if name.startswith("source") else "target_vocab_size"
            size = sizes.get(vocabulary, sizes.get("vocab_size"))
            if isinstance(size, Integral):
                derived[name] = size - 1
        return self.config.with_sizes(**(derived | sizes))


@dataclass(frozen=True, eq=False)
class Architecture:
    """Everything that is known of one architecture."""

    name: str
    """The value of ``TransformerConfig.architecture``."""
    source: str
    """Author, title and date of the publication, or a sentence if there is none."""
    weight_table: Callable[[TransformerConfig], Table]
    """Returns the rules that join the PyTorch state_dict of a configuration to the Flax arrays."""
    presets: Mapping[str, Preset] = field(default_factory=dict)
    reference: str | Callable[[], type] | None = None
    """The twin's class as ``"package.module:Class"``, or a function that imports and returns it."""
    reference_arguments: Callable[[TransformerConfig], Arguments] | None = None
    """Returns the arguments that give the twin a configuration.

    Raises ConfigError that names every field which the twin cannot be set to.
    """

    def usual_length(self, config: TransformerConfig) -> int:
        """Return the default longest source and target, in tokens: as far as positions reach."""
        return config.longest


# The encoder and decoder of Vaswani et al. 2017, which most architectures share

ENCODER_BLOCK = (Branch((Part.SELF,)), Branch((Part.FFN,)))
DECODER_BLOCK = (Branch((Part.SELF,)), Branch((Part.CROSS,)), Branch((Part.FFN,)))


def encoder(layers: int, **fields: Any) -> StackConfig:
    """Return the paper's encoder, with other fields of ``StackConfig`` as given."""
    return StackConfig(layers, ENCODER_BLOCK, self_mask=(Mask.SOURCE_PADDING,), **fields)


def decoder(
    layers: int,
    cross_mask: tuple[Mask, ...] = (Mask.SOURCE_PADDING,),
    self_mask: tuple[Mask, ...] = (Mask.TARGET_PADDING, Mask.CAUSAL),
    **fields: Any,
) -> StackConfig:
    """Return the paper's decoder, with other fields of ``StackConfig`` as given."""
    return StackConfig(layers, DECODER_BLOCK, self_mask=self_mask, cross_mask=cross_mask, **fields)


def output(torch: str, tied: str, config: TransformerConfig, *, bias: bool) -> Table:
    """Return the rules of an output layer; its weight may be that of the tensor ``tied``."""
    if not config.tying.tied_output:
        return linear(torch, "output", bias=bias)
    own: Table = [Rule(f"{torch}.bias", "output_bias")] if bias else []
    return [Alias(f"{torch}.weight", tied), *own]


# The arguments of a twin are derived from the configuration, so that the two cannot drift. Each of
# these checks raises ConfigError that names every field to which the twin cannot be set.

# The fields that the twin of every document takes
_TAKEN_BY_ALL = frozenset(
    """source_vocab_size target_vocab_size source_pad_id target_pad_id bos_id eos_id d_model
    num_heads max_length encoder.layers decoder.layers dropout dropout_masks compute_dtype
    architecture""".split()
)


def twin_of(config: TransformerConfig) -> str:
    """Return ``the PyTorch twin of architecture 'lesson10'``, for messages."""
    return f"the PyTorch twin of architecture {config.architecture!r}"


def vocabularies(config: TransformerConfig) -> list[int]:
    """List both vocabularies' sizes and both padding ids."""
    sizes = [config.source_vocab_size, config.target_vocab_size]
    return [*sizes, config.source_pad_id, config.target_pad_id]


def is_repaired(config: TransformerConfig, faithful: Preset, repaired: Preset, *free: str) -> bool:
    """Tell if ``config`` is the repaired preset at other sizes, and not the faithful one.

    Raises ConfigError that names the fields in which it differs from the nearer preset, unless they
    are among ``free`` or those that every twin takes.
    """
    wrong = ["; ".join(_differences(config, preset, *free)) for preset in (faithful, repaired)]
    if all(wrong):
        raise ConfigError(min(wrong, key=len))
    return bool(wrong[0])


def check_fields(config: TransformerConfig, preset: Preset, *free: str) -> None:
    """Raise ConfigError that names the fields in which ``config`` differs from the preset, unless
    they are among ``free`` or those that every twin takes."""
    if wrong := _differences(config, preset, *free):
        raise ConfigError("; ".join(wrong))


def one_rate(config: TransformerConfig, *names: str) -> float:
    """Return the dropout rate; raise ConfigError if one of ``names`` differs from ``dropout``."""
    for name in names:
        if (rate := getattr(config, name)) != config.dropout:
            one = f"{twin_of(config)} has one rate, dropout={config.dropout}"
            raise ConfigError(f"{name}={rate}: {one}")
    return config.dropout


def one_depth(config: TransformerConfig) -> int:
    """Return the number of layers of both stacks; raise ConfigError if they differ."""
    ours, theirs = config.encoder.layers, config.decoder.layers
    if ours != theirs:
        both = f"encoder.layers={ours} and decoder.layers={theirs}"
        raise ConfigError(f"{both}: {twin_of(config)} has one depth")
    return ours


def _differences(config: TransformerConfig, preset: Preset, *free: str) -> list[str]:
    same_sizes = preset.with_sizes(
        d_model=config.d_model, num_heads=config.num_heads, dropout=config.dropout
    )
    ours, theirs = _leaves(config), _leaves(same_sizes)
    return [
        f"{name}={ours[name]}: {twin_of(config)} has only {theirs[name]}"
        for name in ours
        if name not in _TAKEN_BY_ALL | set(free) and ours[name] != theirs[name]
    ]


def _leaves(config: TransformerConfig) -> dict[str, Any]:
    """Return every field by dotted name; where None stands for a model's number, that number."""
    leaves = vars(config) | {"head_dim": config.head_width}
    for stack_name in ("encoder", "decoder"):
        stack: StackConfig = leaves.pop(stack_name)
        leaves |= {f"{stack_name}.{name}": value for name, value in vars(stack).items()}
        leaves[f"{stack_name}.branches"] = tuple(
            replace(branch, dropout=config.dropout) if branch.dropout is None else branch
            for branch in stack.branches
        )
    return leaves
