"""The model of a checkpoint of T5X that is converted, and the layout of one that is written."""

from pathlib import Path
from typing import TYPE_CHECKING

from jax_transformer.architectures import registry
from jax_transformer.config import TransformerConfig
from jax_transformer.convert import config_file, infer
from jax_transformer.errors import ConfigError
from jax_transformer.extras.toolkits.t5x import gin_config, t5x_names
from jax_transformer.extras.toolkits.t5x.t5x_names import Layout
from jax_transformer.formats.kinds import Kind
from jax_transformer.formats.pretrained import Pretrained

if TYPE_CHECKING:
    from jax_transformer.convert.preparation import ModelDescription, Request

_ACTIVATIONS = {"relu": "relu", "gelu_tanh": "gelu", "silu": "silu"}


def settle(description: "ModelDescription", source: Pretrained, layout: Layout) -> infer.Inferred:
    """Return the configuration of a checkpoint whose ``config.gin`` does not decide it.

    Its sizes are read from the shapes; the activation is the preset's, or ``--set activation=``.
    Raises ConfigError if neither says it, or if nothing describes the model.
    """
    if (description.config is None) == (description.preset is None):
        raise ConfigError(
            f"{source.path}: no {gin_config.CONFIG} tells mlp_activations: give --preset t5, with "
            "--set activation=gelu_tanh for T5 v1.1, mT5 and UMT5, or --config config.json"
        )
    if description.config is not None:
        names = gin_config.stored_names(layout)
        config = config_file.read(Path(description.config), names)
        return infer.Inferred(config.with_sizes(**description.changes), {}, {})
    preset = registry.find_preset(description.preset or "").config
    changes = dict(description.changes)
    activation = changes.pop("activation", None)
    if preset.architecture not in t5x_names.FAMILIES:
        raise ConfigError(
            f"--preset {description.preset}: {source.path} is a model of T5X, and the preset t5 "
            "describes those"
        )
    if activation is None and layout.gated != preset.encoder.gated:
        raise ConfigError(
            f"{source.path}: has wi_0 and wi_1, and the preset {description.preset} does not say "
            "which activation is between them: --set activation=gelu_tanh for T5 v1.1, mT5 and UMT5"
        )
    name = preset.encoder.activation.value if activation is None else activation
    if name not in _ACTIVATIONS:
        raise ConfigError(f"--set activation={name}: give one of {', '.join(_ACTIVATIONS)}")
    names_of_gin = (_ACTIVATIONS[name], *(("linear",) if layout.gated else ()))
    gin = gin_config.Gin(None, names_of_gin)
    config = gin_config.configuration(layout, gin).with_sizes(**changes)
    fields = {} if activation is not None else {"activation": name}
    return infer.Inferred(config, layout.sizes(), fields | {"dropout": config.dropout})


def layout_to_write(
    request: "Request", kind: Kind, config: TransformerConfig | None
) -> Layout | None:
    """Return the layout of a checkpoint of T5X that is written; None for another kind.

    Raises ConfigError if T5X has no network for the model, or for flags without such a checkpoint.
    """
    if kind is not Kind.T5X:
        if request.scan_layers:
            raise ConfigError("--scan-layers: goes with --to t5x")
        return None
    assert config is not None  # only files are copied without a model
    axis = request.param_scan_axis if request.scan_layers else None
    return t5x_names.layout_of(config, scan_layers=request.scan_layers, scan_axis=axis)


def scale_note(source: Pretrained, kind: Kind, config: TransformerConfig) -> str | None:
    """Return a note on the scale of UMT5's logits, if one side is T5X."""
    if Kind.T5X not in (source.kind, kind) or not t5x_names.scale_differs(config):
        return None
    return (
        "transformers multiplies the logits of every UMT5 by d_model**-0.5, and T5X only those of "
        "a tied output layer: the most probable token is the same, probabilities are not"
    )
