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

from jax_transformer.config import Positions, TransformerConfig
from jax_transformer.data import run_tokenizer
from jax_transformer.data.huggingface_tokenizer import HuggingFaceTokenizer, load_huggingface
from jax_transformer.data.options import DataOptions
from jax_transformer.data.tokenizer import Tokenizer, TokenizerPair
from jax_transformer.errors import CheckpointError, ConfigError, InputError
from jax_transformer.generate import huggingface
from jax_transformer.generate.generation_config import GenerationConfig
from jax_transformer.storage import hub, kinds
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
    """How translations are made at validations: greedily, under the folder's rules and into the tokenizer's language."""

    def model(self) -> "Transformer":
        """The model, every array in float32 and with memory of its own. Raises as the readers of its files do."""
        import jax.numpy as jnp

        from jax_transformer import convert, pretrained, transformer
        from jax_transformer.convert import huggingface

        if kinds.of(self.path) is Kind.HUGGINGFACE:
            # 16 bits are not widened on the way: the positions among them would not be known as rounded
            dtype = "float32" if "float64" in self.dtypes else None
            loaded = convert.from_torch(
                huggingface.find(self.path).read(), self.config, dtype=dtype
            )
        else:
            loaded, _ = pretrained.load_model(self.path)
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
    path = hub.local(options.init)
    kind = kinds.of(path)
    if kind is Kind.HUGGINGFACE:
        return _of_huggingface(path, options)
    if kind is Kind.RUN:
        return _of_run(path, options)
    raise ConfigError(
        f"init={options.init}: is a {kind.value}; give a Hugging Face folder, hf:owner/name or a run folder, or convert it to one"
    )


def _taken(options: TrainOptions, folder: RunFolder) -> InitSource:
    recorded = parsed(folder.data, lambda text: str(json.loads(text)["init_sha256"]))
    words = _given(options.data) or run_tokenizer.load_folder(folder.path)
    config = parsed(folder.config, TransformerConfig.from_json)
    greedy = _greedy(folder.path / folders.IN_RUN, config, words)
    return InitSource(Path(options.init or ""), config, words, recorded, frozenset(), {}, greedy)


def _of_huggingface(path: Path, options: TrainOptions) -> InitSource:
    from jax_transformer.convert import huggingface

    found, data = huggingface.find(path), options.data
    held = any(name in found.folder.kept for name in folders.TOKENIZER)
    own = (
        load_huggingface(path, source_lang=data.source_lang, target_lang=data.target_lang)
        if held
        else None
    )
    words = _words(own, options, path)
    dtypes = frozenset(tensor.dtype for tensor in found.held.values() if is_float(tensor.dtype))
    sha256 = _sha256([path / folders.CONFIG, *found.folder.files])
    config = _fitted(found.config, options.model, words, path)
    return InitSource(
        path,
        config,
        words,
        sha256,
        dtypes,
        _files(path, config, words, data),
        _greedy(path, config, words),
    )


def _of_run(path: Path, options: TrainOptions) -> InitSource:
    from jax_transformer import pretrained
    from jax_transformer.storage import checkpoint

    folder, data = RunFolder(path), options.data
    own = run_tokenizer.load_folder(path) if run_tokenizer.in_folder(path) else None
    if isinstance(own, HuggingFaceTokenizer):
        own = own.with_languages(data.source_lang, data.target_lang)
    words = _words(own, options, path)
    config = _fitted(parsed(folder.config, TransformerConfig.from_json), options.model, words, path)
    intact: pretrained.Weights | None = None
    for weights in pretrained.candidates(folder, "auto"):
        try:
            opened = checkpoint.open(weights.root, weights.step)
        except CheckpointError:  # named where it is loaded
            continue
        intact = weights
        break
    if intact is None:
        raise CheckpointError(f"{folder.checkpoints}: holds no intact checkpoint to begin from")
    dtypes = frozenset(
        tensor.dtype
        for name, tensor in opened.tensors.items()
        if name.startswith(("params/", "ema/", "frozen/"))
    )
    sha256 = _sha256(
        [folder.config, intact.root / str(intact.step) / kinds.MANIFEST]
    )  # the manifest has the hash of every file
    beside = path / folders.IN_RUN
    return InitSource(
        path,
        config,
        words,
        sha256,
        dtypes,
        _files(beside, config, words, data),
        _greedy(beside, config, words),
    )


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


def _words(own: Vocabulary | None, options: TrainOptions, path: Path) -> Vocabulary:
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
    path: Path, config: TransformerConfig, words: Vocabulary, data: DataOptions
) -> dict[str, bytes]:
    """What is kept, as it is, but for generation_config.json: there, the model from now on translates into the language that it is trained for, and
    where no length is said, as far as its targets reach, which else would be cut behind twenty tokens."""
    files = folders.contents(path, [name for name in folders.KEPT if (path / name).is_file()])
    if folders.CONFIG not in files:
        return files
    told, _ = huggingface.read(path)
    changed: dict[str, int] = {}
    if isinstance(words, HuggingFaceTokenizer) and words.target_lang is not None:
        forced = words.forced_bos_id()
        changed = {"decoder_start_token_id": words.bos_id} | (
            {} if forced is None else {"forced_bos_token_id": forced}
        )
    if not huggingface.says_length(told):
        changed["max_length"] = (
            vocabulary.limits(data, config)[1] + 1
        )  # which there counts the start
    if changed:
        ids = {
            "decoder_start_token_id": config.bos_id,
            "eos_token_id": config.eos_id,
            "pad_token_id": config.target_pad_id,
        }
        files[folders.GENERATION] = folders.text(
            {**ids, **told, **changed} if folders.GENERATION not in files else {**told, **changed}
        )
    return files


def _greedy(path: Path, config: TransformerConfig, words: Vocabulary) -> GenerationConfig:
    """What a folder says of decoding, but for the search. Raises InputError, naming the file, for what is asked for there and not done here."""
    from jax_transformer import pretrained_files

    if not (path / folders.CONFIG).is_file():
        return GenerationConfig()
    found = pretrained_files.decoding(path, config, words)
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
