"""``jax-transformer estimate``: what a training step needs, without the hardware; as lines for a
reader, and as JSON; with advice if the step does not fit.
"""

import dataclasses
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from jax_transformer.cli import config_file
from jax_transformer.cli.arguments import Command
from jax_transformer.config import Remat, option
from jax_transformer.config.option import Option
from jax_transformer.errors import ConfigError, check_numbers
from jax_transformer.extras.estimate import topologies
from jax_transformer.extras.estimate.topologies import GIB
from jax_transformer.training.options import Precision, TrainOptions

if TYPE_CHECKING:
    from jax_transformer.extras.estimate.estimate import Estimate, Times

UNCHANGING = """run resume steps seed log_every tensorboard wandb eval_* best_by patience keep*
    data.train* data.valid*"""
"""Options that change no step, and so are less often of interest."""
_STATE_ALONE = "the state alone is too large: nothing was compiled"
_REFUSED = "the compiler refused the program, and does not say more"


@dataclass(frozen=True)
class EstimateCommand:
    """Compile a training step for hardware that need not be there: memory, FLOPs, time."""

    topology: Annotated[str, Option(group="estimate", metavar="KIND:SIZE")]
    """Accelerators, for example v5e:4x4, v5p:2x2x1, v6e:2x2, h100:8, h200:1 or cpu:4."""
    length: int | None = None
    """Tokens of each source and target in a batch (default: the longest that the options allow)."""
    device_memory: float | None = None
    """GiB of each device (default: the accelerator's)."""
    pairs: int | None = None
    """Training pairs: estimate also what it takes to prepare and to read them."""
    pair_tokens: float = 60.0
    """Mean number of tokens of a pair, both sides together."""
    json: bool = False
    """Print one JSON object instead of lines."""
    config: Annotated[option.PathText | None, Option(group="run")] = None
    """YAML file of options, or a run's train_config.json; flags win."""
    architecture: option.Rare[option.Architecture | None] = None
    """Register an architecture of yours, my_file.py:NAME or package.module:NAME."""
    options: Annotated[option.Inline[TrainOptions], Option(rare=UNCHANGING)] = field(
        default_factory=TrainOptions
    )

    def __post_init__(self) -> None:
        names = "length device_memory pairs pair_tokens"
        check_numbers(self, "", names, "be above 0", lambda x: x > 0)
        if self.pairs is None and self.pair_tokens != type(self).pair_tokens:
            raise ConfigError("--pair-tokens has no meaning without --pairs")

    @classmethod
    def from_file(cls, path: str) -> "EstimateCommand":
        """Return the options of a file. Checks across several options run after the flags."""
        return cls("", config=path, options=config_file.read(TrainOptions, path))


def run(command: EstimateCommand) -> int:
    """Print the estimate and return the exit code: 1 if the step does not fit."""
    topology = topologies.Topology.parse(command.topology)
    topologies.prepare(topology)
    from jax_transformer.extras.estimate import estimate
    from jax_transformer.extras.estimate.text import Text

    print(f"compiling for {topology} ...", file=sys.stderr)
    memory = int((command.device_memory or 0) * GIB)
    result = estimate.estimate(command.options, topology, length=command.length or 0, memory=memory)
    of_text = None if command.pairs is None else Text(command.pairs, command.pair_tokens, result)
    if command.json:
        print(json.dumps(as_json(result) | {"text": of_text and of_text.to_data()}))
    else:
        print("\n".join([*lines(result), *(of_text.lines() if of_text else ())]))
    return 0 if result.fits else 1


def lines(estimate: "Estimate") -> Iterator[str]:
    """Yield the estimate: model, memory, operations, traffic, time, and what is assumed."""
    options, shape = estimate.options, estimate.shape
    name = options.model.preset if options.init is None else options.init
    mesh = " x ".join(f"{axis} {size}" for axis, size in estimate.mesh.items())
    device = estimate.topology.accelerator
    yield (
        f"{name}: {estimate.parameters:,} trained parameters, {options.model.precision.value}, "
        f"batches of {shape.rows} x {shape.length} tokens a side"
    )
    yield f"{estimate.devices} x {device.title}: {mesh}"
    yield from _memory_lines(estimate)
    devices = estimate.devices
    operations = _scaled((estimate.flops + estimate.recomputed) / devices, "FLOP")
    again = f", {_scaled(estimate.recomputed / devices, 'FLOP')} of them to save memory"
    yield f"operations: {operations} a device{again if estimate.recomputed else ''}"
    if estimate.traffic is not None:
        yield f"memory traffic: {_scaled(float(estimate.traffic.bytes), 'B')} a device"
        for each in estimate.traffic.collectives:
            yield (
                f"  {each.kind} {each.dtype}: {each.count:,}, "
                f"{_scaled(float(each.bytes), 'B')} sent by a device"
            )
    if (times := estimate.times) is not None:
        yield from _time_lines(estimate, times)
    if not estimate.fits:
        yield f"does not fit; try {', or '.join(advice(estimate))}"


def _memory_lines(estimate: "Estimate") -> Iterator[str]:
    memory = estimate.memory
    of = f" of {estimate.available / GIB:,.2f}" if estimate.available else ""
    yield f"memory: {memory.peak / GIB:,.2f}{of} GiB a device"
    yield f"  state {memory.state / GIB:,.3f}: parameters, optimizer, average"
    if memory.refused:
        yield f"  {_REFUSED if memory.refused > memory.state else _STATE_ALONE}"
    else:
        yield f"  arguments {memory.arguments / GIB:,.3f}: the state and a batch"
        yield f"  temporaries {memory.temporaries / GIB:,.3f}"
        yield f"  program and results {memory.other / GIB:,.3f}"


def _time_lines(estimate: "Estimate", times: "Times") -> Iterator[str]:
    device, topology = estimate.topology.accelerator, estimate.topology
    tokens = 2 * estimate.shape.rows * estimate.shape.length * estimate.options.optimizer.accumulate
    seconds = (times.least, times.most, times.products, times.memory, times.links)
    least, most, *parts = (f"{1e3 * x:,.1f}" if x >= 1e-3 else f"{1e3 * x:.2g}" for x in seconds)
    yield (
        f"time of an update: {least} ms if all overlaps, {most} if nothing does "
        "(products {}, memory {}, links {})".format(*parts)
    )
    yield (
        f"that is {tokens / times.most:,.0f} to {tokens / times.least:,.0f} tokens/s, both sides, "
        f"and {times.model / times.most:.0%} to {times.model / times.least:.0%} of the peak"
    )
    yield (
        f"assumed, of a device: {estimate.peak / 1e12:,.0f} TFLOP/s, "
        f"{device.bandwidth / 1e12:,.2f} TB/s of memory, {topology.links / 1e9:,.0f} GB/s of "
        "links, as its vendor states them"
    )


def advice(estimate: "Estimate") -> list[str]:
    """Return the options that would lower the memory, the most useful first."""
    options, model = estimate.options, estimate.options.model
    helpful = {
        "--model.remat full": model.remat is not Remat.FULL,
        "--model.scan-layers": not model.scan_layers,
        "--loss-chunks 8": options.loss_chunks == 1,
        "--model.precision bfloat16": model.precision is Precision.FLOAT32,
        f"--data.tokens-per-batch {max(1, options.data.tokens_per_batch // 2)}": True,
    }
    less_work = [option for option, helps in helpful.items() if helps]
    less_state = ["more devices"]
    if options.mesh.fsdp * options.mesh.tensor < estimate.devices:
        less_state = [f"--mesh.fsdp {estimate.devices // options.mesh.tensor}"]
    if estimate.memory.state > estimate.available / 2:
        return less_state + less_work
    return less_work + less_state


def as_json(estimate: "Estimate") -> dict[str, Any]:
    """Return the figures with their units in the names, and what they are of."""
    memory, times, traffic = estimate.memory, estimate.times, estimate.traffic
    return {
        "topology": str(estimate.topology),
        "devices": estimate.devices,
        "mesh": estimate.mesh,
        "parameters": estimate.parameters,
        "rows": estimate.shape.rows,
        "length": estimate.shape.length,
        "precision": estimate.options.model.precision.value,
        "fits": estimate.fits,
        "advice": [] if estimate.fits else advice(estimate),
        "memory_bytes": dataclasses.asdict(memory)
        | {"peak": memory.peak, "available": estimate.available},
        "flops": estimate.flops,
        "recomputed_flops": estimate.recomputed,
        "traffic_bytes": None if traffic is None else traffic.bytes,
        "collectives": [dataclasses.asdict(x) for x in (traffic.collectives if traffic else ())],
        "seconds": None
        if times is None
        else {**dataclasses.asdict(times), "least": times.least, "most": times.most},
        "compile_seconds": round(estimate.compile_seconds, 1),
    }


def _scaled(value: float, unit: str) -> str:
    """Return a value with three digits and the prefix of its unit."""
    for prefix, factor in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.0f} {unit}"


COMMAND = Command(
    EstimateCommand,
    run,
    examples=(
        "estimate --topology v5e:2x2 --model.preset marian --data.vocab-size 32000",
        "estimate --topology v5e:16x16 --model.preset vaswani2017_base --pairs 300000000",
        "estimate --topology h200:1 --config run.yaml --model.precision bfloat16 --json",
    ),
)
