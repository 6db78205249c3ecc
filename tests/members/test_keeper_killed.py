"""The keeper is killed at random moments while members meet, and nothing is decided twice."""

import random
import threading

import pytest

from paceline._members import HowFar, Roster
from paceline._members.client import SocketMember
from paceline.errors import MembershipError

from .keepers import KeeperAt, on_threads

ROSTERS = 30


def go_through_rosters(member: SocketMember, seen: dict[int, Roster], used: list[int]) -> None:
    """Meet again and again, and use each roster that all can use: count those who do."""
    while len(used) < ROSTERS:
        roster = member.meet(HowFar(len(used), why="again"), 60)
        assert seen.setdefault(roster.number, roster) == roster, "two rosters have one number"
        if member.ready(roster.number):
            used.append(roster.number)
            member.tell(len(used))


@pytest.mark.parametrize("seed", range(2))
def test_rosters_are_decided_once_while_keepers_are_killed(seed: int) -> None:
    chance = random.Random(seed)
    with KeeperAt("--first", "3") as keeper:
        keeper.prepare()
        members = [keeper.join() for _ in range(3)]
        seen: dict[int, Roster] = {}
        used: list[list[int]] = [[] for _ in members]
        done = threading.Event()
        kills = 0

        def kill_at_random() -> None:
            nonlocal kills
            while not done.wait(chance.uniform(0.0, 0.1)) and kills < 12:
                keeper.replace()
                keeper.prepare()
                kills += 1

        killing = threading.Thread(target=kill_at_random)
        killing.start()
        calls = [
            lambda m=m, u=u: go_through_rosters(m, seen, u)
            for m, u in zip(members, used, strict=True)
        ]
        try:
            on_threads(*calls, within=100)
        finally:
            done.set()
            killing.join(20)
        assert kills >= 1
        for roster in seen.values():
            assert roster.members == (0, 1, 2)  # nobody was given up, since all live
        # What one uses all use, except that the last answer may still be on its way.
        assert len({tuple(one) for one in used}) == 1


@pytest.mark.slow
def test_members_that_die_while_keepers_do_are_given_up_and_the_rest_go_on() -> None:
    with KeeperAt("--first", "3") as keeper:
        keeper.prepare()
        members = keeper.begin(3)
        members[1].close()
        keeper.replace()
        rest = [members[0], members[2]]
        rosters = on_threads(*(lambda m=m: m.meet(HowFar(1, why="lost"), 60) for m in rest))
        assert rosters[0].members == (0, 2)
        with pytest.raises(MembershipError):
            members[1].meet(HowFar(1), 5)
