"""Ring three: five planted bugs, each named with rank and line, over shm and over gloo."""

import io
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from paceline import recorder
from paceline.errors import CollectiveTimeoutError
from paceline.groups import Group, Store
from paceline.recorder.watch import watch
from paceline.testing import Meeting, spawn_ranks
from tests.marks import needs_shm
from tests.recorder import bugs
from tests.recorder.bugs import line
from tests.recorder.patience import await_line, be_patient
from tests.scripts import ROOT

DEADLINE = 600.0
WARNING = 0.4  # seconds


class Ear(io.TextIOBase):
    """Stands in for stderr: what the recorder says is put into a queue."""

    def __init__(self, said: "queue.SimpleQueue[str]") -> None:
        self._said = said

    def write(self, text: str) -> int:
        if text.startswith("paceline:"):
            self._said.put(text)
        return len(text)


def hear_of(meeting: Meeting, backend: str, bug: str) -> str:
    """Run into a bug, and return the first verdict of this rank, or how it came out of it.

    The bug runs in a thread, so that a rank which hangs for good can return nevertheless.
    """
    be_patient(DEADLINE)
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    store = meeting.store(timedelta(seconds=DEADLINE))
    train = getattr(bugs, bug)

    def run() -> None:
        group = meeting.new_group(backend)
        group.barrier()
        watch.look()  # all ranks have made the group: now all know each other
        recorder.configure(warn_after=WARNING)
        try:
            train(group, store)
        except Exception as error:
            recorder.finish_explaining(DEADLINE)
            said.put(str(error))
        else:
            said.put("done")

    sys.stderr = Ear(said)
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    words = said.get()
    while "\npaceline: " not in words and _is_premature(words):
        watch._warned.clear()  # a call is told of once, and this may be the very one
        words = said.get()
    if meeting.rank == 0:
        store.set("explained", "yes")
    store.set(f"heard/{meeting.rank}", "yes")
    if words != "done" and bug not in ("early_exit", "other_shape"):
        store.wait([f"heard/{rank}" for rank in range(meeting.size)])
    if words == "done" and bug == "stuck_loader":
        thread.join()
    return words


def _is_premature(words: str) -> bool:
    """A busy machine may let a rank be late where no bug is."""
    return words.startswith("paceline:") and "is missing" in words and "the loader" not in words


def verdict(backend: str, bug: Callable[[Group, Store], None], ranks: int = 2) -> str:
    said = spawn_ranks(ranks, hear_of, backend, bug.__name__, may_die=[1])
    return said[0]


both = pytest.mark.parametrize("backend", [pytest.param("shm", marks=needs_shm), "gloo"])


@both
def test_a_skipped_backward_is_named_with_its_rank_and_the_line_of_its_forward(
    backend: str,
) -> None:
    said = verdict(backend, bugs.skipped_backward)
    assert "Rank 1 skipped a backward pass: the forward of step 2" in said
    assert line("the forward") in said
    assert line("the backward") in said, "what this rank waits for"
    assert line("the barrier") in said, "what the other one called instead"
    if backend == "gloo":  # shm sees at once that the calls differ, and says which
        assert "bucket 0: 2.bias, 2.weight, 0.bias, 0.weight" in said


@both
def test_swapped_collectives_are_named_with_both_ranks_and_lines(backend: str) -> None:
    said = verdict(backend, bugs.swapped_order)
    assert "rank 0 called all_reduce" in said
    assert "rank 1 called broadcast" in said
    assert line("the sum first") in said
    assert line("the broadcast first") in said


@both
def test_another_shape_is_named_with_both_ranks_and_lines(backend: str) -> None:
    said = verdict(backend, bugs.other_shape)
    assert line("five") in said
    assert line("four") in said
    assert ("float32[5]" in said and "float32[4]" in said) or (
        "5 x torch.float32" in said and "4 x torch.float32" in said
    )


@both
def test_a_rank_that_left_early_is_named_with_the_line_of_its_last_call(backend: str) -> None:
    said = verdict(backend, bugs.early_exit)
    assert "Rank 1 will not come" in said
    assert f"{line('the last one')}" in said
    assert "the last call it made is number 3" in said


@both
def test_a_stuck_loader_is_named_with_its_rank_and_line(backend: str) -> None:
    said = verdict(backend, bugs.stuck_loader, ranks=3)
    assert "Rank 1 is missing" in said
    assert f"{line('the loader')} in batches" in said
    assert f"all_reduce SUM of float32[2, 8] (call 4 of the group {backend}:0,1,2)" in said
    assert line("the step") in said, "what the others wait in"


# -- at the timeout ---------------------------------------------------------------------------


def give_up(meeting: Meeting, backend: str) -> tuple[str, str]:
    be_patient(DEADLINE)
    store = meeting.store(timedelta(seconds=DEADLINE))
    group = meeting.new_group(backend)
    group.barrier()
    if meeting.rank == 1:
        store.wait(["given up"])  # rank 1 is here
        return "", ""
    await_line(group.board, 1, "# rank 1 is here")
    try:
        group.all_reduce(torch.zeros(3), timeout=0.5)
    except RuntimeError as error:
        recorder.finish_explaining(DEADLINE)
        store.set("given up", "yes")
        return str(error), getattr(error, "verdict", "")
    raise AssertionError("it must not succeed")


@both
def test_the_error_at_the_timeout_says_who_is_missing_and_where(backend: str) -> None:
    text, field = spawn_ranks(2, give_up, backend)[0]
    assert "Rank 1 is missing: it is at" in text
    assert "# rank 1 is here" in text
    assert "test_verdicts.py" in text
    assert bool(field) == (backend == "shm"), "ours has it as a field, torch's as text"
    assert issubclass(CollectiveTimeoutError, TimeoutError)


# -- torch's own groups, and scripts ----------------------------------------------------------


def wait_on_a_torch_group(meeting: Meeting) -> str:
    be_patient(DEADLINE)
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    store = meeting.store(timedelta(seconds=DEADLINE))
    dist.init_process_group("gloo")
    group = Group.wrap(dist.group.WORLD)
    group.barrier()
    if meeting.rank == 1:
        store.wait(["explained"])  # rank 1 stays behind
    else:
        await_line(group.board, 1, "# rank 1 stays behind")
        sys.stderr = Ear(said)
        recorder.configure(warn_after=WARNING)
        threading.Thread(target=lambda: store.set("explained", said.get())).start()
    Group.wrap(dist.group.WORLD).all_reduce(torch.zeros(3))
    dist.destroy_process_group()
    return store.get("explained").decode()


def test_a_rank_that_is_missing_from_a_torch_group_is_named_too() -> None:
    said = spawn_ranks(2, wait_on_a_torch_group)[0]
    assert "all_reduce SUM of float32[3] (call 2 of the group gloo:0,1)" in said
    assert "Rank 1 is missing" in said
    assert "# rank 1 stays behind" in said


SCRIPT = """
import torch
import paceline
from tests.recorder.patience import be_patient

be_patient(100)
group = paceline.new_group("gloo")
for step in range(3):
    group.all_reduce(torch.ones(4))
    if group.rank() == 1 and step == 1:
        raise ValueError("a bad sample")
"""


def test_an_exception_on_one_rank_is_in_the_error_of_the_other(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    record = {"PACELINE_RECORD": str(tmp_path / "run"), "OMP_NUM_THREADS": "1"}
    record["PYTHONPATH"] = str(ROOT)
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", **record}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**os.environ, **meet, "RANK": str(rank)},
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    first, second = (rank.communicate(timeout=DEADLINE)[1] for rank in ranks)
    assert "Rank 1 will not come: its process has ended with ValueError at train.py:11" in first
    assert "the last call it made is number 2" in first
    assert second.rstrip().endswith("ValueError: a bad sample")
    logs = recorder.read_run(tmp_path / "run")
    assert [len(log.collectives) for log in logs] == [3, 2], "saved at the end, failed or not"
    assert logs[0].collectives[-1].error == "RuntimeError"
    assert "Rank 1 will not come" in logs[0].notes[-1]
