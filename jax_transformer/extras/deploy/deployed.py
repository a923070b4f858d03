"""Folders that another program runs: CTranslate2's, and programs in StableHLO.

The whole model is in memory: these formats are written by the libraries themselves.
"""

import importlib.util
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jax_transformer.errors import ConfigError
from jax_transformer.extras.deploy.ctranslate2 import checks
from jax_transformer.formats.base import Check, Checked, Destination, Format, Written
from jax_transformer.generate.generation_config import GenerationConfig
from jax_transformer.storage import atomic, huggingface_folder, run_files, tensors
from jax_transformer.storage.tensors import LazyState

_TOKENIZER_FILES = (*run_files.SIDE_FILES, *huggingface_folder.TOKENIZER)


class Deployed(Format):
    """A folder that is written, checked by running it, and never read."""

    has_torch_names = False
    written: tuple[str, ...]
    """Names of the files, without the tokenizer's."""

    def is_written(self, name: str) -> bool:
        return name in (*self.written, *_TOKENIZER_FILES)

    def takes(self, name: str) -> bool:
        return name in huggingface_folder.TOKENIZER

    def files(self, to: Destination) -> Mapping[str, bytes]:
        """Return the tokenizer's files of a run or of a Hugging Face folder, unchanged, by name."""
        source = to.source
        assert source is not None  # a model in memory is not deployed
        paths = {name: path for name, path in source.extra_files.items() if self.takes(name)}
        if source.path.is_dir():
            names = (run_files.SHARED_FILE, *run_files.SIDE_FILES)
            own = {name: source.path / name for name in names}
            paths = {name: path for name, path in own.items() if path.is_file()} or paths
        return huggingface_folder.contents(paths)

    def write(self, to: Destination, state: LazyState, check: Check) -> Written:
        arrays = tensors.arrays(state)
        with atomic.folder(to.path) as temporary:
            written = self.fill(to, arrays, temporary)
            for name, content in to.files.items():
                (temporary / name).write_bytes(content)
        return written

    def fill(self, to: Destination, arrays: Mapping[str, np.ndarray], path: Path) -> Written:
        """Write the folder, and check it unless ``to.self_check`` is False."""
        raise NotImplementedError


_NOT_RUN = Checked("not run: --no-check")


class CTranslate2Folder(Deployed):
    name, title = "ct2", "CTranslate2 folder"
    write_options = ("quantization",)
    written = (
        checks.MODEL,
        huggingface_folder.CONFIG,
        *(f"{side}_vocabulary.json" for side in ("shared", "source", "target")),
    )

    def check_options(self, to: Destination) -> None:
        checks.quantization(to.options.get("quantization"))
        checks.check_installed("--to ct2")
        if to.dtype is not None:
            raise ConfigError(
                f"--dtype {to.dtype}: a CTranslate2 folder has --quantization float32, float16 or "
                "int8"
            )

    def check(self, to: Destination) -> None:
        if to.config is not None:
            checks.check(to.config)

    def fill(self, to: Destination, arrays: Mapping[str, np.ndarray], path: Path) -> Written:
        from jax_transformer.extras.deploy.ctranslate2 import folder  # loads jax

        config, source = to.config, to.source
        assert config is not None and source is not None
        quantization = checks.quantization(to.options.get("quantization"))
        tokenizer = source.tokenizer() if source.has_tokenizer else None
        vocabularies = folder.vocabularies(config, tokenizer)
        folder.write(path, config, arrays, vocabularies, quantization)
        checked = _NOT_RUN
        if to.self_check:
            error = folder.check(path, config, arrays, vocabularies, quantization)
            method = f"ran CTranslate2 in {quantization} next to the model in float32"
            checked = Checked(method, {"log-probabilities": error})
        tokens = "" if tokenizer is not None else "; no tokenizer: its tokens are ids in decimal"
        sha256 = run_files.sha256(path / checks.MODEL)
        return Written(sha256, f"CTranslate2, {quantization}{tokens}", checked)


class StableHloFolder(Deployed):
    name, title = "stablehlo", "StableHLO folder"
    write_options = ()
    written = (
        "programs.json",
        "weights.safetensors",
        "run.py",
        *(f"{program}.stablehlo" for program in ("encode", "decode_step", "greedy", "beam")),
    )

    def check_options(self, to: Destination) -> None:
        if importlib.util.find_spec("flatbuffers") is None:
            raise ConfigError(
                "--to stablehlo needs flatbuffers, which jax.export writes with: "
                "pip install 'jax-seq2seq[stablehlo]'"
            )

    def fill(self, to: Destination, arrays: Mapping[str, np.ndarray], path: Path) -> Written:
        from jax_transformer import transformer
        from jax_transformer.extras.deploy.stablehlo import folder
        from jax_transformer.generate import prepare
        from jax_transformer.weights import arrays as weight_arrays

        source = to.source
        assert to.config is not None and source is not None
        config = to.config.portable
        tokenizer = source.tokenizer() if source.has_tokenizer else None
        config.check_text("--to stablehlo")
        generation = source.generation_config(tokenizer) if source.config else GenerationConfig()
        settings = folder.Settings.of(config, generation)
        sha256 = folder.write(path, config, arrays, settings)
        checked = _NOT_RUN
        if to.self_check:
            leaves = {
                name: weight_arrays.as_jax(name, array, None) for name, array in arrays.items()
            }
            model = transformer.unflatten(config, leaves)
            folder.check(path, prepare.split(model), settings)
            checked = Checked("ran the program greedy next to the model: the same tokens")
        summary = (
            f"StableHLO for cpu, cuda and tpu, at most {settings.max_new_tokens} new tokens, "
            f"{settings.num_beams} beams"
        )
        return Written(sha256, summary, checked)


CTRANSLATE2 = CTranslate2Folder()
STABLEHLO = StableHloFolder()
