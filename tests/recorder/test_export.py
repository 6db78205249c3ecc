"""The recorder's numbers for others."""

import urllib.request
from collections.abc import Iterator

import pytest
import torch

from paceline import recorder
from paceline.errors import RecorderArgumentError
from paceline.groups import Group
from paceline.recorder import events
from paceline.testing import run_ranks
from tests.recorder.test_saving import train


@pytest.fixture(autouse=True)
def recorded() -> Iterator[None]:
    events.forget()

    def one_rank(group: Group) -> None:
        train(group, 3)
        group.all_reduce(torch.ones(4))

    run_ranks(2, one_rank)
    yield
    events.forget()


def test_prometheus_reads_the_numbers_on_loopback() -> None:
    server = recorder.serve_metrics(0)
    try:
        assert server.host == "127.0.0.1"
        text = urllib.request.urlopen(server.url, timeout=10).read().decode()
        with pytest.raises(RecorderArgumentError, match=r"a port that is free on 127\.0\.0\.1"):
            recorder.serve_metrics(server.port)
    finally:
        server.close()
    values = dict(row.rsplit(" ", 1) for row in text.splitlines() if not row.startswith("#"))
    assert float(values['paceline_steps_total{rank="0"}']) == 6, "three of each rank"
    assert float(values['paceline_collectives_total{rank="0"}']) == recorder.totals().collectives
    assert float(values['paceline_sent_bytes_total{rank="0"}']) > 0
    assert float(values['paceline_step_seconds{rank="0"}']) > 0
    assert 0 <= float(values['paceline_wait_share{rank="0"}']) <= 1
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(server.url, timeout=10)


@pytest.mark.parametrize("port", [-1, 70000, "80", True])
def test_a_port_that_is_none_is_refused(port: object) -> None:
    with pytest.raises(RecorderArgumentError, match="port"):
        recorder.serve_metrics(port)  # type: ignore[arg-type]


def test_tensorboard_gets_one_scalar_for_each_number() -> None:
    class Writer:
        def __init__(self) -> None:
            self.seen: dict[str, tuple[float, int]] = {}

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.seen[name] = value, step

    writer = Writer()
    recorder.to_tensorboard(writer, 7)
    assert set(writer.seen) == {
        "paceline/step_seconds",
        "paceline/wait_share",
        "paceline/collectives",
        "paceline/sent_bytes",
    }
    assert all(step == 7 for _, step in writer.seen.values())
    assert writer.seen["paceline/sent_bytes"][0] > 0
