"""Jobs whose ranks are threads: lost, left and joined at chosen places of the loop."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import pytest

from paceline import elastic
from paceline.groups import Call, Group

from .runs import Moment, Outcome, Ranks, require_equal, train


@cache
def undisturbed(epochs: int = 2) -> Outcome:
    """What one rank alone ends with."""
    return train(None, epochs=epochs)


def kill_at(ranks: Ranks, places: dict[int, tuple[int, str]]) -> Callable[[int], Moment]:
    """Moments that end members, each at a place of a step."""

    def of(member: int) -> Moment:
        def moment(now: elastic.JobStep, shards: int, place: str) -> None:
            if places.get(member) == (now.number, place):
                ranks.kill(member)

        return moment

    return of


def survivors(outcomes: dict[int, Outcome]) -> list[Outcome]:
    for outcome in outcomes.values():
        if outcome.error is not None:
            raise outcome.error
    return [outcome for outcome in outcomes.values() if outcome.weights]


def test_alone_a_job_is_the_plain_loop() -> None:
    outcome = undisturbed()
    assert outcome.steps == 10
    assert outcome.committed == list(range(10))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_ranks_that_begin_with_other_weights_end_with_those_of_rank_0_trained_alone(
    count: int,
) -> None:
    ranks = Ranks(count)
    for number in range(count):
        ranks.start(seed=1 + number)
    ends = survivors(ranks.wait())
    assert len(ends) == count
    for end in ends:
        require_equal(end, undisturbed())


@pytest.mark.parametrize("where", ["begin", "shard", "averages", "end"])
@pytest.mark.parametrize("who", [0, 2])
def test_a_rank_killed_anywhere_in_a_step_changes_no_bit(where: str, who: int) -> None:
    ranks = Ranks(3)
    for _ in range(3):
        ranks.start(kill_at(ranks, {who: (4, where)}))
    ends = survivors(ranks.wait())
    assert len(ends) == 2
    for end in ends:
        require_equal(end, undisturbed())


def test_all_but_one_are_killed_one_after_the_other() -> None:
    places = {0: (2, "shard"), 1: (5, "averages"), 2: (5, "shard"), 3: (8, "begin")}
    ranks = Ranks(5)
    for _ in range(5):
        ranks.start(kill_at(ranks, places))
    (end,) = survivors(ranks.wait())
    require_equal(end, undisturbed())


def test_a_newcomer_joins_between_two_steps_and_ends_like_the_others() -> None:
    ranks = Ranks(2)

    def of(member: int) -> Moment:
        def moment(now: elastic.JobStep, shards: int, place: str) -> None:
            if (member, now.number, place) == (0, 2, "begin"):
                ranks.let_in(0, seed=9)

        return moment

    for _ in range(2):
        ranks.start(of)
    outcomes = ranks.wait()
    ends = survivors(outcomes)
    assert len(ends) == 3
    assert outcomes[2].committed[0] > 2
    assert outcomes[2].committed[-1] == 9
    for end in ends:
        require_equal(end, undisturbed())


def test_random_kills_and_newcomers_change_no_bit() -> None:
    chance = random.Random(3)
    ranks = Ranks(3)

    def of(member: int) -> Moment:
        step, place = chance.randrange(1, 18), chance.choice(["begin", "shard", "averages", "end"])

        def moment(now: elastic.JobStep, shards: int, where: str) -> None:
            if member and (now.number, where) == (step, place):
                ranks.start(of, epochs=4, seed=member)
                ranks.kill(member)

        return moment

    for _ in range(3):
        ranks.start(of, epochs=4)
    ends = [end for end in survivors(ranks.wait()) if end.steps >= 0]  # some may come too late
    assert ends
    for end in ends:
        require_equal(end, undisturbed(4))


@pytest.mark.parametrize("who", ["source", "newcomer"])
def test_one_that_is_killed_in_the_middle_of_a_copy_changes_no_bit(who: str) -> None:
    ranks = Ranks(3)
    copies: list[int] = []

    def kill_in_copy(member: int) -> Callable[..., None]:
        def prepare(group: Group, **_: object) -> None:
            def before(call: Call) -> None:
                large = call.kind == "broadcast" and call.nbytes > 1000
                copies.append(member) if large and len(ranks.outcomes) > 3 else None
                sends = call.root == group.rank()
                if large and copies.count(member) == 2 and sends == (who == "source"):
                    ranks.kill(member)

            group.register_hooks(before=before)

        return prepare

    def of(member: int) -> Moment:
        def moment(now: elastic.JobStep, shards: int, place: str) -> None:
            if (member, now.number, place) == (1, 2, "begin"):
                more = {} if who == "source" else {"prepare": kill_in_copy(3)}
                ranks.let_in(1, seed=9, epochs=4, **more)

        return moment

    for number in range(3):
        sender = number == 0 and who == "source"
        ranks.start(of, epochs=4, **({"prepare": kill_in_copy(number)} if sender else {}))
    ends = survivors(ranks.wait())
    assert len(ends) == 3
    assert copies
    for end in ends:
        require_equal(end, undisturbed(4))


def test_two_are_killed_at_once_and_one_during_the_recovery() -> None:
    ranks = Ranks(5)
    meetings: list[int] = []

    def prepare_of(number: int) -> Callable[..., None]:
        def prepare(group: Group, **_: object) -> None:
            if number != 3:
                return
            move = group.move

            def move_or_die(store: object, rank: int, members: tuple[int, ...]) -> object:
                meetings.append(rank)
                if len(meetings) == 2:
                    ranks.kill(number)
                return move(store, rank, members)  # type: ignore[arg-type]

            group.move = move_or_die  # type: ignore[method-assign, assignment]

        return prepare

    for number in range(5):
        moment = kill_at(ranks, {1: (4, "shard"), 2: (4, "shard")})
        ranks.start(moment, prepare=prepare_of(number))
    ends = survivors(ranks.wait())
    assert len(ends) == 2
    for end in ends:
        require_equal(end, undisturbed())
