"""What the PyTorch twin of each layout is given for a configuration: derived from it, so that the two cannot drift. Needs no torch."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from jax_transformer.architectures import presets
from jax_transformer.config import (
    EmbeddingScale,
    Layout,
    Mask,
    NormPlacement,
    TransformerConfig,
    Tying,
)
from jax_transformer.errors import ConfigError

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional ones and those by name."""


def arguments(config: TransformerConfig) -> Arguments:
    """Of the class of ``torch_reference`` that computes what a Transformer of ``config`` computes.

    Raises ConfigError that names the fields which the module of that layout cannot be set to.
    """
    return _ARGUMENTS[config.layout](config)


def _given(*positional: Any, **named: Any) -> Arguments:
    return positional, named


def _check_like(config: TransformerConfig, preset: str, *free: str) -> None:
    """Raises ConfigError unless ``config`` is the preset but for the fields named ``free`` and those that every twin takes."""
    every = {
        "source_vocab_size",
        "target_vocab_size",
        "source_pad_id",
        "target_pad_id",
        "bos_id",
        "eos_id",
        "d_model",
        "num_heads",
        "max_length",
    }
    every |= {
        "encoder.layers",
        "decoder.layers",
        "dropout",
        "dropout_masks",
        "compute_dtype",
        "architecture",
    }
    known = presets.preset(
        preset, d_model=config.d_model, num_heads=config.num_heads, dropout=config.dropout
    )
    ours, theirs = (dict(_leaves(value)) for value in (config, known))
    wrong = [name for name in ours if name not in every | set(free) and ours[name] != theirs[name]]
    if wrong:
        raise ConfigError(
            "; ".join(
                f"{name}={ours[name]}: the PyTorch twin of layout {config.layout.value!r} knows only {theirs[name]}"
                for name in wrong
            )
        )


def _leaves(config: TransformerConfig) -> Iterator[tuple[str, object]]:
    """Every field by dotted name; where None stands for the model's own, the model's own."""
    for name, value in vars(config).items():
        if name not in ("encoder", "decoder"):
            yield name, value
    yield "head_dim", config.head_width
    for stack in (config.encoder, config.decoder):
        name = "encoder" if stack is config.encoder else "decoder"
        yield from (
            (f"{name}.{field}", value)
            for field, value in vars(stack).items()
            if field != "branches"
        )
        yield (
            f"{name}.branches",
            tuple(
                replace(b, dropout=config.dropout if b.dropout is None else b.dropout)
                for b in stack.branches
            ),
        )


def _one_rate(config: TransformerConfig, *names: str) -> float:
    """The rate that all these dropouts have. Raises ConfigError where they differ from ``dropout``."""
    for name in names:
        if getattr(config, name) != config.dropout:
            raise ConfigError(
                f"{name}={getattr(config, name)}: the PyTorch twin of layout {config.layout.value!r} has one rate, dropout={config.dropout}"
            )
    return config.dropout


def _repaired(config: TransformerConfig, name: str, *free: str) -> bool:
    """Whether ``config`` is the repaired preset of that name, and not the faithful one. Raises ConfigError where it is neither."""
    try:
        _check_like(config, name, *free)
    except ConfigError as faithful:
        try:
            _check_like(config, f"{name}_repaired", *free)
        except ConfigError as repaired:
            raise min(faithful, repaired, key=lambda error: len(str(error))) from None
        return True
    return False


def _vocabularies(config: TransformerConfig) -> list[int]:
    return [
        config.source_vocab_size,
        config.target_vocab_size,
        config.source_pad_id,
        config.target_pad_id,
    ]


def _deep_dive(config: TransformerConfig) -> Arguments:
    repaired = _repaired(config, "deep_dive", "embedding_dropout")
    return _given(
        *_vocabularies(config),
        config.d_model,
        _one_depth(config),
        config.num_heads,
        _one_rate(config, "embedding_dropout"),
        max_length=config.max_length,
        repaired=repaired,
    )


def _from_scratch(config: TransformerConfig) -> Arguments:
    repaired = _repaired(config, "from_scratch", "embedding_dropout", "d_ff")
    expansion, left = divmod(config.d_ff, config.d_model)
    if left:
        raise ConfigError(
            f"d_ff={config.d_ff}: the PyTorch twin of layout {config.layout.value!r} knows only multiples of d_model={config.d_model}"
        )
    return _given(
        *_vocabularies(config),
        embed_size=config.d_model,
        num_layers=_one_depth(config),
        forward_expansion=expansion,
        heads=config.num_heads,
        dropout=_one_rate(config, "embedding_dropout"),
        max_length=config.max_length,
        repaired=repaired,
    )


def _part2_encoder(config: TransformerConfig) -> Arguments:
    rates = ("attention_dropout", "activation_dropout", "embedding_dropout")
    repaired = _repaired(config, "part2_encoder", *rates, "d_ff")
    return _given(
        *_vocabularies(config),
        d_model=config.d_model,
        fnn_hidden=config.d_ff,
        num_heads=config.num_heads,
        drop_prob=_one_rate(config, *rates),
        max_sequence_length=config.max_length,
        num_encoder_layers=config.encoder.layers,
        num_decoder_layers=config.decoder.layers,
        repaired=repaired,
    )


def _blog2023(config: TransformerConfig) -> Arguments:
    repaired = _repaired(config, "blog2023", "embedding_dropout", "attention_bias")
    return _given(
        *_vocabularies(config),
        embed_size=config.d_model,
        heads=config.num_heads,
        num_encoder_layers=config.encoder.layers,
        num_decoder_layers=config.decoder.layers,
        max_len=config.max_length,
        dropout=_one_rate(config, "embedding_dropout") if repaired else config.embedding_dropout,
        bias=config.attention_bias is not False,
        repaired=repaired,
    )


def _one_depth(config: TransformerConfig) -> int:
    layers = config.encoder.layers, config.decoder.layers
    if layers[0] != layers[1]:
        raise ConfigError(
            f"encoder.layers={layers[0]} and decoder.layers={layers[1]}: the PyTorch twin of layout {config.layout.value!r} has one depth"
        )
    return layers[0]


def _sizes(config: TransformerConfig) -> dict:
    if config.head_dim not in (None, config.d_model // config.num_heads):
        raise ConfigError(
            f"head_dim={config.head_dim}: torch.nn.Transformer has heads of d_model / num_heads"
        )
    return {
        "src_vocab_size": config.source_vocab_size,
        "tgt_vocab_size": config.target_vocab_size,
        "src_pad_idx": config.source_pad_id,
        "tgt_pad_idx": config.target_pad_id,
        "max_sequence_length": config.max_length,
        "d_model": config.d_model,
        "nhead": config.num_heads,
        "num_encoder_layers": config.encoder.layers,
        "num_decoder_layers": config.decoder.layers,
        "dim_feedforward": config.d_ff,
        "dropout": config.dropout,
    }


def _lesson10(config: TransformerConfig) -> Arguments:
    rates = ("attention_dropout", "activation_dropout", "embedding_dropout")
    repaired = _repaired(config, "lesson10", *rates, "d_ff", "decoder.activation")
    _one_rate(config, *rates)
    return _given(**_sizes(config), activation=config.decoder.activation.value, repaired=repaired)


def _torch_nn(config: TransformerConfig) -> Arguments:
    encoder, decoder = config.encoder, config.decoder
    if encoder.positions is not decoder.positions:
        raise ConfigError("the stock PyTorch twin has one kind of positions for both stacks")
    return _given(
        **_sizes(config),
        attention_dropout=config.attention_dropout,
        activation_dropout=config.activation_dropout,
        embedding_dropout=config.embedding_dropout,
        encoder_activation=encoder.activation.value,
        decoder_activation=decoder.activation.value,
        layer_norm_eps=config.norm_epsilon,
        norm_first=config.norm_placement is NormPlacement.PRE,
        bias=config.bias,
        encoder_norm=encoder.final_norm,
        decoder_norm=decoder.final_norm,
        scale_embedding=config.embedding_scale is EmbeddingScale.SQRT_D_MODEL,
        positions=encoder.positions.value,
        mask_memory=Mask.SOURCE_PADDING in decoder.cross_mask,
        tie_output=config.tying is not Tying.NONE,
        tie_source=config.tying is Tying.ALL,
        output_bias=config.output_bias,
    )


_ARGUMENTS: dict[Layout, Callable[[TransformerConfig], Arguments]] = {
    Layout.TORCH_NN: _torch_nn,
    Layout.LESSON10: _lesson10,
    Layout.DEEP_DIVE: _deep_dive,
    Layout.FROM_SCRATCH: _from_scratch,
    Layout.PART2_ENCODER: _part2_encoder,
    Layout.BLOG2023: _blog2023,
}
