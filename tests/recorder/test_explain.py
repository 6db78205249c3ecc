"""Explanations come after their errors: nobody waits for them, they appear, and only once."""

import gc
import os
import pickle
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from multiprocessing.util import Finalize
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline import recorder
from paceline.errors import CollectiveTimeoutError, PacelineError
from paceline.groups import Group
from paceline.recorder import events, explain
from paceline.recorder import watch as watching
from paceline.recorder.account import Account
from paceline.recorder.explain import Explanation, Found
from paceline.recorder.peers import Silence
from paceline.recorder.threads import frames
from paceline.recorder.watch import watch
from paceline.testing import Meeting, run_ranks, spawn_ranks
from tests.marks import needs_shm
from tests.recorder.patience import be_patient
from tests.waiting import until

DEADLINE = 600.0
TEXT = "it was the cat"


def explanation(found: Found, go_on: threading.Event | None = None) -> Explanation:
    def find() -> Found:
        if go_on is not None:
            assert go_on.wait(DEADLINE)
        return found

    return Explanation(find)


def an_error() -> CollectiveTimeoutError:
    return CollectiveTimeoutError(0, "all_reduce", 1, (1,), seconds=1.0)


def torchs() -> RuntimeError:
    return RuntimeError("Connection closed")


both_kinds = pytest.mark.parametrize("make", [an_error, torchs])


@both_kinds
def test_what_is_known_before_the_error_is_put_into_words_is_part_of_them(
    make: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    error, found = make(), explanation(Found(TEXT, {"verdict": TEXT}))
    found.attach(error)
    found.seek()
    assert str(error).endswith(f"\npaceline: {TEXT}")
    assert TEXT not in capsys.readouterr().err


@both_kinds
def test_what_is_known_only_later_is_printed_once_and_not_said_again(
    make: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    error, found = make(), explanation(Found(TEXT, {"verdict": TEXT}))
    found.attach(error)
    assert TEXT not in str(error)
    found.seek()
    assert capsys.readouterr().err == f"paceline: {TEXT}\n"
    assert TEXT not in str(error), "once is enough"
    if isinstance(error, PacelineError):
        assert error.verdict == TEXT, "code can read it all the same"


@both_kinds
def test_where_there_is_nothing_to_say_nothing_is_said(
    make: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    error, found = make(), explanation(Found())
    found.attach(error)
    before = str(error)
    found.seek()
    assert str(error) == before
    assert "paceline" not in before + capsys.readouterr().err


@both_kinds
def test_an_explained_error_travels_with_its_explanation(make: Any) -> None:
    error, found = make(), explanation(Found(TEXT, {"verdict": TEXT}))
    found.attach(error)
    found.seek()
    there = pickle.loads(pickle.dumps(error))
    assert str(there) == str(error)
    assert TEXT in str(there)


def test_an_error_is_not_lost_where_no_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_room(*_given: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(explain, "in_thread", no_room)
    explanations, error = explain.Explanations(), an_error()
    entry: Any = SimpleNamespace(board=SimpleNamespace(number=1))
    text = str(error)
    explanations.explain(entry, error, "kind", lambda: Found, then=lambda: None)
    assert not explanations.under_way
    assert str(error) == text


def test_a_search_that_fails_leaves_the_error_as_it_is() -> None:
    def find() -> Found:
        raise OSError("no route to host")

    error, found = an_error(), Explanation(find)
    found.attach(error)
    found.seek()
    assert error.wait_for_verdict() == ""


# -- on the path of an error ------------------------------------------------------------------


class Deaf:
    """Peers that answer only when they are let; counts how often they were asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked, self.let = 0, threading.Event()
        monkeypatch.setattr(watch.peers, "hear", self.hear)

    def hear(
        self, board: events.Board, ranks: Sequence[int], seconds: float = 2.0
    ) -> dict[int, Account | Silence]:
        self.asked += 1
        assert self.let.wait(DEADLINE)
        return {rank: Silence.MUTE for rank in ranks if rank != board.rank}


@pytest.fixture
def deaf(monkeypatch: pytest.MonkeyPatch) -> Iterator[Deaf]:
    peers = Deaf(monkeypatch)
    yield peers
    peers.let.set()
    recorder.finish_explaining(DEADLINE)


def test_an_error_is_raised_while_the_others_are_still_asked(deaf: Deaf) -> None:
    given_up = threading.Event()

    def one_rank(group: Group) -> CollectiveTimeoutError | None:
        if group.rank() == 1:
            assert given_up.wait(DEADLINE)
            return None
        with pytest.raises(CollectiveTimeoutError) as caught:
            group.allreduce([torch.ones(2)], timeout=0.1).wait()
        given_up.set()
        return caught.value

    error = run_ranks(2, one_rank)[0]
    assert error is not None
    assert error.verdict == "", "nobody has said anything yet"
    deaf.let.set()
    assert "Rank 1 does not answer" in error.wait_for_verdict(DEADLINE)


def test_calls_that_fail_together_are_explained_together(deaf: Deaf) -> None:
    given_up = threading.Event()

    def one_rank(group: Group) -> list[CollectiveTimeoutError]:
        if group.rank() == 1:
            assert given_up.wait(DEADLINE)
            return []
        works = [group.all_reduce(torch.ones(2), timeout=0.1, async_op=True) for _ in range(8)]
        errors = []
        for work in works:
            with pytest.raises(CollectiveTimeoutError) as caught:
                work.wait()
            errors.append(caught.value)
        given_up.set()
        return errors

    errors = run_ranks(2, one_rank)[0]
    deaf.let.set()
    said = {error.wait_for_verdict(DEADLINE) for error in errors}
    assert len(errors) == 8
    assert len(said) == 1
    assert "Rank 1 does not answer" in said.pop()
    assert deaf.asked == 1


def test_failures_beyond_some_at_once_start_no_more_threads(deaf: Deaf) -> None:
    def one_rank(group: Group) -> None:
        group.barrier()
        own = next(e for e in list(events.calls) if e.board is group.board)
        if group.rank() == 0:
            for number in range(3 * explain.AT_ONCE):
                error = CollectiveTimeoutError(0, "recv", 0, (1, number))
                watch.failed(own, error)
        group.barrier()

    run_ranks(2, one_rank)
    assert deaf.asked <= explain.AT_ONCE


# -- real processes ---------------------------------------------------------------------------


def wait_for_a_stopped_rank(meeting: Meeting) -> str:
    """The error's text while the others are still asked; the process ends right after it."""
    watching.AT_EXIT = DEADLINE  # a busy machine takes its time
    group = meeting.new_group("shm", timeout=timedelta(seconds=DEADLINE))
    pid = torch.tensor(os.getpid())
    group.broadcast(pid, 1)
    if meeting.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    Finalize(None, os.kill, (pid.item(), signal.SIGKILL), exitpriority=50)  # after the recorder's
    assert until(lambda: is_stopped(int(pid)))
    in_words, hear = threading.Event(), watch.peers.hear

    def hear_later(*args: Any) -> Any:
        assert in_words.wait(DEADLINE)
        return hear(*args)

    watch.peers.hear = hear_later  # type: ignore[method-assign]
    try:
        group.allreduce([torch.ones(4)], timeout=0.3).wait()
    except CollectiveTimeoutError as error:
        text = str(error)
        in_words.set()
        return text
    raise AssertionError("it must not succeed")


def is_stopped(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state == "T"


@needs_shm
def test_the_explanation_still_appears_when_the_process_ends_right_after_the_error(
    capfd: pytest.CaptureFixture[str],
) -> None:
    text = spawn_ranks(2, wait_for_a_stopped_rank, may_die=[1])[0]
    err = capfd.readouterr().err
    assert "waiting for rank 1" in text
    assert "does not answer" not in text, "it is too early to know"
    assert err.count("Rank 1 does not answer: its process is stopped") == 1
    assert "called at" in err


def train_with_eight_buckets(meeting: Meeting) -> tuple[str, int]:
    """What a backward pass raises, and how often the other ranks were asked for it."""
    explain.SHARED = DEADLINE  # a busy machine lets calls fail one after the other
    group = meeting.new_group("shm")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    ddp = paceline.DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.01)
    for _ in range(2):
        ddp(torch.ones(2, 64)).sum().backward()
    asked: list[int] = []
    hear = watch.peers.hear

    def counted(*args: Any) -> Any:
        asked.append(1)
        return hear(*args)

    watch.peers.hear = counted  # type: ignore[method-assign]
    loss = ddp(torch.ones(2, 64)).sum()
    if meeting.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as caught:
        loss.backward()
    recorder.finish_explaining(DEADLINE)
    return type(caught.value).__name__, len(asked)


@needs_shm
def test_a_killed_rank_is_asked_for_once_however_many_buckets_wait_for_it() -> None:
    _, *survivors = spawn_ranks(3, train_with_eight_buckets, may_die=[0])
    assert survivors == [("PeerDiedError", 1)] * 2


def test_last_words_are_read_before_a_rank_is_called_gone() -> None:
    said = spawn_ranks(2, leave_with_words)[0]
    assert said == ["its process has ended"] * 20


def leave_with_words(meeting: Meeting) -> list[str]:
    """How a rank's board ends, as the other one hears it right after the port is closed."""
    be_patient(DEADLINE)
    heard = []
    for _ in range(20):
        group = meeting.new_group("gloo")
        board = group.board
        assert board is not None
        group.barrier()
        watch.peers.known(board, DEADLINE)
        group.barrier()
        if meeting.rank == 1:
            watch.peers.take_leave(board, "its process has ended")
            watch.peers.rest()
            meeting.store().set(f"left/{board.number}", "yes")
        else:
            meeting.store(timedelta(seconds=DEADLINE)).wait([f"left/{board.number}"])
            said = watch.peers.hear(board, [1])[1]
            heard.append(said.ended if isinstance(said, Account) else str(said))
        group.barrier()
        group.shutdown()
    return heard


# -- what is asked where a thread is ------------------------------------------------------------


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="collected between lines of Python only")
def test_no_garbage_is_collected_while_the_interpreter_says_where_its_threads_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    look, collected, inside = sys._current_frames, list[str](), False

    def look_closely() -> dict[int, FrameType]:
        nonlocal inside
        inside = True
        found = look()
        inside = False
        return found

    def note(phase: str, _: object) -> None:
        if inside:
            collected.append(phase)

    monkeypatch.setattr(sys, "_current_frames", look_closely)
    go_on, before = threading.Event(), gc.get_threshold()
    threads = [threading.Thread(target=go_on.wait, args=(DEADLINE,)) for _ in range(8)]
    for thread in threads:  # an object is made for each
        thread.start()
    gc.callbacks.append(note)
    gc.set_threshold(1)  # at each object that can be part of a cycle
    try:
        assert threading.get_ident() in frames()
        assert gc.isenabled()
        gc.disable()
        frames()
        assert not gc.isenabled(), "whoever turned it off finds it off"
    finally:
        gc.enable()
        gc.set_threshold(*before)
        gc.callbacks.remove(note)
        go_on.set()
        for thread in threads:
            thread.join()
    assert collected == []
