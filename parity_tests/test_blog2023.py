"""The post "Transformer" of 2023-06-05: its mixing, residual and masks in both frameworks."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_transformer as jt
from jax_transformer import transformer
from jax_transformer.errors import InputError
from jax_transformer.nn.dropout import Dropout
from parity_tests.cases import ODD, shapes_of, under
from parity_tests.levels import assert_close
from parity_tests.test_dropout import DrawnDropout
from parity_tests.twins import Pair, as_torch, pair
from torch_reference.blog2023 import Transformer

SIZES: dict[str, Any] = {name: size for name, size in ODD.items() if name != "d_ff"}
BOTH = pytest.mark.parametrize("preset", ["blog2023", "blog2023_repaired"])


def equal_lengths(preset: str = "blog2023", **changes: Any) -> Pair:
    return pair(jt.preset(preset, **(SIZES | changes)), source=6, target=6)


def attend(
    both: Pair, x: np.ndarray, hidden: np.ndarray | None
) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """Output and weights of decoder layer 1's self-attention, ours and the twin's."""
    module = both.flax.decoder.blocks[1].self_attention
    mask = None if hidden is None else jnp.asarray(~hidden[None, None])
    ours = module(jnp.asarray(x), module.keys_values(jnp.asarray(x)), mask, Dropout())
    future = None if hidden is None else as_torch(hidden)
    with torch.no_grad():
        theirs = both.calls.self_attention(both.torch, as_torch(x), None, future)
    return tuple(map(np.asarray, ours)), tuple(tensor.numpy() for tensor in theirs)


def hidden_states(both: Pair) -> np.ndarray:
    return np.random.default_rng(3).normal(size=(*both.target.shape, both.config.d_model))


MASKS = {
    "none": None,
    "causal": np.triu(np.ones((6, 6), bool), 1),
    "one key": np.arange(6)[None] != np.arange(6)[::-1, None],
}


@pytest.mark.parametrize("mask", MASKS)
def test_every_query_gets_the_sum_of_all_values_whatever_the_mask(mask: str):
    both = equal_lengths()
    x = hidden_states(both)
    (ours, our_weights), (theirs, their_weights) = attend(both, x, MASKS[mask])
    attention = both.torch.decoder.decoder_layer[1].attention
    with torch.no_grad():
        total = attention.values(as_torch(x)).sum(dim=1, keepdim=True)
        expected = attention.fc(total).expand(-1, 6, -1).numpy()
    assert_close((ours, expected), 1e-12, "flax")
    assert_close((theirs, expected), 1e-12, "torch")
    assert_close((our_weights, their_weights), 1e-12, "weights")
    if MASKS[mask] is not None:  # only the weights depend on the mask
        assert not our_weights[:, :, MASKS[mask]].any()


def test_the_twins_attention_is_the_written_einsum():
    """Its two letters for one axis are summed separately: k of the weights, v of values."""
    attention = equal_lengths().torch.decoder.decoder_layer[0].encoder_block.attention
    random = np.random.default_rng(5)
    query, memory = (as_torch(random.normal(size=(3, 6, SIZES["d_model"]))) for _ in range(2))
    with torch.no_grad():
        out, weights = attention(memory, query, memory, None)
        values = attention.values(memory).reshape(3, 6, SIZES["num_heads"], -1)
        expected = attention.fc(torch.einsum("bhqk,bvhd->bqhd", weights, values).reshape(3, 6, -1))
        keys = attention.keys(memory).reshape(values.shape)
        queries = attention.queries(query).reshape(values.shape)
        scores = torch.einsum("bqhd,bkhd->bhqk", queries, keys) / math.sqrt(SIZES["d_model"])
        assert_close((weights, scores.softmax(dim=-1)), 1e-12, "weights")
        assert_close((out, expected), 1e-12, "output")
        with pytest.raises(RuntimeError):  # shaped like the key: no other length fits
            attention(memory, query[:, :4], memory, None)


def test_a_query_without_visible_keys_equals_the_twin_s():
    """NaN in the faithful one, in that row only; exactly 0 in the repaired one."""
    blind = MASKS["causal"].copy()
    blind[2] = True
    for preset, expected in (("blog2023", np.nan), ("blog2023_repaired", 0.0)):
        both = equal_lengths(preset)
        for out, weights in attend(both, hidden_states(both), blind):
            for row in (out[:, 2], weights[:, :, 2]):
                np.testing.assert_array_equal(row, np.full_like(row, expected))
            assert np.isfinite(np.delete(out, 2, axis=1)).all()


@BOTH
def test_the_target_reaches_the_logits_only_in_the_repaired_one(preset: str):
    both = equal_lengths(preset)
    other = (both.target + 1 + np.arange(6)) % both.config.target_vocab_size
    assert (other != both.target).all()
    for before, after in zip(both.logits(), both.logits(target=other), strict=True):
        moved = np.abs(before - after).max() / np.abs(before).max()
        assert moved < 1e-13 if preset == "blog2023" else moved > 1e-2


def test_only_the_last_decoder_block_reaches_the_logits():
    """Any values do in the decoder's embedding, its self-attention and all blocks but the last."""
    both = equal_lengths()
    arrays = transformer.flatten(both.flax)
    last = f"decoder.blocks.{both.config.decoder.layers - 1}."
    parts = "cross_attention.value cross_attention.out feed_forward residuals.1 residuals.2"
    used = ("encoder.", "source_embedding", "output", *(last + part for part in parts.split()))
    seen = {name for name in arrays if name.startswith(used)}
    unused = arrays.keys() - seen
    some = {"target_embedding.embedding", "decoder.positions.table"}
    assert some | {f"{last}cross_attention.query.kernel"} < unused
    each = [((name,), True) for name in seen if name.startswith(last)]
    for names, moves in ((unused, False), *each):
        changed = {name: a * 1.5 + 0.1 if name in names else a for name, a in arrays.items()}
        logits = transformer.unflatten(both.config, changed)(both.source, both.target)
        moved = np.abs(np.asarray(logits) - np.asarray(both.flax(both.source, both.target))).max()
        assert moved > 1e-4 if moves else moved < 1e-12, names


def test_unequal_lengths_are_refused_with_the_same_message():
    both = equal_lengths()
    source, target = both.source, both.target[:, :4]
    message = r"source has 6 tokens and target 4: .* equally long"
    with pytest.raises(InputError, match=message) as ours:
        both.flax(source, target)
    with pytest.raises(ValueError, match="equally long") as theirs:
        both.torch(as_torch(source), as_torch(target))
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("repaired", [False, True])
def test_names_and_shapes_at_the_default_size(repaired: bool):
    with torch.device("meta"):
        state = Transformer(1000, 1200, 0, 0, repaired=repaired).state_dict()
    names = ("keys", "queries", "values", "fc")
    attention = {f"attention.{name}.weight": (256, 256) for name in names}
    shared = attention | shapes_of(("layer_norm1", 0, 256), ("layer_norm2", 0, 256))
    shared |= shapes_of(("feed_forward.0", 256, 1024), ("feed_forward.2", 1024, 256))
    own = attention | shapes_of(("layer_norm", 0, 256)) | under("encoder_block", shared)
    expected = {"encoder.embed.weight": (1000, 256), "decoder.embed.weight": (1200, 256)}
    expected |= {f"{stack}.position_embed.pe": (100, 256) for stack in ("encoder", "decoder")}
    expected |= shapes_of(("decoder.fc", 256, 1200))
    for i in range(4):
        expected |= under(f"encoder.encoder_layers.{i}", shared)
        expected |= under(f"decoder.decoder_layer.{i}", own)
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == expected


@BOTH
def test_dropout_rates(preset: str):
    """The faithful decoder blocks always have 0.5; each side's embeddings two dropouts."""
    both = equal_lengths(preset, dropout=0.3, embedding_dropout=0.3)
    rates: dict[str, float] = {}
    both.flax(both.source, both.target, rngs=DrawnDropout({}, rates))
    sites = both.calls.dropout_sites(both.config)
    modules = both.torch.named_modules()
    theirs = {name: each.p for name, each in modules if isinstance(each, torch.nn.Dropout)}
    block = 0.5 if preset == "blog2023" else 0.3
    assert theirs == {name: block if "decoder_layer" in name else 0.3 for name in sites}
    assert rates == {site: theirs[name] for name, group in sites.items() for site in group}


def test_greedy_decoding_reads_one_pass_position_by_position():
    """No token depends on another: one call gives as many as the source has positions."""
    both = equal_lengths()
    state = both.torch.state_dict()
    # Scale down what all positions share, or all give the same token
    for name, tensor in state.items():
        if "attention.fc" in name:
            tensor *= 0.02
        elif name.endswith("bias") and "feed_forward" not in name:
            tensor *= 0.1
    model = jt.convert.from_torch(state, both.config)
    blank = np.full(both.source.shape, both.config.target_pad_id)
    with torch.no_grad():
        expected = both.torch(as_torch(both.source), as_torch(blank)).argmax(dim=-1).numpy()
    assert all(len(set(row)) > 1 for row in expected)
    end = int(expected[0, 3])  # one row at least ends before its last position
    options = {"max_length": both.config.max_length, "eos_id": end}
    ids = np.asarray(jt.generate.greedy(model, both.source, **options))
    np.testing.assert_array_equal(np.asarray(model(both.source, blank)).argmax(axis=-1), expected)
    behind = np.cumsum(expected == end, axis=1) - (expected == end) > 0
    np.testing.assert_array_equal(ids, np.where(behind, both.config.target_pad_id, expected))
