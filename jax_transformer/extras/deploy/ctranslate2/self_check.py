"""The self-check of an export: the engine's log-probabilities next to the model's."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jax_transformer.config import TransformerConfig
from jax_transformer.errors import DifferentError
from jax_transformer.extras.deploy.ctranslate2.folder import Quantization
from jax_transformer.extras.deploy.ctranslate2.vocabulary import Vocabularies
from jax_transformer.parity import from_files

_LONGEST = 7
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
    source, target = from_files.random_batch(config, 0, min(_LONGEST, config.longest))
    target = target[:, :-1]  # the decoder reads the start token as well
    if vocabularies.settings["add_source_eos"]:  # which the engine appends
        last = (source != config.source_pad_id).sum(axis=1) - 1
        end = vocabularies.source.index(vocabularies.settings["eos_token"])
        source[np.arange(len(source)), last] = end
    ours = _ours(config, arrays, source, target)
    theirs = _theirs(folder, config, vocabularies, source, target)
    error = max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))
    largest = max(float(np.abs(a).max()) for a in ours)
    if quantization is Quantization.FLOAT32 and not error <= _BOUND * max(1.0, largest):
        raise DifferentError(
            f"self-check: CTranslate2's log-probabilities differ by {error:.2g}; "
            "nothing was written"
        )
    return error


def _rows(ids: np.ndarray, pad_id: int) -> list[list[int]]:
    """Return the ids of each row without padding."""
    return [row[row != pad_id].tolist() for row in ids]


def _ours(
    config: TransformerConfig,
    arrays: Mapping[str, np.ndarray],
    source: np.ndarray,
    target: np.ndarray,
) -> list[np.ndarray]:
    """Return the log-probabilities of each target and of the end after it, in float32."""
    import jax
    import jax.numpy as jnp

    from jax_transformer import transformer

    config = dataclasses.replace(config.portable, compute_dtype=None)
    model = transformer.unflatten(
        config, {name: jnp.asarray(array, jnp.float32) for name, array in arrays.items()}
    )
    inputs = np.insert(target, 0, config.bos_id, axis=1)

    def log_probs(model: transformer.Transformer) -> jax.Array:
        logits = model(source, inputs)
        assert isinstance(logits, jax.Array), "without return_attention"
        return jax.nn.log_softmax(logits)

    computed = np.asarray(jax.jit(log_probs)(model))
    return [
        row_probs[np.arange(len(row) + 1), [*row, config.eos_id]]
        for row_probs, row in zip(computed, _rows(target, config.target_pad_id), strict=True)
    ]


def _theirs(
    folder: Path,
    config: TransformerConfig,
    vocabularies: Vocabularies,
    source: np.ndarray,
    target: np.ndarray,
) -> list[np.ndarray]:
    import ctranslate2

    settings = vocabularies.settings
    sources = _rows(source, config.source_pad_id)
    if settings["add_source_eos"]:  # which is appended to each line
        sources = [row[:-1] for row in sources]
    start = [] if settings["decoder_start_token"] is not None else [config.bos_id]
    engine = ctranslate2.Translator(str(folder), device="cpu", intra_threads=1)
    scored = engine.score_batch(
        [[vocabularies.source[i] for i in row] for row in sources],
        [
            [vocabularies.target[i] for i in [*start, *row]]
            for row in _rows(target, config.target_pad_id)
        ],
        max_input_length=0,
    )
    return [np.array(result.log_probs) for result in scored]
