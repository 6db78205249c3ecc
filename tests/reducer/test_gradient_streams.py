"""Which streams wait for which before a bucket leaves; streams are played by objects here."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline import Group
from paceline._reducer.bucket import Bucket
from paceline._reducer.gradient_streams import GradientStreams
from paceline.testing import run_ranks

from .test_reducer import SMALL, forward, reducer_of


class Stream:
    """One that notes for whom it waits."""

    def __init__(self) -> None:
        self.waited: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other)


class Device:
    """A device with a current stream."""

    def __init__(self) -> None:
        self.current = Stream()
        self.used: list[Tensor] = []


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device=None: device.current)
    monkeypatch.setattr(
        "paceline._reducer.gradient_streams.used_here", lambda grads: device.used.extend(grads)
    )
    return device


class Param:
    device = torch.device("cuda", 0)


def streams_of_a_model() -> GradientStreams:
    return GradientStreams([Param(), Param()])  # type: ignore[list-item]


def come_on(streams: GradientStreams, device: Device, *order: Stream) -> None:
    for stream in order:
        device.current = stream
        streams.note()


def test_one_stream_waits_for_nothing(device: Device) -> None:
    streams, grad = streams_of_a_model(), torch.ones(1)
    come_on(streams, device, device.current, device.current)
    streams.meet([grad])
    assert device.current.waited == []
    assert device.used == []


def test_the_stream_that_sends_waits_for_those_of_other_gradients(device: Device) -> None:
    streams, grad = streams_of_a_model(), torch.ones(1)
    slow, fast = Stream(), Stream()
    come_on(streams, device, slow, fast)
    streams.meet([grad, None])
    assert fast.waited == [slow]
    assert device.used == [grad]


def test_a_loop_that_changes_its_one_stream_does_not_wait_for_the_last(device: Device) -> None:
    streams, before, now = streams_of_a_model(), Stream(), Stream()
    come_on(streams, device, before)
    streams.pass_begins()
    come_on(streams, device, now)
    streams.meet([])
    assert now.waited == []
    assert not streams.are_several


def test_several_streams_are_known(device: Device) -> None:
    streams = streams_of_a_model()
    come_on(streams, device, Stream(), Stream())
    assert streams.are_several


def test_on_a_cpu_nobody_is_asked_for_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cuda, "current_stream")
    streams = GradientStreams([torch.ones(1)])
    streams.note()
    streams.meet([torch.ones(1)])


class Told(GradientStreams):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__([torch.ones(1)])
        self.said: list[str] = []
        self.several = False

    def pass_begins(self) -> None:
        self.said = []

    def note(self) -> None:
        self.said.append("comes")

    @property
    def are_several(self) -> bool:
        return self.several

    def meet(self, grads: Iterable[Tensor | None]) -> None:
        self.said.append("meet")


def test_a_reducer_meets_streams_before_buckets_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    launch, ranks = Bucket.launch, threading.local()

    def noted(bucket: Bucket, *arguments: Any, **keywords: Any) -> None:
        ranks.told.said.append("leaves")
        launch(bucket, *arguments, **keywords)

    monkeypatch.setattr(Bucket, "launch", noted)

    def one_rank(group: Group) -> list[list[str]]:
        reducer = reducer_of(group, count=6, cap_mb=SMALL)
        told = reducer.streams = ranks.told = Told()
        passes = []
        for number in range(4):
            told.several = number == 2
            forward(reducer, 1.0).backward()
            passes.append(told.said)
        return passes

    passes, _ = run_ranks(2, one_rank)
    first, *later = passes
    assert first == [*["comes"] * 6, "meet", *["leaves"] * first.count("leaves")]
    for said in later:  # never a bucket before a meeting of what has come
        assert said.index("meet") < said.index("leaves")
        assert said.count("meet") > 1
    few, _, all_heard = (said.count("comes") for said in later)
    assert all_heard > few  # several streams: every parameter is heard from then on
