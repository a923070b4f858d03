"""The devices of a run, the cache of programs compiled for them, and the record of both."""

import contextlib
import hashlib
import math
import os
import platform
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PRNGKeyArray

from jax_transformer.errors import ConfigError
from jax_transformer.nn import sharding
from jax_transformer.runtime import distributed
from jax_transformer.training import partitioning


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
        """The first ``count`` devices, all if 0. Raises ConfigError if there are fewer, or if the
        axes do not divide them.
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
        shape = (len(devices) // (fsdp * tensor), fsdp, tensor)
        return cls(
            jax.make_mesh(
                shape, sharding.MESH_AXES, axis_types=(AxisType.Auto,) * 3, devices=devices
            )
        )

    @property
    def row_shards(self) -> int:
        """The number of parts that the rows of a batch are divided into."""
        return math.prod(self.mesh.shape[axis] for axis in sharding.ROWS)

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
        """Shapes, dtypes and shardings of a training state, or of a part of it."""
        return jax.tree.map(
            lambda x, laid: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=laid),
            tree,
            partitioning.shardings(tree, self.mesh),
        )

    def check_memory(self, state: Any) -> None:
        """Raise ConfigError if an abstract state takes more memory than a device has. On the CPU
        the devices of a process share the machine's.
        """
        own = self.mesh.local_devices
        if not own:  # other processes have all of the mesh
            return
        sharing = len(own) if own[0].platform == "cpu" else 1
        needed, available = bytes_of_a_device(state) * sharing, _memory_of(own[0])
        if available and needed > available:
            raise ConfigError(
                f"the weights and the optimizer state take {needed / 2**30:,.1f} GiB of "
                f"{own[0].device_kind}, which has {available / 2**30:,.1f}: choose a smaller "
                "model, or divide it over more devices with mesh.fsdp"
            )

    def key(self, seed: int) -> PRNGKeyArray:
        """The key of a seed, on every device."""
        return jax.jit(partial(jax.random.key, seed), out_shardings=self.replicated)()

    def place(self, tree: Any) -> Any:
        """Put every array of a state, or of a part of it, where the mesh divides it."""
        return sharding.place(tree, partitioning.shardings(tree, self.mesh))

    def divide(self, batch: Any) -> Any:
        """Divide the rows of a batch, a multiple of :attr:`row_shards`, among the devices."""
        return sharding.place(batch, jax.tree.map(lambda _: self.rows, batch))


def bytes_of_a_device(state: Any) -> int:
    """The bytes of an abstract state, or of a part of it, on one device."""
    return sum(
        math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        for array in jax.tree.leaves(state)
    )


def _memory_of(device: jax.Device) -> int:
    """The bytes that JAX can take of a device, or of the machine for a CPU; 0 if unknown."""
    if device.platform != "cpu":
        return int((device.memory_stats() or {}).get("bytes_limit", 0))
    if not hasattr(os, "sysconf"):
        return 0
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def use_cache(folder: str | None = None) -> None:
    """Keep JAX's compiled programs in ``folder``, to be read at the next start; ``none`` turns the
    cache off.

    By default they are in JAX_COMPILATION_CACHE_DIR, or in the user's cache folder if that is not
    set. A program fits one kind of processor, so each kind has its own subfolder.
    """
    current = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if folder == "none" or (folder is None and current):
        return
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = (Path(folder) if folder else home / "jax_transformer" / "compiled") / _processor()
    jax.config.update("jax_compilation_cache_dir", str(path.absolute()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def _processor() -> str:
    """Return a name for this kind of processor, by its instruction set if the system lists it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = [line for line in lines if line.startswith(("flags", "Features", "model name"))][:2]
    digest = hashlib.sha256(
        "\n".join([platform.machine(), platform.processor(), *features]).encode()
    ).hexdigest()
    return f"{platform.machine()}-{digest[:8]}"


def environment() -> dict[str, Any]:
    """Everything outside the run folder that a bit-exact continuation depends on.

    Versions, device, number of cores, and XLA's flags.
    """
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    machine = {
        "device": jax.devices()[0].device_kind,
        "cores": distributed.cores(),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
    }
    return {
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in packages},
        },
        "machine": machine,
    }


def environment_changes(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """The differences between two :func:`environment`, each as ``name before -> now``."""
    changed = []
    for group in ("versions", "machine"):
        mine, theirs = now[group], before.get(group, {})
        changed += [
            f"{name} {_shown(theirs.get(name))} -> {_shown(mine[name])}"
            for name in mine
            if theirs.get(name) != mine[name]
        ]
    return changed


def _shown(value: Any) -> str:
    return "unset" if value == "" else str(value)
