"""WAV files: samples of every width, resampling, and files that are damaged or lie."""

import contextlib
import itertools
import random
import struct
import wave
from pathlib import Path

import numpy as np
import pytest

from jax_transformer.errors import ConfigError, InputError
from jax_transformer.extras.speech import command, sound
from jax_transformer.extras.speech.speech_config import SpeechConfig
from jax_transformer.extras.speech.timestamps import Phrase, TimestampRules, split
from jax_transformer.extras.speech.transcription import Segment, Transcript
from parity_tests.unit import helpers

WIDTHS = {1: 128, 2: 1 << 15, 3: 1 << 23, 4: 1 << 31}


def save(path: Path, samples: np.ndarray, width: int = 2, rate: int = 16_000) -> Path:
    """Write whole numbers (n, channels) as a WAV file of this many bytes a sample."""
    offset = 128 if width == 1 else 0
    content = b"".join(
        int(value + offset).to_bytes(width, "little", signed=width > 1) for value in samples.ravel()
    )
    with wave.open(str(path), "wb") as file:
        file.setnchannels(samples.shape[1])
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(content)
    return path


@pytest.mark.parametrize("channels", [1, 2, 3])
@pytest.mark.parametrize("width", WIDTHS)
def test_samples_of_every_width_are_mixed_down(width: int, channels: int, tmp_path: Path):
    full = WIDTHS[width]
    samples = np.random.default_rng(0).integers(-full, full, (500, channels))
    samples[0], samples[1] = -full, full - 1
    read = sound.read(save(tmp_path / "a.wav", samples, width))
    np.testing.assert_allclose(read, (samples / full).mean(axis=1), rtol=0, atol=6e-8)
    assert read.dtype == np.float32 and read[0] == -1
    content = bytearray((tmp_path / "a.wav").read_bytes())
    content[34] -= 4  # of the bits of a sample: it has as many bytes
    (tmp_path / "b.wav").write_bytes(content)
    assert (sound.read(tmp_path / "b.wav") == read).all()


PCM = bytes.fromhex("0100000000001000800000aa00389b71")


def extensible(path: Path, subformat: bytes = PCM) -> bytes:
    """Return a WAV file whose format is WAVE_FORMAT_EXTENSIBLE, with chunks that are not read."""
    content = path.read_bytes()
    more = struct.pack("<HHI", 22, 24, 0) + subformat
    form = b"fmt " + struct.pack("<IH", 40, 0xFFFE) + content[22:36] + more
    other = b"LIST" + struct.pack("<I", 3) + b"abc\0"
    return content[:12] + other + form + b"fact" + struct.pack("<II", 4, 9) + content[36:]


def test_the_extensible_format_is_read(tmp_path: Path):
    """Writers choose it for more than 16 bits, two channels or 48 kHz."""
    samples = np.random.default_rng(0).integers(-WIDTHS[3], WIDTHS[3], (500, 3))
    plain = save(tmp_path / "a.wav", samples, 3)
    (tmp_path / "b.wav").write_bytes(extensible(plain))
    assert (sound.read(tmp_path / "b.wav") == sound.read(plain)).all()
    (tmp_path / "b.wav").write_bytes(extensible(plain, b"\3" + PCM[1:]))
    with pytest.raises(InputError, match="unknown format: 65534 03000000") as caught:
        sound.read(tmp_path / "b.wav")
    assert "\n" not in str(caught.value)


def test_blocks_are_read_one_after_the_other(tmp_path: Path, monkeypatch):
    samples = np.arange(-1000, 1000)[:, None]
    file = save(tmp_path / "a.wav", samples)
    at_once = sound.read(file)
    monkeypatch.setattr(sound, "_BLOCK", 7)
    assert (sound.read(file) == at_once).all()


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 48_000])
def test_another_rate_keeps_tones_and_removes_what_is_above_the_new_one(rate: int, tmp_path: Path):
    """A tone of 1 kHz stays as it is; one of 10 kHz, which 16 kHz cannot hold, goes."""
    t = np.arange(rate) / rate
    low, high = np.sin(2 * np.pi * 1000 * t), np.sin(2 * np.pi * 10_000 * t)
    tones = 0.4 * low + (0.4 * high if rate > 20_000 else 0)
    read = sound.read(save(tmp_path / "a.wav", np.round(tones * 32767)[:, None], rate=rate))
    expected = 0.4 * np.sin(2 * np.pi * 1000 * np.arange(16_000) / 16_000)
    assert len(read) == 16_000 and read.dtype == np.float32
    assert np.abs(read - expected)[200:-200].max() < 5e-3


REFUSED = {
    "empty": (b"", "not a WAV file"),
    "text": (b"this is text, and not sound at all", "not a WAV file"),
    "a header alone": (b"RIFF\x24\x00\x00\x00WAVE", "not a WAV file"),
    "half a format": (b"RIFF\0\0\0\0WAVEfmt \x10\0\0\0\1\0", "not a WAV file"),
    "sound before its format": (b"RIFF\0\0\0\0WAVEdata\2\0\0\0\0\0", "not a WAV file"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_wav_file_is_refused(name: str, tmp_path: Path):
    content, message = REFUSED[name]
    (tmp_path / "a.wav").write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        sound.read(tmp_path / "a.wav")
    assert "\n" not in str(caught.value)


def header(*, form: int = 1, channels: int = 1, rate: int = 16_000, width: int = 2, size: int = 8):
    """Return a WAV file of 8 bytes of sound whose header says these numbers."""
    fields = (form, channels, rate, rate * width, width * channels, 8 * width)
    chunk = b"fmt " + struct.pack("<IHHIIHH", 16, *(x & 0xFFFFFFFF for x in fields))
    return b"RIFF" + struct.pack("<I", 44) + b"WAVE" + chunk + b"data" + struct.pack("<I", size)


LIES = {
    "four gigabytes of sound": ({"size": 0xFFFFFFF0}, "is cut off"),
    "floating-point numbers": ({"form": 3, "width": 4}, "unknown format"),
    "a rate of four gigahertz": ({"rate": 0xFFFFFFF0, "width": 1}, "samples a second"),
    "a rate of nothing": ({"rate": 0}, "samples a second"),
    "sixty-four bits": ({"width": 8}, "64 bits"),
    "a thousand channels": ({"channels": 1000, "width": 1}, "1000 channels"),
    "no sound": ({"size": 0}, "holds no sound"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_header_that_lies_is_refused_before_memory_is_taken(name: str, tmp_path: Path):
    fields, message = LIES[name]
    (tmp_path / "a.wav").write_bytes(header(**fields) + bytes(8))
    with helpers.memory_below(1_000_000), pytest.raises(InputError, match=message) as caught:
        sound.read(tmp_path / "a.wav")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("field", "least", "most"), [("channels", 1, 32), ("rate", 4000, 192_000)])
def test_both_limits_of_a_header_are_read(field: str, least: int, most: int, tmp_path: Path):
    for value in (least - 1, least, most, most + 1):
        content = header(**{"width": 1, "size": 96, field: value}) + bytes(96)
        (tmp_path / "a.wav").write_bytes(content)
        if least <= value <= most:
            assert (sound.read(tmp_path / "a.wav") < -0.1).any()
            continue
        with pytest.raises(InputError, match=f"has {value} .* are read"):
            sound.read(tmp_path / "a.wav")
    (tmp_path / "a.wav").write_bytes(header(size=9) + bytes(8))  # half of a sample is not read
    assert sound.read(tmp_path / "a.wav").shape == (4,)


def test_fuzzed_files_are_read_or_refused(tmp_path: Path):
    """Bytes are changed, cut off and doubled at random places."""
    valid = save(tmp_path / "valid.wav", np.arange(-50, 50)[:, None]).read_bytes()
    draw, refused = random.Random(0), 0
    for _ in range(300):
        content = bytearray(valid)
        for _ in range(draw.randint(1, 4)):
            content[draw.randrange(48)] = draw.randrange(256)
        at = draw.randrange(len(content))
        content = draw.choice((content, content[:at], content + content[at:]))
        (tmp_path / "a.wav").write_bytes(content)
        with helpers.memory_below(40_000_000):
            try:
                sound.read(tmp_path / "a.wav")
            except InputError as error:
                assert "\n" not in str(error)
                refused += 1
    assert 100 < refused < 300


def test_a_spectrogram_of_blocks_is_that_of_the_whole(monkeypatch):
    samples = np.random.default_rng(0).standard_normal(16_000).astype(np.float32)
    at_once = sound.log_mel(samples, 20)
    monkeypatch.setattr(sound, "_FRAMES", 7)
    np.testing.assert_allclose(sound.log_mel(samples, 20), at_once, rtol=0, atol=1e-6)
    assert at_once.shape == (20, 100) and at_once.max() - at_once.min() <= 2


def test_lines_of_a_transcript_are_text_times_or_json():
    """Without escapes: a reader sees the text."""
    segments = (Segment(0.5, 61.25, " Größe"), Segment(61.25, 62.0, " 漢 é "))
    transcript = Transcript(" Größe 漢 é ", segments, "de", (1, 2))
    expected = '{"text": " Größe 漢 é ", "language": "de", "segments": [{"start": 0.5, '
    expected += '"end": 61.25, "text": " Größe"}, {"start": 61.25, "end": 62.0, "text": " 漢 é "}]}'
    timed = ["[00:00:00.500 --> 00:01:01.250] Größe", "[00:01:01.250 --> 00:01:02.000] 漢 é"]
    for as_json, timestamps in itertools.product((False, True), repeat=2):
        lines = [expected] if as_json else timed if timestamps else ["Größe 漢 é"]
        options = command.TranscribeOptions("a.wav", "run", json=as_json)
        assert [*command._lines(transcript, timestamps, options)] == lines


def test_times_carry_from_milliseconds_to_hours():
    for seconds, text in {
        0.0: "00:00:00.000",
        0.57: "00:00:00.570",  # 0.57 * 1000 is below 570
        59.9996: "00:01:00.000",
        3599.5: "00:59:59.500",
        3661.02: "01:01:01.020",
        36_000.0: "10:00:00.000",
    }.items():
        assert command._time(seconds) == text


@pytest.mark.parametrize(("last", "first"), [(None, None), (0, 1), (7, 8)])
def test_times_begin_after_the_token_that_says_that_there_are_none(last, first):
    config = helpers.stand_in(SpeechConfig, no_timestamps_id=last, max_initial=3)
    assert config.first_time == first
    with pytest.raises(ConfigError) if first is None else contextlib.nullcontext():
        assert config.rules == TimestampRules(first, 3)


def test_a_model_that_writes_no_times_returns_one_phrase_of_a_window():
    phrase = Phrase((1.0, 1.6), [7, 900, 901])
    assert split(phrase.tokens, None, seek=100, frames=60) == ([phrase], 60)
