"""A report of what the recorder itself wrote, by real processes over shared memory and gloo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline import DistributedDataParallel, recorder
from paceline.recorder.report import read_report
from paceline.recorder.report.late import calls_together, longest_waits, passes
from paceline.testing import Meeting, spawn_ranks

STEPS = 6


def train_and_save(meeting: Meeting, backend: str, folder: str) -> None:
    torch.manual_seed(0)
    group = meeting.new_group(backend)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.01)
    for _ in range(STEPS):
        ddp(torch.randn(4, 64)).sum().backward()
    group.all_reduce(torch.ones(3))
    recorder.save(folder)
    group.shutdown()


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_recorded_run_becomes_a_report_of_its_steps_buckets_and_messages(
    tmp_path: Path, backend: str
) -> None:
    spawn_ranks(2, train_and_save, backend, str(tmp_path))
    report = read_report(tmp_path)
    facts = report.facts
    assert report.notes == ()
    assert (facts.world_size, facts.backends) == (2, (backend,))
    assert [one.steps for one in facts.ranks] == [STEPS, STEPS]
    assert facts.median_step > 0
    assert 0 <= facts.late_share <= facts.wait_share < 1
    together = passes(report.run.logs)
    assert len({bucket for _, bucket, _ in together}) > 1
    assert all(set(each) == {0, 1} for each in together.values())
    assert len(facts.blame.steps) == STEPS
    assert any(band.operation == "all_reduce" and band.low == 10 for band in facts.sizes)
    waits = longest_waits(report.run.logs, together, calls_together(report.run.logs), most=1000)
    own = [wait for wait in waits if wait.what == "all_reduce"]
    assert own
    assert all("test_real.py:" in wait.line for wait in own)
    page = recorder.write_report(tmp_path)
    assert "test_real.py:" in page.read_text()
    events = json.loads((tmp_path / "trace.json").read_bytes())["traceEvents"]
    assert {e["name"] for e in events if e["ph"] == "X"} >= {"forward", "backward", "bucket 0"}
