"""WAV files to samples at 16 kHz: whole numbers (PCM), mixed down and resampled."""

import os
import struct
from fractions import Fraction
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from jaxtyping import Float

from jax_transformer.errors import InputError
from jax_transformer.extras.speech.log_mel import SAMPLE_RATE

_RATES = (4_000, 192_000)
_MOST_CHANNELS = 32
_MOST_PHASES = 16_000
"""The filter that changes a sampling rate has twenty times as many numbers."""
_BLOCK = 1 << 16  # frames that are read at once
_WIDTHS = (1, 2, 3, 4)  # bytes of a sample
_PCM, _EXTENSIBLE = 1, 0xFFFE
_PCM_SUBFORMAT = bytes.fromhex("0100000000001000800000aa00389b71")
"""The GUID that follows ``_EXTENSIBLE``, the format of files with more than 16 bits, two channels
or 48 kHz.
"""


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
    return samples if header.rate == SAMPLE_RATE else _resampled(samples, header.rate)


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
        if content:
            fields = _format(path, content)
        file.seek(size - len(content) + size % 2, os.SEEK_CUR)
    raise _no_pcm(path, "it ends within its header")


def _format(path: str | Path, content: bytes) -> tuple[int, int, int]:
    """Return the channels, the rate and the bytes of a sample in the chunk of the format."""
    if len(content) < 16:
        raise _no_pcm(path, "it ends within its header")
    form, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", content)
    if form != _PCM and (form != _EXTENSIBLE or content[24:] != _PCM_SUBFORMAT):
        raise _no_pcm(path, f"unknown format: {form} {content[24:].hex()}".rstrip())
    return channels, rate, (bits + 7) // 8


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


def _resampled(samples: Float[np.ndarray, " n"], rate: int) -> Float[np.ndarray, " m"]:
    from scipy import signal

    ratio = Fraction(SAMPLE_RATE, rate)
    return signal.resample_poly(samples, ratio.numerator, ratio.denominator).astype(np.float32)
