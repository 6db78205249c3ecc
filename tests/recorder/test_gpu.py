"""On a GPU: what is recorded of one rank over NCCL."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import nn

import paceline
from paceline import recorder
from paceline.recorder import events

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def test_steps_buckets_and_collectives_over_nccl_are_recorded_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_SKIP_ALONE", "0")
    events.forget()
    store = torch.distributed.HashStore()
    with paceline.new_group(
        "nccl", timedelta(seconds=60), "cuda:0", store=store, rank=0, world_size=1
    ) as group:
        ddp = paceline.DistributedDataParallel(
            nn.Linear(64, 64).cuda(), device_ids=[0], process_group=group
        )
        for _ in range(4):
            ddp(torch.ones(2, 64, device="cuda")).sum().backward()
        torch.cuda.synchronize()
        recorder.save(tmp_path)
    (log,) = recorder.read_run(tmp_path)
    assert [step.number for step in log.steps] == [1, 2, 3, 4]
    assert {bucket.step for bucket in log.buckets} == {1, 2, 3, 4}
    reductions = [call for call in log.collectives if call.operation == "all_reduce"]
    assert len(reductions) >= 4
    assert all(call.finished >= call.began for call in reductions)
    assert recorder.write_report(tmp_path, tmp_path / "report.html").stat().st_size > 10_000
