"""``jax_transformer.convert.load`` and ``save``: models in any kind of file or folder."""

from pathlib import Path
from typing import Any

import numpy as np

from jax_transformer import pretrained
from jax_transformer.architectures.base import Architecture
from jax_transformer.config import TransformerConfig
from jax_transformer.convert import conversion, writing
from jax_transformer.convert.request import ModelDescription
from jax_transformer.errors import ConfigError
from jax_transformer.storage import kinds, tensors


def load(
    path: str | Path,
    config: TransformerConfig | None = None,
    *,
    preset: str | None = None,
    dtype: str | None = None,
    weights: str = "auto",
    key: str | None = None,
    strip_prefix: str = "",
    architecture: Architecture | str | None = None,
    **sizes: Any,
) -> Any:
    """Load the ``Transformer`` at ``path``.

    Every file or folder that :func:`jax_transformer.pretrained.open` opens can be loaded.

    Args:
        path: a file or folder; its content shows its kind, and no code in it is run.
        config: the configuration of a bare file of weights, unless ``preset`` names one.
        preset: the name of a preset. Its sizes are read from the shapes, or set by ``sizes`` as in
            :func:`jax_transformer.preset`. A run folder needs neither.
        dtype: dtype to which every array is cast; None keeps their own.
        weights: the checkpoint of a run folder, as for ``translate --weights``.
        key: the key of the state_dict in a PyTorch file, e.g. ``model``; needed only if there are
            several.
        strip_prefix: prefix to remove from every name, e.g. ``module.``.
        architecture: the architecture whose names the PyTorch weights have, or its registered
            name; that of the configuration if None.

    Raises:
        ConfigError: neither a configuration nor a preset describes the model, or both do.
        InputError: names are missing or unexpected, shapes are wrong, or tied tensors differ, all
            in one message; or the weights are float64 in JAX's 32-bit mode.
        UnsafeFileError: the file tries to run code, or declares more data than it has.
    """
    tensors.check_dtype(dtype)
    source = pretrained.open(path, weights, key=key, strip_prefix=strip_prefix)
    if source.config is not None and (config is not None or preset is not None or sizes):
        raise ConfigError(
            f"{path} has its own config.json: config, preset and sizes are for bare files of "
            "weights"
        )
    if source.config is None and (config is None) == (preset is None):
        raise ConfigError(f"{path} does not tell its architecture: give either config or preset")
    if config is None and preset is not None:
        config = ModelDescription(None, preset, sizes).settle(source, architecture).config
    elif sizes:
        raise ConfigError(f"{', '.join(sizes)}: sizes go with a preset; a config has its own")
    return source.model(config, dtype=dtype, architecture=architecture)


def save(
    model: Any,
    path: str | Path,
    *,
    force: bool = False,
    architecture: Architecture | str | None = None,
) -> Path:
    """Save a ``Transformer`` and return its path.

    The name of ``path`` decides: a .safetensors or PyTorch file with PyTorch's names, or a new run
    folder. Equal weights give equal files. ``path`` appears after it was read back and compared, or
    stays as it was. Raises InputError if it exists and ``force`` is not set.
    """
    from jax_transformer import state_dict, transformer

    target = Path(path)
    kind = kinds.to_write(target)
    writing.check_free(target, kind, force=force)
    names = state_dict.model_weights(model.config, architecture)
    arrays = {name: np.asarray(leaf) for name, leaf in transformer.flatten(model).items()}
    state = conversion.renamed(arrays, names, from_torch=False, to_torch=kind.is_file)
    writing.write(target, kind, state, model.config, names.frozen, lambda read_back: None)
    return target
