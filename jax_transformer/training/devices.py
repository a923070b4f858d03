"""The devices of a run, the cache of programs compiled for them, and the record of both."""

import hashlib
import os
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_transformer.errors import ConfigError


@dataclass(frozen=True)
class Devices:
    """The devices that share every batch: rows are divided among them, weights are replicated.

    One device is a mesh of one. The arithmetic is written for the whole batch; XLA inserts the sums
    over devices (https://docs.jax.dev/en/latest/parallel.html).
    """

    mesh: Mesh
    """A mesh with one axis, ``data``."""

    @classmethod
    def take(cls, count: int = 0) -> "Devices":
        """The first ``count`` devices, all if 0. Raises ConfigError if there are fewer."""
        available = jax.devices()
        if count > len(available):
            raise ConfigError(
                f"devices={count}, and JAX finds {len(available)} ({available[0].device_kind})"
            )
        count = count or len(available)
        return cls(
            jax.make_mesh(
                (count,), ("data",), axis_types=(AxisType.Auto,), devices=available[:count]
            )
        )

    @property
    def count(self) -> int:
        return self.mesh.size

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of an array that is complete on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def rows(self) -> NamedSharding:
        """The sharding of an array whose first axis is divided among the devices."""
        return NamedSharding(self.mesh, PartitionSpec("data"))

    def replicate(self, tree: Any) -> Any:
        """Put every array on every device."""
        return jax.device_put(tree, self.replicated)

    def divide(self, batch: Any) -> Any:
        """Divide the rows of a batch, a multiple of :attr:`count`, among the devices."""
        return jax.device_put(batch, self.rows)


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
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    machine = {
        "device": jax.devices()[0].device_kind,
        "cores": cores,
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
            f"{name} {theirs.get(name)} -> {mine[name]}"
            for name in mine
            if theirs.get(name) != mine[name]
        ]
    return changed
