"""Whisper: transcripts, languages, times and windows against transformers' ``generate``.

Spectrograms are compared with ``WhisperFeatureExtractor``. Models are small and random; a window is
under a second, and a recording of several windows is under four.
"""

import functools
import itertools
import json
import re
import shutil
import types
import wave
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor
from transformers.models.whisper import feature_extraction_whisper, generation_whisper
from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

import jax_transformer as jt
from jax_transformer.architectures import huggingface_config
from jax_transformer.convert import conversion, planning
from jax_transformer.convert.planning import Request
from jax_transformer.errors import CheckpointError, ConfigError, InputError
from jax_transformer.extras.speech import sound, speech_config, timestamps, transcription
from parity_tests import tokenizer_models
from parity_tests.unit import helpers, runs

WINDOW = 2 * (tokenizer_models.TIMES - 1)
"""Frames in a window: the last token of time is its end."""


def speech(seconds: float, seed: int = 0) -> np.ndarray:
    """Return sound with tones that come and go."""
    random = np.random.default_rng(seed)
    t = np.arange(int(seconds * sound.SAMPLE_RATE)) / sound.SAMPLE_RATE
    tones = sum(
        np.sin(2 * np.pi * random.uniform(100, 4000) * t) * (np.sin(random.uniform(2, 9) * t) > 0.3)
        for _ in range(6)
    )
    return (0.1 * tones + 0.01 * random.standard_normal(len(t))).astype(np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder of a random model that ends its texts at different lengths."""
    path = tmp_path_factory.mktemp("whisper") / "theirs"
    tokenizer_models.write(path, tokenizer_models.whisper())
    words = transformers.WhisperTokenizer.from_pretrained(path)
    sizes = json.loads((path / "config.json").read_text())
    sizes |= dict(num_mel_bins=20, d_model=16, encoder_layers=1, decoder_layers=1)
    sizes |= dict(encoder_attention_heads=2, decoder_attention_heads=4, encoder_ffn_dim=20)
    sizes |= dict(decoder_ffn_dim=24, max_source_positions=WINDOW // 2, max_target_positions=40)
    config = transformers.WhisperConfig(**sizes)
    module = transformers.WhisperForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.4)
            if name.endswith("norm.weight"):
                weight.add_(1)
            elif "out_proj.weight" in name or "v_proj.weight" in name:
                weight.mul_(4)
        module.model.decoder.layer_norm.weight.mul_(0.3)
    ids = words.convert_tokens_to_ids
    settings: dict[str, Any] = {
        "is_multilingual": True,
        "lang_to_id": {token: ids(token) for token in ("<|en|>", "<|de|>", "<|yue|>")},
        "task_to_id": {task: ids(f"<|{task}|>") for task in ("translate", "transcribe")},
        "no_timestamps_token_id": ids("<|notimestamps|>"),
        "prev_sot_token_id": ids("<|startofprev|>"),
        "max_initial_timestamp_index": 9,
        "max_length": 40,
        "suppress_tokens": [5, 7, *range(ids("<|startoftranscript|>"), ids("<|notimestamps|>"))],
        "begin_suppress_tokens": [11, ids("<|endoftext|>")],
        "return_timestamps": False,
        "alignment_heads": [[0, 0]],
        "_from_model_config": False,  # of which transformers reads only its own attributes
    }
    for name, value in settings.items():
        setattr(module.generation_config, name, value)
    module.save_pretrained(path)
    transformers.WhisperFeatureExtractor(feature_size=20, chunk_length=30).save_pretrained(path)
    return path


def theirs(folder: Path, samples: np.ndarray, **options: Any) -> dict[str, Any]:
    """Return transformers' result for samples, with its segments."""
    module = transformers.WhisperForConditionalGeneration.from_pretrained(folder).eval()
    several = len(samples) > WINDOW * sound.HOP
    if not several:
        samples = np.pad(samples, (0, WINDOW * sound.HOP - len(samples)))
    features = torch.from_numpy(sound.log_mel(samples, 20))[None]
    return module.generate(features, return_segments=True, **options)


GERMAN = {"language": "de"}
# name: seconds, arguments of ours, arguments of transformers
CALLS: dict[str, tuple[float, dict[str, Any], dict[str, Any]]] = {
    "a window": (0.5, {}, {}),
    "a window with times": (0.7, {"timestamps": True}, {"return_timestamps": True}),
    "a full window, translated": (WINDOW / 100, GERMAN | {"task": "translate"}, GERMAN),
    "five windows": (3.7, {"language": "yue"}, {"language": "yue", "return_timestamps": True}),
}


KINDS = {1: "greedy", 3: "beam"}


def _marks(name: str, beams: int) -> list[pytest.MarkDecorator]:
    """One search with times and one without; the others under `-m slow`."""
    quick = name in ("a window", "five windows") and beams == 1
    return [pytest.mark.proves(KINDS[beams], "whisper"), *([] if quick else [pytest.mark.slow])]


CASES = [pytest.param(*case, marks=_marks(*case)) for case in itertools.product(CALLS, KINDS)]


@pytest.mark.parametrize(("name", "beams"), CASES)
def test_transcripts_are_those_of_generate(name: str, beams: int, folder: Path):
    seconds, ours, options = CALLS[name]
    samples = speech(seconds)
    task = ours.get("task", "transcribe")
    expected = theirs(folder, samples, **options, task=task, num_beams=beams)["segments"][0]
    transcriber = jt.Transcriber.load(folder, beam_size=beams)
    transcript = transcriber(samples, **ours)
    assert list(transcript.tokens) == [i for each in expected for i in each["tokens"].tolist()]
    assert transcript.language == ours.get("language", transcript.language)
    words = transformers.WhisperTokenizer.from_pretrained(folder)
    for segment, each in zip(transcript.segments, expected, strict=True):
        assert segment.start == pytest.approx(each["start"].item(), abs=1e-9)
        assert segment.end == pytest.approx(float(each["end"]), abs=1e-9)
        assert segment.text == words.decode(each["tokens"], skip_special_tokens=True)
    if name == "five windows":
        assert len(expected) > 5 and len({len(each["tokens"]) for each in expected}) > 1


def test_phrases_are_those_of_generate():
    """Random tokens, half of them times, in any order; the first time among them."""
    first, seek, frames, random = 20, 130, 57, np.random.default_rng(0)
    kinds = set()
    for _ in range(400):
        times = random.integers(first, first + 5, 8)
        tokens = np.where(random.random(8) < 0.5, times, random.integers(0, first, 8))
        tokens = tokens[: random.integers(1, 8)]
        expected, offset = generation_whisper.WhisperGenerationMixin._retrieve_segment(
            *(torch.from_numpy(tokens), [None], torch.tensor([seek / 100.0])),
            **dict(timestamp_begin=first, seek_num_frames=torch.tensor([frames]), input_stride=2),
            **dict(time_precision=0.02, time_precision_features=0.01, prev_idx=0, idx=0),
            **dict(return_token_timestamps=False, decoder_input_ids=torch.zeros(1, 3)),
        )
        phrases, moved = timestamps.split(tokens.tolist(), first, seek, frames)
        assert [each.tokens for each in phrases] == [each["tokens"].tolist() for each in expected]
        for phrase, each in zip(phrases, expected, strict=True):
            bounds = float(each["start"]), float(each["end"])
            assert phrase.times == pytest.approx(bounds, abs=1e-6), tokens
        assert moved == (int(offset) or frames)
        kinds.add((len(phrases), moved))
    assert len(kinds) > 10


def test_windows_are_cut_from_one_spectrogram(folder: Path):
    """A loud beginning decides what is silence in all of them."""
    model, length = jt.Transcriber.load(folder).model, WINDOW * sound.HOP
    samples = speech(2.5 * WINDOW / 100)
    samples[length // 2 :] *= 1e-4
    windows, spectrogram = transcription._Windows(samples, model), sound.log_mel(samples, 20)
    silent = (spectrogram == spectrogram.min()).any(axis=0)
    assert silent[WINDOW:].all(), "what follows is silence in parts"
    for start in (0, 7, WINDOW, spectrogram.shape[1] - 30):
        expected = np.pad(spectrogram, ((0, 0), (0, WINDOW)))[:, start : start + WINDOW]
        assert (windows.at(start)[0] == expected).all()
    for count in (1, length - 1, length, length + sound.HOP - 1):
        windows = transcription._Windows(samples[:count], model)
        assert (windows.frames, windows.several) == (WINDOW, False)
    assert transcription._Windows(samples[: length + sound.HOP], model).several


def test_the_first_window_says_the_language_and_the_last_ends_with_its_sound(
    folder: Path, tmp_path: Path, monkeypatch
):
    """Without times, in a recording of two windows and a half, after another start token."""
    windows, heard, prompts = [], [], set()

    def one_token(model, features, settings, prompt):
        windows.append(features)
        prompts.add(tuple(prompt[0].tolist()))
        return np.array([[[8, settings.eos_token_id]]]), None

    def likeliest(structure, arrays, features, start):
        """Return scores by which <|yue|> is likelier than <|en|>, but not than a word."""
        heard.append((features, int(start[0, 0])))
        order = [8, *(ids[code] for code in ("yue", "de", "en"))]
        return np.array([[-float(order.index(i)) if i in order else -9.0 for i in range(10**4)]])

    monkeypatch.setattr(transcription.decoding, "generate", one_token)
    monkeypatch.setattr(transcription, "_first_logits", likeliest)
    transcriber = jt.Transcriber.load(changed(folder, tmp_path / "own", decoder_start_token_id=9))
    ids = transcriber.config.languages
    transcript = transcriber(speech(1.96))
    ends = [0, WINDOW / 100, 2 * WINDOW / 100, 1.96]
    assert [each[:2] for each in transcript.segments] == list(itertools.pairwise(ends))
    ((features, start),) = heard
    assert [(features == each).all() for each in windows] == [True, False, False]
    (prompt,) = prompts
    assert (start, *prompt[:2]) == (9, 9, ids["yue"]) and transcript.language == "yue"


@pytest.mark.parametrize("bins", [80, 128])
def test_spectrograms_are_those_of_the_feature_extractor(bins: int, monkeypatch):
    """In float64, which stands for float32 in transformers' module here, and as it is."""
    extractor = transformers.WhisperFeatureExtractor(feature_size=bins, chunk_length=2)
    samples = speech(1.7)
    padded = np.pad(samples, (0, 200 * sound.HOP - len(samples)))

    def expected() -> np.ndarray:
        features = extractor(samples, sampling_rate=16_000, return_tensors="np")
        return np.asarray(features.input_features[0])

    assert np.abs(sound.log_mel(padded, bins) - expected()).max() < 5e-5
    wide = types.ModuleType("torch")
    vars(wide).update(vars(torch))
    window = functools.partial(torch.hann_window, dtype=torch.float64)
    vars(wide).update(float32=torch.float64, hann_window=window)
    monkeypatch.setattr(feature_extraction_whisper, "torch", wide)
    ours = sound.log_mel(padded, bins, np.float64)
    assert expected().dtype == np.float64 and np.abs(ours - expected()).max() < 1e-12
    shifted = sound.log_mel(np.roll(padded, 1), bins, np.float64)
    assert np.abs(shifted - expected()).max() > 1e-3


@pytest.mark.parametrize("latest", [None, 3])
def test_rules_of_times_are_those_of_the_logits_processor(latest: int | None):
    """Random texts, half of whose tokens are times that never go back."""
    end, first, vocabulary, length = 4, 9, 24, 7
    settings = transformers.GenerationConfig(eos_token_id=end)
    settings.no_timestamps_token_id, settings.max_initial_timestamp_index = first - 1, latest
    processor = WhisperTimeStampLogitsProcessor(settings, begin_index=2)
    random = np.random.default_rng(0)
    rows, beams = 40, 3
    tokens = random.integers(0, first - 1, (rows, beams, length))
    times = np.sort(random.integers(first, vocabulary, tokens.shape), axis=2)
    tokens = np.where(random.random(tokens.shape) < 0.5, times, tokens)
    rules, all_tokens = timestamps.TimestampRules(first, latest), jnp.asarray(tokens, jnp.int32)
    apply = jax.jit(lambda scores, step: rules(scores, all_tokens, step, end))
    kinds = set()
    for step in range(length + 1):
        scores = random.normal(size=(rows, beams, vocabulary)) * 2
        ids = np.concatenate([np.zeros((rows, beams, 2), int), tokens[:, :, :step]], axis=2)
        expected = processor(
            torch.from_numpy(ids.reshape(-1, step + 2)),
            torch.from_numpy(scores.reshape(-1, vocabulary)),
        ).numpy()
        ours = np.asarray(apply(jnp.asarray(scores), jnp.asarray(step, jnp.int32)))
        ours = ours.reshape(-1, vocabulary)
        np.testing.assert_array_equal(ours, expected)
        kinds |= {tuple(row) for row in np.isinf(expected)}
    assert len(kinds) > 20, "the rules forbid the same tokens everywhere"


def test_a_run_and_a_folder_made_from_it_transcribe_alike(folder: Path, tmp_path: Path):
    to_run = Request(str(folder), str(tmp_path / "run"), check=True)
    outcome = conversion.convert(planning.prepare(to_run))
    assert "next to the PyTorch twin" in outcome.checked.method
    to_folder = Request(str(tmp_path / "run"), str(tmp_path / "back"), to="hf", check=False)
    conversion.convert(planning.prepare(to_folder))
    samples = speech(0.7)
    expected = jt.Transcriber.load(folder)(samples, timestamps=True)
    for place in (tmp_path / "run", tmp_path / "back"):
        assert jt.Transcriber.load(place)(samples, timestamps=True) == expected
    with pytest.raises(CheckpointError, match="no checkpoint for --weights 7"):
        jt.Transcriber.load(tmp_path / "run", "7")
    for name in ("model.safetensors", "preprocessor_config.json", "generation_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (folder / name).read_bytes(), name


# The command


@pytest.fixture
def console(capsys, monkeypatch):
    with runs.as_a_user():
        yield runs.Console(capsys, monkeypatch)


def save_wav(path: Path, samples: np.ndarray) -> Path:
    """Write samples as 16 bits at 16 kHz."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(sound.SAMPLE_RATE)
        file.writeframes((samples * 32768).astype("<i2").tobytes())
    return path


def test_the_command_prints_what_the_transcriber_returns(folder: Path, tmp_path: Path, console):
    path = save_wav(tmp_path / "talk.wav", speech(0.5))
    transcriber = jt.Transcriber.load(folder)
    text = transcriber(path).text.strip() + "\n"
    assert console.say("transcribe", path, "--run", folder) == (0, text, "")
    options = ("--language", "de", "--task", "translate", "--json", "--output", tmp_path / "out")
    assert console.say("transcribe", path, "--run", folder, *options) == (0, "", "")
    timed = transcriber(path, language="de", task="translate", timestamps=True)
    written = json.loads((tmp_path / "out").read_text(encoding="utf-8"))
    assert written["text"] == timed.text and written["language"] == "de"
    assert [tuple(each.values()) for each in written["segments"]] == [*timed.segments]
    settings = {"language": "de", "task": "translate", "return_timestamps": True}
    own = changed(folder, tmp_path / "own", **settings)
    lines = console.say("transcribe", path, "--run", own)[1].splitlines()
    assert len(lines) == len(timed.segments)
    for line, segment in zip(lines, timed.segments, strict=True):
        assert line.startswith("[00:00:0") and line.endswith(f"] {segment.text.strip()}")
    plain = transcriber(path, language="de", task="translate").text.strip()
    assert console.say("transcribe", path, "--run", own, "--no-timestamps")[1] == f"{plain}\n"


def test_the_options_of_the_command_are_those_of_the_transcriber(
    folder: Path, tmp_path: Path, console, monkeypatch
):
    def load(*arguments, **options):
        raise ConfigError(f"{arguments} {options}")

    monkeypatch.setattr(transcription.Transcriber, "load", load)
    options = ("--weights", "best", "--precision", "bfloat16", "--num-beams", "3")
    words = [f"('{folder}', 'best')", "'precision': <Precision.BFLOAT16", "'beam': 3"]
    path = save_wav(tmp_path / "talk.wav", speech(0.2))
    console.refused(2, words, "transcribe", path, "--run", folder, *options)


def test_the_example_of_the_page_runs(folder: Path, tmp_path: Path, monkeypatch, capsys):
    page = (runs.ROOT / "docs/speech.md").read_text(encoding="utf-8")
    code = page.split("```python\n")[1].split("```")[0]
    shutil.copytree(folder, tmp_path / "whisper-tiny")
    save_wav(tmp_path / "talk.wav", speech(0.5))
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    assert re.search(r"^ +0\.\d\d +0\.\d\d ", capsys.readouterr().out, re.MULTILINE)


REFUSED = {
    "a file that is text": (("transcribe", "TEXT", "--run", "FOLDER"), 3, "not a WAV file"),
    "no file": (("transcribe", "nowhere.wav", "--run", "FOLDER"), 3, "No such file"),
    "an unknown language": (
        ("transcribe", "SOUND", "--run", "FOLDER", "--language", "dee"),
        2,
        "unknown language 'dee' (did you mean 'de'?)",
    ),
    "translation of text": (("translate", "--run", "FOLDER"), 2, "reads sound"),
    "training": (("train", "--init", "FOLDER", "--run", "NEW"), 2, "training reads text"),
    "CTranslate2": (("convert", "FOLDER", "NEW", "--to", "ct2"), 2, "mel_bins=20"),
    "StableHLO": (("convert", "FOLDER", "NEW", "--to", "stablehlo"), 2, "reads sound"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_refused_in_one_line(name, folder: Path, tmp_path: Path, console):
    arguments, code, message = REFUSED[name]
    (tmp_path / "text.wav").write_text("no sound")
    paths = {
        "FOLDER": folder,
        "NEW": tmp_path / "new",
        "TEXT": tmp_path / "text.wav",
        "SOUND": save_wav(tmp_path / "talk.wav", speech(0.2)),
    }
    console.refused(code, [message], *(paths.get(word, word) for word in arguments))
    assert not (tmp_path / "new").exists()


# Settings of the folder


def changed(folder: Path, place: Path, **settings: Any) -> Path:
    """Return a copy of a folder with other settings of generation."""
    shutil.copytree(folder, place)
    data = json.loads((place / "generation_config.json").read_text())
    (place / "generation_config.json").write_text(json.dumps(data | settings))
    return place


@pytest.mark.filterwarnings("ignore:Passing .encoder_no_repeat_ngram_size")
def test_a_folder_decides_language_task_and_times_and_never_samples(folder: Path, tmp_path: Path):
    samples = speech(0.7)
    asked = jt.Transcriber.load(folder)(samples, language="de", task="translate", timestamps=True)
    plain = jt.Transcriber.load(folder)(samples)
    settings = {"language": "German", "task": "translate", "return_timestamps": True}
    sampling = {"do_sample": True, "temperature": 5.0, "top_k": 9, "top_p": 0.9}
    others = {"encoder_no_repeat_ngram_size": 2, "num_beams": 2, "num_return_sequences": 2}
    place = changed(folder, tmp_path / "own", **settings, **sampling, **others)
    transcriber = jt.Transcriber.load(place, num_beams=1)
    assert transcriber(samples) == asked != plain
    expected = theirs(place, samples, num_beams=1, num_return_sequences=1)["segments"][0]
    assert list(asked.tokens) == [i for each in expected for i in each["tokens"].tolist()]
    again = transcriber(samples, language=plain.language, task="transcribe", timestamps=False)
    assert again == plain
    assert transcriber.config.generation.constraints.encoder_no_repeat_ngram_size == 0


DE, YUE, TRANSLATE, TRANSCRIBE = "<|de|>", "<|yue|>", "<|translate|>", "<|transcribe|>"
FORCED = {"forced_decoder_ids": [[1, DE], [2, TRANSLATE]]}
# name: settings of generation_config.json, of config.json, and arguments of a call
PROMPTS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "language and task": ({"language": "de", "task": "translate"}, {}, {}),
    "a language": ({"language": DE}, {}, {}),
    "a language's name": ({"language": "Mandarin"}, {}, {"language": "Cantonese"}),
    "a task": ({"task": "translate"}, {}, {}),
    "another language than the folder's": ({"language": "de"}, {}, {"language": "yue"}),
    "forced tokens": (FORCED, {}, {}),
    "a forced task": ({"forced_decoder_ids": [[1, None], [2, TRANSLATE]]}, {}, {}),
    "forced in config.json": ({}, {"forced_decoder_ids": [[1, YUE], [2, TRANSLATE]]}, {}),
    "forced in both": (
        {"forced_decoder_ids": [[1, DE], [2, TRANSCRIBE], [3, "<|notimestamps|>"]]},
        {"forced_decoder_ids": [[1, YUE]]},
        {},
    ),
    "forced tokens and a call's task": (FORCED, {}, {"task": "transcribe"}),
    "forced tokens and a folder's language": (FORCED | {"language": "yue"}, {}, {}),
}


@pytest.mark.parametrize("times", [False, True])
@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_are_those_of_generate(name: str, times: bool, folder: Path, tmp_path: Path):
    """The language that transformers detects stands for the one that is detected here."""
    own, model, call = PROMPTS[name]
    words = transformers.WhisperTokenizer.from_pretrained(folder)
    ids, detected = words.convert_tokens_to_ids, 10**6

    def resolved(settings: dict[str, Any]) -> dict[str, Any]:
        pairs = settings.get("forced_decoder_ids", [])
        pairs = [[place, token and ids(token)] for place, token in pairs]
        return settings | ({"forced_decoder_ids": pairs} if pairs else {})

    lang_to_id = {token: ids(token) for token in ("<|en|>", DE, YUE)} | {"<|zh|>": 3}
    place = changed(
        folder, tmp_path / "own", **resolved(own), lang_to_id=lang_to_id, return_timestamps=times
    )
    file = place / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | resolved(model)))
    config = transformers.WhisperConfig.from_pretrained(place)
    generation = transformers.GenerationConfig.from_pretrained(place)
    whisper = transformers.WhisperForConditionalGeneration
    asked = {"language": None, "task": None} | call
    whisper._set_language_and_task(**asked, is_multilingual=None, generation_config=generation)
    theirs = whisper._retrieve_init_tokens(
        types.SimpleNamespace(device="cpu", detect_language=lambda **_: torch.tensor([detected])),
        None,
        batch_size=1,
        generation_config=generation,
        config=config,
        num_segment_frames=WINDOW,
        kwargs={},
    )
    settings = speech_config.read(place, huggingface_config.from_config(config.to_dict()))
    request = [detected if i is None else i for i in settings.request(*asked.values())]
    prompt = settings.prompt(ids("<|startoftranscript|>"), request, timestamps=settings.timestamps)
    assert list(prompt) == theirs[0].tolist()


def test_settings_that_are_not_supported_are_refused_by_key(folder: Path, tmp_path: Path):
    assert speech_config.LANGUAGE_CODES == TO_LANGUAGE_CODE
    whisper, features = "generation_config.json", "preprocessor_config.json"
    for file, key, value, message in (
        (whisper, "condition_on_prev_tokens", True, ""),
        (whisper, "logprob_threshold", 0.0, "=0.0 is not supported"),
        (whisper, "no_speech_threshold", 0, "=0 is not supported"),
        (whisper, "lang_to_id", ["de"], ""),
        (whisper, "lang_to_id", {"<|de|>": 99_999}, ": '<|de|>' is 99999"),
        (whisper, "lang_to_id", {"<|de|>": -3}, ": '<|de|>' is -3"),
        (whisper, "task_to_id", {"translate": True}, ": 'translate' is True"),
        (whisper, "no_timestamps_token_id", 10**6, ""),
        (whisper, "forced_decoder_ids", [[2, 5]], ""),
        (whisper, "max_length", 0, "=0 leaves no room"),
        (whisper, "min_length", 4, "=4 counts the prompt"),
        (whisper, "language", ["de"], r"=\['de'\] is not of type str"),
        (whisper, "return_timestamps", 1, "=1 is not of type bool"),
        (features, "hop_length", 80, ""),
        (whisper, "language", "fr", " 'fr'"),
        (whisper, "task", "sing", " 'sing'"),
        (whisper, "task_to_id", None, ": add the token"),
    ):
        pattern = f"{file}: (unknown |has lang_to_id and no )?{key}{message}"
        with pytest.raises(InputError, match=pattern):
            read_with(folder, tmp_path, file, **{key: value})
    both = tmp_path / "processor_config.json"
    both.write_text('{"feature_extractor": {"hop_length": 80}}')
    with pytest.raises(InputError, match=r"/processor_config.json: hop_length=80"):
        read_with(folder, tmp_path, whisper)
    both.write_text('{"feature_extractor": {"hop_length": 160}}')
    with pytest.raises(InputError, match=r"/preprocessor_config.json: n_fft=80"):
        read_with(folder, tmp_path, features, n_fft=80)


def test_only_the_first_forced_token_may_be_a_language_to_detect(folder: Path, tmp_path: Path):
    pairs, several = [[1, None], [2, None], [3, 5]], {"language": None, "task": None}
    read = functools.partial(read_with, folder, tmp_path, "generation_config.json")
    for more, forced in ((several, (None, 5)), ({"is_multilingual": False}, (5,))):
        assert read(forced_decoder_ids=pairs, **more).forced == forced


def read_with(folder: Path, place: Path, file: str, **settings: Any) -> speech_config.SpeechConfig:
    """Read the settings of a folder with other values in one of its files."""
    for name in ("config.json", "generation_config.json", "preprocessor_config.json"):
        data = json.loads((folder / name).read_text())
        (place / name).write_text(json.dumps(data | (settings if name == file else {})))
    config = json.loads((folder / "config.json").read_text())
    return speech_config.read(place, huggingface_config.from_config(config))


def test_max_new_tokens_wins_over_max_length_and_neither_is_the_model_s(
    folder: Path, tmp_path: Path
):
    for longest, new, expected in ((None, None, None), (9, None, 9), (None, 7, 7), (9, 7, 7)):
        lengths = {"max_length": longest, "max_new_tokens": new}
        settings = read_with(folder, tmp_path, "generation_config.json", **lengths)
        assert settings.generation.max_new_tokens == expected


def test_a_text_has_at_most_max_new_tokens_and_what_positions_reach(folder: Path):
    longest, short = (
        jt.Transcriber.load(folder, max_new_tokens=most)(speech(0.2)).tokens for most in (10_000, 3)
    )
    assert len(longest) > 3 and short == longest[:3]


def test_settings_that_are_off_are_read(folder: Path, tmp_path: Path):
    off = [("min_length", 0), ("logprob_threshold", None), ("language", None)]
    for key, value in (*off, ("condition_on_prev_tokens", False)):
        read_with(folder, tmp_path, "generation_config.json", **{key: value})
    ids = {"lang_to_id": {"<|de|>": 3}, "task_to_id": {"transcribe": 4}}
    for value, multilingual in (((), True), ((True,), True), ((False,), False), ((None,), False)):
        data = ids | dict(zip(["is_multilingual"], value, strict=False))
        expected = tuple(ids.values()) if multilingual else ({}, {})
        assert speech_config._ids(tmp_path, data, vocabulary=5) == expected
    both = changed(folder, tmp_path / "both", min_length=9, min_new_tokens=3)
    assert jt.Transcriber.load(both).config.generation.constraints.min_new_tokens == 3


def test_options_without_an_effect_are_refused(folder: Path):
    for options, message in (
        ({"n_best": 3, "num_beams": 3}, "num_return_sequences=3"),
        ({"forced_bos_token_id": 3}, "forced_bos_token_id"),
        ({"timestamps": True}, "unknown generation option 'timestamps'"),
    ):
        with pytest.raises(ConfigError, match=message):
            jt.Transcriber.load(folder, **options)
    transcriber = jt.Transcriber.load(folder, encoder_no_repeat_ngram_size=2)
    with pytest.raises(ConfigError, match="encoder_no_repeat_ngram_size=2"):
        transcriber(speech(0.5))
    text = jt.transformer.abstract(helpers.tiny())
    with pytest.raises(ConfigError, match="this model reads text"):
        jt.Transcriber(text, transcriber.tokenizer, transcriber.config)


def test_samples_that_are_no_sound_are_refused(folder: Path):
    transcriber = jt.Transcriber.load(folder)
    for samples, message in (
        (np.zeros(9, np.int16), r"not int16 \(9,\)"),
        (np.zeros((9, 2), np.float32), r"not float32 \(9, 2\)"),
        (np.array([0, np.nan], np.float32), "not finite"),
        (np.zeros(0, np.float32), "hold no sound"),
    ):
        with pytest.raises(InputError, match=message):
            transcriber(samples)


def test_the_presets_have_the_published_numbers_of_parameters():
    for size, parameters in (
        ("tiny_en", 37_760_256),
        ("base", 72_593_920),
        ("large_v3_turbo", 808_878_080),
    ):
        data = huggingface_config.to_config(jt.preset(f"whisper_{size}"))
        with torch.device("meta"):
            theirs = transformers.WhisperForConditionalGeneration(
                transformers.WhisperConfig(**data)
            )
        assert theirs.num_parameters() == parameters
    v3 = huggingface_config.to_config(jt.preset("whisper_large_v3"))
    assert v3 == data | {"decoder_layers": 32}
    large = huggingface_config.to_config(jt.preset("whisper_large"))
    assert {name: value for name, value in large.items() if value != v3[name]} == {
        "num_mel_bins": 80,
        "pad_token_id": 50257,
        "vocab_size": 51865,
    }
