"""``jax_transformer.convert.load`` and ``save``: models from and to any kind of file or folder."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jax_transformer import pretrained
from jax_transformer.architectures.base import Architecture
from jax_transformer.config import TransformerConfig
from jax_transformer.convert import conversion, writing
from jax_transformer.convert.request import ModelDescription
from jax_transformer.errors import ConfigError
from jax_transformer.storage import kinds
from jax_transformer.weights import casting

if TYPE_CHECKING:
    pass


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
    """The ``Transformer`` at ``path``: any file or folder that
    :func:`jax_transformer.pretrained.open` opens.

    Args:
        path: its kind is known by its content; nothing in it is run.
        config: the model, or
        preset: the name of one, with ``sizes`` as by :func:`jax_transformer.preset`; the others are
            read from the shapes. A run folder needs neither.
        dtype: cast every array to this; if None they keep their own.
        weights: which of a run folder's, as for ``translate --weights``.
        key: the key of the state_dict in a PyTorch file, as ``model``; found if there is only one.
        strip_prefix: taken from the beginning of every name, as ``module.``.
        architecture: whose names PyTorch weights have, an Architecture or a registered name; that
            of the configuration if None.

    Raises:
        ConfigError: the model is not given, or given twice.
        InputError: one message with everything missing, unexpected, mis-shaped, tied and different;
            or float64 in JAX's 32-bit mode.
        UnsafeFileError: the file asks for something to be run, or for more memory than it has
            bytes.
    """
    casting.check(dtype)
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
    """Write a ``Transformer``: to a .safetensors or PyTorch file under PyTorch's names, or to a new
    run folder, by the name of ``path``.

    The same weights give the same bytes of a file. ``path`` appears after it was read back and
    compared, or stays as it was. Raises InputError if it exists and ``force`` is not given.
    """
    from jax_transformer import state_dict, transformer

    target = Path(path)
    kind = kinds.to_write(target)
    writing.check_free(target, kind, force=force)
    names = state_dict.model_weights(model.config, architecture)
    arrays = {name: np.asarray(leaf) for name, leaf in transformer.flatten(model).items()}
    state = conversion.renamed(arrays, names, from_torch=False, to_torch=kind.is_file)
    writing.write(target, kind, state, model.config, names.frozen, lambda again: None)
    return target
