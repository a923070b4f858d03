"""Train mode: with the same dropout masks in both twins, loss and gradients are the same."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from jax_transformer import transformer
from jax_transformer.config import TransformerConfig
from jax_transformer.nn.dropout import MaskedDropout
from parity_tests import test_gradients as gradients_of
from parity_tests.cases import DOCUMENTS, config_of
from parity_tests.levels import assert_close
from parity_tests.marks import quick_if
from parity_tests.twins import Pair, pair


class DrawnDropout(MaskedDropout):
    """Masks from NumPy, remembered by site, for use in another framework."""

    def __init__(self, masks: dict[str, np.ndarray], rates: dict[str, float]):
        super().__init__()
        self.masks, self.rates = masks, rates

    def keep(self, shape, rate: float) -> Any:
        if self.path not in self.masks:
            random = np.random.default_rng(len(self.masks))
            self.masks[self.path] = random.random(tuple(shape)) >= rate
            self.rates[self.path] = rate
        return jnp.asarray(self.masks[self.path])


class GivenDropout(nn.Module):
    """Dropout with recorded masks, one per call, in order."""

    def __init__(self, masks: list[torch.Tensor], rate: float):
        super().__init__()
        self.masks, self.rate, self.calls = masks, rate, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = self.masks[self.calls]
        self.calls += 1
        assert mask.shape == x.shape, f"mask {mask.shape} for {x.shape}"
        return x * mask / (1 - self.rate)


def inject(both: Pair, masks: dict[str, np.ndarray], rates: dict[str, float]) -> None:
    """Replace every dropout module of the twin; none may be left over on either side."""
    modules = {name: m.p for name, m in both.torch.named_modules() if isinstance(m, nn.Dropout)}
    sites = both.calls.dropout_sites(both.config)
    assert modules.keys() == sites.keys()
    assert sorted(masks) == sorted(site for group in sites.values() for site in group)
    for name, group in sites.items():
        assert {modules[name]} >= {rates[site] for site in group}, name
        swap = both.calls.sequence_first(name)
        arrays = [masks[site].swapaxes(0, 1) if swap else masks[site] for site in group]
        masked = GivenDropout([*map(torch.from_numpy, arrays)], rates[group[0]] if group else 0.0)
        owner, _, leaf = name.rpartition(".")
        setattr(both.torch.get_submodule(owner), leaf, masked)


def dropping(config: TransformerConfig) -> TransformerConfig:
    """Return the configuration with a rate of 0.3 wherever the document's rate is an argument."""
    inner = [n for n in ("attention_dropout", "activation_dropout") if getattr(config, n) > 0]
    return config.with_sizes(**dict.fromkeys(["dropout", "embedding_dropout", *inner], 0.3))


@pytest.mark.parametrize(
    "name",
    [
        quick_if(not (sizes or "repaired" in name), f"{name}{sizes}")
        for name in DOCUMENTS
        for sizes in ("", " square")
        if name + sizes != "lesson10_repaired square"
    ],
)
def test_same_masks_same_loss_and_gradients(name: str):
    # A second layer's sites have paths of their own, which unit/nn/test_dropout has
    both = pair(dropping(config_of(name)).with_sizes(num_layers=1))
    masks: dict[str, np.ndarray] = {}
    rates: dict[str, float] = {}
    batch = gradients_of.batch_of(both)
    drawn = DrawnDropout(masks, rates)
    jax.eval_shape(
        lambda params: gradients_of.flax_loss(params, both, batch, drawn),
        transformer.flatten(both.flax, nnx.Param),
    )  # draws the masks
    plain = gradients_of.torch_loss(both, batch)
    inject(both, masks, rates)
    both.torch.train()
    loss = gradients_of.torch_loss(both, batch)
    loss.backward()
    ours, gradients = gradients_of.flax_gradients(both, batch, drawn)
    assert_close((ours, loss), 1e-12, "loss")
    gradients_of.assert_same_gradients(gradients, gradients_of.torch_gradients(both))
    assert abs(plain.item() - ours.item()) > 1e-3, "the masks did something"


def test_the_stock_layers_have_each_rate_at_the_sites_of_ours():
    rates = {"dropout": 0.1, "activation_dropout": 0.2, "embedding_dropout": 0.3}
    rates |= {"encoder.attention_dropout": 0.4, "decoder.attention_dropout": 0.5}
    both = pair(config_of("small").with_sizes(**rates, encoder_layers=1))
    drawn: dict[str, float] = {}
    jax.eval_shape(lambda: both.flax(both.source, both.target, rngs=DrawnDropout({}, drawn)))
    theirs = [m.p for m in both.torch.modules() if isinstance(m, nn.Dropout)]
    theirs += [m.dropout for m in both.torch.modules() if isinstance(m, nn.MultiheadAttention)]
    theirs += [0.3]  # the embeddings' one module has two calls
    assert sorted(theirs) == sorted(drawn.values())
