"""The one file that imports transformers: its classes as the PyTorch twins of their families."""

from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

from jax_transformer.architectures import huggingface
from jax_transformer.architectures.huggingface_config import to_config
from jax_transformer.config import Norm, PositionIndex, TransformerConfig, Tying
from jax_transformer.errors import ConfigError
from jax_transformer.nn.embeddings import sinusoids


def twin(config: TransformerConfig) -> nn.Module:
    """Return transformers' module for ``config`` with fresh weights, under its own names.

    It is called as ``module(source, target)`` with ids (b, s) and (b, t) for logits (b, t, v). Two
    things that transformers computes in float32 whatever the weights' dtype are computed in theirs:
    root-mean-square norms, and sines and cosines that count tokens which are not padding.

    Raises:
        ConfigError: names the fields that the module cannot be set to.
    """
    family = huggingface.family_of(config)
    _check_rates(family, config)
    attributes = to_config(config)
    del attributes["architectures"]
    settings = transformers.AutoConfig.for_model(**attributes, attn_implementation="eager")
    module = _called_by_ids(getattr(transformers, family.model_class))(settings)
    core = module.get_submodule(family.prefix.rstrip("."))
    if config.tying is Tying.EMBEDDINGS:
        _untie_output(module, core)
    if config.norm is Norm.RMS:
        _replace_norms(module, config)
    if config.encoder.position_index is PositionIndex.NOT_PADDING:
        for stack in (core.encoder, core.decoder):
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
