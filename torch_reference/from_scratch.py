"""PyTorch twin of "Transformer from scratch": an encoder-decoder shown in diagrams, code linked.

The document prints no code, so this follows what the commit that it links computes (its names,
shapes and arithmetic): post-norm blocks with dropout after each norm, learned positions, no final
norm, no scale on the embeddings, no dropout on attention weights.

Fault: the document's formula divides the scores by sqrt(d_k), the width of a head; the linked code
divides by sqrt(embed_size), which makes attention flatter. Faithful: the code, since that is what a
checkpoint was trained with; ``repaired=True``: the formula. No repair was needed for it to run.

A masked score becomes -1e20 before it is divided. A query that may see no key therefore weighs all
keys alike and gets the mean of all values. Target padding is not masked: it comes after the
tokens, so causality hides it. Masks are True for visible keys, as in the document.
"""

import torch
from torch import Tensor, nn


class MultiHeadSelfAttentionBlock(nn.Module):
    """The attended values (b, q, d) of ``heads`` heads, and their weights (b, h, q, k)."""

    def __init__(self, embedding_size: int, num_heads: int, *, repaired: bool = False):
        super().__init__()
        if num_heads < 1 or embedding_size % num_heads:
            raise ValueError(
                f"embedding_size={embedding_size} is not divisible by num_heads={num_heads}"
            )
        self.num_heads, self.head_dim = num_heads, embedding_size // num_heads
        self.scale = (self.head_dim if repaired else embedding_size) ** 0.5
        self.values_transform = nn.Linear(embedding_size, embedding_size)
        self.keys_transform = nn.Linear(embedding_size, embedding_size)
        self.queries_transform = nn.Linear(embedding_size, embedding_size)
        self.linear_out = nn.Linear(embedding_size, embedding_size)

    def forward(
        self, values: Tensor, keys: Tensor, queries: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The output (b, q, d).

        ``values`` and ``keys`` are (b, k, d), ``queries`` (b, q, d); ``mask`` broadcasts to
        (b, h, q, k).
        """
        v, k, q = (
            self._heads(self.values_transform(values)),
            self._heads(self.keys_transform(keys)),
            self._heads(self.queries_transform(queries)),
        )
        scores = q @ k.transpose(-2, -1)
        if mask is not None:
            scores = scores.masked_fill(mask.logical_not(), -1e20)
        weights = (scores / self.scale).softmax(dim=-1)
        return self.linear_out((weights @ v).transpose(1, 2).flatten(2)), weights

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each with residual, norm and dropout.

    An encoder layer, and the second half of a decoder layer.
    """

    def __init__(
        self,
        embed_size: int,
        num_heads: int,
        dropout: float,
        forward_expansion: int,
        *,
        repaired: bool = False,
    ):
        super().__init__()
        self.self_attention = MultiHeadSelfAttentionBlock(embed_size, num_heads, repaired=repaired)
        self.norm1, self.norm2 = nn.LayerNorm(embed_size), nn.LayerNorm(embed_size)
        hidden = forward_expansion * embed_size
        self.feed_forward = nn.Sequential(
            nn.Linear(embed_size, hidden), nn.ReLU(), nn.Linear(hidden, embed_size)
        )
        self.dropout = nn.Dropout(dropout)  # called twice

    def forward(self, values: Tensor, keys: Tensor, queries: Tensor, mask: Tensor | None) -> Tensor:
        x = self.dropout(self.norm1(self.self_attention(values, keys, queries, mask)[0] + queries))
        return self.dropout(self.norm2(self.feed_forward(x) + x))


class DecoderBlock(nn.Module):
    """Causal self-attention, then a transformer block.

    The block's query is the result, its keys and values are the memory.
    """

    def __init__(
        self,
        embed_size: int,
        num_heads: int,
        dropout: float,
        forward_expansion: int,
        *,
        repaired: bool = False,
    ):
        super().__init__()
        self.norm = nn.LayerNorm(embed_size)
        self.self_attention = MultiHeadSelfAttentionBlock(embed_size, num_heads, repaired=repaired)
        self.transformer_block = TransformerBlock(
            embed_size, num_heads, dropout, forward_expansion, repaired=repaired
        )
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        value: Tensor,
        key: Tensor,
        src_mask: Tensor | None,
        trg_mask: Tensor | None,
    ) -> Tensor:
        query = self.dropout(self.norm(self.self_attention(x, x, x, trg_mask)[0] + x))
        return self.transformer_block(value, key, query, src_mask)


class Embeddings(nn.Module):
    """The sum of token and position embeddings, then dropout: the input of either stack."""

    def __init__(self, vocab_size: int, embed_size: int, max_length: int, dropout: float):
        super().__init__()
        self.word_embedding = nn.Embedding(vocab_size, embed_size)
        self.position_embedding = nn.Embedding(max_length, embed_size)
        self.dropout = nn.Dropout(dropout)

    def embed(self, ids: Tensor) -> Tensor:
        """(b, n) -> (b, n, d)."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        return self.dropout(self.word_embedding(ids) + self.position_embedding(positions))


class Encoder(Embeddings):
    """Source ids (b, s) and their mask -> the memory (b, s, d)."""

    def __init__(
        self,
        src_vocab_size: int,
        embed_size: int,
        num_layers: int,
        max_length: int,
        dropout: float,
        **block,
    ):
        super().__init__(src_vocab_size, embed_size, max_length, dropout)
        self.layers = nn.ModuleList(
            TransformerBlock(embed_size, dropout=dropout, **block) for _ in range(num_layers)
        )

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, x, x, mask)
        return x


class Decoder(Embeddings):
    """Target ids (b, t), the memory and both masks -> logits (b, t, v)."""

    def __init__(
        self,
        trg_vocab_size: int,
        embed_size: int,
        num_layers: int,
        max_length: int,
        dropout: float,
        **block,
    ):
        super().__init__(trg_vocab_size, embed_size, max_length, dropout)
        self.layers = nn.ModuleList(
            DecoderBlock(embed_size, dropout=dropout, **block) for _ in range(num_layers)
        )
        self.fc_out = nn.Linear(embed_size, trg_vocab_size)

    def forward(
        self, x: Tensor, enc_out: Tensor, src_mask: Tensor | None, trg_mask: Tensor | None
    ) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, enc_out, enc_out, src_mask, trg_mask)
        return self.fc_out(x)


class Transformer(nn.Module):
    """Logits (b, t, v) from ids (b, s) and (b, t)."""

    def __init__(
        self,
        src_vocab_size: int,
        trg_vocab_size: int,
        src_pad_idx: int,
        trg_pad_idx: int,
        embed_size: int = 512,
        num_layers: int = 6,
        forward_expansion: int = 4,
        heads: int = 8,
        dropout: float = 0.0,
        max_length: int = 100,
        *,
        repaired: bool = False,
    ):
        super().__init__()
        self.src_pad_idx, self.trg_pad_idx = (
            src_pad_idx,
            trg_pad_idx,
        )  # the latter is asked for and masks nothing
        sizes = (embed_size, num_layers, max_length, dropout)
        block = {"num_heads": heads, "forward_expansion": forward_expansion, "repaired": repaired}
        self.encoder = Encoder(src_vocab_size, *sizes, **block)
        self.decoder = Decoder(trg_vocab_size, *sizes, **block)

    def make_src_mask(self, src: Tensor) -> Tensor:
        """(b, 1, 1, s), True at tokens."""
        return (src != self.src_pad_idx)[:, None, None, :]

    def make_trg_mask(self, trg: Tensor) -> Tensor:
        """(b, 1, t, t), True at a position and those before it."""
        length = trg.shape[1]
        return (
            torch.ones(length, length, dtype=torch.bool, device=trg.device)
            .tril()
            .expand(len(trg), 1, length, length)
        )

    def encode(self, src: Tensor) -> Tensor:
        """The memory (b, s, d)."""
        return self.encoder(src, self.make_src_mask(src))

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        return self.decoder(tgt, self.encode(src), self.make_src_mask(src), self.make_trg_mask(tgt))
