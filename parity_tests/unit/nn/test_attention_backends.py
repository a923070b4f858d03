"""The attention backends are held to the one that is written out, in float32 and bfloat16."""

import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_transformer as jt
from jax_transformer import transformer
from jax_transformer.config import AttentionBackend, TransformerConfig
from jax_transformer.data.batches import Batch
from jax_transformer.errors import ConfigError
from jax_transformer.nn import fused_attention
from jax_transformer.nn.attention import attend
from jax_transformer.nn.fused_attention import check_kernel, cudnn_attend, fused_attend, with_kernel
from jax_transformer.training import devices, step
from parity_tests.marks import quick_if
from parity_tests.unit.helpers import batch, furthest, random_arrays, random_model, tiny


@pytest.fixture(autouse=True)
def _standard_promotion():
    """For 16 bits ``jax.nn.dot_product_attention`` needs it, its gradient too."""
    with jax.numpy_dtype_promotion("standard"):
        yield


SDPA = dict(attention_backend="sdpa")
BOUNDS = {"float32": 2e-6, "bfloat16": 2e-2}


def heads(rows: int, queries: int, keys: int, dtype: str, count: int = 2) -> list[jax.Array]:
    random = np.random.default_rng(queries + keys)
    shapes = [(rows, n, count, 4) for n in (queries, keys, keys)]
    return [jnp.asarray(random.normal(size=shape), dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(
    "sizes", [(3, 5, 7, 2), quick_if(False, (2, 6, 6, 3)), quick_if(False, (2, 1, 1, 1))]
)
def test_outputs_and_gradients_are_those_of_attend(sizes, dtype):
    """With ragged masks, and a row that may see no key, whose output is 0."""
    rows, queries, keys, count = sizes
    arrays = heads(rows, queries, keys, dtype, count)
    mask = np.arange(keys)[None, None, None] < np.arange(rows)[:, None, None, None] * 2
    mask = jnp.asarray(np.broadcast_to(mask, (rows, 1, queries, keys)))
    factors = jnp.asarray(np.random.default_rng(9).normal(size=arrays[0].shape), "float32")

    def total(function, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        mixed = function(*arrays)
        return (mixed.astype("float32") * factors).sum(), mixed

    def written_out(*arrays: jax.Array) -> jax.Array:
        return attend(*arrays, mask, scale=0.3)[0]

    (plain, fused) = (
        jax.value_and_grad(partial(total, each), (0, 1, 2), has_aux=True)(*arrays)
        for each in (written_out, partial(fused_attend, mask=mask, scale=0.3))
    )
    assert fused[0][1].dtype == dtype and not np.asarray(fused[0][1])[0].any()
    assert furthest(fused[0][1], plain[0][1]) < BOUNDS[dtype]
    for have, want in zip(fused[1], plain[1], strict=True):
        assert furthest(have, want) < 4 * BOUNDS[dtype]


@pytest.mark.parametrize("dtype", [quick_if(name == "float32", name) for name in BOUNDS])
def test_the_loss_is_that_of_the_exact_backend(dtype):
    config = tiny("vaswani2017_base", num_layers=1, dropout=0.2, attention_dropout=0.0)
    config = config.with_sizes(compute_dtype=dtype)
    arrays = {k: jnp.asarray(a, "float32") for k, a in random_arrays(config).items()}
    source, target = batch(config)
    pair, key = Batch(source, target, target), jax.random.key(0)
    plain, fused = (
        float(jax.jit(partial(step.loss_sum, config=each))(arrays, {}, pair, dropout=key)[0])
        for each in (config, config.with_sizes(**SDPA))
    )
    assert fused == pytest.approx(plain, rel=BOUNDS[dtype])


def test_cached_steps_have_the_logits_of_a_complete_pass():
    config = tiny("vaswani2017_base", num_layers=1, attention_dropout=0.0)
    source, _ = batch(config)
    plain, fused = (
        jt.generate.greedy(random_model(each, dtype="float32"), source, max_length=5)
        for each in (config, config.with_sizes(**SDPA))
    )
    assert np.array_equal(plain, fused)


REFUSED = {
    "summed mixing": (dict(name="blog2023"), r"decoder.mixing='summed' is not a product"),
    "relative positions": (dict(name="t5"), r"encoder.positions='relative' is a bias of the"),
    "local attention": (
        {"name": "lesson10", "encoder.attention_span": "local"},
        r"encoder.attention_span='local' is computed in blocks",
    ),
    "weights that are dropped": (
        dict(name="vaswani2017_base", attention_dropout=0.1),
        r"attention_dropout=0.1 drops attention weights$",
    ),
    "weights that one stack drops": (
        {"name": "vaswani2017_base", "attention_dropout": 0.0, "encoder.attention_dropout": 0.2},
        r"encoder.attention_dropout=0.2 drops",
    ),
    "another fill": (dict(name="deep_dive"), r"mask_fill='minus_1e20' gives queries"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_it_cannot_compute_is_refused_with_the_reason(case):
    changes, reason = REFUSED[case]
    tiny(**changes)
    with pytest.raises(ConfigError, match=rf"attention_backend='sdpa' cannot compute .*{reason}"):
        tiny(**changes, **SDPA)


# cuDNN, without a GPU: what it is asked for, and the program


CUDNN = dict(attention_backend="cudnn", compute_dtype="bfloat16")


@pytest.fixture
def on_a_gpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


@pytest.fixture
def in_place_of_cudnn(on_a_gpu, monkeypatch):
    """The same call of JAX, computed by XLA."""
    compute = jax.nn.dot_product_attention

    def by_xla(*arrays: jax.Array, implementation: str, **arguments) -> jax.Array:
        assert implementation == "cudnn" and "mask" not in arguments and "bias" not in arguments
        return compute(*arrays, implementation="xla", **arguments)

    monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla)


def key_mask(lengths: list[int], queries: int, keys: int, causal: bool) -> jax.Array:
    mask = np.arange(keys)[None, None, None] < np.asarray(lengths)[:, None, None, None]
    if causal:
        mask = mask & np.tri(queries, keys, dtype=bool)[None, None]
    return jnp.asarray(mask)


@pytest.mark.parametrize(
    ("lengths", "queries", "keys", "causal"),
    [([3, 7, 0, 1], 5, 7, False), ([4, 5, 0, 1], 5, 5, True), ([], 5, 7, False)],
)
def test_cudnn_is_given_the_lengths_of_the_mask(in_place_of_cudnn, lengths, queries, keys, causal):
    """Outputs and gradients are those of attend, also of a row that may see no key."""
    arrays = heads(len(lengths) or 2, queries, keys, "bfloat16")
    mask = key_mask(lengths, queries, keys, causal) if lengths else None

    def total(function, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        mixed = function(*arrays).astype("float32")
        return (mixed**2).sum(), mixed

    (plain, fused) = (
        jax.jit(jax.value_and_grad(partial(total, each), (0, 1, 2), has_aux=True))(*arrays)
        for each in (
            lambda *arrays: attend(*arrays, mask, scale=0.3)[0],
            partial(cudnn_attend, mask=mask, scale=0.3, causal=causal),
        )
    )
    for have, want in zip(jax.tree.leaves(fused), jax.tree.leaves(plain), strict=True):
        assert furthest(have, want) < 4 * BOUNDS["bfloat16"] * max(1.0, float(jnp.abs(want).max()))


@pytest.mark.parametrize("causal", [False, True])
def test_a_mask_that_cudnn_is_not_given_makes_its_row_nan(in_place_of_cudnn, causal):
    """Padding before the end: it must not be attended to in silence."""
    mask = key_mask([6, 6], 6, 6, causal).at[0, :, :, 2].set(False)
    attention = jax.jit(partial(cudnn_attend, scale=0.3, causal=causal))
    mixed = attention(*heads(2, 6, 6, "bfloat16"), mask)
    assert jnp.isnan(mixed[0]).all() and not jnp.isnan(mixed[1]).any()


@pytest.mark.parametrize("preset", ["vaswani2017_base", "marian"])
def test_a_step_s_program_has_cudnn_s_attention(on_a_gpu, monkeypatch, preset):
    """Lowered for a GPU, which nothing of it needs; two calls for each attention of a layer."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91200)
    config = tiny(preset, num_layers=1, d_model=16, num_heads=2, attention_dropout=0.0)
    config = config.with_sizes(**CUDNN)
    arrays = {k: jnp.asarray(a, "float32") for k, a in random_arrays(config).items()}
    source, target = batch(config)
    pair, key = Batch(source, target, target), jax.random.key(0)
    loss = partial(step.loss_sum, config=config)
    gradient = jax.jit(jax.grad(lambda arrays: loss(arrays, {}, pair, dropout=key)[0]))
    text = gradient.trace(arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__cudnn$fmhaSoftmax(") == text.count("__cudnn$fmhaSoftmaxBackward(") == 3
    assert text.count("PADDING_CAUSAL") == 2, "the target's own, there and back"


def test_cudnn_is_refused_without_a_gpu_and_in_32_bits(monkeypatch):
    config = tiny("vaswani2017_base", num_layers=1, d_model=16, num_heads=2, attention_dropout=0.0)
    ids = batch(config)
    reason = r"needs an NVIDIA GPU, and JAX computes on cpu; 'sdpa' and 'xla' do not"
    with pytest.raises(ConfigError, match=reason):
        jax.eval_shape(lambda: random_model(config.with_sizes(**CUDNN), dtype="float32")(*ids))
    wide = config.with_sizes(attention_backend="cudnn", compute_dtype="float32")
    with pytest.raises(ConfigError, match=r"the model in float32: use --model.precision bfloat16"):
        jax.eval_shape(lambda: random_model(wide, dtype="float32")(*ids))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    check_kernel(AttentionBackend.CUDNN, "float16")
    with pytest.raises(ConfigError, match="attention_backend='cudnn': cuDNN is not detected"):
        jax.eval_shape(lambda: random_model(config.with_sizes(**CUDNN), dtype="float32")(*ids))


@pytest.mark.parametrize("width", [12, 264])
def test_heads_that_cudnn_does_not_have_are_refused(width):
    sizes = dict(d_model=2 * width, num_heads=2, attention_dropout=0.0)
    tiny("vaswani2017_base", **sizes, **SDPA)
    with pytest.raises(ConfigError, match=rf"encoder: heads of width {width}, not a multiple of 8"):
        tiny("vaswani2017_base", **sizes, **CUDNN)
    tiny("vaswani2017_base", **sizes | dict(d_model=2 * (8 if width < 256 else 256)), **CUDNN)


PLAIN = dict(name="vaswani2017_base", d_model=16, num_heads=2, attention_dropout=0.0)
ROWS = {
    "the target's own attention, and attention to the source": {},
    "relative positions, a bias with a gradient (T5)": dict(name="t5"),
    "dropout of attention weights (`--model.attention-dropout`)": dict(attention_dropout=0.1),
    "local attention (LongT5)": {"encoder.attention_span": "local"},
    "summed weights (blog2023)": {"decoder.mixing": "summed"},
    "a fill for queries without keys (Deep Dive)": dict(mask_fill="minus_1e20"),
    "heads of any width, not only multiples of 8 up to 256": dict(d_model=24),
    "float32": dict(compute_dtype="float32"),
    "several pairs in a row (`--data.packing`)": dict(packed=True),
    "several devices": dict(devices=4),
}


def refusal(config: TransformerConfig, backend: str, packed: bool) -> str:
    try:
        if backend in ("cudnn", "tokamax"):
            with_kernel(config, backend, packed=packed)
        elif packed and config.with_sizes(attention_backend=backend).unpackable:
            return "packed"
        else:
            config.with_sizes(attention_backend=backend)
    except ConfigError as error:
        return str(error)
    return ""


def test_the_page_lists_what_each_backend_computes(in_place_of_cudnn, monkeypatch):

    def checked(q, *_, **__):
        fused_attention.check_kernel(AttentionBackend.TOKAMAX, q.dtype)
        return q

    monkeypatch.setattr(fused_attention, "tokamax_attend", checked)
    page = (Path(__file__).parents[3] / "docs/accelerators.md").read_text(encoding="utf-8")
    table = page.partition("| | `xla` | `sdpa` | `cudnn` | `tokamax` |\n")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.split("\n")[1:]]
    assert sorted(ROWS) == sorted(row[0] for row in rows)
    for name, *cells in rows:
        changes = PLAIN | dict(compute_dtype="bfloat16") | ROWS[name]
        packed, count = changes.pop("packed", False), changes.pop("devices", 1)
        config = tiny(**changes)
        mesh = jax.sharding.AbstractMesh((count,), ("data",))
        with jax.sharding.use_abstract_mesh(mesh):
            have = [refusal(config, backend, packed) for backend in AttentionBackend]
        assert ["no" if reason else "yes" for reason in have] == cells, (name, have)


@pytest.mark.parametrize(
    ("changes", "chosen", "reason"),
    [
        ({}, "cudnn", ""),
        (dict(packed=True), "xla", ": attention_backend='cudnn' is given lengths and no segments"),
        (dict(compute_dtype=None), "xla", ": .* computes in bfloat16, and the model in float32"),
        (dict(name="t5"), "xla", ": .*encoder.positions='relative' is a bias of the scores"),
    ],
)
def test_auto_is_cudnn_if_that_computes_the_model(
    in_place_of_cudnn, capsys, changes, chosen, reason
):
    changes = PLAIN | dict(compute_dtype="bfloat16") | changes
    packed = changes.pop("packed", False)
    config = tiny(**changes)
    chosen_config = devices.automatic_attention(config, packed=packed)
    assert chosen_config == config.with_sizes(attention_backend=chosen)
    error = capsys.readouterr().err
    assert re.search(f"^model.attention_backend=auto is {chosen}{reason}", error), error


def test_auto_is_xla_without_cudnn(on_a_gpu, capsys):
    config = tiny(**PLAIN, compute_dtype="bfloat16")
    assert devices.automatic_attention(config, packed=False) == config
    assert "is xla: attention_backend='cudnn': cuDNN is not detected" in capsys.readouterr().err


def test_attention_weights_and_float64_are_refused():
    config = tiny("vaswani2017_base", num_layers=1, attention_dropout=0.0, **SDPA)
    ids = batch(config)
    with pytest.raises(ConfigError, match=r"returns no attention weights: use .*'xla'"):
        random_model(config)(*ids, return_attention=True)
    with pytest.raises(ConfigError, match="softmax in float32, and the model is float64"):
        jax.eval_shape(lambda: random_model(config)(*ids))


def test_a_model_s_record_does_not_name_its_backend():
    config = tiny("vaswani2017_base", attention_dropout=0.0)
    assert config.with_sizes(**SDPA).portable == config
    assert transformer.shapes(config.with_sizes(**SDPA)) == transformer.shapes(config)
