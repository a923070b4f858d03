"""Estimates of a training step: the formula against XLA, the reading of HLO, and the command."""

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import pytest

from jax_transformer import cli
from jax_transformer.extras.estimate import command, estimate, hlo
from jax_transformer.extras.estimate.topologies import Topology
from jax_transformer.training import run
from jax_transformer.training.options import ModelOptions, TrainOptions
from parity_tests.unit import helpers

TINY = dict(d_model=16, num_heads=2, d_ff=32, encoder_layers=1, decoder_layers=1, max_length=8)
CPU = Topology("cpu", (1,))


@pytest.fixture(autouse=True)
def _as_the_command_runs():
    with jax.numpy_dtype_promotion("standard"), jax.enable_x64(False):  # Optax relies on the first
        yield


def lowered(options, length):
    devices, config = estimate.take(CPU, options), estimate.config_of(options)
    shape = estimate.largest_batch(options, config, length, 1)
    state = run.abstract_state(options, config, devices)
    return config, shape, estimate.lower(options, config, state, shape, devices)


@pytest.mark.parametrize("preset", ["vaswani2017_base", "t5", "part2_encoder", "blog2023"])
def test_the_formula_counts_the_operations_that_xla_counts(preset):
    sizes = dict(d_model=512, num_heads=8, d_ff=1536, encoder_layers=2, decoder_layers=1)
    options = TrainOptions(model=ModelOptions(preset=preset, **sizes))
    options = dataclasses.replace(
        options, data=dataclasses.replace(options.data, vocab_size=5000, tokens_per_batch=480)
    )
    config, shape, program = lowered(options, length=40)
    counted = program.cost_analysis()["flops"]
    ours = estimate.training_flops(config, shape.rows, shape.length, shape.length)
    assert ours == pytest.approx(counted, rel=0.02)


def test_what_is_computed_again_depends_on_the_policy():
    config = helpers.tiny("vaswani2017_base", d_model=6, d_ff=5)
    rows, source, target = 3, 7, 5

    def again(remat):
        return estimate.recomputed_flops(config.with_sizes(remat=remat), rows, source, target)

    pairs = source * source + target * target + target * source
    projections = 6 * source + 6 * target  # four of a token's stack, and two of the other's
    weights = 2 * (projections * 6 * 6 + 2 * (source + target) * 6 * 5)
    assert again("none") == 0
    assert again("minimal") == 2 * rows * 2 * (2 * pairs * 6)
    assert again("full") == again("minimal") + 2 * rows * weights


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


@pytest.mark.parametrize("known", [True, False])
def test_collectives_are_counted_by_kind_and_dtype(known):
    """Compilers for TPUs leave out the number of iterations; the condition has it."""
    text = HLO if known else HLO.replace('"known_trip_count":{"n":"3"}', "")
    counted = {(x.kind, x.dtype): (x.count, x.bytes) for x in hlo.traffic(text).collectives}
    assert counted == {
        ("all-gather", "bf16"): (3, 3 * 64),  # three times around the loop, one of two parts
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
    calls = [
        f"  %z{i} = bf16[8,8]{{1,0}} fusion(%x), kind=kCustom, calls=%part{i}\n" for i in range(3)
    ]
    entry = "ENTRY %main (x: bf16[4,8]) -> bf16[8,8] {\n  %x = bf16[4,8]{1,0} parameter(0)\n"
    (gathered,) = hlo.traffic("".join([*parts, entry, *calls, "}\n"])).collectives
    assert (gathered.count, gathered.bytes) == (2, 2 * 64)


def test_arrays_on_the_chip_are_no_memory_traffic():
    text = "ENTRY %main (x: f32[8]) -> f32[8] {\n  %x = f32[8]{0} parameter(0)\n" + (
        "  %y = f32[8]{0:T(8)S(1)} negate(%x)\n  ROOT %z = f32[8]{0} negate(%y)\n}\n"
    )
    assert hlo.traffic(text).bytes == 4 * 32
    assert hlo.traffic(text, on_chip="S(1)").bytes == 2 * 32


@pytest.mark.parametrize(
    "message",
    [
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (1.50G) exceeds available HBM (15.75G).",
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space "
        "hbm. Used 1.50G of 15.75G hbm.",
    ],
)
def test_the_compilers_refusal_says_what_is_needed(message):
    assert estimate.needed_bytes(message) == 1.5 * 2**30
    assert estimate.needed_bytes(message.replace("RESOURCE_EXHAUSTED", "INTERNAL")) == 0


# The command


def flags(**options):
    sizes = [f"--model.{name.replace('_', '-')}={size}" for name, size in TINY.items()]
    small = ["--data.vocab-size=11", "--data.tokens-per-batch=16"]
    more = [f"--{k}={v}" for k, v in options.items()]
    return ["estimate", "--topology=cpu:1", *sizes, *small, *more]


def test_the_command_prints_memory_and_traffic(capsys):
    assert cli.main([*flags(), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    state = result["memory_bytes"]["state"]
    assert state == 3 * 4 * result["parameters"] + 3 * 4  # weights, two moments and three counters
    assert result["memory_bytes"]["arguments"] >= state
    assert (result["rows"], result["length"], result["fits"]) == (2, 8, True)
    assert result["seconds"] is None and result["traffic_bytes"] > 0


def test_a_step_that_does_not_fit_is_named_with_what_would_help(capsys):
    assert cli.main(flags(**{"device-memory": 8e-5, "optimizer.accumulate": 2})) == 1
    out = capsys.readouterr().out
    assert "temporaries" in out
    assert "does not fit; try more devices, or --model.remat full, or --model.scan-layers" in out


def test_a_state_that_is_too_large_is_not_compiled(capsys):
    assert cli.main(flags(**{"device-memory": 1e-6, "model.remat": "full"})) == 1
    out = capsys.readouterr().out
    assert "the state alone is too large: nothing was compiled" in out
    assert "does not fit; try more devices, or --model.scan-layers" in out


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        ("v5e:2x2", "needs the compiler for TPU v5e: pip install 'jax-seq2seq[estimate-tpu]'"),
        ("h200:1", "needs the compiler for NVIDIA H200 SXM: pip install"),
        ("h300:1", "no accelerator of v5e, v5p, v6e, h100, h200, cpu (did you mean 'h"),
        ("v5e:4", "give the size as in v5e:4x4"),
    ],
)
def test_a_topology_that_cannot_be_is_one_line(topology, message, monkeypatch, capsys):
    for module in ("libtpu", "jax_plugins"):
        monkeypatch.setitem(sys.modules, module, None)
    assert cli.main(["estimate", "--topology", topology]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_advice_begins_with_what_takes_most():
    sixteen = dataclasses.replace(example(), mesh={"data": 16}, available=150)
    assert command.advice(sixteen)[:2] == ["--mesh.fsdp 16", "--model.remat full"]
    small = dataclasses.replace(sixteen, memory=estimate.Memory(10, 20, 200, 10))
    assert command.advice(small)[::5] == ["--model.remat full", "--mesh.fsdp 16"]


def test_gpus_on_several_hosts_are_linked_by_the_network():
    assert Topology("h100", (8,)).links == 450e9
    assert Topology("h100", (16,)).links == 50e9
    assert Topology("v5e", (4, 4)).links == 200e9


def test_the_roofline_is_the_slowest_part_or_the_sum():
    v5e = dataclasses.replace(
        example(),
        topology=Topology("v5e", (2, 2)),
        mesh={"data": 4},
        flops=4 * 197e12 * 0.010,
        traffic=hlo.Traffic(round(819e9 * 0.006), (hlo.Collective("all-reduce", "f32", 1, 10**9),)),
    )
    times = v5e.times
    assert times.least == pytest.approx(0.010)
    assert times.most == pytest.approx(0.010 + 0.006 + 0.005)
    text = "\n".join(command.lines(v5e))
    assert "time of an update: 10.0 ms if all overlaps, 21.0 if nothing does" in text


def example():
    memory = estimate.Memory(100, 110, 200, 10)
    shape = estimate.Shape(2, 8)
    return estimate.Estimate(
        TrainOptions(), CPU, {"data": 1}, 25, shape, memory, 0, 1e9, 0.0, None, 1.0
    )
