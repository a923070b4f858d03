"""The one file of this package that imports torch: tensors to arrays, and the PyTorch twin of a configuration."""

import numpy as np
import torch
from torch import nn

import torch_reference.lesson10
import torch_reference.torch_nn
from jax_transformer.config import EmbeddingScale, Layout, Mask, NormPlacement, TransformerConfig, Tying
from jax_transformer.errors import ConfigError, InputError

_UNTYPED = {torch.bfloat16: (torch.uint16, "bfloat16")}  # dtypes that torch cannot hand to NumPy: their bits travel as integers


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's values, bit for bit, in memory of their own."""
    tensor = tensor.detach().cpu()
    if tensor.dtype in _UNTYPED:
        import ml_dtypes

        bits, name = _UNTYPED[tensor.dtype]
        return tensor.contiguous().view(bits).numpy().copy().view(getattr(ml_dtypes, name))
    return np.array(tensor.numpy(), order="C")


def to_tensor(array: np.ndarray) -> torch.Tensor:
    """Inverse of :func:`to_numpy`."""
    for dtype, (bits, name) in _UNTYPED.items():
        if array.dtype.name == name:
            return torch.from_numpy(array.view(f"uint{8 * array.dtype.itemsize}").copy()).view(bits).view(dtype)
    return torch.from_numpy(np.array(array, order="C"))


def fill(module: nn.Module, state: dict[str, np.ndarray]) -> nn.Module:
    """Load ``state`` strictly, in place: tied parameters stay one. The module takes the arrays' dtypes."""
    tensors = {name: to_tensor(array) for name, array in state.items()}
    for name, parameter in module.state_dict(keep_vars=True).items():
        if name in tensors:
            parameter.data = parameter.data.to(tensors[name].dtype)
    try:
        module.load_state_dict(tensors, strict=True)
    except RuntimeError as error:
        raise InputError(" ".join(str(error).split())) from None
    return module


def twin(config: TransformerConfig) -> nn.Module:
    """The PyTorch module that computes what a Transformer of ``config`` computes, with fresh weights of its own.

    Its arguments are derived from ``config``, so the two cannot drift. Raises ConfigError where the module of that layout cannot be set so.
    """
    return {Layout.TORCH_NN: _torch_nn, Layout.LESSON10: _lesson10}[config.layout](config)


def _sizes(config: TransformerConfig) -> dict:
    if config.head_dim not in (None, config.d_model // config.num_heads):
        raise ConfigError(f"head_dim={config.head_dim}: torch.nn.Transformer has heads of d_model / num_heads")
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


def _same_model(config: TransformerConfig, **expected: object) -> None:
    for name, value in expected.items():
        if getattr(config, name) != value:
            raise ConfigError(f"{name}={getattr(config, name)}: the PyTorch twin of layout {config.layout.value!r} knows only {value}")


def _lesson10(config: TransformerConfig) -> nn.Module:
    _same_model(
        config,
        tying=Tying.NONE,
        bias=True,
        norm_placement=NormPlacement.POST,
        norm_epsilon=1e-5,
        **dict.fromkeys(("attention_dropout", "activation_dropout", "embedding_dropout"), config.dropout),
    )
    return torch_reference.lesson10.TranslationTransformer(
        **_sizes(config),
        activation=config.decoder.activation.value,
        repaired=Mask.SOURCE_PADDING in config.decoder.cross_mask,
    )


def _torch_nn(config: TransformerConfig) -> nn.Module:
    encoder, decoder = config.encoder, config.decoder
    if encoder.positions is not decoder.positions:
        raise ConfigError("the stock PyTorch twin has one kind of positions for both stacks")
    return torch_reference.torch_nn.TorchTransformer(
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
