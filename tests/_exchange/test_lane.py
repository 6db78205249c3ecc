"""Jobs run in order, and their futures hold what they returned or raised."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch import Tensor

from paceline._exchange import JobLane, mean_now
from paceline.groups import Group
from paceline.testing import hold_on_cue, run_ranks

CPU = torch.device("cpu")


def test_jobs_run_in_the_order_they_came() -> None:
    lane, seen, release = JobLane(), [], threading.Event()

    def job(number: int) -> Tensor:
        release.wait(60)
        seen.append(number)
        return torch.tensor(number)

    futures = [lane.start(lambda number=number: job(number), CPU) for number in range(20)]
    assert not futures[0].done()
    release.set()
    assert [int(future.wait()) for future in futures] == list(range(20)) == seen


def test_what_a_job_raises_arrives_and_the_next_one_runs() -> None:
    lane = JobLane()

    def fail() -> Tensor:
        raise RuntimeError("no luck")

    failed, fine = lane.start(fail, CPU), lane.start(lambda: torch.ones(1), CPU)
    with pytest.raises(RuntimeError, match="no luck"):
        failed.wait()
    assert fine.wait() == 1


def test_a_job_may_have_a_job() -> None:
    lane = JobLane()

    def outer() -> Tensor:
        return lane.start(lambda: torch.full((1,), 3.0), CPU).wait() + 1

    assert lane.start(outer, CPU).wait() == 4


def test_jobs_build_no_graphs() -> None:
    weight = torch.ones(1, requires_grad=True)
    assert not JobLane().start(lambda: weight * 2, CPU).wait().requires_grad


def test_the_thread_ends_with_the_lane() -> None:
    lane = JobLane()
    lane.start(lambda: torch.ones(1), CPU).wait()
    thread = lane._thread
    assert thread is not None
    assert thread.is_alive()
    del lane
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_ranks_make_their_calls_in_one_order_however_late_one_of_them_is() -> None:
    """Two calls a job: in callbacks, the second one would overtake the next job's first."""

    def one_rank(group: Group) -> list[list[float]]:
        lane, released = JobLane(), threading.Event()
        if group.rank() == 1:
            hold_on_cue(group, released, operation="all_reduce")

        def job(number: int) -> Tensor:
            first = mean_now(group, torch.full((1,), float(number + group.rank())))
            return mean_now(group, torch.cat([first, torch.full((1,), 10.0 * number)]))

        futures = [lane.start(lambda number=number: job(number), CPU) for number in range(5)]
        released.set()
        return [future.wait().tolist() for future in futures]

    for found in run_ranks(2, one_rank):
        assert found == [[number + 0.5, 10.0 * number] for number in range(5)]
