"""tokamax's attention without a GPU: its kernels interpreted, and its programs lowered for CUDA."""

import logging
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokamax
from absl import flags
from jax.experimental import pallas
from jax.experimental.pallas import triton

from jax_transformer.data.batches import Batch, PackedBatch
from jax_transformer.errors import ConfigError
from jax_transformer.nn import fused_attention
from jax_transformer.nn.attention import attend
from jax_transformer.nn.fused_attention import tokamax_attend
from jax_transformer.training import devices, step
from parity_tests.marks import quick_if
from parity_tests.unit.helpers import batch, furthest, random_arrays, tiny

pytestmark = pytest.mark.filterwarnings("ignore:jax.experimental.pallas.dot:DeprecationWarning")

TOKAMAX = dict(attention_backend="tokamax", attention_dropout=0.0)


@pytest.fixture(autouse=True)
def _as_in_training():
    """Its kernels have no 64 bits, and promote."""
    promotion = jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow")
    with promotion[0], promotion[1], jax.enable_x64(False):
        yield


@pytest.fixture
def without_a_gpu(monkeypatch):
    """Nobody asks about the device."""
    fused_attention._tokamax()
    monkeypatch.setattr(fused_attention, "check_kernel", lambda *_: None)
    with tokamax.config.cross_compile(True):
        yield


@pytest.fixture
def interpreted(without_a_gpu, monkeypatch):
    """The interpreter has the indices of a program at the kernel's own level, not in branches."""
    call, index, load = pallas.pallas_call, pallas.program_id, triton.load
    indices: list[jax.Array] = []

    def interpret(kernel, *args, **options):
        def with_indices(*refs):
            indices[:] = map(index, range(2))
            return kernel(*refs)

        return call(with_indices, *args, **options, interpret=True)

    def load_bool(ref, *, mask=None, other=None):
        return load(
            ref, mask=mask, other=False if ref.dtype == bool and mask is not None else other
        )

    monkeypatch.setattr(triton, "load", load_bool)
    monkeypatch.setattr(pallas, "pallas_call", interpret)
    monkeypatch.setattr(
        pallas, "program_id", lambda axis: indices[axis] if axis < 2 else index(axis)
    )


@pytest.mark.parametrize(
    ("dtype", "bound", "queries", "keys", "bias_rows", "causal"),
    [
        ("float32", 1e-6, 5, 7, 1, False),
        ("float32", 1e-6, 70, 70, 3, True),
        ("float32", 1e-6, 4, 4, 0, True),
        ("bfloat16", 2e-2, 5, 7, 1, False),
    ],
)
def test_outputs_and_gradients_are_those_of_attend(
    interpreted, dtype, bound, queries, keys, bias_rows, causal
):
    """Gradients are those of queries, keys, values and a bias; one row may see no key."""
    random = np.random.default_rng(queries)
    rows, heads = 3, 2
    shapes = [(rows, n, heads, 4) for n in (queries, keys, keys)]
    shapes += [(bias_rows, heads, queries, keys)] * bool(bias_rows)
    arrays = [jnp.asarray(random.normal(size=shape), dtype) for shape in shapes]
    mask = random.random((rows, 1, queries, keys)) < 0.6
    mask[0] = False
    if causal:
        mask &= np.tri(queries, keys, dtype=bool)
    factors = jnp.asarray(random.normal(size=shapes[0]), "float32")

    def total(function, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        mixed = function(*arrays[:3], jnp.asarray(mask), *arrays[3:])
        return (mixed.astype("float32") * factors).sum(), mixed

    plain, fused = (
        jax.jit(jax.value_and_grad(partial(total, each), range(len(arrays)), has_aux=True))(*arrays)
        for each in (
            lambda *arrays: attend(*arrays, scale=0.3)[0],
            partial(tokamax_attend, scale=0.3, causal=causal),
        )
    )
    assert fused[0][1].dtype == dtype and not np.asarray(fused[0][1])[0].any()
    for have, want in zip(jax.tree.leaves(fused), jax.tree.leaves(plain), strict=True):
        assert furthest(have, want) < 4 * bound * max(1.0, float(jnp.abs(want).max()))


def loss_of(config, pair):
    loss = partial(step.loss_sum, config=config)
    key = jax.random.key(0)
    return jax.jit(jax.value_and_grad(lambda arrays: loss(arrays, {}, pair, dropout=key)[0]))


@pytest.mark.parametrize("preset", [quick_if(name == "t5", name) for name in ("t5", "marian")])
def test_a_packed_step_is_that_of_the_exact_backend(interpreted, preset):
    """With T5's bias, whose gradient is that of its table of relative positions."""
    config = tiny(preset, num_layers=1, d_model=16, num_heads=2, dropout=0.2, **TOKAMAX)
    arrays = {k: jnp.asarray(a, "float32") for k, a in random_arrays(config).items()}
    source, target = batch(config)
    segments = [
        np.where(np.asarray(ids) == 0, 0, np.arange(ids.shape[1]) // 2 + 1)
        for ids in (source, target)
    ]
    segments = tuple(each.astype("int32") for each in segments)
    pair = PackedBatch(source, target, target, segments)
    fused = loss_of(config, pair)(arrays)
    plain = loss_of(config.with_sizes(attention_backend="xla"), pair)(arrays)
    assert float(fused[0]) == pytest.approx(float(plain[0]), rel=2e-6)
    for name, want in plain[1].items():
        assert furthest(fused[1][name], want) < 1e-5 * max(1.0, float(jnp.abs(want).max())), name


@pytest.mark.parametrize("preset", ["vaswani2017_base", "t5"])
def test_a_step_s_program_has_tokamax_s_kernels(without_a_gpu, preset, caplog):
    """Two for each attention of a layer; and no warning for each shape that is not tuned."""
    config = tiny(preset, num_layers=1, d_model=16, num_heads=2, **TOKAMAX)
    config = config.with_sizes(compute_dtype="bfloat16")
    arrays = {k: jnp.asarray(a, "float32") for k, a in random_arrays(config).items()}
    source, target = batch(config)
    with caplog.at_level(logging.WARNING):
        traced = loss_of(config, Batch(source, target, target)).trace(arrays)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count('"__gpu$xla.gpu.triton"') + text.count("@__gpu$xla.gpu.triton") == 6
    assert not caplog.records


def test_it_is_refused_with_the_reason(monkeypatch):
    config = tiny("t5", num_layers=1, **TOKAMAX)
    check = partial(fused_attention.check_kernel, config.attention_backend)
    with pytest.raises(ConfigError, match="needs an NVIDIA GPU, and JAX computes on cpu"):
        check("float32")
    with pytest.raises(ConfigError, match="takes softmax in float32, and the model is float64"):
        check("float64")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    check("float32")
    mesh = devices.Devices.take(1).mesh.abstract_mesh.update(axis_sizes=(4, 1, 1))
    refused = pytest.raises(ConfigError, match="computes on one device, and the mesh has 4")
    with jax.sharding.use_abstract_mesh(mesh), refused:
        check("float32")
    with pytest.raises(ConfigError, match="attention_backend='tokamax': Not supported on cpu"):
        fused_attention.with_kernel(config, "tokamax")
    monkeypatch.setitem(sys.modules, "tokamax", None)
    fused_attention._tokamax.cache_clear()
    with pytest.raises(ConfigError, match=r"pip install 'jax-seq2seq\[kernels\]'$"):
        check("bfloat16")
    with pytest.raises(ConfigError, match=r"attention_dropout=0\.1 drops attention weights"):
        tiny("t5", **TOKAMAX | dict(attention_dropout=0.1))


def test_it_does_not_read_the_command_line(monkeypatch):
    """absl would end a run for every option that it does not know."""
    monkeypatch.setattr(sys, "argv", ["train.py", "--model.attention-backend", "tokamax"])
    flags.FLAGS.unparse_flags()
    fused_attention._tokamax.cache_clear()
    fused_attention._tokamax()
    assert tokamax.config.cross_compile.value is False


@pytest.mark.parametrize("packed", [False, True])
def test_auto_is_tokamax_if_cudnn_does_not_compute_the_model(without_a_gpu, capsys, packed):
    config = tiny("t5", attention_dropout=0.0, compute_dtype="bfloat16")
    chosen = devices.automatic_attention(config, packed=packed)
    assert chosen == config.with_sizes(attention_backend="tokamax")
    assert "model.attention_backend=auto is tokamax" in capsys.readouterr().err
