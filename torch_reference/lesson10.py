"""PyTorch twin of "Lesson 10: Transformers II": torch.nn.Transformer for translation.

It returns the cross-attention weights.

The document subclasses torch.nn.Transformer (post-norm, sequence first inside, a final norm on both
stacks). This file computes the same with the same ``state_dict`` and writes every step out, so that
dropout masks can be injected anywhere and one numerical path is pinned.

Repaired to run at all: torch.nn.Transformer passes ``memory_key_padding_mask``, ``tgt_is_causal``
and ``memory_is_causal`` to the document's decoder, whose forward lacks them; here nothing is passed
that is not used. Faithful: cross-attention is not masked, so the decoder attends to source padding;
``repaired=True`` masks it. ``activation`` reaches the decoder only. A query that may see no key
gets 0 from attention (what scaled_dot_product_attention gives in the document's encoder; the
document's decoder, which asks for weights, would give NaN: one rule is kept for both).
"""

import math

import torch
from torch import Tensor, nn


class Attention(nn.Module):
    """torch.nn.MultiheadAttention, written out.

    Inputs are (length, batch, d); masks are True for hidden keys.
    """

    def __init__(self, d_model: int, nhead: int, dropout: float):
        super().__init__()
        self.heads = nhead
        self.in_proj_weight = nn.Parameter(torch.empty(3 * d_model, d_model))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * d_model))
        self.out_proj = nn.Linear(d_model, d_model)
        nn.init.zeros_(self.out_proj.bias)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, query: Tensor, key: Tensor, padding: Tensor | None, future: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The attended values (t, b, d), and the weights (b, h, t, s) after dropout.

        ``padding`` is (b, s), ``future`` (t, s).
        """
        parts = zip(
            self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3), (query, key, key), strict=True
        )
        q, k, v = (self._heads(nn.functional.linear(x, weight, bias)) for weight, bias, x in parts)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        hidden = torch.zeros((), dtype=torch.bool)
        if padding is not None:
            hidden = hidden | padding[:, None, None, :]
        if future is not None:
            hidden = hidden | future
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        weights = self.dropout(weights.masked_fill(hidden, 0.0))
        return self.out_proj((weights @ v).permute(2, 0, 1, 3).flatten(2)), weights

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).permute(1, 2, 0, 3)


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward, each followed by dropout, sum and norm."""

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int,
        dropout: float,
        activation=nn.functional.relu,
    ):
        super().__init__()
        self.self_attn = Attention(d_model, nhead, dropout)
        self.linear1, self.linear2 = (
            nn.Linear(d_model, dim_feedforward),
            nn.Linear(dim_feedforward, d_model),
        )
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.dropout, self.dropout1, self.dropout2 = (
            nn.Dropout(dropout),
            nn.Dropout(dropout),
            nn.Dropout(dropout),
        )
        self.activation = activation

    def feed_forward(self, x: Tensor) -> Tensor:
        return self.linear2(self.dropout(self.activation(self.linear1(x))))

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        x = self.norm1(x + self.dropout1(self.self_attn(x, x, padding, None)[0]))
        return self.norm2(x + self.dropout2(self.feed_forward(x)))


class DecoderLayer(EncoderLayer):
    """Masked self-attention, cross-attention and feed-forward.

    Also returns the cross-attention weights, averaged over heads.
    """

    def __init__(self, d_model: int, nhead: int, dim_feedforward: int, dropout: float, activation):
        super().__init__(d_model, nhead, dim_feedforward, dropout, activation)
        self.multihead_attn = Attention(d_model, nhead, dropout)
        self.norm3, self.dropout3 = nn.LayerNorm(d_model), nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        padding: Tensor,
        future: Tensor,
        memory_padding: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        x = self.norm1(x + self.dropout1(self.self_attn(x, x, padding, future)[0]))
        attended, weights = self.multihead_attn(x, memory, memory_padding, None)
        x = self.norm2(x + self.dropout2(attended))
        return self.norm3(x + self.dropout3(self.feed_forward(x))), weights.mean(dim=1)


class Stack(nn.Module):
    """Layers and a final norm.

    After a call, ``attention_weights`` of a decoder holds one (b, t, s) array per layer.
    """

    def __init__(self, layers: list[nn.Module], d_model: int):
        super().__init__()
        self.layers, self.norm = nn.ModuleList(layers), nn.LayerNorm(d_model)
        self.attention_weights: list[Tensor] = []


class PositionalEncoding(nn.Module):
    """Add the sinusoids of Vaswani et al. 2017 to (n, b, d), then dropout.

    They are stored in the buffer ``pe`` (length, 1, d).
    """

    def __init__(self, d_model: int, dropout: float, max_len: int):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        rate = torch.exp(torch.arange(0, d_model, 2).float() * (-math.log(10_000.0) / d_model))
        angle = torch.arange(max_len).float()[:, None] * rate
        self.register_buffer(
            "pe", torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)[:, None]
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x + self.pe[: len(x)])


class TranslationTransformer(nn.Module):
    """Logits (b, t, v) from ids (b, s) and (b, t)."""

    def __init__(
        self,
        src_vocab_size: int = 10_000,
        src_pad_idx: int = 1,
        tgt_vocab_size: int = 10_000,
        tgt_pad_idx: int = 1,
        max_sequence_length: int = 100,
        d_model: int = 512,
        nhead: int = 8,
        num_encoder_layers: int = 6,
        num_decoder_layers: int = 6,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str = "relu",
        *,
        repaired: bool = False,
    ):
        super().__init__()
        self.src_pad_idx, self.tgt_pad_idx, self.repaired = src_pad_idx, tgt_pad_idx, repaired
        sizes = (d_model, nhead, dim_feedforward, dropout)
        self.encoder = Stack([EncoderLayer(*sizes) for _ in range(num_encoder_layers)], d_model)
        self.decoder = Stack(
            [
                DecoderLayer(*sizes, getattr(nn.functional, activation))
                for _ in range(num_decoder_layers)
            ],
            d_model,
        )
        # As torch.nn.Transformer does, before the layers around it exist
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
        self.src_emb, self.tgt_emb = (
            nn.Embedding(src_vocab_size, d_model),
            nn.Embedding(tgt_vocab_size, d_model),
        )
        self.pos_enc = PositionalEncoding(d_model, dropout, max_sequence_length)
        self.linear = nn.Linear(d_model, tgt_vocab_size)

    def encode(self, src: Tensor) -> Tensor:
        """The memory (s, b, d)."""
        padding = src == self.src_pad_idx
        x = self.pos_enc(self.src_emb(src.T) * math.sqrt(self.src_emb.embedding_dim))
        for layer in self.encoder.layers:
            x = layer(x, padding)
        return self.encoder.norm(x)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        memory = self.encode(src)
        padding = tgt == self.tgt_pad_idx
        future = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool).triu(1)
        x = self.pos_enc(self.tgt_emb(tgt.T) * math.sqrt(self.tgt_emb.embedding_dim))
        self.decoder.attention_weights = []
        for layer in self.decoder.layers:
            x, weights = layer(
                x, memory, padding, future, src == self.src_pad_idx if self.repaired else None
            )
            self.decoder.attention_weights.append(weights)
        return self.linear(self.decoder.norm(x).transpose(0, 1))
