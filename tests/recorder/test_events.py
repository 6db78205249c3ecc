"""Rings one and two: what is recorded of calls, steps and buckets, and what it holds on to."""

import gc
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline import recorder
from paceline.errors import CollectiveArgumentError, MismatchError, RecorderArgumentError
from paceline.groups import Group
from paceline.recorder import events
from paceline.recorder.watch import watch
from paceline.testing import run_ranks
from tests.waiting import until


@pytest.fixture(autouse=True)
def empty() -> Iterator[None]:
    events.forget()
    yield
    recorder.configure()


def entries(rank: int = 0) -> list[events.Entry]:
    return [entry for entry in list(events.calls) if entry.board.rank == rank]


def line_number(function: Callable[..., object], text: str) -> int:
    lines = Path(function.__code__.co_filename).read_text().splitlines()
    first = function.__code__.co_firstlineno
    return next(n for n, found in enumerate(lines[first - 1 :], first) if text in found)


# -- calls ------------------------------------------------------------------------------------


def test_a_call_is_recorded_with_its_line_shape_and_times() -> None:
    def one_rank(group: Group) -> None:
        group.all_reduce(torch.ones(3, 2))  # here

    run_ranks(2, one_rank)
    (entry,) = entries()
    assert (entry.kind, entry.sequence, entry.nbytes) == ("all_reduce", 1, 24)
    assert events.shape_of(entry) == "float32[3, 2]"
    where = events.line_of(entry.code, entry.lasti)
    assert where.endswith(f"test_events.py:{line_number(one_rank, '# here')}")
    assert 0 < entry.began < entry.finished


def test_a_call_has_a_beginning_as_soon_as_it_can_be_seen() -> None:
    seen: list[int] = []

    def one_rank(group: Group) -> None:
        assert group.board is not None
        group.board.tell = lambda entry: seen.append(entry.began)
        group.all_reduce(torch.ones(3))

    run_ranks(2, one_rank)
    assert len(seen) == 2
    assert all(seen)


def test_a_started_call_ends_when_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "look", lambda: None)  # who looks may find that it is done
    both_started = threading.Barrier(2)  # who ends looks at the calls of the other, too

    def one_rank(group: Group) -> None:
        work = group.all_reduce(torch.ones(3), async_op=True)
        entry = entries(group.rank())[-1]
        assert entry.finished == 0
        both_started.wait(60)
        work.wait()
        assert entry.finished > entry.began

    run_ranks(2, one_rank)


def test_a_started_call_that_nobody_waits_for_is_seen_to_be_done() -> None:
    def one_rank(group: Group) -> None:
        work = group.all_reduce(torch.ones(3), async_op=True)
        entry = entries(group.rank())[-1]
        group.barrier()
        assert work.is_completed()
        assert not entry.look()
        assert entry.finished

    run_ranks(2, one_rank)


def test_messages_between_two_ranks_do_not_count_as_collectives() -> None:
    def one_rank(group: Group) -> None:
        if group.rank() == 0:
            group.send(torch.ones(1), 1)
        elif group.rank() == 1:
            group.recv(torch.ones(1), 0)
        group.barrier()

    run_ranks(3, one_rank)
    assert [(e.kind, e.sequence) for e in entries(0)] == [("send", 0), ("barrier", 1)]
    assert [(e.kind, e.sequence) for e in entries(2)] == [("barrier", 1)]


def test_a_call_that_is_refused_is_not_recorded() -> None:
    def one_rank(group: Group) -> None:
        with pytest.raises(CollectiveArgumentError):
            group.broadcast(torch.ones(1), 5)

    run_ranks(2, one_rank)
    assert not events.calls


def test_a_call_that_a_hook_stops_is_not_recorded() -> None:
    def one_rank(group: Group) -> None:
        def stop(call: paceline.groups.Call) -> None:
            raise LookupError("not this one")

        with group.register_hooks(before=stop), pytest.raises(LookupError):
            group.barrier()
        group.all_reduce(torch.ones(2, 2).t()[:, :1])  # a strided one goes the long way as well

    run_ranks(2, one_rank)
    assert [(e.kind, e.finished > e.began) for e in entries()] == [("all_reduce", True)]


def test_a_call_that_fails_is_recorded_with_its_error_and_both_lines() -> None:
    def one_rank(group: Group) -> MismatchError:
        with pytest.raises(MismatchError) as caught:
            if group.rank() == 0:
                group.all_reduce(torch.ones(2))  # two
            else:
                group.all_reduce(torch.ones(3))  # three
        return caught.value

    for error in run_ranks(2, one_rank):
        error.wait_for_verdict()
        assert error.line_a.endswith(f":{line_number(one_rank, '# two')}")
        assert error.line_b.endswith(f":{line_number(one_rank, '# three')}")
        assert error.line_a in str(error)
    assert [entry.error for entry in entries()] == ["MismatchError"]


def test_calls_on_a_torch_group_are_recorded_and_numbered_together() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for _ in range(2):  # each time another wrapper
            Group.wrap(dist.group.WORLD).all_reduce(torch.ones(1))
        assert [(entry.sequence, entry.board.backend) for entry in events.calls] == [
            (1, "gloo"),
            (2, "gloo"),
        ]
    finally:
        dist.destroy_process_group()


def test_the_ring_keeps_the_latest_calls_only() -> None:
    group = single()
    for _ in range(events.CALLS + 10):
        group.barrier()
    assert len(events.calls) == events.CALLS
    assert events.calls[-1].sequence == events.CALLS + 10
    group.shutdown()


def single() -> Group:
    return paceline.new_group("threads", store=dist.HashStore(), rank=0, world_size=1)


def test_nothing_is_recorded_where_it_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(events.SWITCH, "0")
    group = single()
    group.barrier()
    assert group.board is None
    recorder.configure(on=True)
    recorded = single()
    recorded.barrier()
    assert [entry.board for entry in events.calls] == [recorded.board]


def test_a_bad_setting_is_refused() -> None:
    for bad in (0, -1.0, float("nan"), "5", True):
        with pytest.raises(RecorderArgumentError, match="warn_after"):
            recorder.configure(warn_after=bad)  # type: ignore[arg-type]
    with pytest.raises(RecorderArgumentError, match="on"):
        recorder.configure(on="no")  # type: ignore[arg-type]


# -- steps and buckets ------------------------------------------------------------------------


def train(group: Group, steps: int = 3) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    ddp = paceline.DistributedDataParallel(model, process_group=group, bucket_cap_mb=1e-5)
    for _ in range(steps):
        ddp(torch.ones(2, 4)).sum().backward()  # the step


def test_steps_and_buckets_have_their_times_in_order() -> None:
    run_ranks(2, train)
    steps = [e for e in events.steps if e.track.board.rank == 0]
    assert [e.number for e in steps] == [1, 2, 3]
    for e in steps:
        times = [e.forward_began, e.forward_ended, e.backward_began, e.backward_ended]
        assert times == sorted(times)
        assert times[0] > 0
        assert 0 <= e.waited <= e.backward_ended - e.backward_began
    passes = [e for e in events.buckets if e.track.board.rank == 0 and e.step == 3]
    assert [e.bucket for e in passes] == list(range(len(passes)))
    assert len(passes) > 1
    for b in passes:
        assert 0 < b.filled <= b.launched <= b.finished
        assert b.nbytes > 0
        assert b.call is not None
        assert b.call.bucket == b.bucket


def test_a_buckets_call_has_the_line_of_backward_and_the_names_of_its_parameters() -> None:
    names: list[list[str]] = []

    def one_rank(group: Group) -> None:
        model = nn.Linear(4, 2)
        ddp = paceline.DistributedDataParallel(model, process_group=group)
        ddp(torch.ones(2, 4)).sum().backward()  # backward
        (entry,) = [e for e in entries(group.rank()) if e.bucket >= 0]
        assert entry.track is not None
        names.append(sorted(entry.track.names(entry.bucket)))
        where = events.line_of(entry.code, entry.lasti)
        assert where.endswith(f":{line_number(one_rank, '# backward')}")

    run_ranks(2, one_rank)
    assert names == [["bias", "weight"]] * 2


def test_a_pass_inside_no_sync_is_a_step_without_buckets() -> None:
    def one_rank(group: Group) -> None:
        ddp = paceline.DistributedDataParallel(nn.Linear(2, 1), process_group=group)
        with ddp.no_sync():
            ddp(torch.ones(1, 2)).sum().backward()

    run_ranks(2, one_rank)
    (step,) = [e for e in events.steps if e.track.board.rank == 0]
    assert step.backward_ended > step.backward_began > 0
    assert not events.buckets


def test_a_forward_without_gradients_is_no_step() -> None:
    def one_rank(group: Group) -> None:
        ddp = paceline.DistributedDataParallel(nn.Linear(2, 1), process_group=group)
        with torch.no_grad():
            ddp(torch.ones(1, 2))

    run_ranks(2, one_rank)
    assert not events.steps


def test_what_is_recorded_keeps_neither_group_nor_tensor_alive() -> None:
    def one_rank(group: Group) -> list[weakref.ref]:
        tensor = torch.ones(3)
        group.all_reduce(tensor)
        work = group.all_reduce(tensor, async_op=True)
        work.wait()
        return [weakref.ref(tensor), weakref.ref(work), weakref.ref(group)]

    held = [ref for refs in run_ranks(2, one_rank) for ref in refs]

    def gone() -> bool:
        gc.collect()
        return [ref() for ref in held] == [None] * 6

    assert until(gone)  # the recorder's thread may be looking at them
    assert events.calls


def test_a_track_keeps_no_model_alive() -> None:
    group = single()
    model = paceline.DistributedDataParallel(nn.Linear(2, 1), process_group=group)
    model(torch.ones(1, 2))
    held = weakref.ref(model)
    track = events.steps[-1].track
    del model
    gc.collect()
    assert held() is None
    assert track.names(0) == []
    group.shutdown()


# -- lines ------------------------------------------------------------------------------------


def test_a_line_is_the_users_and_not_torchs_pythons_or_ours() -> None:
    assert events.whose(torch.__file__) == events.INSIDE
    assert events.whose(weakref.__file__) == events.INSIDE
    assert events.whose(paceline.__file__) == events.INSIDE
    assert events.whose(pytest.__file__) == events.LIBRARY
    assert events.whose(__file__) == events.USER
    assert events.line_of(None, -1) == ""
    assert events.whose("/tmp/torchinductor_me/fo/cfow.py") == events.INSIDE, "compiled code"
    assert events.whose("/home/me/.local/lib/python3/site-packages/nn.py") == events.LIBRARY
    beside = str(Path(paceline.__file__).parent) + "_experiments/train.py"
    assert events.whose(beside) == events.USER, "a folder whose name begins as ours does"


def test_lines_are_told_from_a_folder_that_was_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert events.shown("/home/me/train.py") == "/home/me/train.py"


def test_a_rank_is_where_the_thread_is_that_made_the_latest_call() -> None:
    def one_rank(group: Group) -> bool:
        worker = threading.Thread(target=lambda: group.barrier())
        worker.start()
        worker.join()
        return group.board.thread == worker.ident

    assert run_ranks(2, one_rank) == [True, True]


def test_a_librarys_line_is_given_where_there_is_none_of_the_users() -> None:
    code = compile("import sys\nframe = sys._getframe()\n", pytest.__file__, "exec")
    space: dict[str, object] = {}
    exec(code, space)
    frame = space["frame"]
    inner = types.SimpleNamespace(f_code=frame.f_code, f_lasti=frame.f_lasti, f_back=None)  # type: ignore[attr-defined]
    assert events.caller(inner) == (code, inner.f_lasti)  # type: ignore[arg-type]
