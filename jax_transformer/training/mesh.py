"""The devices that share every batch: rows are divided among them, weights are on each. One device is a mesh of one.

The arithmetic is written for the whole batch; XLA inserts the sums over devices (https://docs.jax.dev/en/latest/parallel.html).
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
        """The first ``count`` devices, all where 0. Raises ConfigError where there are not so many."""
        found = jax.devices()
        if count > len(found):
            raise ConfigError(
                f"devices={count}, and JAX finds {len(found)} ({found[0].device_kind})"
            )
        count = count or len(found)
        return cls(
            jax.make_mesh((count,), ("data",), axis_types=(AxisType.Auto,), devices=found[:count])
        )

    @property
    def count(self) -> int:
        return self.mesh.size

    @property
    def whole(self) -> NamedSharding:
        """An array that every device has whole."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def rows(self) -> NamedSharding:
        """An array whose first axis is divided among the devices."""
        return NamedSharding(self.mesh, PartitionSpec("data"))

    def replicate(self, tree: Any) -> Any:
        """Every array whole on every device."""
        return jax.device_put(tree, self.whole)

    def divide(self, batch: Any) -> Any:
        """The rows of a batch, a multiple of :attr:`count`, over the devices."""
        return jax.device_put(batch, self.rows)
