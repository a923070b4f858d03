"""The exported programs of a model: encode, decode_step, greedy and beam, by ``jax.export``.

Weights are arguments. The batch b and the length s of the sources are symbolic: one program serves
all. The number of new tokens is a constant, because no argument has it as a dimension.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from jax_transformer import transformer
from jax_transformer.config import TransformerConfig
from jax_transformer.errors import ConfigError
from jax_transformer.generate import beam_search, decoding, prepare
from jax_transformer.generate.generation_config import GenerationConfig
from jax_transformer.nn.attention import Cache, Prefix

PLATFORMS = ("cpu", "cuda", "tpu")
_BEAMS = 4
"""Beams of the program ``beam``, if the folder's own settings have none."""
Weights = Mapping[str, jax.Array]


@dataclass(frozen=True)
class Settings:
    """Constants of the programs."""

    generation: GenerationConfig
    max_new_tokens: int
    num_beams: int

    @property
    def search(self) -> dict[str, Any]:
        """Arguments of a search."""
        generation = self.generation
        return {
            "max_length": self.max_new_tokens,
            "bos_id": generation.decoder_start_token_id,
            "eos_id": generation.eos_token_id,
            "constraints": generation.constraints,
            "forced_bos_token_id": generation.forced_bos_token_id,
        }

    @classmethod
    def of(cls, config: TransformerConfig, generation: GenerationConfig) -> "Settings":
        """Return the settings of a folder. Raises ConfigError if they have no program."""
        if config.equal_lengths:
            raise ConfigError(
                "--to stablehlo: decoder.branches has the residual 'memory', so a translation is "
                "as long as its source, and no program serves all lengths"
            )
        if generation.do_sample:
            raise ConfigError("--to stablehlo: do_sample=True, and there is no program that draws")
        length = config.longest if generation.max_new_tokens is None else generation.max_new_tokens
        beams = generation.num_beams if generation.num_beams > 1 else _BEAMS
        return cls(generation, length, beams)


def export(
    config: TransformerConfig, dtypes: Mapping[str, Any], settings: Settings
) -> dict[str, jax.export.Exported]:
    """Return the programs by name, lowered for all of :data:`PLATFORMS`.

    Args:
        config: the model's configuration.
        dtypes: dtype of each array, by the paths of ``transformer.flatten``.
        settings: their constants.
    """
    config = config.portable
    shapes = transformer.shapes(config)
    weights = {
        name: jax.ShapeDtypeStruct(shape, dtypes[name]) for name, shape in sorted(shapes.items())
    }
    batch, length = jax.export.symbolic_shape("b, s", constraints=[f"s <= {config.longest}"])
    source = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    tokens = jax.ShapeDtypeStruct((batch, 1), jnp.int32)
    functions = functions_of(config, settings)
    cache = jax.eval_shape(functions["encode"], weights, source)
    arguments: dict[str, tuple[Any, ...]] = {
        "encode": (source,),
        "decode_step": (tokens, cache),
        "greedy": (source,),
        "beam": (source,),
    }
    try:
        return {
            name: jax.export.export(jax.jit(function), platforms=PLATFORMS)(
                weights, *arguments[name]
            )
            for name, function in functions.items()
        }
    except jax.core.InconclusiveDimensionOperation as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"--to stablehlo: not for every batch and length: {reason}") from None


def functions_of(config: TransformerConfig, settings: Settings) -> dict[str, Callable[..., Any]]:
    """Return the functions that are exported. Only dictionaries, lists and arrays go in and out."""

    def encode(weights: Weights, source: jax.Array) -> list[jax.Array]:
        """Return the arrays of the decoder's cache, which :func:`decode_step` takes."""
        model = transformer.unflatten(config, weights)
        return jax.tree.leaves(model.init_cache(source, settings.max_new_tokens))

    def decode_step(
        weights: Weights, tokens: jax.Array, cache: list[jax.Array]
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Return the logits (b, 1, v) after these tokens (b, 1), and the cache with them."""
        model = transformer.unflatten(config, weights)
        logits, after = model.decode_step(tokens, _cache(config, cache))
        return logits, jax.tree.leaves(after)

    def greedy(weights: Weights, source: jax.Array) -> jax.Array:
        """Return ids (b, n), padded after the end token."""
        return decoding.greedy(_split(config, weights), source, **settings.search)

    def beam(weights: Weights, source: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the best hypotheses (b, n) and their scores (b)."""
        return beam_search.beam(
            _split(config, weights),
            source,
            beam_size=settings.num_beams,
            length_penalty=settings.generation.length_penalty,
            scorer=settings.generation.beam_scorer,
            early_stopping=settings.generation.early_stopping,
            **settings.search,
        )

    return {"encode": encode, "decode_step": decode_step, "greedy": greedy, "beam": beam}


def _split(config: TransformerConfig, weights: Weights) -> prepare.SplitModel:
    return prepare.split(transformer.unflatten(config, weights))


def _cache(config: TransformerConfig, arrays: list[jax.Array]) -> Cache | Prefix:
    """Return the cache of these arrays, see ``nn/attention.py``."""
    small = np.zeros((1, 1), np.int32)
    like = jax.eval_shape(lambda model: model.init_cache(small, 1), transformer.abstract(config))
    return jax.tree.unflatten(jax.tree.structure(like), arrays)
