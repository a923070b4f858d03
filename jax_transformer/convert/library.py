"""``jax_transformer.convert.load``, ``save`` and ``plan``: what the command does, as functions."""

from pathlib import Path
from typing import Any

import numpy as np

from jax_transformer.architectures.base import Architecture
from jax_transformer.config import TransformerConfig
from jax_transformer.convert import conversion, planning, sources, writing
from jax_transformer.convert.conversion import Description, Request
from jax_transformer.convert.planning import Plan
from jax_transformer.errors import ConfigError
from jax_transformer.storage import kinds
from jax_transformer.weights import casting, rules


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
    """The ``Transformer`` whose weights lie at ``path``: a .safetensors file or an index of several, a PyTorch file, a run folder, or one checkpoint.

    Args:
        path: it is known by its content; nothing in it is run.
        config: the model, or
        preset: the name of one, with ``sizes`` as by :func:`jax_transformer.preset`; the others are read from the shapes. A run folder needs neither.
        dtype: cast every array to this; they keep their own where None.
        weights: which of a run folder's, as for ``translate --weights``.
        key: where in a PyTorch file the state_dict is, as ``model``; found where there is only one.
        strip_prefix: taken from the beginning of every name, as ``module.``.
        architecture: whose names PyTorch weights have, an Architecture or a registered name; that
            of the configuration if None.

    Raises:
        ConfigError: the model is not said, or said twice.
        InputError: one message with everything missing, unexpected, mis-shaped, tied and different; or float64 in JAX's 32-bit mode.
        UnsafeFileError: the file asks for something to be run, or for more memory than it has bytes.
    """
    from jax_transformer import state_dict, transformer

    casting.check(dtype)
    source = sources.find(path, weights=weights, key=key, strip_prefix=strip_prefix)
    if source.config is not None and (config is not None or preset is not None or sizes):
        raise ConfigError(
            f"{path} has a config.json of its own: config, preset and sizes are for bare files of weights"
        )
    if source.config is None and (config is None) == (preset is None):
        raise ConfigError(f"{path} does not say its architecture: give either config or preset")
    if config is None and preset is not None:
        config = Description(None, preset, sizes).settle(source, architecture).config
    elif sizes:
        raise ConfigError(f"{', '.join(sizes)}: sizes go with a preset; a config has its own")
    model = conversion.model_of(source.config or config, architecture)
    wrong = planning.problems(
        source.tensors, model.shapes["torch" if source.kind.has_torch_names else "flax"]
    )
    state = source.read()
    planning.refuse(
        wrong + (planning.differing_ties(model.table, state) if source.kind.has_torch_names else [])
    )
    if source.kind.has_torch_names:
        state = rules.to_flax(model.table, state, model.shapes["flax"])
    return transformer.unflatten(
        model.config, {name: state_dict.as_jax(name, array, dtype) for name, array in state.items()}
    )


def save(
    model: Any,
    path: str | Path,
    *,
    force: bool = False,
    architecture: Architecture | str | None = None,
) -> Path:
    """Write a ``Transformer``: to a .safetensors or PyTorch file under PyTorch's names, or to a new run folder, by the name of ``path``.

    The same weights give the same bytes of a file. What is written is read back, compared, synced and renamed: ``path`` is there whole or as it
    was. Raises InputError where it exists and ``force`` is not given.
    """
    from jax_transformer import transformer

    target = Path(path)
    kind = kinds.wanted(target)
    writing.check_free(target, kind, force=force)
    about = conversion.model_of(model.config, architecture)
    arrays = {name: np.asarray(leaf) for name, leaf in transformer.flatten(model).items()}
    state = conversion.moved(arrays, about, from_torch=False, to_torch=kind.is_file)
    writing.write(target, kind, state, model.config, about.carried, lambda again: None)
    return target


def plan(
    source: str | Path,
    destination: str | Path,
    config: str | None = None,
    *,
    preset: str | None = None,
    dtype: str | None = None,
    weights: str = "auto",
    key: str | None = None,
    strip_prefix: str = "",
    force: bool = False,
    architecture: Architecture | str | None = None,
    **sizes: Any,
) -> Plan:
    """What ``jax-transformer convert SOURCE DESTINATION`` would do, without reading a weight: every tensor once, with what becomes of it.

    ``config`` is the path of a config.json, and the rest as for :func:`load`. Raises what the conversion would raise, but that tied copies are
    equal is seen only when they are read.
    """
    request = Request(
        str(source),
        str(destination),
        Description(config, preset, sizes),
        dtype,
        weights,
        key,
        strip_prefix,
        force,
        architecture=architecture,
    )
    prepared = conversion.prepare(request)
    planning.refuse(prepared.wrong)
    return prepared.plan
