"""PyTorch twin of "Transformer Deep Dive": an encoder-decoder with heads as wide as the model.

The code runs as printed. Faults, kept by default and corrected by ``repaired=True``:

- Positions are truncated cosines: row 1 of the table at position 0, row 0 at the 49 after it, row
  -1 at position 50, where the document raises an IndexError and this file an error that explains
  it. Repaired: row p at position p.
- Source padding is attended to, by the encoder and by the decoder. Repaired: both mask it.
- The decoder's block computes no feed-forward, but owns a whole encoder block,
  ``transformer_block``, that it never calls. Repaired: the feed-forward and the second norm of that
  block close the decoder's block; its attention and first norm stay unused.

Scores are masked before they are scaled, with -1e20 and not with minus infinity: a query that may
see no key gets the mean of all values. Target padding is masked in neither form: the causal
mask hides the padding after a token.
"""

import math

import torch
from torch import Tensor, nn

MASKED = -1e20


def attend(
    query: Tensor, key: Tensor, value: Tensor, heads: int, visible: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The mixed values (b, q, h*e) and the weights (b, h, q, k), from (b, q, h*e) and (b, k, h*e).

    ``visible`` is (b, 1, q, k); axes may have length 1.
    """
    query, key, value = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (query, key, value))
    scores = query @ key.transpose(-2, -1)
    if visible is not None:
        scores = scores.masked_fill(~visible, max(MASKED, torch.finfo(scores.dtype).min))
    weights = (scores / math.sqrt(query.shape[-1])).softmax(dim=-1)
    return (weights @ value).transpose(1, 2).flatten(2), weights


class SelfAttention(nn.Module):
    """Every head as wide as the model: three matrices (h*d, d) in, one (d, h*d) out."""

    def __init__(self, embed_size: int, heads: int):
        super().__init__()
        self.heads = heads
        self.W_v, self.W_k, self.W_q = (nn.Linear(embed_size, heads * embed_size) for _ in range(3))
        self.fc = nn.Linear(heads * embed_size, embed_size)

    def forward(self, x: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor]:
        """The attended values (b, n, d) and the weights (b, h, n, n)."""
        mixed, weights = attend(self.W_q(x), self.W_k(x), self.W_v(x), self.heads, visible)
        return self.fc(mixed), weights


class CrossAttention(nn.Module):
    """The same from the target (b, t, d) to the memory (b, s, d), under other names."""

    def __init__(self, embed_size: int, heads: int):
        super().__init__()
        self.heads = heads
        self.W_Encoder_Decoder_values = nn.Linear(embed_size, heads * embed_size)
        self.W_Encoder_Decoder_keys = nn.Linear(embed_size, heads * embed_size)
        self.W_self_queries = nn.Linear(embed_size, heads * embed_size)
        self.fc = nn.Linear(heads * embed_size, embed_size)

    def forward(self, x: Tensor, memory: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor]:
        """The attended values (b, t, d) and the weights (b, h, t, s)."""
        keys, values = self.W_Encoder_Decoder_keys(memory), self.W_Encoder_Decoder_values(memory)
        mixed, weights = attend(self.W_self_queries(x), keys, values, self.heads, visible)
        return self.fc(mixed), weights


class EncoderBlock(nn.Module):
    """Self-attention and feed-forward, each followed by residual, norm and dropout.

    Both use the same dropout module.
    """

    def __init__(self, embed_size: int, heads: int, dropout: float):
        super().__init__()
        self.attention_mechanism = SelfAttention(embed_size, heads)
        self.normalization1, self.normalization2 = (
            nn.LayerNorm(embed_size),
            nn.LayerNorm(embed_size),
        )
        self.feed_forward_layers = nn.Sequential(
            nn.Linear(embed_size, 4 * embed_size), nn.ReLU(), nn.Linear(4 * embed_size, embed_size)
        )
        self.dropout_layer = nn.Dropout(dropout)

    def feed_forward(self, x: Tensor) -> Tensor:
        """The block's second half: all that the repaired decoder uses of it."""
        return self.dropout_layer(self.normalization2(self.feed_forward_layers(x) + x))

    def forward(self, x: Tensor, visible: Tensor | None) -> Tensor:
        x = self.dropout_layer(self.normalization1(self.attention_mechanism(x, visible)[0] + x))
        return self.feed_forward(x)


class DecoderBlock(nn.Module):
    """Causal self-attention and cross-attention; the feed-forward of ``transformer_block`` only if
    repaired."""

    def __init__(self, embed_size: int, heads: int, dropout: float, repaired: bool):
        super().__init__()
        self.repaired = repaired
        self.normalization1, self.normalization2 = (
            nn.LayerNorm(embed_size),
            nn.LayerNorm(embed_size),
        )
        self.attention_layer = SelfAttention(embed_size, heads)
        self.EncoderDecoderAttention = CrossAttention(embed_size, heads)
        self.transformer_block = EncoderBlock(embed_size, heads, dropout)
        self.dropoutlayer1, self.dropoutlayer2 = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(
        self, x: Tensor, memory: Tensor, visible: Tensor | None, memory_visible: Tensor | None
    ) -> Tensor:
        x = self.dropoutlayer1(self.normalization1(self.attention_layer(x, visible)[0] + x))
        x = self.dropoutlayer2(
            self.normalization2(self.EncoderDecoderAttention(x, memory, memory_visible)[0] + x)
        )
        return self.transformer_block.feed_forward(x) if self.repaired else x


def truncated_cosines(length: int) -> Tensor:
    """The row of each position in the document: cos(2 pi 0.73 p) in float32, truncated.

    Raises ValueError if a row is negative.
    """
    index = torch.cos(2 * math.pi * 0.73 * torch.arange(length, dtype=torch.float64)).float().long()
    if length and index.min() < 0:
        position = int(index.argmin())
        row = f"position {position} takes row {index[position]} of its table, which does not exist"
        raise ValueError(f"a sequence is {length} tokens long, but {row}")
    return index


class Embedded(nn.Module):
    """The sum of word and position embeddings, then dropout: the input of either stack."""

    def __init__(
        self, vocab_size: int, embed_size: int, max_length: int, dropout: float, repaired: bool
    ):
        super().__init__()
        self.repaired = repaired
        self.words_embedding = nn.Embedding(vocab_size, embed_size)
        self.positional_embedding = nn.Embedding(max_length, embed_size)
        self.dropout = nn.Dropout(dropout)

    def embed(self, ids: Tensor) -> Tensor:
        """Hidden states (b, n, d) of ids (b, n)."""
        length = ids.shape[1]
        rows = torch.arange(length) if self.repaired else truncated_cosines(length)
        return self.dropout(
            self.words_embedding(ids) + self.positional_embedding(rows.to(ids.device))
        )


class EncoderStack(Embedded):
    def __init__(
        self,
        vocab_size: int,
        embed_size: int,
        num_layers: int,
        heads: int,
        dropout: float,
        max_length: int,
        *,
        repaired: bool = False,
    ):
        super().__init__(vocab_size, embed_size, max_length, dropout, repaired)
        self.EncoderBlocklayers = nn.ModuleList(
            [EncoderBlock(embed_size, heads, dropout) for _ in range(num_layers)]
        )

    def forward(self, ids: Tensor, visible: Tensor | None) -> Tensor:
        """The memory (b, s, d)."""
        x = self.embed(ids)
        for block in self.EncoderBlocklayers:
            x = block(x, visible)
        return x


class DecoderStack(Embedded):
    def __init__(
        self,
        vocab_size: int,
        embed_size: int,
        num_layers: int,
        heads: int,
        dropout: float,
        max_length: int,
        *,
        repaired: bool = False,
    ):
        super().__init__(vocab_size, embed_size, max_length, dropout, repaired)
        self.DecoderBlocklayers = nn.ModuleList(
            [DecoderBlock(embed_size, heads, dropout, repaired) for _ in range(num_layers)]
        )
        self.fc_out = nn.Linear(embed_size, vocab_size)

    def forward(
        self, ids: Tensor, memory: Tensor, visible: Tensor | None, memory_visible: Tensor | None
    ) -> Tensor:
        """Logits (b, t, v)."""
        x = self.embed(ids)
        for block in self.DecoderBlocklayers:
            x = block(x, memory, visible, memory_visible)
        return self.fc_out(x)


class TransformerArchitecture(nn.Module):
    """Logits (b, t, v) from ids (b, s) and (b, t)."""

    def __init__(
        self,
        source_vocab_size: int,
        target_vocab_size: int,
        source_pad_idx: int,
        target_pad_idx: int,
        embed_size: int = 512,
        num_layers: int = 6,
        heads: int = 8,
        dropout: float = 0,
        max_length: int = 100,
        *,
        repaired: bool = False,
    ):
        super().__init__()
        if max_length < 2 and not repaired:
            raise ValueError(
                f"max_length={max_length}: must be at least 2, since position 0 reads row 1 of the"
                " table of positions"
            )
        sizes = (embed_size, num_layers, heads, dropout, max_length)
        self.encoder = EncoderStack(source_vocab_size, *sizes, repaired=repaired)
        self.decoder = DecoderStack(target_vocab_size, *sizes, repaired=repaired)
        self.source_pad_idx, self.target_pad_idx, self.repaired = (
            source_pad_idx,
            target_pad_idx,
            repaired,
        )

    def source_visible(self, src: Tensor) -> Tensor | None:
        """The mask of source tokens (b, 1, 1, s); None unless repaired: then all are visible."""
        return (src != self.source_pad_idx)[:, None, None] if self.repaired else None

    def encode(self, src: Tensor) -> Tensor:
        """The memory (b, s, d)."""
        return self.encoder(src, self.source_visible(src))

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        past = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool, device=tgt.device).tril()
        return self.decoder(tgt, self.encode(src), past, self.source_visible(src))
