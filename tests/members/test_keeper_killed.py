"""The keeper is killed at random moments while members meet, and nothing is decided twice."""

import queue
import random
import time

import pytest

from paceline._members import HowFar, Roster
from paceline._members.client import SocketMember
from paceline.errors import MembershipError

from .keepers import KeeperAt, on_threads

KILLS = 8


class Going:
    """Members that meet again and again, and use each roster that all of them can use."""

    def __init__(self, chance: random.Random) -> None:
        self.seen: dict[int, Roster] = {}
        self.last = 0  # the roster that all stop after; none yet
        self.kills: queue.SimpleQueue[float | None] = queue.SimpleQueue()
        self._chance = chance

    def go(self, member: SocketMember) -> list[int]:
        used: list[int] = []
        while not (self.last and used and used[-1] >= self.last):
            roster = member.meet(HowFar(len(used), why="again"), 60)
            same = self.seen.setdefault(roster.number, roster) == roster
            assert same, "two rosters have one number"
            if member.ready(roster.number):
                used.append(roster.number)
                member.tell(len(used))
            if member.me == 0 and not self.last:
                self.kills.put(self._chance.uniform(0.0, 0.02))
        return used

    def kill(self, keeper: KeeperAt) -> None:
        """Kill the keeper at some moment after the first member passed a roster, a few times."""
        for _ in range(KILLS):
            time.sleep(self.kills.get(timeout=300) or 0.0)
            keeper.replace()
            keeper.prepare()
        self.last = max(self.seen) + 3  # those who lag behind are one roster behind


@pytest.mark.parametrize("seed", range(2))
def test_rosters_are_decided_once_while_keepers_are_killed(seed: int) -> None:
    with KeeperAt("--first", "3") as keeper:
        keeper.prepare()
        members = [keeper.join() for _ in range(3)]
        going = Going(random.Random(seed))
        calls = [lambda m=m: going.go(m) for m in members]
        *used, _ = on_threads(*calls, lambda: going.kill(keeper), within=100)
        for roster in going.seen.values():
            assert roster.members == (0, 1, 2)  # nobody was given up, since all live
        assert len({one[-1] for one in used}) == 1  # from then on no answer was lost


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
