"""Encoder-decoders as strangers wrote them, described from the pages alone and converted.

The Annotated Transformer (harvardnlp.github.io/annotated-transformer) and hyunwoongko/transformer
with padding masked over queries too: their names and arithmetic, in fewer lines.
"""

import math

import jax
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

import jax_transformer as jt
from jax_transformer.config import Mask
from jax_transformer.weights import rules
from jax_transformer.weights.rules import Rule, Table, embedding, layer_norm, linear

SIZES = dict(source_vocab_size=11, target_vocab_size=13, d_model=12, num_heads=3, d_ff=14)
SIZES |= dict(num_layers=2, max_length=9)
SOURCE = np.array([[4, 5, 6, 7, 8, 9, 10], [9, 3, 5, 7, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0]])
TARGET = np.array([[1, 4, 6, 12, 3], [1, 5, 7, 0, 0], [1, 0, 0, 0, 0]])


def clones(count: int, make, *arguments) -> nn.ModuleList:
    return nn.ModuleList(make(*arguments) for _ in range(count))


def attend(q, k, v, mask, fill: float):
    scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
    return torch.matmul(scores.masked_fill(mask == 0, fill).softmax(dim=-1), v)


def sinusoids(length: int, d: int) -> torch.Tensor:
    table = torch.zeros(length, d)
    angle = torch.arange(0, length).unsqueeze(1) / 10000 ** (torch.arange(0, d, 2) / d)
    table[:, 0::2], table[:, 1::2] = torch.sin(angle), torch.cos(angle)
    return table


class LayerNorm(nn.Module):
    def __init__(self, features: int, eps: float = 1e-6):
        super().__init__()
        self.a_2, self.b_2 = nn.Parameter(torch.ones(features)), nn.Parameter(torch.zeros(features))
        self.eps = eps

    def forward(self, x):
        mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
        return self.a_2 * (x - mean) / (std + self.eps) + self.b_2


class MultiHeadedAttention(nn.Module):
    def __init__(self, h: int, d: int):
        super().__init__()
        self.h, self.linears = h, clones(4, nn.Linear, d, d)

    def forward(self, query, key, value, mask):
        parts = [line(x) for line, x in zip(self.linears, (query, key, value), strict=False)]
        split = [x.unflatten(-1, (self.h, -1)).transpose(1, 2) for x in parts]
        x = attend(*split, mask.unsqueeze(1), -1e9)
        return self.linears[-1](x.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, d: int, d_ff: int):
        super().__init__()
        self.w_1, self.w_2 = nn.Linear(d, d_ff), nn.Linear(d_ff, d)

    def forward(self, x):
        return self.w_2(self.w_1(x).relu())


class Sublayer(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.norm = LayerNorm(size)

    def forward(self, x, sublayer):
        return x + sublayer(self.norm(x))


class Layer(nn.Module):
    def __init__(self, d: int, h: int, d_ff: int, attentions: tuple[str, ...]):
        super().__init__()
        self.attentions = attentions
        for name in attentions:
            setattr(self, name, MultiHeadedAttention(h, d))
        self.feed_forward = FeedForward(d, d_ff)
        self.sublayer = clones(len(attentions) + 1, Sublayer, d)

    def forward(self, x, mask, memory=None, memory_mask=None):
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, mask))
        if memory is not None:
            x = self.sublayer[1](x, lambda x: self.src_attn(x, memory, memory, memory_mask))
        return self.sublayer[-1](x, self.feed_forward)


class Layers(nn.Module):
    def __init__(self, count: int, *arguments):
        super().__init__()
        self.layers, self.norm = clones(count, Layer, *arguments), LayerNorm(arguments[0])

    def forward(self, x, *arguments):
        for layer in self.layers:
            x = layer(x, *arguments)
        return self.norm(x)


class Embeddings(nn.Module):
    def __init__(self, d: int, vocab: int):
        super().__init__()
        self.lut, self.d = nn.Embedding(vocab, d), d

    def forward(self, x):
        return self.lut(x) * math.sqrt(self.d)


class PositionalEncoding(nn.Module):
    def __init__(self, d: int, length: int):
        super().__init__()
        self.register_buffer("pe", sinusoids(length, d).unsqueeze(0))

    def forward(self, x):
        return x + self.pe[:, : x.size(1)].requires_grad_(False)


class Annotated(nn.Module):
    """The Annotated Transformer; its forward ends with the generator."""

    def __init__(self, src: int, tgt: int, n: int, d: int, d_ff: int, h: int, length: int):
        super().__init__()
        self.encoder = Layers(n, d, h, d_ff, ("self_attn",))
        self.decoder = Layers(n, d, h, d_ff, ("self_attn", "src_attn"))
        self.src_embed, self.tgt_embed = (
            nn.Sequential(Embeddings(d, vocab), PositionalEncoding(d, length))
            for vocab in (src, tgt)
        )
        self.generator = nn.Sequential()
        self.generator.proj = nn.Linear(d, tgt)

    def forward(self, src, tgt):
        future = torch.triu(torch.ones(1, tgt.size(-1), tgt.size(-1)), diagonal=1) == 0
        src_mask = (src != 0).unsqueeze(-2)
        memory = self.encoder(self.src_embed(src), src_mask)
        tgt_mask = (tgt != 0).unsqueeze(-2) & future
        x = self.decoder(self.tgt_embed(tgt), tgt_mask, memory, src_mask)
        return torch.log_softmax(self.generator.proj(x), dim=-1)


class Normed(nn.Module):
    def __init__(self, d: int, eps: float = 1e-12):
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(d)), nn.Parameter(torch.zeros(d))
        self.eps = eps

    def forward(self, x):
        out = x - x.mean(-1, keepdim=True)
        out = out / torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + self.eps)
        return self.gamma * out + self.beta


class Heads(nn.Module):
    def __init__(self, d: int, n_head: int):
        super().__init__()
        self.n_head = n_head
        self.w_q, self.w_k, self.w_v, self.w_concat = clones(4, nn.Linear, d, d)

    def forward(self, q, k, v, mask):
        parts = self.w_q(q), self.w_k(k), self.w_v(v)
        q, k, v = (x.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for x in parts)
        return self.w_concat(attend(q, k, v, mask, -10000).transpose(1, 2).flatten(2))


class PostLayer(nn.Module):
    def __init__(self, d: int, n_head: int, hidden: int, attentions: tuple[str, ...]):
        super().__init__()
        for i, name in enumerate(attentions):
            setattr(self, name, Heads(d, n_head))
            setattr(self, f"norm{i + 1}", Normed(d))
        self.ffn = nn.ModuleDict({"linear1": nn.Linear(d, hidden), "linear2": nn.Linear(hidden, d)})
        self.last = f"norm{len(attentions) + 1}"
        setattr(self, self.last, Normed(d))

    def forward(self, x, mask, enc=None, enc_mask=None):
        own = self.attention if enc is None else self.self_attention
        x = self.norm1(x + own(x, x, x, mask))
        if enc is not None:
            x = self.norm2(x + self.enc_dec_attention(x, enc, enc, enc_mask))
        y = self.ffn["linear2"](self.ffn["linear1"](x).relu())
        return getattr(self, self.last)(x + y)


class PostStack(nn.Module):
    def __init__(self, n: int, vocab: int, length: int, d: int, *arguments):
        super().__init__()
        self.emb = nn.ModuleDict({"tok_emb": nn.Embedding(vocab, d, padding_idx=0)})
        self.encoding = sinusoids(length, d)
        self.layers = clones(n, PostLayer, d, *arguments)

    def forward(self, x, *arguments):
        x = self.emb["tok_emb"](x) + self.encoding[: x.size(1)]
        for layer in self.layers:
            x = layer(x, *arguments)
        return x


class MaskedQueries(nn.Module):
    """hyunwoongko/transformer, whose make_pad_mask hides padding among queries as well."""

    def __init__(self, src: int, tgt: int, n: int, d: int, d_ff: int, h: int, length: int):
        super().__init__()
        self.encoder = PostStack(n, src, length, d, h, d_ff, ("attention",))
        attentions = ("self_attention", "enc_dec_attention")
        self.decoder = PostStack(n, tgt, length, d, h, d_ff, attentions)
        self.decoder.linear = nn.Linear(d, tgt)

    def make_pad_mask(self, q, k):
        keys = k.ne(0).unsqueeze(1).unsqueeze(2).repeat(1, 1, q.size(1), 1)
        return keys & q.ne(0).unsqueeze(1).unsqueeze(3).repeat(1, 1, 1, k.size(1))

    def forward(self, src, trg):
        past = torch.tril(torch.ones(trg.size(1), trg.size(1))).type(torch.bool)
        enc = self.encoder(src, self.make_pad_mask(src, src))
        trg_mask = self.make_pad_mask(trg, trg) & past
        x = self.decoder(trg, trg_mask, enc, self.make_pad_mask(trg, src))
        return self.decoder.linear(x)


def weight_table(names: dict[str, str], norm: tuple[str, str], attentions, rest: list) -> Table:
    """Rules of a model with these names of a layer's parts; ``{k}`` is the number of a norm."""
    heads = {key: names[key] for key in ("query", "key", "value", "out")}
    table = list(rest)
    for stack, parts in attentions.items():
        torch_name, flax = f"{stack}.layers.{{i}}", f"{stack}.blocks.{{i}}"
        layer: Table = []
        for theirs, ours in parts.items():
            layer += rules.attention(f"{torch_name}.{theirs}", f"{flax}.{ours}_attention", heads)
        for part in ("up", "down"):
            layer += linear(f"{torch_name}.{names[part]}", f"{flax}.feed_forward.{part}")
        for k in range(len(parts) + 1):
            theirs = f"{torch_name}.{names['norm'].format(k=k, n=k + 1)}"
            layer += layer_norm(theirs, f"{flax}.residuals.{k}.norm", names=norm)
        table += rules.repeat(2, layer)
    return table


ANNOTATED = jt.Architecture(
    name="annotated",
    source="The Annotated Transformer, Alexander Rush and others, 2018 and 2022.",
    weight_table=lambda config: weight_table(
        dict(zip(("query", "key", "value", "out"), (f"linears.{i}" for i in range(4)), strict=True))
        | dict(up="feed_forward.w_1", down="feed_forward.w_2", norm="sublayer.{k}.norm"),
        ("a_2", "b_2"),
        {"encoder": {"self_attn": "self"}, "decoder": {"self_attn": "self", "src_attn": "cross"}},
        [
            *embedding("src_embed.0.lut", "source_embedding"),
            *embedding("tgt_embed.0.lut", "target_embedding"),
            Rule("src_embed.1.pe", "encoder.positions.table", "1 l d -> l d"),
            Rule("tgt_embed.1.pe", "decoder.positions.table", "1 l d -> l d"),
            *layer_norm("encoder.norm", "encoder.final_norm", names=("a_2", "b_2")),
            *layer_norm("decoder.norm", "decoder.final_norm", names=("a_2", "b_2")),
            *linear("generator.proj", "output"),
        ],
    ),
)
MASKED_QUERIES = jt.Architecture(
    name="masked_queries",
    source="hyunwoongko/transformer on GitHub, 2019.",
    weight_table=lambda config: weight_table(
        dict(query="w_q", key="w_k", value="w_v", out="w_concat")
        | dict(up="ffn.linear1", down="ffn.linear2", norm="norm{n}"),
        ("gamma", "beta"),
        {
            "encoder": {"attention": "self"},
            "decoder": {"self_attention": "self", "enc_dec_attention": "cross"},
        },
        [
            *embedding("encoder.emb.tok_emb", "source_embedding"),
            *embedding("decoder.emb.tok_emb", "target_embedding"),
            *linear("decoder.linear", "output"),
        ],
    ),
)
STORED = {f"{stack}.positions": "sinusoidal_stored" for stack in ("encoder", "decoder")}
CASES = {
    "annotated": (
        Annotated,
        ANNOTATED,
        dict(norm="layer_unbiased", norm_epsilon=1e-6, norm_placement="pre", mask_fill=-1e9)
        | STORED
        | {"encoder.final_norm": True, "decoder.final_norm": True},
        jax.nn.log_softmax,
    ),
    "masked queries": (
        MaskedQueries,
        MASKED_QUERIES,
        dict(norm_epsilon=1e-12, mask_fill=-10_000, embedding_scale="none", padding_trained=False)
        | {
            "encoder.self_mask": (Mask.SOURCE_PADDING, Mask.QUERY_PADDING),
            "decoder.self_mask": (Mask.TARGET_PADDING, Mask.CAUSAL, Mask.QUERY_PADDING),
            "decoder.cross_mask": (Mask.SOURCE_PADDING, Mask.QUERY_PADDING),
        },
        lambda logits: logits,
    ),
}


@pytest.fixture
def double():
    """Modules are made in float64, their sinusoids too."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", CASES)
def test_a_stranger_s_model_is_said_by_the_configuration(name):
    """Outputs, at padding too, and gradients of every weight in float64; the same bits back."""
    kind, architecture, fields, ending = CASES[name]
    torch.manual_seed(0)
    module = kind(11, 13, 2, 12, 14, 3, 9)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    config = jt.preset("vaswani2017_base", **SIZES, tying="none", output_bias=True, **fields)
    model = jt.convert.from_torch(module.state_dict(), config, architecture=architecture)
    theirs = module(torch.from_numpy(SOURCE), torch.from_numpy(TARGET))
    assert np.abs(ending(model(SOURCE, TARGET)) - theirs.detach().numpy()).max() < 1e-12

    factor = np.random.default_rng(0).standard_normal(theirs.shape)
    (theirs * torch.from_numpy(factor)).sum().backward()
    graphdef, params = nnx.split(model)

    def loss(params):
        return (ending(nnx.merge(graphdef, params)(SOURCE, TARGET)) * factor).sum()

    gradients = nnx.merge(graphdef, jax.jit(jax.grad(loss))(params))
    ours = jt.convert.to_torch(gradients, architecture=architecture)
    for name, parameter in module.named_parameters():
        expected = parameter.grad.numpy()
        assert np.abs(ours[name] - expected).max() < 1e-11 * max(1, np.abs(expected).max()), name
    back = jt.convert.to_torch(model, architecture=architecture)
    for name, tensor in module.state_dict().items():
        assert back[name].tobytes() == tensor.numpy().tobytes(), name
