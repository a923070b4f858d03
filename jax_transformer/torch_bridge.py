"""The only file of this package that imports torch and transformers: tensors to arrays, and PyTorch
twins, which are transformers' own classes for its families.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import torch_reference.recording
from jax_transformer.architectures import base, huggingface, registry
from jax_transformer.architectures.base import Architecture
from jax_transformer.architectures.huggingface_config import to_config
from jax_transformer.config import Norm, PositionIndex, Positions, TransformerConfig, Tying
from jax_transformer.errors import ConfigError, InputError
from jax_transformer.nn.embeddings import sinusoids

# Dtypes that torch cannot pass to NumPy: their bits are passed as integers
_UNTYPED = {torch.bfloat16: (torch.uint16, "bfloat16")}


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Return a copy of the tensor's values, bit for bit."""
    tensor = tensor.detach().cpu()
    if tensor.dtype in _UNTYPED:
        import ml_dtypes

        bits, name = _UNTYPED[tensor.dtype]
        return tensor.contiguous().view(bits).numpy().copy().view(getattr(ml_dtypes, name))
    return np.array(tensor.numpy(), order="C")


def to_tensor(array: np.ndarray) -> torch.Tensor:
    """Return a tensor with a copy of the array's values, bit for bit."""
    for dtype, (bits, name) in _UNTYPED.items():
        if array.dtype.name == name:
            return (
                torch.from_numpy(array.view(f"uint{8 * array.dtype.itemsize}").copy())
                .view(bits)
                .view(dtype)
            )
    return torch.from_numpy(np.array(array, order="C"))


def fill(module: nn.Module, state: dict[str, np.ndarray]) -> nn.Module:
    """Load ``state`` strictly, in place, and return the module.

    Tied parameters stay tied, and the module takes the arrays' dtypes. Raises InputError that names
    everything missing, unexpected and mis-shaped.
    """
    tensors = {name: to_tensor(array) for name, array in state.items()}
    for name, parameter in module.state_dict(keep_vars=True).items():
        if name in tensors:
            parameter.data = parameter.data.to(tensors[name].dtype)
    try:
        module.load_state_dict(tensors, strict=True)
    except RuntimeError as error:
        raise InputError(" ".join(str(error).split())) from None
    return module


def twin(config: TransformerConfig, architecture: Architecture | str | None = None) -> nn.Module:
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
    if known.huggingface is not None:
        return _huggingface_twin(config)
    twin_class = base.reference_class(known)
    if known.reference_arguments is None:
        raise ConfigError(
            f"architecture {known.name!r} does not say how its twin is called: set its field"
            " `reference_arguments`"
        )
    positional, named = known.reference_arguments(config)
    try:
        return twin_class(*positional, **named)
    except Exception as error:  # in a user's file
        raise ConfigError(
            f"architecture {known.name!r}: its twin raised {type(error).__name__}: {error}"
        ) from error


def parameter_names(
    config: TransformerConfig, architecture: Architecture | str | None = None
) -> list[str]:
    """List the twin's trained parameters in the order in which torch.optim numbers them."""
    with torch.device("meta"):
        module = twin(config, architecture)
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad]


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
    is_family = registry.get(config.architecture).huggingface is not None
    if is_family:  # transformers' modules have fewer rates
        config = _without_dropout(config)
    module = (
        fill(twin(config), {name: array.astype(np.float64) for name, array in state.items()})
        .double()
        .eval()
    )
    results: dict[str, np.ndarray] = {}
    for key, name in modules.items():

        def record(_: nn.Module, __: object, result: torch.Tensor | tuple, key: str = key) -> None:
            results[key] = to_numpy(result[0] if isinstance(result, tuple) else result)

        part = module.get_submodule(name)
        if isinstance(part, nn.ModuleList):  # a block whose weights all lie in a list of its own
            part = module.get_submodule(name.rpartition(".")[0])
        part.register_forward_hook(record)
    try:  # with gradients on, PyTorch takes no fast path that leaves modules out
        logits = module(torch.from_numpy(source), torch.from_numpy(target))
    except Exception as error:  # in a user's file
        raise ConfigError(
            f"architecture {config.architecture!r}: its twin raised {type(error).__name__}: {error}"
        ) from error
    return {"logits": to_numpy(logits)} | results


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
    module: nn.Module,
    batch: Sequence[np.ndarray],
    *,
    dtype: str,
    seed: int | None,
    call: Callable[..., object] | None = None,
) -> torch_reference.recording.Recording:
    """Return inputs and outputs of every module of a PyTorch model, computed in ``dtype``.

    See ``torch_reference.recording.record``.
    """
    return torch_reference.recording.record(
        module, batch, dtype=getattr(torch, dtype), seed=seed, call=call
    )


# Twins of the families of transformers


def _huggingface_twin(config: TransformerConfig) -> nn.Module:
    """Return transformers' module for ``config`` with fresh weights, under its own names.

    It is called as ``module(source, target)`` with ids (b, s), or spectrograms (b, c, w), and ids
    (b, t) for logits (b, t, v).
    Three things that transformers computes in float32 whatever the weights' dtype are computed in
    theirs: root-mean-square norms, the softmax of local attention, and sines and cosines that count
    tokens which are not padding.

    Raises:
        ConfigError: names the fields that the module cannot be set to, or transformers is missing.
    """
    try:
        import transformers
    except ImportError:
        raise ConfigError(
            f"the PyTorch twin of architecture {config.architecture!r} is transformers' own:"
            " pip install transformers"
        ) from None
    family = huggingface.family_of(config)
    _check_rates(family, config)
    attributes = to_config(config)
    del attributes["architectures"]
    settings = transformers.AutoConfig.for_model(**attributes, attn_implementation="eager")
    module = _called_by_position(getattr(transformers, family.model_class))(settings)
    core = module.get_submodule(family.prefix.rstrip("."))
    if config.tying is Tying.EMBEDDINGS:
        _untie_output(module, core)
    if config.norm is Norm.RMS:
        _replace_norms(module, config)
    for stack, described in ((core.encoder, config.encoder), (core.decoder, config.decoder)):
        if described.positions is Positions.SINUSOIDAL_STORED:
            # FSMT's class trains these, which fairseq never did
            stack.embed_positions.requires_grad_(False)
        elif described.position_index is PositionIndex.NOT_PADDING:
            stack.embed_positions = _CountedPositions(config)
    return module


def _check_rates(family: huggingface.HuggingFaceFamily, config: TransformerConfig) -> None:
    wrong = [
        f"{name}={getattr(config, name)}"
        for name in family.one_rate
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


class KeepFloat64(TorchFunctionMode):
    """Inside it, ``tensor.float()`` leaves float64 as it is.

    Otherwise LongT5's softmax is computed in float32 whatever dtype a model has, and FSMT cannot
    make its mask of float64.
    """

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        if function is torch.Tensor.float and arguments[0].dtype is torch.float64:
            return arguments[0]
        return function(*arguments, **(options or {}))


def _called_by_position(kind: type) -> type:
    class Twin(kind):
        def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            if source.is_floating_point():
                arguments = {"input_features": source.to(self.dtype)}
            else:
                mask = (source != self.config.pad_token_id).long()
                arguments = {"input_ids": source, "attention_mask": mask}
            with KeepFloat64():
                outputs = super().forward(**arguments, decoder_input_ids=target, use_cache=False)
            return outputs.logits

    Twin.__name__ = Twin.__qualname__ = kind.__name__
    return Twin


def _untie_output(module: Any, core: Any) -> None:
    """Give both embeddings one matrix and the output another: transformers ties all three, or in
    some families none.
    """
    module.lm_head.weight = nn.Parameter(module.lm_head.weight.detach().clone())
    for stack in (core.encoder, core.decoder):
        stack.embed_tokens.weight = core.shared.weight


def _replace_norms(module: nn.Module, config: TransformerConfig) -> None:
    for name, part in list(module.named_modules()):
        if name.endswith("layer_norm"):
            owner, _, leaf = name.rpartition(".")
            setattr(
                module.get_submodule(owner),
                leaf,
                nn.RMSNorm(part.weight.shape[0], eps=config.norm_epsilon),
            )


class _CountedPositions(nn.Module):
    """Positions that count the tokens which are not padding; padding has none."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        stack = config.encoder
        self.padding, self.offset = config.source_pad_id, stack.position_offset
        self.table = np.array(
            sinusoids(config.max_length + self.offset, config.d_model, layout=stack.sinusoids)
        )

    def forward(self, ids: torch.Tensor, embeddings: torch.Tensor, before: int = 0) -> torch.Tensor:
        """Return the rows (b, n, d) of ids (b, n), in the dtype of ``embeddings``, after ``before``
        tokens.
        """
        valid = ids != self.padding
        rows = torch.where(valid, torch.cumsum(valid, dim=1) - 1 + before + self.offset, 0)
        table = torch.from_numpy(self.table).to(embeddings.device)
        return (table[rows] * valid[..., None]).to(embeddings.dtype)
