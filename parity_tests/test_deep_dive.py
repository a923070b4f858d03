""" "Transformer Deep Dive": its example, positions, unused blocks and visible source padding."""

import math

import jax
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

import jax_transformer as jt
from jax_transformer import transformer
from jax_transformer.architectures import twins
from jax_transformer.errors import InputError
from jax_transformer.nn.embeddings import Frozen
from jax_transformer.training import optimizer, step
from jax_transformer.weights import rules
from parity_tests.cases import shapes_of, under
from parity_tests.levels import assert_close
from parity_tests.test_gradients import OPTIMIZER, batch_of, flax_gradients, torch_loss
from parity_tests.twins import Pair, as_torch, pair, ragged_target
from torch_reference.deep_dive import TransformerArchitecture

SIZES = dict(source_vocab_size=11, target_vocab_size=13, d_model=12, head_dim=12, num_heads=3)
SIZES |= dict(d_ff=48, num_layers=1, max_length=60)
FORMS = ["deep_dive", "deep_dive_repaired"]


def both_of(form: str, *, source: int = 9, target: int = 8, **changes) -> Pair:
    """Return a pair at small odd sizes, as long as the document's example, and ragged."""
    return pair(jt.preset(form, **(SIZES | changes)), batch=2, source=source, target=target)


def documented_shapes(
    vocab: int, d: int = 512, heads: int = 8, layers: int = 6, length: int = 100
) -> dict[str, tuple[int, ...]]:
    """Return the document's state_dict, written from its text."""

    def attention(name: str, *parts: str) -> dict:
        inputs = shapes_of(*((f"{name}.{part}", d, heads * d) for part in parts))
        return inputs | shapes_of((f"{name}.fc", heads * d, d))

    usual, cross = ("W_v", "W_k", "W_q"), ("Encoder_Decoder_values", "Encoder_Decoder_keys")
    norms = shapes_of(("normalization1", 0, d), ("normalization2", 0, d))
    block = attention("attention_mechanism", *usual) | norms
    block |= shapes_of(("feed_forward_layers.0", d, 4 * d), ("feed_forward_layers.2", 4 * d, d))
    decoder_block = under("transformer_block", block) | norms | attention("attention_layer", *usual)
    names = (*(f"W_{name}" for name in cross), "W_self_queries")
    decoder_block |= attention("EncoderDecoderAttention", *names)
    expected = shapes_of(("decoder.fc_out", d, vocab))
    for stack in ("encoder", "decoder"):
        expected |= {f"{stack}.words_embedding.weight": (vocab, d)}
        expected |= {f"{stack}.positional_embedding.weight": (length, d)}
    for i in range(layers):
        expected |= under(f"encoder.EncoderBlocklayers.{i}", block)
        expected |= under(f"decoder.DecoderBlocklayers.{i}", decoder_block)
    return expected


@pytest.mark.parametrize("form", FORMS)
def test_the_documents_example_at_its_size(form: str):
    """Vocabularies of 10, source (2, 9), target (2, 8), 227 M parameters, on the meta device."""
    config = jt.preset(form, vocab_size=10)
    with torch.device("meta"):
        twin = twins.twin(config)
        logits = TransformerArchitecture(10, 10, 0, 0)
        source, target = torch.zeros(2, 9, dtype=torch.long), torch.zeros(2, 8, dtype=torch.long)
    expected = documented_shapes(10)
    assert sum(math.prod(shape) for shape in expected.values()) == 226_984_970
    for each in (twin, logits):  # which has the twin's defaults
        assert {name: tuple(x.shape) for name, x in each.state_dict().items()} == expected
    assert twin(source, target).shape == (2, 8, 10)
    model, shapes = transformer.abstract(config), transformer.shapes(config)
    assert rules.torch_shapes(jt.convert.weight_table(config), shapes) == expected
    ids = jax.ShapeDtypeStruct((2, 9), np.int32), jax.ShapeDtypeStruct((2, 8), np.int32)
    assert nnx.eval_shape(lambda m, s, t: m(s, t), model, *ids).shape == (2, 8, 10)


def test_repaired_with_one_head_is_the_stock_transformer():
    """Otherwise only its heads, as wide as the model, differ from torch.nn.Transformer."""
    both = both_of("deep_dive_repaired", num_heads=1, num_layers=2)
    stock = nn.Transformer(12, 1, 2, 2, 48, dropout=0.0, batch_first=True).double().eval()
    stock.encoder.norm = stock.decoder.norm = None
    state = both.torch.state_dict()

    def packed(name: str, *parts: str) -> dict[str, torch.Tensor]:
        values = {}
        for leaf in ("weight", "bias"):
            own = [state[f"{name}.{part}.{leaf}"] for part in parts]
            values |= {f"in_proj_{leaf}": torch.cat(own)}
            values |= {f"out_proj.{leaf}": state[f"{name}.fc.{leaf}"]}
        return values

    for stack, blocks in (("encoder", "EncoderBlocklayers"), ("decoder", "DecoderBlocklayers")):
        for i, layer in enumerate(getattr(stock, stack).layers):
            block = f"{stack}.{blocks}.{i}"
            inner = block if stack == "encoder" else f"{block}.transformer_block"
            renamed = {f"linear{k}": f"{inner}.feed_forward_layers.{2 * k - 2}" for k in (1, 2)}
            renamed |= {f"norm{k}": f"{block}.normalization{k}" for k in (1, 2)}
            if stack == "decoder":
                renamed["norm3"] = f"{inner}.normalization2"
            own = {
                f"{name}.{leaf}": state[f"{path}.{leaf}"]
                for name, path in renamed.items()
                for leaf in ("weight", "bias")
            }
            attention = "attention_mechanism" if stack == "encoder" else "attention_layer"
            own |= under("self_attn", packed(f"{block}.{attention}", "W_q", "W_k", "W_v"))
            if stack == "decoder":
                names = "W_self_queries", "W_Encoder_Decoder_keys", "W_Encoder_Decoder_values"
                cross = packed(f"{block}.EncoderDecoderAttention", *names)
                own |= under("multihead_attn", cross)
            layer.load_state_dict(own, strict=True)
    source, target, twin = as_torch(both.source), as_torch(both.target), both.torch
    padding, future = source == 0, torch.ones(8, 8, dtype=torch.bool).triu(1)
    words = [
        stack.words_embedding(ids) + stack.positional_embedding.weight[: ids.shape[1]]
        for stack, ids in ((twin.encoder, source), (twin.decoder, target))
    ]
    masks = {"src_key_padding_mask": padding, "memory_key_padding_mask": padding}
    with torch.no_grad():
        hidden = stock(*words, tgt_mask=future, **masks)
        expected = twin.decoder.fc_out(hidden)
        assert_close((twin(source, target), expected), 1e-12, "twin")
    assert_close((both.flax(both.source, both.target), expected), 1e-12, "flax")


def test_fifty_tokens_are_fine_and_the_fifty_first_has_no_position():
    both = both_of("deep_dive", source=50, target=50)
    ids = {"source": both.source, "target": both.target}
    assert_close(both.logits(), 1e-12)
    words = "tokens long, but position 50 takes row -1 of its table, which does not exist"
    for side in ids:
        long = ids | {side: np.concatenate([ids[side], ids[side][:, :1]], axis=1)}
        with pytest.raises(InputError, match=f"{side} is 51 {words}"):
            both.flax(**long)
        with pytest.raises(ValueError, match=f"a sequence is 51 {words}"):
            both.torch(*map(as_torch, long.values()))


def test_the_repaired_one_reads_as_many_tokens_as_the_table_has_rows():
    both = both_of("deep_dive_repaired", source=60, target=60)
    assert_close(both.logits(), 1e-12)


def test_a_table_of_one_row_is_refused_by_both():
    """Position 0 takes row 1."""
    with pytest.raises(ValueError, match="max_length=1"):
        jt.preset("deep_dive", **(SIZES | dict(max_length=1)))
    with pytest.raises(ValueError, match="max_length=1"):
        TransformerArchitecture(11, 13, 0, 0, 12, 2, 3, max_length=1)


@pytest.mark.parametrize(("form", "rows_read"), [(FORMS[0], (2, 2)), (FORMS[1], (9, 8))])
def test_only_these_rows_of_the_position_tables_are_read(form: str, rows_read: tuple[int, int]):
    """Rows 1 and 0 in the faithful form, one per position in the repaired: any others change no
    logit, and only these have a gradient."""
    both, read = both_of(form), dict(zip(("encoder", "decoder"), rows_read, strict=True))
    before = both.logits()
    state = both.torch.state_dict()
    with torch.no_grad():
        for stack, rows in read.items():
            state[f"{stack}.positional_embedding.weight"][rows:] += 1
    for one, other in zip(before, both.again().logits(), strict=True):
        assert np.array_equal(one, other)
    batch = batch_of(both)
    _, gradients = flax_gradients(both, batch)
    torch_loss(both, batch).backward()
    read = read | {"decoder": min(read["decoder"], batch.target_in.shape[1])}
    for stack, rows in read.items():
        theirs = getattr(both.torch, stack).positional_embedding.weight.grad.numpy()
        for gradient in (np.asarray(gradients[f"{stack}.positions.table"]), theirs):
            assert (np.abs(gradient[:rows]).max(axis=1) > 1e-6).all()
            assert not gradient[rows:].any()


UNUSED = {"deep_dive": ("transformer_block.",)}
_PARTS = ("attention_mechanism", "normalization1")
UNUSED["deep_dive_repaired"] = tuple(f"transformer_block.{part}." for part in _PARTS)


@pytest.mark.parametrize("form", FORMS)
def test_an_unused_block_is_frozen(form: str):
    """It round-trips, changes no logit and gets neither gradient, update nor weight decay."""
    both = both_of(form)
    state = {name: x.numpy() for name, x in both.torch.state_dict().items()}
    unused = {name for name in state if any(part in name for part in UNUSED[form])}
    assert len(unused) == (16 if form == "deep_dive" else 10)
    frozen = transformer.flatten(both.flax, Frozen)
    table = jt.convert.weight_table(both.config)
    assert {rule.torch for rule in table if frozen.keys() & set(rule.flax)} == unused
    again = jt.convert.to_torch(both.flax)
    assert all(again[name].tobytes() == state[name].tobytes() for name in state)

    other = jt.convert.from_torch(state | {name: state[name] + 1 for name in unused}, both.config)
    assert np.array_equal(other(both.source, both.target), both.flax(both.source, both.target))

    batch = batch_of(both)
    torch_loss(both, batch).backward()
    assert {name for name, p in both.torch.named_parameters() if p.grad is None} == unused
    with jax.numpy_dtype_promotion("standard"):  # Optax relies on it
        tx = optimizer.make(OPTIMIZER, 10)
        state_of_step_0 = step.initial_state(both.flax, tx)
        train_step = step.make_step(both.config, tx, 0.1)
        after, _ = train_step(state_of_step_0, [batch], jax.random.key(0))
    moved = jt.convert.to_torch(transformer.unflatten(both.config, after.params | after.frozen))
    assert {name for name in state if moved[name].tobytes() == state[name].tobytes()} == unused


def test_the_target_sees_no_later_token_and_its_padding_changes_nothing():
    """Only the causal mask decides: no later token, padding or not, changes a logit."""
    for form in FORMS:
        both = both_of(form)
        other = ragged_target(both.config, 2, 8, seed=5)
        other[:, :3] = both.target[:, :3]
        before, after = both.logits(), both.logits(target=other)
        for one, two in zip(before, after, strict=True):
            moved = np.abs(one - two)
            assert moved[:, :3].max() < 1e-12 < moved[:, 3:].max()
