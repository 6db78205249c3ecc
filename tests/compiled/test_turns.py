"""Who compiles first, and what the others find."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed import HashStore

import paceline
from paceline.compiled import train_step, turns
from paceline.compiled.turns import HostTurn
from paceline.recorder.account import account_of
from paceline.testing import Meeting, run_ranks, spawn_ranks

from .marks import needs_compiler
from .steps import batch, loss_of, seeded

LONG = timedelta(minutes=5)


def test_a_rank_that_compiles_says_so_to_those_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)

    def one_rank(group: paceline.Group) -> list[str]:
        ddp = paceline.DistributedDataParallel(nn.Linear(2, 2), process_group=group)
        turn, said = turns.Turns(ddp, LONG), list[str]()
        board = group.board
        assert board is not None
        turn.before()
        said.append(account_of(board).doing)
        turn.after()
        return [*said, account_of(board).doing]

    assert run_ranks(2, one_rank) == [["compiles its first step", ""]] * 2


class Asking(HostTurn):
    """A turn that lets a test know when it was refused."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, LONG)
        self.refused = threading.Event()

    def _lock(self, kind: int) -> bool:
        free = super()._lock(kind)
        if not free:
            self.refused.set()
        return free


def wait_and_then(act: Callable[[], object], turns: list[Asking], first: HostTurn) -> None:
    """All of ``turns`` are refused while ``first`` has its own; then each of them acts."""

    def second(turn: Asking) -> None:
        turn.take()
        act()
        turn.give_back()

    threads = [threading.Thread(target=second, args=(turn,)) for turn in turns]
    for thread in threads:
        thread.start()
    for turn in turns:
        assert turn.refused.wait(60)
    first.give_back()
    for thread in threads:
        thread.join(60)


def test_whoever_asks_meanwhile_waits_for_the_end_of_a_turn(tmp_path: Path) -> None:
    path = tmp_path / "a" / "lock"
    order: list[str] = []

    class First(HostTurn):
        def give_back(self) -> None:
            order.append("first")
            super().give_back()

    first = First(path, LONG)
    first.take()
    wait_and_then(lambda: order.append("second"), [Asking(path)], first)
    assert order == ["first", "second"]


def test_those_who_waited_go_on_together(tmp_path: Path) -> None:
    first, together = HostTurn(tmp_path / "lock", LONG), threading.Barrier(2)
    first.take()
    wait_and_then(lambda: together.wait(60), [Asking(tmp_path / "lock") for _ in range(2)], first)
    assert not together.broken


def test_nobody_waits_longer_than_the_timeout(tmp_path: Path) -> None:
    first, second = HostTurn(tmp_path / "lock", LONG), HostTurn(tmp_path / "lock", timedelta(0))
    first.take()
    second.take()
    second.give_back()
    first.give_back()


def test_a_place_that_cannot_be_written_is_no_reason_to_stop(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    turn = HostTurn(tmp_path / "file" / "lock", LONG)
    turn.take()
    turn.give_back()


class Wrapper:
    """What a wrapper is to those who wait for one."""

    def __init__(self) -> None:
        group = paceline.new_group("fake", store=HashStore(), rank=0, world_size=2)
        self.ddp = paceline.DistributedDataParallel(nn.Linear(2, 2), process_group=group)
        self.group, self.reducer = group, self.ddp.replica.reducer


def test_a_group_is_patient_until_its_first_pass_is_over() -> None:
    made = Wrapper()
    made.group.set_timeout(7.0)
    turns._be_patient(made.ddp, made.group, LONG)
    assert made.group.timeout == LONG
    made.ddp(torch.ones(1, 2)).sum().backward()
    assert made.group.timeout == timedelta(seconds=7)
    turns._be_patient(made.ddp, made.group, LONG)
    assert made.group.timeout == timedelta(seconds=7)


def test_so_it_is_when_a_layer_was_frozen_before_the_first_pass() -> None:
    made = Wrapper()
    made.group.set_timeout(7.0)
    turns._be_patient(made.ddp, made.group, LONG)
    made.ddp.module.bias.requires_grad_(False)
    made.ddp(torch.ones(1, 2)).sum().backward()
    assert made.ddp.replica.reducer is not made.reducer
    assert made.group.timeout == timedelta(seconds=7)


def test_a_timeout_that_the_user_has_changed_meanwhile_stays() -> None:
    made = Wrapper()
    made.group.set_timeout(7.0)
    turns._be_patient(made.ddp, made.group, LONG)
    made.group.set_timeout(9.0)
    made.ddp(torch.ones(1, 2)).sum().backward()
    assert made.group.timeout == timedelta(seconds=9)


# -- Inductor -------------------------------------------------------------------------------------


def compile_and_count(meeting: Meeting, seconds: float) -> tuple[int, int, float]:
    """Graphs that this rank compiled, graphs that it found, and the group's timeout behind it."""
    with meeting.new_group("shm") as group:
        ddp = paceline.DistributedDataParallel(seeded("conv"), process_group=group)
        group.set_timeout(seconds)  # less than it takes to trace
        loss_of(torch.compile(ddp, fullgraph=True), *batch(meeting.rank, 0)).backward()
        left = group.timeout.total_seconds()
        group.set_timeout(60.0)
        group.barrier()
        told = counters["inductor"]
        return int(told["fxgraph_cache_miss"]), int(told["fxgraph_cache_hit"]), left


@pytest.mark.slow
@needs_compiler
def test_ranks_that_compile_a_wrapper_share_the_work_and_do_not_time_out(tmp_path: Path) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    found = spawn_ranks(2, compile_and_count, 0.2, env=env)
    assert sum(misses for misses, _, _ in found) == 2  # forward and backward, once on the host
    assert sum(hits for _, hits, _ in found) == 2
    assert {timeout for _, _, timeout in found} == {0.2}
    again = spawn_ranks(2, compile_and_count, 0.2, env=env)
    assert [hits for _, hits, _ in again] == [2, 2]  # and so does a restart


def test_without_a_compiler_steps_are_done_in_eager_mode_and_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    group: Any = paceline.new_group("fake", store=HashStore(), rank=0, world_size=1)
    ddp = paceline.DistributedDataParallel(seeded("mlp"), process_group=group)
    step = train_step(ddp, torch.optim.SGD(ddp.parameters(), 0.1), loss_of)
    before = ddp.module[0].weight.detach().clone()
    missing = {"cpp.cxx": (None, "no-such-compiler")}
    with (
        caplog.at_level(logging.WARNING, "paceline.compiled"),
        torch._inductor.config.patch(missing),
    ):
        for number in range(2):
            step(*batch(0, number))
    lines = [r.getMessage() for r in caplog.records if r.name == "paceline.compiled"]
    assert len(lines) == 1
    assert "C++ compiler" in lines[0]
    assert "\n" not in lines[0]
    assert not torch.equal(before, ddp.module[0].weight)
