"""Figures of the service in the format of Prometheus."""

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_PLAIN_0_0_4
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_LINES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """Counters and histograms of one service."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "jax_transformer_requests",
            "Translation requests by status code.",
            ["status"],
            registry=registry,
        )
        self.seconds = Histogram(
            "jax_transformer_request_seconds",
            "Seconds from a translation request to its answer.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.accepted = Counter(
            "jax_transformer_accepted_requests",
            "Translation requests that entered the queue.",
            registry=registry,
        )
        self.queued = Gauge(
            "jax_transformer_queued_lines", "Lines that wait for a batch.", registry=registry
        )
        self.batch_lines = Histogram(
            "jax_transformer_batch_lines", "Lines of a batch.", buckets=_LINES, registry=registry
        )
        self.batch_seconds = Histogram(
            "jax_transformer_batch_seconds",
            "Seconds of a batch on the device.",
            buckets=_SECONDS,
            registry=registry,
        )

    def text(self) -> bytes:
        """Return all figures as text."""
        return prometheus_client.generate_latest(self.registry)
