"""The fields of a configuration, and what follows from them. Standard library only.

A stack is ``layers`` times a block, a block is a tuple of branches, and a branch is one or more
parts under one residual and one norm. A field is here because two published architectures differ in
it. TransformerFields has what both stacks share, StackConfig what a stack may have for itself.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import ClassVar

from jax_transformer.config import enums
from jax_transformer.errors import ConfigError

_HIDING = -1e4
"""A score from which on a hidden key has weight 0, as float32 and float64 round it."""


@dataclass(frozen=True)
class Branch:
    """Parts in order, ``parts[-1](...(parts[0](x)))``, under one residual connection and norm."""

    parts: tuple[enums.Part, ...]
    """Modules of the branch, in order."""
    residual: enums.Residual = enums.Residual.INPUT
    dropout: float | None = None
    """Rate of this branch's dropout; the model's ``dropout`` if None."""


@dataclass(frozen=True)
class StackConfig:
    """An encoder or a decoder."""

    layers: int
    """Number of blocks."""
    branches: tuple[Branch, ...]
    """Branches of every block, in order."""
    unused: tuple[Branch, ...] = ()
    """Branches of one part that every block owns and never computes.

    They belong to the checkpoint and are never trained.
    """
    positions: enums.Positions = enums.Positions.SINUSOIDAL
    positions_at: enums.PositionsAt = enums.PositionsAt.EMBEDDING
    position_index: enums.PositionIndex = enums.PositionIndex.ORDER
    position_exponent: float = 1.0
    """Exponent of sinusoids: pair i has the wavelength 2π · 10000^(exponent · 2i/d).

    1 in Vaswani et al. 2017, 2 in "Transformers from scratch part 2".
    """
    position_offset: int = 0
    """The row of the first position: 2 in BART, whose table has as many rows more."""
    sinusoids: enums.Sinusoids = enums.Sinusoids.INTERLEAVED
    relative_buckets: int = 32
    """Number of biases per head for relative positions (Raffel et al. 2020)."""
    relative_max_distance: int = 128
    """Distance from which on all share the last bias."""
    attention_span: enums.AttentionSpan = enums.AttentionSpan.FULL
    local_radius: int = 127
    """The farthest key of local self-attention, in tokens (Guo et al. 2022)."""
    global_block_size: int = 16
    """Tokens whose normed sum is one key of transient-global self-attention (Guo et al. 2022)."""
    num_heads: int | None = None
    """The model's ``num_heads`` if None."""
    d_ff: int | None = None
    """The model's ``d_ff`` if None."""
    activation: enums.Activation = enums.Activation.RELU
    gated: bool = False
    """Multiply the feed-forward's activation by a second projection of its input (Shazeer 2020)."""
    mixing: enums.Mixing = enums.Mixing.WEIGHTED
    head_merge: enums.HeadMerge = enums.HeadMerge.CONCATENATED
    attention_dropout: float | None = None
    """The model's ``attention_dropout`` if None."""
    init: enums.Init | None = None
    """The model's ``init`` if None."""
    embedding_norm: bool = False
    """A norm stands with the embeddings, before their dropout (BART)."""
    embedding_norm_of: enums.EmbeddingNormOf = enums.EmbeddingNormOf.SUM
    final_norm: bool = False
    """A norm after the last block."""
    self_mask: tuple[enums.Mask, ...] = ()
    """Rules that say which keys self-attention may see."""
    cross_mask: tuple[enums.Mask, ...] = ()
    """Rules that say which keys cross-attention may see."""
    RENAMED: ClassVar[Mapping[str, str]] = {"idle": "unused"}
    """Keys of version 0.1 that are still read."""

    @property
    def parts(self) -> tuple[enums.Part, ...]:
        """The block's distinct parts in order of first use; one in two branches is one module."""
        return tuple(dict.fromkeys(part for branch in self.branches for part in branch.parts))


@dataclass(frozen=True)
class TransformerFields:
    """The fields of a whole encoder-decoder, unchecked."""

    source_vocab_size: int
    """Rows of the source embedding."""
    target_vocab_size: int
    """Rows of the target embedding, and width of the logits."""
    d_model: int
    """Width of the model."""
    num_heads: int
    """Attention heads."""
    d_ff: int
    """Width of the feed-forward's hidden layer."""
    max_length: int
    """Rows of a table of positions: the longest source and target in tokens, unless :attr:`longest`
    is less.
    """
    encoder: StackConfig
    """The encoder."""
    decoder: StackConfig
    """The decoder."""
    head_dim: int | None = None
    """Width of one head; ``d_model / num_heads`` if None."""
    norm: enums.Norm = enums.Norm.LAYER
    norm_placement: enums.NormPlacement = enums.NormPlacement.POST
    norm_epsilon: float = 1e-5
    """Added to the variance, or mean square, inside the root; to the deviation if ``norm`` is
    layer_unbiased.
    """
    bias: bool = True
    """Biases in the linear layers and norms of the stacks."""
    attention_bias: bool | None = None
    """Biases in the four projections of attention; as ``bias`` if None."""
    key_bias: bool = True
    """If attention has biases, also one in its projection of keys: it changes no output, and
    Whisper has none.
    """
    output_bias: bool = True
    """A trained bias in the output layer."""
    logits_bias: bool = False
    """A bias of the logits that belongs to the checkpoint and is never trained:
    ``final_logits_bias`` of Hugging Face's models.
    """
    logit_scale: enums.LogitScale = enums.LogitScale.NONE
    score_scale: enums.ScoreScale = enums.ScoreScale.HEAD_DIM
    mask_fill: enums.MaskFill | float = enums.MaskFill.EXCLUDED
    embedding_scale: enums.EmbeddingScale = enums.EmbeddingScale.SQRT_D_MODEL
    padding_trained: bool = True
    """Train the embedding of padding; False is ``torch.nn.Embedding(padding_idx=...)``."""
    padding_frozen: bool = False
    """Do not train the embedding of padding through a tied output layer either, so that it stays
    zero: Marian has no such token, and begins a translation with zeros.
    """
    tying: enums.Tying = enums.Tying.NONE
    dropout: float = 0.1
    """Rate of dropout on the output of every branch."""
    attention_dropout: float = 0.0
    """Rate of dropout on the attention weights."""
    activation_dropout: float = 0.0
    """Rate of dropout inside the feed-forward, after its activation."""
    embedding_dropout: float = 0.1
    """Rate of dropout on the sum of token embeddings and positions."""
    embedding_dropouts: int = 1
    """Number of such dropouts one after another (two in the 2023-06-05 post)."""
    final_dropout: bool = False
    """Apply ``dropout`` also after the stacks' final norm (T5)."""
    dropout_site: enums.DropoutSite = enums.DropoutSite.BEFORE_ADD
    dropout_masks: enums.DropoutMasks = enums.DropoutMasks.HASH
    init: enums.Init = enums.Init.XAVIER
    architecture: str = "torch_nn"
    """The architecture that names this model's PyTorch weights and twin."""
    compute_dtype: str | None = None
    """Dtype of the arithmetic: bfloat16, float16, float32, float64; the parameters' own if None."""
    matmul_precision: enums.MatmulPrecision = enums.MatmulPrecision.HIGHEST
    attention_backend: enums.AttentionBackend = enums.AttentionBackend.XLA
    remat: enums.Remat = enums.Remat.NONE
    scan_layers: bool = False
    """Compile one block of each stack and loop over its layers; no weight has another name."""
    source_pad_id: int = 0
    """Id of padding in the source."""
    target_pad_id: int = 0
    """Id of padding in the target."""
    bos_id: int = 1
    """Id with which every target begins."""
    eos_id: int = 2
    """Id that ends a line."""
    mel_bins: int | None = None
    """Channels of the source's spectrogram, which two convolutions read instead of an embedding of
    tokens (Whisper); None if the source is text.
    """
    mel_frames: int | None = None
    """Frames of that spectrogram: two of them make one position of the encoder."""
    RENAMED: ClassVar[Mapping[str, str]] = {"layout": "architecture"}
    """Keys of version 0.1 that are still read."""

    @property
    def head_width(self) -> int:
        return self.head_dim or self.d_model // self.num_heads

    def heads(self, stack: StackConfig) -> int:
        """Return the number of heads in an attention of that stack."""
        return stack.num_heads or self.num_heads

    def head_width_of(self, stack: StackConfig) -> int:
        return self.head_dim or self.d_model // self.heads(stack)

    def attention_rate(self, stack: StackConfig) -> float:
        """Return the dropout rate of attention weights in that stack."""
        own = stack.attention_dropout
        return self.attention_dropout if own is None else own

    @property
    def longest(self) -> int:
        """The longest source or target in tokens: ``max_length``, or as far as positions go."""
        length = self.max_length
        for stack in (self.encoder, self.decoder):
            index, has_none = stack.position_index, stack.positions is enums.Positions.NONE
            if index is enums.PositionIndex.TRUNCATED_COSINE and not has_none:
                rows = (position_row(index, i) for i in range(length))
                outside = (i for i, row in enumerate(rows) if not 0 <= row < self.max_length)
                length = next(outside, length)
        return length

    @property
    def equal_lengths(self) -> bool:
        """True if source and target must be equally long, to be added position by position."""
        return enums.Residual.MEMORY in map(attrgetter("residual"), self.decoder.branches)

    @property
    def uncacheable(self) -> str | None:
        """The reason why decoding cannot keep keys and values; None if it can."""
        decoder = self.decoder
        attentions = sum(branch.parts.count(enums.Part.SELF) for branch in decoder.branches)
        if attentions and enums.Mask.CAUSAL not in decoder.self_mask:
            return "its self-attention is not causal"
        if attentions and decoder.mixing is enums.Mixing.SUMMED:
            return "its self-attention sums the values of all tokens, those to come among them"
        if decoder.head_merge is enums.HeadMerge.RAW:
            return "its attention merges heads across positions"
        if attentions > 1:
            return "its blocks attend to themselves twice"
        return "it adds the memory position by position" if self.equal_lengths else None

    @property
    def unpackable(self) -> str | None:
        """The reason why a row cannot hold several pairs as if each were alone; None if it can."""
        encoder, decoder, masks = self.encoder, self.decoder, enums.Mask
        of_target = {masks.CAUSAL, masks.TARGET_PADDING}
        hides = {
            "encoder.self_mask": masks.SOURCE_PADDING in encoder.self_mask,
            "decoder.self_mask": not of_target.isdisjoint(decoder.self_mask),
            "decoder.cross_mask": masks.SOURCE_PADDING in decoder.cross_mask,
        }
        sees_padding = [name for name, hidden in hides.items() if not hidden]
        if self.input_layer is not None:
            return "its source is sound"
        if sees_padding:
            return f"its attention sees padding ({', '.join(sees_padding)})"
        for stack in (encoder, decoder):
            if stack.attention_span is not enums.AttentionSpan.FULL:
                return f"its attention is local ({stack.attention_span.value})"
            if stack.mixing is enums.Mixing.SUMMED:
                return "its attention sums the values of all tokens"
            if stack.head_merge is enums.HeadMerge.RAW:
                return "its attention merges heads across positions"
        if self.equal_lengths:
            return "it adds the memory position by position"
        if isinstance(self.mask_fill, float) and self.mask_fill > _HIDING:
            return f"a hidden key keeps some weight (mask_fill={self.mask_fill})"
        if self.attention_backend is enums.AttentionBackend.CUDNN:
            return "attention_backend='cudnn' is given lengths and no segments"
        return None

    @property
    def input_layer(self) -> str | None:
        """Name of the installed layer that reads the source; None for an embedding of tokens."""
        return None if self.mel_bins is None else "mel"

    @property
    def mel_shape(self) -> tuple[int, int] | None:
        """Channels and frames of a spectrogram; None if the source is text."""
        if self.mel_bins is None or self.mel_frames is None:
            return None
        return self.mel_bins, self.mel_frames

    def rows(self, stack: StackConfig) -> int:
        """Number of positions in that stack."""
        if self.mel_frames is None or stack != self.encoder:
            return self.max_length
        return self.mel_frames // 2

    def check_text(self, what: str) -> None:
        """Raise ConfigError if the source is sound, which ``what`` does not read."""
        if self.input_layer is not None:
            raise ConfigError(
                f"{what} reads text, and this model ({self.architecture}) reads sound: "
                "`jax-transformer transcribe` writes down what is said"
            )


def position_row(rule: enums.PositionIndex, position: int) -> int:
    """Return the row of the table that a position takes."""
    if rule is not enums.PositionIndex.TRUNCATED_COSINE:
        return position
    cosine = math.cos(2 * math.pi * 0.73 * position)
    # In float32 cos(73π) is -1, in float64 a little more
    return int(struct.unpack("f", struct.pack("f", cosine))[0])
