"""spawn_ranks and run_ranks: results, failures that say whose and why, and nothing left behind.

Also the cues, on which a collective fails or waits.
"""

import contextlib
import functools
import gc
import multiprocessing
import os
import queue
import select
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from paceline import testing
from paceline.errors import PeerDiedError, PeerLeftError, RanksFailedError
from paceline.groups import Group
from paceline.testing import Meeting, fail_on_cue, hold_on_cue, run_ranks, spawn_ranks
from tests.waiting import until

CountFrom = Callable[[Callable[[Sequence[testing._Rank]], object]], None]


def hang() -> NoReturn:
    threading.Event().wait()
    raise AssertionError("unreachable")


def failures(*args: object, **options: object) -> RanksFailedError:
    with pytest.raises(RanksFailedError) as caught:
        spawn_ranks(*args, **options)
    return caught.value


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks end after another's failure, and write their stacks, as late as it comes."""
    monkeypatch.setattr(testing, "_GRACE", 60.0)
    monkeypatch.setattr(testing, "_LAST_WORDS", 60.0)


@pytest.fixture
def count_from(monkeypatch: pytest.MonkeyPatch) -> CountFrom:
    """Let the deadline of ranks count from a moment of theirs, however late they come to it."""
    watch = testing._watch

    def count(moment: Callable[[Sequence[testing._Rank]], object]) -> None:
        def watch_from_then(ranks: Sequence[testing._Rank], *words: Any) -> None:
            assert until(lambda: moment(ranks))
            watch(ranks, *words)

        monkeypatch.setattr(testing, "_watch", watch_from_then)

    return count


# Results.


def describe(meeting: Meeting, word: str, tensor: torch.Tensor) -> object:
    return meeting.rank, meeting.size, word, tensor + meeting.rank, os.getpid()


def test_results_come_in_rank_order_from_processes_of_their_own() -> None:
    results = spawn_ranks(3, describe, "hello", torch.zeros(2))
    assert [(rank, size, word) for rank, size, word, _, _ in results] == [
        (0, 3, "hello"),
        (1, 3, "hello"),
        (2, 3, "hello"),
    ]
    assert [tensor.tolist() for _, _, _, tensor, _ in results] == [[0, 0], [1, 1], [2, 2]]
    assert len({os.getpid(), *(pid for *_, pid in results)}) == 4


def big(meeting: Meeting) -> torch.Tensor:
    return torch.full((1_000_000,), float(meeting.rank))


def test_a_result_may_be_larger_than_a_pipe() -> None:
    assert [t.mean().item() for t in spawn_ranks(2, big)] == [0.0, 1.0]


def scale(meeting: Meeting, factor: int) -> int:
    return meeting.rank * factor


def test_a_partial_of_a_module_level_function_will_do() -> None:
    assert spawn_ranks(2, functools.partial(scale, factor=3)) == [0, 3]


# What a rank finds.


def exchange(meeting: Meeting) -> str:
    store = meeting.store()
    store.set(f"key{meeting.rank}", f"from {meeting.rank}")
    del store  # another handle sees the same keys, whoever closed theirs
    return meeting.store().get(f"key{1 - meeting.rank}").decode()


def test_ranks_meet_in_the_store_and_the_next_call_has_a_new_one() -> None:
    assert spawn_ranks(2, exchange) == ["from 1", "from 0"]
    assert spawn_ranks(1, count_keys) == [0]


def count_keys(meeting: Meeting) -> int:
    store = meeting.store()
    return sum(store.check([key]) for key in ("key0", "key1"))


def total(meeting: Meeting) -> float:
    dist.init_process_group("gloo")
    ranks = torch.tensor(meeting.rank)
    dist.all_reduce(ranks)
    dist.destroy_process_group()
    return ranks.item()


def test_torch_can_meet_by_environment() -> None:
    assert spawn_ranks(3, total) == [3, 3, 3]


def surroundings(meeting: Meeting) -> dict[str, object]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "SET", "GIVEN")
    found: dict[str, object] = {name: os.environ.get(name) for name in names}
    return found | {"threads": torch.get_num_threads(), "cwd": os.getcwd()}


def test_a_rank_has_the_environment_of_now_its_own_and_what_was_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spawn_ranks(1, surroundings)  # the server, if it starts here, starts in another environment
    monkeypatch.setenv("SET", "now")
    monkeypatch.setenv("RANK", "99")
    monkeypatch.chdir(tmp_path)
    _, last = spawn_ranks(2, surroundings, env={"GIVEN": "1", "LOCAL_RANK": "7"})
    assert last == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "7",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "SET": "now",
        "GIVEN": "1",
        "threads": 1,
        "cwd": str(tmp_path),
    }
    assert os.environ["RANK"] == "99"


def speak(meeting: Meeting) -> None:
    print(f"out {meeting.rank}")
    print(f"err {meeting.rank}", file=sys.stderr)


def test_output_goes_where_ours_goes_now(capfd: pytest.CaptureFixture[str]) -> None:
    spawn_ranks(2, speak)
    captured = capfd.readouterr()
    assert sorted(captured.out.split("\n")) == ["", "out 0", "out 1"]
    assert sorted(captured.err.split("\n")) == ["", "err 0", "err 1"]


def torch_is_in_the_server(meeting: Meeting) -> bool:
    return "libtorch" in Path(f"/proc/{os.getppid()}/maps").read_text()


def test_ranks_are_forked_from_a_process_that_has_torch() -> None:
    assert spawn_ranks(1, torch_is_in_the_server) == [True]


# Failures.


def fail_in_turn(meeting: Meeting) -> None:
    store = meeting.store()
    if meeting.rank == 1:
        store.set("pid", str(os.getpid()))
        raise KeyError("the culprit")
    with contextlib.suppress(ProcessLookupError):  # if it is gone already
        select.select([os.pidfd_open(int(store.get("pid")))], [], [])
    raise RuntimeError("the follower")


def test_a_failing_rank_is_named_with_its_traceback_the_first_first() -> None:
    error = failures(2, fail_in_turn)
    assert [rank for rank, _ in error.failures] == [1, 0]
    text = error.failures[0][1]
    assert "KeyError: 'the culprit'" in text
    assert "in fail_in_turn" in text
    assert str(error).startswith("rank 1 of 2:\n")
    assert isinstance(error.__cause__, KeyError)
    assert error.__cause__.args == ("the culprit",)


class OddError(Exception):
    """Cannot be unpickled: it takes more than it keeps."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def fail_oddly(meeting: Meeting) -> None:
    raise OddError(1, 2)


def test_an_error_that_does_not_survive_pickle_is_still_shown() -> None:
    error = failures(1, fail_oddly)
    assert "OddError: 1 and 2" in error.failures[0][1]
    assert error.__cause__ is None


def leave(meeting: Meeting) -> None:
    sys.exit("leaving")


def test_a_rank_that_calls_exit_has_failed() -> None:
    assert "SystemExit: leaving" in failures(1, leave).failures[0][1]


def return_a_lambda(meeting: Meeting) -> object:
    return lambda: None


def test_a_result_that_cannot_be_pickled_is_a_failure() -> None:
    assert "pickle" in failures(1, return_a_lambda).failures[0][1]


def one_hangs(meeting: Meeting) -> str:
    if meeting.rank == 1:
        meeting.store().set("is about to", "")
        hang()
    meeting.store().wait(["is about to"])
    return "done"


@pytest.mark.usefixtures("patient")
def test_a_hung_rank_is_killed_at_the_deadline_and_its_stack_shown(count_from: CountFrom) -> None:
    count_from(lambda ranks: ranks[0].process.exitcode == 0)
    start = time.monotonic()
    error = failures(2, one_hangs, deadline=2)
    assert time.monotonic() - start >= 2
    ((rank, text),) = error.failures
    assert rank == 1
    assert "still running after 2 s" in text
    assert "in hang" in text
    assert "in one_hangs" in text


def stop(meeting: Meeting) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def test_a_stopped_rank_is_killed_although_it_cannot_show_its_stack(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(testing, "_LAST_WORDS", 0.1)
    ((rank, text),) = failures(1, stop, deadline=0.2).failures
    assert rank == 0
    assert "hung" in text


def hang_at_exit(meeting: Meeting) -> None:
    threading.Thread(target=hang).start()


@pytest.mark.usefixtures("patient")
def test_a_rank_that_returns_but_does_not_end_is_hung(count_from: CountFrom) -> None:
    count_from(lambda ranks: ranks[0].reports.poll())
    ((_, text),) = failures(1, hang_at_exit, deadline=2).failures
    assert "though its function had returned" in text
    assert "in hang" in text


def one_fails_one_hangs(meeting: Meeting) -> None:
    if meeting.rank == 0:
        meeting.store().wait(["the other is there"])
        raise ValueError("why the other hangs")
    meeting.store().set("the other is there", "")
    hang()


@pytest.mark.usefixtures("patient")
def test_ranks_that_hang_after_a_failure_do_not_wait_for_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(testing, "_GRACE", 0.2)
    spawn_ranks(1, scale, 1)  # the server's start does not count
    start = time.monotonic()
    error = failures(2, one_fails_one_hangs, deadline=120)
    assert time.monotonic() - start < 120
    (first, why), (second, late) = error.failures
    assert (first, second) == (0, 1)
    assert "ValueError: why the other hangs" in why
    assert "still running 0.2 s after rank 0 failed" in late
    assert "in one_fails_one_hangs" in late
    assert isinstance(error.__cause__, ValueError)


def one_fails_long_ago(meeting: Meeting) -> None:
    store = meeting.store()
    if meeting.rank == 0:
        store.set("pid", str(os.getpid()))
        store.wait(["it is watched"])
        testing.time = SimpleNamespace(monotonic=lambda: time.monotonic() - 100)  # type: ignore[assignment]
        raise ValueError("long ago")
    ends = os.pidfd_open(int(store.get("pid")))
    store.set("it is watched", "")
    select.select([ends], [], [])  # its failure has been heard of
    select.select([], [], [], 0.3)


@pytest.mark.usefixtures("patient")
def test_the_others_have_time_to_end_though_a_failure_is_heard_of_late() -> None:
    ((rank, why),) = failures(2, one_fails_long_ago).failures
    assert rank == 0
    assert "ValueError: long ago" in why


def die(meeting: Meeting, how: str) -> str:
    if meeting.rank == 1:
        if how == "signal":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(int(how))
    return "alive"


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("signal", "was killed by SIGKILL and returned nothing."),
        ("0", "exited with status 0 and returned nothing."),
        ("3", "exited with status 3 and returned nothing."),
    ],
)
@pytest.mark.usefixtures("patient")
def test_a_rank_that_dies_is_reported_unless_it_may_die(how: str, what: str) -> None:
    assert failures(2, die, how).failures == [(1, what)]
    assert spawn_ranks(2, die, how, may_die=[1]) == ["alive", None]


def crash(meeting: Meeting) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def test_a_rank_that_crashes_shows_its_stack() -> None:
    ((_, text),) = failures(1, crash).failures
    assert "was killed by SIGSEGV" in text
    assert "in crash" in text


def fail(meeting: Meeting) -> None:
    raise ValueError(meeting.rank)


def test_a_rank_that_may_die_may_not_raise() -> None:
    assert failures(1, fail, may_die=[0]).failures[0][0] == 0


# Arguments.


def test_a_closure_or_lambda_is_refused_at_once() -> None:
    def closure(meeting: Meeting) -> None: ...

    for fn in (closure, lambda meeting: None):
        with pytest.raises(TypeError, match="defined at the top of a module"):
            spawn_ranks(2, fn)


@pytest.mark.parametrize("options", [{"n": 0}, {"deadline": 0}, {"deadline": float("inf")}])
def test_a_number_that_makes_no_sense_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        spawn_ranks(**({"n": 1, "fn": fail} | options))


# Nothing is left behind.


def children() -> set[int]:
    """List our child processes and those of the server, which forks the ranks."""
    found = set()
    todo = [os.getpid()]
    while todo:
        pid = todo.pop()
        for listing in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # the thread has ended
                new = {int(child) for child in listing.read_text().split()} - found
                found |= new
                todo += new
    return found


def descriptors() -> set[str]:
    """What this process has open."""
    return set(os.listdir("/proc/self/fd"))


def interrupt(meeting: Meeting) -> None:
    if meeting.rank == 0:
        meeting.store().wait(["all started"])
        os.kill(int(os.environ["PARENT"]), signal.SIGINT)
    meeting.store().set("all started", "")
    hang()


@pytest.mark.parametrize(
    ("fn", "error"),
    [
        (exchange, None),
        (fail, RanksFailedError),
        (one_hangs, RanksFailedError),
        (interrupt, KeyboardInterrupt),
    ],
)
def test_no_process_file_or_descriptor_is_left_behind(
    fn: object, error: type[BaseException] | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PARENT", str(os.getpid()))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    spawn_ranks(1, scale, 1)  # the server and its pipe stay
    before, workers = children() | descriptors(), set(multiprocessing.active_children())
    with pytest.raises(error) if error else contextlib.nullcontext():
        spawn_ranks(2, fn, deadline=5 if fn is one_hangs else 60.0)
    # Threads of other tests open some for a moment.
    assert until(lambda: not (children() | descriptors()) - before)
    assert list(tmp_path.iterdir()) == []
    assert not set(multiprocessing.active_children()) - workers


def test_an_interrupt_that_comes_while_a_rank_is_started_leaves_nothing_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spawn_ranks(1, scale, 1)  # the server stays
    before, start, handler = children(), ForkServerProcess.start, signal.getsignal(signal.SIGINT)
    workers = set(multiprocessing.active_children())

    def start_and_be_interrupted(process: ForkServerProcess) -> None:
        start(process)
        if process.name == "rank 1":
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(ForkServerProcess, "start", start_and_be_interrupted)
    with pytest.raises(KeyboardInterrupt):
        spawn_ranks(3, one_hangs)
    assert not set(multiprocessing.active_children()) - workers
    assert until(lambda: not children() - before)
    assert signal.getsignal(signal.SIGINT) is handler


# Ranks as threads.


def thread_failures(*args: object, **options: object) -> RanksFailedError:
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(*args, **options)
    return caught.value


def test_threads_return_in_rank_order_and_closures_will_do() -> None:
    word = "hello"
    results = run_ranks(3, lambda group: (word, group.rank(), group.size(), group.backend))
    assert results == [("hello", rank, 3, "threads") for rank in range(3)]


def test_threads_are_of_this_process_and_end() -> None:
    before = set(threading.enumerate())

    def one_rank(group: Group) -> tuple[int, str]:
        group.all_reduce(torch.ones(1), async_op=True).wait()
        return os.getpid(), threading.current_thread().name

    assert run_ranks(2, one_rank) == [(os.getpid(), "rank 0"), (os.getpid(), "rank 1")]
    # They end by themselves, or were told to.
    assert until(lambda: not set(threading.enumerate()) - before)


@pytest.mark.usefixtures("patient")
def test_a_failing_thread_frees_those_that_wait_and_comes_first() -> None:
    def one_rank(group: Group) -> None:
        if group.rank() == 1:
            raise KeyError("the culprit")
        group.barrier()

    error = thread_failures(3, one_rank)
    assert error.failures[0][0] == 1
    assert {rank for rank, _ in error.failures} == {0, 1, 2}
    assert "KeyError: 'the culprit'" in error.failures[0][1]
    assert "in one_rank" in error.failures[0][1]
    assert all("PeerLeftError" in text for _, text in error.failures[1:])
    assert isinstance(error.__cause__, KeyError)


@pytest.mark.usefixtures("patient")
def test_a_failing_thread_frees_those_that_wait_in_a_split_group() -> None:
    def one_rank(group: Group) -> None:
        pair = group.split([0, 1])
        if group.rank() == 1:
            raise KeyError("the culprit")
        assert pair is not None
        pair.barrier()

    error = thread_failures(2, one_rank)
    assert [rank for rank, _ in error.failures] == [1, 0]
    assert "PeerLeftError" in error.failures[1][1]


def test_the_culprit_comes_first_also_when_it_aborts_its_group_itself() -> None:
    def one_rank(group: Group) -> None:
        with group:
            if group.rank() == 1:
                raise KeyError("the culprit")
            group.barrier()

    assert isinstance(thread_failures(2, one_rank).__cause__, KeyError)


def test_a_thread_that_returns_early_is_not_waited_for() -> None:
    def one_rank(group: Group) -> None:
        if group.rank() == 0:
            group.barrier()

    error = thread_failures(2, one_rank)
    assert isinstance(error.__cause__, PeerLeftError)
    assert list(error.__cause__.ranks) == [1]


def test_threads_that_hang_are_named_with_their_stacks_and_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = threading.Event()
    both_wait = threading.Barrier(3, timeout=60)  # and who counts the seconds from then
    await_threads = testing._await_threads

    def await_from_then(*words: Any) -> None:
        both_wait.wait()
        await_threads(*words)

    monkeypatch.setattr(testing, "_await_threads", await_from_then)

    def wait_in_vain(group: Group) -> None:
        try:
            both_wait.wait()
            group.recv(torch.ones(1), 1)
        finally:
            ended.set()

    def one_rank(group: Group) -> None:
        if group.rank() == 0:
            wait_in_vain(group)
        else:
            both_wait.wait()
            group.recv(torch.ones(1), 0)

    error = thread_failures(2, one_rank, deadline=0.3)
    assert sorted(rank for rank, _ in error.failures) == [0, 1]
    text = dict(error.failures)[0]
    assert "still running after 0.3 s" in text
    assert "in wait_in_vain" in text
    assert ended.wait(120)


def test_threads_that_hang_after_a_failure_do_not_wait_for_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(testing, "_GRACE", 0.2)
    released = threading.Event()

    def one_rank(group: Group) -> None:
        if group.rank() == 0:
            raise ValueError("why the other hangs")
        released.wait()

    error = thread_failures(2, one_rank)
    released.set()
    assert [rank for rank, _ in error.failures] == [0, 1]
    assert "still running 0.2 s after rank 0 failed" in error.failures[1][1]


@pytest.mark.usefixtures("patient")
def test_the_other_threads_have_time_to_end_though_a_failure_is_heard_of_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fail = testing._Thread._fail
    monkeypatch.setattr(
        testing._Thread, "_fail", lambda rank, why, when: fail(rank, why, when - 100)
    )
    failing = queue.SimpleQueue[threading.Thread]()

    def one_rank(group: Group) -> None:
        if group.rank() == 0:
            failing.put(threading.current_thread())
            raise ValueError("long ago")
        failing.get().join()  # its failure has been heard of
        threading.Event().wait(0.3)

    ((rank, why),) = thread_failures(2, one_rank).failures
    assert rank == 0
    assert "ValueError: long ago" in why


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="collected between lines of Python only")
def test_no_garbage_is_collected_while_it_is_asked_where_a_thread_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A finalizer that lets other threads run would never come back: a lock is held there."""
    look, collects = sys._current_frames, list[bool]()

    def look_closely() -> dict[int, FrameType]:
        collects.append(gc.isenabled())
        return look()

    monkeypatch.setattr(sys, "_current_frames", look_closely)
    thread_failures(2, lambda group: group.recv(torch.ones(1), 1 - group.rank()), deadline=0.2)
    assert collects
    assert not any(collects)
    assert gc.isenabled()


@pytest.mark.parametrize("options", [{"n": 0}, {"deadline": 0}])
def test_run_ranks_refuses_a_number_that_makes_no_sense(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        run_ranks(**({"n": 1, "fn": str} | options))


# Cues.


def test_a_collective_fails_on_cue_before_it_is_sent_and_only_that_one() -> None:
    def one_rank(group: Group) -> float:
        tensor = torch.ones(1)
        if group.rank() == 0:
            with fail_on_cue(group, operation="all_reduce", after=1) as cue:
                group.all_reduce(tensor)
                group.barrier()
                assert not cue.reached.is_set()
                with pytest.raises(PeerDiedError) as caught:
                    group.all_reduce(tensor)
                assert list(caught.value.ranks) == [1]
                assert cue.reached.is_set()
        else:
            group.all_reduce(tensor)
            group.barrier()
        group.all_reduce(tensor)
        return tensor.item()

    assert run_ranks(2, one_rank) == [4.0, 4.0]


@pytest.mark.parametrize("async_op", [False, True])
def test_a_collective_fails_on_cue_after_it_has_happened(async_op: bool) -> None:
    def one_rank(group: Group) -> float:
        tensor = torch.ones(1)
        error = ConnectionError("lost")
        if group.rank() == 0:
            fail_on_cue(group, when="after", error=lambda: error)
            with pytest.raises(ConnectionError):
                group.all_reduce(tensor, async_op=async_op).wait()
        else:
            group.all_reduce(tensor)
        return tensor.item()

    assert run_ranks(2, one_rank) == [2.0, 2.0]


def test_a_removed_cue_does_nothing() -> None:
    def one_rank(group: Group) -> None:
        fail_on_cue(group, error=KeyError("never")).remove()
        group.barrier()

    run_ranks(2, one_rank)


def test_a_rank_is_held_on_cue_until_it_is_released() -> None:
    released, cues, order = threading.Event(), queue.SimpleQueue(), []

    def one_rank(group: Group) -> None:
        if group.rank() == 0:
            cues.put(hold_on_cue(group, released, operation="broadcast"))
            group.barrier()
            group.broadcast(torch.ones(1))
            order.append("rank 0 goes on")
        else:
            group.barrier()
            cues.get().reached.wait()  # rank 0 stands before its broadcast
            order.append("rank 1 releases it")
            released.set()
            group.broadcast(torch.ones(1))

    run_ranks(2, one_rank)
    assert order == ["rank 1 releases it", "rank 0 goes on"]


def test_a_cue_for_a_collective_that_does_not_exist_is_refused() -> None:
    def one_rank(group: Group) -> None:
        with pytest.raises(ValueError, match="allreduce"):
            fail_on_cue(group, operation="allreduce")
        with pytest.raises(ValueError, match="later"):
            fail_on_cue(group, when="later")

    run_ranks(1, one_rank)


def given_port(meeting: Meeting) -> int:
    return int(os.environ["MASTER_PORT"])


def test_ranks_are_given_a_port_that_the_system_gives_to_nobody_else() -> None:
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    (port, other) = spawn_ranks(2, given_port)
    assert port == other
    assert port < first_given
