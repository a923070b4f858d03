"""Estimates of a training step: formula, reading of HLO, and the command."""

import contextlib
import dataclasses
import json
import math
import os
import sys
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import topologies as compilers

import jax_transformer as jt
from jax_transformer import cli, transformer
from jax_transformer.config import Remat, enums
from jax_transformer.data import prepared
from jax_transformer.data.batches import Batch
from jax_transformer.data.encoding import EncodedPairs, SpecialIds
from jax_transformer.errors import ConfigError
from jax_transformer.extras.estimate import command, estimate, hlo, text, topologies
from jax_transformer.extras.estimate.text import Text
from jax_transformer.extras.estimate.topologies import GIB, Topology
from jax_transformer.nn.embeddings import Frozen
from jax_transformer.training import run, step
from jax_transformer.training.optimizer import OptimizerName, OptimizerOptions
from jax_transformer.training.options import (
    DataOptions,
    LoraOptions,
    MeshOptions,
    ModelOptions,
    Precision,
    TrainOptions,
)
from parity_tests.unit import helpers
from parity_tests.unit.training import test_mesh

TINY = dict(d_model=16, num_heads=2, d_ff=32, encoder_layers=1, decoder_layers=1, max_length=8)
CPU = Topology("cpu", (1,))


@pytest.fixture(autouse=True)
def _as_the_command_runs():
    with jax.numpy_dtype_promotion("standard"), jax.enable_x64(False):  # Optax relies on the first
        yield


def products_of(jaxpr, times: int = 1) -> int:
    """The operations of all products in a traced function, a loop's as often as it runs."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape, out = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
            total += 2 * times * math.prod(out) * math.prod(shape[i] for i in contracted)
        inside = times * equation.params.get("length", 1)
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=is_traced):
            if is_traced(value):
                total += products_of(getattr(value, "jaxpr", value), inside)
    return total


def is_traced(value) -> bool:
    return hasattr(getattr(value, "jaxpr", value), "eqns")


WIDE = {"decoder.d_ff": 14, "decoder.num_heads": 2, "head_dim": 5, "decoder.gated": True}


@pytest.mark.parametrize(
    ("preset", "changes", "remat"),
    [
        ("lesson10", dict(source_vocab_size=13, target_vocab_size=17), "none"),
        ("bart", dict(encoder_layers=3, scan_layers=True) | WIDE, "minimal"),
        ("deep_dive", {}, "full"),
        ("part2_encoder", {}, "minimal"),
        ("longt5", {"encoder.local_radius": 1, "encoder.global_block_size": 2}, "full"),
    ],
)
def test_the_formula_counts_every_product_of_a_traced_step(preset, changes, remat):
    """Also those that the policy computes again. Sums of LongT5's blocks are left out, and JAX does
    not compute a pre-norm block's last product again."""
    config = helpers.tiny(preset, **dict(d_model=12, d_ff=10) | changes, remat=remat)
    rows, source, target = 3, 7, 5
    ids = [jax.ShapeDtypeStruct((rows, n), jnp.int32) for n in (source, target, target)]
    model = transformer.abstract(config)
    arrays = [transformer.flatten(model, kind) for kind in (nnx.Param, Frozen)]
    gradient = jax.grad(lambda *arrays: step.loss_sum(*arrays, config)[0])
    counted = products_of(jax.make_jaxpr(gradient)(*arrays, Batch(*ids)).jaxpr)
    sizes = config, rows, source, target
    ours = estimate.training_flops(*sizes) + estimate.recomputed_flops(*sizes)
    assert ours == pytest.approx(counted, rel=0.05 if preset == "longt5" else 0)


def test_local_attention_computes_whole_blocks_of_queries():
    """Four tokens, whose keys are three blocks, and one sum for every five tokens."""
    sizes = {"encoder.local_radius": 3, "encoder.global_block_size": 5}
    config = helpers.tiny("longt5", **sizes)
    width = config.heads(config.encoder) * config.head_width_of(config.encoder)
    for length, queries, keys in ((4, 4, 12), (5, 8, 13), (8, 8, 13), (10, 12, 14)):
        part = config, config.encoder, enums.Part.SELF, length, length
        assert estimate._attend(*part) == 2 * queries * keys * width
    spans = {enums.AttentionSpan.TRANSIENT_GLOBAL: 2, enums.AttentionSpan.LOCAL: 0}
    for span, keys in spans.items():
        stack = dataclasses.replace(config.encoder, attention_span=span)
        assert estimate._global_keys(stack, enums.Part.SELF, 10) == keys
        assert estimate._global_keys(stack, enums.Part.CROSS, 10) == 0


def test_the_traffic_of_a_loop_is_that_of_its_iterations():
    def steps(x, ws, unroll):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws, unroll=unroll)[0]

    def compiled(length, unroll=1):
        x, ws = jnp.ones((64, 128), jnp.float32), jnp.ones((length, 128, 128), jnp.float32)
        return jax.jit(steps, static_argnums=2).lower(x, ws, unroll).compile()

    def traffic(program):
        return hlo.traffic(program.as_text()).bytes

    five, ten, unrolled = compiled(5), compiled(10), compiled(5, unroll=5)
    assert traffic(unrolled) == pytest.approx(unrolled.cost_analysis()["bytes accessed"], rel=0.05)
    assert traffic(ten) == pytest.approx(2 * traffic(five), rel=0.05)
    assert traffic(five) > 3 * five.cost_analysis()["bytes accessed"]  # which counts one iteration


HLO = """\
HloModule jit_step, is_scheduled=true

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

%body (state: (s32[], bf16[4,8], bf16[3,8,8])) -> (s32[], bf16[4,8], bf16[3,8,8]) {
  %state = (s32[], bf16[4,8]{1,0}, bf16[3,8,8]{2,1,0:T(8,128)(2,1)}) parameter(0)
  %x = bf16[4,8]{1,0} get-tuple-element(%state), index=1
  %gathered = bf16[8,8]{1,0} all-gather(%x), replica_groups=[4,2]<=[8], dimensions={0}
  ROOT %new = (s32[], bf16[4,8]{1,0}, bf16[3,8,8]{2,1,0}) tuple(%x, %x, %x)
}

%cond (state: (s32[], bf16[4,8], bf16[3,8,8])) -> pred[] {
  %state = (s32[], bf16[4,8]{1,0}, bf16[3,8,8]{2,1,0}) parameter(0)
  %end = s32[] constant(3)
  ROOT %less = pred[] compare(%state, %end), direction=LT
}

ENTRY %main (x: bf16[4,8], ws: bf16[3,8,8]) -> f32[16] {
  %x = bf16[4,8]{1,0} parameter(0)
  %ws = bf16[3,8,8]{2,1,0} parameter(1)
  %y = f32[16]{0} parameter(2)
  %start = (s32[], bf16[4,8]{1,0}, /*index=2*/bf16[3,8,8]{2,1,0}) tuple(%x, %x, %ws)
  %while = (s32[], bf16[4,8]{1,0}, bf16[3,8,8]{2,1,0}) while(%start), condition=%cond, \
body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %begun = f32[16]{0:S(1)} all-reduce-start(%y), replica_groups={{0,1,2,3},{4,5,6,7}}, \
to_apply=%sum
  %ended = f32[16]{0} all-reduce-done(%begun)
  %other = f32[16]{0} all-reduce(%y), replica_groups=mesh['a'=2,'b'=4] {'b'}, to_apply=%sum
  ROOT %scattered = f32[8]{0} reduce-scatter(%ended), replica_groups=mesh['a'=8] {'a':(1)2}
}
"""


@pytest.mark.parametrize(("iterations", "times"), [("known", 3), ("", 3), ("unclear", 1)])
def test_collectives_are_counted_by_kind_and_dtype(iterations, times):
    """Compilers for TPUs leave out the number of iterations; the condition has it, or may have."""
    text = HLO if iterations == "known" else HLO.replace('"known_trip_count":{"n":"3"}', "")
    if iterations == "unclear":
        text = text.replace("  %end = ", "  %other = s32[] constant(7)\n  %end = ")
    collectives = hlo.traffic(text).collectives
    counted = {(x.kind, x.dtype): (x.count, x.bytes) for x in collectives}
    assert [x.bytes for x in collectives] == sorted(x.bytes for x in collectives)[::-1]
    assert counted == {
        ("all-gather", "bf16"): (times, times * 64),  # each time around the loop, one of two parts
        ("all-reduce", "f32"): (2, 2 * 96),  # 64 bytes, twice three quarters
        ("reduce-scatter", "f32"): (1, 32),
    }


def test_a_collective_in_several_fusions_of_a_tpu_counts_once():
    part = (
        "%part{i} (x: bf16[4,8]) -> bf16[8,8] {{\n  %x = bf16[4,8]{{1,0}} parameter(0)\n"
        "  ROOT %y = bf16[8,8]{{1,0}} all-gather(%x), channel_id={channel}, "
        'replica_groups=[4,2]<=[8], dimensions={{0}}, frontend_attributes={{chain_id="{i}"}}\n'
        "}}\n"
    )
    parts = [part.format(i=i, channel=channel) for i, channel in enumerate((7, 7, 8))]
    call = "  %z{0} = bf16[8,8]{{1,0}} fusion(%x), kind=kCustom, calls=%part{0}\n"
    calls = [call.format(i) for i in range(3)]
    entry = "ENTRY %main (x: bf16[4,8]) -> bf16[8,8] {\n  %x = bf16[4,8]{1,0} parameter(0)\n"
    (gathered,) = hlo.traffic("".join([*parts, entry, *calls, "}\n"])).collectives
    assert (gathered.count, gathered.bytes) == (2, 2 * 64)


GIVEN = """
  %x = f32[10,8] parameter(0)
  %u = f32[2,8] parameter(1)
  %i = s32[] parameter(2)
  %ids = s32[3,1] parameter(3)
  %rows = f32[3,8] parameter(4)
"""
FUSIONS = {
    "slice": "%b = f32[10,8] bitcast(%x)|ROOT %r = f32[2,8] dynamic-slice(%b, %i, %i)",
    "whole": "%r = f32[2,8] dynamic-slice(%x, %i, %i)|ROOT %n = f32[10,8] negate(%x)",
    "twice": "%r = f32[8,8] dynamic-slice(%x, %i, %i)|%s = f32[8,8] dynamic-slice(%x, %i, %i)|"
    "ROOT %n = f32[8,8] add(%r, %s)",
    "update": "ROOT %r = f32[10,8] dynamic-update-slice(%x, %u, %i, %i)",
    "flat": "%r = f32[10,8] dynamic-update-slice(%x, %u, %i, %i)|ROOT %b = f32[80] bitcast(%r)",
    "both": "%r = f32[10,8] dynamic-update-slice(%x, %u, %i, %i)|%n = f32[2,8] negate(%u)|"
    "ROOT %t = (f32[10,8], f32[2,8]) tuple(%r, %n)",
}


def program_of(instruction: str) -> str:
    """A program of one instruction and its arguments, and the fusions that it may call."""
    bodies = {f"%{name} ": body.replace("|", "\n  ") for name, body in FUSIONS.items()}
    bodies["ENTRY %main "] = f"ROOT %y = {instruction}"
    inputs = {name: GIVEN if "main" in name else GIVEN.rpartition("  %ids")[0] for name in bodies}
    return "".join(f"{name}() -> f32[] {{{inputs[name]}  {x}\n}}\n" for name, x in bodies.items())


@pytest.mark.parametrize(
    ("instruction", "moved"),
    [
        ("bf16[10,8]{1,0} convert(%x)", 320 + 160),
        ("pred[10,8]{1,0} compare(%x, %x), direction=LT", 640 + 80),
        ("s4[10,8] convert(%x)", 320 + 40),
        ("f8e4m3fn[10,8] convert(%x)", 320 + 80),
        ("c64[10,8] convert(%x)", 320 + 640),
        ("f32[8] reduce(%x, %i), dimensions={0}, to_apply=%sum", 320 + 4 + 32),
        ("f32[2,8] dynamic-slice(%x, %i, %i), dynamic_slice_sizes={2,8}", 2 * 64 + 8),
        ("f32[2,8] slice(%x), slice={[0:2], [0:8]}", 2 * 64),
        ("f32[3,8] gather(%x, %ids), slice_sizes={1,8}", 2 * 96 + 12),
        ("f32[10,8] dynamic-update-slice(%x, %u, %i, %i)", 2 * 64 + 8),
        ("f32[10,8] scatter(%x, %ids, %rows), to_apply=%sum", 3 * 96 + 12),
        ("(f32[10,8], f32[10,8], u32[]) copy-start(%x)", 2 * 320),
        ("f32[10,8] copy-done(%x)", 0),
        ("f32[80] bitcast(%x)", 0),
        ("(f32[10,8], s32[]) tuple(%x, %i)", 0),
        # A fusion that takes a slice reads a slice, and one that updates in place writes the update
        ("f32[2,8] fusion(%x, %u, %i), calls=%slice", 64 + 4 + 64),
        ("f32[8,8] fusion(%x, %u, %i), calls=%twice", 320 + 4 + 256),  # the operand, once
        ("f32[10,8] fusion(%x, %u, %i), calls=%update", 64 + 4 + 64),
        ("f32[80] fusion(%x, %u, %i), calls=%flat", 64 + 4 + 64),
        ("(f32[10,8], f32[2,8]) fusion(%x, %u, %i), calls=%both", 64 + 4 + 64 + 64),
        ("f32[10,8] fusion(%x, %u, %i), calls=%whole", 320 + 4 + 320),
        ("f32[10,8]{1,0:T(8)S(1)} negate(%x)", 320),  # on a chip
        ("f32[10,8] call(%x, %u, %i), to_apply=%update", 136),
        ("f32[10,8] conditional(%i, %x, %u), branch_computations={%slice, %update}", 2 * 136),
    ],
)
def test_an_instruction_moves_its_operands_and_its_result(instruction, moved):
    assert hlo.traffic(program_of(instruction), on_chip="S(1)").bytes == moved


@pytest.mark.parametrize(
    ("opcode", "groups", "sent"),
    [
        ("all-gather", "{{0,1,2,3}}", 3 * 320),  # its own part to each of the three others
        ("all-gather", "{{0}}", 0),
        ("all-reduce", "[2,5]<=[10]", 2 * 4 * 320 / 5),
        ("reduce-scatter", "{{0,1}}", 160),
        ("all-to-all", "mesh['a'=2,'b'=4] {'a','b'}", 7 * 320 / 8),
        ("all-to-all", "mesh['a'=2,'b'=4] {'b':(1)2}", 320 / 2),
        ("collective-permute", "{{0,1}}", 320),
        ("collective-broadcast", "{{0,1}}", 320),
        ("all-reduce-start", "{{0,1}}", 320),
        ("all-reduce-done", "{{0,1}}", None),
        ("reduce", "{{0,1}}", None),
    ],
)
def test_a_device_of_a_ring_sends_its_share(opcode, groups, sent):
    text = program_of(f"f32[10,8] {opcode}(%x), replica_groups={groups}")
    assert [each.bytes for each in hlo.traffic(text).collectives] == [sent] * (sent is not None)


# The figures of a step


def test_the_memory_is_what_the_compiler_says():
    """A donated argument's memory is the result's."""
    names = ("argument", "output", "alias", "temp", "generated_code")
    sizes = dict(zip(names, (1000, 700, 600, 50, 7), strict=True))
    sizes = {f"{name}_size_in_bytes": size for name, size in sizes.items()}
    compiled = SimpleNamespace(memory_analysis=lambda: SimpleNamespace(**sizes))
    memory = estimate._memory(900, compiled, 0)
    assert memory == estimate.Memory(900, 1000, 50, 107) and memory.peak == 1157
    assert estimate._memory(900, None, 2000).peak == 2000


def options_of(accumulate=1, name="adamw", ema=0.0, mesh=(1, 1), freeze=(), tokens=32, **model):
    return TrainOptions(
        model=ModelOptions(**TINY | model),
        data=DataOptions(vocab_size=12, tokens_per_batch=tokens),
        optimizer=OptimizerOptions(accumulate=accumulate, name=OptimizerName(name), ema=ema),
        mesh=MeshOptions(*mesh),
        freeze=freeze,
    )


@pytest.mark.parametrize(
    ("options", "copies"),
    [
        (options_of(accumulate=3, name="sgd", ema=0.9, precision=Precision.BFLOAT16), 3),
        (options_of(name="lion", freeze=("encoder.*",), remat=Remat.FULL), 2),
    ],
    ids=["sgd", "lion"],
)
def test_the_figures_of_a_step_are_sums_done_by_hand(options, copies, monkeypatch):
    """Parameters, moments and average in float32, sums of gradients, three arrays of ids."""
    one = hlo.Traffic(10, (hlo.Collective("all-reduce", "f32", 2, 5),))
    monkeypatch.setattr(hlo, "traffic", lambda text, on_chip: one)
    result = estimate.estimate(options, CPU, length=6)
    shapes = transformer.shapes(estimate.config_of(options))
    size = {name: math.prod(shape) for name, shape in shapes.items()}
    frozen = sum(size[name] for name in size if options.freeze and name.startswith("encoder."))
    trained = sum(size.values()) - frozen
    assert result.parameters == trained and bool(frozen) == bool(options.freeze)
    counters = result.memory.state - 4 * (copies * trained + frozen)
    assert counters in (8, 12)  # the step, and the counts of the schedule and of Adam
    each = options.optimizer.accumulate
    ids, key = 3 * 4 * result.shape.rows * 6, 8
    sums = 4 * (trained + 3) + 4 if each > 1 else 0  # gradients, two losses, tokens; a number
    assert (result.shape.rows, result.shape.length) == (32 // 6, 6)
    assert result.memory.arguments == result.memory.state + ids + key + sums
    assert 0 < result.memory.other < 2000, "the state takes the place of the one before"
    config = estimate.config_of(options)
    assert result.flops == each * estimate.training_flops(config, 5, 6, 6)
    assert result.recomputed == each * estimate.recomputed_flops(config, 5, 6, 6)
    collective = hlo.Collective("all-reduce", "f32", 2 * each, 5 * each)
    assert result.traffic == hlo.Traffic(10 * each, (collective,))
    half = options.model.precision is Precision.BFLOAT16
    h100 = dataclasses.replace(result, topology=Topology("h100", (1,)))
    assert h100.peak == (989.4e12 if half else 494.7e12)


@pytest.mark.parametrize(("kind", "products"), [("cpu", "medium"), ("h100", "highest")])
def test_products_in_bfloat16_are_those_of_the_device(kind, products, monkeypatch):
    """Those of the CPU demand layouts."""
    seen = []

    def lower(options, config, *_):
        seen.append((config.compute_dtype, config.matmul_precision))
        raise ConfigError("enough")

    monkeypatch.setattr(estimate, "lower", lower)
    monkeypatch.setattr(Topology, "devices", lambda _: jax.devices()[:1])
    medium = {"matmul_precision": enums.MatmulPrecision.MEDIUM}
    for options in (options_of(precision=Precision.BFLOAT16), options_of(**medium)):
        with pytest.raises(ConfigError, match="enough"):
            estimate.estimate(options, Topology(kind, (1,)), length=6)
    assert seen == [("bfloat16", products), (None, "medium")]


def test_a_model_that_exists_is_computed_as_the_options_say(monkeypatch):
    model = helpers.tiny("lesson10")
    monkeypatch.setattr(estimate.init_source, "read_config", lambda folder, options: model)
    options = ModelOptions(remat=Remat.FULL, scan_layers=True)
    config = estimate.config_of(TrainOptions(init="folder", model=options))
    assert config == model.with_sizes(remat="full", scan_layers=True)


@pytest.mark.parametrize(("unit", "size"), [("K", 2**10), ("M", 2**20), ("G", 2**30), ("T", 2**40)])
@pytest.mark.parametrize(
    "reason",
    [
        "Ran out of memory on HBM, the total memory required for HLO temporaries (1.50{}) exceeds "
        "available HBM (15.75G).",
        "XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 1.50{} of "
        "15.75G hbm.",
    ],
)
def test_the_compilers_refusal_says_what_is_needed(reason, unit, size):
    message = "RESOURCE_EXHAUSTED: " + reason.format(unit)
    assert estimate.needed_bytes(message) == 1.5 * size
    assert estimate.needed_bytes(message.replace("RESOURCE_EXHAUSTED", "INTERNAL")) == 0


def test_the_largest_batch_has_the_longer_side_and_rows_for_every_device():
    config = helpers.tiny("lesson10", max_length=8)
    for sides in ((5, 8), (8, 5)):
        limits = dict(zip(("max_source_length", "max_target_length"), sides, strict=True))
        options = TrainOptions(data=DataOptions(tokens_per_batch=100, **limits))
        shape = estimate.largest_batch(options, config, 0, 4)
        assert shape == estimate.Shape(12, 8), "a multiple of four within 100 tokens"
    assert estimate.largest_batch(options, config, 8, 5) == estimate.Shape(10, 8)
    packed = TrainOptions(data=DataOptions(tokens_per_batch=100, packing=7, **limits))
    for length, width in ((0, 7), (6, 6)):
        assert estimate.largest_batch(packed, config, length, 1) == estimate.Shape(
            100 // width, width
        )
    with pytest.raises(ConfigError, match=r"^--length 9 is over the model's 8$"):
        estimate.largest_batch(options, config, 9, 4)


def test_devices_are_those_of_the_topology(monkeypatch):
    monkeypatch.setattr(Topology, "devices", lambda self: jax.devices()[:1] * self.count)
    asked: list = []
    one = estimate.Devices.take(1)
    monkeypatch.setattr(estimate.Devices, "of", lambda *arguments: asked.append(arguments) or one)
    four, options = Topology("v5e", (2, 2)), options_of(mesh=(2, 3))
    for count, used in ((0, 4), (3, 3), (4, 4)):
        estimate.take(four, dataclasses.replace(options, devices=count))
        assert (len(asked[-1][0]), *asked[-1][1:]) == (used, 2, 3)
    with pytest.raises(ConfigError, match=r"^devices=5, and v5e:2x2 has 4$"):
        estimate.take(four, dataclasses.replace(options, devices=5))


# The command


def flags(**options):
    sizes = [f"--model.{name.replace('_', '-')}={size}" for name, size in TINY.items()]
    small = ["--data.vocab-size=11", "--data.tokens-per-batch=16"]
    more = [f"--{k}={v}" for k, v in options.items()]
    return ["estimate", "--topology=cpu:1", *sizes, *small, *more]


def test_a_step_that_does_not_fit_is_named_with_what_would_help(capsys):
    assert cli.main(flags(**{"device-memory": 8e-5, "optimizer.accumulate": 2})) == 1
    out = capsys.readouterr().out
    assert "temporaries" in out
    assert "does not fit; try more devices, or --model.remat full, or --model.scan-layers" in out


def test_a_state_that_is_too_large_is_not_compiled(monkeypatch, capsys):
    assert cli.main(flags(**{"device-memory": 1e-6, "model.remat": "full"})) == 1
    out = capsys.readouterr().out
    assert "the state alone is too large: nothing was compiled" in out
    assert "does not fit; try more devices, or --model.scan-layers" in out
    on_mesh = test_mesh.abstract_devices(2, 1, 2)
    monkeypatch.setattr(estimate, "take", lambda *_: on_mesh)
    monkeypatch.setattr(estimate, "lower", lambda *_: pytest.fail("compiled"))
    options = options_of(mesh=(1, 2), tokens=56)
    state = run.abstract_state(options, estimate.config_of(options), on_mesh)
    size = 0
    for leaf in jax.tree.leaves(state):
        size += leaf.size * leaf.dtype.itemsize // (1 + ("tensor" in leaf.sharding.spec))
    for memory in (1, size):
        result = estimate.estimate(options, Topology("v5e", (2, 2)), memory=memory)
        assert result.memory.peak == result.memory.state == size and result.available == memory
        assert not result.fits and result.traffic is None
        assert result.shape == estimate.Shape(6, 8), "a multiple of 2, and not of all 4 devices"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(freeze=("nothing",)), "freeze: nothing fits no parameter"),
        (dict(lora=LoraOptions(rank=17)), "lora.rank=17 does not fit"),
        (dict(mesh=MeshOptions(tensor=5)), "mesh.tensor=5 does not divide"),
        (dict(devices=2), "devices=2, and cpu:1 has 1"),
        (
            dict(data=DataOptions(max_target_length=9)),
            "data.max_target_length=9 is over the model's",
        ),
    ],
)
def test_what_train_refuses_has_no_estimate(changes, message, monkeypatch):
    monkeypatch.setattr(estimate, "lower", lambda *_: pytest.fail("compiled"))
    if "mesh" in changes:
        monkeypatch.setattr(estimate, "take", lambda *_: test_mesh.abstract_devices(1, 1, 5))
    with pytest.raises(ConfigError, match=message):
        estimate.estimate(dataclasses.replace(options_of(), **changes), CPU)


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        ("v5e:2x2", "needs the compiler for TPU v5e: pip install 'jax-seq2seq[estimate-tpu]'"),
        ("h200:1", "needs the compiler for NVIDIA H200 SXM: pip install"),
        ("h300:1", "no accelerator of v5e, v5p, v6e, h100, h200, cpu (did you mean 'h"),
        *((f"v5e:{size}", "give the size as in v5e:4x4") for size in ("4", "0x2", "2x2x2", "2x-2")),
        *((f"v5p:{size}", "give the size as in v5p:2x2x1") for size in ("2x2", "2x2x0")),
        *((f"h100:{size}", "give the size as in h100:8") for size in ("", "0", "2x2", "1.5")),
    ],
)
def test_a_topology_that_cannot_be_is_one_line(topology, message, monkeypatch, capsys):
    for module in ("libtpu", "jax_plugins"):
        monkeypatch.setitem(sys.modules, module, None)
    assert cli.main(["estimate", "--topology", topology]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize(
    ("state", "mesh", "sizes", "first", "rest"),
    [
        (51, (1, 2), {}, ["--mesh.fsdp 8"], ["full", "scan", "chunks", "bfloat16", "64"]),
        (50, (8, 2), {}, ["full", "scan", "chunks", "bfloat16", "64"], ["more devices"]),
        (51, (8, 1), dict(remat=Remat.FULL), ["--mesh.fsdp 16"], ["scan", "chunks", "bf", "64"]),
        (50, (8, 2), dict(scan_layers=True, precision=Precision.BFLOAT16), ["full", "chunks"], []),
    ],
)
def test_advice_begins_with_what_takes_most(state, mesh, sizes, first, rest):
    """The state, if it takes more than half; nothing that is set already, or cannot be."""
    options = options_of(mesh=mesh, tokens=129, **sizes)
    size = dict(zip(("fsdp", "tensor"), mesh, strict=True))
    memory = estimate.Memory(state, state, 200, 0)
    full = {"data": 16 // math.prod(mesh), **size}
    advice = command.advice(example(options=options, mesh=full, memory=memory, available=100))
    expected = first + rest
    assert all(word in each for word, each in zip(expected, advice, strict=False)), advice
    assert len(advice) == (4 if not rest else len(expected))
    data = dataclasses.replace(options.data, tokens_per_batch=1)
    small = dataclasses.replace(options, loss_chunks=2, data=data)
    advice = command.advice(example(options=small, mesh=full, memory=memory, available=100))
    assert "--data.tokens-per-batch 1" in advice and "chunks" not in " ".join(advice)


def test_a_step_has_no_time_if_a_figure_of_it_is_unknown():
    four = on_four_devices()
    assert four.times is not None
    assert dataclasses.replace(four, traffic=None).times is None
    assert dataclasses.replace(four, topology=Topology("cpu", (1,))).times is None


def test_a_step_that_takes_all_of_the_memory_fits():
    for available, fits in ((0, True), (319, False), (320, True), (321, True)):
        assert example(available=available).fits is fits
    assert not example(memory=estimate.Memory(1, 1, 0, 0, refused=2)).fits


SHEETS = {
    # GB/s, TFLOP/s of bfloat16 and float32, Gb/s that a device sends, GiB: of the vendors' pages
    "v5e": (819, 197, 197, 1600, 16),
    "v5p": (2765, 459, 459, 4800, 95.8),
    "v6e": (1638, 918, 918, 3200, 32),
    "h100": (3350, 989.4, 494.7, 3600, 80),
    "h200": (4800, 989.4, 494.7, 3600, 141),
}


def test_the_figures_of_accelerators_are_those_of_their_data_sheets(monkeypatch):
    assert {*SHEETS, "cpu"} == {*topologies.ACCELERATORS}
    for kind, (bandwidth, half, single, links, memory) in SHEETS.items():
        device = topologies.ACCELERATORS[kind]
        rates = (device.bandwidth, device.bfloat16, device.float32, device.links)
        assert rates == (bandwidth * 1e9, half * 1e12, single * 1e12, links * 1e9 / 8)
        assert 0.97 < device.memory / GIB / memory <= 1
        share = 0.75 if device.platform == "cuda" else 1
        monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
        assert Topology(kind, (1,)).usable == int(share * device.memory)
        monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
        assert Topology(kind, (1,)).usable == int((0.9 if share < 1 else 1) * device.memory)
        assert str(device.memory) in topologies._target(device)


@pytest.mark.parametrize(
    ("text", "count", "links", "asked"),
    [
        ("h100:1", 1, 450e9, "1x1x1"),
        ("h200:8", 8, 450e9, "1x1x8"),
        ("h100:24", 24, 50e9, "1x3x8"),
        ("h100:9", 9, 50e9, "more than 8 come in whole hosts"),
        ("v5e:1x1", 1, 200e9, (1, 1, 1)),
        ("v5e:4x8", 32, 200e9, None),
        ("v6e:2x2", 4, 400e9, None),
        ("v5p:2x3x1", 6, 600e9, None),
    ],
)
def test_the_compiler_is_asked_for_the_devices_of_a_topology(
    text, count, links, asked, monkeypatch
):
    topology = Topology.parse(text)
    assert (str(topology), topology.count, topology.links) == (text, count, links)
    monkeypatch.setattr(
        compilers, "get_topology_desc", lambda **arguments: SimpleNamespace(devices=(arguments,))
    )
    if str(asked).startswith("more"):
        with pytest.raises(ConfigError, match=asked):
            topology.devices()
        return
    (arguments,) = topology.devices()
    assert arguments["platform"] == topology.accelerator.platform
    if arguments["platform"] == "cuda":
        assert arguments["topology"] == asked
        return
    assert arguments["topology_name"] == text
    assert arguments.get("chips_per_host_bounds") == asked


def test_as_many_simulated_devices_are_used_as_the_topology_has(monkeypatch):
    three = [*jax.devices()[:1], object(), object()]
    monkeypatch.setattr(jax, "devices", lambda platform: three)
    for count in (1, 2, 3):
        assert Topology("cpu", (count,)).devices() == three[:count]
    with pytest.raises(ConfigError, match=r"has 3 simulated devices; start it with .*_count=4$"):
        Topology("cpu", (4,)).devices()


def test_a_compiler_finds_no_hardware(monkeypatch):
    monkeypatch.setattr(topologies, "_installed", lambda module: True)
    monkeypatch.setattr(os, "environ", {"JAX_PLATFORMS": "tpu", "TPU_MIN_LOG_LEVEL": "0"})
    topologies.prepare(CPU)
    assert os.environ["JAX_PLATFORMS"] == "tpu" and len(os.environ) == 2
    topologies.prepare(Topology("v5e", (1, 1)))
    assert (os.environ["JAX_PLATFORMS"], os.environ["CUDA_VISIBLE_DEVICES"]) == ("cpu", "")
    assert os.environ["JAX_ENABLE_COMPILATION_CACHE"] == "false"
    assert os.environ["TPU_MIN_LOG_LEVEL"] == "0" and os.environ["TPU_SKIP_MDS_QUERY"] == "1"
    assert os.environ["TPU_WORKER_HOSTNAMES"] == "localhost", "libtpu complains of none"
    for version in ("cuda12", "cuda13", "none"):  # one of them is enough
        monkeypatch.setattr(topologies, "_installed", lambda module, v=version: module.endswith(v))
        refused = pytest.raises(ConfigError, match=r"pip install 'jax-seq2seq\[estimate-gpu\]'")
        with refused if version == "none" else contextlib.nullcontext():
            topologies.prepare(Topology("h100", (8,)))


def test_the_options_of_the_command_reach_the_estimate(monkeypatch, capsys):
    def estimated(options, topology, **arguments):
        return asked.append((options, topology, arguments)) or example()

    asked: list = []
    monkeypatch.setattr(estimate, "estimate", estimated)
    assert cli.main([*flags(length=5, **{"device-memory": 1.5, "mesh.fsdp": 2}), "--json"]) == 0
    assert cli.main(flags()) == 0
    data = json.loads(capsys.readouterr().out.splitlines()[0])
    assert data["parameters"] == 25 and data["text"] is None
    (options, topology, arguments), (_, _, usual) = asked
    assert (str(topology), options.mesh.fsdp, options.data.vocab_size) == ("cpu:1", 2, 11)
    assert arguments == dict(length=5, memory=3 * 2**29) and usual == dict(length=0, memory=0)
    pairs = {"pairs": 3, "pair-tokens": 7}
    assert cli.main([*flags(**pairs), "--json"]) == cli.main(flags(**pairs)) == 0
    data, *lines = capsys.readouterr().out.splitlines()
    assert json.loads(data)["text"]["tokens"] == 21 and lines[-2].startswith("3 pairs of 7 tokens")
    assert cli.main(flags(**{"pair-tokens": 7})) == 2
    assert "--pair-tokens has no meaning without --pairs" in capsys.readouterr().err
    for name in ("length", "device-memory", "pairs"):
        assert cli.main(flags(**{name: 0})) == 2
        assert "=0 must be above 0" in capsys.readouterr().err.replace("0.0", "0")


PRINTED = """\
vaswani2017_base: 1,234,567 trained parameters, bfloat16, batches of 6 x 40 tokens a side
4 x TPU v5e: data 2 x fsdp 1 x tensor 2
memory: 10.00 of 16.00 GiB a device
  state 3.000: parameters, optimizer, average
  arguments 4.000: the state and a batch
  temporaries 5.000
  program and results 1.000
operations: 2.36 TFLOP a device, 394 GFLOP of them to save memory
memory traffic: 4.91 GB a device
  all-reduce f32: 7, 1 GB sent by a device
  all-gather bf16: 3, 200 MB sent by a device
time of an update: 12.0 ms if all overlaps, 24.0 if nothing does (products 12.0, memory 6.0, \
links 6.0)
that is 60,000 to 120,000 tokens/s, both sides, and 42% to 83% of the peak
assumed, of a device: 197 TFLOP/s, 0.82 TB/s of memory, 200 GB/s of links, as its vendor states them
"""


def on_four_devices() -> estimate.Estimate:
    sent = [("all-reduce", "f32", 7, 10**9), ("all-gather", "bf16", 3, 2 * 10**8)]
    model = ModelOptions(preset="vaswani2017_base", precision=Precision.BFLOAT16)
    return example(
        options=TrainOptions(model=model, optimizer=OptimizerOptions(accumulate=3)),
        topology=Topology("v5e", (2, 2)),
        mesh={"data": 2, "fsdp": 1, "tensor": 2},
        parameters=1_234_567,
        shape=estimate.Shape(6, 40),
        memory=estimate.Memory(3 * GIB, 4 * GIB, 5 * GIB, GIB),
        available=16 * GIB,
        flops=4 * 197e12 * 0.010,
        recomputed=4 * 197e12 * 0.002,
        traffic=hlo.Traffic(4_914_000_000, tuple(hlo.Collective(*each) for each in sent)),
    )


def test_every_figure_is_printed_and_in_the_json():
    four = on_four_devices()
    assert "\n".join(command.lines(four)) + "\n" == PRINTED
    begun = dataclasses.replace(four, options=TrainOptions(init="runs/a"))
    assert next(command.lines(begun)).startswith("runs/a: 1,234,567 trained")
    fast = dataclasses.replace(four, flops=7.88e7, recomputed=0.0)
    assert "24.0 if nothing does" not in (text := "\n".join(command.lines(fast)))
    assert "12.0 if nothing does (products 0.0001, memory 6.0, links 6.0)" in text
    seconds = dict(products=0.012, memory=0.006, links=0.006, model=0.010, least=0.012, most=0.024)
    result = command.as_json(four)
    assert result.pop("seconds") == pytest.approx(seconds)
    sent = [dict(kind="all-reduce", dtype="f32", count=7, bytes=10**9)]
    sent += [dict(kind="all-gather", dtype="bf16", count=3, bytes=2 * 10**8)]
    assert result.pop("collectives") == sent
    parts = dict(state=3, arguments=4, temporaries=5, other=1, refused=0, peak=10, available=16)
    sizes = {"data": 2, "fsdp": 1, "tensor": 2}
    expected = dict(topology="v5e:2x2", devices=4, mesh=sizes, parameters=1_234_567)
    expected |= dict(rows=6, length=40, precision="bfloat16", fits=True, advice=[])
    expected |= dict(compile_seconds=1.3, flops=7.88e12, recomputed_flops=1.576e12)
    expected |= dict(traffic_bytes=4_914_000_000)
    assert result == expected | dict(memory_bytes={name: n * GIB for name, n in parts.items()})


def test_the_figures_of_a_corpus_are_sums_done_by_hand(monkeypatch):
    """An update has 3 batches of 6 rows of 40 tokens on either side, and takes 12 to 24 ms."""
    four = on_four_devices()
    corpus = Text(10**9, 50.0, four)
    assert list(corpus.lines()) == [
        "1,000,000,000 pairs of 50 tokens: 165.0 GB prepared, in 27.8 hours of a core",
        "an epoch: 34,722,223 updates if rows are full, 116 to 231 hours; read by 1 host at up "
        "to 0.4 MB/s",
    ]
    assert corpus.to_data() == {
        "pairs": 10**9,
        "tokens": 5 * 10**10,
        "bytes": 165 * 10**9,
        "core_seconds_of_prepare": 10**5,
        "updates": 34_722_223,
        "hosts": 1,
    }
    options = TrainOptions(data=DataOptions(vocab_size=2**16))
    assert Text(10, 5.0, example(options=options)).bytes == 10 * (8 * 4 + 55 + 4)
    assert list(Text(10, 5.0, example()).lines())[1] == "an epoch: 2 updates if rows are full"
    hosts = {"v5e": (4, 8), "v5p": (4, 4, 16), "h100": (24,), "h200": (3,), "cpu": (9,)}
    numbers = [Topology(*each).hosts for each in hosts.items()]
    assert numbers == [8, 64, 3, 1, 1]
    eight = dataclasses.replace(four, topology=Topology("v5e", (4, 8)))
    assert [*Text(10**9, 50.0, eight).lines()][1].endswith("read by 8 hosts at up to 0.049 MB/s")
    for side in ("source", "target"):
        config = jt.preset("lesson10", **{f"{side}_vocab_size": 2**16})
        monkeypatch.setattr(text, "config_of", lambda options, config=config: config)
        assert Text(10, 5.0, four).bytes == 10 * (8 * 4 + 55 + 4)


def test_the_bytes_of_a_corpus_are_those_of_its_folder(tmp_path):
    random = np.random.default_rng(0)
    sides = [[np.zeros(n, np.int32) for n in random.integers(20, 28, 60_000)] for _ in range(2)]
    pairs = EncodedPairs(*sides, SpecialIds(0, 1, 0, 2, 1), np.arange(60_000), 0)
    path, lengths = tmp_path / "a.array_record", pairs.lengths
    table = prepared.write_shard(path, pairs, lengths, np.dtype("<u2"))
    prepared.write_lengths(prepared.lengths_file(path), lengths, np.dtype("<u2"))
    shard = prepared.Shard(path.name, 0, "", 0, 0, 0, True, table, path.stat().st_size, "")
    prepared.write_index(tmp_path, (shard,), False)
    tokens = sum(len(ids) for side in sides for ids in side) / 60_000
    size = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert Text(60_000, tokens, example()).bytes == pytest.approx(size, rel=0.01)


def example(**changes: Any) -> estimate.Estimate:
    memory, shape = estimate.Memory(100, 110, 200, 10), estimate.Shape(2, 8)
    figures = TrainOptions(), CPU, {"data": 1}, 25, shape, memory, 0, 1e9, 0.0, None, 1.26
    return dataclasses.replace(estimate.Estimate(*figures), **changes)
