"""Which errors of a step say that a rank is lost, wherever somebody waited for the others."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch

from paceline.elastic.crew import is_loss
from paceline.groups import Work
from paceline.testing import Meeting, spawn_ranks


def how_it_fails(work: Work) -> str:
    """What a wait for the others raises here, and whether it is taken for a loss."""
    try:
        work.wait()
    except RuntimeError as error:
        return "" if is_loss(error) else repr(error)
    return "it did not fail"


def one_that_may_be_killed(meeting: Meeting) -> str:
    with meeting.new_group("gloo") as group:
        group.barrier()
        if meeting.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return how_it_fails(group.start_all_reduce(torch.ones(4)))


def test_a_wait_for_a_killed_rank_fails_as_a_loss() -> None:
    found = spawn_ranks(3, one_that_may_be_killed, may_die=[1])
    assert (found[0], found[2]) == ("", "")


def one_that_aborts(meeting: Meeting) -> str:
    with meeting.new_group("gloo") as group:
        group.barrier()
        if meeting.rank == 1:  # does not come
            meeting.store().wait(["0 is free", "2 is free"])
            return ""
        work = group.start_all_reduce(torch.ones(4))  # first: an aborted group starts nothing
        threading.Timer(0.05, group.abort).start()
        found = how_it_fails(work)
        meeting.store().set(f"{meeting.rank} is free", "")
        return found


def test_a_wait_that_an_abort_ends_fails_as_a_loss() -> None:
    assert set(spawn_ranks(3, one_that_aborts)) == {""}


@pytest.mark.parametrize(
    "error", [RuntimeError("shape '[3]' is invalid"), ValueError("gloo/transport/tcp/pair.cc")]
)
def test_an_error_of_the_body_is_no_loss(error: Exception) -> None:
    assert not is_loss(error)
