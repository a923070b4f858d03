"""Targets of fuzzing: configurations, and the small files of a run or of a Hugging Face folder."""

import dataclasses
import io
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from campaigns.fuzzing import mutators
from campaigns.fuzzing.harness import Flat, Read, Target, file_reader
from jax_transformer.architectures import huggingface_config, registry
from jax_transformer.cli import config_file as cli_config
from jax_transformer.config import TransformerConfig
from jax_transformer.convert import models
from jax_transformer.errors import CheckpointError, ConfigError, InputError, UnsafeFileError
from jax_transformer.extras.serve import requests
from jax_transformer.extras.serve.requests import Limits
from jax_transformer.extras.speech import speech_config
from jax_transformer.formats import registry as formats
from jax_transformer.generate import transformers_config as generation
from jax_transformer.generate.generation_config import GenerationConfig
from jax_transformer.parity import golden
from jax_transformer.storage import checkpoint, huggingface_folder, safetensors
from jax_transformer.storage.run_folder import RunFolder, parsed
from jax_transformer.training.options import TrainOptions

_json = mutators.json_values


def _small() -> TransformerConfig:
    from jax_transformer.architectures import preset

    return preset("lesson10", source_vocab_size=11, target_vocab_size=13, d_model=8, num_layers=1)


def _attributes(model_type: str) -> dict[str, Any]:
    from jax_transformer.architectures import huggingface as families

    family = families.families()[model_type]
    sizes = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 11}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_layers": 1}
    sizes |= {"num_heads": 2, "d_kv": 4, "d_ff": 8, "num_decoder_layers": 1}
    sizes |= {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
    known = {name: value for name, value in sizes.items() if name in family.defaults}
    return {"model_type": model_type, **known, "use_cache": True}


# Hugging Face folders


def _folder_reader(model_type: str, name: str) -> Callable[[Path], Read]:
    """A folder whose other files are those of a model."""

    def begin(folder: Path) -> Read:
        (folder / huggingface_folder.CONFIG).write_text(json.dumps(_attributes(model_type)))
        safetensors.write(folder / huggingface_folder.SAFETENSORS, {"a": np.ones(3, np.float32)})
        return file_reader(name, lambda _: formats.open(folder))(folder)

    return begin


def _config_seeds() -> Iterator[bytes]:
    for model_type in ("bart", "marian", "t5", "m2m_100", "fsmt", "longt5", "whisper"):
        yield json.dumps(_attributes(model_type)).encode()


def _read_generation(folder: Path) -> Read:
    config = huggingface_config.from_config(_attributes("bart"))
    (folder / huggingface_folder.CONFIG).write_text(json.dumps(_attributes("bart")))

    def read(_: Path) -> None:
        data, path = generation.read(folder)
        generation.from_generation_config(data, config, where=str(path))

    return file_reader(huggingface_folder.GENERATION, read)(folder)


def _generation_seeds() -> Iterator[bytes]:
    yield b'{"num_beams": 4, "max_length": 20, "bad_words_ids": [[3]], "early_stopping": "never"}'
    values = {"do_sample": True, "top_k": 5, "temperature": 0.7, "eos_token_id": [2]}
    more = {"forced_bos_token_id": 3, "suppress_tokens": [1], "length_penalty": 1}
    yield json.dumps(values | more | {"transformers_version": "5"}).encode()


def _read_speech(name: str) -> Callable[[Path], Read]:
    def begin(folder: Path) -> Read:
        (folder / huggingface_folder.CONFIG).write_text(json.dumps(_attributes("whisper")))
        config = huggingface_config.from_config(_attributes("whisper"))
        (folder / huggingface_folder.GENERATION).write_bytes(next(_speech_seeds()))
        return file_reader(name, lambda _: speech_config.read(folder, config))(folder)

    return begin


def _speech_seeds() -> Iterator[bytes]:
    values: dict[str, Any] = {"is_multilingual": True, "lang_to_id": {"<|en|>": 3}}
    values |= {"task_to_id": {"transcribe": 4, "translate": 5}, "no_timestamps_token_id": 6}
    values |= {"max_initial_timestamp_index": 5, "forced_decoder_ids": [[1, 3], [2, None]]}
    yield json.dumps(values | {"max_length": 448, "return_timestamps": False}).encode()
    yield json.dumps(values | {"language": "en", "task": "translate"}).encode()


def _feature_seeds() -> Iterator[bytes]:
    yield b'{"feature_extractor": {"feature_size": 80, "sampling_rate": 16000, "n_fft": 400}}'


# The files of a run


def _model_config(path: Path) -> None:
    """A configuration, and the shapes of its weights."""
    config = parsed(path, TransformerConfig.from_json)
    registry.unchecked_table(config.architecture, config)
    models.read_config(path, ())


def _model_config_seeds() -> Iterator[bytes]:
    yield _small().to_json().encode()
    values = dataclasses.asdict(_small())
    few = ["source_vocab_size", "target_vocab_size", "d_model", "num_heads", "d_ff", "max_length"]
    few += ["encoder", "decoder"]
    yield json.dumps({name: values[name] for name in few}).encode()
    yield b'{"model_type": "marian"}'


def _run_reader(name: str, use: Callable[[RunFolder], object]) -> Callable[[Path], Read]:
    return file_reader(name, lambda path: use(RunFolder(path.parent)))


def _metrics_seeds() -> Iterator[bytes]:
    entry = {"step": 10, "loss": 2.5, "tokens_per_second": 3.0}
    lines = [entry, {"step": 10, "valid_loss": 2.0, "bleu": 0.5}, entry | {"step": 20}]
    yield "".join(f"{json.dumps(line)}\n" for line in lines).encode()


def _read_options(path: Path) -> None:
    with redirect_stderr(io.StringIO()):  # a renamed option is named there
        cli_config.read(TrainOptions, path)


def _option_seeds() -> Iterator[bytes]:
    yield b"steps: 100\nseed: 1\nmodel:\n  preset: lesson10\n  d_model: 8\n"
    yield b"optimizer: {learning_rate: 1e-3}\nbest_by: bleu\n"


def _read_manifest(folder: Path) -> Read:
    inner = folder / "5"
    inner.mkdir()
    (inner / "array").write_bytes(b"content")
    return file_reader(checkpoint.MANIFEST, lambda _: checkpoint.verify(folder, 5))(inner)


def _manifest_seeds() -> Iterator[bytes]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "array").write_bytes(b"content")
        checkpoint.write_manifest(folder, 5, {"figures": {"valid_loss": 2.0}})
        yield (folder / checkpoint.MANIFEST).read_bytes()


def _manifest(draw: Random, content: bytes, flat: Flat) -> bytes:
    """Change a value of a manifest, mostly with the manifest's own hash of what comes out."""
    changed = _json(draw, content, flat)
    if draw.random() < 0.3:
        return changed
    try:
        tree = json.loads(changed)
        tree.pop(checkpoint._OWN_HASH, None)
        return checkpoint._manifest_text(tree).encode()
    except (ValueError, TypeError, AttributeError, RecursionError):
        return changed


# Goldens


def _golden_seeds() -> Iterator[bytes]:
    arrays = {"batch/0": np.ones((2, 3), np.int32), "float64/a": np.ones(2)}
    description = {
        "version": golden.VERSION,
        "seed": 1,
        "source": {},
        "order": {"float64": ["a"]},
        "versions": {"torch": "2"},
        "sha256": golden._hashes(arrays),
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file")
        safetensors.write(path, arrays, {"golden": json.dumps(description)})
        yield path.read_bytes()


def _golden_description(draw: Random, content: bytes, flat: Flat) -> bytes:
    """Change the description in the header's metadata, or the header."""
    try:
        header = json.loads(content)
        text = header["__metadata__"]["golden"].encode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return flat(content)
    changed = _json(draw, text, flat).decode("utf-8", "replace")
    header["__metadata__"]["golden"] = changed
    return json.dumps(header).encode()


def _golden(draw: Random, content: bytes, flat: Flat) -> bytes:
    inner = _golden_description if draw.random() < 0.7 else _json
    return mutators.after_length(draw, content, flat, inner)


# Requests to the server


def _read_request(folder: Path) -> Read:
    """The body of a request to the server."""
    defaults, limits = GenerationConfig(), Limits()
    return lambda content: requests.parse(content, defaults, limits)


def _request_seeds() -> Iterator[bytes]:
    yield b'{"text": "A line."}'
    values = {"num_beams": 4, "length_penalty": 0.6, "early_stopping": "full", "max_new_tokens": 9}
    more = {"beam": 2, "attention": True, "timeout": 3.5, "temperature": None, "seed": 1}
    yield json.dumps({"text": ["A", "Größe"], **values, **more}).encode()
    yield json.dumps({"text": "a", "do_sample": True, "top_k": 5, "top_p": 0.5}).encode()


_CONFIG = (InputError, UnsafeFileError, ConfigError)
_CHECKPOINT = (InputError, UnsafeFileError, CheckpointError)

TARGETS = {
    "config.json": Target(
        file_reader("config.json", _model_config), _model_config_seeds, 10_000, 1, _json,
        refusals=_CONFIG,
        ratio=500, memory=20_000_000,
    ),
    "huggingface config": Target(
        _folder_reader("bart", huggingface_folder.CONFIG), _config_seeds, 5_000, 1, _json,
        ratio=500,
    ),
    "generation_config.json": Target(
        _read_generation, _generation_seeds, 15_000, 1, _json,
        tuple(f'"{name}"'.encode() for name in sorted(generation.KNOWN)), ratio=500,
    ),
    "speech generation": Target(
        _read_speech(huggingface_folder.GENERATION), _speech_seeds, 7_500, 1, _json,
        refusals=_CONFIG, ratio=500,
    ),
    "speech features": Target(
        _read_speech("preprocessor_config.json"), _feature_seeds, 5_000, 1, _json, ratio=500,
    ),
    "train_config.json": Target(
        _run_reader("train_config.json", RunFolder.best_first),
        lambda: [b'{"best_by": "bleu", "data": {"seed": 1}}'], 15_000, 1, _json, ratio=500,
    ),
    "metrics.jsonl": Target(
        _run_reader("metrics.jsonl", RunFolder.validations), _metrics_seeds, 15_000, 1,
        mutators.json_lines, ratio=500,
    ),
    "options": Target(
        file_reader("options.yaml", _read_options), _option_seeds, 5_000, 1, mutators.lines,
        refusals=_CONFIG, ratio=1000,
    ),
    "manifest": Target(
        _read_manifest, _manifest_seeds, 10_000, 1, _manifest, refusals=_CHECKPOINT, ratio=500,
    ),
    "golden": Target(
        file_reader("golden.safetensors", golden.load), _golden_seeds, 10_000, 1, _golden,
    ),
    "request": Target(
        _read_request, _request_seeds, 25_000, 2, _json,
        tuple(f'"{name}"'.encode() for name in sorted(requests.NAMES)), (requests.RequestError,),
        ratio=500,
    ),
}  # fmt: skip
