"""Processes that are stopped and go on, lose their connections, or run out of descriptors."""

from __future__ import annotations

import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline import elastic
from paceline._members import connect
from paceline._members.keeper import Keeper
from paceline.compiled import train_step
from paceline.data import ShardedLoader
from paceline.errors import MembershipError
from paceline.testing import Meeting, spawn_ranks
from tests.marks import needs_shm

from .runs import dataset, require_equal, train
from .test_processes import die, keeper, undisturbed

pytestmark = [needs_shm, pytest.mark.slow]
DEADLINE = 600.0  # seconds


def await_file(path: Path) -> str:
    until = time.monotonic() + DEADLINE
    while not path.exists():
        assert time.monotonic() < until, f"{path.name} does not come"
        time.sleep(0.005)
    return path.read_text()


def leave(path: Path, text: str) -> None:
    """Write a file that is there whole."""
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    draft.rename(path)


# -- stopped, given up, and woken -------------------------------------------------------------


def a_rank_that_may_stop(
    meeting: Meeting, path: str, backend: str, folder: Path, place: str
) -> Any:
    """Rank 1 stops in its fourth step; when the others train without it, it is woken."""
    members = connect(path)
    assert members is not None
    sizes: list[int] = []
    grip: dict[str, Any] = {}

    def moment(now: elastic.JobStep, shards: int, where: str) -> None:
        here = (meeting.rank, now.number, where) == (1, 3, place)
        if here and not (folder / "stops").exists():
            leave(folder / "stops", f"{os.getpid()} {members.me}")
            os.kill(os.getpid(), signal.SIGSTOP)
        if where == "end":
            sizes.append(grip["group"].size())
        if meeting.rank == 0 and (now.number, where) == (6, "shard"):
            pid = int(await_file(folder / "stops").split()[0])
            os.kill(pid, signal.SIGCONT)
            await_file(folder / "woken")  # it has done by now whatever it would do

    try:
        outcome = train(members, moment, backend=backend, prepare=lambda **has: grip.update(has))
    except MembershipError as error:
        leave(folder / "woken", type(error).__name__)
        return type(error).__name__
    return outcome, sizes


@pytest.mark.parametrize("place", ["shard", "averages"])
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_stopped_process_that_goes_on_later_changes_no_bit_of_the_others(
    backend: str, place: str, tmp_path: Path
) -> None:
    given_up: list[int] = []

    def look(serving: Keeper) -> None:
        """What an agent does that sees it."""
        with suppress(OSError):
            pid, member = map(int, (tmp_path / "stops").read_text().split())
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
            if state == "T" and not given_up:
                given_up.append(member)
                serving._service.lose(member, "it was stopped", time.monotonic())

    with keeper(tmp_path, look, first=3, most=3) as path:
        found = spawn_ranks(3, a_rank_that_may_stop, path, backend, tmp_path, place)
    assert len(given_up) == 1
    assert found[1] == "MembershipError"
    for outcome, sizes in (found[0], found[2]):
        require_equal(outcome, undisturbed(2))
        assert sizes[-1] == 2


# -- connections that break between healthy processes -----------------------------------------


def cut_connections() -> int:
    """Shut down every TCP connection of this process; how many there were."""
    cut = 0
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(fd)) as copy:
                tcp = copy.family in (socket.AF_INET, socket.AF_INET6)
                if tcp and not copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    copy.shutdown(socket.SHUT_RDWR)
                    cut += 1
    return cut


def a_rank_that_cuts(meeting: Meeting, path: str) -> Any:
    sizes: list[int] = []
    cuts: list[int] = []
    used: list[int] = []  # descriptors
    grip: dict[str, Any] = {}

    def moment(now: elastic.JobStep, shards: int, where: str) -> None:
        if meeting.rank == 1 and now.number in (3, 6) and where == "begin":
            cuts.append(cut_connections())
        if where == "end":
            sizes.append(grip["group"].size())
            used.append(len(os.listdir("/proc/self/fd")))

    members = connect(path)
    outcome = train(members, moment, backend="gloo", prepare=lambda **has: grip.update(has))
    return outcome, sizes, cuts, used


def test_connections_that_break_are_made_again_and_nobody_is_expelled(tmp_path: Path) -> None:
    with keeper(tmp_path, first=3, most=3) as path:
        found = spawn_ranks(3, a_rank_that_cuts, path)
    for outcome, sizes, _, used in found:
        require_equal(outcome, undisturbed(2))
        assert set(sizes) == {3}
        assert used[-1] <= used[5] + 3  # after the second cut no more than after the first
    assert len(found[1][2]) == 2
    assert min(found[1][2]) > 0


# -- no descriptors left ----------------------------------------------------------------------


def a_rank_without_descriptors(meeting: Meeting, path: str, backend: str) -> Any:
    """Rank 1 can open nothing from its third step on; then rank 2 dies."""

    def moment(now: elastic.JobStep, shards: int, where: str) -> None:
        if (meeting.rank, now.number, where) == (1, 2, "begin"):
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        if (meeting.rank, now.number, where) == (2, 3, "shard"):
            die()

    try:
        return train(connect(path), moment, backend=backend)
    except Exception as error:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_process_without_descriptors_leaves_with_the_reason_and_the_others_go_on(
    backend: str, tmp_path: Path
) -> None:
    with keeper(tmp_path, first=3, most=3) as path:
        found = spawn_ranks(3, a_rank_without_descriptors, path, backend, may_die=[2])
    assert isinstance(found[1], str)
    assert "open files" in found[1]
    require_equal(found[0], undisturbed(2))


# -- under a compiled step --------------------------------------------------------------------


def a_compiled_rank(meeting: Meeting, path: str, backend: str) -> Any:
    """Rank 1 dies in its third step."""
    torch.set_num_threads(1)
    members = connect(path) if path else None
    with elastic.group(backend) as group:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))
        ddp = paceline.DistributedDataParallel(model, process_group=group, shards=4)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
        loader = ShardedLoader(dataset(), shards=4, batch=24, group=group)
        step = train_step(ddp, optimizer, loss_of, backend="aot_eager")
        with elastic.job(ddp, optimizer, loader, epochs=2, members=members) as job:
            for part in job:
                if path and (meeting.rank, part.number) == (1, 2):
                    part.batches = partial(dying, part.batches)  # type: ignore[method-assign]
                step(part)
        loader.close()
        return [param.detach().clone() for param in model.parameters()], job.steps


def dying(batches: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    for item in batches():
        die()
        yield item


def loss_of(model: nn.Module, x: torch.Tensor, _number: torch.Tensor) -> torch.Tensor:
    return (model(x).flatten() - x.sum(1)).square().mean()


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_rank_that_is_killed_in_a_compiled_step_changes_no_bit(
    backend: str, tmp_path: Path
) -> None:
    ((alone, steps),) = spawn_ranks(1, a_compiled_rank, "", backend)
    with keeper(tmp_path, first=3, most=3) as path:
        found = spawn_ranks(3, a_compiled_rank, path, backend, may_die=[1])
    for weights, done in (found[0], found[2]):
        assert done == steps == 10
        assert all(torch.equal(p, q) for p, q in zip(weights, alone, strict=True))
