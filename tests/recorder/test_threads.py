"""What other threads may do between two lines of the recorder, forced to happen there."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from paceline import recorder
from paceline._reducer.diary import Diary
from paceline.recorder import account, channel, events, host_metrics, run, saving, threads
from paceline.recorder.account import Silence, account_of
from paceline.recorder.listener import Listener
from paceline.recorder.peers import Peers
from paceline.recorder.verdict import Trouble, judge
from paceline.recorder.watch import Watch
from tests.waiting import until

DEADLINE = 60.0
CALL = SimpleNamespace(kind="all_reduce", inputs=(), outputs=(), reduction="sum", root=-1)


class Ranks:
    """Groups, as far as the recorder sees them."""

    def __init__(self) -> None:
        self.kept: list[object] = []

    def board(self, rank: int = 0, **facts: object) -> events.Board:
        self.kept.append(group := SimpleGroup())
        board = events.Board(group, rank, 2, **facts)  # type: ignore[arg-type]
        board.checks = "off"
        events.boards[board.number] = board
        return board


class SimpleGroup:
    pass


class Queue:
    """How far a device has come."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.done = error, False

    def comes(self) -> None:
        pass

    def is_reached(self) -> bool:
        self.is_completed()
        return True

    def is_completed(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.done


class Alone(Peers):
    """Nobody is known; ``meanwhile`` happens when somebody is first looked up."""

    meanwhile: Callable[[], None] | None = None

    def known(self, board: events.Board, seconds: float = 0.0) -> dict[int, object]:  # type: ignore[override]
        happens, self.meanwhile = self.meanwhile, None
        if happens is not None:
            in_another_thread(happens)
        return {}

    def complete(self, board: events.Board) -> bool:
        return False


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    events.forget()
    yield Ranks()
    events.forget()


@pytest.fixture
def watch() -> Watch:
    """One that looks only when it is told to."""
    found = Watch()
    found.peers = Alone()
    found.comparing._peers = found.peers
    found._ending = SimpleNamespace()  # type: ignore[assignment]
    found._thread = threading.current_thread()
    found.warn_after = 1e-6
    return found


def in_another_thread(action: Callable[[], object]) -> None:
    thread = threading.Thread(target=action)
    thread.start()
    thread.join(DEADLINE)
    assert not thread.is_alive()


def begin(board: events.Board) -> events.Entry:
    return board.begin(CALL, 0)


# -- looks --------------------------------------------------------------------------------------


def test_a_group_that_opens_while_others_are_looked_up_is_looked_up_next(
    ranks: Ranks, watch: Watch
) -> None:
    first, second = ranks.board(), ranks.board()
    watch.opened(first)
    watch.peers.meanwhile = lambda: watch.opened(second)  # type: ignore[attr-defined]
    watch.look()
    assert watch._fresh == [first, second]


def test_a_replay_is_watched_though_it_was_looked_at_before_its_end_could_be_asked_for(
    ranks: Ranks, watch: Watch
) -> None:
    board = ranks.board()
    diary = Diary(SimpleNamespace(board=board), lambda bucket: [])  # type: ignore[arg-type]
    entry = begin(board)
    entry.finished = events.now()  # handed to the device: what a replay notes of its calls
    watch.look()
    replay = Queue()
    diary.follow(replay, entry)  # type: ignore[arg-type]
    for _ in range(2):
        watch.look()
        assert watch._running == [entry]
    replay.done = True
    watch.look()
    assert watch._running == []
    assert board.on_device is None


def test_a_device_that_is_busy_with_a_later_call_has_ended_the_one_before(
    ranks: Ranks, watch: Watch
) -> None:
    here, there = ranks.board(0, one_process=True), ranks.board(1, one_process=True)
    firsts = []
    for board in (here, there):
        board.marks = Queue()
        firsts.append(begin(board))
        firsts[-1].handed_to(board.marks)
        assert board.reopen(0.0) is firsts[-1]  # it takes long
        begin(board).handed_to(board.marks)  # it has ended, and the same marks tell of the next
    told = account_of(there)
    assert judge(watch._case(firsts[0]), {1: told}).kind is Trouble.NOBODY
    assert [call.running for call in told.calls] == [False, False]
    assert [call.on_device for call in told.calls] == [True, True]
    assert not firsts[0].look()


def test_a_bucket_that_is_followed_late_does_not_hide_the_call_after_it(ranks: Ranks) -> None:
    board = ranks.board()
    board.marks = Queue()
    bucket, header = begin(board), begin(board)
    bucket.follow(Queue(), on_device=True)
    header.handed_to(board.marks)
    bucket.runs_until(kept := Queue())
    assert board.on_device is header
    assert board.reopen(0.0) is header
    assert bucket.look()
    kept.done = True
    assert not bucket.look()


def test_an_end_that_is_noted_while_the_recorder_asks_for_it_stays(ranks: Ranks) -> None:
    board = ranks.board()
    entry = begin(board)

    class Waited(Queue):
        def is_completed(self) -> bool:
            if entry.work is not None and not entry.finished:
                entry.finished = 5  # somebody has waited for it meanwhile
            return False

    kept = Waited()
    entry.runs_until(kept)
    board.reopen(0.0)
    assert entry.finished == 5


def test_a_device_that_has_failed_hides_neither_its_rank_nor_the_calls_of_other_groups(
    ranks: Ranks, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    board, other = ranks.board(), ranks.board()
    board.marks = Queue(RuntimeError("CUDA error: device-side assert triggered"))
    begin(board).handed_to(board.marks)
    late, considered = begin(other), list[events.Entry]()
    monkeypatch.setattr(watch, "_consider", considered.append)
    watch.look()
    assert considered == [late]
    board.on_device = board.latest
    assert [call.running for call in account_of(board).calls] == [False]


def test_a_rank_that_cannot_say_where_it_is_is_not_taken_for_one_that_has_ended() -> None:
    def answer(question: bytes) -> bytes:
        raise RuntimeError("an account that cannot be made")

    listener = Listener(answer, lambda letter: None)
    try:
        assert Peers().ask(listener.address("another process", 1)) is Silence.MUTE
    finally:
        listener.close()


# -- where a rank is ----------------------------------------------------------------------------


def test_the_recorders_thread_is_not_where_a_rank_is_though_it_has_the_number_of_its_last_thread(
    ranks: Ranks,
) -> None:
    board = ranks.board()

    def answer() -> account.Account:
        board.thread = threading.get_ident()  # of a thread of the rank's that has ended
        return account_of(board)

    said = threads.in_thread(answer).result(DEADLINE)
    assert said.user is not None
    assert "recorder/threads.py" not in str(said.user) + str(said.deepest)


def test_a_rank_that_has_left_has_made_the_call_that_ended_its_group(ranks: Ranks) -> None:
    board = ranks.board()

    def names(bucket: int) -> list[str]:  # between two lines of the account
        if not board.closed:
            begin(board).finished = 1
            board.closed = "train.py:50"
        return []

    begin(board).finished = 1
    board.latest.track = SimpleNamespace(names=names)  # type: ignore[assignment, union-attr]
    told = account_of(board)
    assert not told.closed or told.made == 2


# -- numbers and files --------------------------------------------------------------------------


class Traffic:
    """Bytes sent; ``meanwhile`` happens in another thread when they are first asked for."""

    meanwhile: Callable[[], object] | None = None

    @property
    def bytes_sent(self) -> float:
        happens, self.meanwhile = self.meanwhile, None
        if happens is not None:
            thread = threading.Thread(target=happens)
            thread.start()
            thread.join(0.2)  # or it waits until these are counted
        return 1000.0


def test_numbers_never_fall_while_groups_are_let_go_of(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "BOARDS", 0)
    traffic, seen = Traffic(), list[recorder.Totals]()
    board = ranks.board(traffic=traffic)
    board.steps, board.made, board.closed = 7, 9, "its end"
    before = recorder.totals()
    traffic.meanwhile = lambda: seen.append(recorder.totals())
    events._forget_old()
    assert until(lambda: bool(seen))
    assert [before, *seen, recorder.totals()] == [recorder.Totals(7, 9, 1000.0)] * 3


def test_numbers_of_two_groups_that_are_let_go_of_at_once_are_both_kept(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "BOARDS", 0)
    one, other = ranks.board(traffic=Traffic()), ranks.board(traffic=Traffic())
    one.closed, gone = "its end", threading.Event()

    def let_go_of_the_other() -> None:
        other.closed = "its end"
        events._forget_old()
        gone.set()

    one.traffic.meanwhile = let_go_of_the_other
    events._forget_old()
    assert gone.wait(DEADLINE)
    assert recorder.totals().bytes_sent == 2000.0


def test_two_threads_that_write_one_file_both_leave_it_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, found, first = tmp_path / "rank-00000.json", list[bytes](), threading.current_thread()
    open_file = run.os.open

    def open_and_wait(*where: object) -> int:
        descriptor = open_file(*where)  # type: ignore[arg-type]
        if threading.current_thread() is first:  # the other writes while this one's draft is open
            in_another_thread(lambda: run.write_whole(path, b"theirs"))
            found.append(path.read_bytes())
        return descriptor

    monkeypatch.setattr(run.os, "open", open_and_wait)
    run.write_whole(path, b"ours")
    assert [*found, path.read_bytes()] == [b"theirs", b"ours"]
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_leaves_no_draft(tmp_path: Path) -> None:
    (tmp_path / "rank-00000.json").mkdir()
    with pytest.raises(OSError, match="rank-00000"):
        run.write_whole(tmp_path / "rank-00000.json", b"{}")
    assert [path.name for path in tmp_path.iterdir()] == ["rank-00000.json"]


def test_a_default_group_that_ends_while_its_rank_is_asked_for_is_none(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks.board(1)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)  # it was, and is no more
    assert saving.ranks_here() == [1]


def test_the_metrics_go_on_after_numbers_that_could_not_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over, asked = threading.Event(), list[float]()

    def numbers() -> dict[int, object]:
        asked.append(time.monotonic())
        if len(asked) == 1:
            raise RuntimeError("whatever it was")
        over.set()
        return {}

    monkeypatch.setattr(host_metrics, "numbers_here", numbers)
    monkeypatch.setattr(host_metrics, "EVERY", 0.01)
    host_metrics._keep(tmp_path, over)
    assert len(asked) == 2


# -- threads that cannot be had -----------------------------------------------------------------


def test_a_process_that_cannot_start_a_thread_answers_when_it_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, refused = threading.Thread.start, threading.Event()

    def refuse(thread: threading.Thread) -> None:
        if "_reply_to_all" in thread.name and not refused.is_set():
            refused.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    listener = Listener(lambda question: question, lambda letter: None)
    address = listener.address("another process", 1)
    said = list[bytes]()
    try:
        waits = threading.Thread(target=lambda: said.append(channel.ask(address, b"1", DEADLINE)))
        waits.start()
        assert refused.wait(DEADLINE)
        assert channel.ask(address, b"2", DEADLINE) == b"2"
        waits.join(DEADLINE)
        assert said == [b"1"]
    finally:
        listener.close()


def test_a_thread_that_is_about_to_ask_does_not_disturb_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = threading.Thread.start

    def end_first(thread: threading.Thread) -> None:
        threads.finish_asking(0.0)
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", end_first)
        future = threads.in_thread(lambda: 5)
    assert future.result(DEADLINE) == 5
