"""The exported programs of a model, encode, decode_step, greedy and beam, by ``jax.export``; and
their folder: a file for each, the weights, a manifest, and ``run.py``.

Weights are arguments. The batch b and the length s of the sources are symbolic: one program serves
all. The number of new tokens is a constant, because no argument has it as a dimension.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from jax_transformer import transformer
from jax_transformer.architectures.registry import usual_length
from jax_transformer.config import TransformerConfig
from jax_transformer.convert import conversion
from jax_transformer.errors import ConfigError, DifferentError
from jax_transformer.extras.deploy.stablehlo import run
from jax_transformer.generate import beam_search, decoding, prepare
from jax_transformer.generate.generation_config import GenerationConfig
from jax_transformer.storage import safetensors, tensors

MANIFEST, WEIGHTS, LOADER = "programs.json", "weights.safetensors", "run.py"
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
        length = generation.max_new_tokens or usual_length(config)
        beams = generation.num_beams if generation.num_beams > 1 else _BEAMS
        return cls(generation, length, beams)


def export(
    config: TransformerConfig, dtypes: Mapping[str, Any], settings: Settings
) -> dict[str, jax.export.Exported]:
    """Return the programs for all :data:`PLATFORMS`; ``dtypes`` are the arrays', by path."""
    shapes = transformer.shapes(config)
    weights = {
        name: jax.ShapeDtypeStruct(shape, dtypes[name]) for name, shape in sorted(shapes.items())
    }
    batch, length = jax.export.symbolic_shape("b, s", constraints=[f"s <= {config.longest}"])
    source = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    tokens = jax.ShapeDtypeStruct((batch, 1), jnp.int32)
    functions = _functions(config, settings)
    cache = jax.eval_shape(functions["encode"], weights, source)
    programs = {}
    try:
        for name, function in functions.items():
            arguments = (tokens, cache) if name == "decode_step" else (source,)
            exported = jax.export.export(jax.jit(function), platforms=PLATFORMS)
            programs[name] = exported(weights, *arguments)
    except jax.core.InconclusiveDimensionOperation as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"--to stablehlo: not for every batch and length: {reason}") from None
    return programs


def _functions(config: TransformerConfig, settings: Settings) -> dict[str, Callable[..., Any]]:
    """Return the functions that are exported. Only dictionaries, lists and arrays go in and out."""

    def split(weights: Weights) -> prepare.SplitModel:
        return prepare.split(transformer.unflatten(config, weights))

    def encode(weights: Weights, source: jax.Array) -> list[jax.Array]:
        """Return the arrays of the decoder's cache, which :func:`decode_step` takes."""
        model = transformer.unflatten(config, weights)
        return jax.tree.leaves(model.init_cache(source, settings.max_new_tokens))

    def decode_step(
        weights: Weights, tokens: jax.Array, cache: list[jax.Array]
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Return the logits (b, 1, v) after these tokens (b, 1), and the cache with them."""
        model = transformer.unflatten(config, weights)
        like = jax.eval_shape(lambda model: model.init_cache(np.zeros((1, 1), np.int32), 1), model)
        structured = jax.tree.unflatten(jax.tree.structure(like), cache)
        logits, after = model.decode_step(tokens, structured)
        return logits, jax.tree.leaves(after)

    def greedy(weights: Weights, source: jax.Array) -> jax.Array:
        """Return ids (b, n), padded after the end token."""
        return decoding.greedy(split(weights), source, **settings.search)

    def beam(weights: Weights, source: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the best hypotheses (b, n) and their scores (b)."""
        return beam_search.beam(
            split(weights),
            source,
            beam_size=settings.num_beams,
            length_penalty=settings.generation.length_penalty,
            scorer=settings.generation.beam_scorer,
            early_stopping=settings.generation.early_stopping,
            **settings.search,
        )

    return {"encode": encode, "decode_step": decode_step, "greedy": greedy, "beam": beam}


# The folder


def write(
    folder: Path, config: TransformerConfig, arrays: Mapping[str, np.ndarray], settings: Settings
) -> str:
    """Create ``folder``, and return the SHA-256 of its manifest, which hashes the other files.

    Raises ConfigError for float64, which JAX has only in its 64-bit mode.
    """
    wide = sorted(name for name, array in arrays.items() if array.dtype == np.float64)
    if wide:
        raise ConfigError(
            f"--to stablehlo: {wide[0]} and {len(wide) - 1} others are float64: "
            "give --dtype float32"
        )
    exported = export(config, {name: array.dtype for name, array in arrays.items()}, settings)
    folder.mkdir()
    entries = {}
    for name, program in exported.items():
        content = bytes(program.serialize())
        (_, *arguments), _ = jax.tree.unflatten(program.in_tree, program.in_avals)
        (folder / f"{name}.stablehlo").write_bytes(content)
        entries[name] = {
            "file": f"{name}.stablehlo",
            "sha256": hashlib.sha256(content).hexdigest(),
            "arguments": [_shapes(jax.tree.leaves(argument)) for argument in arguments],
            "results": _shapes(program.out_avals),
        }
    sha256 = safetensors.save(folder / WEIGHTS, tensors.in_memory(dict(arrays)), target=folder)
    manifest = {
        "format": 1,
        "jax": jax.__version__,
        "calling_convention": next(iter(exported.values())).calling_convention_version,
        "platforms": list(PLATFORMS),
        "programs": entries,
        "weights": {"file": WEIGHTS, "sha256": sha256},
        **_numbers(config, settings),
    }
    text = json.dumps(manifest, indent=1) + "\n"
    (folder / MANIFEST).write_text(text, encoding="utf-8")
    (folder / LOADER).write_bytes(Path(run.__file__).read_bytes())
    return hashlib.sha256(text.encode()).hexdigest()


def _numbers(config: TransformerConfig, settings: Settings) -> dict[str, Any]:
    """Return the sizes and special ids that a caller needs."""
    generation = settings.generation
    start, end = generation.start_and_end(config)
    return {
        "max_source_length": config.longest,
        "max_new_tokens": settings.max_new_tokens,
        "num_beams": settings.num_beams,
        "beam_scorer": generation.beam_scorer.value,
        "length_penalty": generation.length_penalty,
        "source_vocab_size": config.source_vocab_size,
        "target_vocab_size": config.target_vocab_size,
        "special_ids": {
            "source_pad": config.source_pad_id,
            "target_pad": config.target_pad_id,
            "start": start,
            "end": end,
        },
    }


def _shapes(avals: Any) -> list[str]:
    """Return each array as ``float32[b,s,16]``: b is the batch, s the sources' length."""
    return [f"{aval.dtype}[{','.join(map(str, aval.shape))}]" for aval in avals]


def check(folder: Path, model: prepare.SplitModel, settings: Settings) -> None:
    """Raise DifferentError unless the program ``greedy`` gives the model's own tokens."""
    source, _ = conversion.random_batch(model.config, 0)
    ours = decoding.greedy(model, source, **settings.search)
    theirs = run.Model(folder).greedy(source)
    if not np.array_equal(np.asarray(ours), np.asarray(theirs)):
        raise DifferentError(
            "self-check: the exported program gives other tokens; nothing was written"
        )
