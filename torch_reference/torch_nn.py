"""torch.nn.Transformer with embeddings, positions and an output layer, on torch's fast paths.

It is the reference for what the stock layers can be set to (``norm_first``, ``bias``, activations,
``layer_norm_eps``, no final norm, tied matrices), and the baseline that benchmarks measure against.
Masks are True where a key is hidden. What the stock layers cannot compute is written out.
"""

import math

import torch
from torch import Tensor, nn

from torch_reference.lesson10 import PositionalEncoding


def sinusoids(length: int, d_model: int) -> Tensor:
    """The table of Vaswani et al. 2017, section 3.5, in float64.

    Both frameworks use it if the checkpoint holds none.
    """
    rate = 10_000.0 ** (torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)
    angle = torch.arange(length, dtype=torch.float64)[:, None] / rate
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)


class UnbiasedNorm(nn.LayerNorm):
    """The norm of The Annotated Transformer: the unbiased deviation, eps outside of the root."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.weight * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + self.eps)
        return x if self.bias is None else x + self.bias


class FilledAttention(nn.MultiheadAttention):
    """Attention in which the number ``fill`` replaces hidden scores; (b, n, d) and masks."""

    fill: float

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        **_: object,
    ) -> tuple[Tensor, Tensor]:
        """The attended values, and the weights (b, h, q, k); masks are bool, or -inf if hidden."""
        bias = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        parts = zip((query, key, value), self.in_proj_weight.chunk(3), bias, strict=True)
        q, k, v = (
            nn.functional.linear(*part).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in parts
        )
        scores = q @ k.mT / math.sqrt(self.head_dim)
        if key_padding_mask is not None:
            scores = scores.masked_fill(_hidden(key_padding_mask)[:, None, None], self.fill)
        if attn_mask is not None:
            mask = _hidden(attn_mask)
            mask = mask.unflatten(0, (-1, self.num_heads)) if mask.ndim == 3 else mask
            scores = scores.masked_fill(mask, self.fill)
        weights = nn.functional.dropout(scores.softmax(-1), self.dropout, self.training)
        return self.out_proj((weights @ v).transpose(1, 2).flatten(2)), weights


def _hidden(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask == -math.inf


class TorchTransformer(nn.Module):
    """Logits (b, t, v) from ids (b, s) and (b, t)."""

    def __init__(
        self,
        src_vocab_size: int,
        tgt_vocab_size: int,
        src_pad_idx: int,
        tgt_pad_idx: int,
        max_sequence_length: int,
        d_model: int,
        nhead: int,
        num_encoder_layers: int,
        num_decoder_layers: int,
        dim_feedforward: int,
        dropout: float,
        encoder_attention_dropout: float,
        decoder_attention_dropout: float,
        activation_dropout: float,
        embedding_dropout: float,
        encoder_activation: str,
        decoder_activation: str,
        layer_norm_eps: float,
        norm_first: bool,
        bias: bool,
        encoder_norm: bool,
        decoder_norm: bool,
        scale_embedding: bool,
        positions: str,
        mask_memory: bool,
        tie_output: bool,
        tie_source: bool,
        output_bias: bool,
        unbiased_norm: bool = False,
        mask_fill: float | None = None,
        mask_queries: tuple[bool, bool, bool] = (False, False, False),
    ):
        """``mask_queries``: padding is no query of the encoder, the decoder, the memory."""
        super().__init__()
        self.src_pad_idx, self.tgt_pad_idx, self.mask_memory = src_pad_idx, tgt_pad_idx, mask_memory
        self.scale, self.positions, self.length = (
            math.sqrt(d_model) if scale_embedding else 1.0,
            positions,
            max_sequence_length,
        )
        options = {
            "layer_norm_eps": layer_norm_eps,
            "norm_first": norm_first,
            "bias": bias,
            "batch_first": True,
        }
        sizes = (d_model, nhead, dim_feedforward, dropout)
        norm = {"eps": layer_norm_eps, "bias": bias}
        encoder_layer = nn.TransformerEncoderLayer(*sizes, activation=encoder_activation, **options)
        decoder_layer = nn.TransformerDecoderLayer(*sizes, activation=decoder_activation, **options)
        stock = nn.Transformer(
            d_model,
            nhead,
            custom_encoder=nn.TransformerEncoder(
                encoder_layer,
                num_encoder_layers,
                nn.LayerNorm(d_model, **norm) if encoder_norm else None,
                enable_nested_tensor=False,
            ),
            custom_decoder=nn.TransformerDecoder(
                decoder_layer,
                num_decoder_layers,
                nn.LayerNorm(d_model, **norm) if decoder_norm else None,
            ),
            batch_first=True,
        )
        self.encoder, self.decoder = stock.encoder, stock.decoder
        # The stock layers take one rate for all three
        for layer in [*self.encoder.layers, *self.decoder.layers]:
            layer.dropout.p = activation_dropout
        for layer in self.encoder.layers:
            layer.self_attn.dropout = encoder_attention_dropout
        for layer in self.decoder.layers:
            layer.self_attn.dropout = layer.multihead_attn.dropout = decoder_attention_dropout
        self.heads, self.mask_queries = nhead, mask_queries
        for layer in [*self.encoder.layers, *self.decoder.layers]:
            if unbiased_norm or mask_fill is not None:
                layer.activation_relu_or_gelu = 0  # no fused kernel, which has norms of its own
        for part in list(self.modules()):
            if unbiased_norm and isinstance(part, nn.LayerNorm):
                part.__class__ = UnbiasedNorm
            if mask_fill is not None and isinstance(part, nn.MultiheadAttention):
                part.__class__, part.fill = FilledAttention, mask_fill
        self.tgt_emb = nn.Embedding(tgt_vocab_size, d_model)
        self.src_emb = self.tgt_emb if tie_source else nn.Embedding(src_vocab_size, d_model)
        self.linear = nn.Linear(d_model, tgt_vocab_size, bias=output_bias)
        if tie_output:
            self.linear.weight = self.tgt_emb.weight
        self.dropout = nn.Dropout(embedding_dropout)
        self._add_positions(d_model)

    def _add_positions(self, d_model: int) -> None:
        if self.positions == "sinusoidal_stored":
            self.pos_enc = PositionalEncoding(d_model, 0.0, self.length)
        if self.positions == "sinusoidal":
            self.register_buffer("sinusoids", sinusoids(self.length, d_model), persistent=False)
        if self.positions == "learned":
            self.src_pos, self.tgt_pos = (
                nn.Embedding(self.length, d_model),
                nn.Embedding(self.length, d_model),
            )

    def _embed(self, ids: Tensor, side: str) -> Tensor:
        x = getattr(self, f"{side}_emb")(ids) * self.scale
        if self.positions == "sinusoidal_stored":
            x = x + self.pos_enc.pe[: ids.shape[1], 0]
        if self.positions == "sinusoidal":
            x = x + self.sinusoids[: ids.shape[1]].to(x.dtype)
        if self.positions == "learned":
            x = x + getattr(self, f"{side}_pos").weight[: ids.shape[1]]
        return self.dropout(x)

    def encode(self, src: Tensor) -> Tensor:
        """The memory (b, s, d)."""
        padding = src == self.src_pad_idx
        queries = self._of_queries(padding, src.shape[1]) if self.mask_queries[0] else None
        return self.encoder(self._embed(src, "src"), queries, src_key_padding_mask=padding)

    def _of_queries(self, padding: Tensor, keys: int) -> Tensor:
        """The mask (b·h, q, keys) that hides every key from padding (b, q)."""
        return padding[:, :, None].expand(-1, -1, keys).repeat_interleave(self.heads, 0)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        future = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool, device=tgt.device).triu(1)
        padding, memory = tgt == self.tgt_pad_idx, None
        if self.mask_queries[1]:
            future = future | self._of_queries(padding, tgt.shape[1])
        if self.mask_queries[2]:
            memory = self._of_queries(padding, src.shape[1])
        x = self.decoder(
            self._embed(tgt, "tgt"),
            self.encode(src),
            tgt_mask=future,
            memory_mask=memory,
            tgt_is_causal=True,  # so that torch does not compare the mask to find out
            tgt_key_padding_mask=padding,
            memory_key_padding_mask=src == self.src_pad_idx if self.mask_memory else None,
        )
        return self.linear(x)
