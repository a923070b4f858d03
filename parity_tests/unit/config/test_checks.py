"""A configuration checks itself, with the numbers in the message."""

import functools
import itertools
import math

import pytest

import jax_transformer as jt
from jax_transformer.config import Branch, Mask, Part, Residual
from jax_transformer.errors import ConfigError

LESSON10 = jt.preset("lesson10")
CROSS_ONLY, NO_CROSS = (Branch((Part.CROSS,)),), (Branch((Part.SELF,)),)


def stack(name: str, **changes) -> dict:
    """Changes of lesson10's encoder or decoder."""
    return {f"{name}.{field}": value for field, value in changes.items()}


encoder, decoder = functools.partial(stack, "encoder"), functools.partial(stack, "decoder")


LOCAL, NO_FEED_FORWARD = "attention_span='local'", "its blocks have no feed-forward"
CROSS = "cross_attention belongs in every decoder block and in no encoder block"
PARTS = "every block needs a branch, and every branch a part"
KNOWN = "has no meaning there (it knows"
PAD = LESSON10.target_pad_id
FFN, LOST = Branch((Part.FFN,)), Branch((Part.CROSS,), dropout=1.5)
# Message: changes of lesson10
INVALID = {
    f"decoder.{LOCAL} sees later tokens and belongs in the encoder": decoder(
        attention_span="local"
    ),
    "encoder.attention_span='transient_global' needs positions='relative'": encoder(
        attention_span="transient_global"
    ),
    f"encoder.{LOCAL} has no positions='relative_per_block';"
    f" encoder.{LOCAL} has no mixing='summed' with head_merge='concatenated'": encoder(
        attention_span="local", positions="relative_per_block", mixing="summed"
    ),
    f"encoder.{LOCAL} has no mask_fill='minus_1e20'": encoder(attention_span="local")
    | dict(mask_fill="minus_1e20"),
    f"encoder.{LOCAL} has no mask 'query_padding'": encoder(
        attention_span="local", self_mask=["query_padding"]
    ),
    "encoder.self_mask: padding is NaN by mask_fill='minus_infinity'": encoder(
        self_mask=["query_padding"]
    )
    | dict(mask_fill="minus_infinity"),
    "decoder.cross_mask: 'query_padding' hides all from the start, which is padding:"
    f" bos_id=target_pad_id={PAD}": decoder(cross_mask=["query_padding"]) | dict(bos_id=PAD),
    "mask_fill=1.0 must be below 0, above -3e+38": dict(mask_fill=1.0),
    "d_model=500 is not divisible by num_heads=8": dict(d_model=500),
    "d_model=513 is odd; sinusoidal positions come in pairs": dict(d_model=513, num_heads=27),
    "tying='all' needs one vocabulary: source_vocab_size=7, target_vocab_size=10000": dict(
        tying="all", source_vocab_size=7
    ),
    "tying='embeddings' needs one vocabulary: source_vocab_size=10000, target_vocab_size=7": dict(
        tying="embeddings", target_vocab_size=7
    ),
    "compute_dtype='fp16' is not one of bfloat16, float16, float32, float64": dict(
        compute_dtype="fp16"
    ),
    "decoder.branches[1].dropout=1.5 must be at least 0 and below 1": decoder(
        branches=(*NO_CROSS, LOST)
    ),
    **{
        f"max_length=1 must be at least 2: {name}.position_index='truncated_cosine' reads row 1": (
            stack(name, position_index="truncated_cosine") | dict(max_length=1)
        )
        for name in ("encoder", "decoder")
    },
    "encoder.unused: an unused branch has one part": encoder(
        unused=(Branch((Part.SELF, Part.FFN)),)
    ),
    "decoder.unused: an unused branch has one part": decoder(unused=(FFN, Branch(()))),
    f"encoder.positions_at='feed_forward': {NO_FEED_FORWARD}": encoder(
        positions_at="feed_forward", branches=NO_CROSS
    ),
    f"decoder.positions_at='feed_forward': {NO_FEED_FORWARD}": decoder(
        positions_at="feed_forward", branches=CROSS_ONLY, unused=(FFN,)
    ),
    "d_model=512 is not divisible by decoder.num_heads=7": decoder(num_heads=7),
    "encoder.relative_buckets=7 must be a multiple of 2, at least 4": encoder(
        positions="relative", relative_buckets=7
    ),
    "decoder.relative_buckets=1 must be a multiple of 1, at least 2": decoder(
        positions="relative", relative_buckets=1
    ),
    "decoder.relative_max_distance=16 must be over the 16 distances that have a bucket "
    "of their own": decoder(positions="relative_per_block", relative_max_distance=16),
    "encoder.positions='relative': its blocks have no self-attention": encoder(
        positions="relative", branches=(FFN,)
    ),
    "d_model=2 must be at least 4: the first and the last of tensor2tensor's wavelengths differ": (
        encoder(sinusoids="tensor2tensor") | dict(d_model=2, num_heads=1)
    ),
    "target_pad_id and eos_id are both 1": dict(eos_id=1),
    "mel_frames=0 must be even and at least 2: two frames make one position": dict(
        mel_bins=20, mel_frames=0
    ),
    f"encoder.branches: {PARTS}": encoder(branches=()),
    f"decoder.branches: {PARTS}": decoder(branches=(*CROSS_ONLY, Branch(()))),
    f"encoder.branches: {CROSS}": encoder(branches=CROSS_ONLY),
    f"decoder.branches: {CROSS}": decoder(branches=NO_CROSS),
    "encoder.branches: the residual 'memory' is the encoder's output and belongs in the decoder": (
        encoder(branches=(Branch((Part.FFN,), Residual.MEMORY),))
    ),
    f"encoder.self_mask: 'causal' {KNOWN} query_padding, source_padding)": encoder(
        self_mask=["causal"]
    ),
    **{
        f"encoder.cross_mask: '{mask.value}' {KNOWN} none)": encoder(cross_mask=[mask.value])
        for mask in Mask
    },
    f"decoder.self_mask: 'source_padding' {KNOWN} causal, query_padding, target_padding)": decoder(
        self_mask=["source_padding"]
    ),
    f"decoder.cross_mask: 'causal' {KNOWN} query_padding, source_padding)": decoder(
        cross_mask=["causal"]
    ),
}


# Whose decoder masks padding
SOUND = ("target_pad_id and eos_id are both 1", dict(eos_id=1, mel_bins=20, mel_frames=8))
CHECKS = [*INVALID.items(), SOUND]


@pytest.mark.parametrize(
    ("message", "changes"), CHECKS, ids=[message[:40] for message, _ in CHECKS]
)
def test_every_check_names_the_numbers(message, changes):
    with pytest.raises(ConfigError) as error:
        LESSON10.with_sizes(**changes)
    assert str(error.value) == message


STACKS = ("encoder", "decoder")
RATES = ["dropout", "attention_dropout", "activation_dropout", "embedding_dropout"]
SIZES = "source_vocab_size target_vocab_size d_model num_heads d_ff max_length head_dim".split()
OF_STACKS = "layers num_heads d_ff local_radius global_block_size".split()
COUNTS = [*SIZES, "embedding_dropouts", "mel_bins"]
COUNTS += [f"{name}.{field}" for name in STACKS for field in OF_STACKS]
VOCABULARIES = dict(source_vocab_size=50, target_vocab_size=60)
LEAST = math.nextafter(0, 1)
# Fields, what follows their value in the message, values that they refuse, values at their limits
LIMITS = [
    (COUNTS, "must be at least 1", (0, -3), (1,)),
    ([f"{name}.layers" for name in STACKS], "must be at most 1,000", (1001,), (1000,)),
    ([f"{name}.position_offset" for name in STACKS], "must be at least 0", (-1,), (0,)),
    (
        [*RATES, *(f"{name}.attention_dropout" for name in STACKS)],
        "must be at least 0 and below 1",
        (1.0, 2.0, -LEAST, math.nan),
        (0.0, math.nextafter(1, 0)),
    ),
    (["norm_epsilon"], "must be above 0", (0.0, -1.0, math.nan), (LEAST,)),
    (
        [f"{name}.position_exponent" for name in STACKS],
        "must be above 0 and finite",
        (0.0, -1.0, math.nan, math.inf),
        (LEAST, 1e308),
    ),
    (["source_pad_id"], "is outside the vocabulary of 50", (-1, 50), (0, 49)),
    (["target_pad_id", "bos_id", "eos_id"], "is outside the vocabulary of 60", (-1, 60), (0, 59)),
]


@pytest.mark.parametrize(("names", "end", "outside", "inside"), LIMITS)
def test_every_number_is_refused_beyond_its_limits_and_not_at_them(names, end, outside, inside):
    for name, value in itertools.product(names, (*outside, *inside)):
        message = ""
        try:
            LESSON10.with_sizes(**(VOCABULARIES if name.endswith("_id") else {}), **{name: value})
        except ConfigError as error:
            message = str(error)
        assert (message == f"{name}={value} {end}") == (value not in inside), (message, value)


def test_valid_sizes_pass_the_checks():
    assert jt.preset("lesson10", d_model=500, head_dim=7).head_width == 7
    none = {"encoder.positions": "none", "decoder.positions": "learned"}
    assert jt.preset("lesson10", d_model=27, num_heads=9, **none).head_width == 3
    LESSON10.with_sizes(**encoder(self_mask=["query_padding"]), bos_id=PAD)  # it has no start
