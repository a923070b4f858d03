"""What all ways of decoding are told alike, and what they refuse alike."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jax_transformer.errors import ConfigError
from jax_transformer.generate.generation_config import Constraints
from jax_transformer.shapes import AnyArray, SourceIds
from jax_transformer.transformer import Transformer

NONE = Constraints()


class Ids(NamedTuple):
    """The tokens that a loop knows by their ids."""

    bos: int
    eos: int
    pad: int


class Frame(NamedTuple):
    """What every loop is compiled for."""

    places: int
    ids: Ids
    rules: Constraints


class Given(NamedTuple):
    """What every loop is given."""

    source: Int[Array, "b s"]
    first: Int[Array, " b"] | None
    """The token that each row begins with; None leaves it to the model."""


def prepare(
    model: Transformer,
    source: SourceIds,
    max_length: int | None,
    bos_id: int | None,
    eos_id: int | None,
    constraints: Constraints,
    forced_bos_token_id: int | Int[AnyArray, " b"] | None,
) -> tuple[Given, Frame]:
    """Checked. Raises InputError for a source that the model cannot read, and ConfigError for all else that it cannot do."""
    checked = model.check_source(source)
    vocabulary = model.config.target_vocab_size
    frame = Frame(
        places(model, checked, max_length),
        ids(model, bos_id, eos_id),
        _within(constraints, vocabulary),
    )
    return Given(checked, _first(forced_bos_token_id, len(checked), vocabulary)), frame


def ids(model: Transformer, bos_id: int | None, eos_id: int | None) -> Ids:
    """The given start and end tokens, the config's where None. Raises ConfigError for one outside the vocabulary."""
    config = model.config
    found = Ids(
        config.bos_id if bos_id is None else bos_id,
        config.eos_id if eos_id is None else eos_id,
        config.target_pad_id,
    )
    for name, value in (("bos_id", found.bos), ("eos_id", found.eos)):
        if not 0 <= value < config.target_vocab_size:
            raise ConfigError(
                f"{name}={value} is outside the vocabulary of {config.target_vocab_size}"
            )
    return found


def places(model: Transformer, source: Int[Array, "b s"], max_length: int | None) -> int:
    """How many tokens there is room for: the model's own maximum where ``max_length`` is None, and never more than the source has where the
    two must be equally long. Raises ConfigError for more than the model can, or none."""
    longest = model.config.longest
    count = longest if max_length is None else max_length
    if not 1 <= count <= longest:
        raise ConfigError(f"max_length={count} must be between 1 and the model's {longest}")
    return min(count, source.shape[1]) if model.config.equal_lengths else count


def _within(constraints: Constraints, vocabulary: int) -> Constraints:
    """The rules. Raises ConfigError for a token outside the vocabulary, which would be no rule at all."""
    for name, tokens in constraints.tokens.items():
        for token in tokens:
            if not 0 <= token < vocabulary:
                raise ConfigError(
                    f"{name} has {token}, which is outside the vocabulary of {vocabulary}"
                )
    return constraints


def _first(
    first: int | Int[AnyArray, " b"] | None, rows: int, vocabulary: int
) -> Int[Array, " b"] | None:
    """The token that each row begins with as an array, so that another language compiles nothing."""
    if first is None:
        return None
    if not isinstance(first, jax.core.Tracer):
        for token in np.unique(np.asarray(first)):
            if not 0 <= token < vocabulary:
                raise ConfigError(
                    f"forced_bos_token_id={token} is outside the vocabulary of {vocabulary}"
                )
    return jnp.broadcast_to(jnp.asarray(first, jnp.int32), rows)
