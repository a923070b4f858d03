"""The mesh of devices that a run trains on, the layout of its state on them, and the agreement of
several processes on the step after which they stop.

:data:`PARTITION_RULES` is all there is to know of the layout, which the dotted names of the arrays
decide: an optimizer's moments, the moving average and low-rank adapters follow the parameter whose
name they have.
"""

import contextlib
import math
import os
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PRNGKeyArray

from jax_transformer.config import AttentionBackend, StackConfig, TransformerConfig
from jax_transformer.errors import ConfigError
from jax_transformer.nn import fused_attention, sharding
from jax_transformer.nn.sharding import FSDP, TENSOR
from jax_transformer.runtime import distributed
from jax_transformer.training.options import MeshOptions
from jax_transformer.weights.arrays import LORA_A, LORA_B

_INTO = ("query", "key", "value", "up", "gate", "output")
PARTITION_RULES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    *((f"{name}.kernel", (FSDP, TENSOR)) for name in _INTO),
    ("out.kernel", (TENSOR, FSDP)),
    ("down.kernel", (TENSOR, FSDP)),
    ("_embedding.embedding", (TENSOR, FSDP)),
    ("relative.embedding", (None, TENSOR)),  # buckets, heads
    ("positions.table", (None, FSDP)),
    ("stem.first.kernel", (None, FSDP, TENSOR)),  # frames, channels, d
    ("stem.second.kernel", (None, FSDP, TENSOR)),
    *((f"{name}.bias", (TENSOR,)) for name in _INTO),
    ("output_bias", (TENSOR,)),
    ("logits_bias", (TENSOR,)),
)
"""Endings of parameters' names, and the axis of the mesh that divides each dimension. What has no
rule is replicated: norms, and the biases of ``out`` and ``down``."""


def partition_spec(name: str, shape: Sequence[int], sizes: Mapping[str, int]) -> PartitionSpec:
    """Return the spec of the array ``name`` on a mesh of these ``sizes``.

    An axis that cannot divide its own dimension of a matrix divides the other one, if that is
    possible.
    """
    kernel = name.removesuffix(LORA_A).removesuffix(LORA_B)
    rule = next((axes for ending, axes in PARTITION_RULES if kernel.endswith(ending)), ())
    if name != kernel:  # adapters: (in, rank) and (rank, out)
        rule = (*rule[:1], None) if name.endswith(LORA_A) else (None, *rule[1:])
    if len(rule) != len(shape):  # a step, a scale, or a factored moment
        return PartitionSpec()
    dimensions: list[tuple[str, ...]] = [()] * len(shape)
    for axis in (TENSOR, FSDP):
        if axis not in rule:
            continue
        others = list(range(len(shape)))
        own = others.pop(rule.index(axis))
        for i in (own, *others):
            divided = (*dimensions[i], axis)
            if shape[i] % math.prod(map(sizes.__getitem__, divided)) == 0:
                dimensions[i] = divided
                break
    return sharding.spec_of(dimensions, sizes)


def shardings(tree: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Return the sharding of every array of a state on this mesh, by the last name in its path."""

    def sharding_of(path: Any, leaf: Any) -> NamedSharding:
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        name = names[-1] if names else ""
        return NamedSharding(mesh, partition_spec(name, leaf.shape, mesh.shape))

    return jax.tree.map_with_path(sharding_of, tree)


def constrain(tree: Any) -> Any:
    """Keep every array of a state where it lies, inside a jitted function."""
    mesh = jax.sharding.get_abstract_mesh()
    return tree if mesh.empty else jax.lax.with_sharding_constraint(tree, shardings(tree, mesh))


def check(config: TransformerConfig, options: MeshOptions) -> None:
    """Raise ConfigError if a mesh cannot divide the model or devices lack an attention backend."""
    sizes = [("fsdp", options.fsdp, "d_model", config.d_model)]
    for name in ("encoder", "decoder"):
        stack: StackConfig = getattr(config, name)
        heads, d_ff = config.heads(stack), stack.d_ff or config.d_ff
        sizes.append(("tensor", options.tensor, f"the {name}'s num_heads", heads))
        sizes.append(("tensor", options.tensor, f"the {name}'s d_ff", d_ff))
    for axis, parts, name, size in sizes:
        if size % parts:
            raise ConfigError(f"mesh.{axis}={parts} does not divide {name}={size}")
    fused_attention.check_kernel(config.attention_backend, config.compute_dtype)


def automatic_attention(config: TransformerConfig, *, packed: bool) -> TransformerConfig:
    """Return the configuration with the attention backend that ``auto`` is here, and print it."""
    reasons = []
    for backend in (AttentionBackend.CUDNN, AttentionBackend.TOKAMAX):
        try:
            config = fused_attention.with_kernel(config, backend, packed=packed)
        except ConfigError as error:
            reasons.append(str(error))
        else:
            distributed.say(f"model.attention_backend=auto is {backend}")
            return config
    distributed.say(f"model.attention_backend=auto is xla: {'; '.join(reasons)}")
    return config


@dataclass(frozen=True)
class Devices:
    """The devices that share every batch and, on the axes ``fsdp`` and ``tensor``, every weight.

    One device is a mesh of one. The arithmetic is written for the whole batch; XLA inserts the
    communication (https://docs.jax.dev/en/latest/parallel.html).
    """

    mesh: Mesh
    """A mesh with the axes of :data:`jax_transformer.nn.sharding.MESH_AXES`."""

    @classmethod
    def take(cls, count: int = 0, fsdp: int = 1, tensor: int = 1) -> "Devices":
        """Return the first ``count`` devices, all if 0. Raises ConfigError if there are fewer, or
        if the axes do not divide them.
        """
        available = jax.devices()
        if count > len(available):
            raise ConfigError(
                f"devices={count}, and JAX finds {len(available)} ({available[0].device_kind})"
            )
        return cls.of(available[: count or len(available)], fsdp, tensor)

    @classmethod
    def of(cls, devices: Sequence[jax.Device], fsdp: int = 1, tensor: int = 1) -> "Devices":
        """These devices, which need not be there: a topology has devices to compile for."""
        if len(devices) % (fsdp * tensor):
            raise ConfigError(
                f"mesh.fsdp={fsdp} times mesh.tensor={tensor} does not divide "
                f"{len(devices)} devices"
            )
        shape, types = (len(devices) // (fsdp * tensor), fsdp, tensor), (AxisType.Auto,) * 3
        return cls(jax.make_mesh(shape, sharding.MESH_AXES, axis_types=types, devices=devices))

    @property
    def row_shards(self) -> int:
        """The number of parts that the rows of a batch are divided into."""
        return math.prod(map(self.mesh.shape.__getitem__, sharding.ROWS))

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of an array that is complete on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def rows(self) -> NamedSharding:
        """The sharding of an array whose first axis is divided among the devices."""
        return NamedSharding(self.mesh, sharding.spec_of([sharding.ROWS], self.mesh.shape))

    def context(self) -> AbstractContextManager[Any]:
        """Make constraints on the layout take effect in what is traced meanwhile.

        There are none on one device, so its programs are those of a model without a mesh.
        """
        return jax.set_mesh(self.mesh) if self.mesh.size > 1 else contextlib.nullcontext()

    def abstract(self, tree: Any) -> Any:
        """Return shapes, dtypes and shardings of a training state, or of a part of it."""
        return jax.tree.map(
            lambda x, laid: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=laid),
            tree,
            shardings(tree, self.mesh),
        )

    def check_memory(self, state: Any) -> None:
        """Raise ConfigError if an abstract state takes more memory than a device has. On the CPU
        the devices of a process share the machine's.
        """
        own = self.mesh.local_devices
        if not own:  # other processes have all of the mesh
            return
        needed = bytes_of_a_device(state)
        if own[0].platform != "cpu":
            available = int((own[0].memory_stats() or {}).get("bytes_limit", 0))
        elif hasattr(os, "sysconf"):
            needed *= len(own)
            available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        else:
            available = 0  # unknown
        if available and needed > available:
            raise ConfigError(
                f"the weights and the optimizer state take {needed / 2**30:,.1f} GiB of "
                f"{own[0].device_kind}, which has {available / 2**30:,.1f}: choose a smaller "
                "model, or divide it over more devices with mesh.fsdp"
            )

    def key(self, seed: int) -> PRNGKeyArray:
        """Return the key of a seed, on every device."""
        return jax.jit(partial(jax.random.key, seed), out_shardings=self.replicated)()

    def place(self, tree: Any) -> Any:
        """Put every array of a state, or of a part of it, where the mesh divides it."""
        return sharding.place(tree, shardings(tree, self.mesh))

    def local_rows(self, count: int) -> np.ndarray:
        """Return the rows of a batch of ``count`` rows that devices of this process have."""
        own = self.rows.addressable_devices_indices_map((count,)).values()
        rows = (np.arange(count)[index] for index in own if index is not None)
        return np.unique(np.concatenate([np.zeros(0, np.int64), *rows]))

    def divide(self, batch: Any) -> Any:
        """Divide the rows of a batch, a multiple of :attr:`row_shards`, among the devices."""
        return sharding.place(batch, jax.tree.map(lambda array: self.rows, batch))


def bytes_of_a_device(state: Any) -> int:
    """Return the bytes of an abstract state, or of a part of it, on one device."""
    return sum(
        math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        for array in jax.tree.leaves(state)
    )


class StopVotes:
    """Every one of several processes votes after every step; a vote counts some steps later.

    So it is there when it is read, and no step waits for it.
    """

    def __init__(self, devices: Devices, delay: int):
        mesh = devices.mesh
        self._everywhere = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._any = jax.jit(jnp.max, out_shardings=devices.replicated)
        self._delay = delay
        self._votes: deque[jax.Array] = deque()

    def __call__(self, stop: bool) -> bool:
        """Return True if all processes stop after this step; ``stop`` is this process's vote."""
        self._votes.append(self._cast(stop))
        return len(self._votes) > self._delay and bool(self._votes.popleft())

    def now(self, stop: bool) -> bool:
        """Return True if any process votes so now: waits for all of them."""
        self._votes.clear()
        return bool(self._cast(stop))

    def _cast(self, stop: bool) -> jax.Array:
        votes = np.full(self._everywhere.mesh.size, stop, np.int32)
        return self._any(
            jax.make_array_from_callback(votes.shape, self._everywhere, lambda index: votes[index])
        )
