"""The devices that share every batch: rows are divided among them, weights are replicated.

One device is a mesh of one. The arithmetic is written for the whole batch; XLA inserts the sums
over devices (https://docs.jax.dev/en/latest/parallel.html).
"""

from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_transformer.errors import ConfigError


@dataclass(frozen=True)
class Devices:
    """A mesh with one axis, ``data``."""

    mesh: Mesh

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
