"""Jobs whose ranks are processes, killed at random places and moments."""

from __future__ import annotations

import math
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from paceline import Group, elastic
from paceline._members import Rules, connect
from paceline._members.keeper import Keeper
from paceline.testing import Meeting, spawn_ranks
from tests.marks import needs_shm
from tests.waiting import until

from .runs import Moment, Outcome, require_equal, train

PLACES = ["begin", "shard", "averages", "end"]


@contextmanager
def keeper(
    folder: Path, look: Callable[[Keeper], None] = lambda _: None, **rules: Any
) -> Iterator[str]:
    """A keeper on a thread; a connection that closes is a member that is lost.

    ``look`` is called now and then, on that thread.
    """
    path = str(folder / "members")
    serving = Keeper(path, Rules(reconnect_within=0.02, **rules), 30.0)
    over = threading.Event()

    def serve() -> None:
        while not over.is_set():
            serving.turn(0.1)
            look(serving)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield path
    finally:
        over.set()
        thread.join(60)
        serving.close()


def tells_when(count: int, file: Path) -> Callable[[Keeper], None]:
    """A ``look`` that makes a file when the keeper has heard of so many that want to train."""

    def look(serving: Keeper) -> None:
        council = serving._service.council
        if len({*council.current.members, *council._meeting}) >= count:
            file.touch()

    return look


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def a_rank(meeting: Meeting, path: str, backend: str, epochs: int, deaths: dict[int, Any]) -> Any:
    """Train until it is killed: at a place of a step, or so many seconds after its first one."""
    death = deaths.get(meeting.rank)

    def moment(now: elastic.JobStep, shards: int, place: str) -> None:
        if (now.number, place) == death:
            die()
        if isinstance(death, float) and place == "begin" and not begun:
            begun.append(True)
            threading.Timer(death, die).start()

    begun: list[bool] = []
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    outcome = train_if_in_time(path, moment, backend=backend, epochs=epochs)
    after = len(os.listdir("/proc/self/fd")), threading.active_count()
    return None if outcome is None else (outcome, before, after)


def train_if_in_time(path: str, moment: Moment, **options: Any) -> Outcome | None:
    """What a rank ends with; None if the job had ended well before it came."""
    try:
        return train(connect(path), moment, **options)
    except SystemExit as end:
        if end.code != 0:
            raise
    return None


def a_rank_alone(meeting: Meeting, epochs: int) -> Outcome:
    return train(None, backend="auto", epochs=epochs)


@cache
def undisturbed(epochs: int) -> Outcome:
    """What one process ends with that is alone; with one thread, as all of them have."""
    (outcome,) = spawn_ranks(1, a_rank_alone, epochs)
    return outcome


def require_all_equal(found: list[Any], epochs: int) -> list[Outcome]:
    ends = [one[0] for one in found if one is not None and one[0].committed]
    assert ends
    for end in ends:
        require_equal(end, undisturbed(epochs))
    return ends


def a_rank_of_five(
    meeting: Meeting, path: str, backend: str, deaths: dict[int, Any], all_have_come: Path
) -> Any:
    """Train until it is killed: at a place of a step or, if it came later, of its first one."""
    step, place_of_death = deaths.get(meeting.rank, (math.inf, ""))
    groups: list[Group] = []

    def come(group: Group, **_others: Any) -> None:
        groups.append(group)

    def moment(now: elastic.JobStep, shards: int, place: str) -> None:
        if place == place_of_death and now.number >= step and groups[0].size() > 1:
            assert until(all_have_come.exists)
            die()

    return train(connect(path), moment, backend=backend, epochs=2, prepare=come), None, None


@needs_shm
@pytest.mark.parametrize("backend", ["shm", pytest.param("gloo", marks=pytest.mark.slow)])
def test_processes_that_are_killed_change_no_bit(backend: str, tmp_path: Path) -> None:
    deaths = {0: (2, "shard"), 1: (5, "averages"), 2: (7, "begin")}
    all_have_come = tmp_path / "all have come"
    with keeper(tmp_path, tells_when(5, all_have_come), first=3, most=3) as path:
        found = spawn_ranks(5, a_rank_of_five, path, backend, deaths, all_have_come, may_die=deaths)
    assert None in found  # which of the five are the first three is not decided here
    assert len(require_all_equal(found, 2)) >= 2


@needs_shm
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_kills_at_random_moments_change_no_bit(backend: str, seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    epochs, total = 8, 8
    deaths: dict[int, Any] = {}
    for rank in range(total - 1):
        late = chance.uniform(0.001, 0.5)
        place = chance.randrange(5 * epochs), chance.choice(PLACES)
        deaths[rank] = late if chance.random() < 0.6 else place
    with keeper(tmp_path, first=3, most=4) as path:
        began = time.monotonic()
        found = spawn_ranks(total, a_rank, path, backend, epochs, deaths, may_die=deaths)
    require_all_equal(found, epochs)
    assert time.monotonic() - began < 90


def a_rank_with_notice(meeting: Meeting, path: str, folder: str) -> Any:
    """Rank 1 gets SIGTERM in its fourth step."""

    def moment(now: elastic.JobStep, shards: int, place: str) -> None:
        if meeting.rank == 1 and (now.number, place) == (3, "begin"):
            os.kill(os.getpid(), signal.SIGTERM)

    return train(connect(path), moment, backend="shm", epochs=2, save=folder, save_every=4)


@needs_shm
def test_sigterm_lets_a_process_finish_its_step_and_the_others_go_on(tmp_path: Path) -> None:
    with keeper(tmp_path, first=3, most=3) as path:
        found = spawn_ranks(3, a_rank_with_notice, path, str(tmp_path / "saves"))
    assert found[1].left == "it got SIGTERM"
    assert found[1].committed == [0, 1, 2, 3]
    for outcome in (found[0], found[2]):
        require_equal(outcome, undisturbed(2))
    names = sorted(path.name for path in (tmp_path / "saves").iterdir())
    assert names[-2:] == ["step-00000008", "step-00000010"]
    assert names[:-2] in ([], ["step-00000004"])  # if it had rank 0 and was late, its own is there


def many_rosters(meeting: Meeting, path: str, backend: str, one_has_come: Path) -> Any:
    """Rank 0 comes first, and stays; of the others each dies two steps after it came."""
    first: list[int] = []
    used: list[tuple[int, int]] = []

    def moment(now: elastic.JobStep, shards: int, place: str) -> None:
        first.append(now.number)
        if meeting.rank and now.number == first[0] + 2 and place == "shard":
            die()
        if place == "end":
            used.append((len(os.listdir("/proc/self/fd")), threading.active_count()))

    if meeting.rank:
        assert until(one_has_come.exists)
    return train_if_in_time(path, moment, backend=backend, epochs=3), used


@needs_shm
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_nothing_is_left_of_rosters_that_are_over(backend: str, tmp_path: Path) -> None:
    others = range(1, 8)
    one_has_come = tmp_path / "one has come"
    with keeper(tmp_path, tells_when(1, one_has_come), first=3, most=3) as path:
        found = spawn_ranks(8, many_rosters, path, backend, one_has_come, may_die=others)
    outcome, used = found[0]
    require_equal(outcome, undisturbed(3))
    (fds, threads), (fds_later, threads_later) = used[0], used[-1]
    assert fds_later <= fds + 3
    assert threads_later <= threads + 1
