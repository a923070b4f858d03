"""Ensembles: several models that decode as one, by the mean of their probabilities."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jax_transformer.config import TransformerConfig
from jax_transformer.errors import ConfigError
from jax_transformer.nn.attention import Cache, Prefix
from jax_transformer.shapes import Logits, SourceIds, TargetIds
from jax_transformer.transformer import Transformer

_SHARED = """source_vocab_size target_vocab_size source_pad_id target_pad_id bos_id eos_id
    equal_lengths""".split()


class EnsembleCache(NamedTuple):
    """The cache of each model."""

    caches: tuple[Cache | Prefix, ...]

    def follow(self, parents: Int[Array, "b k"]) -> "EnsembleCache":
        """Return the caches in which beam j continues the hypothesis of beam ``parents[j]``."""
        return EnsembleCache(tuple(cache.follow(parents) for cache in self.caches))


class Ensemble(NamedTuple):
    """Models that decode together; it has the methods of a Transformer that a loop calls."""

    models: tuple[Transformer, ...]

    def __call__(self, source: SourceIds, target: TargetIds) -> Logits:
        """Return log-probabilities (b, t, v) of the token after each target position."""
        logits = [model(source, target) for model in self.models]
        return mean_log_probs([each for each in logits if isinstance(each, jax.Array)])

    def init_cache(self, source: SourceIds, length: int, beams: int = 1) -> EnsembleCache:
        """Encode ``source`` with each model, see :meth:`Transformer.init_cache`."""
        caches = (model.init_cache(source, length, beams) for model in self.models)
        return EnsembleCache(tuple(caches))

    def decode_step(
        self, tokens: Int[Array, "b k"], cache: EnsembleCache
    ) -> tuple[Float[Array, "b k v"], EnsembleCache]:
        """Return log-probabilities after each beam's last token, and the caches with these."""
        pairs = zip(self.models, cache.caches, strict=True)
        logits, caches = zip(*(model.decode_step(tokens, own) for model, own in pairs), strict=True)
        return mean_log_probs(logits), EnsembleCache(caches)


AnyModel = Transformer | Ensemble


def mean_log_probs(logits: Sequence[Float[Array, "*b v"]]) -> Float[Array, "*b v"]:
    """Return the logarithm of the mean of the models' probabilities, in float32 at least."""
    dtype = np.result_type(np.float32, *(each.dtype for each in logits))
    log_probs = jnp.stack([jax.nn.log_softmax(each.astype(dtype)) for each in logits])
    return jax.nn.logsumexp(log_probs, axis=0) - jnp.asarray(math.log(len(logits)), dtype)


def common_config(models: Sequence[Transformer]) -> TransformerConfig:
    """Return the configuration of the model that reads the shortest sequences.

    Raises ConfigError if the models do not share vocabulary sizes and special tokens.
    """
    configs = [model.config for model in models]
    for number, config in enumerate(configs, 1):
        for name in _SHARED:
            own, first = getattr(config, name), getattr(configs[0], name)
            if own != first:
                raise ConfigError(
                    f"model {number} of the ensemble has {name}={own}, and the first {first}; they"
                    " must be equal"
                )
    return min(configs, key=lambda config: config.longest)
