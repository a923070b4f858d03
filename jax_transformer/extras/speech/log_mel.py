"""Log-mel spectrograms, the input of a model that reads sound. NumPy only.

They equal transformers' ``WhisperFeatureExtractor``, computed in float64: facts from
``feature_extraction_whisper.py`` and ``audio_utils.py`` of transformers 5.23. The mel scale is
Slaney's, of the Auditory Toolbox: linear below 1 kHz, logarithmic above.
"""

from functools import lru_cache
from typing import Any

import numpy as np
from jaxtyping import Float

SAMPLE_RATE = 16_000
HOP = 160
"""Samples from one frame to the next."""
FRAME = 400
"""Samples in a frame, and the length of its Fourier transform."""
_LEAST_POWER = 1e-10
_RANGE = 8.0
"""Powers of ten below the loudest power that count as silence."""
_BLOCK = 1000  # frames that are transformed at once


def log_mel(
    samples: Float[np.ndarray, " n"], mel_bins: int, dtype: Any = np.float32
) -> Float[np.ndarray, "c w"]:
    """Return the spectrogram of samples at 16 kHz between -1 and 1, one frame for each 160.

    Its numbers are (log10 of the power + 4) / 4, and at most 2 below the largest of all frames.
    """
    frames = len(samples) // HOP
    filters, window = mel_filters(mel_bins), _hann()
    padded = np.pad(samples, FRAME // 2, mode="reflect")
    views = np.lib.stride_tricks.sliding_window_view(padded, FRAME)[::HOP][:frames]
    logs = np.empty((mel_bins, frames), dtype)
    for start in range(0, frames, _BLOCK):
        spectrum = np.fft.rfft(views[start : start + _BLOCK] * window, axis=1)
        power = filters.T @ (spectrum.real**2 + spectrum.imag**2).T
        logs[:, start : start + _BLOCK] = np.log10(np.maximum(power, _LEAST_POWER))
    np.maximum(logs, logs.max() - dtype(_RANGE), out=logs)
    logs += dtype(4)
    logs /= dtype(4)
    return logs


def padded(samples: Float[np.ndarray, " n"], frames: int) -> Float[np.ndarray, " m"]:
    """Return the samples followed by silence, as long as ``frames``."""
    return np.pad(samples, (0, frames * HOP - len(samples)))


@lru_cache(maxsize=4)
def mel_filters(mel_bins: int) -> Float[np.ndarray, "k c"]:
    """Return the weight of each frequency in each channel: triangles of equal area."""
    edges = _hertz(np.linspace(0.0, _mel(SAMPLE_RATE / 2), mel_bins + 2))
    low, peak, high = edges[:-2], edges[1:-1], edges[2:]
    frequencies = np.linspace(0, SAMPLE_RATE // 2, FRAME // 2 + 1)[:, None]
    rising, falling = (frequencies - low) / (peak - low), (high - frequencies) / (high - peak)
    return np.maximum(0, np.minimum(rising, falling)) * (2.0 / (high - low))


_KNEE_HERTZ, _KNEE_MEL = 1000.0, 15.0
_STEPS = 27.0 / np.log(6.4)  # mels of a factor e above the knee


def _mel(hertz: float) -> float:
    """Return the mels of a frequency above the knee."""
    return _KNEE_MEL + np.log(hertz / _KNEE_HERTZ) * _STEPS


def _hertz(mels: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    above = _KNEE_HERTZ * np.exp((mels - _KNEE_MEL) / _STEPS)
    return np.where(mels < _KNEE_MEL, mels * _KNEE_HERTZ / _KNEE_MEL, above)


@lru_cache(maxsize=1)
def _hann() -> Float[np.ndarray, " n"]:
    """Return the periodic Hann window."""
    return 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(FRAME) / FRAME)
