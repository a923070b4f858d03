"""WAV files to samples at 16 kHz: the standard library's reader, mixed down and resampled."""

import os
import struct
import wave
from fractions import Fraction
from pathlib import Path

import numpy as np
from jaxtyping import Float

from jax_transformer.data.log_mel import SAMPLE_RATE
from jax_transformer.errors import InputError

_RATES = (4_000, 192_000)
_MOST_CHANNELS = 32
_MOST_PHASES = 16_000
"""The filter that changes a sampling rate has twenty times as many numbers."""
_BLOCK = 1 << 16  # frames that are read at once
_WIDTHS = (1, 2, 3, 4)  # bytes of a sample


def read(path: str | Path) -> Float[np.ndarray, " n"]:
    """Return the samples of a WAV file of 8, 16, 24 or 32 bits, between -1 and 1, at 16 kHz.

    Several channels are mixed down to their mean. Another sampling rate is changed by a polyphase
    low-pass filter (``scipy.signal.resample_poly``: a windowed sinc, Kaiser window with β = 5).
    Raises InputError for what is no such file, or shorter than its header says.
    """
    try:
        with open(path, "rb") as raw, wave.open(raw) as file:
            size = os.fstat(raw.fileno()).st_size
            samples = _samples(path, file, size)
            rate = file.getframerate()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    except (wave.Error, EOFError, struct.error, RuntimeError, OverflowError) as error:
        reason = str(error) or "it ends within its header"
        raise InputError(
            f"{path}: not a WAV file of whole numbers (PCM): {reason}; convert it, for example by"
            " ffmpeg -i FILE -ar 16000 -ac 1 -c:a pcm_s16le OUT.wav"
        ) from None
    return samples if rate == SAMPLE_RATE else _resampled(samples, rate)


def _samples(path: str | Path, file: wave.Wave_read, size: int) -> Float[np.ndarray, " n"]:
    """The mean of all channels, read block by block into one array of the file's own length."""
    channels, width, rate = file.getnchannels(), file.getsampwidth(), file.getframerate()
    frames = file.getnframes()
    if width not in _WIDTHS or not 1 <= channels <= _MOST_CHANNELS:
        raise InputError(
            f"{path}: has {channels} channels of {8 * width} bits: 1 to {_MOST_CHANNELS} channels"
            " of 8, 16, 24 or 32 bits are read"
        )
    if not _RATES[0] <= rate <= _RATES[1]:
        raise InputError(
            f"{path}: has {rate} samples a second: {_RATES[0]:,} to {_RATES[1]:,} are read"
        )
    if Fraction(SAMPLE_RATE, rate).denominator > _MOST_PHASES:
        raise InputError(
            f"{path}: has {rate} samples a second, which has no simple ratio to {SAMPLE_RATE:,}:"
            " convert it first"
        )
    if frames * channels * width > size:
        raise InputError(
            f"{path}: is cut off: its header says {frames * channels * width:,} bytes of sound, and"
            f" the file has {size:,}"
        )
    if not frames:
        raise InputError(f"{path}: holds no sound")
    samples = np.empty(frames, np.float32)
    for start in range(0, frames, _BLOCK):
        part = samples[start : start + _BLOCK]
        content = file.readframes(len(part))
        if len(content) != len(part) * channels * width:
            raise InputError(f"{path}: is cut off: a part of the sound is missing")
        part[:] = _numbers(content, width).reshape(-1, channels).mean(axis=1)
    return samples


def _numbers(content: bytes, width: int) -> Float[np.ndarray, " n"]:
    """Samples of ``width`` bytes as numbers between -1 and 1; those of one byte have no sign."""
    if width == 1:
        return (np.frombuffer(content, np.uint8).astype(np.float64) - 128) / 128
    if width == 3:  # as the upper three bytes of four
        wide = np.zeros((len(content) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(content, np.uint8).reshape(-1, 3)
        content, width = wide.tobytes(), 4
    return np.frombuffer(content, f"<i{width}").astype(np.float64) / 2 ** (8 * width - 1)


def _resampled(samples: Float[np.ndarray, " n"], rate: int) -> Float[np.ndarray, " m"]:
    from scipy import signal

    ratio = Fraction(SAMPLE_RATE, rate)
    return signal.resample_poly(samples, ratio.numerator, ratio.denominator).astype(np.float32)
