"""The cost of a training step on devices that need not be there: memory, operations, traffic, time.

The step that ``train`` runs is compiled ahead of time for the devices of a topology, with their
layout. Nothing is allocated, and nothing runs. The floating-point operations are those of products
of matrices, by formula: XLA counts a loop's body once, and has no count at all for a GPU that is
not there. A product of (m, k) and (k, n) is 2·m·k·n operations. Elementwise work and look-ups are
not counted: for models of any size they are below two percent.
"""

import dataclasses
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_transformer.config import StackConfig, TransformerConfig, enums
from jax_transformer.data import batches, encoding
from jax_transformer.data.batches import Batch, PackedBatch
from jax_transformer.errors import ConfigError
from jax_transformer.extras.estimate import hlo
from jax_transformer.extras.estimate.hlo import Traffic
from jax_transformer.extras.estimate.topologies import Topology
from jax_transformer.training import corpus, init_source, run, trainable
from jax_transformer.training.devices import Devices, bytes_of_a_device, check
from jax_transformer.training.options import Precision, TrainOptions
from jax_transformer.training.step import TrainState


@dataclass(frozen=True)
class Shape:
    """The shape of the largest batch."""

    rows: int
    length: int
    """Tokens of each source and each target, padding included."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one device."""

    state: int
    """Parameters, optimizer state and moving average."""
    arguments: int
    """The state, and the rows of a batch."""
    temporaries: int
    """The most that the step has at a time next to its arguments."""
    other: int
    """The program, and results that do not take the place of an argument."""
    refused: int = 0
    """Bytes that are certainly too many: of the state, or what the compiler asked for when it
    refused the program. The parts are then unknown."""

    @property
    def peak(self) -> int:
        return self.refused or self.arguments + self.temporaries + self.other


@dataclass(frozen=True)
class Estimate:
    """The compiled step of a configuration on a topology."""

    options: TrainOptions
    topology: Topology
    mesh: dict[str, int]
    parameters: int
    shape: Shape
    memory: Memory
    available: int
    """Bytes of a device that a program can have; 0 if unknown."""
    flops: float
    """Operations of the model in an update, on all devices."""
    recomputed: float
    """Operations that the step adds to them, to save memory."""
    traffic: Traffic | None
    """None if the program was refused."""
    compile_seconds: float

    @property
    def devices(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def fits(self) -> bool:
        return not self.memory.refused and (
            not self.available or self.memory.peak <= self.available
        )

    @property
    def peak(self) -> float:
        """The operations of a device in a second, at most; 0 if unknown."""
        half = self.options.model.precision is Precision.BFLOAT16
        device = self.topology.accelerator
        return device.bfloat16 if half else device.float32

    @property
    def times(self) -> "Times | None":
        """The times of an update; None if the figures of the device or the traffic are unknown."""
        device = self.topology.accelerator
        if self.traffic is None or not device.bandwidth:
            return None
        sent = sum(each.bytes for each in self.traffic.collectives)
        return Times(
            (self.flops + self.recomputed) / self.devices / self.peak,
            self.traffic.bytes / device.bandwidth,
            sent / self.topology.links,
            self.flops / self.devices / self.peak,
        )


@dataclass(frozen=True)
class Times:
    """Seconds of an update, each as if it were the only work."""

    products: float
    memory: float
    links: float
    model: float
    """The products without what is computed again."""

    @property
    def least(self) -> float:
        """The seconds if all overlap."""
        return max(self.products, self.memory, self.links)

    @property
    def most(self) -> float:
        """The seconds if nothing overlaps."""
        return self.products + self.memory + self.links


def estimate(
    options: TrainOptions, topology: Topology, *, length: int = 0, memory: int = 0
) -> Estimate:
    """Compile the step of ``train`` and read its cost.

    ``length`` is the width of the largest batch, if not the longest that ``options`` allow;
    ``memory`` are the bytes of a device, if not the topology's.

    Raises ConfigError for options that ``train`` would refuse, and without the compiler.
    """
    devices = take(topology, options)
    config = config_of(options)
    if config.compute_dtype is not None and topology.accelerator.platform != "cpu":
        # Products as an accelerator computes them: those of this CPU demand layouts
        config = dataclasses.replace(config, matmul_precision=enums.MatmulPrecision.HIGHEST)
    check(config, options.mesh)
    if options.freeze or options.lora.rank:
        trainable.check(options, config)
    shape = largest_batch(options, config, length, devices.row_shards)
    state = run.abstract_state(options, config, devices)
    available = memory or topology.usable
    began = time.perf_counter()
    of_state = bytes_of_a_device(state)
    compiled, refused = None, of_state
    if not available or refused < available:  # otherwise there is no need to compile
        lowered = lower(options, config, state, shape, devices)
        on_gpu = topology.accelerator.platform == "cuda"  # kernels are not timed on one
        try:
            compiled = lowered.compile({"xla_gpu_autotune_level": 0} if on_gpu else {})
        except jax.errors.JaxRuntimeError as error:
            if not (refused := needed_bytes(str(error))):
                raise
    each = options.optimizer.accumulate
    sizes = shape.rows * each, shape.length, shape.length
    return Estimate(
        options,
        topology,
        dict(devices.mesh.shape),
        sum(math.prod(array.shape) for array in state.params.values()),
        shape,
        _memory(of_state, compiled, refused),
        available,
        training_flops(config, *sizes),
        recomputed_flops(config, *sizes),
        None if compiled is None else _traffic(compiled, topology, each),
        time.perf_counter() - began,
    )


def config_of(options: TrainOptions) -> TransformerConfig:
    """Return the model's configuration, without reading text or weights."""
    if options.init is not None:
        return options.model.executed(init_source.read_config(options.init, options.model))
    return corpus.model_config(options, encoding.named_tokenizer(options.data))


def take(topology: Topology, options: TrainOptions) -> Devices:
    """Return the mesh of the options on a topology. Raises ConfigError if it cannot be."""
    available = topology.devices()
    if options.devices > len(available):
        raise ConfigError(f"devices={options.devices}, and {topology} has {len(available)}")
    return Devices.of(available[: options.devices or None], options.mesh.fsdp, options.mesh.tensor)


def largest_batch(
    options: TrainOptions, config: TransformerConfig, length: int, rows_multiple: int
) -> Shape:
    """Return the widest bucket that training can have, or its packed rows, and their number."""
    width = length or options.data.packing or max(encoding.limits(options.data, config))
    if width > config.longest:
        raise ConfigError(f"--length {width} is over the model's {config.longest}")
    (rows,) = batches.rows_per_batch([width], options.data.tokens_per_batch, rows_multiple)
    return Shape(rows, width)


def lower(
    options: TrainOptions,
    config: TransformerConfig,
    state: TrainState,
    shape: Shape,
    devices: Devices,
) -> Any:
    """Return the step that training runs, traced for these shapes and layouts.

    With several batches an update, it is the program that adds a batch to the sums of those before.
    """
    train_step: Any = run.make_step(options, config, state)
    ids: Any = jax.ShapeDtypeStruct((shape.rows, shape.length), jnp.int32, sharding=devices.rows)
    packed = options.data.packing
    batch = PackedBatch(ids, ids, ids, (ids, ids)) if packed else Batch(ids, ids, ids)
    key = jax.eval_shape(lambda: jax.random.key(0)).update(sharding=devices.replicated)
    with devices.context():
        if options.optimizer.accumulate == 1:
            return train_step.one.lower(state, batch, key)
        sums = devices.abstract(jax.eval_shape(train_step.first, state, batch, key))
        return train_step.further.lower(sums, state, batch, key, np.int32(1))


def needed_bytes(message: str) -> int:
    """Return the bytes in a compiler's message that a program does not fit; 0 without one."""
    if "RESOURCE_EXHAUSTED" not in message:
        return 0
    units = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    match = re.search(r"(?:Used |temporaries \()([\d.]+)([KMGT])", message)
    return int(float(match[1]) * units[match[2]]) if match else 0


def _memory(of_state: int, compiled: Any, refused: int) -> Memory:
    if compiled is None:
        return Memory(of_state, of_state, 0, 0, refused)
    sizes = compiled.memory_analysis()
    results = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return Memory(
        of_state,
        sizes.argument_size_in_bytes,
        sizes.temp_size_in_bytes,
        results + sizes.generated_code_size_in_bytes,
    )


def _traffic(compiled: Any, topology: Topology, times: int) -> Traffic:
    """Return the traffic of one device in an update."""
    on_chip = "S(1)" if topology.accelerator.platform == "tpu" else None
    one = hlo.traffic(compiled.as_text(), on_chip=on_chip)
    every = [
        dataclasses.replace(each, count=each.count * times, bytes=each.bytes * times)
        for each in one.collectives
    ]
    return Traffic(one.bytes * times, tuple(every))


# Operations

BACKWARD = 2
"""Products of the backward pass for each of the forward pass: one for each factor's gradient."""


def training_flops(config: TransformerConfig, rows: int, source: int, target: int) -> float:
    """Return the operations of a step on ``rows`` pairs of these lengths, padding included."""
    logits = config.d_model * config.target_vocab_size * target
    forward = 2.0 * rows * (_blocks(config, source, target, _part) + logits)
    return (1 + BACKWARD) * forward


def recomputed_flops(config: TransformerConfig, rows: int, source: int, target: int) -> float:
    """Return the operations that a step adds because the backward pass computes them again.

    With ``config.remat`` "full" these are all of the blocks, with "minimal" the products of two
    activations.
    """
    if config.remat is enums.Remat.NONE:
        return 0.0
    again = _part if config.remat is enums.Remat.FULL else _attend
    return 2.0 * rows * _blocks(config, source, target, again)


def _blocks(config: TransformerConfig, source: int, target: int, of: Callable[..., int]) -> int:
    """Return the multiply-adds of all blocks for one pair, each part counted by ``of``."""
    total = 0
    for stack, queries in ((config.encoder, source), (config.decoder, target)):
        for part in (part for branch in stack.branches for part in branch.parts):
            keys = source if part is enums.Part.CROSS else queries
            total += stack.layers * of(config, stack, part, queries, keys)
    return total


def _part(
    config: TransformerConfig, stack: StackConfig, part: enums.Part, queries: int, keys: int
) -> int:
    """Return the multiply-adds of a part for ``queries`` tokens that see ``keys``."""
    d = config.d_model
    if part is enums.Part.FFN:
        return (3 if stack.gated else 2) * d * (stack.d_ff or config.d_ff) * queries
    tokens = queries + keys + _global_keys(stack, part, keys)
    projections = 2 * d * config.heads(stack) * config.head_width_of(stack) * tokens
    return projections + _attend(config, stack, part, queries, keys)


def _attend(
    config: TransformerConfig, stack: StackConfig, part: enums.Part, queries: int, keys: int
) -> int:
    """Return the multiply-adds of a part without weights: scores, and the mixing of values."""
    if part is enums.Part.FFN:
        return 0
    # nn/local_attention
    if part is enums.Part.SELF and stack.attention_span is not enums.AttentionSpan.FULL:
        block = stack.local_radius + 1
        queries, keys = -(-queries // block) * block, 3 * block + _global_keys(stack, part, keys)
    products = 1 if stack.mixing is enums.Mixing.SUMMED else 2
    return products * queries * keys * config.heads(stack) * config.head_width_of(stack)


def _global_keys(stack: StackConfig, part: enums.Part, keys: int) -> int:
    """Return the keys that are sums of tokens. Summing them is not counted."""
    sums = part is enums.Part.SELF and stack.attention_span is enums.AttentionSpan.TRANSIENT_GLOBAL
    return keys // stack.global_block_size if sums else 0
