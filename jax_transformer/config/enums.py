"""The words of a configuration: an enum for everything that published architectures do differently, each member with who does it so."""

import enum


class Part(enum.StrEnum):
    """What a branch computes."""

    SELF = "self_attention"
    CROSS = "cross_attention"
    FFN = "feed_forward"


class Residual(enum.StrEnum):
    """What a branch's output is added to."""

    INPUT = "input"
    MEMORY = "memory"  # the encoder's output, position by position, instead of the query (the 2023-06-05 post)


class Mask(enum.StrEnum):
    """A rule that says which keys a query may see; several are joined by *and*."""

    SOURCE_PADDING = "source_padding"
    TARGET_PADDING = "target_padding"
    CAUSAL = "causal"


class NormPlacement(enum.StrEnum):
    """Where the norm of a branch stands: Vaswani et al. 2017 (post), Xiong et al. 2020 (pre)."""

    POST = "post"
    PRE = "pre"


class Norm(enum.StrEnum):
    """What a norm computes."""

    LAYER = "layer"  # mean 0, variance 1, a scale and a bias: Ba et al. 2016
    RMS = "rms"  # root mean square 1 and a scale, the mean left alone: Zhang and Sennrich 2019; T5


class DropoutSite(enum.StrEnum):
    """Where a branch's dropout stands: on its output before the sum (Vaswani et al. 2017), or on what leaves the block's norm."""

    BEFORE_ADD = "before_add"
    AFTER_NORM = "after_norm"


class Mixing(enum.StrEnum):
    """What attention makes of its weights and the values."""

    WEIGHTED = "weighted"  # the values' sum by the weights: Vaswani et al. 2017
    SUMMED = "summed"  # the weights' own sum times the plain sum of all values (the 2023-06-05 post, whose einsum names two different axes)


class HeadMerge(enum.StrEnum):
    """How the heads' mixed values become one vector a position."""

    CONCATENATED = "concatenated"  # side by side: Vaswani et al. 2017
    RAW = "raw"  # (h, q, e) read as (q, h·e) without transposing back: mixes positions and heads ("Transformers from scratch part 2")


class MaskFill(enum.StrEnum):
    """What a masked score becomes. It shows in the rows alone that may see no key at all."""

    EXCLUDED = "excluded"  # a weight of exactly 0, so such a row gives 0: torch's scaled_dot_product_attention
    MINUS_INFINITY = "minus_infinity"  # such a row is NaN (the 2023-06-05 post)
    MINUS_1E20 = "minus_1e20"  # before the scale, so such a row is the mean of all values ("Transformer Deep Dive", "Transformer from scratch")


class Activation(enum.StrEnum):
    """The feed-forward's nonlinearity."""

    RELU = "relu"
    GELU = "gelu"  # exact, by erf: what torch.nn.functional.gelu computes by default
    GELU_TANH = (
        "gelu_tanh"  # Hendrycks and Gimpel's approximation: what jax.nn.gelu computes by default
    )
    SILU = "silu"  # x · sigmoid(x), Swish with β = 1: Marian


class ScoreScale(enum.StrEnum):
    """What the attention scores are divided by."""

    HEAD_DIM = "head_dim"  # sqrt(width of a head): Vaswani et al. 2017
    D_MODEL = "d_model"  # sqrt(d_model)
    NONE = "none"  # T5


class Positions(enum.StrEnum):
    """How a stack knows the order of its input."""

    SINUSOIDAL = "sinusoidal"  # sin and cos interleaved, Vaswani et al. 2017; computed in float64, then rounded
    SINUSOIDAL_STORED = "sinusoidal_stored"  # the same as a table that belongs to the checkpoint: loaded, used and given back as it is, never trained
    LEARNED = "learned"
    RELATIVE = "relative"  # nothing is added: self-attention's scores get a bias by distance, one table for all blocks of a stack (T5)
    RELATIVE_PER_BLOCK = "relative_per_block"  # the same with a table in every block (UMT5)
    NONE = "none"


class Sinusoids(enum.StrEnum):
    """Where the sines and cosines of a position stand in its row, and their wavelengths."""

    INTERLEAVED = "interleaved"  # sin, cos, sin, cos: Vaswani et al. 2017
    HALVES = "halves"  # the same numbers, all sines before all cosines: Marian, Pegasus
    TENSOR2TENSOR = "tensor2tensor"  # in halves, wavelengths from 2π to exactly 10000 · 2π: tensor2tensor, fairseq, M2M100


class PositionsAt(enum.StrEnum):
    """What positions are added to."""

    EMBEDDING = "embedding"
    FEED_FORWARD = "feed_forward"  # the feed-forward's input, at each of its calls ("Transformers from scratch part 2")


class PositionIndex(enum.StrEnum):
    """Which row of the table a position takes."""

    ORDER = "order"
    TRUNCATED_COSINE = "truncated_cosine"  # int(cos(2π · 0.73 · position)): 1, 0, 0, …, and -1, which no table has, at 50 ("Transformer Deep Dive")
    NOT_PADDING = "not_padding"  # the count of tokens before it that are not padding; padding itself gets no row (fairseq, M2M100)


class EmbeddingScale(enum.StrEnum):
    """What token embeddings are multiplied by."""

    NONE = "none"
    SQRT_D_MODEL = "sqrt_d_model"  # Vaswani et al. 2017, section 3.4


class LogitScale(enum.StrEnum):
    """What the decoder's output is multiplied by before the output layer."""

    NONE = "none"
    INVERSE_SQRT_D_MODEL = (
        "inverse_sqrt_d_model"  # where the layer is tied to embeddings: T5 version 1
    )


class Tying(enum.StrEnum):
    """Which of source embedding, target embedding and output layer are one matrix (Press and Wolf 2017)."""

    NONE = "none"
    OUTPUT = "output"  # the target embedding is also the output layer
    EMBEDDINGS = "embeddings"  # source and target embedding are one, the output layer is another (T5 version 1.1)
    ALL = "all"  # all three; both sides share one vocabulary


class Init(enum.StrEnum):
    """The distributions that new parameters are drawn from."""

    TORCH = "torch"  # torch.nn.Linear (uniform, 1/sqrt(fan_in), biases too) and torch.nn.Embedding (normal, 1)
    TORCH_TRANSFORMER = "torch_transformer"  # TORCH, but matrices of the stacks Xavier-uniform, query, key and value as one (3d, d) matrix
    XAVIER = "xavier"  # Xavier-uniform matrices (query, key and value as one), zero biases, embeddings normal with deviation d_model^-0.5


class Layout(enum.StrEnum):
    """The page of convert/tables that names this model's PyTorch weights."""

    TORCH_NN = "torch_nn"  # torch.nn.Transformer with embeddings around it
    LESSON10 = "lesson10"  # the same names; the twin is the document's
    DEEP_DIVE = "deep_dive"
    FROM_SCRATCH = "from_scratch"
    PART2_ENCODER = "part2_encoder"  # its encoder, with lesson10's names around it
    BLOG2023 = "blog2023"
    # The families of Hugging Face transformers, by their model_type
    BART = "bart"
    MBART = "mbart"
    MARIAN = "marian"
    M2M_100 = "m2m_100"
    PEGASUS = "pegasus"
    T5 = "t5"
    MT5 = "mt5"
    UMT5 = "umt5"


class DropoutMasks(enum.StrEnum):
    """The generator of dropout masks."""

    HASH = "hash"  # an integer hash of position and key: several times cheaper on CPU
    THREEFRY = "threefry"  # jax.random.bernoulli
