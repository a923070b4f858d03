"""The self-check of an export: the engine's log-probabilities next to the model's."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jax_transformer.config import TransformerConfig
from jax_transformer.errors import DifferentError
from jax_transformer.extras.deploy.ctranslate2.folder import Quantization
from jax_transformer.extras.deploy.ctranslate2.vocabulary import Vocabularies

_LENGTHS = (7, 4, 6)
"""Numbers of tokens of the random sources; their targets have two less."""
_BOUND = 1e-3
"""Relative to the largest number, for float32. Correct folders differ by about 1e-6."""


def check(
    folder: Path,
    config: TransformerConfig,
    arrays: Mapping[str, np.ndarray],
    vocabularies: Vocabularies,
    quantization: Quantization,
) -> float:
    """Return the largest difference of the log-probabilities of random targets.

    Raises DifferentError if it is above what float32's rounding explains, and the folder is in
    float32.
    """
    sources, targets = _batch(config)
    if vocabularies.settings["add_source_eos"]:  # which the engine appends
        end = vocabularies.source.index(vocabularies.settings["eos_token"])
        sources = [[*row[:-1], end] for row in sources]
    ours = _ours(config, arrays, sources, targets)
    theirs = _theirs(folder, config, vocabularies, sources, targets)
    error = max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))
    largest = max(float(np.abs(a).max()) for a in ours)
    if quantization is Quantization.FLOAT32 and not error <= _BOUND * max(1.0, largest):
        raise DifferentError(
            f"self-check: CTranslate2's log-probabilities differ by {error:.2g}; "
            "nothing was written"
        )
    return error


def _batch(config: TransformerConfig) -> tuple[list[list[int]], list[list[int]]]:
    """Random lines without padding, as long as the model can read; targets without their start."""
    rng = np.random.default_rng(0)

    def line(length: int, vocabulary: int, pad: int) -> list[int]:
        ids = rng.integers(0, vocabulary, min(length, config.longest - 1))
        return [int(i) for i in np.where(ids == pad, (pad + 1) % vocabulary, ids)]

    return (
        [line(n, config.source_vocab_size, config.source_pad_id) for n in _LENGTHS],
        [line(n - 2, config.target_vocab_size, config.target_pad_id) for n in _LENGTHS],
    )


def _ours(
    config: TransformerConfig,
    arrays: Mapping[str, np.ndarray],
    sources: list[list[int]],
    targets: list[list[int]],
) -> list[np.ndarray]:
    """The log-probabilities of each target and of the end after it, in float32."""
    import jax
    import jax.numpy as jnp

    from jax_transformer import transformer

    config = dataclasses.replace(config.portable, compute_dtype=None)
    model = transformer.unflatten(
        config, {name: jnp.asarray(array, jnp.float32) for name, array in arrays.items()}
    )
    source = _padded(sources, config.source_pad_id)
    target = _padded([[config.bos_id, *row] for row in targets], config.target_pad_id)

    def log_probs(model: transformer.Transformer) -> jax.Array:
        logits = model(source, target)
        assert isinstance(logits, jax.Array), "without return_attention"
        return jax.nn.log_softmax(logits)

    computed = np.asarray(jax.jit(log_probs)(model))
    return [
        computed[i, np.arange(len(row) + 1), [*row, config.eos_id]] for i, row in enumerate(targets)
    ]


def _padded(rows: list[list[int]], pad: int) -> np.ndarray:
    width = max(map(len, rows))
    return np.array([[*row, *[pad] * (width - len(row))] for row in rows], np.int32)


def _theirs(
    folder: Path,
    config: TransformerConfig,
    vocabularies: Vocabularies,
    sources: list[list[int]],
    targets: list[list[int]],
) -> list[np.ndarray]:
    import ctranslate2

    settings = vocabularies.settings
    if settings["add_source_eos"]:  # which is appended to each line
        sources = [row[:-1] for row in sources]
    start = [] if settings["decoder_start_token"] is not None else [config.bos_id]
    engine = ctranslate2.Translator(str(folder), device="cpu", intra_threads=1)
    scored = engine.score_batch(
        [[vocabularies.source[i] for i in row] for row in sources],
        [[vocabularies.target[i] for i in [*start, *row]] for row in targets],
        max_input_length=0,
    )
    return [np.array(result.log_probs) for result in scored]
