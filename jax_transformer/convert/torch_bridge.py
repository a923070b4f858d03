"""The one file of this package that imports torch: tensors to arrays, and the PyTorch twin of a configuration."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import nn

import torch_reference.blog2023
import torch_reference.deep_dive
import torch_reference.from_scratch
import torch_reference.lesson10
import torch_reference.part2_encoder
import torch_reference.recording
import torch_reference.torch_nn
from jax_transformer import presets
from jax_transformer.config import EmbeddingScale, Layout, Mask, NormPlacement, TransformerConfig, Tying
from jax_transformer.convert.huggingface import families
from jax_transformer.convert.huggingface.attributes import LAYOUTS
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

    Its arguments are derived from ``config``, so the two cannot drift. Raises ConfigError that names the fields which the module of that layout
    cannot be set to.
    """
    return _TWINS[config.layout](config)


def parameter_names(config: TransformerConfig) -> list[str]:
    """Of the twin's parameters that are trained, in the order in which torch.optim numbers them."""
    with torch.device("meta"):
        return [name for name, parameter in twin(config).named_parameters() if parameter.requires_grad]


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
    every |= {"encoder.layers", "decoder.layers", "dropout", "dropout_masks", "compute_dtype", "layout"}
    known = presets.preset(preset, d_model=config.d_model, num_heads=config.num_heads, dropout=config.dropout)
    ours, theirs = (dict(_leaves(value)) for value in (config, known))
    wrong = [name for name in ours if name not in every | set(free) and ours[name] != theirs[name]]
    if wrong:
        raise ConfigError(
            "; ".join(
                f"{name}={ours[name]}: the PyTorch twin of layout {config.layout.value!r} knows only {theirs[name]}" for name in wrong
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
        yield from ((f"{name}.{field}", value) for field, value in vars(stack).items() if field != "branches")
        yield f"{name}.branches", tuple(replace(b, dropout=config.dropout if b.dropout is None else b.dropout) for b in stack.branches)


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
    return [config.source_vocab_size, config.target_vocab_size, config.source_pad_id, config.target_pad_id]


def _deep_dive(config: TransformerConfig) -> nn.Module:
    repaired = _repaired(config, "deep_dive", "embedding_dropout")
    return torch_reference.deep_dive.TransformerArchitecture(
        *_vocabularies(config),
        config.d_model,
        _one_depth(config),
        config.num_heads,
        _one_rate(config, "embedding_dropout"),
        max_length=config.max_length,
        repaired=repaired,
    )


def _from_scratch(config: TransformerConfig) -> nn.Module:
    repaired = _repaired(config, "from_scratch", "embedding_dropout", "d_ff")
    expansion, left = divmod(config.d_ff, config.d_model)
    if left:
        raise ConfigError(
            f"d_ff={config.d_ff}: the PyTorch twin of layout {config.layout.value!r} knows only multiples of d_model={config.d_model}"
        )
    return torch_reference.from_scratch.Transformer(
        *_vocabularies(config),
        embed_size=config.d_model,
        num_layers=_one_depth(config),
        forward_expansion=expansion,
        heads=config.num_heads,
        dropout=_one_rate(config, "embedding_dropout"),
        max_length=config.max_length,
        repaired=repaired,
    )


def _part2_encoder(config: TransformerConfig) -> nn.Module:
    rates = ("attention_dropout", "activation_dropout", "embedding_dropout")
    repaired = _repaired(config, "part2_encoder", *rates, "d_ff")
    return torch_reference.part2_encoder.EncoderDecoder(
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


def _blog2023(config: TransformerConfig) -> nn.Module:
    repaired = _repaired(config, "blog2023", "embedding_dropout", "attention_bias")
    return torch_reference.blog2023.Transformer(
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


def _lesson10(config: TransformerConfig) -> nn.Module:
    rates = ("attention_dropout", "activation_dropout", "embedding_dropout")
    repaired = _repaired(config, "lesson10", *rates, "d_ff", "decoder.activation")
    _one_rate(config, *rates)
    return torch_reference.lesson10.TranslationTransformer(**_sizes(config), activation=config.decoder.activation.value, repaired=repaired)


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


def _huggingface(config: TransformerConfig) -> nn.Module:
    try:
        from jax_transformer.convert import transformers_bridge
    except ImportError:
        raise ConfigError(f"the PyTorch twin of layout {config.layout.value!r} is transformers' own: pip install transformers") from None
    return transformers_bridge.twin(config)


_TWINS = {
    **dict.fromkeys(LAYOUTS, _huggingface),
    Layout.TORCH_NN: _torch_nn,
    Layout.LESSON10: _lesson10,
    Layout.DEEP_DIVE: _deep_dive,
    Layout.FROM_SCRATCH: _from_scratch,
    Layout.PART2_ENCODER: _part2_encoder,
    Layout.BLOG2023: _blog2023,
}


def outputs(
    config: TransformerConfig, state: Mapping[str, np.ndarray], source: np.ndarray, target: np.ndarray, modules: Mapping[str, str]
) -> dict[str, np.ndarray]:
    """The float64 logits of the twin with these weights, and what the named modules gave, each under its key of ``modules``.

    Raises ConfigError where there is no twin of this configuration.
    """
    config = families.without_dropout(config) if config.layout in LAYOUTS else config  # whose modules have fewer rates than ours
    module = fill(twin(config), {name: array.astype(np.float64) for name, array in state.items()}).double().eval()
    found: dict[str, np.ndarray] = {}
    for key, name in modules.items():

        def keep(_: nn.Module, __: object, result: torch.Tensor | tuple, key: str = key) -> None:
            found[key] = to_numpy(result[0] if isinstance(result, tuple) else result)

        part = module.get_submodule(name)
        if isinstance(part, nn.ModuleList):  # a block whose weights all lie in a list of its own
            part = module.get_submodule(name.rpartition(".")[0])
        part.register_forward_hook(keep)
    # With gradients on, PyTorch takes no fast path that leaves modules out
    return {"logits": to_numpy(module(torch.from_numpy(source), torch.from_numpy(target)))} | found


def recorded(
    module: nn.Module, batch: Sequence[np.ndarray], *, dtype: str, seed: int | None, call: Callable[..., object] | None = None
) -> torch_reference.recording.Recording:
    """What the modules of a PyTorch model take and give, see ``torch_reference.recording.record``; ``dtype`` by its name."""
    return torch_reference.recording.record(module, batch, dtype=getattr(torch, dtype), seed=seed, call=call)
