"""The Transformers of other toolkits as plain PyTorch modules, with their names and arithmetic.

Written from the sources of JoeyNMT 2.3.0, OpenNMT-py 3.5.1 and fairseq 0.12.2.
"""

import math
from typing import Any

import torch
from torch import nn


def randomized(module: nn.Module, seed: int = 0) -> nn.Module:
    """The module with random numbers in every parameter, biases and norms too."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype) / 2)
    return module


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor, heads: int
) -> torch.Tensor:
    """Attention of projected queries (b, q, d) to keys that are ``visible`` (b, q or 1, k)."""

    def split(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (heads, -1)).transpose(1, 2)

    scores = split(query) @ split(key).transpose(2, 3) / math.sqrt(query.shape[-1] // heads)
    weights = scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1)
    return (weights @ split(value)).transpose(1, 2).flatten(2)


def sinusoids(length: int, width: int) -> torch.Tensor:
    """Sines and cosines in turn, computed in float32."""
    rates = torch.exp(torch.arange(0, width, 2).float() * -(math.log(10000.0) / width))
    angles = torch.arange(length).float()[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)


def masks(source: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sources' words (b, 1, s), and what each word of a target sees (b, t, t)."""
    causal = torch.ones(target.shape[1:] * 2, dtype=torch.bool).tril()
    return source[:, None] != 1, (target[:, None] != 1) & causal


class _Normed(nn.Module):
    """A layer whose branches have their norms before them, or behind their sums."""

    pre: bool

    def around(self, x: torch.Tensor, norm: nn.Module, branch: Any) -> torch.Tensor:
        return x + branch(norm(x)) if self.pre else norm(x + branch(x))


class _Attention(nn.Module):
    """Attention whose layers of keys, values, queries and output have these names."""

    def __init__(self, heads: int, size: int, names: str, bias: bool = True):
        super().__init__()
        self.heads, self.names = heads, names.split()
        for name in self.names:
            setattr(self, name, nn.Linear(size, size, bias=bias))

    def forward(self, x: torch.Tensor, memory: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        key, value, query, output = (getattr(self, name) for name in self.names)
        return output(attend(query(x), key(memory), value(memory), mask, self.heads))


# JoeyNMT

_JOEY = "k_layer v_layer q_layer output_layer"


class _JoeyFeedForward(nn.Module):
    def __init__(self, size: int, options: dict[str, Any]):
        super().__init__()
        activation = {"relu": nn.ReLU, "gelu": nn.GELU, "swish": nn.SiLU}
        self.layer_norm = nn.LayerNorm(size, eps=1e-6)
        width = options["ff_size"]
        inner = activation[options.get("activation", "relu")](), nn.Dropout(0)
        layers = nn.Linear(size, width), *inner, nn.Linear(width, size), nn.Dropout(0)
        self.pwff_layer = nn.Sequential(*layers)


class _JoeyLayer(_Normed):
    def __init__(self, options: dict[str, Any], *, decoder: bool):
        super().__init__()
        size, heads = options["hidden_size"], options["num_heads"]
        self.pre = options.get("layer_norm", "post" if decoder else "pre") == "pre"
        if decoder:
            self.trg_trg_att, self.src_trg_att = (_Attention(heads, size, _JOEY) for _ in "ab")
            self.x_layer_norm, self.dec_layer_norm = (nn.LayerNorm(size, eps=1e-6) for _ in "ab")
        else:
            self.src_src_att = _Attention(heads, size, _JOEY)
            self.layer_norm = nn.LayerNorm(size, eps=1e-6)
        self.feed_forward = _JoeyFeedForward(size, options)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor, memory: Any = None, memory_mask: Any = None
    ) -> torch.Tensor:
        if memory is None:
            x = self.around(x, self.layer_norm, lambda y: self.src_src_att(y, y, mask))
        else:
            x = self.around(x, self.x_layer_norm, lambda y: self.trg_trg_att(y, y, mask))
            cross = lambda y: self.src_trg_att(y, memory, memory_mask)  # noqa: E731
            x = self.around(x, self.dec_layer_norm, cross)
        return self.around(x, self.feed_forward.layer_norm, self.feed_forward.pwff_layer)


class _Holder(nn.Module):
    """A module that has only parts."""


class _JoeyStack(nn.Module):
    def __init__(self, options: dict[str, Any], *, decoder: bool, words: int = 0):
        super().__init__()
        size = options["hidden_size"]
        depth = range(options["num_layers"])
        self.layers = nn.ModuleList(_JoeyLayer(options, decoder=decoder) for _ in depth)
        self.pe = _Holder()
        self.pe.register_buffer("pe", sinusoids(5000, size)[None])
        final = options.get("layer_norm") == "pre"
        self.layer_norm = nn.LayerNorm(size, eps=1e-6) if final else None
        if decoder:
            self.output_layer = nn.Linear(size, words, bias=False)

    def forward(self, x: torch.Tensor, *arguments: torch.Tensor) -> torch.Tensor:
        x = x + self.pe.pe[:, : x.shape[1]]
        for layer in self.layers:
            x = layer(x, *arguments)
        return x if self.layer_norm is None else self.layer_norm(x)


class Joey(nn.Module):
    """JoeyNMT's model of these ``model`` options; padding has the id 1."""

    def __init__(self, options: dict[str, Any], source_words: int, target_words: int):
        super().__init__()
        encoder, decoder = options["encoder"], options["decoder"]
        size = encoder["hidden_size"]
        scaled = [stack["embeddings"].get("scale") for stack in (encoder, decoder)]
        self.scales = [math.sqrt(size) if each else 1.0 for each in scaled]
        self.src_embed, self.trg_embed = _Holder(), _Holder()
        self.src_embed.lut = nn.Embedding(source_words, size, padding_idx=1)
        self.trg_embed.lut = nn.Embedding(target_words, size, padding_idx=1)
        if options.get("tied_embeddings"):
            self.trg_embed, self.scales[1] = self.src_embed, self.scales[0]
        self.encoder = _JoeyStack(encoder, decoder=False)
        self.decoder = _JoeyStack(decoder, decoder=True, words=target_words)
        if options.get("tied_softmax"):
            self.decoder.output_layer.weight = self.trg_embed.lut.weight

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        seen, causal = masks(source, target)
        memory = self.encoder(self.src_embed.lut(source) * self.scales[0], seen)
        y = self.trg_embed.lut(target) * self.scales[1]
        return self.decoder.output_layer(self.decoder(y, causal, memory, seen))


# OpenNMT-py


_ONMT = "linear_keys linear_values linear_query final_linear"


class _RmsNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class _OnmtFeedForward(nn.Module):
    def __init__(self, options: dict[str, Any], norm: nn.Module):
        super().__init__()
        size, width, bias = (options[n] for n in ("enc_hid_size", "transformer_ff", "add_ffnbias"))
        self.w_1, self.w_2 = nn.Linear(size, width, bias=bias), nn.Linear(width, size, bias=bias)
        name = options["pos_ffn_activation_fn"]
        self.w_3 = nn.Linear(size, width, bias=bias) if name in ("silu", "gated-gelu") else None
        functions = {"relu": torch.relu, "silu": nn.functional.silu}
        self.activation = functions.get(name, nn.functional.gelu)
        self.layer_norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer_norm(x)
        inner = self.activation(self.w_1(y))
        return x + self.w_2(inner if self.w_3 is None else inner * self.w_3(y))


class _OnmtLayer(nn.Module):
    def __init__(self, options: dict[str, Any], *, decoder: bool):
        super().__init__()
        size, heads = options["enc_hid_size"], options["heads"]
        self.self_attn = _Attention(heads, size, _ONMT, options["add_qkvbias"])
        self.feed_forward = _OnmtFeedForward(options, _onmt_norm(options))
        if decoder:
            self.context_attn = _Attention(heads, size, _ONMT, options["add_qkvbias"])
            self.layer_norm_1, self.layer_norm_2 = _onmt_norm(options), _onmt_norm(options)
        else:
            self.layer_norm = _onmt_norm(options)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor, memory: Any = None, memory_mask: Any = None
    ) -> torch.Tensor:
        y = (self.layer_norm if memory is None else self.layer_norm_1)(x)
        x = x + self.self_attn(y, y, mask)
        if memory is not None:
            x = x + self.context_attn(self.layer_norm_2(x), memory, memory_mask)
        return self.feed_forward(x)


def _onmt_norm(options: dict[str, Any]) -> nn.Module:
    size, eps = options["enc_hid_size"], options["norm_eps"]
    return _RmsNorm(size, eps) if options["layer_norm"] == "rms" else nn.LayerNorm(size, eps=eps)


class _OnmtStack(nn.Module):
    def __init__(self, options: dict[str, Any], words: int, *, decoder: bool):
        super().__init__()
        size, depth = options["enc_hid_size"], options["dec_layers" if decoder else "enc_layers"]
        self.embeddings = _Holder()
        self.embeddings.make_embedding = parts = _Holder()
        parts.emb_luts = nn.ModuleList([nn.Embedding(words, size, padding_idx=1)])
        if options["position_encoding"]:
            parts.pe = _Holder()
            parts.pe.register_buffer("pe", sinusoids(5000, size)[:, None])
        layers = nn.ModuleList([_OnmtLayer(options, decoder=decoder) for _ in range(depth)])
        setattr(self, "transformer_layers" if decoder else "transformer", layers)
        self.layers = [*layers]
        self.layer_norm = _onmt_norm(options)

    def forward(self, ids: torch.Tensor, *arguments: torch.Tensor) -> torch.Tensor:
        parts = self.embeddings.make_embedding
        x = parts.emb_luts[0](ids)
        if hasattr(parts, "pe"):
            x = x * math.sqrt(x.shape[-1]) + parts.pe.pe[: ids.shape[1], 0]
        for layer in self.layers:
            x = layer(x, *arguments)
        return self.layer_norm(x)


class Onmt(nn.Module):
    """OpenNMT-py's model of these options; padding has the id 1."""

    def __init__(self, options: dict[str, Any], source_words: int, target_words: int):
        super().__init__()
        self.encoder = _OnmtStack(options, source_words, decoder=False)
        self.decoder = _OnmtStack(options, target_words, decoder=True)
        stacks = (self.encoder, self.decoder)
        read, write = (stack.embeddings.make_embedding.emb_luts[0] for stack in stacks)
        if options["share_embeddings"]:
            write.weight = read.weight
        self.generator = nn.Linear(options["enc_hid_size"], target_words)
        if options["share_decoder_embeddings"]:
            self.generator.weight = write.weight

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        seen, causal = masks(source, target)
        memory = self.encoder(source, seen)
        return self.generator(self.decoder(target, causal, memory, seen))


# fairseq


_FAIRSEQ = "k_proj v_proj q_proj out_proj"


class _FairseqLayer(_Normed):
    def __init__(self, options: dict[str, Any], side: str):
        super().__init__()
        size, heads = options["encoder_embed_dim"], options[f"{side}_attention_heads"]
        self.pre, self.activation = options["normalize_before"], options["activation_fn"]
        self.self_attn = _Attention(heads, size, _FAIRSEQ)
        self.self_attn_layer_norm = nn.LayerNorm(size)
        if side == "decoder":
            self.encoder_attn = _Attention(heads, size, _FAIRSEQ)
            self.encoder_attn_layer_norm = nn.LayerNorm(size)
        else:  # of the fast path, zeros until it is used
            self.in_proj_bias = nn.Parameter(torch.zeros(3 * size))
            self.fc1_bias = nn.Parameter(torch.zeros(options[f"{side}_ffn_embed_dim"]))
        self.fc1 = nn.Linear(size, options[f"{side}_ffn_embed_dim"])
        self.fc2 = nn.Linear(options[f"{side}_ffn_embed_dim"], size)
        self.final_layer_norm = nn.LayerNorm(size)

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.fc1(x)
        if self.activation == "relu":
            return self.fc2(x.relu())
        approximate = "tanh" if self.activation == "gelu_accurate" else "none"
        return self.fc2(nn.functional.gelu(x, approximate=approximate))

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor, memory: Any = None, memory_mask: Any = None
    ) -> torch.Tensor:
        x = self.around(x, self.self_attn_layer_norm, lambda y: self.self_attn(y, y, mask))
        if memory is not None:
            cross = lambda y: self.encoder_attn(y, memory, memory_mask)  # noqa: E731
            x = self.around(x, self.encoder_attn_layer_norm, cross)
        return self.around(x, self.final_layer_norm, self.feed_forward)


class _FairseqStack(nn.Module):
    def __init__(self, options: dict[str, Any], side: str, words: int):
        super().__init__()
        size = options["encoder_embed_dim"]
        self.register_buffer("version", torch.Tensor([3]))
        self.scale = 1.0 if options["no_scale_embedding"] else math.sqrt(size)
        self.embed_tokens = nn.Embedding(words, size, padding_idx=1)
        if options["learned_pos"]:
            rows = options["max_source_positions"] + 2
            self.embed_positions = nn.Embedding(rows, size, padding_idx=1)
        else:
            self.embed_positions = _Holder()
            self.embed_positions.register_buffer("_float_tensor", torch.zeros(1))
        norm = nn.LayerNorm(size)
        self.layernorm_embedding = norm if options["layernorm_embedding"] else None
        depth = range(options[f"{side}_layers"])
        self.layers = nn.ModuleList(_FairseqLayer(options, side) for _ in depth)
        self.layer_norm = nn.LayerNorm(size) if options["normalize_before"] else None

    def positions(self, ids: torch.Tensor) -> torch.Tensor:
        valid = (ids != 1).long()
        rows = valid.cumsum(1) * valid + 1
        if isinstance(self.embed_positions, nn.Embedding):
            return self.embed_positions(rows)
        half = self.embed_tokens.embedding_dim // 2
        # exact, as this project computes them; fairseq's are rounded in float32
        rates = torch.exp(torch.arange(half).double() * -(math.log(10000) / (half - 1)))
        angles = rows[..., None] * rates
        return torch.cat([angles.sin(), angles.cos()], -1) * valid[..., None]

    def forward(self, ids: torch.Tensor, *arguments: torch.Tensor) -> torch.Tensor:
        x = self.scale * self.embed_tokens(ids) + self.positions(ids)
        if self.layernorm_embedding is not None:
            x = self.layernorm_embedding(x)
        for layer in self.layers:
            x = layer(x, *arguments)
        return x if self.layer_norm is None else self.layer_norm(x)


class Fairseq(nn.Module):
    """fairseq's ``transformer`` of these options, each stack's ``normalize_before`` and
    ``learned_pos`` under one name; padding has the id 1.
    """

    def __init__(self, options: dict[str, Any], source_words: int, target_words: int):
        super().__init__()
        self.encoder = _FairseqStack(options, "encoder", source_words)
        self.decoder = _FairseqStack(options, "decoder", target_words)
        if options["share_all_embeddings"]:
            self.decoder.embed_tokens = self.encoder.embed_tokens
        size = options["encoder_embed_dim"]
        self.decoder.output_projection = nn.Linear(size, target_words, bias=False)
        if options["share_all_embeddings"] or options["share_decoder_input_output_embed"]:
            self.decoder.output_projection.weight = self.decoder.embed_tokens.weight

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        seen, causal = masks(source, target)
        memory = self.encoder(source, seen)
        return self.decoder.output_projection(self.decoder(target, causal, memory, seen))
