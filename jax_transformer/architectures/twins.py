"""PyTorch twins: the module that computes what the Flax model of a configuration computes.

A twin's class is in ``torch_reference``, in transformers or in a user's file. Nothing here imports
torch before a twin is asked for.
"""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jax_transformer.architectures import base, huggingface_config, registry
from jax_transformer.architectures.base import Architecture, Arguments
from jax_transformer.architectures.huggingface import HuggingFaceFamily
from jax_transformer.config import Norm, PositionIndex, Positions, TransformerConfig, Tying
from jax_transformer.errors import ConfigError, InputError
from jax_transformer.nn.embeddings import sinusoids


def twin(config: TransformerConfig, architecture: Architecture | str | None = None) -> Any:
    """Return the PyTorch module that computes the same as a Transformer of ``config``.

    It is newly initialised.

    Args:
        config: the model.
        architecture: the architecture, or its registered name; ``config.architecture`` if None.

    Raises:
        ConfigError: the architecture has no twin, or the twin cannot be set to some fields, which
            are named.
    """
    known = registry.resolve(architecture or config.architecture)
    twin_class = base.reference_class(known)
    if isinstance(known, HuggingFaceFamily):
        positional, named = _huggingface_arguments(known, config)
    elif known.reference_arguments is not None:
        positional, named = known.reference_arguments(config)
    else:
        raise ConfigError(
            f"architecture {known.name!r} does not say how its twin is called: set its field"
            " `reference_arguments`"
        )
    return _of_twin(known.name, twin_class, *positional, **named)


def _of_twin(name: str, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Return the result of a call of a twin, which may be in a user's file."""
    try:
        return function(*arguments, **named)
    except InputError:
        raise
    except Exception as error:
        raise ConfigError(
            f"architecture {name!r}: its twin raised {type(error).__name__}: {error}"
        ) from error


def parameter_names(
    config: TransformerConfig, architecture: Architecture | str | None = None
) -> list[str]:
    """List the twin's trained parameters in the order in which torch.optim numbers them."""
    from jax_transformer.weights import torch_bridge

    return torch_bridge.trained_parameters(lambda: twin(config, architecture))


def outputs(
    config: TransformerConfig,
    state: Mapping[str, np.ndarray],
    source: np.ndarray,
    target: np.ndarray,
    modules: Mapping[str, str],
) -> dict[str, np.ndarray]:
    """Return float64 outputs of the twin with these weights.

    Args:
        config: the model.
        state: the weights under PyTorch's names.
        source: ids (b, s).
        target: ids (b, t).
        modules: names of PyTorch modules, by the key that their outputs get.

    Returns:
        ``logits`` (b, t, v), and the output of each of ``modules``.

    Raises:
        ConfigError: the configuration has no twin, or the twin raises an exception.
    """
    from jax_transformer.weights import torch_bridge

    if isinstance(registry.resolve(config.architecture), HuggingFaceFamily):
        config = _without_dropout(config)  # transformers' modules have fewer rates
    return _of_twin(
        config.architecture,
        torch_bridge.outputs,
        twin(config),
        dict(state),
        (source, target),
        modules,
    )


def _without_dropout(config: TransformerConfig) -> TransformerConfig:
    """Return the same model with every rate 0."""
    encoder, decoder = (
        replace(
            stack,
            attention_dropout=None,
            branches=tuple(replace(branch, dropout=None) for branch in stack.branches),
        )
        for stack in (config.encoder, config.decoder)
    )
    return replace(
        config,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        embedding_dropout=0.0,
        encoder=encoder,
        decoder=decoder,
    )


def recorded(
    module: Any,
    batch: Sequence[np.ndarray],
    *,
    dtype: str,
    seed: int | None,
    call: Callable[..., object] | None = None,
) -> Any:
    """Return inputs and outputs of every module of a PyTorch model, computed in ``dtype``.

    See ``torch_reference.recording.record``.
    """
    from torch_reference import recording

    return recording.record(module, batch, dtype=dtype, seed=seed, call=call)


def _huggingface_arguments(family: HuggingFaceFamily, config: TransformerConfig) -> Arguments:
    """Return the arguments of ``torch_reference.huggingface.twin``.

    Raises ConfigError that names the fields to which transformers' module cannot be set.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            f"the PyTorch twin of architecture {family.name!r} is transformers' own:"
            " pip install transformers"
        )
    _check_rates(family, config)
    attributes = huggingface_config.to_config(config)
    del attributes["architectures"]
    frozen, counted = [], {}
    for name, stack in (("encoder", config.encoder), ("decoder", config.decoder)):
        if stack.positions is Positions.SINUSOIDAL_STORED:
            frozen.append(name)
        elif stack.position_index is PositionIndex.NOT_PADDING:
            offset, layout = config.encoder.position_offset, config.encoder.sinusoids
            table = sinusoids(config.max_length + offset, config.d_model, layout=layout)
            counted[name] = {
                "table": np.array(table),
                "padding": config.source_pad_id,
                "offset": offset,
            }
    return (family.model_class, attributes), {
        "prefix": family.prefix.rstrip("."),
        "untied": config.tying is Tying.EMBEDDINGS,
        "norm_epsilon": config.norm_epsilon if config.norm is Norm.RMS else None,
        "frozen_positions": frozen,
        "counted_positions": counted,
    }


def _check_rates(family: HuggingFaceFamily, config: TransformerConfig) -> None:
    wrong = [
        f"{name}={getattr(config, name)}"
        for name in family.shared_rates()
        if getattr(config, name) != config.dropout
    ]
    wrong += [
        f"{name}.attention_dropout"
        for name in ("encoder", "decoder")
        if getattr(config, name).attention_dropout is not None
    ]
    if wrong:
        raise ConfigError(
            f"{', '.join(wrong)}: the PyTorch twin of architecture {config.architecture!r} has one"
            f" rate, dropout={config.dropout}"
        )
