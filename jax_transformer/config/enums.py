"""Enums for everything that published architectures do differently.

The comment of a member names who does it so.
"""

import enum


class Part(enum.StrEnum):
    """A module of a block that a branch computes."""

    SELF = "self_attention"
    CROSS = "cross_attention"
    FFN = "feed_forward"


class Residual(enum.StrEnum):
    """The input of the sum with a branch's output."""

    INPUT = "input"
    # the encoder's output, position by position, instead of the query (the 2023-06-05 post)
    MEMORY = "memory"


class Mask(enum.StrEnum):
    """A rule that says which keys a query may see; several are joined by *and*."""

    SOURCE_PADDING = "source_padding"
    TARGET_PADDING = "target_padding"
    CAUSAL = "causal"
    # padding is no query: it sees no key, and what it gets means nothing (hyunwoongko/transformer)
    QUERY_PADDING = "query_padding"


class NormPlacement(enum.StrEnum):
    """The norm before or after a branch: Vaswani et al. 2017 (post), Xiong et al. 2020 (pre)."""

    POST = "post"
    PRE = "pre"


class Norm(enum.StrEnum):
    """The kind of normalisation."""

    LAYER = "layer"  # mean 0, variance 1, a scale and a bias: Ba et al. 2016
    # (x - mean) / (deviation + epsilon), the unbiased one: The Annotated Transformer (harvardnlp)
    LAYER_UNBIASED = "layer_unbiased"
    RMS = "rms"  # root mean square 1 and a scale, the mean left alone: Zhang and Sennrich 2019; T5


class DropoutSite(enum.StrEnum):
    """The input of a branch's dropout.

    Its output before the sum (Vaswani et al. 2017), or the output of the norm after the sum.
    """

    BEFORE_ADD = "before_add"
    AFTER_NORM = "after_norm"


class Mixing(enum.StrEnum):
    """The combination of attention weights and values."""

    WEIGHTED = "weighted"  # the values' sum by the weights: Vaswani et al. 2017
    # the weights' own sum times the plain sum of all values (the 2023-06-05 post, whose einsum
    # names two different axes)
    SUMMED = "summed"


class HeadMerge(enum.StrEnum):
    """The merge of the heads' outputs into one vector per position."""

    CONCATENATED = "concatenated"  # side by side: Vaswani et al. 2017
    # (h, q, e) read as (q, h·e) without transposing back: mixes positions and heads ("Transformers
    # from scratch part 2")
    RAW = "raw"


class MaskFill(enum.StrEnum):
    """The value of a masked score. It matters only in rows that may see no key at all.

    A number such as -10000 is the scaled score itself: such a row is the mean of all values.
    """

    # a weight of exactly 0, so such a row gives 0: torch's scaled_dot_product_attention
    EXCLUDED = "excluded"
    MINUS_INFINITY = "minus_infinity"  # such a row is NaN (the 2023-06-05 post)
    # before the scale, so such a row is the mean of all values ("Transformer Deep Dive",
    # "Transformer from scratch")
    MINUS_1E20 = "minus_1e20"


class Activation(enum.StrEnum):
    """The feed-forward's nonlinearity."""

    RELU = "relu"
    GELU = "gelu"  # exact, by erf: what torch.nn.functional.gelu computes by default
    # Hendrycks and Gimpel's approximation: what jax.nn.gelu computes by default
    GELU_TANH = "gelu_tanh"
    SILU = "silu"  # x · sigmoid(x), Swish with β = 1: Marian


class ScoreScale(enum.StrEnum):
    """The divisor of the attention scores."""

    HEAD_DIM = "head_dim"  # sqrt(width of a head): Vaswani et al. 2017
    D_MODEL = "d_model"  # sqrt(d_model)
    NONE = "none"  # T5


class Positions(enum.StrEnum):
    """The encoding of positions in a stack."""

    # sines and cosines, Vaswani et al. 2017; computed in float64, then rounded
    SINUSOIDAL = "sinusoidal"
    # the same as a table of the checkpoint: loaded, used and written back unchanged, never trained
    SINUSOIDAL_STORED = "sinusoidal_stored"
    LEARNED = "learned"
    # nothing is added to the input: self-attention's scores get a bias by distance, with one table
    # for all blocks of a stack (T5)
    RELATIVE = "relative"
    RELATIVE_PER_BLOCK = "relative_per_block"  # the same with a table in every block (UMT5)
    NONE = "none"


class Sinusoids(enum.StrEnum):
    """The order of the sines and cosines in a row, and their wavelengths."""

    INTERLEAVED = "interleaved"  # sin, cos, sin, cos: Vaswani et al. 2017
    HALVES = "halves"  # the same numbers, all sines before all cosines: Marian, Pegasus
    # in halves, wavelengths from 2π to exactly 10000 · 2π: tensor2tensor, fairseq, M2M100
    TENSOR2TENSOR = "tensor2tensor"


class PositionsAt(enum.StrEnum):
    """The input that positions are added to."""

    EMBEDDING = "embedding"
    # the feed-forward's input, at each of its calls ("Transformers from scratch part 2")
    FEED_FORWARD = "feed_forward"


class EmbeddingNormOf(enum.StrEnum):
    """The input of the norm that stands with a stack's embeddings."""

    SUM = "sum"  # token embeddings and positions: BART
    # token embeddings without their factor; positions are added after it: BlenderbotSmall
    TOKENS = "tokens"


class PositionIndex(enum.StrEnum):
    """The row of the table that a position takes."""

    ORDER = "order"
    # int(cos(2π · 0.73 · position)): 1, 0, 0, …, and at 50 -1, which no table has ("Transformer
    # Deep Dive")
    TRUNCATED_COSINE = "truncated_cosine"
    # the number of tokens before it that are not padding; padding gets no row (fairseq, M2M100)
    NOT_PADDING = "not_padding"


class EmbeddingScale(enum.StrEnum):
    """The factor of token embeddings."""

    NONE = "none"
    SQRT_D_MODEL = "sqrt_d_model"  # Vaswani et al. 2017, section 3.4


class LogitScale(enum.StrEnum):
    """The factor of the decoder's output before the output layer."""

    NONE = "none"
    # if the layer is tied to embeddings: T5 version 1
    INVERSE_SQRT_D_MODEL = "inverse_sqrt_d_model"


class Tying(enum.StrEnum):
    """The matrices that embeddings and output layer share: Press and Wolf 2017."""

    one_embedding: bool
    """True if source and target embedding are one matrix."""
    tied_output: bool
    """True if the output layer is the target embedding."""

    def __new__(cls, value: str, one_embedding: bool, tied_output: bool) -> "Tying":
        member = str.__new__(cls, value)
        member._value_ = value
        member.one_embedding, member.tied_output = one_embedding, tied_output
        return member

    NONE = "none", False, False
    OUTPUT = "output", False, True  # the target embedding is also the output layer
    # source and target embedding are one, the output layer is another (T5 version 1.1)
    EMBEDDINGS = "embeddings", True, False
    ALL = "all", True, True  # all three; both sides share one vocabulary


TYINGS = {(tying.one_embedding, tying.tied_output): tying for tying in Tying}
"""The tying of both embeddings, and of the output layer with the target's."""


class Init(enum.StrEnum):
    """The distributions that new parameters are drawn from."""

    # torch.nn.Linear (uniform, 1/sqrt(fan_in), biases too) and torch.nn.Embedding (normal, 1)
    TORCH = "torch"
    # TORCH, but matrices of the stacks Xavier-uniform, query, key and value as one (3d, d) matrix
    TORCH_TRANSFORMER = "torch_transformer"
    # Xavier-uniform matrices (query, key and value as one), zero biases, embeddings normal with
    # deviation d_model^-0.5
    XAVIER = "xavier"


class DropoutMasks(enum.StrEnum):
    """The generator of dropout masks."""

    HASH = "hash"  # an integer hash of position and key: several times cheaper on CPU
    THREEFRY = "threefry"  # jax.random.bernoulli


class AttentionSpan(enum.StrEnum):
    """The keys of self-attention."""

    FULL = "full"  # every token: Vaswani et al. 2017
    # tokens up to ``local_radius`` away: Guo et al. 2022, section 3.1 (LongT5)
    LOCAL = "local"
    # these, and the normed sums of ``global_block_size`` tokens each: section 3.2
    TRANSIENT_GLOBAL = "transient_global"


class AttentionBackend(enum.StrEnum):
    """The implementation of attention over whole sequences.

    Steps of cached decoding, whose queries are few, and calls that return the weights have one.
    """

    XLA = "xla"  # written out in nn/attention.py: exact, for every architecture
    SDPA = "sdpa"  # jax.nn.dot_product_attention, in float32 or 16 bits, where it is the same
    CUDNN = "cudnn"  # the same by cuDNN's flash attention, in 16 bits on an NVIDIA GPU
    TOKAMAX = "tokamax"  # by tokamax's flash attention on such a GPU, with segments and biases


class MatmulPrecision(enum.StrEnum):
    """The precision of products with weights, as ``torch.set_float32_matmul_precision``."""

    HIGHEST = "highest"  # that of the factors
    MEDIUM = "medium"  # factors rounded to bfloat16, sums in float32


class Remat(enum.StrEnum):
    """The values inside a block that the backward pass computes again, to save memory.

    Chen et al. 2016, https://arxiv.org/abs/1604.06174.
    """

    NONE = "none"  # all are stored
    MINIMAL = "minimal"  # all but the products with weights, as remat_policy of T5X and MaxText
    FULL = "full"  # all are computed again from the block's input
