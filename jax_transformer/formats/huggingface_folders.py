"""A folder of Hugging Face transformers: config.json, weights in one file or several, tokenizer."""

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jax_transformer.architectures import huggingface_config, huggingface_state
from jax_transformer.architectures.registry import usual_length
from jax_transformer.config import TransformerConfig
from jax_transformer.errors import InputError
from jax_transformer.formats import model_card, registry
from jax_transformer.formats.base import Check, Destination, Format, Layout, Pretrained, Written
from jax_transformer.formats.contents import Contents
from jax_transformer.generate import transformers_config
from jax_transformer.generate.generation_config import GenerationConfig
from jax_transformer.storage import huggingface_folder as folder
from jax_transformer.storage import read_back, run_files, safetensors, tensors, untrusted
from jax_transformer.storage.huggingface_folder import CARD, CONFIG, GENERATION, TOKENIZER, Folder
from jax_transformer.storage.tensors import LazyState, Note


class HuggingFaceWeights(Pretrained):
    """The weights of a folder, whose tokenizer is transformers'."""

    @property
    def has_tokenizer(self) -> bool:
        return not self.extra_files.keys().isdisjoint(TOKENIZER)

    def files_layout(self) -> Mapping[str, str]:
        return folder.layout(self.files)

    def tokenizer(self, source_lang: str | None = None, target_lang: str | None = None) -> Any:
        from jax_transformer.data import huggingface_tokenizer

        return huggingface_tokenizer.load_huggingface(
            self.path, source_lang=source_lang, target_lang=target_lang
        )


class HuggingFaceFolder(Format):
    name, title, mark = "hf", "Hugging Face folder", f"{CONFIG} with model_type"
    write_options = ("shard_size",)
    has_extra_files = True

    def recognises(self, path: Path) -> bool:
        return (path / CONFIG).is_file() and "model_type" in folder.configuration(path)

    def open(self, path: Path, **options: Any) -> Pretrained:
        """Open the tensors under all names of ``state_dict()``, also those that no file has."""
        opened = folder.find(path)
        scanned = scan(opened)
        stored = {name: tensor.info for name, tensor in scanned.items()}

        def same(one: str, other: str) -> bool:
            first, second = scanned[one], scanned[other]
            return first is second or tensors.same(first.read(), second.read())

        try:
            config = huggingface_config.from_config(opened.data, names=stored, same=same)
        except InputError as error:
            raise InputError(f"{path}/{error}") from None
        complete = huggingface_state.complete(stored, config)
        dropped = [
            Note(name, huggingface_state.why_dropped(name, config))
            for name in stored
            if name not in complete
        ]
        return HuggingFaceWeights(
            self,
            path,
            f"{path} ({opened.weights.name})",
            complete,
            lambda: huggingface_state.complete(scanned, config),
            config,
            weights=opened.weights.name,
            files=opened.files,
            extra_files={name: path / name for name in opened.extra_names},
            dropped=(*dropped, *itertools.starmap(Note, opened.others)),
            derived=completed_notes(complete, stored, config),
        )

    def inspect(self, path: Path) -> Contents:
        opened = folder.find(path)
        contents = [_weights_format(opened).inspect(file) for file in opened.shards]
        hashes = {name: digest for content in contents for name, digest in content.sha256.items()}
        values = {
            name: value
            for name, value in opened.data.items()
            if value is not None and not isinstance(value, dict | list)
        }
        paths = [*opened.files, *(path / name for name in opened.extra_names)]
        return Contents(
            str(path),
            self.title,
            {name: tensor.info for name, tensor in scan(opened).items()},
            {file.name: hashes.get(file.name) or run_files.sha256(file) for file in paths},
            values,
            [names for content in contents for names in content.ties],
        )

    def check_options(self, to: Destination) -> None:
        _shard_size(to)

    def check(self, to: Destination) -> None:
        safetensors.check_dtypes(to.path, to.source.tensors if to.source else {})

    def is_written(self, name: str) -> bool:
        return folder.is_written(name)

    def files(self, to: Destination) -> Mapping[str, bytes]:
        """Return the folder's files. Raises ConfigError if no Hugging Face family has the model."""
        source, config = to.source, to.config
        assert source is not None and config is not None  # a folder is not a copy of a file
        files = folder.contents(source.extra_files)
        training = model_card.training_of(source)
        original = None
        if CONFIG in files:
            original = folder.configuration(source.extra_files[CONFIG].parent)
        data = huggingface_config.to_config(config, original)
        if to.dtype is not None:
            data = folder.with_dtype(data, {to.dtype})
        elif training is not None or original is None:
            dtypes = {tensor.dtype for tensor in source.tensors.values()}
            data = folder.with_dtype(data, dtypes.intersection(tensors.FLOATS))
        if data != original:
            files[CONFIG] = folder.to_json(data)
        if original is None:
            settings = transformers_config.to_generation_config(GenerationConfig(), config)
            files[GENERATION] = folder.to_json({"bos_token_id": config.bos_id} | settings)
        if files.keys().isdisjoint(TOKENIZER):
            files |= _own_tokenizer(source, config)
        name = to.path.absolute().name
        if CARD not in files:
            derived = {note.name for note in source.derived}
            parameters = sum(x.size for name, x in source.tensors.items() if name not in derived)
            card = model_card.new(name, config.architecture, parameters, training)
            files[CARD] = card.encode()
        elif training is not None:
            card = model_card.appended(files[CARD].decode("utf-8", "replace"), name, training)
            files[CARD] = card.encode()
        return files

    def layout(self, to: Destination, names: Iterable[str]) -> Layout:
        config, path = to.config, to.source.path if to.source else Path()
        assert config is not None  # a folder is not a copy of a file
        every = dict.fromkeys(names)
        notes = completed_notes(every, huggingface_state.saved(every, config), config)
        reason = (
            "one of two vocabularies, for which transformers has no file; train with"
            " --data.vocabularies shared"
        )
        vocabularies = [name for name in run_files.SIDE_FILES if (path / name).is_file()]
        return Layout(
            computed={note.name: note.reason for note in notes},
            notes=tuple(Note(name, reason) for name in vocabularies),
        )

    def stored(self, state: LazyState, config: TransformerConfig) -> LazyState:
        return huggingface_state.saved(state, config)

    def completed(
        self, read_back: LazyState, state: LazyState, config: TransformerConfig, tied: Iterable[str]
    ) -> LazyState:
        """Return the tensors under all names of the module. Position tables that transformers
        computes are those of ``state``, which were compared with the computed ones.
        """
        ties, completed = set(tied), huggingface_state.complete(read_back, config)
        for name, tensor in state.items():
            if name not in read_back and name not in ties:
                completed[name] = tensor
        return completed

    def write(self, to: Destination, state: LazyState, check: Check) -> Written:
        with read_back.new_folder(to.path, state) as new:
            size, parameters, layout = _shard_size(to), None, None
            if to.config is not None:
                parameters = huggingface_state.parameters(new.state, to.config)
            if to.source is not None and to.options.get("shard_size") is None:
                layout = to.source.files_layout()
            folder.write(
                new.path, new.state, to.files, shard_size=size, parameters=parameters, layout=layout
            )
            check(scan(folder.find(new.path)))
            new.compare_files(to.files)
            return Written(new.sha256())


def scan(opened: Folder) -> LazyState:
    """Return every stored tensor, unread. Raises InputError if index and files do not agree."""
    if ".safetensors" in opened.weights.suffixes:  # as almost always; no other format is loaded
        return safetensors.scan(opened.weights)
    return _weights_format(opened).scan(opened.weights)


def _weights_format(opened: Folder) -> Format:
    """Return the format of the file of weights."""
    suffix = Path(opened.weights.name.removesuffix(folder.INDEX)).suffix
    return registry.of_suffix(opened.weights, suffix)


def completed_notes(
    complete: Mapping[str, Any], stored: Mapping[str, Any], config: TransformerConfig
) -> tuple[Note, ...]:
    """Return notes on the tensors that transformers computes or ties."""
    missing = [name for name in complete if name not in stored]
    return tuple(Note(name, huggingface_state.why_completed(name, config)) for name in missing)


def _shard_size(to: Destination) -> int:
    size = to.options.get("shard_size")
    return folder.SHARD_SIZE if size is None else folder.size(size)


def _own_tokenizer(source: Pretrained, config: TransformerConfig) -> dict[str, bytes]:
    """Return a run's own tokenizer, which appends the end token, as transformers' files."""
    from jax_transformer.data import tokenizer

    path = source.path / run_files.SHARED_FILE
    if source.path.is_file() or not path.is_file():
        return {}
    own = tokenizer.Tokenizer.load(path)
    if (own.pad_id, own.eos_id) != (config.source_pad_id, config.eos_id):
        raise InputError(f"{path}: its special ids do not belong to {source.path / CONFIG}")
    end = {"SpecialToken": {"id": tokenizer.EOS, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    ends_line = {
        "type": "TemplateProcessing",
        "single": [first, end],
        "pair": [first, end, second, end],
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
    files = {run_files.SHARED_FILE: data, "tokenizer_config.json": settings}
    return {name: folder.to_json(content) for name, content in files.items()}


FORMAT = HuggingFaceFolder()
