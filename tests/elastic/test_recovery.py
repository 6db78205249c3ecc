"""Recoveries that are disturbed themselves: at chosen moments, or again and again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from threading import Lock
from typing import Any

import pytest
import torch

from paceline import elastic
from paceline.elastic import handing, loop
from paceline.elastic.state import JobState
from paceline.errors import MembershipError, PeerDiedError, StateCopyError
from paceline.groups import Call, Group
from paceline.testing import run_ranks

from .runs import Moment, Ranks, require_equal
from .test_faults import Grip, at, errors_of
from .test_job import kill_at, survivors, undisturbed


class DiesIn:
    """Ends a member's thread inside one of the calls of a recovery, the ``which``-th time."""

    def __init__(self, ranks: Ranks, member: int, call: str, which: int) -> None:
        self.ranks, self.member, self.call, self.which = ranks, member, call, which
        self.calls: Counter[str] = Counter()

    def arrange(self, job: elastic.Job, group: Group, **_: object) -> None:
        """Take the place of what the job calls."""
        members = job._crew.members  # type: ignore[union-attr]
        owner = {"move": group, "meet": members, "ready": members}[self.call]
        real = getattr(owner, self.call)

        def call(*args: Any, **words: Any) -> Any:
            self.calls[self.call] += 1
            if self.calls[self.call] == self.which:
                self.ranks.kill(self.member)
            found = real(*args, **words)
            if self.calls[self.call] == -self.which:
                self.ranks.kill(self.member)
            return found

        setattr(owner, self.call, call)


@pytest.mark.parametrize("when", [2, -2], ids=["before", "after"])
@pytest.mark.parametrize("call", ["meet", "move", "ready"])
def test_one_that_is_killed_in_the_recovery_from_another_changes_no_bit(
    call: str, when: int
) -> None:
    ranks = Ranks(4)
    dying = DiesIn(ranks, 1, call, when)
    for number in range(4):
        prepare = dying.arrange if number == 1 else _nothing
        ranks.start(kill_at(ranks, {2: (4, "shard")}), prepare=prepare)
    ends = survivors(ranks.wait())
    assert dying.calls[call] == 2
    assert len(ends) == 2
    for end in ends:
        require_equal(end, undisturbed())


def test_all_but_one_are_killed_in_recoveries_and_the_last_goes_on() -> None:
    ranks = Ranks(5)
    for number in range(5):
        call = {1: "meet", 2: "move", 3: "ready"}.get(number)
        prepare = DiesIn(ranks, number, call, 2).arrange if call else _nothing
        ranks.start(kill_at(ranks, {0: (4, "shard")}), prepare=prepare)
    (end,) = survivors(ranks.wait())
    require_equal(end, undisturbed())


def _nothing(**_: object) -> None:
    """No fault."""


def spoil(times: int, place: int) -> Callable[..., None]:
    """Let what is large of a state arrive with one bit flipped, so many times.

    First comes the description (place 0), then the tensors (1).
    """
    left, seen = [times], [0]

    def prepare(group: Group, **_: object) -> None:
        def after(call: Call) -> None:
            if call.kind != "broadcast" or call.nbytes <= 1000 or left[0] == 0:
                return
            seen[0] += 1
            if (seen[0] - 1) % (place + 1) == place:
                left[0] -= 1
                call.outputs[0].view(torch.uint8)[900] ^= 1

        group.register_hooks(after=after)

    return prepare


@pytest.mark.parametrize("place", [0, 1], ids=["plain data", "tensors"])
@pytest.mark.parametrize("times", [1, 3])
def test_a_state_that_arrives_with_a_flipped_bit_is_sent_again(times: int, place: int) -> None:
    ranks = Ranks(3)
    for number in range(3):
        ranks.start(seed=1 + number, prepare=spoil(times, place) if number == 2 else _nothing)
    ends = survivors(ranks.wait())
    assert len(ends) == 3
    for end in ends:
        require_equal(end, undisturbed())


def test_a_rank_where_states_never_arrive_whole_leaves_and_the_others_go_on() -> None:
    ranks = Ranks(3)
    for number in range(3):
        ranks.start(seed=1 + number, prepare=spoil(1000, 0) if number == 2 else _nothing)
    outcomes = ranks.wait()
    assert errors_of(outcomes) == {2: "MembershipError"}
    assert isinstance(outcomes[2].error.__cause__, StateCopyError)
    assert outcomes[2].error.__cause__.tensors
    for member in (0, 1):
        require_equal(outcomes[member], undisturbed())


def test_what_was_copied_wrongly_is_named_where_it_is_and_raised_everywhere() -> None:
    """All ranks raise it, so that nobody goes on with a state that another has not."""

    def one_rank(group: Group) -> StateCopyError:
        state = JobState(4, None, {"weight": torch.arange(5000.0), "bias": torch.ones(3)})
        if group.rank() == 1:
            spoil(1, 0)(group)
        with pytest.raises(StateCopyError) as caught:
            handing.hand_over(group, 0, state if group.rank() == 0 else None, wanted=True)
        return caught.value

    errors = run_ranks(3, one_rank)
    assert [list(error.tensors) for error in errors] == [[], ["weight"], []]
    assert "wrong here: weight" in str(errors[1])
    assert "wrong on another rank" in str(errors[0])


def test_a_step_that_fails_again_and_again_with_the_same_members_ends_with_the_reason() -> None:
    ranks, grip = Ranks(2), Grip()

    def fail(call: Call) -> None:
        raise PeerDiedError(1, "all_reduce", 0, (0,))

    def act() -> None:
        grip.things[1]["group"].register_hooks(before=fail)

    for number in range(2):
        ranks.start(at(2, "shard", act, 1), prepare=grip.of(number))
    outcomes = ranks.wait()
    for one in outcomes.values():
        assert one.committed[:2] == [0, 1]
    assert isinstance(outcomes[1].error, MembershipError)
    assert "step 2 failed 4 times with the same members" in str(outcomes[1].error)


@pytest.mark.parametrize("when", ["always", "at first"])
def test_members_that_meet_again_and_again_and_cannot_go_on_end_with_the_reason(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, lock = [20 if when == "always" else 6], Lock()
    compare = loop.compare_starts

    def fail(*args: Any) -> int:
        with lock:
            left[0] -= 1
            fails = left[0] >= 0
        if fails:
            raise PeerDiedError(0, "all_gather", 0, (1,))
        return compare(*args)

    monkeypatch.setattr(loop, "compare_starts", fail)
    ranks = Ranks(2)
    for _ in range(2):
        ranks.start()
    outcomes = ranks.wait()
    if when == "at first":
        for one in survivors(outcomes):
            require_equal(one, undisturbed())
        return
    for one in outcomes.values():
        assert isinstance(one.error, MembershipError)
    said = " ".join(str(one.error) for one in outcomes.values())
    assert "the same members met 10 times and could not go on: PeerDiedError" in said


def test_a_step_that_fails_less_often_goes_on() -> None:
    ranks, grip, left = Ranks(2), Grip(), [3]

    def of(member: int) -> Moment:
        def moment(now: elastic.JobStep, shards: int, place: str) -> None:
            if (member, now.number, place) == (1, 2, "begin"):
                grip.things[1]["group"].register_hooks(before=fail)

        return moment

    def fail(call: Call) -> None:
        if call.kind == "all_reduce" and left[0]:
            left[0] -= 1
            raise PeerDiedError(1, "all_reduce", 0, (0,))

    for number in range(2):
        ranks.start(of, prepare=grip.of(number))
    ends = survivors(ranks.wait())
    assert left == [0]
    assert len(ends) == 2
    for end in ends:
        require_equal(end, undisturbed())
