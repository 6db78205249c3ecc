"""What is recorded of ranks on a device, and the verdict on one that stays away."""

from __future__ import annotations

import contextlib
import io
import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline import DistributedDataParallel as DDP
from paceline import recorder
from paceline.recorder import comparing, events
from paceline.recorder.watch import watch
from paceline.testing import Meeting, spawn_ranks
from tests.ddp.toys import fill
from tests.recorder.patience import be_patient

from .machine import Machine, here
from .scene import Scene, on_ranks


@on_ranks
def test_steps_buckets_and_collectives_of_every_rank_are_recorded(scene: Scene) -> None:
    folder = scene.folder()
    events.forget()
    ddp = DDP(scene.place(fill(nn.Linear(64, 64))), process_group=scene.group)
    for _ in range(4):
        ddp(torch.ones(2, 64, device=scene.device)).sum().backward()
    scene.wait()
    recorder.save(folder)
    scene.group.barrier()
    logs = {log.rank: log for log in recorder.read_run(folder)}
    assert sorted(logs) == list(range(scene.size))
    for log in logs.values():
        assert [step.number for step in log.steps] == [1, 2, 3, 4]
        assert {bucket.step for bucket in log.buckets} == {1, 2, 3, 4}
        calls = [call for call in log.collectives if call.operation == "all_reduce"]
        assert len(calls) >= 4
        assert all(call.finished >= call.began for call in calls)
    scene.group.barrier()
    if scene.rank == 0:
        page = recorder.write_report(folder, folder / "report.html")
        assert page.stat().st_size > 10_000


class Ear(io.TextIOBase):
    """Stands in for stderr: keeps what the recorder says."""

    def __init__(self, awaited: str) -> None:
        self.said, self._awaited = "", awaited
        self.heard = threading.Event()

    def write(self, text: str) -> int:
        self.said += text
        if self._awaited in self.said:
            self.heard.set()
        return len(text)


PATIENCE = 20.0  # seconds


@on_ranks
def test_a_rank_that_stays_away_is_named_by_those_that_wait(scene: Scene) -> None:
    be_patient(PATIENCE)
    key = f"heard/{scene.gathered(time.time())[0]}"
    ear, ones = Ear("Rank 1 is missing"), torch.ones(4, device=scene.device)
    with scene.new_group() as group, contextlib.redirect_stderr(ear):
        group.all_reduce(ones)
        scene.wait()
        watch.look()
        events.calls.clear()  # else who comes late to the first makes all calls seem long
        recorder.configure(warn_after=0.5)
        try:
            store = scene.meeting.store(timedelta(seconds=2 * PATIENCE))
            if scene.rank == 0:  # says when it has heard, though its own thread waits
                threading.Thread(target=_tell, args=(ear, store, key), daemon=True).start()
            if scene.rank == 1:
                store.wait([key])  # the place where it is
            group.all_reduce(ones)
            scene.wait()
        finally:
            recorder.configure()
    if scene.rank == 0:
        assert ear.heard.is_set(), ear.said
        assert "test_recorder.py" in ear.said


def _tell(ear: Ear, store: Any, key: str) -> None:
    ear.heard.wait(PATIENCE)
    store.set(key, "yes" if ear.heard.is_set() else "no")


LONG = 8 * 10**9  # cycles: some seconds


@on_ranks(cuda=True)
def test_a_device_that_does_not_come_to_a_call_is_named_by_those_that_wait(scene: Scene) -> None:
    ear, ones = Ear("Rank 1 has made this call too"), torch.ones(4, device=scene.device)
    with scene.new_group() as group, contextlib.redirect_stderr(ear):
        group.all_reduce(ones)
        scene.wait()
        watch.look()
        events.calls.clear()  # else the first, which opens NCCL's group, makes all calls seem long
        recorder.configure(warn_after=0.5)
        try:
            if scene.rank == 1:
                torch.cuda._sleep(LONG)
            group.all_reduce(ones)
            scene.wait()
        finally:
            recorder.configure()
    if scene.rank == 0:
        assert ear.heard.is_set(), ear.said
        assert "its device is still busy" in ear.said


@on_ranks(cuda=True)
def test_a_wrapped_model_s_device_that_does_not_come_to_an_average_is_named(scene: Scene) -> None:
    ear = Ear("Rank 1 has made this call too")
    with scene.new_group() as group, contextlib.redirect_stderr(ear):
        ddp = DDP(scene.place(fill(nn.Linear(64, 64))), process_group=group)
        inputs = torch.ones(2, 64, device=scene.device)
        for number in range(4):
            if number == 3:
                watch.look()
                recorder.configure(warn_after=0.5)
            if number == 3 and scene.rank == 1:
                torch.cuda._sleep(LONG)
            ddp(inputs).sum().backward()
            scene.wait()
        recorder.configure()
    if scene.rank == 0:
        assert ear.heard.is_set(), ear.said
        assert "its device is still busy" in ear.said


# Calls that do not fit together. Processes of their own: who knows what becomes of such a call?


def _sum_unlike(meeting: Meeting, machine: Machine, shapes: Any, folder: Path) -> None:
    """Write down what this rank hears of an all-reduce that is another one on each rank."""
    be_patient(PATIENCE)
    comparing.EVERY = 0.1
    ear = Ear("is not the same on all ranks")
    with Scene.opened(meeting, machine) as scene, contextlib.redirect_stderr(ear):
        group = scene.new_group(backend=machine.torch_backend)
        group.all_reduce(torch.ones(4, device=scene.device))
        scene.wait()
        size, dtype = shapes[scene.rank]
        group.all_reduce(torch.ones(size, dtype=dtype, device=scene.device), async_op=True)
        store = meeting.store(timedelta(seconds=2 * PATIENCE))
        if scene.rank == 0:
            ear.heard.wait(PATIENCE)
            (folder / "said").write_text(ear.said)
            store.set("heard", "yes")
        store.wait(["heard"])
        os._exit(0)


@pytest.mark.parametrize(
    "other", [(8, torch.float32), (1 << 20, torch.float32), (4, torch.float16)], ids=str
)
def test_unequal_sizes_are_told_with_both_lines_whatever_the_engine_makes_of_them(
    other: tuple[int, torch.dtype], tmp_path: Path
) -> None:
    machine, shapes = here(), [(4, torch.float32), other]
    if machine.torch_backend == "gloo" and other[0] == 8:
        pytest.skip("gloo ends the process")
    env = machine.environment(2)
    spawn_ranks(2, _sum_unlike, machine, shapes, tmp_path, deadline=120, may_die=[0, 1], env=env)
    said = (tmp_path / "said").read_text()
    assert "call 2 of the group" in said
    assert "rank 0 called all_reduce SUM of float32[4] at " in said
    assert f"rank 1 called all_reduce SUM of {str(other[1])[6:]}[{other[0]}] at " in said
    assert "test_recorder.py:" in said
