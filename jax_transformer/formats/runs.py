"""Run folders, and single checkpoints of a run: folders with a manifest, whose name is the step.
Their weights have this project's names.
"""

import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jax_transformer.config import TransformerConfig
from jax_transformer.errors import CheckpointError, ConfigError, InputError
from jax_transformer.formats.base import Check, Destination, Format, Pretrained, Written
from jax_transformer.formats.contents import Contents
from jax_transformer.storage import atomic, checkpoint, run_files, run_folder, saving
from jax_transformer.storage import huggingface_folder as hf_folder
from jax_transformer.storage.checkpoint import Checkpoint
from jax_transformer.storage.huggingface_folder import CONFIG, EXTRA_FILES, IN_RUN
from jax_transformer.storage.read_back import new_folder
from jax_transformer.storage.run_folder import RunFolder, open_weights, parsed
from jax_transformer.storage.tensors import LazyState, LazyTensor, Note
from jax_transformer.weights.arrays import ADAPTER, adapted_kernels, is_parameter, merge_adapters

_FILES = (CONFIG, "checkpoints", IN_RUN, *run_files.SIDE_FILES, run_files.SHA256SUMS)
_NOT_WEIGHTS = {
    "params": "the moving average of the weights is taken instead",
    "opt_state": "the optimizer's state",
    "step": "the place in training",
}


class CheckpointWeights(Pretrained):
    """The weights of a checkpoint, which are a run's if the checkpoint is in one."""

    @property
    def has_tokenizer(self) -> bool:
        from jax_transformer.data import encoding

        return self.run is not None and encoding.has_tokenizer(self.run.path)

    def tokenizer(self, source_lang: str | None = None, target_lang: str | None = None) -> Any:
        from jax_transformer.data import encoding
        from jax_transformer.data.huggingface_tokenizer import HuggingFaceTokenizer

        if self.run is None:
            return super().tokenizer()
        loaded = encoding.load_tokenizer(self.run.path)
        if source_lang is None and target_lang is None:
            return loaded
        if not isinstance(loaded, HuggingFaceTokenizer):
            raise ConfigError(
                "--source-lang and --target-lang are for tokenizers of several languages; "
                f"{self.path} has none"
            )
        return loaded.with_languages(source_lang, target_lang)

    def files_layout(self) -> Mapping[str, str]:
        if self.run is None:
            return {}
        return hf_folder.read_layout(self.run.path / IN_RUN / hf_folder.LAYOUT)

    @property
    def widths(self) -> tuple[int, ...]:
        if self.run is not None and (self.run.data.exists() or self.run.train_config.exists()):
            return parsed(self.run.data, lambda text: tuple(json.loads(text)["widths"]))
        return super().widths


class Run(Format):
    name, title, mark = "run", "run folder", f"{CONFIG} and checkpoints/"
    has_torch_names = False
    open_options = ("weights",)
    write_options = ()
    has_extra_files = True

    def recognises(self, path: Path) -> bool:
        if not (path / CONFIG).is_file() or (path / checkpoint.MANIFEST).is_file():
            return False
        if (path / "checkpoints").is_dir():
            return True
        config = hf_folder.configuration(path)
        return "d_model" in config and "model_type" not in config  # it has no checkpoint yet

    def open(self, path: Path, weights: str = "auto", **options: Any) -> Pretrained:
        run = RunFolder(path)
        run_folder.verify(path)
        config = parsed(run.config, TransformerConfig.from_json)
        candidate, opened = open_weights(run, weights)
        title = f"{path} ({candidate.name}, step {candidate.step})"
        return _opened(self, path, title, opened, run, config, candidate.name)

    def inspect(self, path: Path) -> Contents:
        run = RunFolder(path)
        run_folder.verify_all(path)
        hashes = {name: run_files.sha256(path / name) for name in run_files.read_sums(path)}
        step = run.last_step()
        if step is None:
            raise InputError(f"{path}: holds no checkpoint")
        opened = checkpoint.open(run.checkpoints, step, verified=True)
        title = f"checkpoint of step {step}"
        hashes |= opened.about["sha256"]
        return Contents(str(path), title, dict(opened.tensors), hashes)

    def is_written(self, name: str) -> bool:
        """Return True for a converted run's files: a trained run and its state are not replaced."""
        return name in _FILES

    def files(self, to: Destination) -> Mapping[str, bytes]:
        """Return a Hugging Face folder's files; a cast changes the dtype in config.json."""
        source = to.source
        if source is None or not source.extra_files:
            return {}
        files = hf_folder.contents(source.extra_files)
        if layout := source.files_layout():
            files[hf_folder.LAYOUT] = hf_folder.to_json(layout)
        if to.dtype is not None and CONFIG in files:
            config = hf_folder.configuration(source.extra_files[CONFIG].parent)
            files[CONFIG] = hf_folder.to_json(hf_folder.with_dtype(config, {to.dtype}))
        return files

    def write(self, to: Destination, state: LazyState, check: Check) -> Written:
        with new_folder(to.path, state) as new:
            # A new run has no data.json, by which it would be known
            hashes = _fill(new.path, 0, state, to, check, {"run": None})
            if to.config is not None:
                atomic.write_text(new.path / CONFIG, to.config.portable.to_json())
            if to.files:
                inside = IN_RUN if CONFIG in to.files else ""
                hf_folder.write_files(new.path / inside, to.files)
                new.compare_files(to.files, inside)
            run_files.record(new.path)
            return Written(new.sha256(hashes))


class SingleCheckpoint(Format):
    name, title, mark = "step", "checkpoint", checkpoint.MANIFEST
    has_torch_names = False
    write_options = ()
    makes_parent = False

    def recognises(self, path: Path) -> bool:
        return (path / checkpoint.MANIFEST).is_file()

    def open(self, path: Path, **options: Any) -> Pretrained:
        path, step = _step(path)
        config = self.own_config(path)
        run = None if config is None else RunFolder(path.parent.parent)
        opened = checkpoint.open(path.parent, step)
        return _opened(self, path, str(path), opened, run, config, path.name)

    def inspect(self, path: Path) -> Contents:
        path, step = _step(path)
        opened = checkpoint.open(path.parent, step)
        title = f"checkpoint of step {step}"
        return Contents(str(path), title, dict(opened.tensors), opened.about["sha256"])

    def own_config(self, path: Path) -> TransformerConfig | None:
        """Return the configuration of a checkpoint's run, which may be new; None without a run."""
        run = RunFolder(path.absolute().parent.parent)
        if not run.config.is_file():
            return None
        run_folder.verify(run.path)
        return parsed(run.config, TransformerConfig.from_json)

    def check(self, to: Destination) -> None:
        if RunFolder(to.path.absolute().parent.parent).train_config.is_file():
            raise ConfigError(
                f"{to.path}: is in a trained run, which cannot be resumed from weights only: give "
                "--training"
            )

    def check_replaceable(self, target: Path) -> None:
        if any(target.iterdir()) and not (target / checkpoint.MANIFEST).exists():
            raise InputError(f"{target}: is not a checkpoint, and --force does not replace it")

    def write(self, to: Destination, state: LazyState, check: Check) -> Written:
        with new_folder(to.path, state) as new:
            run = new.path.with_name(f"{new.path.name}.run")
            try:
                atomic.remove(run)  # of a killed process that had the same number
                step = int(to.path.name)
                hashes = _fill(run, step, state, to, check, run_files.about_run(to.path))
                os.rename(run / "checkpoints" / str(step), new.path)
            finally:
                atomic.remove(run)
            return Written(new.sha256(hashes))


def _step(path: Path) -> tuple[Path, int]:
    path = path.absolute()
    if not path.name.isdecimal():
        raise InputError(f"{path}: a single checkpoint has its step as its name")
    return path, int(path.name)


def _opened(
    format: Format,
    path: Path,
    title: str,
    opened: Checkpoint,
    run: RunFolder | None,
    config: TransformerConfig | None,
    weights: str,
) -> Pretrained:
    """Return the weights for inference: the moving average if there is one, and frozen ones."""
    groups: dict[str, list[str]] = {}
    for name in opened.tensors:
        groups.setdefault(name.partition("/")[0], []).append(name)
    trained = "ema" if "ema" in groups else "params"
    if trained not in groups:
        raise CheckpointError(f"{path}: holds no weights among {', '.join(groups) or 'nothing'}")
    names = [*groups.pop(trained), *groups.pop("frozen", ())]
    stored = {name.partition("/")[2]: name for name in names}
    dropped = []
    for group, names in groups.items():
        name = group if names == [group] else f"{group}/ ({len(names)} arrays)"
        dropped.append(Note(name, _NOT_WEIGHTS.get(group, "not weights")))
    inner = None if run is None else run.path / IN_RUN
    extra = {name: inner / name for name in EXTRA_FILES if inner and (inner / name).is_file()}
    derived = [Note(name, "with its low-rank adapter added") for name in adapted_kernels(stored)]
    return CheckpointWeights(
        format,
        path,
        title,
        {name: opened.tensors[full] for name, full in stored.items() if is_parameter(name)},
        partial(_scan, opened, (trained, "frozen"), stored),
        config,
        weights,
        opened.step,
        run,
        files=(opened.path / checkpoint.MANIFEST,),
        extra_files=extra,
        dropped=tuple(dropped),
        derived=tuple(derived),
    )


def _scan(
    opened: Checkpoint, groups: tuple[str, ...], stored: Mapping[str, str]
) -> dict[str, LazyTensor]:
    """Return the model's arrays; low-rank adapters are added to kernels when these are read."""
    arrays = checkpoint.scan(opened, groups)

    def merged(name: str) -> np.ndarray:
        names = [name, *(name + part for part in ADAPTER)]
        return merge_adapters({each: arrays[stored[each]].read() for each in names})[name]

    state = {name: arrays[full] for name, full in stored.items() if is_parameter(name)}
    for name in adapted_kernels(stored):
        state[name] = LazyTensor(state[name].info, partial(merged, name))
    return state


def _fill(
    run: Path,
    step: int,
    state: LazyState,
    to: Destination,
    check: Check,
    about: dict[str, Any],
) -> dict[str, str]:
    """Write the checkpoint of a new run folder, and return the SHA-256 of its arrays."""
    groups: dict[str, dict[str, LazyTensor]] = {"params": {}, "frozen": {}}
    for name, tensor in state.items():
        groups["frozen" if name in to.frozen else "params"][name] = tensor
    root = run / "checkpoints"
    root.mkdir(parents=True)
    hashes = saving.write(root, step, groups, about=about, target=to.path)
    # Its manifest has just been computed from the files
    arrays = checkpoint.scan(checkpoint.open(root, step, verified=True), groups)
    check({name.partition("/")[2]: tensor for name, tensor in arrays.items()})
    return hashes


RUN = Run()
CHECKPOINT = SingleCheckpoint()
