"""A run folder, with this project's names: ``config.json``, ``checkpoints/``, tokenizer."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jax_transformer.config import TransformerConfig
from jax_transformer.errors import InputError
from jax_transformer.formats import checkpoints
from jax_transformer.formats.base import Destination, Format, Pretrained, Written
from jax_transformer.formats.contents import Contents
from jax_transformer.formats.new_folder import new_folder
from jax_transformer.storage import (
    atomic,
    checkpoint,
    checksums,
    huggingface_folder,
    integrity,
    run_files,
)
from jax_transformer.storage.huggingface_folder import CONFIG, IN_RUN
from jax_transformer.storage.lazy import LazyState
from jax_transformer.storage.run_folder import RunFolder, open_weights, parsed

_FILES = (CONFIG, "checkpoints", IN_RUN, *run_files.SIDE_FILES, checksums.NAME)


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
        config = huggingface_folder.configuration(path)
        return "d_model" in config and "model_type" not in config  # it has no checkpoint yet

    def open(self, path: Path, weights: str = "auto", **options: Any) -> Pretrained:
        run = RunFolder(path)
        integrity.verify(path)
        config = parsed(run.config, TransformerConfig.from_json)
        candidate, opened = open_weights(run, weights)
        title = f"{path} ({candidate.name}, step {candidate.step})"
        return checkpoints.of_checkpoint(self, path, title, opened, run, config, candidate.name)

    def inspect(self, path: Path) -> Contents:
        run = RunFolder(path)
        integrity.verify_all(path)
        hashes = {name: checksums.sha256(path / name) for name in checksums.read(path)}
        step = run.last_step()
        if step is None:
            raise InputError(f"{path}: holds no checkpoint")
        opened = checkpoint.open(run.checkpoints, step, verified=True)
        title = f"checkpoint of step {step}"
        hashes |= opened.about["sha256"]
        return Contents(str(path), title, dict(opened.tensors), hashes)

    def is_written(self, name: str) -> bool:
        """Return True for names of a converted run's files: a run that was trained is never
        replaced, because its training state would be lost.
        """
        return name in _FILES

    def files(self, to: Destination) -> Mapping[str, bytes]:
        """Return the files of a Hugging Face folder, unchanged, except for the dtype in config.json
        if the weights are cast.
        """
        extra = to.source.extra_files if to.source else {}
        files = huggingface_folder.contents(extra)
        if to.dtype is not None and CONFIG in files:
            config = huggingface_folder.configuration(extra[CONFIG].parent)
            files[CONFIG] = huggingface_folder.to_json(
                huggingface_folder.with_dtype(config, {to.dtype})
            )
        return files

    def write(
        self, to: Destination, state: LazyState, check: Callable[[LazyState], Any]
    ) -> Written:
        with new_folder(to.path, state) as new:
            # A new run has no data.json, by which it would be known
            checkpoints.fill(new.path, 0, new, to, check, {"run": None})
            if to.config is not None:
                atomic.write_text(new.path / CONFIG, to.config.to_json())
            new.add(to.files, IN_RUN if CONFIG in to.files else "")
            run_files.record(new.path)
            return Written(new.sha256())


FORMAT = Run()
