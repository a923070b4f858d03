"""Train mode: with the same dropout masks in both twins, loss and gradients are the same."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import jax_transformer as jt
from jax_transformer.nn.dropout import MaskedDropout
from jax_transformer.transformer import Transformer
from parity_tests.cases import ODD, SQUARE
from parity_tests.levels import assert_close
from parity_tests.test_gradients import assert_same_gradients, batch_of, flax_gradients, torch_gradients, torch_loss
from parity_tests.twins import Pair, pair


class DrawnDropout(MaskedDropout):
    """Masks from NumPy, remembered by site, so that another framework can be given the same."""

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
    """Dropout with given masks, one a call, in order."""

    def __init__(self, masks: list[torch.Tensor], rate: float):
        super().__init__()
        self.masks, self.rate, self.calls = masks, rate, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = self.masks[self.calls]
        self.calls += 1
        assert mask.shape == x.shape, f"mask {mask.shape} for {x.shape}"
        return x * mask / (1 - self.rate)


# The twin's dropout modules and the site of each in the Flax model. Branch k of a block ends in ``output``.
ENCODER_LAYER = {
    "self_attn.dropout": "branches.0.self_attention.weights",
    "dropout1": "branches.0.output",
    "dropout": "branches.1.feed_forward.activation",
    "dropout2": "branches.1.output",
}
DECODER_LAYER = {
    "self_attn.dropout": "branches.0.self_attention.weights",
    "dropout1": "branches.0.output",
    "multihead_attn.dropout": "branches.1.cross_attention.weights",
    "dropout2": "branches.1.output",
    "dropout": "branches.2.feed_forward.activation",
    "dropout3": "branches.2.output",
}


def sites(both: Pair) -> dict[str, list[str]]:
    """The sites that each dropout module of the lesson10 twin stands for, in the order of its calls."""
    found = {"pos_enc.dropout": ["encoder.embedding", "decoder.embedding"]}
    for stack, names, layers in (
        ("encoder", ENCODER_LAYER, both.config.encoder.layers),
        ("decoder", DECODER_LAYER, both.config.decoder.layers),
    ):
        for i in range(layers):
            found |= {f"{stack}.layers.{i}.{name}": [f"{stack}.blocks.{i}.{site}"] for name, site in names.items()}
    return found


def inject(both: Pair, masks: dict[str, np.ndarray], rates: dict[str, float]) -> None:
    """Replace every dropout module of the twin; none may be left over on either side."""
    modules = {name for name, module in both.torch.named_modules() if isinstance(module, nn.Dropout)}
    given = sites(both)
    assert modules == given.keys()
    assert sorted(masks) == sorted(site for group in given.values() for site in group)
    for name, group in given.items():
        weights = name.endswith("attn.dropout")  # the twin is sequence first, but for attention weights (b, h, q, k)
        tensors = [torch.from_numpy(masks[site] if weights else masks[site].swapaxes(0, 1)) for site in group]
        owner, _, leaf = name.rpartition(".")
        setattr(both.torch.get_submodule(owner), leaf, GivenDropout(tensors, rates[group[0]]))


@pytest.mark.parametrize("preset", ["lesson10", "lesson10_repaired"])
@pytest.mark.parametrize("sizes", [ODD, SQUARE], ids=["odd", "square"])
def test_same_masks_same_loss_and_gradients(preset: str, sizes: dict):
    both = pair(jt.preset(preset, **sizes, dropout=0.3, attention_dropout=0.3, activation_dropout=0.3, embedding_dropout=0.3))
    masks: dict[str, np.ndarray] = {}
    rates: dict[str, float] = {}
    batch = batch_of(both)
    drawn = DrawnDropout(masks, rates)
    flax_gradients(both, batch, drawn)  # draws the masks
    inject(both, masks, rates)
    both.torch.train()
    loss = torch_loss(both, batch)
    loss.backward()
    ours, gradients = flax_gradients(both, batch, drawn)
    assert_close((ours, loss), 1e-12, "loss")
    assert_same_gradients(gradients, torch_gradients(both))
    plain, _ = flax_gradients(both, batch)
    assert abs(float(plain) - float(ours)) > 1e-3, "the masks did something"


def test_attention_returned_in_train_mode_is_after_dropout():
    both = pair(jt.preset("lesson10", **ODD, dropout=0.3, attention_dropout=0.3, activation_dropout=0.3, embedding_dropout=0.3))
    masks: dict[str, np.ndarray] = {}
    rates: dict[str, float] = {}
    model: Transformer = both.flax
    _, attention = model(both.source, both.target, rngs=DrawnDropout(masks, rates), return_attention=True)
    inject(both, masks, rates)
    both.torch.train()
    with torch.no_grad():
        both.torch(torch.from_numpy(both.source), torch.from_numpy(both.target))
    for ours, theirs in zip(attention.cross, both.torch.decoder.attention_weights, strict=True):
        assert_close((ours.mean(axis=1), theirs), 1e-12)
