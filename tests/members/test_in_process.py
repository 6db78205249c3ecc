"""Members that are threads of one process."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from paceline._members import HowFar, RosterChange, Rules, SharedCouncil, ThreadMember
from paceline.errors import JobEndedError, MeetingTimeoutError, MembershipError


def on_threads(*calls: Callable[[], object]) -> list:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [one.result(120) for one in [pool.submit(call) for call in calls]]


def meet_all(members: list[ThreadMember], steps: int = -1, why: str = "") -> list:
    return on_threads(*(lambda m=m: m.meet(HowFar(steps, why=why), 10) for m in members))


def begin(council: SharedCouncil, n: int) -> list[ThreadMember]:
    members = [council.join() for _ in range(n)]
    rosters = meet_all(members)
    assert {roster.number for roster in rosters} == {1}
    assert on_threads(*(lambda m=m: m.ready(1) for m in members)) == [True] * n
    return members


def test_members_meet_share_a_store_and_go_on_without_one_that_is_killed() -> None:
    with SharedCouncil(Rules(first=3)) as council:
        members = begin(council, 3)
        members[0].store(1).set("key", "value")
        assert members[1].store(1).get("key") == b"value"

        heard: queue.Queue[RosterChange] = queue.Queue()
        members[0].listen(heard.put)
        council.kill(1)
        assert heard.get(timeout=300) == RosterChange("lost", {1: "killed by SIGKILL"}, 1)

        survivors = [members[0], members[2]]
        roster = meet_all(survivors, 4, "lost")[0]
        assert (roster.number, roster.members, roster.steps) == (2, (0, 2), 4)
        assert not members[0].store(2).check(["key"])
        with pytest.raises(MembershipError, match="killed by SIGKILL"):
            members[1].meet(HowFar(4), 10)


def test_one_that_is_killed_in_the_meeting_is_freed() -> None:
    with SharedCouncil(Rules(first=2)) as council:
        member = council.join()
        came = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            meeting = pool.submit(lambda: (came.set(), member.meet(HowFar(), 10)))
            came.wait(60)
            council.kill(member.me)
            with pytest.raises(MembershipError):
                meeting.result(60)


def test_a_listener_hears_what_it_missed_of_the_current_roster() -> None:
    with SharedCouncil(Rules(first=2)) as council:
        members = begin(council, 2)
        council.kill(1)
        heard: queue.Queue[RosterChange] = queue.Queue()
        members[0].listen(heard.put)
        assert heard.get(timeout=300).kind == "lost"


def test_a_meeting_that_nobody_else_comes_to_ends_with_their_names() -> None:
    with SharedCouncil(Rules(first=2)) as council:
        members = begin(council, 2)
        with pytest.raises(MeetingTimeoutError) as raised:
            members[0].meet(HowFar(1, why="reset"), 0.05)
        assert "member 1 (process 2 on here)" in raised.value.why
        assert [r.number for r in meet_all(members, 1, "again")] == [2, 2]


def test_a_member_that_leaves_is_gone_and_the_job_can_end_for_the_rest() -> None:
    with SharedCouncil(Rules(first=2)) as council:
        members = begin(council, 2)
        members[1].leave("done")
        assert members[0].meet(HowFar(3), 10).gone == {1: "done"}
        council.end("enough")
        with pytest.raises(JobEndedError, match="enough"):
            members[0].meet(HowFar(3), 10)
        with pytest.raises(MembershipError):
            members[1].meet(HowFar(3), 10)


def test_trouble_of_one_is_false_for_all() -> None:
    with SharedCouncil(Rules(first=2)) as council:
        members = [council.join() for _ in range(2)]
        meet_all(members)
        answers = on_threads(
            lambda: members[0].ready(1), lambda: members[1].ready(1, "no descriptors")
        )
        assert answers == [False, False]
