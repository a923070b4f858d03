"""Training on simulated meshes of devices (:mod:`on_meshes`): the same updates as on one."""

import collections
import contextlib
import itertools
import math
import os
import pickle
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import filelock
import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import jax_transformer as jt
from jax_transformer import transformer
from jax_transformer.data.batches import Batch
from jax_transformer.errors import CheckpointError, ConfigError
from jax_transformer.nn import sharding
from jax_transformer.nn.sharding import FSDP, ROWS, TENSOR
from jax_transformer.storage.checkpoint import Checkpoint
from jax_transformer.training import devices, optimizer, run, step
from jax_transformer.training.devices import Devices
from jax_transformer.training.optimizer import OptimizerName, OptimizerOptions
from jax_transformer.training.options import MeshOptions, TrainOptions
from parity_tests import preset_names
from parity_tests.unit import helpers, on_meshes, runs
from parity_tests.unit.on_meshes import ONE
from parity_tests.unit.training.test_step import batch_of, strict_off

INDIVISIBLE = 29
"""A size of the vocabulary that no number of devices divides."""
SMALL, T5 = (("updates", "small"), ("updates", "t5"))
QUICK: list[tuple] = [(*SMALL, mesh) for mesh in (ONE, (1, 2, 2))]
MORE = ((2, 1, 2), (4, 1, 1), (1, 4, 1), (1, 1, 4), (2, 2, 1))
SLOW: list[tuple] = [(*SMALL, mesh) for mesh in (ONE, *MORE)]
THREE = (ONE, (2, 1, 2), (1, 4, 1))
SLOW += [("updates", preset, mesh) for preset in ("lesson10", "marian") for mesh in THREE]
SLOW += [(*T5, mesh, INDIVISIBLE) for mesh in THREE]
BEGINNINGS = [("beginning", "t5", mesh) for mesh in (ONE, (1, 2, 2))]
CONTINUED = ("continued", (2, 2, 1), (ONE, (1, 2, 2)))
EARLIER = [("opened", str(runs.ROOT / "parity_tests/v0_1/run"), mesh) for mesh in (ONE, (2, 2, 1))]
INITIALIZED = [("initialized", path, mesh) for _, path, mesh in EARLIER]
LOADING = ("loading", (2, 2, 1))
TRANSLATED = [("translated", ONE), ("translated", (2, 1, 2))]
QUICK += [*BEGINNINGS, CONTINUED, *EARLIER, *INITIALIZED, LOADING, *TRANSLATED]


def measured(cases: list[tuple], folder: Path, name: str) -> dict[tuple, Any]:
    """The results of the cases, which one process makes for all processes of the tests."""
    shared = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    path = shared / f"mesh-{name}.pickle"
    with filelock.FileLock(f"{path}.lock"):
        if not path.exists():
            four = dict(JAX_NUM_CPU_DEVICES="4", JAX_ENABLE_X64="1")
            program = ("-m", "parity_tests.unit.on_meshes", path)
            done = runs.python(*program, stdin=repr(cases), **four)
            assert done.returncode == 0, done.stderr
    return pickle.loads(path.read_bytes())


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> dict[tuple, Any]:
    return measured(QUICK, tmp_path_factory.getbasetemp(), "quick")


@pytest.fixture(scope="module")
def slow(tmp_path_factory) -> dict[tuple, Any]:
    return measured(SLOW, tmp_path_factory.getbasetemp(), "slow")


def several_devices(name: str, cases: list[tuple], *marks: pytest.MarkDecorator) -> list:
    several = [case for case in cases if case[0] == "updates" and case[2] != ONE]
    return [pytest.param(name, case, marks=marks, id=f"{name}-{case}") for case in several]


@pytest.mark.parametrize(
    ("cases", "case"),
    [*several_devices("quick", QUICK), *several_devices("slow", SLOW, pytest.mark.slow)],
)
def test_every_mesh_makes_the_updates_of_one_device(cases, case, request):
    """By one program, with every array laid out as planned."""
    results, (function, preset, mesh, *changes) = request.getfixturevalue(cases), case
    one, several = results[function, preset, ONE, *changes], results[case]
    assert several["programs"] == 1
    np.testing.assert_allclose(several["losses"], one["losses"], rtol=0, atol=1e-13)
    assert several["arrays"].keys() == one["arrays"].keys()
    for name, array in one["arrays"].items():
        assert helpers.furthest(several["arrays"][name], array) <= 1e-9, name
    sizes = dict(zip(sharding.MESH_AXES, mesh, strict=True))
    for name, spec in several["specs"].items():
        shape = one["arrays"][name].shape
        planned = devices.partition_spec(name.split("/")[-1], shape, sizes)
        assert PartitionSpec(*spec) == planned, name
    if mesh[1] * mesh[2] == 4:
        assert max(several["bytes"]) <= 0.3 * one["bytes"][0]


def test_every_mesh_begins_with_the_same_weights(quick):
    """Bit for bit: the layout changes no random number. Every array is divided from the start."""
    (one, undivided), (several, laid) = (quick[case] for case in BEGINNINGS)
    assert several == one
    assert {spec for spec, _ in undivided.values()} == {()}
    for name, (spec, shape) in laid.items():
        sizes = abstract_mesh(1, 2, 2).shape
        assert spec == tuple(devices.partition_spec(name.split("/")[-1], shape, sizes)), name


def test_a_run_continues_on_any_mesh(quick):
    result = quick[CONTINUED]
    assert len(result["loaded"]) == 3 and set(result["loaded"].values()) == {result["saved"]}
    uninterrupted, resumed = result["next"]
    assert resumed == uninterrupted != result["saved"], "bit for bit on the same mesh"


def test_a_run_of_version_0_1_continues_on_a_mesh(quick):
    one, several = (quick[case] for case in EARLIER)
    assert several == one


def test_a_resume_holds_the_state_once(quick):
    """Parameters and two moments, and never a part of them on another device."""
    assert 3 <= quick[LOADING] <= 3.1


def test_weights_of_init_go_to_their_devices_part_by_part(quick):
    """From the host: parameters and two moments, and never more of them on the first device."""
    one, several = (quick[case] for case in INITIALIZED)
    assert several["digest"] == one["digest"]
    assert one["of"] == 1 and 0.4 < several["of"] < 0.6
    for result in (one, several):
        assert set(result["at placing"]) == {0} and 3 <= result["most"] <= 3.1


def test_translations_divide_their_rows(quick):
    (one, undivided), (several, spec) = (quick[case] for case in TRANSLATED)
    assert np.array_equal(several, one) and len(np.unique(one)) > 3
    assert (undivided, spec) == ((), ("data",))


# The layout


def specs(tree, *mesh: int) -> dict[str, PartitionSpec]:
    """The spec of every array of a tree by its path."""
    shardings = on_meshes.leaves_by_path(devices.shardings(tree, abstract_mesh(*mesh)))
    return {path: leaf.spec for path, leaf in shardings.items()}


def abstract_mesh(*sizes: int) -> AbstractMesh:
    return AbstractMesh(sizes, sharding.MESH_AXES, (AxisType.Auto,) * 3)


def abstract_devices(*sizes: int) -> Devices:
    """Devices that are not there: enough for layouts and for lowered programs."""
    return helpers.stand_in(Devices, mesh=abstract_mesh(*sizes))


def shapes(config: jt.TransformerConfig) -> dict[str, jax.ShapeDtypeStruct]:
    return transformer.flatten(transformer.abstract(config))


PLAN = {
    "source_embedding.embedding": (TENSOR, FSDP),
    "output.kernel": (FSDP, TENSOR),
    "output.bias": (TENSOR,),
    "encoder.positions.table": (None, FSDP),
    "encoder.blocks.0.self_attention.query.kernel": (FSDP, TENSOR),
    "encoder.blocks.0.self_attention.key.kernel": (FSDP, TENSOR),
    "encoder.blocks.0.self_attention.value.kernel": (FSDP, TENSOR),
    "encoder.blocks.0.self_attention.out.kernel": (TENSOR, FSDP),
    "encoder.blocks.0.self_attention.query.bias": (TENSOR,),
    "encoder.blocks.0.self_attention.key.bias": (TENSOR,),
    "encoder.blocks.0.self_attention.value.bias": (TENSOR,),
    "encoder.blocks.0.self_attention.out.bias": (),
    "encoder.blocks.0.feed_forward.up.kernel": (FSDP, TENSOR),
    "encoder.blocks.0.feed_forward.down.kernel": (TENSOR, FSDP),
    "encoder.blocks.0.feed_forward.up.bias": (TENSOR,),
    "encoder.blocks.0.feed_forward.down.bias": (),
    "encoder.blocks.0.residuals.0.norm.scale": (),
}
GATED = {
    "encoder.relative.embedding": (None, TENSOR),
    "decoder.blocks.0.feed_forward.gate.kernel": (FSDP, TENSOR),
    "target_embedding.embedding": (TENSOR, FSDP),
}
BIASED = dict.fromkeys(
    ("output_bias", "logits_bias", "decoder.blocks.0.feed_forward.gate.bias"), (TENSOR,)
)


GATE = {"decoder.gated": True}


@pytest.mark.parametrize(
    ("preset", "changes", "plan"),
    [
        ("lesson10", {}, PLAN),
        ("t5", GATE, GATED),
        ("vaswani2017_base", GATE | dict(output_bias=True, logits_bias=True), BIASED),
    ],
)
def test_every_parameter_lies_as_planned(preset, changes, plan):
    planned = specs(shapes(helpers.tiny(preset, **on_meshes.SIZES, **changes)), 1, 2, 2)
    assert {name: tuple(planned[name]) for name in plan} == plan


@pytest.mark.parametrize("preset", preset_names.ALL)
def test_no_matrix_of_a_preset_is_replicated(preset):
    """A new layer needs a rule."""
    arrays = shapes(helpers.tiny(preset, **on_meshes.SIZES))
    spec_by_name = specs(arrays, 1, 2, 2)
    assert not [n for n, x in arrays.items() if len(x.shape) > 1 and tuple(spec_by_name[n]) == ()]


@pytest.mark.parametrize("name", list(OptimizerName))
def test_moments_and_the_average_lie_where_their_parameter_does(name):
    tx = optimizer.make(OptimizerOptions(name=name), 10)
    params = shapes(helpers.tiny("small", **on_meshes.SIZES))
    state = jax.eval_shape(lambda params: step.state_of(params, {}, tx, ema=True), params)
    spec_by_path = specs(state, 1, 2, 2)
    leaves = jax.tree_util.tree_leaves_with_path(state)
    followed = 0
    for path, leaf in leaves:
        parameter = params.get(getattr(path[-1], "key", ""))
        if parameter is not None and leaf.shape == parameter.shape:
            key = jax.tree_util.keystr(path, simple=True, separator="/")
            assert spec_by_path[key] == spec_by_path[f"params/{path[-1].key}"]
            followed += 1
    least = {OptimizerName.ADAMW: 4, OptimizerName.ADAM: 4, OptimizerName.ADAFACTOR: 2}
    assert followed >= len(params) * least.get(name, 3)


def test_adapters_lie_where_their_kernel_does():
    for kernel, (rows, columns) in {"query": (FSDP, TENSOR), "out": (TENSOR, FSDP)}.items():
        name = f"encoder.blocks.0.self_attention.{kernel}.kernel"
        adapters = {f"{name}.lora_a": (32, 4), f"{name}.lora_b": (4, 32), f"{name}.lora_scale": ()}
        sizes = abstract_mesh(1, 2, 2).shape
        lie = [tuple(devices.partition_spec(*each, sizes)) for each in adapters.items()]
        assert lie == [(rows,), (None, columns), ()]


@pytest.mark.parametrize(
    ("shape", "mesh", "expected"),
    [
        ((24, 32), (1, 2, 2), (TENSOR, FSDP)),
        ((29, 32), (1, 2, 2), (None, (TENSOR, FSDP))),
        ((29, 30), (1, 2, 2), (None, TENSOR)),
        ((24, 30), (1, 4, 2), ((TENSOR, FSDP),)),
        ((29, 31), (1, 2, 2), ()),
        ((24, 32), (4, 1, 2), (TENSOR,)),
        ((24, 32), (4, 1, 1), ()),
    ],
)
def test_an_axis_that_does_not_divide_goes_to_the_other_dimension(shape, mesh, expected):
    sizes = abstract_mesh(*mesh).shape
    spec = devices.partition_spec("target_embedding.embedding", shape, sizes)
    assert tuple(spec) == expected


def test_a_mesh_that_cannot_divide_the_model_is_refused():
    config = helpers.tiny("small", **on_meshes.SIZES)
    devices.check(config, MeshOptions(fsdp=2, tensor=4))
    with pytest.raises(ConfigError, match=r"mesh.fsdp=3 does not divide d_model=32"):
        devices.check(config, MeshOptions(fsdp=3))
    sizes = {"num_heads": 2, "d_ff": 66}.items()
    for side, (name, size) in itertools.product(("encoder", "decoder"), sizes):
        with pytest.raises(ConfigError, match=f"4 does not divide the {side}'s {name}={size}"):
            devices.check(config.with_sizes(**{f"{side}.{name}": size}), MeshOptions(tensor=4))


def test_axes_that_do_not_divide_the_devices_are_refused():
    with pytest.raises(ConfigError, match=r"mesh.fsdp=2 times mesh.tensor=3 does not divide 4 "):
        Devices.of(jax.devices()[:1] * 4, 2, 3)
    with pytest.raises(ConfigError, match=rf"devices=99, and JAX finds {jax.device_count()} "):
        Devices.take(99)
    with pytest.raises(ConfigError, match=r"mesh.tensor=0 must be at least 1"):
        TrainOptions(mesh=MeshOptions(tensor=0))


@pytest.mark.parametrize(
    ("mesh", "rows", "spec"),
    [
        ((1, 1, 1), 1, ()),
        ((2, 1, 1), 2, ("data",)),
        ((1, 2, 1), 2, (FSDP,)),
        ((1, 1, 2), 1, ()),
        ((2, 3, 5), 6, (ROWS,)),
    ],
)
def test_rows_are_divided_by_two_axes_and_constraints_act_on_each(mesh, rows, spec, monkeypatch):
    several, entered = abstract_devices(*mesh), []
    assert (several.row_shards, tuple(several.rows.spec)) == (rows, spec)
    assert tuple(several.replicated.spec) == ()
    monkeypatch.setattr(jax, "set_mesh", lambda mesh: entered.append(mesh) or jax.enable_x64(True))
    with several.context():
        assert entered == [several.mesh] * (mesh != (1, 1, 1))
    with jax.sharding.use_abstract_mesh(several.mesh):
        assert sharding.row_shards() == rows
        (divided,) = jax.make_jaxpr(sharding.divide_rows)(np.zeros((60, 3))).eqns
        assert tuple(divided.params["sharding"].spec) == spec
    assert sharding.row_shards() == 1


def test_the_first_devices_are_taken_in_the_order_of_the_axes(monkeypatch):
    twelve, one, asked = jax.devices()[:1] * 12, Devices.take(1), []
    assert one.key(3).sharding == one.replicated
    monkeypatch.setattr(jax, "devices", lambda: twelve)

    def make(*sizes, devices, **_):
        asked.append((*sizes, len(devices)))
        return one.mesh

    monkeypatch.setattr(jax, "make_mesh", make)
    for count, data in ((0, 2), (12, 2), (6, 1)):
        Devices.take(count, 2, 3)
        assert asked[-1] == ((data, 2, 3), ("data", "fsdp", "tensor"), count or 12)


def test_a_state_that_is_larger_than_the_memory_is_refused(monkeypatch):
    """On the CPU, all devices of this machine have to share it."""
    state = abstract_devices(1, 2, 2).abstract(
        {"query.kernel": jax.ShapeDtypeStruct((8, 6), np.float32), "x": np.zeros(3, np.int8)}
    )
    assert devices.bytes_of_a_device(state) == 8 * 6 * 4 // 4 + 3
    for platform, count, available in (("cpu", 1, 51), ("cpu", 2, 102), ("gpu", 2, 51)):
        limits: dict = {"SC_PAGE_SIZE": 1}
        device = SimpleNamespace(
            platform=platform, device_kind="X", memory_stats=lambda it=limits: it
        )
        mesh = SimpleNamespace(local_devices=[device] * count)
        several = helpers.stand_in(Devices, mesh=mesh)
        for limit in (available, available - 1):
            limits |= {"bytes_limit": limit, "SC_PHYS_PAGES": limit}
            monkeypatch.setattr(os, "sysconf", limits.get)
            with (
                pytest.raises(ConfigError, match="GiB of X, which has")
                if limit < available
                else contextlib.nullcontext()
            ):
                several.check_memory(state)
    for unknown in (None, {}):
        device.memory_stats = lambda it=unknown: it
        several.check_memory(state)


def test_a_process_keeps_its_part_of_an_array(monkeypatch):
    one, asked = Devices.take(1), []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(
        jax, "make_array_from_callback", lambda *arguments: asked.append(arguments) or one.key(0)
    )
    array = np.arange(12).reshape(6, 2)
    one.divide([array])
    ((shape, laid, part),) = asked
    assert (shape, laid) == ((6, 2), one.rows)
    assert np.array_equal(part((slice(2, 4), slice(None))), array[2:4])


def test_a_key_is_that_of_its_seed():
    keys = [jax.random.key_data(Devices.take(1).key(seed)) for seed in (0, 7)]
    assert np.array_equal(keys, [jax.random.key_data(jax.random.key(seed)) for seed in (0, 7)])


def test_a_run_begins_with_the_weights_of_its_seed_or_of_its_checkpoint(monkeypatch):
    config = helpers.tiny(num_layers=1)
    corpus = on_meshes.corpus_of(config)
    for seed in (0, 7):
        model = transformer.Transformer(config, rngs=nnx.Rngs(params=seed))
        state = strict_off(run.start)(TrainOptions(seed=seed), corpus, Devices.take(1), None)
        fresh = transformer.flatten(model, nnx.Param)
        assert fresh.keys() == state.params.keys()
        assert all(np.array_equal(state.params[name], array) for name, array in fresh.items())
    saved = helpers.stand_in(Checkpoint, path="checkpoints/4", step=4)
    monkeypatch.setattr(Checkpoint, "load", lambda *_: state)
    with pytest.raises(CheckpointError, match="checkpoints/4: holds step 0"):
        strict_off(run.start)(TrainOptions(), corpus, Devices.take(1), saved)


def test_a_vote_of_any_process_counts_some_steps_later():
    votes = devices.StopVotes(Devices.take(1), delay=2)
    assert [votes(step == 3) for step in range(1, 8)] == [False] * 4 + [True] + [False] * 2
    assert bool(votes._any(np.array([0, 1, 0], np.int32)))
    votes(True)
    assert (votes.now(True), votes.now(False)) == (True, False)
    assert not any(votes(False) for _ in range(3)), "a vote before a pause counts in it only"


def constraints(preset: str, mesh: AbstractMesh | None) -> collections.Counter:
    """The specs of the step's constraints, and how often each occurs, by the array's rank."""
    config = helpers.tiny(preset, **on_meshes.SIZES)
    model = transformer.abstract(config)
    params = transformer.flatten(model)
    tx = optimizer.make(OptimizerOptions(), 10)
    state = jax.eval_shape(lambda params: step.state_of(params, {}, tx), params)
    laid = None if mesh is None else devices.shardings(state, mesh)
    train = step.make_step(config, tx, 0.1, shardings=laid)
    counts: collections.Counter = collections.Counter()

    def visit(jaxpr) -> None:
        for equation in jaxpr.eqns:
            if equation.primitive.name == "sharding_constraint":
                spec = tuple(equation.params["sharding"].spec)
                counts[equation.outvars[0].aval.ndim, spec] += 1
            laid_out = equation.params.get("out_shardings", ())
            for laid, out in zip(laid_out, equation.outvars, strict=False):
                if isinstance(laid, jax.sharding.NamedSharding):
                    counts[out.aval.ndim, tuple(laid.spec)] += 1
            for value in equation.params.values():
                for each in value if isinstance(value, (tuple, list)) else (value,):
                    inner = getattr(each, "jaxpr", each)
                    if hasattr(inner, "eqns"):
                        visit(inner)

    with contextlib.nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh):
        batch = batch_of(config, 8)
        visit(strict_off(jax.make_jaxpr(train.one))(state, batch, jax.random.key(0)).jaxpr)
    return counts


def test_the_step_constrains_activations_gradients_and_the_new_state():
    """Each constraint of an activation is one of its gradient, too."""
    attentions, stacks, tables = 3, 2, 3  # one table, looked up twice and transposed once
    counts = constraints("small", abstract_mesh(1, 2, 2))
    activations = {
        (4, (FSDP, None, TENSOR)): 2 * 3 * attentions,
        (3, (FSDP, None, TENSOR)): 2 * (stacks + 1),  # feed-forward and logits
        (3, (FSDP,)): 2 * 2 * stacks,  # embeddings and blocks
        (2, (TENSOR,)): 2 * tables,
    }
    assert {each: counts[each] for each in activations} == activations
    params = len(shapes(helpers.tiny("small", **on_meshes.SIZES)))
    scalars = 3  # the step, and the counts of Adam and of the schedule
    state = counts.total() - sum(activations.values())
    assert state == (1 + 3) * params + scalars, "gradients, parameters and two moments"


VOCABULARIES = ("source_vocab_size", "target_vocab_size")
MAIN = re.compile(r"func.func public @main\((.*?)\) -> \((.*?)\) \{\n", re.DOTALL)
FLOATS = re.compile(r"tensor<([\dx]+)xf\d+>")
LAID = re.compile(r"sdy.sharding<@mesh, (\[.*?\])>")


@pytest.mark.parametrize("chunks", [1, 3])
def test_every_program_keeps_the_layout_of_a_state_and_takes_its_memory(chunks):
    """For one batch and for several. In chunks no array has all logits, in any order of axes."""
    several = abstract_devices(1, 2, 2)
    options = TrainOptions(loss_chunks=chunks, optimizer=OptimizerOptions(ema=0.9))
    config = helpers.tiny("small", **on_meshes.SIZES | dict.fromkeys(VOCABULARIES, 40))
    state = run.abstract_state(options, config, several)
    ids = jax.ShapeDtypeStruct((8, 6), np.int32, sharding=several.rows)
    batch, key = Batch(ids, ids, ids), jax.eval_shape(lambda: jax.random.key(0))
    train = run.make_step(options, config, state)
    with jax.sharding.use_abstract_mesh(several.mesh), jax.numpy_dtype_promotion("standard"):
        sums = several.abstract(jax.eval_shape(train.first, state, batch, key))
        arguments = {
            "one": (state, batch, key),
            "first": (state, batch, key),
            "further": (sums, state, batch, key, np.int32(1)),
            "finish": (state, sums),
        }
        traced = {name: getattr(train, name).trace(*each) for name, each in arguments.items()}
        valid = step.make_evaluation(config, chunks)
        traced["valid"] = valid.trace(state.ema | state.frozen, batch)
        texts = {
            name: each.lower(lowering_platforms=("cpu",)).as_text() for name, each in traced.items()
        }
    leaves = jax.tree.leaves(state)
    taken = dict(one=len(leaves), first=0, further=len(jax.tree.leaves(sums)), finish=len(leaves))
    for name, text in texts.items():
        inputs, outputs = MAIN.search(text).groups()
        donated = inputs.count("jax.buffer_donor") + inputs.count("tf.aliasing_output")
        assert donated == taken.get(name, 0), name
        sizes = {math.prod(map(int, each.split("x"))) for each in FLOATS.findall(text)}
        all_logits = 8 * 6 * config.target_vocab_size
        assert (all_logits in sizes) == (chunks == 1 and name != "finish"), name
        if name in ("one", "finish"):
            before = [LAID.findall(each) for each in re.split(r", (?=%arg)", inputs)]
            after = [LAID.findall(each) for each in re.split(r", (?=tensor)", outputs)]
            assert after[: len(leaves)] == before[: len(leaves)], name


def test_without_a_mesh_there_are_no_constraints():
    assert constraints("small", None) == {}


@pytest.mark.parametrize(
    ("shape", "axes", "mesh", "expected"),
    [
        ((8, 5, 8), (ROWS, FSDP, TENSOR), (2, 2, 4), (ROWS, None, TENSOR)),
        ((6, 5, 6), (ROWS, None, TENSOR), (2, 2, 4), ()),
        ((6,), (ROWS,), (1, 2, 2), (FSDP,)),
    ],
)
def test_every_dimension_is_divided_by_the_axes_that_can(shape, axes, mesh, expected):
    assert tuple(sharding.even_spec(shape, axes, abstract_mesh(*mesh).shape)) == expected
