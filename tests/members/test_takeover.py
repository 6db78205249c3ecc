"""What a council does that takes over from a keeper of a host that was lost."""

from paceline._members import HowFar, Roster, Rules
from paceline._members.words import Changed, Decided, Enrol, ProcessId, Refused
from tests.members.test_council import Hall, in_use

LOST = "its keys were lost with the keeper"
RULES = Rules(first=1, return_within=5.0, unseen=60.0)


def taken_over(*members: int, newcomers: int = 0, lost: str = LOST) -> Hall:
    """A council whose last roster was of these members; none of them has come back yet."""
    hall = Hall(RULES, next_member=max(members) + 1 + newcomers, last_roster=4)
    how_far = tuple(HowFar(7) for _ in members)
    hall.council.recall(Roster(4, members, how_far), hall.now, lost)
    hall.council.take()  # nobody is connected yet
    return hall


def comes_back(hall: Hall, member: int, *members: int, number: int = 4) -> None:
    roster = Roster(number, members, tuple(HowFar(7) for _ in members)) if members else None
    process = ProcessId("there", 100 + member)
    hall.council.enrol(Enrol(process, member, roster, in_use=bool(members)), hall.now)


def test_members_that_come_back_hear_that_their_roster_is_given_up() -> None:
    hall = taken_over(0, 1)
    comes_back(hall, 1, 0, 1)
    (change,) = [word.change for word in hall.said(Changed, to=1)]
    assert change.kind == "lost"
    assert change.roster == 4
    assert set(change.members) <= {0, 1}


def test_those_that_come_back_go_on_without_those_that_do_not() -> None:
    hall = taken_over(0, 1, 2)
    for member in (1, 2):
        comes_back(hall, member, 0, 1, 2)
        hall.meet(member, steps=7, why="lost")
    assert not hall.said(Decided)
    hall.pass_time(5.0)
    assert hall.roster() == (1, 2)
    assert hall.council.current.number == 5


def test_a_roster_whose_keys_are_there_is_used_on() -> None:
    hall = taken_over(0, 1, lost="")
    for member in (0, 1):
        comes_back(hall, member, 0, 1)
    hall.pass_time(20.0)
    assert not hall.said(Changed)


def test_members_that_a_later_roster_was_decided_without_are_sent_away() -> None:
    hall = taken_over(2, 3)  # roster 4, which 0 and 1 never heard of
    comes_back(hall, 0, 0, 1, number=3)
    assert hall.said(Refused, to=0)
    assert 0 in hall.council.gone


def test_newcomers_do_not_begin_while_a_roster_that_nobody_sees_may_train_on() -> None:
    hall = taken_over(0, 1, newcomers=1)
    comes_back(hall, 2)
    hall.meet(2)
    hall.pass_time(5.0)  # 0 and 1 are not waited for any more
    assert hall.council.next_time() == hall.now + 60.0
    hall.pass_time(59.0)
    assert not hall.said(Decided)
    hall.pass_time(1.0)
    assert hall.roster() == (2,)


def test_newcomers_begin_at_once_when_agents_saw_the_whole_roster_end() -> None:
    hall = taken_over(0, 1, newcomers=1)
    comes_back(hall, 2)
    hall.meet(2)
    for member in (0, 1):
        hall.lose(member)
    assert hall.roster() == (2,)


def test_on_one_host_newcomers_wait_for_nobody_that_is_gone() -> None:
    hall = in_use(1, spares=1)
    hall.council.disconnected(0, hall.now)
    hall.pass_time(2.0)
    assert hall.roster() == (1,)
