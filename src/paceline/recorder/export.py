"""The recorder's numbers for others: a metrics endpoint, TensorBoard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from ..errors import RecorderArgumentError
from . import events
from .saving import ranks_here
from .totals import summary, totals


@dataclass(frozen=True)
class MetricsServer:
    """A running metrics endpoint."""

    host: str
    port: int
    server: Any
    thread: Any

    @property
    def url(self) -> str:
        """The address of the metrics."""
        return f"http://{self.host}:{self.port}/metrics"

    def close(self) -> None:
        """Stop serving and close the port."""
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def serve_metrics(port: int = 0, host: str = "127.0.0.1") -> MetricsServer:
    """Serve the metrics of this rank to Prometheus at ``http://host:port/metrics``.

    A thread answers. Port 0 picks a free port; ranks of one host need different ports. It needs
    ``prometheus_client``. With ``PACELINE_METRICS=PORT`` one endpoint serves all ranks of a host.
    """
    return serve(_NumbersHere(), port, host)


def serve(collector: Any, port: int, host: str) -> MetricsServer:
    """Answer at ``host:port`` with what ``collector`` collects."""
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port < 65536:
        raise RecorderArgumentError("port", "a number from 0 to 65535", repr(port))
    try:
        import prometheus_client
    except ImportError as error:
        raise ImportError(
            "recorder.serve_metrics needs prometheus_client: pip install prometheus-client"
        ) from error
    registry = prometheus_client.CollectorRegistry()
    registry.register(collector)
    try:
        server, thread = prometheus_client.start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        expected = f"a port that is free on {host}; 0 picks one ({error.strerror or error})"
        raise RecorderArgumentError("port", expected, repr(port)) from None
    return MetricsServer(host, server.server_port, server, thread)


class Numbers(msgspec.Struct, frozen=True):
    """What is told of one rank."""

    steps: int
    collectives: int
    sent_bytes: float
    late_collectives: int
    step_seconds: float
    wait_share: float


_COUNTS = {
    "steps": "Steps of wrapped models",
    "collectives": "Collectives called",
    "sent_bytes": "Payload bytes put on the wire",
    "late_collectives": "Collectives that were explained",
}
_GAUGES = {
    "step_seconds": "Median time of the latest steps",
    "wait_share": "Share of it spent waiting for other ranks",
}


def numbers_here() -> dict[int, Numbers]:
    """The numbers of this process, under its rank."""
    ranks, done, lately = ranks_here(), totals(), summary()
    own = Numbers(
        done.steps,
        done.collectives,
        done.bytes_sent,
        events.past.notes,
        lately.step_seconds,
        lately.wait_share,
    )
    return {ranks[0] if ranks else 0: own}


def families(found: Mapping[int, Numbers]) -> Iterator[Any]:
    """These numbers as Prometheus takes them, ranks as labels."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    for kind, names in ((CounterMetricFamily, _COUNTS), (GaugeMetricFamily, _GAUGES)):
        for name, what in names.items():
            family = kind(f"paceline_{name}", what, labels=["rank"])
            for rank, numbers in sorted(found.items()):
                family.add_metric([str(rank)], getattr(numbers, name))
            yield family


class _NumbersHere:
    """What Prometheus collects of this process, made when it asks."""

    def collect(self) -> Iterator[Any]:
        return families(numbers_here())

    describe = collect


def to_tensorboard(writer: Any, step: int, prefix: str = "paceline") -> None:
    """Write the metrics of this rank to a ``SummaryWriter`` (or anything with ``add_scalar``)."""
    done, lately = totals(), summary()
    scalars = {
        "step_seconds": lately.step_seconds,
        "wait_share": lately.wait_share,
        "collectives": done.collectives,
        "sent_bytes": done.bytes_sent,
    }
    for name, value in scalars.items():
        writer.add_scalar(f"{prefix}/{name}", value, step)
