"""``config.json`` of a Hugging Face folder: to a configuration of the one model, and back."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from jax_transformer.architectures import huggingface, huggingface_attributes
from jax_transformer.architectures.huggingface import HuggingFaceFamily
from jax_transformer.config import TransformerConfig, Tying
from jax_transformer.errors import ConfigError, InputError, nearest

AreEqual = Callable[[str, str], bool]
"""Returns True if two tensors of a file, given by name, are equal."""


def is_huggingface(data: Mapping[str, Any]) -> bool:
    """True if a ``config.json`` is one of transformers: it has a ``model_type``, and this project's
    has none.
    """
    return "model_type" in data


def from_config(
    data: Mapping[str, Any],
    *,
    names: Collection[str] | None = None,
    same: AreEqual | None = None,
) -> TransformerConfig:
    """Return the configuration of the model that a ``config.json`` describes.

    An attribute that it does not name has its class's default. The file's tensors decide whether
    the output layer is tied to the embeddings, as transformers 5 decides it: what is missing is
    tied, and what is equal if ``tie_word_embeddings`` is true.

    Args:
        data: the file's attributes.
        names: the file's tensors; without them ``tie_word_embeddings`` decides.
        same: returns True if two tensors are equal; without it ``tie_word_embeddings`` decides
            about a file that holds both.

    Raises:
        InputError: names every attribute that is unknown, mistyped, or has a value that no model
            here has.
    """
    family = _family(data)
    wrong = list(huggingface_attributes.problems(family, data))
    if wrong:
        raise InputError(f"config.json: {'; '.join(wrong)}")
    values = family.complete(huggingface_attributes.read(family, data))
    tied = _output_is_tied(family, values, names, same)
    try:
        return family.to_transformer_config(values | {"tie_word_embeddings": tied})
    except ConfigError as error:
        raise InputError(f"config.json: {error}") from None


def _family(data: Mapping[str, Any]) -> HuggingFaceFamily:
    known, model_type = huggingface.families(), data.get("model_type")
    if not isinstance(model_type, str) or model_type not in known:
        close = nearest(model_type, list(known)) if isinstance(model_type, str) else ""
        raise InputError(
            f"config.json: model_type={model_type!r} is none of the families"
            f" {', '.join(known)}{close}"
        )
    return known[model_type]


def _output_is_tied(
    family: HuggingFaceFamily,
    values: Mapping[str, Any],
    names: Collection[str] | None,
    same: AreEqual | None,
) -> bool:
    asked = values["tie_word_embeddings"]
    if names is None or not (asked or family.output_tied_by_file):
        return asked
    embedding = family.output_embedding(values)
    if "lm_head.weight" not in names or embedding not in names:
        return True
    return asked if same is None else same("lm_head.weight", embedding)


def to_config(
    config: TransformerConfig, original: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the ``config.json`` with which transformers computes what a model of ``config``
    computes.

    The inverse of :func:`from_config`. Left out are fields that act only in training here and have
    no attribute there (dropouts other than the family's, masks, initialisation, dtypes), and the
    longest sequence of families whose positions have no end.

    Args:
        config: the model's configuration.
        original: the ``config.json`` that the model came from: it is returned with what has changed
            since.

    Raises:
        ConfigError: names the fields that no model of the family has so.
    """
    family = huggingface.family_of(config)
    attributes = {
        "model_type": family.model_type,
        "architectures": [family.model_class],
        **_attributes(family, config),
        "is_encoder_decoder": True,
        "use_cache": True,
    }
    _check_read_back(family, config, from_config(attributes))
    if original is None:
        return attributes
    before = from_config(original)
    if family.output_tied_by_file:
        before = replace(before, tying=config.tying)  # not the attribute, but the tensors decide
    old, new = _attributes(family, before), _attributes(family, config)
    changed = {name for name in new if new[name] != old.get(name)}
    names = {name: family.aliases.get(name, name) for name in original}
    unchanged = {
        name: new[names[name]] if names[name] in changed else value
        for name, value in original.items()
    }
    return unchanged | {name: new[name] for name in sorted(changed)}


def _attributes(family: HuggingFaceFamily, config: TransformerConfig) -> dict[str, Any]:
    """The attributes that are read, as they must be for ``config``."""
    common = {
        "vocab_size": config.source_vocab_size,
        "d_model": config.d_model,
        "pad_token_id": config.source_pad_id,
        "eos_token_id": config.eos_id,
        "decoder_start_token_id": config.bos_id,
        "tie_word_embeddings": config.tying in (Tying.ALL, Tying.OUTPUT),
    }
    return common | family.to_attributes(config)


# Fields that act only in training, or that say in which precision numbers are kept
_NOT_WRITTEN = (
    "dropout",
    "attention_dropout",
    "activation_dropout",
    "embedding_dropout",
    "dropout_masks",
    "init",
    "compute_dtype",
)


def _check_read_back(
    family: HuggingFaceFamily, config: TransformerConfig, read: TransformerConfig
) -> None:
    """Raise ConfigError that names the fields in which what would be read differs from
    ``config``.
    """
    not_written = {*_NOT_WRITTEN, *(["max_length"] if family.unbounded_length else [])}
    ours, theirs = flat(config), flat(read)
    wrong = [
        f"{name}={ours[name]}: {family.model_type} of transformers has {theirs[name]}"
        for name in ours
        if name.rpartition(".")[2] not in not_written and ours[name] != theirs[name]
    ]
    if wrong:
        raise ConfigError(f"this model is none of the family: {'; '.join(wrong)}")


def flat(config: TransformerConfig) -> dict[str, Any]:
    """Return every field by its dotted name; a stack's number that it takes from the model is the
    model's.
    """
    fields = {
        name: value
        for name, value in vars(config).items()
        if name not in ("encoder", "decoder", "num_heads", "d_ff", "head_dim")
    }
    if config.attention_bias is None:
        fields["attention_bias"] = config.bias
    for name, stack in (("encoder", config.encoder), ("decoder", config.decoder)):
        own = vars(stack) | {
            "num_heads": config.heads(stack),
            "d_ff": stack.d_ff or config.d_ff,
            "head_dim": config.head_width_of(stack),
        }
        fields |= {f"{name}.{field}": value for field, value in own.items()}
    return fields
