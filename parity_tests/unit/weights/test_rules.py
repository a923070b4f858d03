"""Weights convert between the frameworks bit for bit; one error names what does not fit."""

import contextlib
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import jax_transformer as jt
from jax_transformer import convert, transformer
from jax_transformer.errors import ConfigError, InputError
from jax_transformer.storage.tensors import LazyTensor, TensorInfo
from jax_transformer.weights import arrays as weights
from jax_transformer.weights import rules
from jax_transformer.weights.rules import Alias, Rule
from parity_tests import preset_names
from parity_tests.unit import helpers

DTYPES = [np.dtype(name) for name in ("float64", "float32", "float16")] + [
    np.dtype(ml_dtypes.bfloat16)
]
NAMES = preset_names.ALL


def any_bits(shape: tuple[int, ...], dtype: np.dtype, seed: int) -> np.ndarray:
    """Return random bits with special values if there is room: NaN, infinities, -0.0."""
    random, count = np.random.default_rng(seed), int(np.prod(shape))
    array = np.frombuffer(random.bytes(count * dtype.itemsize), dtype).copy()
    special = np.array([np.nan, -np.inf, -0.0, 0.0], np.float64).astype(dtype)
    array[:4] = special[: array.size]
    array.view(f"u{dtype.itemsize}")[4:5] = 1
    return array.reshape(shape)


@functools.cache
def weight_table(config: jt.TransformerConfig) -> rules.Table:
    return convert.weight_table(config)


def any_state(config: jt.TransformerConfig, dtypes: list[np.dtype]) -> dict[str, np.ndarray]:
    """Return a checkpoint of random bits, its dtypes in turn; tied tensors are equal."""
    table = weight_table(config)
    expected = rules.torch_shapes(table, helpers.shapes(config))
    state = {
        name: any_bits(shape, dtypes[i % len(dtypes)], seed=i)
        for i, (name, shape) in enumerate(expected.items())
    }
    return state | {
        alias.torch: state[alias.of].copy() for alias in table if isinstance(alias, Alias)
    }


def same_bits(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    assert list(a) == list(b)
    return all(
        (x.dtype, x.shape, x.tobytes()) == (b[name].dtype, b[name].shape, b[name].tobytes())
        for name, x in a.items()
    )


def own_and_contiguous(results: dict[str, np.ndarray], inputs: dict[str, np.ndarray]) -> bool:
    arrays = list(results.values())
    shared = any(np.shares_memory(x, y) for x in arrays for y in inputs.values())
    shared |= any(np.shares_memory(x, y) for i, x in enumerate(arrays) for y in arrays[:i])
    return not shared and all(
        x.flags.c_contiguous and x.flags.owndata and x.flags.writeable for x in arrays
    )


@pytest.fixture(
    scope="module",
    params=NAMES,
)
def config(request) -> jt.TransformerConfig:
    return helpers.tiny(request.param)


def test_there_and_back_is_the_identity_bit_for_bit(config):
    table, state = weight_table(config), any_state(config, DTYPES)
    arrays = rules.to_flax(table, state, helpers.shapes(config))
    assert {name: array.shape for name, array in arrays.items()} == helpers.shapes(config)
    assert own_and_contiguous(arrays, state)
    model = convert.from_torch(state, config)
    for back in (rules.to_torch(table, arrays), convert.to_torch(model)):
        assert same_bits(back, {name: state[name] for name in back}) and back.keys() == state.keys()
        assert own_and_contiguous(back, arrays)


def test_an_alias_may_come_before_its_tensor():
    table = [Alias("a.weight", "b.weight"), Rule("b.weight", ("x",))]
    back = rules.to_torch(table, {"x": np.arange(3.0)})
    assert list(back) == ["a.weight", "b.weight"] and own_and_contiguous(back, {})
    assert all(np.array_equal(array, np.arange(3.0)) for array in back.values())


def counted(shape: tuple[int, ...], start: int) -> np.ndarray:
    return start + np.arange(np.prod(shape), dtype=np.float64).reshape(shape)


@pytest.mark.parametrize("sizes", [helpers.ODD, helpers.SQUARE], ids=["odd", "square"])
@pytest.mark.parametrize(
    "name", [name for name in NAMES if jt.preset(name).architecture in ("torch_nn", "lesson10")]
)
def test_each_tensor_reaches_the_module_of_its_name(name, sizes):
    """By hand, with distinct values: in the square case shapes cannot show a swap."""
    config = helpers.tiny(name, **(helpers.SQUARE if sizes is helpers.SQUARE else {}))
    table, d = weight_table(config), config.d_model
    expected = rules.torch_shapes(table, helpers.shapes(config))
    state = {name: counted(shape, 10_000 * i) for i, (name, shape) in enumerate(expected.items())}
    state |= {alias.torch: state[alias.of] for alias in table if isinstance(alias, Alias)}
    arrays = rules.to_flax(table, state, helpers.shapes(config))
    pairs = {}
    for i in range(2):
        packed = state[f"decoder.layers.{i}.multihead_attn.in_proj_weight"]
        biases = state[f"decoder.layers.{i}.multihead_attn.in_proj_bias"]
        encoder, decoder = f"encoder.blocks.{i}", f"decoder.blocks.{i}"
        for k, part in enumerate(("query", "key", "value")):
            where = f"{decoder}.cross_attention.{part}"
            pairs[f"{where}.kernel"] = packed[k * d : (k + 1) * d].T
            pairs[f"{where}.bias"] = biases[k * d : (k + 1) * d]
            for kind, leaf in (("weight", "scale"), ("bias", "bias")):
                norm = state[f"decoder.layers.{i}.norm{k + 1}.{kind}"]
                pairs[f"{decoder}.residuals.{k}.norm.{leaf}"] = norm
        own = state[f"encoder.layers.{i}.self_attn.in_proj_weight"]
        pairs[f"{encoder}.self_attention.value.kernel"] = own[2 * d :].T
        for flax, torch in (
            (f"{encoder}.self_attention.out", f"encoder.layers.{i}.self_attn.out_proj"),
            (f"{encoder}.feed_forward.up", f"encoder.layers.{i}.linear1"),
            (f"{decoder}.feed_forward.down", f"decoder.layers.{i}.linear2"),
        ):
            pairs[f"{flax}.kernel"] = state[f"{torch}.weight"].T
    for name, expected_array in pairs.items():
        assert (arrays[name] == expected_array).all(), name
    assert (arrays["target_embedding.embedding"] == state["tgt_emb.weight"]).all()
    if "output.kernel" in arrays:
        assert (arrays["output.kernel"] == state["linear.weight"].T).all()
        assert (arrays["source_embedding.embedding"] == state["src_emb.weight"]).all()
    if "pos_enc.pe" in state:
        for stack in ("encoder", "decoder"):
            assert (arrays[f"{stack}.positions.table"] == state["pos_enc.pe"][:, 0]).all()


def test_learned_positions_of_the_two_stacks_stay_apart():
    config = helpers.tiny(**{f"{stack}.positions": "learned" for stack in ("encoder", "decoder")})
    state = any_state(config, DTYPES[:1])
    arrays = rules.to_flax(weight_table(config), state, helpers.shapes(config))
    assert arrays["encoder.positions.table"].tobytes() == state["src_pos.weight"].tobytes()
    assert arrays["decoder.positions.table"].tobytes() == state["tgt_pos.weight"].tobytes()


# Refusals

CONFIG = helpers.tiny("lesson10")


@pytest.fixture(scope="module")
def state() -> dict[str, np.ndarray]:
    return convert.to_torch(helpers.random_model(CONFIG))


def test_one_error_names_everything_that_does_not_fit(state):
    wrong = dict(state)
    for name in ("linear.bias", "encoder.layers.1.norm2.weight"):
        del wrong[name]
    wrong["linear.biass"] = np.zeros(13)
    wrong["zzz"] = np.zeros((2, 3))
    wrong["src_emb.weight"] = np.zeros((12, 11))
    wrong["decoder.layers.0.self_attn.in_proj_weight"] = np.zeros((12, 36))
    wrong["pos_enc.pe"] = np.zeros((20, 12))
    with pytest.raises(InputError) as error:
        convert.from_torch(wrong, CONFIG)
    assert str(error.value) == (
        "the weights do not fit the model (7 problems):"
        " missing encoder.layers.1.norm2.weight (12,); missing linear.bias (13,);"
        " unexpected linear.biass (13,) (did you mean 'linear.bias'?); unexpected zzz (2, 3);"
        " mis-shaped decoder.layers.0.self_attn.in_proj_weight: the checkpoint has (12, 36),"
        " the model (36, 12);"
        " mis-shaped pos_enc.pe: the checkpoint has (20, 12), the model (20, 1, 12);"
        " mis-shaped src_emb.weight: the checkpoint has (12, 11), the model (11, 12)"
    )


def test_tied_copies_that_differ_are_named():
    config = helpers.tiny("small")
    tied = convert.to_torch(helpers.random_model(config))
    for name in ("linear.weight", "src_emb.weight"):
        other = tied | {name: np.nextafter(tied[name], 9)}
        message = rf"\(1 problem\): {name} differs from tgt_emb.weight, but the model ties them$"
        with pytest.raises(InputError, match=message):
            convert.from_torch(other, config)
    with pytest.raises(InputError, match=r"\(2 problems\)") as error:
        convert.from_torch(tied | {"tgt_emb.weight": -tied["tgt_emb.weight"]}, config)
    for name in ("linear.weight", "src_emb.weight"):
        assert f"{name} differs from tgt_emb.weight" in str(error.value)


def test_flax_copies_that_differ_are_named():
    arrays = helpers.random_arrays(CONFIG)
    arrays["decoder.positions.table"][19, 11] += 1e-9
    model = transformer.unflatten(CONFIG, {name: jnp.asarray(x) for name, x in arrays.items()})
    message = "^decoder.positions.table and encoder.positions.table differ, but pos_enc.pe holds"
    with pytest.raises(InputError, match=f"{message} both$"):
        convert.to_torch(model)


@pytest.mark.parametrize("kind", ["int64", "bool", "complex64", "object"])
def test_tensors_without_floating_point_numbers_are_refused(state, kind):
    with pytest.raises(InputError, match=r"(linear|output)\.bias"):
        convert.from_torch(state | {"linear.bias": np.zeros(13, kind)}, CONFIG)


def test_non_arrays_are_refused_and_other_byte_orders_are_read(state):
    with pytest.raises(InputError, match=r"^linear.bias is a list, not an array$"):
        convert.from_torch(state | {"linear.bias": [0.0] * 13}, CONFIG)
    model = convert.from_torch(state | {"linear.bias": state["linear.bias"].astype(">f8")}, CONFIG)
    assert helpers.furthest(model.output.bias[...], state["linear.bias"]) == 0


def test_float64_without_64_bits_is_refused_unless_a_dtype_is_given(state):
    with jax.enable_x64(False):
        message = "is float64 and JAX is in 32-bit mode"
        remedy = "give dtype='float32', or set jax_enable_x64"
        with pytest.raises(InputError, match=f"{message}: {remedy}$"):
            convert.from_torch(state, CONFIG)
        model = convert.from_torch(state, CONFIG, dtype="float32")
        assert {str(x.dtype) for x in transformer.flatten(model).values()} == {"float32"}
        with pytest.raises(InputError, match=message):
            convert.from_torch(state, CONFIG, dtype="float64")
    assert helpers.furthest(model.output.bias[...], state["linear.bias"].astype(np.float32)) == 0


def test_dtype_casts_every_array(state):
    model = convert.from_torch(state, CONFIG, dtype="bfloat16")
    assert {array.dtype for array in transformer.flatten(model).values()} == {jnp.bfloat16.dtype}
    expected = state["linear.weight"].T.astype(ml_dtypes.bfloat16)
    assert np.asarray(model.output.kernel[...]).tobytes() == expected.tobytes()


def aligned(array: np.ndarray) -> np.ndarray:
    """Return a copy aligned to 64 bytes, whose memory JAX on CPU uses without copying."""
    buffer = np.empty(array.nbytes + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    view = buffer[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


def test_later_changes_to_the_arrays_change_no_model(state):
    inputs = {name: aligned(array) for name, array in state.items()}
    model = convert.from_torch(inputs, CONFIG)
    out = convert.to_torch(model)
    for arrays in (inputs, out):
        for array in arrays.values():
            array[...] = np.nan
    assert same_bits(convert.to_torch(model), state)


# The table and its engine


def test_the_table_must_name_everything_once():
    table, names = weight_table(CONFIG), helpers.shapes(CONFIG)
    rules.check_complete(table, names)
    (bias,) = (rule for rule in table if rule.torch == "linear.bias")
    faults = {
        "output.bias": [*table, Rule("linear.bias2", ("output.bias",))],  # doubled on the Flax side
        "linear.bias": [*table, Rule("linear.bias", ("elsewhere",))],  # doubled on the PyTorch side
        "elsewhere": [*table, Rule("linear.bias2", ("elsewhere",))],  # not in the model
        "output.bias$": [rule for rule in table if rule is not bias],  # missing
        "src_emb.weight$": [*table, Alias("src_emb.weight", "tgt_emb.weight")],  # there already
    }
    for name, fault in faults.items():
        with pytest.raises(ValueError, match=f"does not cover the model exactly once: .*{name}"):
            rules.check_complete(fault, names)
    with pytest.raises(ValueError, match=r"nowhere"):
        rules.check_complete([*table, Alias("again.weight", "nowhere.weight")], names)


def test_restrict_keeps_the_rules_of_the_trained_arrays():
    trained = transformer.flatten(transformer.abstract(CONFIG), nnx.Param)
    table = weight_table(CONFIG)
    restricted = rules.restrict(table, trained)
    stored = ("encoder.positions.table", "decoder.positions.table")
    left_out = [rule for rule in table if rule not in restricted]
    assert left_out == [Rule("pos_enc.pe", stored, "l 1 d -> l d")]
    gradients = helpers.random_arrays(CONFIG)
    gradients = {name: gradients[name] for name in gradients if name in trained}
    named = rules.to_torch(restricted, gradients)
    assert "pos_enc.pe" not in named and len(named) == len(restricted)
    shapes = {name: array.shape for name, array in gradients.items()}
    back = rules.to_flax(restricted, named, shapes)
    assert same_bits({name: back[name] for name in gradients}, gradients)
    tied = helpers.tiny("small")
    all_rules = rules.restrict(weight_table(tied), helpers.shapes(tied))
    assert not any(isinstance(rule, Alias) for rule in all_rules)
    # a third of a packed tensor cannot be converted
    assert rules.restrict(table, ["decoder.blocks.0.self_attention.query.kernel"]) == []


def test_a_part_stands_by_itself_only_if_nothing_of_it_is_elsewhere():
    inside = [Rule("encoder.a", ("encoder.b", "encoder.c")), Alias("encoder.d", "encoder.a")]
    outside = [Rule("decoder.a", ("decoder.b",)), Alias("decoder.d", "decoder.a")]
    assert rules.within(inside + outside, "encoder.") == [Rule("a", ("b", "c")), Alias("d", "a")]
    for crossing in (
        Rule("encoder.x", ("decoder.b",)),
        Rule("shared.x", ("encoder.b",)),
        Rule("encoder.x", ("encoder.b", "decoder.b")),
        Alias("encoder.x", "decoder.a"),
        Alias("shared.x", "encoder.a"),
    ):
        with pytest.raises(ConfigError, match=f"encoder does not stand .*: {crossing.torch}$"):
            rules.within([*inside, crossing, *outside], "encoder.")


@pytest.mark.parametrize("axes", ["(part o) i -> i o", "o i -> i o", "(h part e) d -> d (h e)"])
def test_a_tensor_holds_its_parts_bit_for_bit_only(axes):
    rule = Rule("t", ("a", "b", "c"), axes, {"h": 2} if "h" in axes else None)
    parts = [counted((3, 4), i if rule.cuts else 0) for i in range(3)]
    tensor = rule.joined(parts)
    assert rule.holds(tensor, parts)
    for i in range(len(tensor.flat)):
        other = tensor.copy()
        other.flat[i] = np.nextafter(other.flat[i], 99, dtype=other.dtype)
        assert not rule.holds(other, parts)
    assert not rule.holds(tensor.astype(np.float16), parts)
    assert not Rule("t", ("a",)).holds(-parts[0], [parts[0]])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_merged_adapters_leave_the_kernel_s_dtype(dtype):
    random = np.random.default_rng(0)
    kernel, a, b = (random.normal(size=size) for size in ((5, 3), (5, 2), (2, 3)))
    own = kernel.astype(jnp.dtype(dtype))
    parts = {weights.LORA_A: a, weights.LORA_B: b, weights.LORA_SCALE: np.float64(0.5)}
    adapters = {f"x.kernel{part}": np.float32(array) for part, array in parts.items()}
    values = {"x.kernel": own, "y.bias": own[0]} | adapters
    assert weights.adapted_kernels(values) == ["x.kernel"]
    assert [name for name in values if weights.is_parameter(name)] == ["x.kernel", "y.bias"]
    before = {name: array.copy() for name, array in values.items()}
    merged = weights.merge_adapters(values)
    assert values.keys() == before.keys()
    assert all((values[name] == array).all() for name, array in before.items())
    assert merged.keys() == {"x.kernel", "y.bias"} and merged["x.kernel"].dtype == own.dtype
    expected, step = own.astype(np.float64) + 0.5 * a @ b, float(jnp.finfo(own.dtype).eps)
    assert np.abs(merged["x.kernel"].astype(np.float64) - expected).max() < 4 * max(step, 1e-7)


@pytest.mark.parametrize("axis", range(3))
def test_a_tensor_may_be_numpy_s_stack_of_its_parts(axis):
    layers = [counted((2, 3), i) for i in range(4)]
    left = ["a", "b"]
    left.insert(axis, "part")
    rule = Rule("t", tuple("wxyz"), f"{' '.join(left)} -> b a")
    expected = np.stack(layers, axis)
    assert rule.torch_shape([(3, 2)] * 4) == expected.shape
    info = TensorInfo((3, 2), "float64")
    lazily = [LazyTensor(info, layer.T.copy) for layer in layers]
    read = dict(zip("wxyz", lazily, strict=True))
    tensor = rules.to_torch_lazily([rule], read)["t"]
    assert (tensor.shape, tensor.dtype) == (expected.shape, "float64")
    assert (tensor.read() == expected).all()
    shapes = dict.fromkeys("wxyz", (3, 2))
    again = rules.to_flax_lazily([rule], {"t": tensor}, shapes)
    for number, (name, back) in enumerate(again.items()):
        assert name == "wxyz"[number]
        assert (back.read() == layers[number].T).all() and back.shape == (3, 2)


LAYOUTS = {
    "": ((5, 3), lambda x: x),
    "o i -> i o": ((5, 3), lambda x: x.T),
    "l 1 d -> l d": ((5, 1, 3), lambda x: x[:, 0]),
    "1 v -> v": ((1, 5), lambda x: x[0]),
    "(h e) d -> d h e": ((6, 5), lambda x: x.reshape(2, 3, 5).transpose(2, 0, 1)),
    "d (h e) -> h e d": ((5, 6), lambda x: x.T.reshape(2, 3, 5)),
    "o i y x -> y x i o": ((2, 3, 4, 5), lambda x: x.transpose(2, 3, 1, 0)),
    "i o x -> -x i o": ((2, 3, 5), lambda x: x.transpose(2, 0, 1)[::-1]),
    "(g i) o y x -> -y -x i (g o)": (
        (4, 3, 2, 5),
        lambda x: (
            x.reshape(2, 2, 3, 2, 5)[..., ::-1, ::-1].transpose(3, 4, 1, 0, 2).reshape(2, 5, 2, 6)
        ),
    ),
}


@pytest.mark.parametrize("axes", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_axes_are_changed_as_they_are_written_and_come_back_bit_for_bit(axes, dtype):
    """In arrays of their own: another library may write a view as other bytes."""
    shape, expected = LAYOUTS[axes]
    tensor = any_bits(shape, dtype, seed=1)
    sizes = {name: 2 for name in "hg" if name in axes}
    rule = Rule("t", "a", axes, sizes)
    flax = expected(tensor)
    part = rule.part(0, tensor, [flax.shape], own=True)
    assert part.tobytes() == flax.tobytes() and part.shape == flax.shape
    assert rule.torch_shape([flax.shape]) == shape
    back = rule.joined([part], own=True)
    assert back.tobytes() == tensor.tobytes()
    assert own_and_contiguous({"a": part}, {"t": tensor})
    assert own_and_contiguous({"t": back}, {"a": part})
    # A writer takes the array as it is, which may share memory and must be in order
    for one in (rule.part(0, tensor, [flax.shape]), rule.joined([part])):
        assert one.flags.c_contiguous
    assert rule.holds(tensor, [part]) and not rule.holds(tensor[..., ::-1], [part])


@pytest.mark.parametrize(
    ("axes", "named"),
    [
        ("o i", "write them as"),
        ("o i -> i o -> o i", "write them as"),
        ("o I -> I o", "write them as"),
        ("o i -> i", "every axis stands once"),
        ("o i -> i o o", "every axis stands once"),
        ("o o i -> i o", "every axis stands once"),
        ("o i -> part i o", "every axis stands once"),
        ("part part o -> o", "every axis stands once"),
        ("-o -> o", "every axis stands once"),
    ],
)
def test_axes_that_are_not_reversible_are_refused(axes, named):
    with pytest.raises(ConfigError, match=f"axes '{axes}': {named}"):
        Rule("t", "a", axes)


@pytest.mark.parametrize("shape", [(5, 7), (5,), (5, 6, 1)])
def test_a_rule_that_does_not_fit_an_array_names_both(shape):
    rule = Rule("t", "a", "(h e) d -> d (h e)", {"h": 2})
    refusal = f"a has the shape {shape}, and the rule of t is '(h e) d -> d (h e)', h=2"
    with pytest.raises(ConfigError, match=re.escape(refusal)):
        rule.torch_shape([shape])


@pytest.mark.parametrize(
    ("axes", "shapes"),
    [
        ("", [(2, 3), (3, 2)]),
        ("", [(2, 3), (2, 3, 1)]),
        ("o i -> i o", [(2, 3), (2, 4)]),
        ("(part o) i -> i o", [(2, 3), (4, 3)]),
        ("part o i -> i o", [(2, 3), (2, 4)]),
        ("(h part e) d -> d h e", [(2, 3, 4), (2, 2, 4)]),
    ],
)
def test_parts_that_make_no_tensor_are_refused(axes, shapes):
    rule = Rule("t", ("a", "b"), axes)
    refusal = f"t cannot hold arrays of the shapes {shapes[0]} and {shapes[1]}"
    with pytest.raises(ConfigError, match=re.escape(refusal)):
        rule.torch_shape(shapes)
    with pytest.raises(ConfigError, match=re.escape(refusal)):
        rule.joined([np.ones(shape) for shape in shapes])


def test_placeholders_are_filled_on_both_sides():
    twice = rules.repeat(3, [Rule("a.{i}.{i}", ("b.{i}.{i}",)), Alias("c.{i}.{i}", "a.{i}.{i}")])
    assert twice[-2:] == [Rule("a.2.2", ("b.2.2",)), Alias("c.2.2", "a.2.2")]
    table = rules.repeat(2, [Rule("a.{i}.w", ("b.{i}.x", "b.{i}.y")), Alias("c.{i}", "a.{i}.w")])
    first, second = Rule("a.0.w", ("b.0.x", "b.0.y")), Rule("a.1.w", ("b.1.x", "b.1.y"))
    assert table == [first, Alias("c.0", "a.0.w"), second, Alias("c.1", "a.1.w")]


def parts_of(rule: Rule, tensor: np.ndarray, shapes: list[tuple[int, ...]]) -> list[np.ndarray]:
    return [rule.part(number, tensor, shapes, own=True) for number in range(len(shapes))]


def test_a_layer_fused_per_head_is_cut_within_each_head():
    """By hand, 2 heads of width 2: fused by head, then part; parts by head only."""
    weight, bias = rules.fused_attention("a", "b", 2)[:2]
    assert weight.torch == "a.qkv.weight" and bias.torch == "a.qkv.bias"
    rows = {"query": [0, 1, 6, 7], "key": [2, 3, 8, 9], "value": [4, 5, 10, 11]}
    cases = (weight, counted((12, 4), 0), (4, 4)), (bias, counted((12,), 0), (4,))
    for rule, tensor, shape in cases:
        parts = parts_of(rule, tensor, [shape] * 3)
        for part, own, name in zip(parts, rows.values(), rule.flax, strict=True):
            assert (part == tensor[own].T).all(), name
        assert own_and_contiguous(dict(zip(rule.flax, parts, strict=True)), {"tensor": tensor})
        back = rule.joined(parts, own=True)
        assert (back == tensor).all() and back.flags.owndata
        assert rule.torch_shape([shape] * 3) == tensor.shape
    packed = rules.packed_attention("a", "b")[0]
    first, other = (parts_of(x, counted((12, 4), 0), [(4, 4)] * 3)[0] for x in (packed, weight))
    assert not (first == other).all()


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("widths", [(2, 2, 2), (1, 4)], ids=str)
def test_per_head_parts_of_any_width_come_back_bit_for_bit(heads: int, widths: tuple[int, ...]):
    names = tuple(f"part{i}" for i in range(len(widths)))
    rule = Rule("t", names, "(h part e) d -> d (h e)", {"h": heads})
    for dtype in DTYPES:
        tensor = any_bits((heads * sum(widths), 5), dtype, seed=heads)
        parts = parts_of(rule, tensor, [(5, heads * width) for width in widths])
        assert [part.shape for part in parts] == [(5, heads * width) for width in widths]
        assert rule.joined(parts, own=True).tobytes() == tensor.tobytes()


BIASES, NO_BIASES = {(True, None), (True, True)}, {(False, None), (False, False)}
NAMED = {"lesson10": BIASES | NO_BIASES}
NAMED |= {"deep_dive": BIASES, "marian": BIASES, "t5": NO_BIASES}
NAMED |= {"blog2023": BIASES | {(True, False)}}
NAMED |= {"from_scratch": BIASES | NO_BIASES | {(True, False), (False, True)}}


@pytest.mark.parametrize("name", NAMED)
def test_an_architecture_names_these_biases_and_refuses_others(name):
    named = set()
    for bias, attention in itertools.product((True, False), (None, True, False)):
        with contextlib.suppress(ConfigError):
            convert.weight_table(helpers.tiny(name, bias=bias, attention_bias=attention))
            named.add((bias, attention))
    assert named == NAMED[name]


def test_a_configuration_that_an_architecture_cannot_name_is_refused():
    message = r"architecture 'deep_dive' has no names for this configuration: .*output_bias"
    with pytest.raises(ConfigError, match=message):
        weight_table(helpers.tiny("deep_dive", source_vocab_size=13, tying="output"))
    with pytest.raises(ConfigError, match=r"architecture 'blog2023' has no names .*\.norm\.bias"):
        weight_table(helpers.tiny("blog2023", bias=False))
