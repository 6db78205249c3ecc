"""The recorder's numbers for others: a metrics endpoint, TensorBoard."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import RecorderArgumentError
from . import events
from .saving import ranks_here
from .totals import summary, totals


@dataclass(frozen=True)
class MetricsServer:
    """A running endpoint; :meth:`close` ends it."""

    host: str
    port: int
    server: Any
    thread: Any

    @property
    def url(self) -> str:
        """Where the numbers are."""
        return f"http://{self.host}:{self.port}/metrics"

    def close(self) -> None:
        """Stop answering and free the port."""
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def serve_metrics(port: int = 0, host: str = "127.0.0.1") -> MetricsServer:
    """Offer this rank's numbers to Prometheus at ``http://host:port/metrics``, from a thread.

    Port 0 picks a free one; ranks of one host need different ports. Needs ``prometheus_client``.
    """
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port < 65536:
        raise RecorderArgumentError("port", "a number from 0 to 65535", repr(port))
    try:
        import prometheus_client
    except ImportError as error:
        raise ImportError(
            "recorder.serve_metrics needs prometheus_client: pip install prometheus-client"
        ) from error
    registry = prometheus_client.CollectorRegistry()
    registry.register(_Numbers())
    try:
        server, thread = prometheus_client.start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        expected = f"a port that is free on {host}; 0 picks one ({error.strerror or error})"
        raise RecorderArgumentError("port", expected, repr(port)) from None
    return MetricsServer(host, server.server_port, server, thread)


class _Numbers:
    """What Prometheus collects, made when it asks."""

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        ranks = ranks_here()
        rank, done, lately = str(ranks[0] if ranks else 0), totals(), summary()
        counts = {
            "steps": ("Steps of wrapped models", done.steps),
            "collectives": ("Collectives called", done.collectives),
            "sent_bytes": ("Payload bytes put on the wire", done.bytes_sent),
            "late_collectives": ("Collectives that were explained", events.past.notes),
        }
        for name, (what, value) in counts.items():
            counter = CounterMetricFamily(f"paceline_{name}", what, labels=["rank"])
            counter.add_metric([rank], value)
            yield counter
        gauges = {
            "step_seconds": ("Median time of the latest steps", lately.step_seconds),
            "wait_share": ("Share of it spent waiting for other ranks", lately.wait_share),
        }
        for name, (what, value) in gauges.items():
            gauge = GaugeMetricFamily(f"paceline_{name}", what, labels=["rank"])
            gauge.add_metric([rank], value)
            yield gauge

    describe = collect


def to_tensorboard(writer: Any, step: int, prefix: str = "paceline") -> None:
    """Add this rank's numbers to a ``SummaryWriter`` (or anything with ``add_scalar``)."""
    done, lately = totals(), summary()
    scalars = {
        "step_seconds": lately.step_seconds,
        "wait_share": lately.wait_share,
        "collectives": done.collectives,
        "sent_bytes": done.bytes_sent,
    }
    for name, value in scalars.items():
        writer.add_scalar(f"{prefix}/{name}", value, step)
