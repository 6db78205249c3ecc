"""Calls of equal kind and size that ranks make in another order: told once, with both lines."""

import gc
from types import SimpleNamespace
from unittest import mock

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paceline import DistributedDataParallel, Join, recorder
from paceline.data import Shard
from paceline.errors import MismatchError
from paceline.groups import Group
from paceline.recorder import events
from paceline.recorder.account import Told
from paceline.recorder.comparing import Comparing
from paceline.recorder.order import Log, Made, Pairing, Swap, log_of, made
from paceline.recorder.peers import LEFT_TOLD, Peers
from paceline.recorder.places import Address
from paceline.recorder.watch import watch
from paceline.testing import Meeting, run_ranks, spawn_ranks
from tests.marks import needs_shm
from tests.recorder.patience import be_patient
from tests.waiting import until

SUM = "all_reduce SUM of float32[4]"


def a_log(*lines: str, call: str = SUM, first: int = 1) -> Log:
    """One call after the other, from these lines."""
    return Log([Made(line, call) for line in lines], [(first + n, n) for n in range(len(lines))])


# -- pure -------------------------------------------------------------------------------------


def test_two_calls_that_one_rank_swaps_are_found_once() -> None:
    pairing = Pairing()
    found = pairing.compare(a_log("a:1", "a:2"), a_log("a:2", "a:1"))
    assert found == Swap(1, Made("a:1", SUM), Made("a:2", SUM))
    assert pairing.compare(a_log("a:1", "a:2", first=3), a_log("a:2", "a:1", first=3)) is None


def test_a_swap_is_found_when_the_second_half_of_it_comes_later() -> None:
    pairing = Pairing()
    assert pairing.compare(a_log("a:1"), a_log("a:2")) is None
    assert pairing.compare(a_log("a:2", first=2), a_log("a:1", first=2)) is not None


def test_a_call_that_one_rank_leaves_out_is_found_though_all_sizes_are_equal() -> None:
    mine, theirs = a_log("a:1", "a:2", "a:3", "a:4"), a_log("a:1", "a:3", "a:4", "a:5")
    found = Pairing().compare(mine, theirs)
    assert found is not None
    assert found.sequence == 2


@given(st.lists(st.integers(0, 3), max_size=30))
def test_ranks_that_take_different_branches_all_the_time_are_left_alone(steps: list[int]) -> None:
    mine = a_log(*(f"root.py:{step}" for step in steps))
    theirs = a_log(*(f"rest.py:{step}" for step in steps))
    assert Pairing().compare(mine, theirs) is None


@given(st.lists(st.integers(0, 3), max_size=30))
def test_ranks_that_do_the_same_are_left_alone(steps: list[int]) -> None:
    log = a_log(*(f"a.py:{step}" for step in steps))
    assert Pairing().compare(log, log) is None


def test_the_same_program_in_two_folders_is_the_same() -> None:
    assert Pairing().compare(a_log("/here/a.py:1"), a_log("/there/a.py:1")) is None


def test_unequal_sizes_from_one_line_are_no_swap() -> None:
    sizes = [Made("a:1", f"all_gather of float32[{n}]") for n in (38, 36)]
    mine, theirs = (Log(kinds, [(1, 0), (2, 1)]) for kinds in (sizes, sizes[::-1]))
    assert Pairing().compare(mine, theirs) is None


def test_each_rank_as_root_in_turn_is_no_swap() -> None:
    mine = Log([Made("a:1", "broadcast root 0"), Made("a:2", "broadcast root 1")], [(1, 0), (2, 1)])
    them = Log([Made("a:2", "broadcast root 0"), Made("a:1", "broadcast root 1")], [(1, 0), (2, 1)])
    assert Pairing().compare(mine, them) is None


def of_size(count: int, line: str = "a:1", kind: str = "all_reduce") -> Made:
    call = Told(1, kind, f"float32[{count}]", "float32", count, "sum", -1, line, running=False)
    return made(call)


def test_sizes_that_no_engine_can_add_are_told_once_where_the_engine_does_not_check() -> None:
    mine, theirs = (Log([of_size(n)], [(1, 0), (2, 0)]) for n in (4, 8))
    assert Pairing(checked=True).compare(mine, theirs) is None
    pairing = Pairing(checked=False)
    assert pairing.compare(mine, theirs) == Swap(1, of_size(4), of_size(8))
    later = (Log(log.kinds, [(3, 0)]) for log in (mine, theirs))
    assert pairing.compare(*later) is None


def test_what_ranks_may_have_unequal_is_not_told() -> None:
    unequal = (Log([of_size(n, kind="all_gather")], [(1, 0)]) for n in (4, 8))
    assert Pairing(checked=False).compare(*unequal) is None
    lines = (Log([of_size(4, line)], [(1, 0)]) for line in ("a:1", "a:2"))
    assert Pairing(checked=False).compare(*lines) is None


# -- ranks ------------------------------------------------------------------------------------


PATIENCE = 300.0  # seconds for an answer, which a busy machine delays


@pytest.fixture(autouse=True)
def empty(monkeypatch: pytest.MonkeyPatch) -> None:
    events.forget()
    monkeypatch.setattr(Comparing, "patience", PATIENCE)


def swap_in_lines(group: Group) -> None:
    def one() -> None:
        group.all_reduce(torch.ones(1))  # one

    def two() -> None:
        group.all_reduce(torch.ones(1))  # two

    for _ in range(3):
        for act in (one, two) if group.rank() == 0 else (two, one):
            act()
        group.barrier()


def branches(group: Group) -> None:
    for root in range(group.size()):
        if group.rank() == root:
            group.broadcast(torch.ones(3), root)
        else:
            group.broadcast(torch.empty(3), root)
    if group.rank() == 0:
        group.all_reduce(torch.ones(2))
    else:
        group.all_reduce(torch.zeros(2))


def test_sums_of_shards_may_leave_from_any_line() -> None:
    def one_rank(group: Group) -> Log:
        ddp = DistributedDataParallel(torch.nn.Linear(2, 1), process_group=group, shards=2)
        for step in range(3):  # from the second one on, one rank sends in a backward pass
            for index in ddp.shards_of(range(2) if group.rank() == step % 2 else []):
                with ddp.shard(Shard(0, step, index, 2)):
                    ddp(torch.ones(1, 2)).sum().backward()
        assert group.board is not None
        return log_of(group.board)

    for log in run_ranks(2, one_rank):
        assert [kind for kind in log.kinds if "all_reduce" in kind.call] == []


def said(err: str) -> list[str]:
    return [row for row in err.splitlines() if "from different lines" in row]


def test_swapped_calls_are_told_once_with_both_ranks_and_lines(
    capfd: pytest.CaptureFixture[str],
) -> None:
    run_ranks(2, swap_in_lines)
    (row,) = said(capfd.readouterr().err)
    assert row.startswith("paceline: call 1 of the group threads:0,1 was made from different")
    assert "rank 0 called all_reduce SUM of float32[1] at " in row
    assert "rank 1 called all_reduce SUM of float32[1] at " in row
    first, second = (row.index(f"test_order.py:{line_of(name)}") for name in ("one", "two"))
    assert first < second
    assert [f"paceline: {text}" for _, text in events.notes] == [row]


@pytest.mark.parametrize("checked", [False, True])
def test_unequal_sizes_are_told_of_a_group_that_does_not_check_them(
    checked: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    def one_rank(group: Group) -> None:
        assert group.board is not None
        group.board.checked = checked
        with mock.patch.object(group._engine, "run"):  # as NCCL may do: no error, any numbers
            for _ in range(3):
                group.all_reduce(torch.ones(4 + group.rank()))
        group.barrier()

    run_ranks(2, one_rank)
    rows = [row for row in capfd.readouterr().err.splitlines() if "not the same" in row]
    assert len(rows) == (0 if checked else 1)
    for row in rows:
        assert row.startswith("paceline: call 1 of the group threads:0,1 is not the same on all")
        assert "rank 0 called all_reduce SUM of float32[4] at " in row
        assert "rank 1 called all_reduce SUM of float32[5] at " in row
        assert "test_order.py:" in row


def test_a_call_that_has_failed_is_not_told_once_more() -> None:
    def one_rank(group: Group) -> Log:
        with pytest.raises(MismatchError):
            group.all_reduce(torch.ones(4 + group.rank()))
        assert group.board is not None
        return log_of(group.board)

    assert run_ranks(2, one_rank) == [Log([], []), Log([], [])]


def line_of(name: str) -> int:
    with open(__file__) as file:
        return next(n for n, text in enumerate(file, start=1) if text.endswith(f"# {name}\n"))


def test_branches_for_the_root_and_the_rest_are_not_told(capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(3, branches)
    assert said(capfd.readouterr().err) == []


@pytest.mark.parametrize("joinables", [1, 2])
def test_a_rank_that_stands_in_for_others_in_join_is_not_told(
    joinables: int, capfd: pytest.CaptureFixture[str]
) -> None:
    def one_rank(group: Group) -> int:
        models = [
            DistributedDataParallel(nn.Linear(2, 2), process_group=group) for _ in range(joinables)
        ]
        with Join(models):
            for _ in range(6 - 2 * group.rank()):
                for model in models:
                    model(torch.ones(1, 2)).sum().backward()
        return sum(entry.purpose == events.STANDING_IN for entry in list(events.calls))

    assert min(run_ranks(3, one_rank)) > 0
    assert said(capfd.readouterr().err) == []


def test_a_log_holds_what_was_called_after_a_number_and_from_where() -> None:
    def one_rank(group: Group) -> Log:
        for _ in range(5):
            group.barrier()
        assert group.board is not None
        return log_of(group.board, after=3)

    for log in run_ranks(2, one_rank):
        assert [number for number, _ in log.calls] == [4, 5]
        assert len(log.kinds) == 1
        assert log.kinds[0].call == "barrier"


def swap_in_process(meeting: Meeting, backend: str, end: str) -> None:
    be_patient(PATIENCE)
    group = meeting.new_group(backend)
    swap_in_lines(group)
    if end == "shutdown":
        group.shutdown()


@pytest.mark.parametrize("end", ["shutdown", "exit"])
@pytest.mark.parametrize("backend", [pytest.param("shm", marks=needs_shm), "gloo"])
def test_a_short_program_is_told_before_it_ends(
    backend: str, end: str, capfd: pytest.CaptureFixture[str]
) -> None:
    spawn_ranks(2, swap_in_process, backend, end)
    assert len(said(capfd.readouterr().err)) == 1


def drop_in_process(meeting: Meeting, backend: str, first: int) -> None:
    """Swap calls and drop the group; rank ``first`` ends last, long after it has dropped it."""
    be_patient(PATIENCE)
    store, group = meeting.store(), meeting.new_group(backend)
    with mock.patch.object(watch.comparing, "look"):  # as if it had just looked
        swap_in_lines(group)
        del group
        gc.collect()
        if meeting.rank == first:
            watch.wake()
            assert until(lambda: watch._thread is None)
            store.set("it has dropped the group", "")
            store.get("the other has ended")
        else:
            store.get("it has dropped the group")
            watch.end()
            store.set("the other has ended", "")


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("backend", [pytest.param("shm", marks=needs_shm), "gloo"])
def test_a_swap_is_told_though_a_rank_drops_the_group_and_goes_on(
    backend: str, first: int, capfd: pytest.CaptureFixture[str]
) -> None:
    spawn_ranks(2, drop_in_process, backend, first)
    assert len(said(capfd.readouterr().err)) == 1


def test_a_rank_hears_and_answers_until_it_has_left_its_group() -> None:
    stopped: list[bool] = []

    def take_leave(_board: events.Board) -> None:
        stopped.append(watch._stop_if_idle())  # as the recorder's thread does at any time

    with mock.patch.object(watch.peers, "take_leave", take_leave):
        run_ranks(2, lambda group: group.barrier())
    assert stopped == [False, False]


def test_a_rank_that_leaves_tells_the_one_that_compares_its_calls() -> None:
    size, peers = 200, Peers()
    board = SimpleNamespace(number=1, rank=100, size=size)
    store = mock.Mock()
    store.get = lambda key: msgspec.msgpack.encode(an_address(key.rpartition("/")[2]))
    peers._stores[1], peers._turns[1] = store, 1
    peers.look_up(board)
    told = [address.process for address in peers._some(board, 0.0)]
    assert told == ["99", *(str(rank) for rank in range(101, 100 + LEFT_TOLD))]


def an_address(process: str) -> Address:
    return Address(process, "", 0, b"", "machine", "network", 1)


def test_a_long_program_is_told_while_it_runs(capfd: pytest.CaptureFixture[str]) -> None:
    def one_rank(group: Group) -> None:
        swap_in_lines(group)
        if group.rank() == 0:
            watch.look()
        group.barrier()

    run_ranks(2, one_rank)
    assert len(said(capfd.readouterr().err)) == 1


def test_the_recorder_can_be_off(capfd: pytest.CaptureFixture[str]) -> None:
    recorder.configure(on=False)
    try:
        run_ranks(2, swap_in_lines)
    finally:
        recorder.configure()
    assert said(capfd.readouterr().err) == []
