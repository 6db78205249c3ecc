"""Ring two: when a call is late, what is printed, and what the watching leaves behind."""

import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import msgspec
import pytest
import torch

from paceline import recorder
from paceline.errors import CollectiveTimeoutError
from paceline.groups import Group
from paceline.recorder import account, channel, events
from paceline.recorder.account import account_of
from paceline.recorder.explain import Explanation, Found
from paceline.recorder.peers import Peers
from paceline.recorder.places import Address
from paceline.recorder.threads import frames
from paceline.recorder.watch import WARN_AFTER, Watch, watch
from paceline.testing import Meeting, run_ranks, spawn_ranks
from tests.recorder.patience import await_line, be_patient
from tests.waiting import until

DEADLINE = 600.0


@pytest.fixture(autouse=True)
def empty(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(watch.peers, "patience", DEADLINE)
    recorder.finish_explaining(DEADLINE)  # what earlier tests have left to explain
    events.forget()
    yield
    recorder.configure()


def looks() -> Iterator[None]:
    """Look again and again, until a test would have failed."""
    until = time.monotonic() + DEADLINE
    while time.monotonic() < until:
        watch.look()
        yield


def test_a_late_call_is_explained_once_on_every_rank_that_waits(
    capfd: pytest.CaptureFixture[str],
) -> None:
    explained, boards = threading.Event(), dict[int, events.Board]()
    recorder.configure(warn_after=DEADLINE)  # until all are where they are to be seen

    def one_rank(group: Group) -> None:
        assert group.board is not None
        boards[group.rank()] = group.board
        group.barrier()
        if group.rank() == 1:
            explained.wait(DEADLINE)  # rank 1 is stuck
        group.all_reduce(torch.ones(3))

    def await_notes() -> None:
        try:
            assert until(lambda: sum(e.kind == "all_reduce" for e in list(events.calls)) == 2)
            for rank in (0, 2):
                await_line(boards[rank], 1, "rank 1 is stuck")
            recorder.configure(warn_after=0.2)
            for _ in looks():
                if len(events.notes) == 2:
                    break
            for _ in range(3):  # more looks say nothing more
                watch.look()
            recorder.configure(warn_after=DEADLINE)
        finally:
            explained.set()

    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(await_notes)
        run_ranks(3, one_rank)
        looking.result()
    printed = [row for row in capfd.readouterr().err.splitlines() if row.startswith("paceline:")]
    assert len(printed) == 2
    assert {row.split()[2] for row in printed} == {"0", "2"}
    for row in printed:
        assert "Rank 1 is missing: it is at" in row
        assert "explained.wait(DEADLINE)  # rank 1 is stuck" in row
        assert "test_watch.py" in row
    assert [f"paceline: {text}" for _, text in events.notes] == printed


class Queue:
    """A device's queue that stands still until it is let go on."""

    def __init__(self, reached: bool) -> None:
        self.reached, self.done = reached, False

    def comes(self) -> None:
        """Nothing is counted."""

    def is_reached(self) -> bool:
        return self.reached

    def is_completed(self) -> bool:
        return self.done


def test_a_call_that_a_device_does_not_end_is_explained(capfd: pytest.CaptureFixture[str]) -> None:
    recorder.configure(warn_after=DEADLINE)  # until both have made the call
    both_have = threading.Barrier(2, action=lambda: recorder.configure(warn_after=0.2))
    explained, queues = threading.Event(), [Queue(reached=True), Queue(reached=False)]

    def one_rank(group: Group) -> None:
        assert group.board is not None
        group.board.marks = queues[group.rank()]
        group.all_reduce(torch.ones(3))  # returns, as on a device
        entry = group.board.on_device
        assert entry is not None
        both_have.wait(DEADLINE)
        if group.rank() == 0:
            for _ in looks():
                if any(board is group.board for board, _ in list(events.notes)):
                    break
            queues[0].done = queues[1].done = True
            watch.look()
            assert entry.finished
            explained.set()
        assert explained.wait(DEADLINE)
        group.board.marks = None

    run_ranks(2, one_rank)
    rows = [row for row in capfd.readouterr().err.splitlines() if "Rank 1 has made" in row]
    assert len(rows) == 1
    assert "but its device is still busy with what came before it" in rows[0]
    assert "group.all_reduce(torch.ones(3))" not in rows[0]
    assert "test_watch.py" in rows[0]


def test_a_call_that_a_device_has_ended_is_not_looked_at_again() -> None:
    def one_rank(group: Group) -> None:
        assert group.board is not None
        queue = Queue(reached=True)
        queue.done, group.board.marks = True, queue
        group.all_reduce(torch.ones(3))
        entry = group.board.on_device
        assert entry is not None
        assert group.board.reopen(3600) is None
        assert group.board.on_device is entry  # too early to ask
        assert group.board.reopen(0) is None
        assert group.board.on_device is None

    run_ranks(2, one_rank)


def test_what_comes_in_time_is_not_explained(capfd: pytest.CaptureFixture[str]) -> None:
    recorder.configure(warn_after=DEADLINE)  # a busy machine takes its time

    def one_rank(group: Group) -> None:
        for _ in range(20):
            group.all_reduce(torch.ones(3))
            watch.look()

    run_ranks(2, one_rank)
    assert not events.notes
    assert "paceline:" not in capfd.readouterr().err


def test_a_store_that_is_busy_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a TCPStore is while a thread waits in it."""
    busy, free = threading.Event(), threading.Event()

    def wait(*_given: object) -> None:
        busy.set()
        assert free.wait(DEADLINE)

    def one_rank(group: Group) -> None:
        if group.rank() == 0:
            assert busy.wait(DEADLINE)
            looking = threading.Thread(target=watch.look)
            looking.start()
            looking.join(DEADLINE / 2)
            stuck = looking.is_alive()
            free.set()
            assert not stuck
        group.barrier()

    monkeypatch.setattr(watch.peers, "look_up", wait)
    run_ranks(2, one_rank)


def test_the_warning_time_is_ten_seconds_or_what_one_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Watch().warning_time() == WARN_AFTER == 10
    monkeypatch.setenv("PACELINE_WARN_AFTER", "2.5")
    assert Watch().warning_time() == 2.5
    assert Watch().tick() == 2.5 / 4
    monkeypatch.setenv("PACELINE_WARN_AFTER", "0")
    assert Watch().warning_time() == float("inf")
    monkeypatch.setenv("PACELINE_WARN_AFTER", "soon")
    assert Watch().warning_time() == WARN_AFTER
    recorder.configure(warn_after=4)
    assert watch.warning_time() == 4


def test_where_calls_usually_take_long_one_is_late_after_five_times_that() -> None:
    def one_rank(group: Group) -> float:
        for _ in range(3):
            group.barrier()
        *earlier, last = [e for e in list(events.calls) if e.board is group.board]
        for entry in earlier:
            entry.finished = entry.began + 4_000_000_000
        return watch._threshold(last)

    assert run_ranks(2, one_rank) == [20.0, 20.0]


def test_an_engines_error_is_left_alone_if_nobody_is_to_blame() -> None:
    def one_rank(group: Group) -> None:
        group.barrier()
        own = next(e for e in list(events.calls) if e.board is group.board)
        innocent, other = RuntimeError("Oh"), KeyError("Oh")
        watch.failed(own, innocent)
        watch.failed(own, other)
        recorder.finish_explaining(DEADLINE)
        assert str(innocent) == "Oh"
        assert (innocent.args, other.args) == (("Oh",), ("Oh",))
        group.barrier()

    run_ranks(2, one_rank)


def test_an_engines_error_gets_the_verdict_as_text_if_somebody_is_to_blame() -> None:
    through = threading.Event()  # rank 1 is out of the barrier

    def one_rank(group: Group) -> tuple[str, str]:
        group.barrier()
        own = next(e for e in list(events.calls) if e.board is group.board)
        late = RuntimeError("Timed out")
        if group.rank() == 1:
            through.set()
        else:
            assert through.wait(60)
            own.sequence = 9  # as if it had called more often than the other
            watch.failed(own, late)
            recorder.finish_explaining(DEADLINE)
        group.barrier()
        return str(late), events.notes[-1][1]

    text, note = run_ranks(2, one_rank)[0]
    assert text == f"Timed out\npaceline: {note}"
    assert "Rank 1 is missing" in note


class LookedTooEarly(Future[None]):
    """A look-up that is under way and finds nobody: the others come later."""

    asked = False

    def done(self) -> bool:
        return self.asked

    def result(self, timeout: float | None = None) -> None:
        self.asked = True


def test_who_came_after_a_lookup_began_is_known_all_the_same() -> None:
    def one_rank(group: Group) -> set[int]:
        group.barrier()
        board, peers = group.board, watch.peers
        assert board is not None
        with watch._looking:  # nobody else looks meanwhile
            peers._known.pop(board.number, None)
            peers._stores[board.number] = board.store()
            peers._lookups[board.number] = LookedTooEarly()
            found = set(peers.known(board, 60.0))
        group.barrier()
        return found

    assert run_ranks(2, one_rank) == [{1}, {0}]


def test_a_rank_that_waits_for_a_started_call_of_another_group_says_so() -> None:
    """As in a backward pass of a model on a part of the ranks."""
    asked, told = threading.Event(), list[str]()

    def one_rank(group: Group) -> None:
        other = group.split([[0, 1]])
        group.barrier()
        if group.rank() == 0:
            threading.Thread(target=ask, args=(group.board,)).start()
            other.all_reduce(torch.ones(3), async_op=True).wait()  # it waits here
        else:
            asked.wait(DEADLINE)
            other.all_reduce(torch.ones(3))

    def ask(board: events.Board) -> None:
        while not told or not told[-1]:
            told.append(account_of(board).elsewhere)
        asked.set()

    run_ranks(2, one_rank)
    assert told[-1].startswith("all_reduce of the group threads:0,1 at ")


def test_a_log_that_cannot_be_saved_at_the_end_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("PACELINE_RECORD", str(file / "run"))
    run_ranks(1, lambda group: group.barrier())
    Watch().end()
    assert f"paceline: nothing was recorded into {file / 'run'}: " in capsys.readouterr().err


# -- threads, ports and forks -----------------------------------------------------------------


def recorder_threads() -> list[str]:
    """But those that ask, which end by themselves; a store may keep one of them waiting."""
    names = [thread.name for thread in threading.enumerate()]
    named = [name for name in names if name.startswith("paceline-recorder")]
    return [name for name in named if name != "paceline-recorder-asks"]


def where_they_are() -> str:
    """For whoever reads that one of them did not end."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = [
        f"{names[number]}:\n{''.join(traceback.format_stack(frame))}"
        for number, frame in frames().items()
        if str(names.get(number)).startswith("paceline-recorder")
    ]
    boards = [(board.name, board.closed, board.group()) for board in events.boards.values()]
    return "\n".join([*stacks, f"{boards=}", f"{watch.explanations.under_way=}"])


def test_the_thread_lives_as_long_as_there_are_groups() -> None:
    assert until(lambda: recorder_threads() == []), where_they_are()  # of the tests before
    seen: list[list[str]] = []

    def one_rank(group: Group) -> None:
        group.barrier()
        if group.rank() == 0:
            seen.append(recorder_threads())
        group.barrier()

    run_ranks(2, one_rank)
    assert seen == [["paceline-recorder"]], "threads of one process need no port"
    assert until(lambda: recorder_threads() == []), where_they_are()


def fork_a_child(meeting: Meeting) -> tuple[int, int]:
    """How a forked child sees the recorder, and whether the rank can be asked afterwards."""
    be_patient(DEADLINE)
    group = meeting.new_group("gloo")
    group.barrier()
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        alive = sum(t.name.startswith("paceline-recorder") for t in threading.enumerate())
        os.write(writer, bytes([alive, len(events.boards)]))
        os._exit(0)
    os.waitpid(child, 0)
    alive, boards = os.read(reader, 2)
    group.barrier()
    other = watch.peers.hear(group.board, [1 - meeting.rank])[1 - meeting.rank]
    group.barrier()
    group.shutdown()
    return alive + boards, other.rank


def test_a_forked_child_is_no_rank_and_the_parent_still_answers() -> None:
    assert spawn_ranks(2, fork_a_child) == [(0, 1), (0, 0)]


def fork_while_all_is_locked(meeting: Meeting) -> tuple[int, int, int]:
    """How a child ends that was forked while the recorder's threads held all its locks."""
    be_patient(DEADLINE)
    group = meeting.new_group("gloo")
    group.barrier()
    board = group.board
    assert board is not None
    watch.peers.known(board, seconds=DEADLINE)
    error = CollectiveTimeoutError(0, "all_reduce", 1, (1,))
    explanation = Explanation(lambda: Found("too late"))
    explanation.attach(error)
    locks = [explanation._lock, watch._lock, watch._looking, watch.peers._lock]
    locks += [watch.explanations._lock, watch.comparing._lock]
    for lock in locks:
        lock.acquire()
    child = os.fork()
    if child == 0:
        _use_all_in_the_child(error, board)
    for lock in locks:
        lock.release()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    group.barrier()
    watch.peers._listener.read_all(DEADLINE)
    farewells = len(watch.peers.farewells.get(board.number, {}))
    other = watch.peers.hear(board, [1 - meeting.rank])[1 - meeting.rank]
    group.barrier()
    group.shutdown()
    return code, farewells, other.rank


def _use_all_in_the_child(error: CollectiveTimeoutError, board: events.Board) -> None:
    """Does what a program may do in a child, then ends as one does; a deadlock ends it too."""
    signal.alarm(int(DEADLINE / 2))
    try:
        assert "timed out" in str(error)
        recorder.summary()
        watch.look()
        recorder.finish_explaining()
        recorder.configure(warn_after=1.0)
        run_ranks(2, lambda group: group.barrier())
        board.close()  # as when the parent's group is collected in the child
        watch.end()
    except BaseException:
        os._exit(1)
    os._exit(7)


def test_a_child_forked_at_any_moment_is_not_stuck_and_does_not_end_its_parent() -> None:
    found = spawn_ranks(2, fork_while_all_is_locked)
    assert found == [(7, 0, 1), (7, 0, 0)]


def measure_clocks(meeting: Meeting) -> float:
    be_patient(DEADLINE)
    group = meeting.new_group("gloo")
    group.barrier()
    board = group.board
    address = watch.peers.known(board, seconds=DEADLINE)[1 - meeting.rank]
    assert address.machine.startswith(socket.gethostname())
    offset = watch.peers.clock(address)
    group.barrier()
    group.shutdown()
    return offset


def test_two_ranks_of_one_host_find_their_clocks_alike() -> None:
    for offset in spawn_ranks(2, measure_clocks):
        assert abs(offset) < 1.0


def test_the_time_is_asked_with_the_patience_of_any_talk(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def ask(_address: Address, _question: bytes, patience: float = 0.0) -> bytes:
        given.append(patience)
        return msgspec.msgpack.encode(time.time())

    monkeypatch.setattr(channel, "ask", ask)
    peers = Peers()
    peers.patience = 8.0
    peers.clock(Address("process", "", 0, b"", "machine", "network", 1))
    assert set(given) == {4.0}


def test_a_step_without_a_backward_pass_is_told_long_after_others_are_not() -> None:
    ran = [True] * 3 + [False] + [True] * 60
    board = object()
    kept = [
        SimpleNamespace(
            track=SimpleNamespace(board=board, model=1),
            number=number,
            code=None,
            lasti=0,
            backward_began=int(backward),
        )
        for number, backward in enumerate(ran, 1)
    ]
    with mock.patch.object(account.events, "steps", kept):
        told = account._steps(board, 16)
        assert [step.number for step in told] == [4, *range(49, 65)]
        assert len(account._steps(board, account.events.STEPS)) == 64
