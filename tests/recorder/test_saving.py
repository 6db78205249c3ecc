"""What is saved, and the few numbers made of it."""

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline import recorder
from paceline.groups import Group
from paceline.recorder import events
from paceline.testing import Meeting, run_ranks, spawn_ranks
from tests.waiting import until


@pytest.fixture(autouse=True)
def empty() -> Iterator[None]:
    events.forget()
    yield
    recorder.configure()


def train(group: Group, steps: int = 4) -> None:
    ddp = paceline.DistributedDataParallel(nn.Linear(4, 2), process_group=group)
    for _ in range(steps):
        ddp(torch.ones(2, 4)).sum().backward()


def test_each_rank_that_is_a_thread_saves_what_is_its_own(tmp_path: Path) -> None:
    def one_rank(group: Group) -> None:
        train(group)
        if group.rank() == 1:
            group.send(torch.ones(1), 0)
        else:
            group.recv(torch.ones(1), 1)
        group.barrier()
        assert recorder.save(tmp_path, rank=group.rank()).exists()
        group.barrier()

    run_ranks(2, one_rank)
    first, second = recorder.read_run(tmp_path)
    assert (first.rank, second.rank, first.world_size) == (0, 1, 2)
    assert [s.number for s in first.steps] == [1, 2, 3, 4]
    assert {b.step for b in second.buckets} == {1, 2, 3, 4}
    assert [c.operation for c in first.collectives if not c.sequence] == ["recv"]
    assert [c.operation for c in second.collectives if not c.sequence] == ["send"]
    calls = [[c.sequence for c in log.collectives if c.sequence] for log in (first, second)]
    assert calls[0][: len(calls[1])] == calls[1][: len(calls[0])], "numbered alike on all ranks"
    assert all(c.finished >= c.began > 1.7e9 for c in first.collectives[:-1])


def save_both_ways(meeting: Meeting, folder: str) -> str:
    os.environ["PACELINE_RECORD"] = folder + "/at-exit"
    with meeting.new_group("gloo") as group:
        for _ in range(3):
            group.all_reduce(torch.ones(5))
    return str(recorder.save(folder))


def test_processes_save_when_asked_and_at_their_end(tmp_path: Path) -> None:
    paths = spawn_ranks(2, save_both_ways, str(tmp_path))
    assert [Path(path).name for path in paths] == ["rank-00000.json", "rank-00001.json"]
    for folder in (tmp_path, tmp_path / "at-exit"):
        logs = recorder.read_run(folder)
        assert [log.rank for log in logs] == [0, 1]
        for log in logs:
            assert (log.backend, log.world_size, log.clock_offset) == ("gloo", 2, 0.0)
            assert [c.sequence for c in log.collectives] == [1, 2, 3]
            assert all(c.shape == "float32[5]" and c.nbytes == 20 for c in log.collectives)
            assert all("test_saving.py:" in c.line for c in log.collectives)


def save_from_subgroups(meeting: Meeting, folder: str) -> None:
    """Each rank has another number in the one group that it uses."""
    dist.init_process_group("gloo")
    pairs = [dist.new_group([0]), dist.new_group([1])]
    wrapped = Group.wrap(pairs[meeting.rank])
    assert wrapped.members == (meeting.rank,), "as the whole job counts"
    wrapped.barrier()
    recorder.save(folder)
    dist.destroy_process_group()


def test_ranks_of_subgroups_do_not_overwrite_each_other(tmp_path: Path) -> None:
    spawn_ranks(2, save_from_subgroups, str(tmp_path))
    assert [log.rank for log in recorder.read_run(tmp_path)] == [0, 1]


def test_a_run_without_a_group_is_saved_as_rank_zero(tmp_path: Path) -> None:
    path = recorder.save(tmp_path)
    log = json.loads(path.read_bytes())
    assert (log["rank"], log["steps"], log["collectives"]) == (0, [], [])


def test_a_run_can_be_read_while_a_step_or_a_bucket_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, saved = threading.Lock(), list[Path]()

    def read_first() -> int:  # as another thread may before the time is noted
        if reading.acquire(blocking=False):  # reading asks for the time, too
            try:
                recorder.summary()
                saved.append(recorder.save(tmp_path, rank=0))
            finally:
                reading.release()
        return time.perf_counter_ns()

    monkeypatch.setattr(events, "now", read_first)
    run_ranks(2, train)
    assert saved


# -- numbers ----------------------------------------------------------------------------------


def test_the_summary_is_of_the_latest_steps() -> None:
    assert recorder.summary() == recorder.Summary(0.0, 0.0, 0)

    def one_rank(group: Group) -> None:
        train(group, 6)

    run_ranks(2, one_rank)
    for rank in (0, 1):
        whole, few = recorder.summary(rank=rank), recorder.summary(2, rank=rank)
        assert (whole.steps, few.steps) == (5, 2)
        assert whole.step_seconds > 0
        assert 0 <= whole.wait_share <= 1
    with pytest.raises(ValueError, match="steps is 0"):
        recorder.summary(0)


def test_waiting_for_a_slow_rank_shows_in_the_summary() -> None:
    slow, boards = threading.Event(), dict[int, events.Board]()

    def one_rank(group: Group) -> recorder.Summary:
        assert group.board is not None
        boards[group.rank()] = board = group.board
        ddp = paceline.DistributedDataParallel(nn.Linear(4, 2), process_group=group)
        ddp(torch.ones(2, 4)).sum().backward()
        for _ in range(2):
            output = ddp(torch.ones(2, 4)).sum()
            if group.rank() == 1:
                assert until(lambda: boards[0].made > board.made)  # rank 0 has called, and waits
                slow.wait(0.2)  # nobody sets it
            output.backward()
        ddp(torch.ones(2, 4))
        return recorder.summary(2, rank=group.rank())

    fast, late = run_ranks(2, one_rank)
    assert fast.wait_share > late.wait_share


def test_totals_never_fall_though_rings_and_groups_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(events, "BOARDS", 1)

    def one_rank(group: Group) -> None:
        train(group, 2)

    before = recorder.totals()
    for _ in range(3):
        run_ranks(2, one_rank)
    events.steps.clear()  # as if later steps had pushed them out
    run_ranks(1, lambda group: group.barrier())  # a new group: old ones are let go of
    after = recorder.totals()
    assert after.steps - before.steps == 3 * 2 * 2
    assert after.collectives - before.collectives >= 3 * 2 * 2 + 1
    assert after.bytes_sent > before.bytes_sent
    assert len([board for board in events.boards.values() if board.closed]) <= 2
