"""Sound, the input of a model that listens: WAV files of whole numbers (PCM) to samples at 16 kHz,
and samples to log-mel spectrograms.

Python 3.11's ``wave`` does not know the extensible format, and ``scipy.io.wavfile`` takes as much
memory as a header declares.

The spectrograms equal transformers' ``WhisperFeatureExtractor``, computed in float64: facts from
``feature_extraction_whisper.py`` and ``audio_utils.py`` of transformers 5.23. The mel scale is
Slaney's, of the Auditory Toolbox: linear below 1 kHz, logarithmic above.
"""

import os
import struct
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from jaxtyping import Float

from jax_transformer.errors import InputError

SAMPLE_RATE = 16_000
HOP = 160
"""Samples from one frame to the next."""
FRAME = 400
"""Samples in a frame, and the length of its Fourier transform."""
_LEAST_POWER = 1e-10
_RANGE = 8.0
"""Powers of ten below the loudest power that count as silence."""
_FRAMES = 1000  # that are transformed at once
_KNEE_HERTZ, _KNEE_MEL = 1000.0, 15.0
_STEPS = 27.0 / np.log(6.4)  # mels of a factor e above the knee
_RATES = (4_000, 192_000)
_MOST_CHANNELS = 32
_MOST_PHASES = 16_000
"""The filter that changes a sampling rate has twenty times as many numbers."""
_BLOCK = 1 << 16  # frames that are read at once
_WIDTHS = (1, 2, 3, 4)  # bytes of a sample
_PCM, _EXTENSIBLE = 1, 0xFFFE
_PCM_SUBFORMAT = bytes.fromhex("0100000000001000800000aa00389b71")
"""The GUID of ``_EXTENSIBLE``, which files of over 16 bits, two channels or 48 kHz have."""


def read(path: str | Path) -> Float[np.ndarray, " n"]:
    """Return the samples of a WAV file of 8, 16, 24 or 32 bits, between -1 and 1, at 16 kHz.

    Several channels are mixed down to their mean. Another sampling rate is changed by a polyphase
    low-pass filter (``scipy.signal.resample_poly``: a windowed sinc, Kaiser window with β = 5).
    Raises InputError for what is not such a file, or is shorter than its header says.
    """
    try:
        with open(path, "rb") as file:
            header = _header(path, file)
            samples = _samples(path, file, header)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    if header.rate == SAMPLE_RATE:
        return samples
    from scipy import signal

    ratio = Fraction(SAMPLE_RATE, header.rate)
    return signal.resample_poly(samples, ratio.numerator, ratio.denominator).astype(np.float32)


class _Header(NamedTuple):
    channels: int
    rate: int
    width: int
    """Bytes of a sample."""
    size: int
    """Bytes of sound, which are the next in the file."""


def _header(path: str | Path, file: BinaryIO) -> _Header:
    start = file.read(12)
    if start[:4] != b"RIFF" or start[8:] != b"WAVE":
        raise _no_pcm(path, "it does not begin with RIFF and WAVE")
    fields = None
    while len(chunk := file.read(8)) == 8:
        name, size = struct.unpack("<4sI", chunk)
        if name == b"data" and fields is not None:
            return _Header(*fields, size)
        content = file.read(min(size, 40)) if name == b"fmt " else b""
        if 0 < len(content) < 16:
            break
        if content:
            form, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", content)
            if form != _PCM and (form != _EXTENSIBLE or content[24:] != _PCM_SUBFORMAT):
                raise _no_pcm(path, f"unknown format: {form} {content[24:].hex()}".rstrip())
            fields = channels, rate, (bits + 7) // 8
        file.seek(size - len(content) + size % 2, os.SEEK_CUR)
    raise _no_pcm(path, "it ends within its header")


def _no_pcm(path: str | Path, reason: str) -> InputError:
    return InputError(
        f"{path}: not a WAV file of whole numbers (PCM): {reason}; convert it, for example by"
        " ffmpeg -i FILE -ar 16000 -ac 1 -c:a pcm_s16le OUT.wav"
    )


def _samples(path: str | Path, file: BinaryIO, header: _Header) -> Float[np.ndarray, " n"]:
    """Return the mean of all channels, read block by block into an array of its own length."""
    channels, _, width, size = header
    _check(path, header, os.fstat(file.fileno()).st_size - file.tell())
    samples = np.empty(size // (channels * width), np.float32)
    for start in range(0, len(samples), _BLOCK):
        part = samples[start : start + _BLOCK]
        content = file.read(len(part) * channels * width)
        if len(content) != len(part) * channels * width:
            raise InputError(f"{path}: is cut off: a part of the sound is missing")
        part[:] = _numbers(content, width).reshape(-1, channels).mean(axis=1)
    return samples


def _check(path: str | Path, header: _Header, left: int) -> None:
    """Raise InputError for a header that is not supported, or not true of the ``left`` bytes."""
    channels, rate, width, size = header
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
    if size // (channels * width) * channels * width > left:
        raise InputError(
            f"{path}: is cut off: its header says {size:,} bytes of sound, and {left:,} follow it"
        )
    if size < channels * width:
        raise InputError(f"{path}: holds no sound")


def _numbers(content: bytes, width: int) -> Float[np.ndarray, " n"]:
    """Return samples of ``width`` bytes as numbers between -1 and 1; one byte has no sign."""
    if width == 1:
        return (np.frombuffer(content, np.uint8).astype(np.float64) - 128) / 128
    if width == 3:  # as the upper three bytes of four
        wide = np.zeros((len(content) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(content, np.uint8).reshape(-1, 3)
        content, width = wide.tobytes(), 4
    return np.frombuffer(content, f"<i{width}").astype(np.float64) / 2 ** (8 * width - 1)


# Spectrograms


def log_mel(
    samples: Float[np.ndarray, " n"], mel_bins: int, dtype: Any = np.float32
) -> Float[np.ndarray, "c w"]:
    """Return the spectrogram of samples at 16 kHz between -1 and 1, one frame for each 160.

    Its numbers are (log10 of the power + 4) / 4, and at most 2 below the largest of all frames.
    """
    frames = len(samples) // HOP
    filters = mel_filters(mel_bins)
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(FRAME) / FRAME)  # Hann's, periodic
    padded = np.pad(samples, FRAME // 2, mode="reflect")
    views = np.lib.stride_tricks.sliding_window_view(padded, FRAME)[::HOP][:frames]
    logs = np.empty((mel_bins, frames), dtype)
    for start in range(0, frames, _FRAMES):
        spectrum = np.fft.rfft(views[start : start + _FRAMES] * window, axis=1)
        power = filters.T @ (spectrum.real**2 + spectrum.imag**2).T
        logs[:, start : start + _FRAMES] = np.log10(np.maximum(power, _LEAST_POWER))
    np.maximum(logs, logs.max() - dtype(_RANGE), out=logs)
    logs += dtype(4)
    logs /= dtype(4)
    return logs


@lru_cache(maxsize=4)
def mel_filters(mel_bins: int) -> Float[np.ndarray, "k c"]:
    """Return the weight of each frequency in each channel: triangles of equal area."""
    highest = _KNEE_MEL + np.log(SAMPLE_RATE / 2 / _KNEE_HERTZ) * _STEPS
    mels = np.linspace(0.0, highest, mel_bins + 2)
    above = _KNEE_HERTZ * np.exp((mels - _KNEE_MEL) / _STEPS)
    edges = np.where(mels < _KNEE_MEL, mels * _KNEE_HERTZ / _KNEE_MEL, above)
    low, peak, high = edges[:-2], edges[1:-1], edges[2:]
    frequencies = np.linspace(0, SAMPLE_RATE // 2, FRAME // 2 + 1)[:, None]
    rising, falling = (frequencies - low) / (peak - low), (high - frequencies) / (high - peak)
    return np.maximum(0, np.minimum(rising, falling)) * (2.0 / (high - low))
