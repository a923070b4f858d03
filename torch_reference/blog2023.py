"""PyTorch twin of the post "Transformer" of 2023-06-05.

Attention without biases, GELU, and one kind of block in both stacks.

Repaired to run at all: ``PositionalEncoding`` is used there but not printed (here sinusoids in a
buffer ``pe`` and a dropout), and nothing joins encoder and decoder (here :class:`Transformer`,
which also decides which attention is masked: faithful, the decoder's causal self-attention only).

Faults, kept unless ``repaired=True``:

- Mixing: the einsum gives the keys of the weights and of the values two different letters, so the
  weights are summed by themselves, to 1, and every query gets the plain sum of all values. No mask
  has an effect but to make NaN of a query that may see no key. Repaired: the values are mixed by
  the weights, and a query that may see no key gets 0.
- Shape and residual of the shared block are the key's. In the decoder that is the memory, so source
  and target must be equally long, and together with the mixing no target token reaches the logits.
  Repaired: both are the query's.
- The decoder block's mask arguments are named the wrong way round, and no padding is masked.
  Repaired: source padding is masked in the encoder's self-attention and in cross-attention.
- The decoder block's dropout has no rate, so it is 0.5. Repaired: the model's rate.
"""

import torch
from torch import Tensor, nn


class MultiHeadAttention(nn.Module):
    """Keys and queries are each divided by the fourth root of d, so scores by its square root."""

    def __init__(self, embed_size: int, heads: int, bias: bool = False, *, repaired: bool = False):
        super().__init__()
        self.embed_size, self.heads, self.repaired = embed_size, heads, repaired
        self.keys, self.queries = (
            nn.Linear(embed_size, embed_size, bias=bias),
            nn.Linear(embed_size, embed_size, bias=bias),
        )
        self.values, self.fc = (
            nn.Linear(embed_size, embed_size, bias=bias),
            nn.Linear(embed_size, embed_size, bias=bias),
        )

    def forward(
        self, key: Tensor, query: Tensor, value: Tensor, hidden: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The output (b, q, d) and the weights (b, h, q, k).

        ``key`` and ``value`` are (b, k, d), ``query`` (b, q, d); ``hidden`` is True for a key that
        a query must not attend to.
        """
        root = self.embed_size**0.25
        k, q, v = (
            self._heads(self.keys(key)) / root,
            self._heads(self.queries(query)) / root,
            self._heads(self.values(value)),
        )
        scores = torch.einsum("bqhe,bkhe->bhqk", q, k)
        if not self.repaired:
            if hidden is not None:
                scores = scores.masked_fill(hidden, float("-inf"))
            weights = scores.softmax(dim=-1)
            summed = weights.sum(dim=-1).transpose(1, 2)[..., None] * v.sum(dim=1, keepdim=True)
            return self.fc(summed.reshape(*key.shape[:2], self.embed_size)), weights
        if hidden is not None:
            weights = (
                scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
                .softmax(dim=-1)
                .masked_fill(hidden, 0.0)
            )
        else:
            weights = scores.softmax(dim=-1)
        return self.fc(torch.einsum("bhqk,bkhe->bqhe", weights, v).flatten(2)), weights

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1))


class EncoderBlock(nn.Module):
    """Attention and feed-forward, each with residual and norm; also the second half of a decoder
    block."""

    def __init__(self, embed_size: int, heads: int, bias: bool = False, *, repaired: bool = False):
        super().__init__()
        self.repaired = repaired
        self.attention = MultiHeadAttention(embed_size, heads, bias, repaired=repaired)
        self.layer_norm1, self.layer_norm2 = nn.LayerNorm(embed_size), nn.LayerNorm(embed_size)
        self.feed_forward = nn.Sequential(
            nn.Linear(embed_size, 4 * embed_size), nn.GELU(), nn.Linear(4 * embed_size, embed_size)
        )

    def forward(self, key: Tensor, query: Tensor, value: Tensor, hidden: Tensor | None) -> Tensor:
        """(b, q, d)."""
        attended, _ = self.attention(key, query, value, hidden)
        out = self.layer_norm1((query if self.repaired else key) + attended)
        return self.layer_norm2(out + self.feed_forward(out))


class DecoderBlock(nn.Module):
    """Self-attention with its norm and dropout, then an encoder block that reads the memory."""

    def __init__(
        self,
        embed_size: int,
        heads: int,
        dropout: float,
        bias: bool = False,
        *,
        repaired: bool = False,
    ):
        super().__init__()
        self.encoder_block = EncoderBlock(embed_size, heads, bias, repaired=repaired)
        self.attention = MultiHeadAttention(embed_size, heads, bias, repaired=repaired)
        self.layer_norm = nn.LayerNorm(embed_size)
        self.dropout = nn.Dropout(dropout if repaired else 0.5)

    def forward(
        self, x: Tensor, memory: Tensor, self_hidden: Tensor | None, cross_hidden: Tensor | None
    ) -> Tensor:
        """(b, t, d) from (b, t, d) and (b, s, d)."""
        x = self.dropout(self.layer_norm(x + self.attention(x, x, x, self_hidden)[0]))
        return self.encoder_block(memory, x, memory, cross_hidden)


class PositionalEncoding(nn.Module):
    """Add the sinusoids of Vaswani et al. 2017 to (b, n, d), then dropout.

    They are stored in the buffer ``pe`` (length, d).
    """

    def __init__(self, embed_size: int, max_len: int, dropout: float):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        pairs = torch.arange(0, embed_size, 2, dtype=torch.float64) / embed_size
        angle = torch.arange(max_len, dtype=torch.float64)[:, None] / 10_000.0**pairs
        self.register_buffer(
            "pe",
            torch.stack([angle.sin(), angle.cos()], dim=-1)
            .flatten(1)
            .to(torch.get_default_dtype()),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x + self.pe[: x.shape[1]])


class Encoder(nn.Module):
    """Embeddings, positions, a second dropout and the blocks."""

    def __init__(
        self,
        vocab_size: int,
        embed_size: int,
        max_len: int,
        dropout: float,
        layers: list[EncoderBlock],
    ):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, embed_size)
        self.position_embed = PositionalEncoding(embed_size, max_len, dropout)
        self.encoder_layers = nn.ModuleList(layers)
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor, hidden: Tensor | None) -> Tensor:
        """The memory (b, s, d)."""
        x = self.dropout(self.position_embed(self.embed(ids)))
        for layer in self.encoder_layers:
            x = layer(x, x, x, hidden)
        return x


class Decoder(nn.Module):
    """Embeddings, positions, a second dropout, the blocks and the output layer."""

    def __init__(
        self,
        vocab_size: int,
        embed_size: int,
        max_len: int,
        dropout: float,
        layers: list[DecoderBlock],
    ):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, embed_size)
        self.position_embed = PositionalEncoding(embed_size, max_len, dropout)
        self.decoder_layer = nn.ModuleList(layers)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(embed_size, vocab_size)

    def forward(
        self, ids: Tensor, memory: Tensor, self_hidden: Tensor | None, cross_hidden: Tensor | None
    ) -> Tensor:
        """Logits (b, t, v)."""
        x = self.dropout(self.position_embed(self.embed(ids)))
        for layer in self.decoder_layer:
            x = layer(x, memory, self_hidden, cross_hidden)
        return self.fc(x)


class Transformer(nn.Module):
    """Logits (b, t, v) from ids (b, s) and (b, t). The post names no sizes: these are ours."""

    def __init__(
        self,
        src_vocab_size: int,
        tgt_vocab_size: int,
        src_pad_idx: int,
        tgt_pad_idx: int,
        embed_size: int = 256,
        heads: int = 8,
        num_encoder_layers: int = 4,
        num_decoder_layers: int = 4,
        max_len: int = 100,
        dropout: float = 0.1,
        bias: bool = False,
        *,
        repaired: bool = False,
    ):
        super().__init__()
        self.src_pad_idx, self.tgt_pad_idx, self.repaired = src_pad_idx, tgt_pad_idx, repaired
        encoder = [
            EncoderBlock(embed_size, heads, bias, repaired=repaired)
            for _ in range(num_encoder_layers)
        ]
        decoder = [
            DecoderBlock(embed_size, heads, dropout, bias, repaired=repaired)
            for _ in range(num_decoder_layers)
        ]
        self.encoder = Encoder(src_vocab_size, embed_size, max_len, dropout, encoder)
        self.decoder = Decoder(tgt_vocab_size, embed_size, max_len, dropout, decoder)

    def source_padding(self, src: Tensor) -> Tensor | None:
        """The mask of source padding (b, 1, 1, s); None unless repaired."""
        return (src == self.src_pad_idx)[:, None, None, :] if self.repaired else None

    def encode(self, src: Tensor) -> Tensor:
        """The memory (b, s, d)."""
        return self.encoder(src, self.source_padding(src))

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        """Logits. Raises ValueError if source and target differ in length and the model is not
        repaired."""
        if not self.repaired and src.shape[1] != tgt.shape[1]:
            lengths = f"source has {src.shape[1]} tokens and target {tgt.shape[1]}"
            raise ValueError(
                f"{lengths}: this decoder adds the memory position by position, so both must be"
                " equally long"
            )
        future = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool, device=tgt.device).triu(1)
        return self.decoder(tgt, self.encode(src), future, self.source_padding(src))
