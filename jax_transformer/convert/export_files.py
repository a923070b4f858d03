"""The files next to the weights, in a new Hugging Face folder and in a run made from one."""

from collections.abc import Mapping
from typing import Any

from jax_transformer.architectures import huggingface_config as configs
from jax_transformer.architectures.registry import usual_length
from jax_transformer.config import TransformerConfig
from jax_transformer.convert import card
from jax_transformer.errors import InputError
from jax_transformer.formats.pretrained import Pretrained
from jax_transformer.generate import transformers_config as generation
from jax_transformer.generate.generation_config import GenerationConfig
from jax_transformer.storage import huggingface_folder as folders
from jax_transformer.storage import run_files, untrusted
from jax_transformer.storage.huggingface_folder import CARD, CONFIG, GENERATION
from jax_transformer.storage.tensors import Note, is_float


def for_run(source: Pretrained, dtype: str | None) -> dict[str, bytes]:
    """Return the files of a Hugging Face folder for a run.

    They are unchanged, except for the dtype in config.json if the weights are cast.
    """
    files = folders.contents(source.extra_files)
    if dtype is not None and CONFIG in files:
        files[CONFIG] = folders.to_json(_with_dtype(_model_config(source), {dtype}))
    return files


def _model_config(source: Pretrained) -> Mapping[str, Any]:
    return folders.configuration(source.extra_files[CONFIG].parent)


def for_huggingface(
    source: Pretrained, config: TransformerConfig, name: str, dtype: str | None
) -> dict[str, bytes]:
    """Return the files of a new Hugging Face folder.

    They are those of the source, unchanged, and those that are created or changed here.

    Args:
        source: the opened weights.
        config: their model.
        name: the name of the new folder.
        dtype: dtype to which the weights are cast; None if they are not.

    Raises:
        ConfigError: no Hugging Face family has this model.
    """
    files = folders.contents(source.extra_files)
    training = card.training_of(source)
    original = _model_config(source) if CONFIG in files else None
    data = configs.to_config(config, original)
    if dtype is not None or training is not None or original is None:
        stored = {tensor.dtype for tensor in source.tensors.values() if is_float(tensor.dtype)}
        data = _with_dtype(data, stored if dtype is None else {dtype})
    if data != original:
        files[CONFIG] = folders.to_json(data)
    if original is None:
        files[GENERATION] = folders.to_json(
            {"bos_token_id": config.bos_id}
            | generation.to_generation_config(GenerationConfig(), config)
        )
    if not any(name in files for name in folders.TOKENIZER):
        files |= _tokenizer(source, config)
    if CARD not in files:
        repeated = {note.name for note in source.derived}
        parameters = sum(
            tensor.size for name, tensor in source.tensors.items() if name not in repeated
        )
        files[CARD] = card.new(name, config.architecture, parameters, training).encode()
    elif training is not None:
        files[CARD] = card.appended(files[CARD].decode("utf-8", "replace"), name, training).encode()
    return files


def _with_dtype(data: Mapping[str, Any], dtypes: set[str]) -> dict[str, Any]:
    """Set the dtype in which transformers loads the weights by default.

    Its key is ``dtype``, or ``torch_dtype`` in files from before version 5.
    """
    if len(dtypes) != 1:
        return dict(data)
    name = "torch_dtype" if "torch_dtype" in data else "dtype"
    return {**data, name: next(iter(dtypes))}


def tokenizer_files(source: Pretrained) -> dict[str, bytes]:
    """Return the tokenizer's files of a run or of a Hugging Face folder, unchanged, by name."""
    paths = {name: path for name, path in source.extra_files.items() if name in folders.TOKENIZER}
    if source.path.is_dir():
        names = (run_files.SHARED_FILE, *run_files.SIDE_FILES)
        own = {name: source.path / name for name in names}
        paths = {name: path for name, path in own.items() if path.is_file()} or paths
    return folders.contents(paths)


def not_exported(source: Pretrained) -> tuple[Note, ...]:
    """List the two vocabularies of a run, for which transformers has no file."""
    names = [
        name
        for name in run_files.SIDE_FILES
        if source.path.is_dir() and (source.path / name).is_file()
    ]
    return tuple(
        Note(
            name,
            "one of two vocabularies, for which transformers has no file; train with "
            "--data.vocabularies shared",
        )
        for name in names
    )


def _tokenizer(source: Pretrained, config: TransformerConfig) -> dict[str, bytes]:
    """Return a run's own tokenizer as transformers' files; empty if the source has none.

    The tokenizer in these files appends the end token itself.
    """
    from jax_transformer.data import tokenizer

    path = source.path / run_files.SHARED_FILE
    if source.path.is_file() or not path.is_file():
        return {}
    own = tokenizer.Tokenizer.load(path)
    if (own.pad_id, own.eos_id) != (config.source_pad_id, config.eos_id):
        raise InputError(f"{path}: its special ids are not those of {source.path / CONFIG}")
    end = [{"SpecialToken": {"id": tokenizer.EOS, "type_id": 0}}]
    ends_line = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, *end],
        "pair": [
            {"Sequence": {"id": "A", "type_id": 0}},
            *end,
            {"Sequence": {"id": "B", "type_id": 0}},
            *end,
        ],
        "special_tokens": {
            tokenizer.EOS: {"id": tokenizer.EOS, "ids": [own.eos_id], "tokens": [tokenizer.EOS]}
        },
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": tokenizer.PAD,
        **({} if own.bos_id == own.pad_id else {"bos_token": tokenizer.BOS}),
        "eos_token": tokenizer.EOS,
        "unk_token": tokenizer.EOS,  # never met: every byte is a token
        "model_max_length": usual_length(config),
        "clean_up_tokenization_spaces": False,
    }
    data = untrusted.read_json(path) | {"post_processor": ends_line}
    return {
        run_files.SHARED_FILE: folders.to_json(data),
        "tokenizer_config.json": folders.to_json(settings),
    }
