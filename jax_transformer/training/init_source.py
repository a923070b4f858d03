"""The source of a fine-tuning run (``--init``): a Hugging Face folder or another run.

Its model, configuration and tokenizer are read only when the run starts. From the first checkpoint
on the run folder has all of them, and data.json records their hash.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import numpy as np

from jax_transformer.architectures import huggingface_config
from jax_transformer.config import RATES, Positions, TransformerConfig
from jax_transformer.data import encoding
from jax_transformer.data.encoding import Vocabulary, load_tokenizer
from jax_transformer.data.huggingface_tokenizer import HuggingFaceTokenizer
from jax_transformer.data.options import DataOptions
from jax_transformer.errors import ConfigError, InputError
from jax_transformer.formats import registry
from jax_transformer.formats.base import Pretrained
from jax_transformer.generate import transformers_config
from jax_transformer.generate.generation_config import GenerationConfig
from jax_transformer.storage import huggingface_folder, run_files, run_folder
from jax_transformer.storage.run_folder import RunFolder, parsed
from jax_transformer.storage.tensors import FLOATS
from jax_transformer.training.options import ModelOptions, Precision, TrainOptions


@dataclass(frozen=True)
class InitSource:
    """Model, tokenizer and files for a run. The weights are read only by ``arrays``."""

    path: Path
    config: TransformerConfig
    """The source's, with the options' dropout and precision and the tokenizer's start token."""
    tokenizer: Vocabulary
    sha256: str
    """Hash of configuration and weights."""
    dtypes: frozenset[str]
    """Dtypes of the weights; empty if the run is resumed."""
    files: Mapping[str, bytes]
    """Files of a Hugging Face folder that the run keeps, by name."""
    generation_config: GenerationConfig
    """Settings for validations: greedy, with the folder's constraints and target language."""
    opened: Pretrained | None = None
    """The opened weights; None if the run is resumed from its own."""

    def arrays(self) -> dict[str, np.ndarray]:
        """Return every array of the model in float32, by its path, on the host.

        Raises as :func:`.registry.open`.
        """
        assert self.opened is not None, "a resumed run has weights of its own"
        # Not to float32 for 16 bits: _widened recognises rounded positions by their dtype
        narrow = self.opened.format.name == "hf" and "float64" in self.dtypes
        arrays = self.opened.arrays(dtype="float32" if narrow else None)
        for name, array in arrays.items():
            arrays[name] = _widened(name, array, self.config)
        return arrays

    def lines(self) -> Iterable[str]:
        """Yield messages about the weights for the user."""
        others = sorted(self.dtypes - {"float32"})
        if others:
            yield f"{self.path}: its weights are {' and '.join(others)}, and train as float32"


def find(options: TrainOptions, folder: RunFolder) -> InitSource:
    """Open the source that the options name. A resumed run uses its own records.

    Raises ConfigError if the source is of a kind that cannot be trained, or if it has no tokenizer
    and the options have none, or both have one; InputError if the tokenizer does not belong to the
    model, or a file cannot be read.
    """
    assert options.init is not None
    if folder.data.exists() and folder.last_step() is not None:
        return _recorded(options, folder)
    opened = registry.open(options.init)
    if opened.format.name not in ("hf", "run"):
        raise ConfigError(
            f"init={options.init}: is a {opened.format.title}; give a Hugging Face folder, "
            "hf:owner/name or a run folder, or convert it to one"
        )
    return _of(opened, options)


def read_config(folder: str, options: ModelOptions) -> TransformerConfig:
    """Return the configuration of the model in ``folder``, with the options' dropout and precision.

    Only config.json is read: there need be no weights. Raises InputError naming the file.
    """
    data = huggingface_folder.configuration(Path(folder))
    if "model_type" in data:
        return _with_options(huggingface_config.from_config(data), options)
    run_folder.verify(Path(folder))
    file = Path(folder) / huggingface_folder.CONFIG
    return _with_options(parsed(file, TransformerConfig.from_json), options)


def _recorded(options: TrainOptions, folder: RunFolder) -> InitSource:
    sha256 = parsed(folder.data, lambda text: str(json.loads(text)["init_sha256"]))
    tokenizer = encoding.named_tokenizer(options.data) or load_tokenizer(folder.path)
    config = parsed(folder.config, TransformerConfig.from_json)
    greedy = _greedy(folder.path / huggingface_folder.IN_RUN, config, tokenizer)
    return InitSource(Path(options.init or ""), config, tokenizer, sha256, frozenset(), {}, greedy)


def _of(opened: Pretrained, options: TrainOptions) -> InitSource:
    assert opened.config is not None, "folders tell their model"
    opened.config.check_text("training")
    path, data = opened.path, options.data
    tokenizer = _tokenizer(opened, data)
    config = _fitted(opened.config, options.model, tokenizer, path)
    dtypes = set(FLOATS).intersection(map(attrgetter("dtype"), opened.tensors.values()))
    extra = path if opened.run is None else path / huggingface_folder.IN_RUN
    combined = hashlib.sha256()  # of the files' hashes, in order
    for each in (path / huggingface_folder.CONFIG, *opened.files):
        combined.update(bytes.fromhex(run_files.sha256(each)))
    return InitSource(
        path,
        config,
        tokenizer,
        combined.hexdigest(),
        frozenset(dtypes),
        _files(opened, config, tokenizer, data),
        _greedy(extra, config, tokenizer),
        opened,
    )


def _widened(name: str, array: np.ndarray, config: TransformerConfig) -> np.ndarray:
    """Cast an array to float32.

    Sinusoidal positions that were rounded to 16 bits are computed again in float32, as transformers
    does in the precision of the model.
    """
    from jax_transformer.nn.embeddings import position_sinusoids

    stack, _, rest = name.partition(".")
    if (
        rest == "positions.table"
        and getattr(config, stack).positions is Positions.SINUSOIDAL_STORED
    ):
        exact = position_sinusoids(config, getattr(config, stack)).astype(np.float32)
        if np.array_equal(exact.astype(array.dtype), array):
            return exact
    return array.astype(np.float32, copy=False)


def _tokenizer(opened: Pretrained, data: DataOptions) -> Vocabulary:
    """Return the model's own tokenizer, or the one in the options if it has none."""
    path, own, languages = opened.path, None, (data.source_lang, data.target_lang)
    if opened.has_tokenizer:
        own = opened.tokenizer(*(languages if opened.format.name == "hf" else ()))
        if opened.format.name != "hf" and isinstance(own, HuggingFaceTokenizer):
            own = own.with_languages(*languages)
    separate = encoding.named_tokenizer(data)
    if own is not None and separate is not None:
        raise ConfigError(
            f"data.tokenizer={data.tokenizer}: {path} has the tokenizer that its model was trained "
            "with; leave this out"
        )
    tokenizer = own or separate
    if tokenizer is None:
        raise ConfigError(
            f"{path} has no tokenizer; give data.tokenizer, the one that its model was trained with"
        )
    several = isinstance(tokenizer, HuggingFaceTokenizer) and tokenizer.languages
    if data.languages and not several:
        raise ConfigError(
            f"{', '.join(data.languages)}: the tokenizer of {path} knows no languages; "
            "leave this out"
        )
    return tokenizer


def _fitted(
    config: TransformerConfig, options: ModelOptions, tokenizer: Vocabulary, path: Path
) -> TransformerConfig:
    """Return the configuration with the options' dropout and precision.

    Its start token is the tokenizer's: for mBART, the target language.
    """
    source, target = tokenizer.source, tokenizer.target
    for side, own, size in (
        ("source", source.vocab_size, config.source_vocab_size),
        ("target", target.vocab_size, config.target_vocab_size),
    ):
        if own > size:
            raise InputError(
                f"{path}: the {side} tokenizer does not belong to this model (vocabulary {own:,}, "
                f"model {size:,})"
            )
    ids = {"source_pad_id": source.pad_id, "target_pad_id": target.pad_id, "eos_id": target.eos_id}
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        ids["bos_id"] = target.bos_id
    wrong = [
        f"{name} is {value}, the model's is {getattr(config, name)}"
        for name, value in ids.items()
        if value != getattr(config, name)
    ]
    if wrong:
        raise InputError(f"{path}: the tokenizer does not belong to this model: {', '.join(wrong)}")
    return dataclasses.replace(_with_options(config, options), bos_id=target.bos_id)


def _with_options(config: TransformerConfig, options: ModelOptions) -> TransformerConfig:
    precision = None if options.precision is Precision.FLOAT32 else options.precision.value
    rates = {name: getattr(options, name) for name in RATES if getattr(options, name) is not None}
    return dataclasses.replace(config, compute_dtype=precision, **rates)


def _files(
    opened: Pretrained, config: TransformerConfig, tokenizer: Vocabulary, data: DataOptions
) -> dict[str, bytes]:
    """Return the files for the run folder; only generation_config.json is changed.

    It gets the target language of the training and, if it sets no length, the length of the
    longest target: transformers would stop after twenty tokens.
    """
    files = huggingface_folder.contents(opened.extra_files)
    if huggingface_folder.CONFIG not in files:
        return files
    settings, _ = transformers_config.read(opened.extra_files[huggingface_folder.CONFIG].parent)
    changed: dict[str, int] = {}
    if isinstance(tokenizer, HuggingFaceTokenizer) and tokenizer.target_lang is not None:
        forced = tokenizer.forced_bos_id()
        changed = {"decoder_start_token_id": tokenizer.bos_id}
        changed |= {} if forced is None else {"forced_bos_token_id": forced}
    if not transformers_config.has_length(settings):
        changed["max_length"] = encoding.limits(data, config)[1] + 1  # with the start token
    if changed:
        ids = {
            "decoder_start_token_id": config.bos_id,
            "eos_token_id": config.eos_id,
            "pad_token_id": config.target_pad_id,
        }
        ids = {} if huggingface_folder.GENERATION in files else ids
        content = huggingface_folder.to_json({**ids, **settings, **changed})
        files[huggingface_folder.GENERATION] = content
    return files


def _greedy(path: Path, config: TransformerConfig, tokenizer: Vocabulary) -> GenerationConfig:
    """Return a folder's generation settings with greedy search.

    Raises InputError naming the file if it has unsupported settings.
    """
    if not (path / huggingface_folder.CONFIG).is_file():
        return GenerationConfig()
    settings = transformers_config.of_folder(path, config, tokenizer)
    return GenerationConfig(
        constraints=settings.constraints,
        forced_bos_token_id=settings.forced_bos_token_id,
        decoder_start_token_id=settings.decoder_start_token_id,
        eos_token_id=settings.eos_token_id,
    )
