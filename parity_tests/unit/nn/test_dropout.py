"""Dropout masks: the hash passes the tests of a random generator, and each site draws its own."""

import itertools
import math
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_transformer.config import DropoutMasks, DropoutSite, NormPlacement
from jax_transformer.nn.attention import attend
from jax_transformer.nn.dropout import Dropout, KeyedDropout, MaskedDropout, from_rngs, hash_bits
from parity_tests.unit.helpers import batch, furthest, random_model, tiny

KEY = jax.random.key(7)
SHAPE = (6, 40, 500)


def site(name: str = "", key=KEY, masks: DropoutMasks = DropoutMasks.HASH) -> KeyedDropout:
    return KeyedDropout(key, masks).scope(name)


def keep(name: str = "", key=KEY, rate: float = 0.5, shape=SHAPE) -> np.ndarray:
    return np.asarray(site(name, key).keep(shape, rate))


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Return the correlation of two masks, in standard deviations of independent ones."""
    return float(np.corrcoef(a.ravel(), b.ravel())[0, 1] * math.sqrt(a.size))


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("shape", [(100_000,), (311, 257), SHAPE])
def test_the_drop_rate_is_as_configured(rate, shape):
    keep_mask = keep(rate=rate, shape=shape)
    assert keep_mask.shape == shape and keep_mask.dtype == np.bool_
    sigma = math.sqrt(rate * (1 - rate) / keep_mask.size)
    assert abs(keep_mask.mean() - (1 - rate)) < 4 * sigma


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_neighbours_are_independent(rate):
    keep_mask = keep(rate=rate)
    for axis, distance in itertools.product(range(keep_mask.ndim), (1, 2, 3)):
        moved = np.moveaxis(keep_mask, axis, 0)
        assert abs(correlation(moved[distance:], moved[:-distance])) < 5, (axis, distance)


def pairwise(masks: list[np.ndarray]) -> float:
    return max(abs(correlation(a, b)) for a, b in itertools.combinations(masks, 2))


def test_sites_steps_and_seeds_are_independent():
    small = (40, 500)
    names = itertools.product(("encoder", "decoder"), range(6))
    sites = [keep(f"{stack}.blocks.{i}.output", shape=small) for stack, i in names]
    steps = [keep("x", jax.random.fold_in(KEY, n), shape=small) for n in range(12)]
    seeds = [keep("x", jax.random.key(n), shape=small) for n in range(12)]
    assert pairwise(sites) < 5 and pairwise(steps) < 5 and pairwise(seeds) < 5


def test_all_bits_are_balanced_and_independent():
    def bits_of(numbers: np.ndarray) -> np.ndarray:
        return np.stack([((numbers >> bit) & 1).astype(bool) for bit in range(32)])

    first, second = (np.asarray(hash_bits(key, SHAPE)) for key in (KEY, jax.random.fold_in(KEY, 1)))
    bits, flipped = bits_of(first), bits_of(first ^ second)
    assert pairwise([bit[..., :100] for bit in bits]) < 5
    sigma = 0.5 / math.sqrt(bits[0].size)
    for each in (bits, flipped):
        assert np.abs(each.mean(axis=(1, 2, 3)) - 0.5).max() < 4 * sigma


def test_the_statistics_detect_a_weak_hash():
    """The tests above must reject the first multiplication without the mixing."""
    index = np.arange(np.prod(SHAPE), dtype=np.uint32).reshape(SHAPE) * np.uint32(0x9E3779B1)
    keep_mask = index >= np.uint32(0.3 * 2**32)
    assert abs(correlation(keep_mask[..., 1:], keep_mask[..., :-1])) > 5
    shifted = (index + np.uint32(12345)) >= np.uint32(0.3 * 2**32)
    assert abs(correlation(keep_mask, shifted)) > 5


def test_a_mask_depends_only_on_key_and_path():
    assert (keep("a.b") == keep("a.b")).all()
    assert (np.asarray(site("a").scope("b").keep(SHAPE, 0.5)) == keep("a.b")).all()
    traced = jax.jit(lambda key: site("a.b", key).keep(SHAPE, 0.5))(KEY)
    assert np.array_equal(traced, keep("a.b"))
    for other in (keep("a.c"), keep("b"), keep("a.b", jax.random.fold_in(KEY, 1))):
        assert (other != keep("a.b")).mean() > 0.4


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_values_are_zeroed_or_scaled(dtype):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(50, 60)) + 9, dtype)
    for rate in (0.25, 0.5):  # 1 / (1 - rate) is the same in every dtype up to rounding
        dropped, keep_mask = site("s")(x, rate), site("s").keep(x.shape, rate)
        assert dropped.dtype == x.dtype
        expected = np.where(np.asarray(keep_mask), np.asarray(x, np.float64) / (1 - rate), 0.0)
        assert furthest(dropped, expected) <= float(jnp.finfo(dtype).eps) * np.abs(expected).max()
        assert ((np.asarray(dropped) == 0) == ~np.asarray(keep_mask)).all()
        assert 0 < np.asarray(keep_mask).sum() < x.size


def test_rates_at_the_ends_of_the_range():
    x = jnp.ones((3, 4))
    assert site()(x, 0.0) is x
    for masks in DropoutMasks:
        assert site(masks=masks).keep((1000,), 2.0**-40).all()
        assert not site(masks=masks).keep((1000,), 1 - 2.0**-40).any()


def test_no_dropout_is_the_identity():
    x = jnp.ones((3, 4))
    assert Dropout().scope("a").scope("b")(x, 0.9) is x
    assert type(from_rngs(None, DropoutMasks.HASH)) is Dropout


def test_randomness_may_be_a_stream_a_key_or_a_source_of_masks():
    masks = DropoutMasks.HASH
    stream, key = nnx.Rngs(dropout=3), nnx.Rngs(dropout=3).dropout()
    drawn = [from_rngs(each, masks).keep((999,), 0.5) for each in (stream, key)]
    assert np.array_equal(*drawn)
    own = KeyedDropout(KEY, masks)
    assert from_rngs(own, masks) is own


def test_threefry_is_jax_random_bernoulli():
    for name, rate in (("encoder.embedding", 0.1), ("x", 0.5)):
        key = jax.random.fold_in(KEY, zlib.crc32(name.encode()))
        drawn = site(name, masks=DropoutMasks.THREEFRY).keep((40, 50), rate)
        assert np.array_equal(drawn, jax.random.bernoulli(key, 1 - rate, (40, 50)))


def test_both_words_of_a_key_matter():
    """Second words that differ in their last bits give masks that are reversals."""
    pairs = ((5, 0x3C6EF372), (5, 0xDAA66D2B), (6, 0x3C6EF372))
    keys = [jax.random.wrap_key_data(jnp.asarray(words, jnp.uint32)) for words in pairs]
    assert pairwise([np.asarray(hash_bits(key, (40, 500))) >> 31 for key in keys]) < 5


def test_row_variance_is_that_of_independent_draws():
    """A sequence that is spread too evenly has the right rate and too little variance."""
    bits = np.asarray(hash_bits(KEY, (1_000_000,)))
    for width in (8, 20, 100, 500, 512):
        drawn = bits[: bits.size // width * width].reshape(-1, width)
        rows = (drawn >= np.uint32(0.3 * 2**32)).sum(axis=1)
        assert abs(rows.var() / (0.21 * width) - 1) < 5 * math.sqrt(2 / len(rows)), width
        moved = bits[width:] ^ bits[:-width]
        furthest_off = max(abs(((moved >> bit) & 1).mean() - 0.5) for bit in range(32))
        assert furthest_off < 5 * 0.5 / math.sqrt(moved.size), width


class Halved(MaskedDropout):
    """Keep every other element, whatever the rate."""

    def keep(self, shape, rate):
        return (jnp.arange(math.prod(shape)) % 2 == 0).reshape(shape)


def halved(x) -> np.ndarray:
    """Apply that mask by hand, at a rate of one half."""
    return 2 * np.asarray(x) * (np.arange(x.size) % 2 == 0).reshape(x.shape)


def random(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape))


def test_attention_drops_its_weights_and_reports_them_so():
    q = random(3, 7, 2, 4)
    k, v, mask = q + 1, q - 1, np.tril(np.ones((7, 7), bool))
    seen = jnp.asarray(mask)[None, None]
    mixed, weights = attend(q, k, v, seen, scale=0.3, rate=0.5, dropout=Halved())
    scores = np.where(mask, np.exp(0.3 * np.einsum("bqhe,bkhe->bhqk", q, k)), 0.0)
    expected = halved(scores / scores.sum(axis=-1, keepdims=True))
    assert furthest(weights, expected) < 1e-14
    assert furthest(mixed, np.einsum("bhqk,bkhe->bqhe", expected, v)) < 1e-14


def test_the_feed_forward_drops_after_its_activation():
    """The activation is not ReLU, which commutes with dropout."""
    config = tiny(num_layers=1, activation_dropout=0.5, **{"encoder.activation": "gelu"})
    layer = random_model(config).encoder.blocks[0].feed_forward
    x = random(3, 5, 12)
    expected = layer.down(jnp.asarray(halved(jax.nn.gelu(layer.up(x), approximate=False))))
    assert furthest(layer(x, jnp.arange(5)[None], Halved()), expected) < 1e-14


def test_dropout_and_norm_of_a_branch_sit_where_configured():
    x = random(3, 5, 12)
    for placement, site_name in itertools.product(NormPlacement, DropoutSite):
        where = dict(norm_placement=placement.value, dropout_site=site_name.value)
        model = random_model(tiny(num_layers=1, dropout=0.5, **where))
        branch = model.encoder.blocks[0].residuals[0]
        norm, got = branch.norm, branch(x, lambda y: y * y, None, Halved())
        inner = norm(x) if placement is NormPlacement.PRE else x
        squared = np.asarray(inner * inner)
        squared = halved(squared) if site_name is DropoutSite.BEFORE_ADD else squared
        expected = jnp.asarray(np.asarray(x) + squared)
        expected = norm(expected) if placement is NormPlacement.POST else expected
        expected = halved(expected) if site_name is DropoutSite.AFTER_NORM else expected
        assert furthest(got, expected) < 1e-14, where


class Recorded(MaskedDropout):
    """Drop nothing and record each site with its rate."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def keep(self, shape, rate):
        self.asked.append((self.path, tuple(shape), rate))
        return jnp.ones(shape, bool)


def test_every_site_of_the_model_has_its_own_path_shape_and_rate():
    rates = dict(dropout=0.1, attention_dropout=0.2, activation_dropout=0.3, embedding_dropout=0.4)
    config = tiny("small", embedding_dropouts=2, final_dropout=True, **rates)
    source, target = batch(config)
    recorded = Recorded()
    jax.eval_shape(lambda: random_model(config)(source, target, rngs=recorded))
    expected, lengths = [], {"encoder": 7, "decoder": 5}
    for stack, n in lengths.items():
        expected += [(f"{stack}.embedding{more}", (3, n, 12), 0.4) for more in ("", ".1")]
        attentions = [("self_attention", n), ("cross_attention", 7)][: 1 + (stack == "decoder")]
        for block in range(2):
            where = f"{stack}.blocks.{block}.branches"
            for k, (name, keys) in enumerate(attentions):
                expected.append((f"{where}.{k}.{name}.weights", (3, 3, n, keys), 0.2))
                expected.append((f"{where}.{k}.output", (3, n, 12), 0.1))
            last = len(attentions)
            expected.append((f"{where}.{last}.feed_forward.activation", (3, n, 20), 0.3))
            expected.append((f"{where}.{last}.output", (3, n, 12), 0.1))
        expected.append((f"{stack}.final", (3, n, 12), 0.1))
    assert recorded.asked == expected
