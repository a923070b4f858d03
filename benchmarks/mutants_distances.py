"""Faults of relative positions, which T5 and its kin have."""

from benchmarks.mutants_fault import Mutant, family

_RELATIVE, _STACKS = "jax_transformer/nn/embeddings.py", "jax_transformer/nn/stacks.py"
_SELF = "encoder.blocks.0.self_attention"
_DISTANCES = (
    "parity_tests/test_huggingface_forward.py"
    "::test_every_distance_up_to_100_000_has_the_same_bucket"
)

MUTANTS = [
    Mutant(
        "distance the wrong way round",
        _RELATIVE,
        "key_positions[None, None, :] - query_positions[None, :, None]",
        "query_positions[None, :, None] - key_positions[None, None, :]",
        family("t5"),
        _SELF,
        case="t5",
        met="relative positions: key minus query, or query minus key",
    ),
    Mutant(
        "distance 0 counted as after",
        _RELATIVE,
        "after = distances > 0",
        "after = distances >= 0",
        family("t5"),
        _SELF,
        case="t5",
        met="off-by-one of a bucket",
    ),
    Mutant(
        "one bucket more for single distances",
        _RELATIVE,
        "single = count // 2",
        "single = count // 2 + 1",
        family("t5"),
        _SELF,
        case="t5",
        met="off-by-one of a bucket",
    ),
    Mutant(
        "buckets of another base",
        _RELATIVE,
        "math.log(max_distance / single)",
        "math.log(max_distance)",
        family("t5"),
        _SELF,
        case="t5",
        met="a logarithm's denominator",
    ),
    Mutant(
        "edges of buckets in float64",
        _RELATIVE,
        "np.maximum(distances, 1).astype(np.float32) / np.float32(single)",
        "np.maximum(distances, 1) / single",
        (
            f"{_DISTANCES}[32-128-T5]",
            f"{_DISTANCES}[14-33-T5]",
            f"{_DISTANCES}[64-1000-T5]",
            f"{_DISTANCES}[32-100000-T5]",
        ),
        met="a rounding that decides a bucket",
    ),
    Mutant(
        "a decoder with buckets for both directions",
        _RELATIVE,
        "1 if Mask.CAUSAL in stack.self_mask else 2",
        "2",
        family("t5"),
        "decoder.blocks.0.self_attention",
        case="t5",
        met="bidirectional relative positions in a decoder",
    ),
    Mutant(
        "heads of the bias mixed up",
        _RELATIVE,
        "bias.transpose(0, 3, 1, 2)",
        "bias.transpose(0, 3, 1, 2)[:, ::-1]",
        family("t5"),
        _SELF,
        case="t5",
        met="head order permuted",
    ),
    Mutant(
        "bias left out",
        "jax_transformer/nn/attention.py",
        "scores = scores + bias.astype(scores.dtype)",
        "scores = scores + 0 * bias.astype(scores.dtype)",
        family("t5"),
        _SELF,
        case="t5",
        met="T5's shared table, applied in no layer",
    ),
    Mutant(
        "only the first block's bias",
        _STACKS,
        "block(x, context, dropout",
        "block(x, context if i == 0 else context._replace(self_bias=None), dropout",
        family("t5"),
        "encoder.blocks.1.self_attention",
        case="t5",
        met="T5 keeps the table in its first layer and uses it in all",
    ),
]
