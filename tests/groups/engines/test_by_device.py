"""One group for several devices: calls find the engine of their tensors."""

from __future__ import annotations

import torch

from paceline.groups import Call
from paceline.groups.engines.by_device import DeviceEngine
from paceline.groups.engines.fake import FakeEngine


def test_a_call_goes_to_the_engine_of_its_tensors_which_is_opened_once() -> None:
    opened: list[torch.device] = []

    def open_meta(device: torch.device) -> FakeEngine:
        opened.append(device)
        return FakeEngine(0, 2)

    engine = DeviceEngine(FakeEngine(0, 2), {"meta": open_meta})
    assert {"cpu", "meta"} <= engine.capabilities.devices
    here, there = torch.ones(2), torch.ones(2, device="meta")
    engine.run(Call("barrier"))
    engine.run(Call("all_reduce", (here,), (here,), "sum"))
    assert opened == []
    engine.run(Call("all_reduce", (there,), (there,), "sum"))
    engine.start(Call("recv", (), (there,))).wait()
    assert opened == [torch.device("meta")]
    engine.abort()
    engine.shutdown()
