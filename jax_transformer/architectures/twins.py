"""PyTorch twins: the module that computes what the Flax model of a configuration computes; and a
model's weights between the two.

A twin's class is in ``torch_reference``, in transformers or in a user's file. Nothing here imports
torch before a twin is asked for.
"""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, overload

import numpy as np

from jax_transformer import transformer
from jax_transformer.architectures import huggingface_config, registry, tensor_names
from jax_transformer.architectures.base import Architecture, Arguments
from jax_transformer.architectures.huggingface import HuggingFaceFamily
from jax_transformer.architectures.tensor_names import NameChanges
from jax_transformer.config import RATES, Norm, PositionIndex, Positions, TransformerConfig, Tying
from jax_transformer.errors import ConfigError, InputError, nearest
from jax_transformer.nn.embeddings import sinusoids
from jax_transformer.transformer import Encoder, Transformer
from jax_transformer.weights import arrays, rules


def twin(config: TransformerConfig, architecture: Architecture | str | None = None) -> Any:
    """Return the PyTorch module that computes the same as a Transformer of ``config``.

    It is newly initialised. The architecture, or its registered name, is ``config``'s if None.
    Raises ConfigError if it has no twin, or one that cannot be set to some fields, which are named.
    """
    known, config = registry.resolve(architecture or config.architecture), config.portable
    twin_class = _reference_class(known)
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


def _reference_class(architecture: Architecture) -> Callable[..., Any]:
    """Import and return the class of the PyTorch twin, or the function that makes one.

    Raises ConfigError if there is no twin, or its module or class cannot be imported.
    """
    reference = architecture.reference
    if reference is None:
        raise ConfigError(
            f"architecture {architecture.name!r} has no PyTorch twin: set its field `reference`"
        )
    if not isinstance(reference, str):
        return reference()
    module_name, _, class_name = reference.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # in a user's file
        raise ConfigError(
            f"architecture {architecture.name!r}: cannot import its twin {reference}:"
            f" {type(error).__name__}: {error}"
        ) from error
    try:
        return getattr(module, class_name)
    except AttributeError:
        close = nearest(class_name, dir(module))
        raise ConfigError(
            f"architecture {architecture.name!r}: {module_name} has no class {class_name!r}{close}"
        ) from None


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
    """Return float64 outputs of the twin with these weights, under PyTorch's names, for ids (b, s)
    and (b, t): ``logits`` (b, t, v), and the output of each of ``modules``, which has the names of
    PyTorch modules by the key that their outputs get.

    Raises ConfigError if the configuration has no twin, or the twin raises an exception.
    """
    from jax_transformer.weights import torch_bridge

    if isinstance(registry.resolve(config.architecture), HuggingFaceFamily):
        config = _without_dropout(config)  # transformers' modules have fewer rates
    batch, run = (source, target), torch_bridge.outputs
    return _of_twin(config.architecture, run, twin(config), dict(state), batch, modules)


def _without_dropout(config: TransformerConfig) -> TransformerConfig:
    changes: dict[str, Any] = dict.fromkeys(RATES, 0.0)
    for name, stack in (("encoder", config.encoder), ("decoder", config.decoder)):
        branches = tuple(replace(branch, dropout=None) for branch in stack.branches)
        changes[name] = replace(stack, attention_dropout=None, branches=branches)
    return replace(config, **changes)


def recorded(module: Any, batch: Sequence[np.ndarray], **options: Any) -> Any:
    """Return inputs and outputs of every module of a PyTorch model, as
    ``torch_reference.recording.record`` does."""
    from torch_reference import recording

    return recording.record(module, batch, **options)


def trained(module: Any, batch: Sequence[np.ndarray], optimizer: Any, **options: Any) -> Any:
    """Return the optimizer steps of a PyTorch model, as ``torch_reference.steps.train`` does; with
    its AdamW if ``optimizer`` is None."""
    from torch_reference import steps

    return steps.train(module, batch, optimizer or steps.adamw, **options)


def _huggingface_arguments(family: HuggingFaceFamily, config: TransformerConfig) -> Arguments:
    """Return the arguments of ``torch_reference.huggingface.twin``.

    Raises ConfigError that names the fields to which transformers' module cannot be set.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            f"the PyTorch twin of architecture {family.name!r} is transformers' own:"
            " pip install transformers"
        )
    rates = {name: getattr(config, name) for name in family.shared_rates}
    wrong = [f"{name}={rate}" for name, rate in rates.items() if rate != config.dropout]
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
    attributes = huggingface_config.to_config(config)
    del attributes["architectures"]
    frozen, counted = [], {}
    for name, stack in (("encoder", config.encoder), ("decoder", config.decoder)):
        if stack.positions is Positions.SINUSOIDAL_STORED:
            frozen.append(name)
        elif stack.position_index is PositionIndex.NOT_PADDING:
            offset, layout = config.encoder.position_offset, config.encoder.sinusoids
            table = sinusoids(config.max_length + offset, config.d_model, layout=layout)
            padding = config.source_pad_id
            counted[name] = {"table": np.array(table), "padding": padding, "offset": offset}
    return (family.model_class, attributes), {
        "prefix": family.prefix.rstrip("."),
        "untied": config.tying is Tying.EMBEDDINGS,
        "norm_epsilon": config.norm_epsilon if config.norm is Norm.RMS else None,
        "frozen_positions": frozen,
        "counted_positions": counted,
    }


# Weights as functions over ``{name: array}``


@overload
def from_torch(
    state_dict: Mapping[str, Any],
    config: TransformerConfig,
    *,
    dtype: Any = None,
    part: Literal["model"] = "model",
    architecture: Architecture | str | None = None,
    strip_prefix: str = "",
    ignore: Sequence[str] = (),
    rename: Mapping[str, str] | None = None,
) -> Transformer: ...


@overload
def from_torch(
    state_dict: Mapping[str, Any],
    config: TransformerConfig,
    *,
    dtype: Any = None,
    part: Literal["encoder"],
    architecture: Architecture | str | None = None,
    strip_prefix: str = "",
    ignore: Sequence[str] = (),
    rename: Mapping[str, str] | None = None,
) -> Encoder: ...


def from_torch(
    state_dict: Mapping[str, Any],
    config: TransformerConfig,
    *,
    dtype: Any = None,
    part: str = "model",
    architecture: Architecture | str | None = None,
    strip_prefix: str = "",
    ignore: Sequence[str] = (),
    rename: Mapping[str, str] | None = None,
) -> Transformer | Encoder:
    """Return the Flax model with the weights of a PyTorch state_dict.

    Args:
        state_dict: name -> np.ndarray (or torch tensor, if torch is installed), with exactly the
            names and shapes of the architecture.
        config: the architecture and its sizes.
        dtype: cast every array to this; None keeps each array's own.
        part: "encoder" for the state_dict of an encoder that the document prints without a decoder;
            the result is then an ``Encoder``.
        architecture: whose names ``state_dict`` has, as an Architecture or a registered name;
            ``config.architecture`` if None.
        strip_prefix: removed from the beginning of every name, such as ``module.``.
        ignore: patterns of names to leave out, such as ``criterion.*``.
        rename: new names by old ones. These three are explained at
            :class:`jax_transformer.architectures.tensor_names.NameChanges`.

    Raises:
        InputError: one message on everything missing, unexpected and mis-shaped (both shapes), and
            on tied copies that differ: the first dozen; all are the error's ``details``. Or float64
            arrays while JAX is in 32-bit mode and no dtype is given.
    """
    changes = NameChanges(strip_prefix, ignore=tuple(ignore), rename=rename or {})
    changed = changes.apply(state_dict)
    state = {changed[name]: arrays.of(name, state_dict[name]) for name in changed}
    table = registry.weight_table(config, part, architecture=architecture)
    kind: Callable[..., Transformer | Encoder] = Encoder if part == "encoder" else Transformer
    try:
        flax = rules.to_flax(table, state, transformer.shapes(config, kind))
    except InputError as error:
        raise tensor_names.explained(error, state, tensor_names.torch_names(table)) from None
    leaves = {name: arrays.as_jax(name, array, dtype) for name, array in flax.items()}
    return transformer.unflatten_part(config, leaves, kind)


def to_torch(
    model: Transformer | Encoder, *, architecture: Architecture | str | None = None
) -> dict[str, np.ndarray]:
    """Return the weights of a model, or of an encoder, under PyTorch's names.

    The inverse of :func:`from_torch`, bit for bit. Each array is contiguous and shares no memory.
    ``architecture`` is whose names they get, as an Architecture or a registered name; the
    model's own if None.
    """
    flax = {name: np.asarray(leaf) for name, leaf in transformer.flatten(model).items()}
    part = "encoder" if isinstance(model, Encoder) else "model"
    table = registry.weight_table(model.config, part, architecture=architecture)
    return rules.to_torch(table, flax)


def into_torch(
    model: Transformer, module: Any, *, architecture: Architecture | str | None = None
) -> Any:
    """Fill a torch module with the model's weights, strictly, and return it. Needs torch.

    The module takes the weights' dtypes. ``architecture`` is as for :func:`to_torch`.
    """
    from jax_transformer.weights import torch_bridge

    return torch_bridge.fill(module, to_torch(model, architecture=architecture))
