"""A Hugging Face folder as one end of a conversion: its weights as those of the whole module, and the files that go with them."""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jax_transformer.architectures import huggingface_config as configs
from jax_transformer.architectures import huggingface_state as states
from jax_transformer.architectures.huggingface import published_codes, usual_length
from jax_transformer.config import TransformerConfig, codec
from jax_transformer.convert import card
from jax_transformer.convert.card import Training
from jax_transformer.convert.planning import Note
from jax_transformer.data.options import DataOptions
from jax_transformer.errors import InputError
from jax_transformer.storage import hub, json_text
from jax_transformer.storage import huggingface as folders
from jax_transformer.storage.huggingface import CARD, CONFIG, GENERATION, IN_RUN, Folder
from jax_transformer.storage.run_folder import RunFolder, parsed
from jax_transformer.storage.tensors import TensorInfo, is_float

if TYPE_CHECKING:
    from jax_transformer.convert.sources import Source

# A folder that was loaded from this machine is named by its path there; a step of a training is not on the hub
_HUB_NAME = re.compile(r"(?!.*checkpoint-\d+$)[A-Za-z0-9][\w-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


@dataclass(frozen=True)
class Found:
    """A folder, its model, and its tensors under all names of the module's ``state_dict()``, those that the file leaves out included."""

    folder: Folder
    config: TransformerConfig
    held: Mapping[str, TensorInfo]
    tensors: Mapping[str, TensorInfo]

    @property
    def derived(self) -> tuple[Note, ...]:
        """What is not in the file and yet in the model."""
        return tuple(
            Note(name, states.why_completed(name, self.config))
            for name in self.tensors
            if name not in self.held
        )

    @property
    def dropped(self) -> tuple[Note, ...]:
        """What is in the file and not in the model."""
        return tuple(
            Note(name, states.why_dropped(name, self.config))
            for name in self.held
            if name not in self.tensors
        )

    def read(self) -> dict[str, np.ndarray]:
        return states.complete(folders.read(self.folder), self.config)


def find(path: Path) -> Found:
    """What lies at ``path``. Raises InputError, naming the folder's file, where it is no model that is known."""
    found = folders.find(path)
    held = folders.describe(found)
    try:
        config = configs.from_config(found.data, names=held, same=partial(folders.same, found))
    except InputError as error:
        raise InputError(f"{found.path}/{error}") from None
    return Found(found, config, held, states.complete(held, config))


def from_json(path: Path, names: Collection[str]) -> TransformerConfig | None:
    """The model of transformers' config.json, for tensors of these names; None where the file is one of this project's."""
    data = json_text.read(path)
    return (
        configs.from_config(data, names=names)
        if isinstance(data, dict) and configs.is_huggingface(data)
        else None
    )


# What goes with a run's weights


def with_files(source: "Source", folder: RunFolder, step: int) -> "Source":
    """The weights of a run, with the files that it keeps of the Hugging Face folder it came from, and what it tells of its training."""
    beside = folder.path / IN_RUN
    kept = tuple(name for name in folders.KEPT if (beside / name).is_file())
    training = _training(folder, step) if folder.train_config.is_file() else None
    return replace(source, beside=beside if kept else None, kept=kept, training=training)


def _training(folder: RunFolder, step: int) -> Training:
    options = folder.train_options()
    init = options.get("init")
    data = parsed(
        folder.train_config,
        lambda text: codec.from_dict(DataOptions, json.loads(text).get("data", {}), "data"),
    )
    on_hub = data.dataset is not None and not (
        Path(data.dataset).exists() or data.dataset.startswith(("/", ".", "~"))
    )
    found = data.dataset if data.dataset is None or on_hub else Path(data.dataset).name
    names, valid = (
        tuple(dict.fromkeys(Path(name).name for name in files)) or (found or data.kind.value,)
        for files in (
            (*data.train_source, *data.train_target, *data.train),
            (*data.valid_source, *data.valid_target, *data.valid),
        )
    )
    flags = {
        name: value
        for group in ("model", "optimizer")
        for name, value in _dotted(group, options.get(group))
        if value is not None
    }
    flags |= {name: options[name] for name in ("steps", "seed") if options.get(name) is not None}
    counts = {
        name: value
        for name, value in _json(folder.data).items()
        if name in ("train_pairs", "valid_pairs")
    }
    asked = (data.source_lang, data.target_lang) if data.source_lang and data.target_lang else None
    return Training(
        step,
        names,
        counts,
        flags,
        folder.validations().get(step, {}),
        _languages(data),
        asked,
        begun_from="" if init is None else _on_hub(init) or Path(init).absolute().name,
        base_model=_base_model(folder, init),
        datasets=names if on_hub else (),
        validated_on=valid,
    )


def _languages(data: DataOptions) -> tuple[str, ...]:
    """As the tokenizer was told, else as the files are named by custom: train.en and train.de.gz."""
    if data.builtin:
        return ("en", "de", "fr", "es")
    found = []
    for told, files in (
        (data.source_lang, data.train_source),
        (data.target_lang, data.train_target),
    ):
        named = {Path(name.removesuffix(".gz")).suffix[1:] for name in files}
        code = told or (named.pop() if len(named) == 1 and named <= published_codes() else None)
        found += [code] if code else []
    return tuple(found)


def _on_hub(init: str) -> str:
    return init.removeprefix(hub.PREFIX).partition("@")[0] if hub.is_source(init) else ""


def _base_model(folder: RunFolder, init: str | None) -> str:
    """Its name on the hub: of ``hf:owner/name``, of the run that it is, or of the folder's config.json."""
    if init is None:
        return ""
    before = RunFolder(Path(init))
    if (
        not hub.is_source(init)
        and before.train_config.is_file()
        and before.path.resolve() != folder.path.resolve()
    ):
        return _base_model(before, before.train_options().get("init"))
    told = _json(folder.path / IN_RUN / CONFIG).get("_name_or_path")
    return _on_hub(init) or (told if isinstance(told, str) and _HUB_NAME.fullmatch(told) else "")


def _json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None


def _dotted(prefix: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [
            pair for name, inner in value.items() for pair in _dotted(f"{prefix}.{name}", inner)
        ]
    return [(prefix, value)]


# What an export writes beside the weights


def kept(source: "Source", dtype: str | None) -> dict[str, bytes]:
    """The files that a run keeps of a folder, verbatim but for the dtype of weights that were cast."""
    assert source.beside is not None, "asked of a folder, or of a run that has some"
    files = folders.contents(source.beside, source.kept)
    if dtype is not None and CONFIG in files:
        files[CONFIG] = folders.text(_with_dtype(folders.configuration(source.beside), {dtype}))
    return files


def exported(
    source: "Source", config: TransformerConfig, name: str, dtype: str | None
) -> dict[str, bytes]:
    """The files of a new Hugging Face folder: those that were kept, verbatim, and those that are made or changed.

    ``name`` is the folder's; ``dtype`` is what the weights are cast to. Raises ConfigError where no model of the families is this one.
    """
    files = folders.contents(source.beside, source.kept) if source.beside is not None else {}
    carried = (
        folders.configuration(source.beside)
        if source.beside is not None and CONFIG in files
        else None
    )
    data = configs.to_config(config, carried)
    if dtype is not None or source.training is not None or carried is None:
        data = _with_dtype(
            data,
            {dtype}
            if dtype is not None
            else {found.dtype for found in source.tensors.values() if is_float(found.dtype)},
        )
    if data != carried:
        files[CONFIG] = folders.text(data)
    if carried is None:
        files[GENERATION] = folders.text(_generation(config))
    if not any(name in files for name in folders.TOKENIZER):
        files |= _tokenizer(source, config)
    if CARD not in files:
        numbers = sum(
            int(np.prod(found.shape, dtype=object))
            for name, found in source.tensors.items()
            if name not in _repeated(source)
        )
        files[CARD] = card.new(name, config.architecture, numbers, source.training).encode()
    elif source.training is not None:
        files[CARD] = card.appended(
            files[CARD].decode("utf-8", "replace"), name, source.training
        ).encode()
    return files


def _repeated(source: "Source") -> set[str]:
    return {note.name for note in source.derived}


def _with_dtype(data: Mapping[str, Any], dtypes: set[str]) -> dict[str, Any]:
    """The dtype that transformers gives the parameters where it is not told another; ``torch_dtype`` in files from before its version 5."""
    if len(dtypes) != 1:
        return dict(data)
    name = "torch_dtype" if "torch_dtype" in data else "dtype"
    return {**data, name: next(iter(dtypes))}


def _generation(config: TransformerConfig) -> dict[str, Any]:
    """How transformers decodes as this project does: from the model's start token to its end token."""
    ids = {
        "decoder_start_token_id": config.bos_id,
        "eos_token_id": config.eos_id,
        "pad_token_id": config.target_pad_id,
    }
    return {"bos_token_id": config.bos_id, **ids, "max_length": usual_length(config)}


def left_behind(source: "Source") -> tuple[Note, ...]:
    """The two vocabularies of a run, for which transformers has no such file."""
    from jax_transformer.data import run_tokenizer

    there = [
        name
        for name in run_tokenizer.SIDE_FILES
        if source.path.is_dir() and (source.path / name).is_file()
    ]
    return tuple(
        Note(
            name,
            "one of two vocabularies, for which transformers has no file; train with --data.vocabularies shared",
        )
        for name in there
    )


def _tokenizer(source: "Source", config: TransformerConfig) -> dict[str, bytes]:
    """A run's own tokenizer as transformers loads it, which ends each line itself; none where the source has none."""
    from jax_transformer.data import run_tokenizer, tokenizer

    path = source.path / run_tokenizer.SHARED_FILE
    if source.path.is_file() or not path.is_file():
        return {}
    found = tokenizer.Tokenizer.load(path)
    if (found.pad_id, found.eos_id) != (config.source_pad_id, config.eos_id):
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
            tokenizer.EOS: {"id": tokenizer.EOS, "ids": [found.eos_id], "tokens": [tokenizer.EOS]}
        },
    }
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": tokenizer.PAD,
        "bos_token": tokenizer.BOS,
        "eos_token": tokenizer.EOS,
        "model_max_length": usual_length(config),
        "clean_up_tokenization_spaces": False,
    }
    data = json_text.read(path) | {"post_processor": ends_line}
    return {
        run_tokenizer.SHARED_FILE: folders.text(data),
        "tokenizer_config.json": folders.text(about),
    }
