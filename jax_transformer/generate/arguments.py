"""What all ways of decoding are told alike, and what they refuse alike."""

from typing import NamedTuple

from jaxtyping import Array, Int

from jax_transformer.errors import ConfigError
from jax_transformer.transformer import Transformer


class Ids(NamedTuple):
    """The tokens that a loop knows by their ids."""

    bos: int
    eos: int
    pad: int


def ids(model: Transformer, bos_id: int | None, eos_id: int | None) -> Ids:
    """The given start and end tokens, the config's where None. Raises ConfigError for one outside the vocabulary."""
    config = model.config
    found = Ids(config.bos_id if bos_id is None else bos_id, config.eos_id if eos_id is None else eos_id, config.target_pad_id)
    for name, value in (("bos_id", found.bos), ("eos_id", found.eos)):
        if not 0 <= value < config.target_vocab_size:
            raise ConfigError(f"{name}={value} is outside the vocabulary of {config.target_vocab_size}")
    return found


def places(model: Transformer, source: Int[Array, "b s"], max_length: int | None) -> int:
    """How many tokens there is room for: the model's own maximum where ``max_length`` is None, and never more than the source has where the
    two must be equally long. Raises ConfigError for more than the model can, or none."""
    longest = model.config.longest
    count = longest if max_length is None else max_length
    if not 1 <= count <= longest:
        raise ConfigError(f"max_length={count} must be between 1 and the model's {longest}")
    return min(count, source.shape[1]) if model.config.equal_lengths else count
