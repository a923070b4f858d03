"""PyTorch twin of "Transformers from scratch part - 2".

An encoder with a fused query-key-value layer and its own layer norm.

The document prints an encoder that reads embeddings, and promises a decoder that it does not print.
:class:`Encoder` has the document's ``state_dict``; :class:`EncoderDecoder` makes a translation
model of it, with token embeddings and the decoder of "Lesson 10".

Repaired to run at all: ``super().__init()``; a stack that builds itself and takes other arguments
than it is called with (here it builds layers and takes the maximum length too); ``drop_prob``
passed instead of ``sequence_length`` (both are passed); ``d_model`` undefined in the encoding;
``v`` for ``V``; ``if mask:`` on a tensor; and an encoding that does not broadcast to inputs shorter
than the maximum (its first rows are taken).

Faithful, and what ``repaired=True`` does instead, as the document's text has it:
- the heads' values (b, h, n, e) are reshaped to (b, n, h·e) as they lie in memory, so that one
  output position holds pieces of several positions of one head; repaired: the heads are moved back
  after the positions first;
- the feed-forward adds the encoding of positions to its input, at every call; repaired: it is added
  once, to the encoder's input;
- the encoding's exponent is twice the paper's, 10000^(4j/d) for pair j; repaired: 10000^(2j/d);
- a layer runs its feed-forward before the attention too, the same module twice; repaired:
  attention, sum and norm, feed-forward, sum and norm;
- no source padding is ever masked; repaired: it is, in the encoder and in cross-attention. A query
  that may see no key gets 0 from attention.

Scores are divided by sqrt(head width) in the code (by sqrt(d_model) in the text); both forms keep
the code's. The encoding is computed in float64 and rounded to the input's type.
"""

import math

import torch
from torch import Tensor, nn

from torch_reference import lesson10


def sinusoids(length: int, width: int, exponent: float) -> Tensor:
    """Sinusoids (length, d), interleaved, of position / 10000^(exponent · 2j/d), in float64."""
    pairs = torch.arange(0, width, 2, dtype=torch.float64, device="cpu")
    angle = torch.arange(length, dtype=torch.float64, device="cpu")[:, None] / 10_000.0 ** (
        exponent * pairs / width
    )
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)


class Attention(nn.Module):
    """Self-attention with one layer ``qkv``: each head's query, key and value, head after head."""

    def __init__(self, d_model: int, num_heads: int, *, repaired: bool):
        super().__init__()
        self.heads, self.repaired = num_heads, repaired
        self.qkv, self.linear_layer = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The attended values (b, n, d) and the weights (b, h, q, k).

        ``padding`` (b, k) is True for hidden keys.
        """
        q, k, v = self.qkv(x).unflatten(-1, (self.heads, -1)).transpose(1, 2).chunk(3, dim=-1)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        if padding is None:
            weights = scores.softmax(dim=-1)
        else:
            hidden = padding[:, None, None, :]
            weights = (
                scores.masked_fill(hidden, float("-inf")).softmax(dim=-1).masked_fill(hidden, 0.0)
            )
        values = weights @ v
        return self.linear_layer(
            (values.transpose(1, 2) if self.repaired else values).reshape(x.shape)
        ), weights


class LayerNormalization(nn.Module):
    """``gamma · (x - mean) / sqrt(biased variance + 1e-5) + beta`` along the last axis."""

    def __init__(self, d_model: int):
        super().__init__()
        self.gamma, self.beta = (
            nn.Parameter(torch.ones(d_model)),
            nn.Parameter(torch.zeros(d_model)),
        )

    def forward(self, x: Tensor) -> Tensor:
        centered = x - x.mean(dim=-1, keepdim=True)
        return (
            self.gamma * (centered / (centered.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt())
            + self.beta
        )


class PositionwiseFeedForward(nn.Module):
    """Two linear layers; unless repaired, the positional encoding is added to the input."""

    def __init__(
        self, d_model: int, hidden: int, sequence_length: int, drop_prob: float, *, repaired: bool
    ):
        super().__init__()
        self.linear1, self.linear2 = nn.Linear(d_model, hidden), nn.Linear(hidden, d_model)
        self.dropout = nn.Dropout(drop_prob)
        self.sequence_length, self.repaired = sequence_length, repaired

    def forward(self, x: Tensor) -> Tensor:
        if not self.repaired:
            x = x + sinusoids(self.sequence_length, x.shape[-1], exponent=2.0)[: x.shape[1]].to(x)
        return self.linear2(self.dropout(self.linear1(x).relu()))


class EncoderLayer(nn.Module):
    """Two residuals, each with dropout before and a norm after.

    If not repaired, ``fnn`` runs twice, each time with its own dropout mask.
    """

    def __init__(
        self,
        d_model: int,
        fnn_hidden: int,
        num_heads: int,
        drop_prob: float,
        sequence_length: int,
        *,
        repaired: bool,
    ):
        super().__init__()
        self.repaired = repaired
        self.attention = Attention(d_model, num_heads, repaired=repaired)
        self.fnn = PositionwiseFeedForward(
            d_model, fnn_hidden, sequence_length, drop_prob, repaired=repaired
        )
        self.norm1, self.norm2 = LayerNormalization(d_model), LayerNormalization(d_model)
        self.dropout1, self.dropout2 = nn.Dropout(drop_prob), nn.Dropout(drop_prob)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        attended, _ = self.attention(x, padding) if self.repaired else self.attention(self.fnn(x))
        x = self.norm1(self.dropout1(attended) + x)
        return self.norm2(self.dropout2(self.fnn(x)) + x)


class Encoder(nn.Module):
    """The document's encoder: embeddings (b, s, d) in, memory (b, s, d) out."""

    def __init__(
        self,
        d_model: int = 512,
        fnn_hidden: int = 1264,
        num_heads: int = 8,
        drop_prob: float = 0.1,
        max_sequence_length: int = 40,
        num_layers: int = 3,
        *,
        repaired: bool = False,
    ):
        super().__init__()
        self.max_sequence_length, self.repaired = max_sequence_length, repaired
        sizes = (d_model, fnn_hidden, num_heads, drop_prob, max_sequence_length)
        self.layers = nn.ModuleList(
            [EncoderLayer(*sizes, repaired=repaired) for _ in range(num_layers)]
        )

    def with_positions(self, x: Tensor) -> Tensor:
        """The input of the first layer: ``x``, plus the positional encoding if repaired."""
        if x.shape[1] > self.max_sequence_length:
            raise ValueError(
                f"source is {x.shape[1]} tokens long, over max_length={self.max_sequence_length}"
            )
        if self.repaired:
            table = sinusoids(self.max_sequence_length, x.shape[-1], exponent=1.0)
            x = x + table[: x.shape[1]].to(x)
        return x

    def through_layers(self, x: Tensor, padding: Tensor | None) -> Tensor:
        for layer in self.layers:
            x = layer(x, padding)
        return x

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """``padding`` (b, s) is True at positions to hide, which only the repaired model masks."""
        return self.through_layers(self.with_positions(x), padding)


class EncoderDecoder(nn.Module):
    """Logits (b, t, v) from ids (b, s) and (b, t).

    Keys: the document's under ``encoder.``, ``src_emb``, and those of "Lesson 10" for the rest.

    Ours, since the document has none of it: embeddings times sqrt(d_model), a dropout on them, and
    a decoder whose feed-forward is as wide as the encoder's. There is no norm after the encoder's
    last layer, and its embeddings have no table of positions.
    """

    def __init__(
        self,
        src_vocab_size: int,
        tgt_vocab_size: int,
        src_pad_idx: int,
        tgt_pad_idx: int,
        d_model: int = 512,
        fnn_hidden: int = 1264,
        num_heads: int = 8,
        drop_prob: float = 0.1,
        max_sequence_length: int = 40,
        num_encoder_layers: int = 3,
        num_decoder_layers: int = 3,
        *,
        repaired: bool = False,
    ):
        super().__init__()
        self.src_pad_idx, self.tgt_pad_idx, self.repaired = src_pad_idx, tgt_pad_idx, repaired
        self.encoder = Encoder(
            d_model,
            fnn_hidden,
            num_heads,
            drop_prob,
            max_sequence_length,
            num_encoder_layers,
            repaired=repaired,
        )
        layers = [
            lesson10.DecoderLayer(d_model, num_heads, fnn_hidden, drop_prob, nn.functional.relu)
            for _ in range(num_decoder_layers)
        ]
        self.decoder = lesson10.Stack(layers, d_model)
        # As torch.nn.Transformer does, which "Lesson 10" subclasses
        for parameter in self.decoder.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
        self.src_emb, self.tgt_emb = (
            nn.Embedding(src_vocab_size, d_model),
            nn.Embedding(tgt_vocab_size, d_model),
        )
        self.src_dropout = nn.Dropout(drop_prob)
        self.pos_enc = lesson10.PositionalEncoding(d_model, drop_prob, max_sequence_length)
        self.linear = nn.Linear(d_model, tgt_vocab_size)

    def encode(self, src: Tensor) -> Tensor:
        """The memory (b, s, d)."""
        x = self.src_dropout(
            self.encoder.with_positions(self.src_emb(src) * math.sqrt(self.src_emb.embedding_dim))
        )
        return self.encoder.through_layers(x, src == self.src_pad_idx if self.repaired else None)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        memory = self.encode(src).transpose(0, 1)
        padding, memory_padding = (
            tgt == self.tgt_pad_idx,
            src == self.src_pad_idx if self.repaired else None,
        )
        future = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool, device=tgt.device).triu(1)
        x = self.pos_enc(self.tgt_emb(tgt.T) * math.sqrt(self.tgt_emb.embedding_dim))
        self.decoder.attention_weights = []
        for layer in self.decoder.layers:
            x, weights = layer(x, memory, padding, future, memory_padding)
            self.decoder.attention_weights.append(weights)
        return self.linear(self.decoder.norm(x).transpose(0, 1))
