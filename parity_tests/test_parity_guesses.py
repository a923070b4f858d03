"""Ports without rules whose modules are cut in another way than PyTorch's."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import linen, nnx

from jax_transformer import weights
from jax_transformer.parity.pairs import Called, Pair, guessed
from jax_transformer.weights import Rule
from parity_tests.test_parity_models import compare, randomized

D, HEADS = 16, 2
NORM = {"epsilon": 1e-12, "use_fast_variance": False}


def their_bert():
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=D,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        intermediate_size=24,
        max_position_embeddings=12,
        attn_implementation="eager",
    )
    return randomized(transformers.BertModel(config, add_pooling_layer=False))


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(HEADS, D, decode=False, rngs=rngs)
        self.norm1, self.norm2 = (nnx.LayerNorm(D, rngs=rngs, **NORM) for _ in range(2))
        self.up, self.down = nnx.Linear(D, 24, rngs=rngs), nnx.Linear(24, D, rngs=rngs)
        self.tanh = False

    def __call__(self, x):
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.down(jax.nn.gelu(self.up(x), approximate=self.tanh)))


class Bert(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.word, self.position, self.kind = (nnx.Embed(n, D, rngs=rngs) for n in (50, 12, 2))
        self.norm = nnx.LayerNorm(D, rngs=rngs, **NORM)
        self.layers = nnx.List([Layer(rngs) for _ in range(2)])

    def __call__(self, ids):
        x = (
            self.word(ids)
            + self.position(jnp.arange(ids.shape[1]))
            + self.kind(jnp.zeros_like(ids))
        )
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x)
        return x


def attention_rules(torch, flax):
    for ours, name in (("query", "self.query"), ("key", "self.key"), ("value", "self.value")):
        yield Rule(
            f"{torch}.{name}.weight", f"{flax}.{ours}.kernel", "(h e) d -> d h e", {"h": HEADS}
        )
        yield Rule(f"{torch}.{name}.bias", f"{flax}.{ours}.bias", "(h e) -> h e", {"h": HEADS})
    yield Rule(
        f"{torch}.output.dense.weight", f"{flax}.out.kernel", "d (h e) -> h e d", {"h": HEADS}
    )
    yield Rule(f"{torch}.output.dense.bias", f"{flax}.out.bias")


TABLE = [
    Rule(f"embeddings.{a}_embeddings.weight", f"{b}.embedding")
    for a, b in (("word", "word"), ("position", "position"), ("token_type", "kind"))
]
TABLE += weights.layer_norm("embeddings.LayerNorm", "norm")
TABLE += weights.repeat(
    2,
    [
        *attention_rules("encoder.layer.{i}.attention", "layers.{i}.attention"),
        *weights.layer_norm("encoder.layer.{i}.attention.output.LayerNorm", "layers.{i}.norm1"),
        *weights.linear("encoder.layer.{i}.intermediate.dense", "layers.{i}.up"),
        *weights.linear("encoder.layer.{i}.output.dense", "layers.{i}.down"),
        *weights.layer_norm("encoder.layer.{i}.output.LayerNorm", "layers.{i}.norm2"),
    ],
)


def longer(model: Bert) -> None:
    model.layers[1].norm1.epsilon = 1e-5


def tanh(model: Bert) -> None:
    model.layers[0].tanh = True


def bias(model: Bert) -> None:
    model.layers[0].attention.out.bias[...] += 1e-3


FAULTS: dict[str, tuple[Callable[[Bert], None], str]] = {
    "epsilon": (longer, "layers.1.norm1 | encoder.layer.1.attention.output.LayerNorm: its input"),
    "activation": (tanh, "the input of down is the first that differs after up"),
    "bias": (bias, "layers.0.attention.out | encoder.layer.0.attention.output.dense: its input"),
}


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_an_attention_without_the_norm_is_no_pair_of_one_with_it(fault: str | None):
    """BertAttention ends with a residual and a norm, BertIntermediate with an activation."""
    theirs = their_bert()
    ours = weights.from_torch(theirs.state_dict(), TABLE, into=Bert())
    ids = np.random.default_rng(0).integers(1, 50, (2, 7))  # BERT does not train row 0
    options = {"call_torch": lambda module, ids: module(input_ids=ids).last_hidden_state}
    if fault is None:
        report = compare(ours, theirs, ids, **options)
        report.check()
        pairs = {entry.ours: entry.theirs for entry in report.entries}
        assert "layers.0.attention" not in pairs and "layers.0.attention.query" in pairs
        assert pairs["layers.0.up"] == "encoder.layer.0.intermediate.dense"
        return
    change, words = FAULTS[fault]
    change(ours)
    report = compare(ours, theirs, ids, gradients=False, **options)
    assert words in report.summary()
    assert "by itself" not in report.summary() and "by themselves" not in report.summary()


def test_a_row_that_pytorch_does_not_train_is_explained():
    theirs = randomized(torch.nn.Sequential(torch.nn.Embedding(5, D, padding_idx=2)))
    ours = nnx.List([nnx.Embed(5, D, rngs=nnx.Rngs(0))])
    ours[0].embedding[...] = theirs[0].weight.detach().numpy()
    options = {"rules_or_pairs": {"0": "0"}, "call_flax": lambda model, ids: model[0](ids)}
    compare(ours, theirs, np.array([[1, 3]]), **options).check()
    report = compare(ours, theirs, np.array([[1, 2]]), **options)
    assert report.notes == ("PyTorch does not train row 2, its padding_idx",)
    assert report.notes[0] in report.summary()


def called(name: str, figures: float, *sizes: int) -> Called:
    return Called(name, (2, 7, 8), sizes, (figures,) * 3)


@pytest.mark.parametrize(
    ("name", "figures", "sizes", "pair"),
    [
        ("dropout", 2.0, [], False),
        ("dropout", 1.0, [], True),
        ("Positions", 2.0, [], True),
        ("dropout", 2.0, [8], True),
    ],
)
def test_modules_without_parameters_are_a_pair_if_names_or_outputs_agree(
    name, figures, sizes, pair
):
    ours, theirs = called("positions", 1.0, *sizes), called(f"src.{name}", figures, *sizes)
    assert bool(guessed([ours], [theirs])) == pair


@pytest.mark.parametrize(
    ("figures", "sizes", "pair"), [(1.0, [8], True), (2.0, [8], False), (2.0, [], True)]
)
def test_a_norm_outside_of_one_of_two_modules_parts_them(figures, sizes, pair):
    """Unless their outputs are equal, as with a norm before the attention, or it has no weights."""
    norm, out = called("attention_norm", 3.0, *sizes), called("attention.out", 1.0, 64)
    ours = [norm, out, called("attention", figures, 64)]
    theirs = [norm._replace(name="attention.norm"), out, called("attention", 1.0, *sizes, 64)]
    pairs = guessed(ours, theirs)
    assert (Pair("attention", "attention") in pairs) == pair
    assert {Pair("attention.out", "attention.out"), Pair(norm.name, theirs[0].name)} <= {*pairs}


def test_the_part_of_a_wrapper_is_the_pair_of_a_module_without_parts():
    """GPT-NeoX's attention returns what its last part does; its queries, keys and values are one
    module, which a port's three are no pairs of."""
    ours = [called("value", 1.0, 64), called("out", 2.0, 64)]
    theirs = [called("attention.dense", 2.0, 64), called("attention", 2.0, 64, 192)]
    assert guessed(ours, theirs) == [Pair("out", "attention.dense")]
    assert guessed(theirs, ours) == [Pair("attention.dense", "out")]
    theirs = [each._replace(figures=(3.0,) * 3) for each in theirs]  # after a fault
    assert len(guessed(ours, theirs)) == 1


@pytest.mark.parametrize("name", ["dense", "aa", "c"])
def test_a_module_is_the_pair_that_it_is_in_another_layer(name):
    """There their outputs are equal; here a fault comes before."""
    ours = [called(f"block_0.{name}", i, 64) for i, name in enumerate("abc")]
    ours += [called(f"block_1.{name}", 10 + i, 64) for i, name in enumerate("abc")]
    theirs = [called(f"layers.0.{name}", 2, 64), called(f"layers.1.{name}", 20, 64)]
    pairs = [("block_0.c", f"layers.0.{name}"), ("block_1.c", f"layers.1.{name}")]
    assert guessed(ours, theirs) == [Pair(*each) for each in pairs]


def test_norms_of_equal_outputs_are_paired_in_order_whatever_their_names():
    """Both read the same input, as in GPT-NeoX, and their scales are still ones."""
    ours = [called("block.norm_attn", 1.0, 8), called("block.norm_mlp", 1.0, 8)]
    theirs = [called("layer.input_norm", 1.0, 8), called("layer.post_attention_norm", 1.0, 8)]
    expected = [Pair(one.name, other.name) for one, other in zip(ours, theirs, strict=True)]
    assert guessed(ours, theirs) == expected
    ours[0] = ours[0]._replace(figures=(2.0,) * 3)
    theirs[1] = theirs[1]._replace(figures=(2.0,) * 3)
    assert {*guessed(ours, theirs)} == {
        Pair("block.norm_attn", theirs[1].name),
        Pair("block.norm_mlp", theirs[0].name),
    }


def test_numbers_of_parts_may_begin_at_0_or_at_1():
    """After a fault no outputs are equal, and names decide: ``norm_1`` is not ``norm1``."""
    ours = [
        Called(f"block.{n}", (2, 3, D), (D,)) for n in ("LayerNorm_0", "Dense_0", "LayerNorm_1")
    ]
    theirs = [Called(f"layer.{n}", (2, 3, D), (D,)) for n in ("norm1", "fc", "norm2")]
    expected = [Pair(a.name, b.name) for a, b in zip(ours, theirs, strict=True)]
    assert {*guessed(ours, theirs)} == {*expected}


def test_a_product_after_a_joined_one_is_the_last_of_those_that_are_alike():
    proj, joined = (Called(f"a.{n}", (2, 3, size), (size,)) for n, size in (("c", D), ("b", 3 * D)))
    theirs = [Called(f"attn.{n}_proj", (2, 3, D), (D,)) for n in "qkvo"]
    assert guessed([joined, proj], theirs) == [Pair("a.c", "attn.o_proj")]
    assert guessed(theirs, [joined, proj]) == [Pair("attn.o_proj", "a.c")]


class Product(linen.Module):
    features: int
    name_of_weight: str

    @linen.compact
    def __call__(self, x):
        shape = x.shape[-1], self.features
        return x @ self.param(self.name_of_weight, linen.initializers.normal(1.0), shape)


class SharedScope(linen.Module):
    """Its two products have its own name."""

    approximate: bool = False

    @linen.compact
    def __call__(self, x):
        up, down = Product(24, "up"), Product(D, "down")
        linen.share_scope(self, up)
        linen.share_scope(self, down)
        return down(jax.nn.gelu(up(x), approximate=self.approximate))


class SharedScopes(linen.Module):
    approximate: bool = False

    @linen.compact
    def __call__(self, x):
        return linen.LayerNorm(1e-5)(x + SharedScope(self.approximate, name="mlp")(x))


def test_modules_of_one_scope_are_one_module():
    layers = torch.nn.Linear(D, 24, bias=False), torch.nn.GELU(), torch.nn.Linear(24, D, bias=False)

    class Theirs(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp, self.norm = torch.nn.Sequential(*layers), torch.nn.LayerNorm(D)

        def forward(self, x):
            return self.norm(x + self.mlp(x))

    theirs = randomized(Theirs())
    state = {name: tensor.numpy() for name, tensor in theirs.state_dict().items()}
    mlp = {"up": state["mlp.0.weight"].T, "down": state["mlp.2.weight"].T}
    norm = {"scale": state["norm.weight"], "bias": state["norm.bias"]}
    variables = {"params": {"mlp": mlp, "LayerNorm_0": norm}}
    x = np.random.default_rng(0).standard_normal((2, 3, D))
    assert compare((SharedScopes(), variables), theirs, x).agrees
    report = compare((SharedScopes(True), variables), theirs, x)
    assert report.first_fault.ours == "mlp"
