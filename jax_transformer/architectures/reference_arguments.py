"""Checks for the arguments of PyTorch twins: they are derived from the configuration, so the two
cannot drift.

Each raises ConfigError that names every field to which the twin cannot be set.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from jax_transformer.architectures.base import Preset
from jax_transformer.config import TransformerConfig
from jax_transformer.errors import ConfigError

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
    return [
        config.source_vocab_size,
        config.target_vocab_size,
        config.source_pad_id,
        config.target_pad_id,
    ]


def is_repaired(config: TransformerConfig, faithful: Preset, repaired: Preset, *free: str) -> bool:
    """Tell if ``config`` is the repaired preset at other sizes, and not the faithful one.

    Raises ConfigError that names the fields in which it differs from the nearer preset, unless they
    are among ``free`` or those that every twin takes.
    """
    problems = _differences(config, faithful, *free)
    if not problems:
        return False
    repaired_problems = _differences(config, repaired, *free)
    if repaired_problems:
        raise ConfigError(min("; ".join(problems), "; ".join(repaired_problems), key=len))
    return True


def one_rate(config: TransformerConfig, *names: str) -> float:
    """Return the one dropout rate; raise ConfigError if a rate of ``names`` differs from
    ``dropout``.
    """
    for name in names:
        if getattr(config, name) != config.dropout:
            raise ConfigError(
                f"{name}={getattr(config, name)}: {twin_of(config)} has one rate,"
                f" dropout={config.dropout}"
            )
    return config.dropout


def one_depth(config: TransformerConfig) -> int:
    """Return the number of layers of both stacks; raise ConfigError if they differ."""
    layers = config.encoder.layers, config.decoder.layers
    if layers[0] != layers[1]:
        raise ConfigError(
            f"encoder.layers={layers[0]} and decoder.layers={layers[1]}: {twin_of(config)} has one"
            " depth"
        )
    return layers[0]


def _differences(config: TransformerConfig, preset: Preset, *free: str) -> list[str]:
    same_sizes = preset.with_sizes(
        d_model=config.d_model, num_heads=config.num_heads, dropout=config.dropout
    )
    ours, theirs = dict(_leaves(config)), dict(_leaves(same_sizes))
    return [
        f"{name}={ours[name]}: {twin_of(config)} has only {theirs[name]}"
        for name in ours
        if name not in _TAKEN_BY_ALL | set(free) and ours[name] != theirs[name]
    ]


def _leaves(config: TransformerConfig) -> Iterator[tuple[str, Any]]:
    """Every field by dotted name; a field of None that stands for a number of the model has that
    number.
    """
    for name, value in vars(config).items():
        if name not in ("encoder", "decoder"):
            yield name, value
    yield "head_dim", config.head_width
    for stack_name, stack in (("encoder", config.encoder), ("decoder", config.decoder)):
        for name, value in vars(stack).items():
            if name != "branches":
                yield f"{stack_name}.{name}", value
        yield (
            f"{stack_name}.branches",
            tuple(
                replace(
                    branch, dropout=config.dropout if branch.dropout is None else branch.dropout
                )
                for branch in stack.branches
            ),
        )
