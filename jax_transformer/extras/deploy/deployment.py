"""Write a folder that another program runs: CTranslate2's, or one of programs in StableHLO.

The whole model is in memory: these formats are written by the libraries themselves.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jax_transformer import transformer
from jax_transformer.convert import progress
from jax_transformer.convert.checking import Checked
from jax_transformer.convert.preparation import Prepared
from jax_transformer.extras.deploy.ctranslate2 import folder as ctranslate2_folder
from jax_transformer.extras.deploy.ctranslate2 import self_check, vocabulary
from jax_transformer.extras.deploy.stablehlo import folder as stablehlo_folder
from jax_transformer.extras.deploy.stablehlo.programs import Settings
from jax_transformer.formats.kinds import Kind
from jax_transformer.generate import prepare
from jax_transformer.generate.generation_config import GenerationConfig
from jax_transformer.storage import atomic, lazy, tensors
from jax_transformer.storage.lazy import LazyState
from jax_transformer.weights import arrays as weight_arrays

_NOT_RUN = Checked("not run: --no-check")


class Deployed(NamedTuple):
    """A folder that was written."""

    summary: str
    loss: tensors.CastLoss | None
    checked: Checked
    sha256: str


def write(prepared: Prepared, state: LazyState) -> Deployed:
    """Write the folder, check it by running it, and give it its name.

    Args:
        prepared: the conversion.
        state: the arrays, by the names of a run.
    """
    casting = None if prepared.request.dtype is None else lazy.Cast(prepared.request.dtype)
    state = state if casting is None else casting.apply(state)
    with progress.shown(state, str(prepared.target)) as shown:
        arrays = lazy.arrays(shown)
    with atomic.folder(prepared.target) as temporary:
        fill = _ctranslate2 if prepared.kind is Kind.CTRANSLATE2 else _stablehlo
        summary, checked, sha256 = fill(prepared, arrays, temporary)
        for name, content in prepared.extra_files.files.items():
            (temporary / name).write_bytes(content)
    loss = None if casting is None else casting.loss()
    return Deployed(
        f"{prepared.source.title} -> {prepared.target}: {summary}", loss, checked, sha256
    )


def _ctranslate2(
    prepared: Prepared, arrays: Mapping[str, np.ndarray], path: Path
) -> tuple[str, Checked, str]:
    assert prepared.model is not None
    config, source = prepared.model.config, prepared.source
    quantization = ctranslate2_folder.quantization(prepared.request.quantization)
    tokenizer = source.tokenizer() if source.has_tokenizer else None
    vocabularies = vocabulary.of(config, tokenizer)
    ctranslate2_folder.write(path, config, arrays, vocabularies, quantization)
    checked = _NOT_RUN
    if prepared.request.check:
        error = self_check.check(path, config, arrays, vocabularies, quantization)
        method = f"ran CTranslate2 in {quantization} next to the model in float32"
        checked = Checked(method, {"log-probabilities": error})
    tokens = "" if tokenizer is not None else "; no tokenizer: its tokens are ids in decimal"
    with open(path / ctranslate2_folder.MODEL, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return f"CTranslate2, {quantization}{tokens}", checked, sha256


def _stablehlo(
    prepared: Prepared, arrays: Mapping[str, np.ndarray], path: Path
) -> tuple[str, Checked, str]:
    assert prepared.model is not None
    config, source = prepared.model.config.portable, prepared.source
    tokenizer = source.tokenizer() if source.has_tokenizer else None
    config.check_text("--to stablehlo")
    generation = source.generation_config(tokenizer) if source.config else GenerationConfig()
    settings = Settings.of(config, generation)
    sha256 = stablehlo_folder.write(path, config, arrays, settings)
    checked = _NOT_RUN
    if prepared.request.check:
        leaves = {name: weight_arrays.as_jax(name, array, None) for name, array in arrays.items()}
        model = transformer.unflatten(config, leaves)
        stablehlo_folder.check(path, prepare.split(model), settings)
        checked = Checked("ran the program greedy next to the model: the same tokens")
    summary = (
        f"StableHLO for cpu, cuda and tpu, at most {settings.max_new_tokens} new tokens, "
        f"{settings.num_beams} beams"
    )
    return summary, checked, sha256
