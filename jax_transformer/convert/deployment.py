"""Write a folder that another program runs: CTranslate2's."""

import hashlib
from pathlib import Path

from jax_transformer.convert import progress
from jax_transformer.convert.checking import Checked
from jax_transformer.convert.conversion import Outcome
from jax_transformer.convert.ctranslate2 import folder, self_check, vocabulary
from jax_transformer.convert.preparation import Prepared
from jax_transformer.storage import atomic, lazy
from jax_transformer.storage.lazy import LazyState


def convert(prepared: Prepared, state: LazyState) -> Outcome:
    """Write the folder, check it by running it, and give it its name.

    The whole model is in memory: its format is written by CTranslate2 itself.

    Args:
        prepared: the conversion.
        state: the arrays, by the names of a run.
    """
    assert prepared.model is not None
    config, source, target = prepared.model.config, prepared.source, prepared.target
    quantization = folder.quantization(prepared.request.quantization)
    tokenizer = source.tokenizer() if source.has_tokenizer else None
    vocabularies = vocabulary.of(config, tokenizer)
    with progress.shown(state, str(target)) as shown:
        arrays = lazy.arrays(shown)
    checked = Checked("not run: --no-check")
    with atomic.folder(target) as temporary:
        folder.write(temporary, config, arrays, vocabularies, quantization)
        for name, content in prepared.extra_files.files.items():
            (temporary / name).write_bytes(content)
        if prepared.request.check:
            error = self_check.check(temporary, config, arrays, vocabularies, quantization)
            checked = Checked(
                f"ran CTranslate2 in {quantization} next to the model in float32",
                {"log-probabilities": error},
            )
        sha256 = _sha256(temporary / folder.MODEL)
    tokens = "" if tokenizer is not None else "; no tokenizer: its tokens are ids in decimal"
    return Outcome(
        prepared.plan,
        f"{source.title} -> {target}: CTranslate2, {quantization}{tokens}",
        prepared.preset_sizes,
        None,
        checked,
        sha256,
        tuple(sorted(prepared.extra_files.files)),
    )


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
