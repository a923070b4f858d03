"""The twins of the Hugging Face families: transformers' own classes, called by position.

Three things that transformers computes in float32 whatever the weights' dtype are computed in
theirs: root-mean-square norms, the softmax of local attention, and sines and cosines that count
tokens which are not padding.
"""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode


def twin(
    model_class: str,
    attributes: Mapping[str, Any],
    *,
    prefix: str,
    untied: bool,
    norm_epsilon: float | None,
    frozen_positions: Collection[str],
    counted_positions: Mapping[str, Mapping[str, Any]],
) -> nn.Module:
    """Return a module of transformers with fresh weights, under its own names.

    It is called as ``module(source, target)`` with ids (b, s), or spectrograms (b, c, w), and ids
    (b, t) for logits (b, t, v).

    Args:
        model_class: the name of the class in transformers.
        attributes: its ``config.json``.
        prefix: the name of the part that holds the stacks; empty if it is the module itself.
        untied: give both embeddings one matrix and the output another: transformers ties all three,
            or in some families none.
        norm_epsilon: the epsilon of root-mean-square norms; None keeps the module's norms.
        frozen_positions: the stacks whose positions are not trained: FSMT's class trains them,
            which fairseq never did.
        counted_positions: arguments of :class:`CountedPositions`, by stack.
    """
    import transformers

    settings = transformers.AutoConfig.for_model(**attributes, attn_implementation="eager")
    module = _called_by_position(getattr(transformers, model_class))(settings)
    core: Any = module.get_submodule(prefix)
    stacks = {name: getattr(core, name) for name in ("encoder", "decoder")}
    if untied:
        module.lm_head.weight = nn.Parameter(module.lm_head.weight.detach().clone())
        for stack in stacks.values():
            stack.embed_tokens.weight = core.shared.weight
    if norm_epsilon is not None:
        for name, part in list(module.named_modules()):
            if name.endswith("layer_norm"):
                owner, _, leaf = name.rpartition(".")
                norm = nn.RMSNorm(part.weight.shape[0], eps=norm_epsilon)
                setattr(module.get_submodule(owner), leaf, norm)
    for name in frozen_positions:
        stacks[name].embed_positions.requires_grad_(False)
    for name, arguments in counted_positions.items():
        stacks[name].embed_positions = CountedPositions(**arguments)
    return module


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


class CountedPositions(nn.Module):
    """Positions that count the tokens which are not padding; padding has none."""

    def __init__(self, table: np.ndarray, padding: int, offset: int) -> None:
        """Take the positions (n, d) in float64, the id of padding and the first position's row."""
        super().__init__()
        self.table, self.padding, self.offset = table, padding, offset

    def forward(self, ids: torch.Tensor, embeddings: torch.Tensor, before: int = 0) -> torch.Tensor:
        """Return the rows (b, n, d) of ids (b, n), in the dtype of ``embeddings``, after ``before``
        tokens.
        """
        valid = ids != self.padding
        rows = torch.where(valid, torch.cumsum(valid, dim=1) - 1 + before + self.offset, 0)
        table = torch.from_numpy(self.table).to(embeddings.device)
        return (table[rows] * valid[..., None]).to(embeddings.dtype)
