"""Open any file or folder with weights: :func:`open` returns its weights, configuration and
tokenizer.

No code in a file is run. Importing this module loads no jax, and neither does opening a file.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax_transformer.architectures.tensor_names import NameChanges
from jax_transformer.errors import ConfigError
from jax_transformer.formats import hub, registry
from jax_transformer.formats.base import Pretrained

if TYPE_CHECKING:
    from jax_transformer.data.tokenizer import Tokenizer, TokenizerPair
    from jax_transformer.transformer import Transformer

_DEFAULTS = {"weights": "auto", "key": None, "scan_axis": None}
_OF_FORMATS = {
    "weights": "--weights {}: {} is not a run folder, and has one set of weights",
    "key": "--key {}: {} is not a PyTorch file",
    "scan_axis": "--param-scan-axis {}: {} is not a checkpoint of T5X",
}


def open(
    path: str | Path,
    weights: str = "auto",
    *,
    key: str | None = None,
    strip_prefix: str = "",
    scan_axis: int | None = None,
) -> Pretrained:
    """Open the weights at ``path``: a run folder, one checkpoint, a Hugging Face folder,
    ``hf:owner/name``, a .safetensors file or the index of several, a PyTorch file, or a file or
    folder of another format in the registry, such as a checkpoint of T5X. The content decides.

    A checkpoint is verified against its manifest here, once; everything else is read on demand.

    Args:
        path: a file, a folder or ``hf:owner/name``.
        weights: ``auto``, ``averaged``, ``best``, ``last`` or the number of a step, in a run. If a
            checkpoint is damaged, ``auto`` names it on stderr and takes the next.
        key: the key of the state_dict in a PyTorch file, such as ``model``; not needed if there is
            only one.
        strip_prefix: removed from the beginning of every name of a file, such as ``module.``.
        scan_axis: T5X's ``param_scan_axis``, if the shapes of a checkpoint fit several.

    Raises:
        InputError: the file is missing, damaged, or of no known format.
        CheckpointError: a run has no intact checkpoint, or not the one that ``weights`` selects.
        ConfigError: an argument does not apply to this format.
        UnsafeFileError: the file would run code, or needs more memory than it has bytes.
    """
    path = hub.local(path)
    format = registry.of(path)
    options: dict[str, Any] = {"weights": weights, "key": key, "scan_axis": scan_axis}
    for name, default in _DEFAULTS.items():
        if name not in format.open_options:
            if options[name] != default:
                raise ConfigError(_OF_FORMATS[name].format(options[name], path))
            del options[name]
    return format.open(path, **options).with_names(NameChanges(strip_prefix))


def load(
    path: str | Path,
    weights: str = "auto",
    *,
    source_lang: str | None = None,
    target_lang: str | None = None,
) -> "tuple[Transformer, Tokenizer | TokenizerPair | None]":
    """Load the model and the tokenizer of a run folder, a Hugging Face folder or ``hf:owner/name``;
    the tokenizer is None if there is none.

    The model knows none of the folder's settings of generation: the functions of
    :mod:`jax_transformer.generate` decode as their arguments say, and only
    :class:`jax_transformer.Translator` translates as the folder says. Arrays keep the dtypes of the
    files. The languages are for a multilingual tokenizer.
    ``weights`` and errors are those of :func:`open`.
    """
    opened = open(path, weights)
    if not opened.has_tokenizer and source_lang is None and target_lang is None:
        return opened.model(), None
    return opened.model(), opened.tokenizer(source_lang, target_lang)
