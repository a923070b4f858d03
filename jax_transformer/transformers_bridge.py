"""The one file of this package that imports transformers: its own class as the PyTorch twin of a configuration of its families."""

from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

from jax_transformer.architectures import attributes
from jax_transformer.architectures.attributes import T5_LIKE
from jax_transformer.architectures.huggingface_config import to_config
from jax_transformer.config import Layout, TransformerConfig, Tying
from jax_transformer.errors import ConfigError
from jax_transformer.nn.positions import sinusoids


def twin(config: TransformerConfig) -> nn.Module:
    """transformers' module for ``config`` with fresh weights, called as ``module(source, target)`` for logits (b, t, v).

    It keeps its names. Two things that transformers computes in float32 whatever the weights' dtype, it computes in theirs: the norm of T5, and
    M2M100's sines and cosines, which are those of :func:`..nn.positions.sinusoids`. Raises ConfigError that names the fields which the module
    cannot be set to.
    """
    _check_rates(config)
    values = to_config(config)
    del values["architectures"]
    settings = transformers.AutoConfig.for_model(**values, attn_implementation="eager")
    module = _called_by_ids(getattr(transformers, attributes.classes(config.layout)[0]))(settings)
    if config.tying is Tying.EMBEDDINGS:
        _untie_output(module, config)
    if config.layout in T5_LIKE:
        _replace_norms(module, config)
    if config.layout is Layout.M2M_100:
        for stack in (module.model.encoder, module.model.decoder):
            stack.embed_positions = _Positions(config)
    return module


def _check_rates(config: TransformerConfig) -> None:
    one_rate = ["embedding_dropout"]
    if config.layout in T5_LIKE:
        one_rate += ["attention_dropout", "activation_dropout"]
    wrong = [
        f"{name}={getattr(config, name)}"
        for name in one_rate
        if getattr(config, name) != config.dropout
    ]
    wrong += [
        f"{name}.attention_dropout"
        for name in ("encoder", "decoder")
        if getattr(config, name).attention_dropout is not None
    ]
    if wrong:
        raise ConfigError(
            f"{', '.join(wrong)}: the PyTorch twin of layout {config.layout.value!r} has one rate, dropout={config.dropout}"
        )


def _called_by_ids(kind: type) -> type:
    class Twin(kind):
        def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            mask = (source != self.config.pad_token_id).long()
            return (
                super()
                .forward(
                    input_ids=source, attention_mask=mask, decoder_input_ids=target, use_cache=False
                )
                .logits
            )

    Twin.__name__ = Twin.__qualname__ = kind.__name__
    return Twin


def _untie_output(module: Any, config: TransformerConfig) -> None:
    """One matrix for both embeddings, and another for the output: transformers ties all three or, in the families after BART, none."""
    core = module if config.layout in T5_LIKE else module.model
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


class _Positions(nn.Module):
    """M2M100's positions: the row of a token is the number of those before it that are not padding; padding has none."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        stack = config.encoder
        self.padding, self.offset = config.source_pad_id, stack.position_offset
        self.table = np.array(
            sinusoids(config.max_length + self.offset, config.d_model, layout=stack.sinusoids)
        )

    def forward(self, ids: torch.Tensor, embeddings: torch.Tensor, before: int = 0) -> torch.Tensor:
        """The rows (b, n, d) of ids (b, n), in the dtype of ``embeddings``; ``before`` tokens came in earlier calls."""
        valid = ids != self.padding
        rows = torch.where(valid, torch.cumsum(valid, dim=1) - 1 + before + self.offset, 0)
        found = torch.from_numpy(self.table).to(embeddings.device)[rows] * valid[..., None]
        return found.to(embeddings.dtype)
