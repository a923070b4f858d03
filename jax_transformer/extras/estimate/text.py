"""The cost of a corpus on disk: bytes, the time of ``prepare``, and an epoch.

A test compares the bytes with a prepared folder's. The speed of ``prepare`` was measured.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jax_transformer.data.prepared import token_dtype
from jax_transformer.errors import counted
from jax_transformer.extras.estimate.estimate import Estimate, config_of

TOKENS_A_SECOND = 500_000
"""Tokens that a core of an Intel Xeon of 2026 prepares (``python benchmarks/prepare.py``)."""
_RECORD = 55
"""Bytes that ArrayRecord adds to each record."""


@dataclass(frozen=True)
class Text:
    """Pairs of which each has ``tokens`` tokens on both sides together."""

    pairs: int
    tokens: float
    estimate: Estimate

    @property
    def bytes(self) -> int:
        """Bytes of the prepared folder: records, files of lengths, and the index."""
        config = config_of(self.estimate.options)
        wide = max(config.source_vocab_size, config.target_vocab_size) >= 2**16
        numbers = self.tokens + 1 + 2  # the source's length, and both in the file of lengths
        number, of_index = token_dtype(wide).itemsize, 4 if self.pairs <= 2**32 else 8
        return round(self.pairs * (numbers * number + _RECORD + of_index))

    @property
    def core_seconds(self) -> float:
        """Seconds that ``prepare`` takes on one core."""
        return self.pairs * self.tokens / TOKENS_A_SECOND

    @property
    def updates(self) -> int:
        """Updates of an epoch whose rows are full."""
        shape, options = self.estimate.shape, self.estimate.options
        of_an_update = 2 * shape.rows * shape.length * options.optimizer.accumulate
        return -int(-self.pairs * self.tokens // of_an_update)

    def lines(self) -> Iterator[str]:
        yield (
            f"{self.pairs:,} pairs of {self.tokens:g} tokens: {self.bytes / 1e9:,.1f} GB prepared, "
            f"in {self.core_seconds / 3600:.3g} hours of a core"
        )
        line = f"an epoch: {self.updates:,} updates if rows are full"
        if (times := self.estimate.times) is not None:
            least, most = (self.updates * x for x in (times.least, times.most))
            hosts = self.estimate.topology.hosts
            line += (
                f", {least / 3600:.3g} to {most / 3600:.3g} hours; read by "
                f"{counted(hosts, 'host')} at up to {self.bytes / hosts / least / 1e6:.2g} MB/s"
            )
        yield line

    def to_data(self) -> dict[str, Any]:
        return {
            "pairs": self.pairs,
            "tokens": self.pairs * self.tokens,
            "bytes": self.bytes,
            "core_seconds_of_prepare": self.core_seconds,
            "updates": self.updates,
            "hosts": self.estimate.topology.hosts,
        }
