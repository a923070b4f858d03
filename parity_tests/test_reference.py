"""The twins themselves: lesson10's against torch.nn.Transformer, and fresh weights."""

import math

import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

import jax_transformer as jt
from jax_transformer import transformer
from jax_transformer.architectures import twins
from jax_transformer.weights import rules
from parity_tests import preset_names
from parity_tests.cases import ODD
from parity_tests.levels import assert_close, assert_same_distributions
from parity_tests.marks import quick_if
from parity_tests.twins import as_torch, pair
from torch_reference.lesson10 import TranslationTransformer


@pytest.mark.parametrize(
    "name", [quick_if(name in preset_names.ALL, name) for name in jt.preset_names()]
)
def test_every_preset_has_the_names_and_shapes_of_its_twin_at_full_size(name):
    config = jt.preset(name)
    with torch.device("meta"):
        module = twins.twin(config)
    shapes = rules.torch_shapes(jt.convert.weight_table(config), transformer.shapes(config))
    assert {name: tuple(each.shape) for name, each in module.state_dict().items()} == shapes


class Document(nn.Module):
    """Lesson10's code as torch's own layers compute it: sequence first."""

    def __init__(self, twin: TranslationTransformer, config):
        super().__init__()
        self.stock = nn.Transformer(
            config.d_model,
            config.num_heads,
            config.encoder.layers,
            config.decoder.layers,
            config.d_ff,
            dropout=0.0,
        ).double()
        own = {
            name: value
            for name, value in twin.state_dict().items()
            if name.startswith(("encoder.", "decoder."))
        }
        # the document's key set is stock's, plus four modules around it
        self.stock.load_state_dict(own, strict=True)
        self.twin = twin

    def forward(self, src: torch.Tensor, tgt: torch.Tensor) -> torch.Tensor:
        twin, scale = self.twin, math.sqrt(self.stock.d_model)
        source_padding, target_padding = src == twin.src_pad_idx, tgt == twin.tgt_pad_idx
        future = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool).triu(1)
        out = self.stock(
            twin.pos_enc(twin.src_emb(src.T) * scale),
            twin.pos_enc(twin.tgt_emb(tgt.T) * scale),
            tgt_mask=future,
            src_key_padding_mask=source_padding,
            tgt_key_padding_mask=target_padding,
            memory_key_padding_mask=source_padding if twin.repaired else None,
        )
        return twin.linear(out.transpose(0, 1))


@pytest.mark.parametrize("preset", ["lesson10", "lesson10_repaired"])
def test_lesson10_is_the_stock_transformer(preset: str):
    both = pair(jt.preset(preset, **ODD))
    document = Document(both.torch, both.config).eval()
    with torch.no_grad():
        expected = document(as_torch(both.source), as_torch(both.target))
        assert_close(
            (both.torch(as_torch(both.source), as_torch(both.target)), expected), 1e-12, "twin"
        )
    assert_close((both.flax(both.source, both.target), expected), 1e-12, "flax")


def test_lesson10_has_exactly_the_documents_parameters():
    """d 512, 6+6 layers, vocabularies 10000: torch.nn.Transformer's and four modules'."""
    with torch.device("meta"):
        state = TranslationTransformer().state_dict()
        stock = nn.Transformer(512, 8, 6, 6, 2048).state_dict()
    around = {
        "src_emb.weight": (10_000, 512),
        "tgt_emb.weight": (10_000, 512),
        "pos_enc.pe": (100, 1, 512),
        "linear.weight": (10_000, 512),
        "linear.bias": (10_000,),
    }
    expected = {name: tuple(value.shape) for name, value in stock.items()} | around
    assert {name: tuple(value.shape) for name, value in state.items()} == expected


def test_the_documents_position_table():
    """Within 7e-6 of the exact table, as float32 arithmetic gives it, and kept unchanged."""
    twin = TranslationTransformer(
        src_vocab_size=11,
        tgt_vocab_size=11,
        d_model=64,
        nhead=2,
        num_encoder_layers=1,
        num_decoder_layers=1,
    )
    from jax_transformer.nn.embeddings import sinusoids

    assert 0 < np.abs(twin.pos_enc.pe[:, 0].numpy() - sinusoids(100, 64)).max() < 2e-5


@pytest.mark.parametrize("preset", ["lesson10", "vaswani2017_base"])
def test_fresh_weights_follow_the_same_distributions(preset: str):
    """The same spread, not the same draws; vaswani's against the bounds that it states."""
    config = jt.preset(preset, vocab_size=400, num_layers=1, d_model=64, num_heads=4, d_ff=256)
    ours = jt.convert.to_torch(jt.Transformer(config, rngs=nnx.Rngs(0)))
    if preset == "lesson10":
        torch.manual_seed(0)
        assert_same_distributions(ours, twins.twin(config).state_dict())
        return
    for name, array in ours.items():
        if name == "tgt_emb.weight":
            assert array.std() == pytest.approx(64**-0.5, rel=0.05)
        elif array.ndim == 2 and name.endswith("in_proj_weight"):
            assert np.abs(array).max() == pytest.approx(math.sqrt(6 / (4 * 64)), rel=0.05)
