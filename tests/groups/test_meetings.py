"""Ranks that go on together meet, however often each of them has tried before."""

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, PrefixStore, Store, TCPStore

from paceline import Group, new_group
from paceline._transport import Clock, fetch
from paceline.errors import GroupClosedError, PeerDiedError, RendezvousError
from paceline.groups.meetings import Meetings
from paceline.groups.merging import renumbered
from paceline.groups.options import GroupOptions
from paceline.testing import Meeting, run_ranks, spawn_ranks
from tests.marks import USUAL, needs_shm

LONG = timedelta(seconds=120)


class Engine:
    """Knows where it was opened, and whether it was ended."""

    def __init__(self, room: Store) -> None:
        self.room, self.ended = room, False

    def abort(self) -> None:
        self.ended = True

    def shutdown(self) -> None:
        assert self.ended


def _meetings(store: Store, rank: int, ranks: list[int], timeout: timedelta) -> Meetings:
    names = [str(r) for r in ranks]
    return Meetings(
        store, ",".join(names), len(ranks), timeout, rank=rank, name=str(rank), names=names
    )


def _open(store: Store, rank: int, ranks: list[int], timeout: timedelta) -> str:
    """Meet and talk: the sum of what all ranks say in the room that they came to."""
    place = _meetings(store, rank, ranks, timeout).arrive()
    # Whoever has little time to wait has enough to open: else the others would fail with it.
    room, engine = _meetings(store, rank, ranks, LONG).open(place, Engine)  # type: ignore[arg-type]
    room.set(f"said/{rank}", str(rank))
    room.wait([f"said/{r}" for r in ranks], LONG)
    assert not engine.ended  # type: ignore[attr-defined]
    return ",".join(room.get(f"said/{r}").decode() for r in ranks)


def _store(kind: str) -> Store:
    if kind == "hash":
        return HashStore()
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _client(store: Store) -> Store:
    """A handle of one rank's own: a TCPStore answers one question of a handle at a time."""
    if isinstance(store, TCPStore):
        return TCPStore("127.0.0.1", store.port, is_master=False)
    return store


@pytest.mark.parametrize("kind", ["hash", "tcp"])
@pytest.mark.parametrize("seed", range(4))
def test_ranks_meet_however_often_each_has_tried(kind: str, seed: int) -> None:
    chance = random.Random(seed)
    ranks = list(range(chance.randint(2, 4)))
    store = _store(kind)
    tries = [chance.choice([0, 0, 1, 3]) for _ in ranks]
    tries[chance.choice(ranks)] = 0  # somebody is always late
    pauses = [[chance.uniform(0.001, 0.03) for _ in range(n)] for n in tries]
    gone = threading.Barrier(len(ranks))

    def one_rank(rank: int) -> list[str]:
        mine = _client(store)
        for pause in pauses[rank]:
            with pytest.raises(RendezvousError):  # somebody waits at the barrier
                _open(mine, rank, ranks, timedelta(seconds=pause))
        gone.wait(120)
        return [_open(mine, rank, ranks, LONG) for _ in range(3)]  # and again, with nothing stale

    with ThreadPoolExecutor(len(ranks)) as pool:
        found = list(pool.map(one_rank, ranks))
    assert found == [[",".join(map(str, ranks))] * 3] * len(ranks)


def test_a_rank_with_time_outlasts_those_that_give_up_and_come_back() -> None:
    """Rank 0 waits once; rank 1 tries again and again; rank 2 comes after three of its failures."""
    store, failed = HashStore(), threading.Semaphore(0)

    def impatient() -> str:
        while True:
            try:
                return _open(store, 1, [0, 1, 2], timedelta(milliseconds=100))
            except RendezvousError:
                failed.release()

    def late() -> str:
        for _ in range(3):
            assert failed.acquire(timeout=300)
        return _open(store, 2, [0, 1, 2], LONG)

    with ThreadPoolExecutor(3) as pool:
        patient = pool.submit(_open, store, 0, [0, 1, 2], LONG)
        others = [pool.submit(impatient), pool.submit(late)]
        assert [f.result(120) for f in (patient, *others)] == ["0,1,2"] * 3


def test_to_open_has_as_much_time_as_to_come_however_late_the_last_rank_came() -> None:
    store, left = HashStore(), []
    meetings = _meetings(store, 0, [0], LONG)
    place = meetings.arrive()
    meetings._end = time.monotonic()

    def opener(room: Store) -> Engine:
        left.append(meetings._left())
        return Engine(room)

    meetings.open(place, opener)  # type: ignore[arg-type]
    assert left[0] > LONG / 2


def test_the_missing_are_named_with_the_list_that_they_wait_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, enter, both_wait = HashStore(), Meetings._enter, threading.Barrier(2)

    def enter_and_meet(meetings: Meetings, *given: Any) -> int:
        before = enter(meetings, *given)
        both_wait.wait(LONG.total_seconds())
        return before

    def wait_for(rank: int, ranks: list[int]) -> str:
        with pytest.raises(RendezvousError) as caught:
            _open(store, rank, ranks, timedelta(seconds=0.1))
        return str(caught.value)

    monkeypatch.setattr(Meetings, "_enter", enter_and_meet)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(wait_for, [0, 1], [[0, 1, 2], [0, 1]])
    assert "no sign of rank 1, which waits for 0,1; rank 2." in first
    assert "no sign of rank 0, which waits for 0,1,2." in second


def test_an_engine_that_cannot_be_opened_is_told_to_all_at_once_and_they_meet_again() -> None:
    store, turn = HashStore(), threading.Barrier(3)

    def one_rank(rank: int) -> tuple[str, str]:
        made: list[Engine] = []

        def opener(room: Store) -> Engine:
            if rank == 1:
                raise MemoryError("no memory left")
            made.append(Engine(room))
            return made[0]

        meetings = _meetings(store, rank, [0, 1, 2], LONG)
        with pytest.raises((RendezvousError, MemoryError)) as caught:
            meetings.open(meetings.arrive(), opener)  # type: ignore[arg-type]
        assert all(engine.ended for engine in made), "nobody goes on with half a group"
        turn.wait(120)
        return str(caught.value), _open(store, rank, [0, 1, 2], LONG)

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(one_rank, range(3)))
    assert [again for _, again in found] == ["0,1,2"] * 3
    for rank in (0, 2):
        assert "rank 1 failed: MemoryError: no memory left" in found[rank][0]


def test_what_a_rank_left_behind_that_died_in_a_meeting_is_never_read_again() -> None:
    """Its place was counted, and nobody closed the meeting for it."""
    store = HashStore()
    corner = PrefixStore("0,1", store)
    corner.add("0/came", 1)
    corner.set("0/card/0", b"junk")  # type: ignore[arg-type]
    corner.compare_set("0/gate", "", '"full"')  # and who wrote this died before it could count it
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda r: _open(store, r, [0, 1], LONG), range(2)))
    assert found == ["0,1"] * 2


# -- groups ---------------------------------------------------------------------------------------


def _total(group: Group) -> float:
    tensor = torch.tensor([float(group.members[group.rank()])])
    group.all_reduce(tensor)
    return tensor.item()


@pytest.mark.parametrize("tries", [(0, 1, 2), (2, 0, 1), (3, 0, 0)])
def test_survivors_that_tried_different_numbers_of_times_meet(tries: tuple[int, ...]) -> None:
    ready = threading.Barrier(3)

    def one_rank(group: Group) -> tuple[float, tuple[int, ...]]:
        rank = group.rank()
        if rank == 3:
            group.shutdown()
            return 0.0, ()
        for _ in range(tries[rank]):
            with pytest.raises(RendezvousError):
                group.reconfigure([0, 1, 2], timeout=timedelta(milliseconds=30))
            with pytest.raises(GroupClosedError):
                group.barrier()
        ready.wait(120)
        group.reconfigure([0, 1, 2], timeout=LONG)
        assert _total(group) == 3.0
        group.reconfigure([2, 0]) if rank != 1 else group.shutdown()
        return (0.0 if rank == 1 else _total(group)), group.members

    found = run_ranks(4, one_rank)
    assert [found[0], found[2]] == [(2.0, (2, 0))] * 2


def test_a_list_that_cannot_be_met_is_given_up_for_another() -> None:
    """Rank 0 still counts on rank 2; rank 1 does not. Rank 0 learns it from its error."""

    def one_rank(group: Group) -> tuple[int, ...]:
        if group.rank() == 2:
            group.shutdown()
            return ()
        if group.rank() == 0:
            with pytest.raises(RendezvousError, match="rank 2"):
                group.reconfigure([0, 1, 2], timeout=timedelta(seconds=5))
        group.reconfigure([0, 1], timeout=LONG)
        assert _total(group) == 1.0
        return group.members

    assert run_ranks(3, one_rank)[:2] == [(0, 1)] * 2


def test_a_split_can_be_tried_again() -> None:
    ready = threading.Barrier(2)

    def one_rank(group: Group) -> float:
        if group.rank() == 1:
            with pytest.raises(RendezvousError, match="no sign of rank 0"):
                group.split([0, 1], timeout=timedelta(milliseconds=30))
        ready.wait(120)
        part = group.split([0, 1], timeout=LONG)
        assert part is not None
        return _total(part)

    assert run_ranks(2, one_rank) == [1.0, 1.0]


def test_calls_are_numbered_anew_after_members_have_changed() -> None:
    """Survivors may have made different numbers of calls before."""

    def one_rank(group: Group) -> None:
        if group.rank() == 0:
            for _ in range(3):
                group.send(torch.ones(1), 1)
        group.barrier()
        group.reconfigure([0, 1])
        group.monitored_barrier(timeout=LONG)
        seen = []
        group.register_hooks(before=lambda call: seen.append(call.sequence))
        group.barrier()
        assert seen == [1]

    run_ranks(2, one_rank)


def retry_while_others_come(meeting: Meeting, backend: str) -> tuple[float, tuple[int, ...]]:
    group = meeting.new_group(backend, timeout=LONG)
    store = PrefixStore("test", meeting.store())
    group.barrier()
    if meeting.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if backend == "shm":
        with pytest.raises(PeerDiedError):
            group.barrier()
    if meeting.rank == 0:
        for _ in range(2):
            with pytest.raises(RendezvousError):
                group.reconfigure([0, 2, 3], timeout=timedelta(seconds=0.2))
        store.set("tried", "")
    elif meeting.rank == 2:
        store.wait(["tried"], LONG)
    group.reconfigure([0, 2, 3], timeout=LONG)
    result = _total(group), group.members
    group.barrier()
    group.shutdown()
    return result


@pytest.mark.parametrize("backend", [USUAL, "gloo"])
def test_survivors_of_a_killed_rank_meet_after_different_tries(backend: str) -> None:
    results = spawn_ranks(4, retry_while_others_come, backend, may_die=[1])
    assert [results[r] for r in (0, 2, 3)] == [(5.0, (0, 2, 3))] * 3


def die_on_the_way(meeting: Meeting) -> tuple[float, tuple[int, ...]]:
    group = meeting.new_group("shm", timeout=LONG)
    group.barrier()
    reopen = group._reopen
    assert reopen is not None

    def die_or_give_up_soon(store: Store, rank: int, size: int, options: GroupOptions) -> Any:
        if meeting.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return reopen(store, rank, size, options.changed(timeout=timedelta(seconds=1)))

    group._reopen = die_or_give_up_soon
    with pytest.raises(RendezvousError):
        group.reconfigure([0, 1, 2], timeout=LONG)  # all of them come, however late
    group._reopen = reopen
    group.reconfigure([1, 0], timeout=LONG)
    result = _total(group), group.members
    group.shutdown()
    return result


@needs_shm
def test_a_rank_that_dies_while_all_meet_is_left_behind() -> None:
    results = spawn_ranks(3, die_on_the_way, may_die=[2])
    assert results[:2] == [(1.0, (1, 0))] * 2


def give_up_and_leave(meeting: Meeting, backend: str) -> None:
    group = meeting.new_group(backend, timeout=LONG)
    if meeting.rank == 0:
        with pytest.raises(RendezvousError, match="no sign of rank 1"):
            group.reconfigure([0, 1], timeout=timedelta(milliseconds=10))
        group.abort()
    group.shutdown()
    group.shutdown()
    with pytest.raises(GroupClosedError):
        group.reconfigure([0, 1])
    with pytest.raises(GroupClosedError):
        group.split([0])


@pytest.mark.parametrize("backend", [USUAL, "gloo", pytest.param("hybrid", marks=needs_shm)])
def test_a_group_that_could_not_be_reconfigured_can_be_shut_down(backend: str) -> None:
    spawn_ranks(2, give_up_and_leave, backend)


# -- merging --------------------------------------------------------------------------------------


def test_numbers_are_kept_where_they_can_be() -> None:
    assert renumbered([(0, 2), (0,)]) == [0, 2, 3]
    assert renumbered([(1,), (0, 2)]) == [1, 0, 2]
    assert renumbered([(0,), (0,), (0,)]) == [0, 1, 2]
    assert renumbered([]) == []


def test_members_of_a_merged_group_are_different_and_the_same_for_all() -> None:
    """Ranks 0 and 2 of three, and a newcomer that calls itself 0."""
    store = HashStore()
    first = threading.Event()

    def one_rank(group: Group) -> tuple[tuple[int, ...], float]:
        rank = group.rank()
        if rank == 1:
            group.shutdown()
            first.wait(120)
            alone = new_group("threads", store=HashStore(), rank=0, world_size=1)
            merged = alone.merge(store, 3, timeout=LONG)
        else:
            group.reconfigure([0, 2])
            if group.rank() == 0:
                first.set()
            merged = group.merge(store, 3, timeout=LONG)
        assert sorted(merged.members) == [0, 2, 3]
        assert _total(merged) == 5.0
        merged.reconfigure(range(3), timeout=LONG)  # the numbers are good enough to meet by
        total = _total(merged)
        merged.shutdown()
        return merged.members, total

    found = run_ranks(3, one_rank)
    assert {total for _, total in found} == {5.0}
    assert len({members for members, _ in found}) == 1


def test_a_store_serves_one_merge_after_another_and_a_failed_one() -> None:
    store = HashStore()

    def one_rank(group: Group) -> list[float]:
        part = group.split([[0], [1, 2]])
        assert part is not None
        if group.rank() > 0:
            leads = part.rank() == 0  # the other hears from it
            with pytest.raises(RendezvousError, match="2 of 3 ranks came"):
                part.merge(store, 3, timeout=timedelta(seconds=0.2) if leads else LONG)
        group.barrier()
        totals = []
        for _ in range(2):
            merged = part.merge(store, 3, timeout=LONG)
            totals.append(_total(merged))
        return totals

    assert run_ranks(3, one_rank) == [[3.0, 3.0]] * 3


def test_more_ranks_than_were_announced_are_refused_on_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, enter, first_is_in = HashStore(), Meetings._enter, threading.Event()

    def enter_and_tell(meetings: Meetings, *given: Any) -> int:
        before = enter(meetings, *given)
        if meetings._key == "of 2":  # not that of the split
            first_is_in.set()
        return before

    def one_rank(group: Group) -> str:
        part = group.split([[0], [1, 2]])
        assert part is not None
        if group.rank():  # else these two would be a meeting of 2 by themselves
            assert first_is_in.wait(60)
        with pytest.raises(RendezvousError) as caught:
            part.merge(store, 2, timeout=LONG)
        return str(caught.value)

    monkeypatch.setattr(Meetings, "_enter", enter_and_tell)
    texts = run_ranks(3, one_rank)
    assert any("3 ranks came to a meeting of 2" in text for text in texts)


def test_groups_of_different_kinds_do_not_merge() -> None:
    store = HashStore()

    def one_rank(group: Group) -> None:
        part = group.split([[0], [1]])
        assert part is not None
        backend = "gloo" if group.rank() else None
        with pytest.raises(RendezvousError, match=r"gloo on cpu.*; threads on cpu"):
            part.merge(store, 2, timeout=LONG, backend=backend)

    run_ranks(2, one_rank)


# -- new_group ------------------------------------------------------------------------------------


def _impatient(meeting: Meeting, backend: str) -> int:
    """Rank 0 tries and gives up, twice, before rank 1 comes for the first time."""
    store = meeting.store(LONG)
    if meeting.rank == 0:
        for _ in range(2):
            with pytest.raises(RendezvousError, match="no sign of rank 1"):
                meeting.new_group(backend, timeout=timedelta(seconds=0.1))
        store.set("rank 0 has given up", "")
    else:
        store.wait(["rank 0 has given up"], LONG)
    with meeting.new_group(backend, timeout=LONG) as group:
        total = torch.tensor(group.rank() + 1)
        group.all_reduce(total)
    return int(total)


@pytest.mark.parametrize("backend", [pytest.param("shm", marks=needs_shm), "gloo", "auto"])
def test_a_group_opens_however_often_each_rank_has_tried_before(backend: str) -> None:
    assert spawn_ranks(2, _impatient, backend) == [3, 3]


def test_a_rank_whose_time_was_over_is_not_called_missing_by_those_that_it_left() -> None:
    store, entered = HashStore(), itertools.count()

    class Stays(Meetings):
        def _enter(self, *args: object) -> int:
            before = super()._enter(*args)  # type: ignore[arg-type]
            if next(entered) == 0:
                come_and_leave()
            return before

    def come_and_leave() -> None:
        with pytest.raises(RendezvousError):
            _meetings(store, 0, [0, 1, 2], timedelta(seconds=0.1)).arrive()

    options = {"rank": 1, "name": "1", "names": ["0", "1", "2"]}
    stays = Stays(store, "0,1,2", 3, timedelta(seconds=3), **options)
    with pytest.raises(RendezvousError, match=r"after 3 s no sign of rank 2\. "):
        stays.arrive()


def test_groups_that_threads_open_at_the_same_time_are_groups_of_all_ranks() -> None:
    store, together = HashStore(), threading.Barrier(4)

    def open_one(rank: int) -> tuple[int, int]:
        together.wait(LONG.total_seconds())
        with new_group("threads", LONG, store=store, rank=rank, world_size=2) as group:
            total = torch.tensor(10**rank)
            group.all_reduce(total)
        return rank, int(total)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(open_one, [0, 0, 1, 1]))
    assert found == [(0, 11), (0, 11), (1, 11), (1, 11)]


HERE = threading.local()


def _open_and_say(store: Store, done: threading.Event, rank: int, purpose: str) -> None:
    HERE.rank = rank
    if purpose == "of 2":
        with new_group("threads", LONG, store=HashStore(), rank=0, world_size=1) as alone:
            group = alone.merge(store, 2)
    else:
        group = new_group("threads", LONG, store=store, rank=rank, world_size=2)
    with group:
        part = group.split([1, 0]) if purpose == "split" else None
        if rank == 0:
            done.set()
        if part is not None:
            part.shutdown()


@pytest.mark.parametrize("purpose", ["all", "split", "of 2"])
def test_who_may_hold_the_store_stays_until_all_have_read_that_the_group_is_open(
    purpose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, done, hear = HashStore(), threading.Event(), Meetings._await

    def hear_late(meetings: Meetings, meeting: Store, word: str) -> object:
        if word == "outcome" and HERE.rank == 1 and meetings._key.startswith(purpose):
            assert not done.wait(1), "rank 0 may end now, and the store with it"
        return hear(meetings, meeting, word)

    monkeypatch.setattr(Meetings, "_await", hear_late)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda rank: _open_and_say(store, done, rank, purpose), range(2)))
    assert done.is_set()


def test_rank_0_goes_on_without_a_rank_that_ended_before_it_had_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, done, see_off = HashStore(), threading.Event(), Meetings._see_off
    monkeypatch.setattr("paceline.groups.meetings.READING", timedelta(seconds=0.1))

    def see_off_or_end(meetings: Meetings, meeting: Store, patience: timedelta) -> None:
        if HERE.rank == 0:
            see_off(meetings, meeting, patience)
        else:
            assert done.wait(20), "rank 0 waits for a rank that is gone"

    monkeypatch.setattr(Meetings, "_see_off", see_off_or_end)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda rank: _open_and_say(store, done, rank, "all"), range(2)))
    assert done.is_set()


def test_who_may_hold_the_store_stays_until_all_have_heard_why_there_is_no_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, done, hear = HashStore(), threading.Event(), Meetings._await

    def hear_late(meetings: Meetings, meeting: Store, word: str) -> object:
        if word == "outcome":
            assert not done.wait(1), "rank 0 may end now, and the store with it"
        return hear(meetings, meeting, word)

    def one_rank(rank: int) -> str:
        def opener(room: Store) -> Engine:
            if rank == 0:
                raise MemoryError("no memory left")
            return Engine(room)

        meetings = _meetings(store, rank, [0, 1], LONG)
        with pytest.raises((RendezvousError, MemoryError)) as caught:
            meetings.open(meetings.arrive(), opener, see_off=True)  # type: ignore[arg-type]
        if rank == 0:
            done.set()
        return str(caught.value)

    monkeypatch.setattr(Meetings, "_await", hear_late)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(one_rank, range(2)))
    assert "rank 0 failed: MemoryError: no memory left" in found[1]


def arrive_and_open(store: Store) -> None:
    meetings = _meetings(store, 1, [0, 1], LONG)
    meetings.open(meetings.arrive(), Engine)  # type: ignore[arg-type]


def fetch_from_both(store: Store) -> None:
    store.set("here/1", "")
    fetch(store, ["here/0", "here/1"], 1, Clock(LONG))


@pytest.mark.parametrize(
    ("waits", "where"),
    [
        pytest.param(arrive_and_open, "0,1/0/card/0", id="for others to come"),
        pytest.param(arrive_and_open, "0,1/0/opened", id="for others to open"),
        pytest.param(fetch_from_both, "here/1", id="for a word of each"),
    ],
)
def test_a_store_that_ends_while_ranks_meet_in_it_is_told_as_such(
    waits: Callable[[Store], None], where: str
) -> None:
    held = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(waits, _client(held[0]))
        if where.endswith("opened"):
            _meetings(_client(held[0]), 0, [0, 1], LONG).arrive()
        held[0].wait([where], LONG)
        held.clear()  # as when its process ends
        with pytest.raises(
            RendezvousError, match=r"rank 1: the store .* cannot be reached any more"
        ):
            told.result(60)
