"""The agreement of several processes on the step after which all of them stop."""

from collections import deque

import jax
import jax.numpy as jnp
import numpy as np

from jax_transformer.runtime import distributed
from jax_transformer.training.devices import Devices


class StopVotes:
    """Every process votes after every step; a vote counts some steps later.

    So it is there when it is read, and no step waits for it. A single process needs no votes.
    """

    def __init__(self, devices: Devices, delay: int):
        mesh = devices.mesh
        self._everywhere = jax.sharding.NamedSharding(
            mesh, jax.sharding.PartitionSpec(mesh.axis_names)
        )
        self._any = jax.jit(jnp.max, out_shardings=devices.replicated)
        self._delay = delay
        self._votes: deque[jax.Array] = deque()

    def __call__(self, stop: bool) -> bool:
        """True if all processes stop after this step; ``stop`` is the vote of this process."""
        if distributed.count() == 1:
            return stop
        self._votes.append(self._cast(stop))
        return len(self._votes) > self._delay and bool(self._votes.popleft())

    def now(self, stop: bool) -> bool:
        """True if any process votes so now: waits for all of them."""
        if distributed.count() == 1:
            return stop
        self._votes.clear()
        return bool(self._cast(stop))

    def _cast(self, stop: bool) -> jax.Array:
        votes = np.full(self._everywhere.mesh.size, stop, np.int32)
        return self._any(
            jax.make_array_from_callback(votes.shape, self._everywhere, lambda index: votes[index])
        )
