"""A Flax model and its PyTorch twin with the same random weights, and batches for both."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

import jax_transformer as jt
from jax_transformer.architectures import twins
from jax_transformer.config import Positions, TransformerConfig
from jax_transformer.transformer import Transformer
from jax_transformer.weights import torch_bridge
from parity_tests import adapters
from parity_tests.unit.helpers import ragged

torch.set_num_threads(1)  # so that sums have the same order on every machine


@dataclass(frozen=True)
class Pair:
    """The two models, and a batch with ragged padding on both sides."""

    config: TransformerConfig
    flax: Transformer
    torch: nn.Module
    source: np.ndarray
    target: np.ndarray

    @property
    def calls(self) -> Any:
        """The adapter that calls the twin's parts with (batch, length, d) arrays."""
        return adapters.OF[self.config.architecture]

    def logits(
        self, source: np.ndarray | None = None, target: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the logits of both models, for the batch unless another side is passed."""
        source = self.source if source is None else source
        target = self.target if target is None else target
        with torch.no_grad():
            theirs = self.torch(as_torch(source), as_torch(target))
        return np.asarray(self.flax(source, target)), torch_bridge.to_numpy(theirs)

    def again(self) -> "Pair":
        """Return the pair after its twin's weights have been changed."""
        return replace(self, flax=jt.convert.from_torch(self.torch.state_dict(), self.config))


def pair(
    config: TransformerConfig,
    dtype: torch.dtype = torch.float64,
    *,
    seed: int = 0,
    batch: int = 3,
    source: int = 7,
    target: int = 5,
) -> Pair:
    """Return both models with :func:`random_twin`'s weights, equally long if they must be."""
    target = source if config.equal_lengths else target
    module = random_twin(config.portable, dtype, seed)
    flax = jt.convert.from_torch(module.state_dict(), config)
    ids = ragged(config.source_vocab_size, config.source_pad_id, batch, source, seed)
    return Pair(config, flax, module, ids, ragged_target(config, batch, target, seed))


def random_twin(
    config: TransformerConfig, dtype: torch.dtype = torch.float64, seed: int = 0
) -> nn.Module:
    """Return the twin with random weights everywhere, a stored position table included."""
    stored = config.decoder.positions is Positions.SINUSOIDAL_STORED
    return randomized(twins.twin(config).to(dtype).eval(), seed, "" if stored else ".pe")


def randomized(module: Any, seed: int = 0, without: str = "") -> Any:
    """The module with random arrays, but those whose names end with ``without``.

    Matrices are scaled by their input width, so that values stay of order one in every layer.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            if not (without and name.endswith(without)):
                scale = tensor.shape[-1] ** -0.5 if tensor.dim() == 2 else 0.5
                drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
                tensor.copy_(drawn * scale + _is_scale(name))
    return module


def without_dropout(config: TransformerConfig) -> TransformerConfig:
    """Every rate 0: the twin is made of the configuration itself and set to ``eval``."""
    rates: dict[str, Any] = dict.fromkeys(
        ("dropout", "attention_dropout", "activation_dropout", "embedding_dropout"), 0.0
    )
    for name in ("encoder", "decoder"):
        stack = getattr(config, name)
        rates[f"{name}.attention_dropout"] = 0.0
        rates[f"{name}.branches"] = tuple(replace(branch, dropout=0.0) for branch in stack.branches)
    return config.with_sizes(**rates)


def _is_scale(name: str) -> bool:
    """Return True for a norm's scale: norm1.weight, layer_norm2.weight, norm1.gamma."""
    owner, _, leaf = name.rpartition(".")
    return "norm" in owner.rpartition(".")[2] and leaf in ("weight", "gamma")


def ragged_target(config: TransformerConfig, batch: int, length: int, seed: int) -> np.ndarray:
    return ragged(config.target_vocab_size, config.target_pad_id, batch, length, seed + 1)


def as_torch(array: np.ndarray) -> torch.Tensor:
    return torch_bridge.to_tensor(np.asarray(array))
