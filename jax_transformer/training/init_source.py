"""What a run begins from where ``--init`` names it: the model, configuration and tokenizer of a Hugging Face folder or of another run.

It is read at the run's start alone. From the first checkpoint on the run folder has all of it, and data.json records the hash of what it was.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jax_transformer import pretrained
from jax_transformer.config import Positions, TransformerConfig
from jax_transformer.data import run_tokenizer
from jax_transformer.data.huggingface_tokenizer import HuggingFaceTokenizer
from jax_transformer.data.options import DataOptions
from jax_transformer.data.tokenizer import Tokenizer, TokenizerPair
from jax_transformer.errors import ConfigError, InputError
from jax_transformer.generate import huggingface
from jax_transformer.generate.generation_config import GenerationConfig
from jax_transformer.pretrained import Pretrained
from jax_transformer.storage import huggingface as folders
from jax_transformer.storage.kinds import Kind
from jax_transformer.storage.run_folder import RunFolder, parsed
from jax_transformer.storage.tensors import is_float
from jax_transformer.training import vocabulary
from jax_transformer.training.options import RATES, ModelOptions, Precision, TrainOptions

if TYPE_CHECKING:
    from jax_transformer.transformer import Transformer

Vocabulary = Tokenizer | TokenizerPair


@dataclass(frozen=True)
class InitSource:
    """Everything that a run takes over; the weights are read when they are asked for."""

    path: Path
    config: TransformerConfig
    """With the options' dropouts and precision, and with the tokenizer's start of a target."""
    tokenizer: Vocabulary
    sha256: str
    """Of configuration and weights."""
    dtypes: frozenset[str]
    """Of the weights; not known any more of a run that goes on."""
    files: Mapping[str, bytes]
    """What the run keeps of a Hugging Face folder, by name."""
    decoding: GenerationConfig
    """How translations are made at validations: greedily, under the folder's constraints and into the tokenizer's language."""
    opened: Pretrained | None = None
    """The weights; None in a run that goes on from its own."""

    def model(self) -> "Transformer":
        """The model, every array in float32 and with memory of its own. Raises as the readers of its files do."""
        import jax.numpy as jnp

        from jax_transformer import transformer

        assert self.opened is not None, "a run that goes on has weights of its own"
        # 16 bits are not widened on the way: the positions among them would not be known as rounded
        narrow = self.opened.kind is Kind.HUGGINGFACE and "float64" in self.dtypes
        loaded = self.opened.model(dtype="float32" if narrow else None)
        arrays = {name: np.asarray(array) for name, array in transformer.flatten(loaded).items()}
        return transformer.unflatten(
            self.config,
            {name: jnp.array(_widened(name, x, self.config)) for name, x in arrays.items()},
        )

    def lines(self) -> Iterable[str]:
        """What the person who trains should know of it."""
        others = sorted(self.dtypes - {"float32"})
        if others:
            yield f"{self.path}: its weights are {' and '.join(others)}, and train as float32"


def find(options: TrainOptions, folder: RunFolder) -> InitSource | None:
    """What the options name, or what a run that has a checkpoint took of it at its start; None where they name nothing.

    Raises ConfigError for what cannot be begun from, or where the tokenizer is not given or is given twice; InputError where the tokenizer is not
    the model's, and as the readers of the files do.
    """
    if options.init is None:
        return None
    if folder.data.exists() and folder.last_step() is not None:
        return _taken(options, folder)
    opened = pretrained.open(options.init)
    if opened.kind not in (Kind.HUGGINGFACE, Kind.RUN):
        raise ConfigError(
            f"init={options.init}: is a {opened.kind.value}; give a Hugging Face folder, hf:owner/name or a run folder, or convert it to one"
        )
    return _of(opened, options)


def _taken(options: TrainOptions, folder: RunFolder) -> InitSource:
    recorded = parsed(folder.data, lambda text: str(json.loads(text)["init_sha256"]))
    words = _given(options.data) or run_tokenizer.load_folder(folder.path)
    config = parsed(folder.config, TransformerConfig.from_json)
    greedy = _greedy(folder.path / folders.IN_RUN, config, words)
    return InitSource(Path(options.init or ""), config, words, recorded, frozenset(), {}, greedy)


def _of(opened: Pretrained, options: TrainOptions) -> InitSource:
    assert opened.config is not None, "folders tell their model"
    path, data = opened.path, options.data
    tokenizer = _tokenizer(_own_tokenizer(opened, data), options, path)
    config = _fitted(opened.config, options.model, tokenizer, path)
    dtypes = {tensor.dtype for tensor in opened.tensors.values() if is_float(tensor.dtype)}
    extra = path if opened.run is None else path / folders.IN_RUN
    return InitSource(
        path,
        config,
        tokenizer,
        _sha256([path / folders.CONFIG, *opened.files]),
        frozenset(dtypes),
        _files(opened, config, tokenizer, data),
        _greedy(extra, config, tokenizer),
        opened,
    )


def _own_tokenizer(opened: Pretrained, data: DataOptions) -> Vocabulary | None:
    if not opened.has_tokenizer:
        return None
    if opened.kind is Kind.HUGGINGFACE:
        return opened.tokenizer(data.source_lang, data.target_lang)
    own = opened.tokenizer()
    if isinstance(own, HuggingFaceTokenizer):
        return own.with_languages(data.source_lang, data.target_lang)
    return own


def _widened(name: str, array: np.ndarray, config: TransformerConfig) -> np.ndarray:
    """An array in float32. Sines and cosines that were rounded to 16 bits are those of float32 again: transformers, to which the model may go back,
    computes them in the precision of the model."""
    from jax_transformer.nn.positions import sinusoids

    stack, _, rest = name.partition(".")
    if (
        array.dtype.itemsize == 2
        and rest == "positions.table"
        and getattr(config, stack).positions is Positions.SINUSOIDAL_STORED
    ):
        exact = np.asarray(sinusoids(*array.shape, layout=getattr(config, stack).sinusoids)).astype(
            np.float32
        )
        if np.array_equal(exact.astype(array.dtype), array):
            return exact
    return array.astype(np.float32)


def _given(data: DataOptions) -> Vocabulary | None:
    if data.tokenizer is None:
        return None
    given = Tokenizer.load(data.tokenizer)
    return (
        given
        if data.target_tokenizer is None
        else TokenizerPair(given, Tokenizer.load(data.target_tokenizer))
    )


def _tokenizer(own: Vocabulary | None, options: TrainOptions, path: Path) -> Vocabulary:
    """The tokenizer that is there, or the one that is given where there is none."""
    data, given = options.data, _given(options.data)
    if own is not None and given is not None:
        raise ConfigError(
            f"data.tokenizer={data.tokenizer}: {path} has a tokenizer, which its model was trained with; leave this out"
        )
    words = own or given
    if words is None:
        raise ConfigError(
            f"{path} has no tokenizer; give data.tokenizer, the one that its model was trained with"
        )
    named = [
        f"data.{name}" for name in ("source_lang", "target_lang") if getattr(data, name) is not None
    ]
    if named and not (isinstance(words, HuggingFaceTokenizer) and words.languages):
        raise ConfigError(
            f"{', '.join(named)}: the tokenizer of {path} knows no languages; leave this out"
        )
    return words


def _fitted(
    config: TransformerConfig, options: ModelOptions, words: Vocabulary, path: Path
) -> TransformerConfig:
    """The configuration with what may be changed, and with the tokenizer's start of a target, which of mBART is the target's language."""
    source, target = words.source, words.target
    for side, held, size in (
        ("source", source, config.source_vocab_size),
        ("target", target, config.target_vocab_size),
    ):
        if held.vocab_size > size:
            raise InputError(
                f"{path}: the {side} tokenizer has {held.vocab_size} tokens and the model {size}: it is of another model"
            )
    ids = {"source_pad_id": source.pad_id, "target_pad_id": target.pad_id, "eos_id": target.eos_id}
    if not isinstance(words, HuggingFaceTokenizer):
        ids["bos_id"] = target.bos_id
    wrong = [
        f"{name} is {value} and the model's {getattr(config, name)}"
        for name, value in ids.items()
        if value != getattr(config, name)
    ]
    if wrong:
        raise InputError(f"{path}: the tokenizer is of another model: {', '.join(wrong)}")
    rates = {name: rate for name in RATES if (rate := getattr(options, name)) is not None}
    precision = None if options.precision is Precision.FLOAT32 else options.precision.value
    return dataclasses.replace(config, **rates, bos_id=target.bos_id, compute_dtype=precision)


def _files(
    opened: Pretrained, config: TransformerConfig, words: Vocabulary, data: DataOptions
) -> dict[str, bytes]:
    """What is kept, as it is, but for generation_config.json: there, the model from now on translates into the language that it is trained for, and
    where no length is said, as far as its targets reach, which else would be cut behind twenty tokens."""
    files = folders.contents(opened.extra_files)
    if folders.CONFIG not in files:
        return files
    told, _ = huggingface.read(opened.extra_files[folders.CONFIG].parent)
    changed: dict[str, int] = {}
    if isinstance(words, HuggingFaceTokenizer) and words.target_lang is not None:
        forced = words.forced_bos_id()
        changed = {"decoder_start_token_id": words.bos_id} | (
            {} if forced is None else {"forced_bos_token_id": forced}
        )
    if not huggingface.has_length(told):
        changed["max_length"] = (
            vocabulary.limits(data, config)[1] + 1
        )  # which there counts the start
    if changed:
        ids = {
            "decoder_start_token_id": config.bos_id,
            "eos_token_id": config.eos_id,
            "pad_token_id": config.target_pad_id,
        }
        files[folders.GENERATION] = folders.to_json(
            {**ids, **told, **changed} if folders.GENERATION not in files else {**told, **changed}
        )
    return files


def _greedy(path: Path, config: TransformerConfig, words: Vocabulary) -> GenerationConfig:
    """What a folder says of decoding, but for the search. Raises InputError, naming the file, for what is asked for there and not done here."""
    if not (path / folders.CONFIG).is_file():
        return GenerationConfig()
    found = pretrained.generation_config(path, config, words)
    return GenerationConfig(
        constraints=found.constraints,
        forced_bos_token_id=found.forced_bos_token_id,
        decoder_start_token_id=found.decoder_start_token_id,
        eos_token_id=found.eos_token_id,
    )


def _sha256(paths: Iterable[Path]) -> str:
    """Of the hashes of files, in order."""
    whole = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()
