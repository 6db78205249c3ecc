"""A mean that is waited for: divided once, and whoever waits later waits for that."""

from __future__ import annotations

import pytest
import torch

from paceline._exchange import weighted_mean
from paceline._exchange.weighted_mean import HEAD, Averaging
from paceline.groups import FINISHED


class Mark:
    """Plays a point in a stream, and counts who waits for it."""

    made: list[Mark]

    def __init__(self, device: object) -> None:
        self.joined = 0
        self.made.append(self)

    def join(self) -> None:
        self.joined += 1


@pytest.mark.parametrize("with_streams", [False, True])
def test_who_waits_a_second_time_waits_for_the_division(
    monkeypatch: pytest.MonkeyPatch, with_streams: bool
) -> None:
    Mark.made = []
    devices = {torch.device("cuda", 0)} if with_streams else set[torch.device]()
    monkeypatch.setattr(weighted_mean, "StreamMark", Mark)
    monkeypatch.setattr(weighted_mean, "devices_holding", lambda _tensors: devices)
    buffer = torch.full((4 + HEAD,), 4.0)
    buffer[-HEAD:] = 2.0
    averaging = Averaging(FINISHED, buffer, divides=True)
    for waited in (1, 2):
        averaging.wait()
        assert buffer[:-HEAD].eq(2).all()
        assert [mark.joined for mark in Mark.made] == [waited] * len(devices)
