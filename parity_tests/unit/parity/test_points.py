"""Points of functions without modules: where each array is used, and what comes out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from jax_transformer.errors import ConfigError
from jax_transformer.parity import jaxprs, recording
from jax_transformer.parity import points as points_module
from jax_transformer.parity.functions import from_function
from jax_transformer.parity.points import root_of_layers

X = np.random.default_rng(0).normal(size=(2, 5, 4)).astype(np.float32)


def record(function, parameters, *batch) -> recording.Recording:
    recorder = recording.Recorder(from_function(function, parameters), batch or [X])
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        return recorder.record(seed=None)


def points(function, parameters, *batch) -> dict[str, np.ndarray]:
    """Return the outputs of the points by call, in order, of a run in float64."""
    recorded = record(function, parameters, *batch)
    return {key: recorded.arrays[f"{key}/output"] for key in recorded.order}


def arrays(**shapes) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def normalized(x):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def moments(x):
    return x - x.mean(-1, keepdims=True), x.var(-1, keepdims=True) + 1e-5


NORMS = {
    "scale last": lambda p, x: (m := moments(x))[0] / jnp.sqrt(m[1]) * p["g"] + p["b"],
    "scale first": lambda p, x: p["g"] * (m := moments(x))[0] / jnp.sqrt(m[1]) + p["b"],
    "scale of the factor": lambda p, x: (
        p["g"] * jax.lax.rsqrt((m := moments(x))[1]) * m[0] + p["b"]
    ),
    "offset subtracted": lambda p, x: p["g"] * ((m := moments(x))[0] / jnp.sqrt(m[1])) - -p["b"],
}


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_a_norm_is_whole_in_any_order_of_its_factors(norm):
    p = arrays(g=4, b=4, w=(4, 3))
    outputs = points(lambda p, x: norm(p, x) @ p["w"], p)
    expected = normalized(X.astype(np.float64)) * p["g"] + p["b"]
    assert list(outputs) == ["g#0", "w#0"]
    np.testing.assert_allclose(outputs["g#0"], expected, rtol=1e-9, atol=1e-12)


def test_a_product_has_its_bias_and_no_more():
    """Neither what comes before a transposed result, nor the residual, nor the activation."""
    p = {"up": arrays(w=(4, 6), b=6), "down": arrays(kernel=(6, 4)), "wq": arrays(x=(4, 2, 3))["x"]}

    def run(p, x):
        heads = jnp.einsum("btd,dhe->bhte", x, p["wq"]).sum((1, 3))
        up = jax.jit(lambda p, x: jax.nn.relu(x @ p["up"]["w"] + p["up"]["b"]))(p, x)
        return (x + up @ p["down"]["kernel"]) * heads[..., None]

    outputs = points(run, p)
    assert sorted(outputs) == ["down#0", "up#0", "wq#0"]
    wide = X.astype(np.float64)
    up = wide @ p["up"]["w"] + p["up"]["b"]
    np.testing.assert_allclose(outputs["up#0"], up)
    np.testing.assert_allclose(outputs["down#0"], np.maximum(up, 0) @ p["down"]["kernel"])
    np.testing.assert_allclose(outputs["wq#0"], np.einsum("btd,dhe->bhte", wide, p["wq"]))


@pytest.mark.parametrize(
    "run",
    [
        lambda p, x: (x @ p["w"]) * jnp.tanh(x @ p["gate"]),
        lambda p, x: (x @ p["w"]) * x.mean(-1, keepdims=True),
        lambda p, x: jnp.tanh((h := x @ p["w"]) + p["b"]) * h,
    ],
    ids=["gate", "factor of rows", "other use"],
)
@pytest.mark.parametrize("width", [1, 4])
def test_a_product_ends_before_its_gate(run, width):
    p, x = arrays(w=(width, 6), gate=(width, 6), b=6), X[..., :width]
    np.testing.assert_allclose(points(run, p, x)["w#0"], x.astype(np.float64) @ p["w"])


@pytest.mark.parametrize(
    ("factor", "inside"),
    [
        (lambda x: x.sum((0, 1)), False),
        (lambda x: x.sum(-1, keepdims=True), True),
        (lambda x: x.sum(), False),
        (lambda x: 0.5, False),
    ],
    ids=["features", "rows", "one", "constant"],
)
def test_a_factor_of_features_is_no_part_of_a_norm(factor, inside):
    p, x = arrays(g=4, w=(4, 1, 3)), X.astype(np.float64)
    outputs = points(lambda p, x: p["g"] * x * factor(x) @ p["w"][:, 0], p)
    assert list(outputs) == ["g#0", "w#0"]
    np.testing.assert_allclose(outputs["g#0"], p["g"] * x * (factor(x) if inside else 1))


def test_only_one_factor_of_rows_has_the_scale_of_a_norm():
    p, x = arrays(g=4), X.astype(np.float64)
    run = lambda p, x: p["g"] * x.sum(-1, keepdims=True) * x * jnp.tanh(x)  # noqa: E731
    expected = p["g"] * x.sum(-1, keepdims=True) * x
    np.testing.assert_allclose(points(run, p)["g#0"], expected)


def test_a_convolution_has_its_bias():
    p, axes = arrays(w=(1, 4, 6), b=6), ("NTC", "TIO", "NTC")

    def run(p, x):
        y = jax.lax.conv_general_dilated(x, p["w"], (1,), "SAME", dimension_numbers=axes)
        return jnp.tanh(y + p["b"])

    np.testing.assert_allclose(points(run, p)["w#0"], X.astype(np.float64) @ p["w"][0] + p["b"])


def test_a_comparison_with_an_array_is_no_point():
    p = arrays(threshold=4, w=(4, 3))
    run = lambda p, x: jnp.where(x > p["threshold"], x, 0) @ p["w"]  # noqa: E731
    assert list(points(run, p)) == ["w#0"]


def test_what_is_made_of_several_arrays_has_the_name_of_the_first():
    p = arrays(w=(4, 3), a=(4, 2), b=(2, 3))
    assert list(points(lambda p, x: x @ (p["w"] + p["a"] @ p["b"]), p)) == ["w#0"]


def test_a_part_of_a_layer_is_not_named_as_the_layer():
    p = arrays(w=(3, 4, 1))
    for part in (lambda w: w[1, 2:, 0], lambda w: jnp.squeeze(w[1:2], -1)[:, 2:]):
        assert list(points(lambda p, x, part=part: x[..., 2:] * part(p["w"]), p)) == ["w#0"]


@pytest.mark.parametrize("inner", ["python", "scan"])
def test_layers_in_layers_have_the_numbers_of_the_outer_ones(inner):
    p = {"layers": arrays(w=(3, 2, 4, 4), v=(3, 4, 4))}

    def layer(x, p):
        x = x @ p["v"]
        if inner == "scan":
            return jax.lax.scan(lambda x, w: (x @ w, None), x, p["w"])[0], None
        return x @ p["w"][0] @ p["w"][1], None

    names = [f"layers.{i}.{each}" for i in range(3) for each in ("v#0", "w#0", "w#1")]
    assert list(points(lambda p, x: jax.lax.scan(layer, x, p["layers"])[0], p)) == names


def test_a_module_has_no_parts():
    shapes = {"a.w": (4, 4), "a.b": (4,), "c.w": (4, 4), "c.g.b": (4,), "w": (4,)}
    names = {name: points_module.module(name, shapes) for name in shapes}
    assert names == {"a.w": "a", "a.b": "a", "c.w": "c.w", "c.g.b": "c.g", "w": "w"}


def test_the_root_of_layers_has_several_parts_and_all_of_their_arrays():
    layers = {"net.layers.one.w": (3, 4, 4), "net.layers.two.w": (4, 3, 4)}
    assert root_of_layers("net.layers.one", 3, layers) == "net.layers"
    for other in ("net.head.w", "net.layers_norm.w"):
        assert root_of_layers("net.layers.one", 3, layers | {other: (4, 2)}) == "net.layers"
    assert root_of_layers("net.layers.one", 3, layers | {"net.more.w": (3, 2)}) == "net"


def test_a_table_is_looked_up_before_positions_are_added():
    p, ids = arrays(tokens=(7, 4), positions=(9, 4)), np.array([[1, 2, 6]])
    outputs = points(lambda p, i: p["tokens"][i] + p["positions"][: i.shape[1]], p, ids)
    np.testing.assert_array_equal(outputs["tokens#0"], p["tokens"][ids])


@pytest.mark.parametrize("loop", ["scan", "remat", "python"])
def test_arrays_of_several_layers_have_a_point_in_each(loop):
    p = {
        "head": arrays(w=(4, 2)),
        "layers": {"one": arrays(w=(3, 4, 4)), "two": arrays(w=(3, 4, 4))},
    }

    def layer(x, p):
        return jnp.tanh(x @ p["one"]["w"]) @ p["two"]["w"], None

    def run(p, x):
        if loop == "python":
            for i in range(3):
                x, _ = layer(x, jax.tree.map(lambda array, i=i: array[i], p["layers"]))
        else:
            x, _ = jax.lax.scan(jax.checkpoint(layer) if loop == "remat" else layer, x, p["layers"])
        return x @ p["head"]["w"]

    outputs = points(run, p)
    names = [f"layers.{i}.{name}#0" for i in range(3) for name in ("one", "two")]
    assert list(outputs) == [*names, "head#0"]
    expected = X.astype(np.float64)
    for i in range(3):
        inner = expected @ p["layers"]["one"]["w"][i]
        expected = np.tanh(inner) @ p["layers"]["two"]["w"][i]
        np.testing.assert_allclose(outputs[f"layers.{i}.one#0"], inner)
        np.testing.assert_allclose(outputs[f"layers.{i}.two#0"], expected)


@pytest.mark.parametrize(("output", "shape"), [(lambda h: h, (5, 2, 4)), (jnp.sum, (2, 4))])
def test_a_scan_over_time_is_one_point_and_is_not_run_step_by_step(output, shape):
    """Its output is the largest array."""
    p = arrays(w=(4, 4), u=(4, 4))

    def run(p, x):
        def step(h, x):
            h = jnp.tanh(x @ p["w"] + h @ p["u"])
            return h, output(h)

        return jax.lax.scan(step, jnp.zeros((2, 4)), x.swapaxes(0, 1))[1]

    assert {name: x.shape for name, x in points(run, p).items()} == {"w#0": shape}


@pytest.mark.parametrize(
    "run", [lambda p, x: x @ p["w"] + p["b"], lambda p, x: p["b"] + x @ p["w"]]
)
def test_the_array_that_is_added_at_a_point_is_recorded(run):
    p = arrays(w=(4, 6), b=6)
    recorded = record(run, p)
    np.testing.assert_array_equal(np.squeeze(recorded.arrays["w#0/added"]), p["b"])
    assert recorded.biases == {"w": {"b"}}


def test_code_in_16_bits_belongs_to_the_next_point():
    p = arrays(w=(4, 4), v=(4, 4), u=(4, 4))

    def run(p, x):
        x = jnp.tanh((x @ p["w"]).astype(jnp.bfloat16)).astype(x.dtype)
        return x @ p["v"] @ p["u"]

    narrow = record(run, p).narrow
    assert [name for name in p if narrow.get(name) == "bfloat16"] == ["v"]


def test_taps_of_the_model_are_the_only_points():
    p = arrays(w=(4, 4))
    assert list(points(lambda p, x: recording.tap("mine", x @ p["w"]), p)) == ["mine#0"]


def test_a_model_that_runs_in_no_dtype_fails_with_its_error_in_float64():
    def run(p, x):
        raise ValueError(f"no {x.dtype}")

    with pytest.raises(ValueError, match=r"^no float64"):
        points(run, arrays(w=(4, 4)))


def test_an_option_that_the_compiler_lacks_is_left_out(monkeypatch):
    assert recording._options()
    jit = jax.jit

    def older(function, **_):
        return jit(function, compiler_options={"xla_of_another_release": "1"})

    monkeypatch.setattr(jax, "jit", older)
    assert recording._options.__wrapped__() == {}


def explicit() -> jax.sharding.Mesh:
    return jax.make_mesh((1, 1), ("x", "y"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)


def test_a_model_on_a_mesh_with_explicit_axes_is_run_on_one_device_in_float64():
    spec, mesh = jax.sharding.PartitionSpec, explicit()
    with jax.set_mesh(mesh):
        kernel = jax.device_put(jnp.ones((4, 4), jnp.bfloat16), jax.NamedSharding(mesh, spec("x")))

        def run(p, x):
            def layer(x, _):
                x = jax.sharding.reshard(x.astype(jnp.bfloat16), spec("x", None, None))
                return jnp.einsum(
                    "btd,de->bte", x, p["w"].astype(x.dtype), out_sharding=spec("x", None, "y")
                ), None

            return jax.lax.cond(True, lambda x: x * 2, lambda x: x, layer(x, None)[0])

        outputs = points(run, {"w": kernel})
        assert jax.sharding.get_abstract_mesh().axis_names == ("x", "y")
    np.testing.assert_allclose(outputs["w#0"], X.astype(np.float64) @ np.ones((4, 4)), rtol=1e-12)


def test_a_program_is_sharded_if_one_of_its_arrays_is():
    spec = jax.sharding.PartitionSpec("x", None, None)
    with jax.set_mesh(explicit()):
        one = jax.make_jaxpr(jax.jit(lambda x: jax.sharding.reshard(x, spec) * 2))
        assert jaxprs.is_sharded(one(X))
    assert not jaxprs.is_sharded(jax.make_jaxpr(lambda x: jnp.sin(x) * 2)(X))


def test_shard_map_on_such_a_mesh_is_refused():
    spec, mesh = jax.sharding.PartitionSpec, explicit()

    def run(p, x):
        sharded = jax.shard_map(
            lambda x: jax.lax.psum(x, "y"), mesh=mesh, in_specs=spec("x"), out_specs=spec("x")
        )
        return sharded(jax.sharding.reshard(x, spec("x", None, None))) @ p["w"]

    with jax.set_mesh(mesh), pytest.raises(ConfigError, match="shard_map on a mesh with explicit"):
        points(run, arrays(w=(4, 4)))


def test_constants_and_calls_are_inlined():
    table = jnp.arange(4, dtype=jnp.float32)[None, None]
    closed = jax.make_jaxpr(jax.jit(lambda x: jax.jit(lambda y: y + table)(x) * 2))(X)
    flat = jaxprs.inlined(closed)
    assert not [each for each in flat.jaxpr.eqns if each.primitive.name in jaxprs.CALLS]
    np.testing.assert_array_equal(core.jaxpr_as_fun(flat)(X)[0], (X + np.asarray(table)) * 2)
