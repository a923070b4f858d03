"""A trained model out of a run folder, or out of a Hugging Face folder."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flax import nnx

from jax_transformer import pretrained_files, transformer
from jax_transformer.config import TransformerConfig
from jax_transformer.data import run_tokenizer
from jax_transformer.data.tokenizer import Tokenizer, TokenizerPair
from jax_transformer.errors import CheckpointError, ConfigError, InputError
from jax_transformer.generate.generation_config import GenerationConfig
from jax_transformer.nn.positions import Frozen
from jax_transformer.storage import atomic, checkpoint, hub
from jax_transformer.storage import huggingface as folders
from jax_transformer.storage.run_folder import RunFolder, parsed
from jax_transformer.transformer import Transformer

CHOICES = "auto, averaged, best, last, or the number of a step"


@dataclass(frozen=True)
class Weights:
    """A checkpoint of a run folder: ``root/step``."""

    root: Path
    step: int
    name: str
    """``averaged``, ``best``, ``last`` or the step's number: why it was chosen."""


@dataclass(frozen=True)
class TrainedRun:
    """What translating needs."""

    model: Transformer
    tokenizer: Tokenizer | TokenizerPair
    widths: tuple[int, ...]
    """The widths that batches were padded to in training."""
    weights: Weights
    decoding: GenerationConfig = field(default_factory=GenerationConfig)
    """What the folder says of how to decode."""


def load_model(path: str | Path, weights: str = "auto") -> tuple[Transformer, Weights]:
    """The model of a folder with the ``weights`` of one of its checkpoints, in the dtypes that they were saved in, and which these are.

    ``auto`` is averaged weights where the run has made some, else its best checkpoint, else its last one; where a checkpoint is damaged, it is
    named on stderr and the next in this order is taken. Raises InputError where ``path`` is no run folder, CheckpointError where it holds
    no intact checkpoint or not the one that is asked for.
    """
    folder = RunFolder(Path(path))
    if not folder.path.is_dir():
        raise InputError(f"{folder.path}: no such run folder")
    config = parsed(folder.config, TransformerConfig.from_json)
    found = list(candidates(folder, weights))
    if not found:
        wanted = "" if weights == "auto" else f" for --weights {weights}"
        raise CheckpointError(f"{folder.checkpoints}: holds no checkpoint{wanted}")
    for candidate in found:
        try:
            return _load(config, candidate), candidate
        except CheckpointError as error:
            if candidate is found[-1]:
                raise
            print(f"warning: {error}; the checkpoint before it is used", file=sys.stderr)
    raise AssertionError("the last candidate is loaded or refused")


def candidates(folder: RunFolder, weights: str) -> Iterator[Weights]:
    """The checkpoints that may be meant, first choice first."""
    if weights not in ("auto", "averaged", "best", "last") and not weights.isdecimal():
        raise ConfigError(f"weights={weights!r} is not one of {CHOICES}")
    steps, averaged = checkpoint.steps(folder.checkpoints), checkpoint.steps(folder.averaged)
    best = folder.best_first() if folder.train_config.exists() else []
    if weights.isdecimal():
        yield from (
            Weights(folder.checkpoints, step, weights) for step in steps if step == int(weights)
        )
    if weights in ("auto", "averaged"):
        yield from (Weights(folder.averaged, step, "averaged") for step in reversed(averaged))
    if weights in ("auto", "best"):
        yield from (
            Weights(folder.checkpoints, step, "best")
            for step in best[: None if weights == "auto" else 1]
        )
    if weights in ("auto", "last"):
        rest = [step for step in reversed(steps) if weights == "last" or step not in best]
        yield from (
            Weights(folder.checkpoints, step, "last")
            for step in rest[: None if weights == "auto" else 1]
        )


def _load(config: TransformerConfig, weights: Weights) -> Transformer:
    import jax

    opened = checkpoint.open(weights.root, weights.step)
    dtypes = {name: tensor.dtype for name, tensor in opened.tensors.items()}
    if "float64" in dtypes.values() and not jax.config.read("jax_enable_x64"):
        raise CheckpointError(
            f"{weights.root / str(weights.step)} holds float64 and JAX is in 32-bit mode: set JAX_ENABLE_X64=1"
        )
    skeleton = transformer.abstract(config)
    trained = "ema" if any(name.startswith("ema/") for name in dtypes) else "params"
    like = {
        group: {
            name: jax.ShapeDtypeStruct(leaf.shape, dtypes.get(f"{group}/{name}", leaf.dtype))
            for name, leaf in transformer.flatten(skeleton, kind).items()
        }
        for group, kind in ((trained, nnx.Param), ("frozen", Frozen))
    }
    saved = opened.load(like, partial=True)
    return transformer.unflatten(config, saved[trained] | saved["frozen"])


def save_model(model: Transformer, path: str | Path) -> None:
    """A new folder that :func:`load_model` reads: the configuration, and the weights as the checkpoint of step 0."""
    folder = RunFolder(Path(path))
    folder.path.mkdir(parents=True)
    groups: dict[str, Any] = {
        "params": transformer.flatten(model, nnx.Param),
        "frozen": transformer.flatten(model, Frozen),
    }
    checkpoint.save(folder.checkpoints, 0, groups, about={})
    atomic.write_text(folder.config, model.config.to_json())


def load_run(
    path: str | Path,
    weights: str = "auto",
    *,
    source_lang: str | None = None,
    target_lang: str | None = None,
) -> TrainedRun:
    """All that translating needs, from a run folder, a Hugging Face folder or ``hf:owner/name``.

    The languages are those of a tokenizer that has several. ``weights`` and errors as of :func:`load_model`; a Hugging Face folder has one set.
    """
    path = hub.local(path)
    if pretrained_files.is_folder(path):
        _check_one_set(path, weights)
        model, words = (
            pretrained_files.model(path),
            pretrained_files.tokenizer(path, source_lang, target_lang),
        )
        chosen = Weights(path, 0, folders.find(path).weights.name)
        return TrainedRun(
            model,
            words,
            pretrained_files.widths(model.config),
            chosen,
            pretrained_files.decoding(path, model.config, words),
        )
    folder = RunFolder(path)
    model, chosen = load_model(path, weights)
    beside = path / folders.IN_RUN
    came = (beside / folders.CONFIG).is_file()
    if came and not folder.data.exists():  # converted, and not trained since
        widths = pretrained_files.widths(model.config)
    else:
        widths = parsed(folder.data, lambda text: tuple(json.loads(text)["widths"]))
    words = pretrained_files.between(
        run_tokenizer.load_folder(path), source_lang, target_lang, path
    )
    return TrainedRun(
        model,
        words,
        widths,
        chosen,
        pretrained_files.decoding(beside, model.config, words) if came else GenerationConfig(),
    )


def load(
    path: str | Path,
    weights: str = "auto",
    *,
    source_lang: str | None = None,
    target_lang: str | None = None,
) -> tuple[Transformer, Tokenizer | TokenizerPair | None]:
    """The model and the tokenizer of a run folder, a Hugging Face folder or ``hf:owner/name``; None for the tokenizer where there is none.

    Arrays keep the dtypes of the files. The languages are those of a tokenizer that has several. ``weights`` and errors as of :func:`load_model`.
    """
    path = hub.local(path)
    if pretrained_files.is_folder(path):
        _check_one_set(path, weights)
        return pretrained_files.model(path), pretrained_files.tokenizer(
            path, source_lang, target_lang
        ) if pretrained_files.has_tokenizer(path) else None
    model, _ = load_model(path, weights)
    words = run_tokenizer.load_folder(path) if run_tokenizer.in_folder(path) else None
    return model, pretrained_files.between(words, source_lang, target_lang, path)


def _check_one_set(path: Path, weights: str) -> None:
    if weights != "auto":
        raise ConfigError(
            f"--weights {weights}: {path} is a Hugging Face folder, which has one set of weights"
        )
