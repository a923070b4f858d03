"""Random inputs to compare models on."""

import numpy as np

from jax_transformer.config import TransformerConfig
from jax_transformer.errors import ConfigError

_ROWS, _SOURCE_LENGTH, _TARGET_LENGTH = 3, 7, 5


def random_batch(
    config: TransformerConfig, seed: int, length: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Random ids (b, s) and (b, t), with padding after rows of different lengths.

    A model that reads sound has a random spectrogram (b, c, w) as its source.

    ``length`` sets s and t, or t alone if the source is sound; they are 7 and 5 if None.
    Raises ConfigError if the model cannot take that length.
    """
    random = np.random.default_rng(seed)
    if length is not None and not 1 <= length <= config.longest:
        raise ConfigError(f"--lengths {length}: this model takes 1 to {config.longest}")
    target_length = _SOURCE_LENGTH if config.equal_lengths else _TARGET_LENGTH
    lengths = (length, length) if length else (_SOURCE_LENGTH, target_length)
    vocabularies = (config.source_vocab_size, config.target_vocab_size)
    pad_ids = (config.source_pad_id, config.target_pad_id)
    batch = []
    for n, size, pad in zip(lengths, vocabularies, pad_ids, strict=True):
        n = min(n, config.longest)
        ids = random.integers(0, size, (_ROWS, n))
        ids[ids == pad] = (pad + 1) % size
        for row in range(_ROWS):
            ids[row, max(1, n - 2 * row) :] = pad
        batch.append(ids)
    if config.mel_shape is None:
        return batch[0], batch[1]
    return random.standard_normal((_ROWS, *config.mel_shape)), batch[1]
