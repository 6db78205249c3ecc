"""Who trains together, decided by hand-made events; random ones are in another file."""

import math

import pytest

from paceline._members import NOTHING, Council, HowFar, RosterChange, Rules
from paceline._members.agents import AgentHello, Fence, Formed, Over
from paceline._members.council import AGENTS, RosterPhase
from paceline._members.words import (
    Changed,
    Decided,
    Enrol,
    HasCommitted,
    Leave,
    Meet,
    Opened,
    ProcessId,
    Refused,
    SaysReady,
    Withdraw,
)


class Hall:
    """A council, and what it said to whom."""

    def __init__(self, rules: Rules, **state: int):
        self.council = Council(rules, 0.0, **state)
        self.now = 0.0
        self.turn = 0

    def enrol(self, pid: int) -> int:
        return self.council.enrol(Enrol(ProcessId("here", pid)), self.now)

    def meet(
        self,
        member: int,
        steps: int = NOTHING,
        why: str = "",
        turn: int = 0,
        within: float = math.inf,
    ) -> None:
        self.turn += 1
        turn = turn or self.turn
        self.council.meet(member, Meet(HowFar(steps, why=why), turn, within), self.now)

    def ready(self, member: int, trouble: str = "", culprit: int = -1) -> None:
        word = SaysReady(self.council.current.number, trouble, culprit)
        self.council.ready(member, word, self.now)

    def lose(self, member: int) -> None:
        self.council.lose(member, "killed by SIGKILL", self.now)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.council.time(self.now)

    def said(self, kind: type, to: int | None = None) -> list:
        said = self.council.take()
        return [w for who, w in said if isinstance(w, kind) and to in (None, who)]

    def roster(self) -> tuple[int, ...]:
        """The members of the roster that all of them were told just now."""
        said = [(who, w.roster) for who, w in self.council.take() if isinstance(w, Decided)]
        assert said, self.council.awaited()
        assert sorted(who for who, _ in said) == sorted(said[0][1].members)
        return said[0][1].members


def in_use(n: int, rules: Rules | None = None, spares: int = 0) -> Hall:
    hall = Hall(rules or Rules(first=n))
    if spares:
        hall.council.agent(AgentHello("", ranks=n), 0.0)
    for pid in range(n + spares):
        hall.enrol(pid)
    for member in range(n + spares):
        hall.meet(member)
    assert hall.roster() == tuple(range(n))
    for member in range(n):
        hall.ready(member)
    assert hall.council.phase is RosterPhase.IN_USE
    assert all(word.usable for word in hall.said(Opened))
    return hall


def test_the_first_roster_waits_for_as_many_as_the_job_begins_with() -> None:
    hall = Hall(Rules(first=3))
    for pid in range(3):
        hall.enrol(pid)
    hall.meet(1)
    hall.meet(0)
    assert hall.said(Decided) == []
    hall.meet(2)
    assert hall.roster() == (0, 1, 2)


def test_the_job_begins_with_fewer_when_the_others_do_not_come() -> None:
    hall = Hall(Rules(first=3, least=2, gather=30))
    hall.enrol(0), hall.enrol(1)
    hall.meet(0), hall.meet(1)
    assert hall.council.next_time() == 30
    hall.pass_time(30)
    assert hall.roster() == (0, 1)


def test_survivors_keep_the_order_of_their_ranks_and_a_newcomer_follows_them() -> None:
    hall = in_use(4)
    newcomer = hall.enrol(9)
    hall.meet(newcomer)
    hall.lose(1)
    for member in (3, 0, 2):
        hall.meet(member, 7, "a rank was lost")
    assert hall.roster() == (0, 2, 3, newcomer)
    assert hall.council.current.gone == {1: "killed by SIGKILL"}
    assert (hall.council.current.steps, hall.council.current.source) == (7, 0)


def test_all_hear_at_once_that_a_member_is_lost() -> None:
    hall = in_use(3)
    hall.lose(2)
    lost = Changed(RosterChange("lost", {2: "killed by SIGKILL"}, 1))
    assert [hall.council.take()] == [[(0, lost), (1, lost)]]


def test_a_member_that_comes_with_a_reason_frees_the_others() -> None:
    hall = in_use(2)
    hall.meet(0, 3, "connection reset")
    assert hall.said(Changed, to=1) == [Changed(RosterChange("lost", {0: "connection reset"}, 1))]


def test_a_meeting_that_all_come_to_disturbs_nobody_for_a_second() -> None:
    hall = in_use(2)
    hall.meet(0, 3)
    assert hall.said(Changed) == []
    hall.pass_time(1.0)
    assert [word.change.kind for word in hall.said(Changed, to=1)] == ["lost"]


def test_a_newcomer_is_announced_and_let_in_after_the_step() -> None:
    hall = in_use(2)
    newcomer = hall.enrol(9)
    hall.meet(newcomer)
    waiting = Changed(RosterChange("waiting", {newcomer: ""}, 1))
    assert hall.council.take()[-2:] == [(0, waiting), (1, waiting)]
    hall.meet(1, 5)
    hall.meet(0, 5)
    assert hall.roster() == (0, 1, newcomer)


def test_a_newcomer_that_came_while_the_roster_was_opening_is_announced_afterwards() -> None:
    hall = in_use(2)
    hall.meet(0, 1), hall.meet(1, 1)
    newcomer = hall.enrol(9)
    hall.meet(newcomer)
    assert hall.said(Changed) == []
    hall.ready(0), hall.ready(1)
    assert [word.change.kind for word in hall.said(Changed)] == ["waiting", "waiting"]


def test_a_spare_waits_until_a_member_is_lost() -> None:
    hall = in_use(2, spares=1)
    assert hall.said(Changed) == []
    hall.lose(0)
    hall.meet(1, 4, "a rank was lost")
    assert hall.roster() == (1, 2)


def test_no_more_than_the_most_are_let_in() -> None:
    hall = in_use(2, Rules(first=2, most=2))
    newcomer = hall.enrol(9)
    hall.meet(newcomer)
    assert hall.said(Changed) == []


def test_the_job_ends_when_too_few_are_left_for_too_long() -> None:
    hall = in_use(3, Rules(first=3, least=2, too_few=60))
    hall.lose(0), hall.lose(1)
    hall.meet(2, 1, "lost")
    hall.pass_time(59)
    assert hall.said(Decided) == []
    hall.pass_time(1)
    said = hall.council.take()
    refusal = next(w for who, w in said if who == 2 and isinstance(w, Refused))
    assert refusal.ended
    assert "killed by SIGKILL" in refusal.why
    assert any(who == AGENTS and isinstance(w, Over) and w.failed for who, w in said)


def test_a_newcomer_in_time_saves_the_job() -> None:
    hall = in_use(2, Rules(first=2, least=2, too_few=60))
    hall.lose(0)
    hall.meet(1, 1, "lost")
    newcomer = hall.enrol(9)
    hall.meet(newcomer)
    assert hall.roster() == (1, newcomer)


def test_one_that_cannot_use_the_roster_keeps_all_from_using_it() -> None:
    hall = in_use(2)
    hall.meet(0, 1), hall.meet(1, 1)
    hall.council.take()
    hall.ready(0)
    hall.ready(1, "no descriptors left")
    opened = hall.said(Opened)
    assert [word.usable for word in opened] == [False, False]
    assert "no descriptors left" in opened[0].why
    hall.meet(0, 1), hall.meet(1, 1)
    assert hall.roster() == (0, 1)


def test_rosters_that_can_never_be_used_end_the_job() -> None:
    hall = in_use(1, Rules(vain=3))
    for _ in range(3):
        hall.meet(0, 1)
        hall.ready(0, "no memory")
    assert hall.council.ended.endswith("no memory")


def test_a_member_lost_while_a_roster_opens_answers_those_who_were_ready() -> None:
    hall = in_use(3)
    for member in range(3):
        hall.meet(member, 2)
    hall.ready(0)
    hall.council.take()
    hall.lose(2)
    assert [word.usable for word in hall.said(Opened, to=0)] == [False]
    hall.ready(1)
    assert [word.usable for word in hall.said(Opened, to=1)] == [False]


def test_a_roster_that_a_member_does_not_open_in_time_is_given_up() -> None:
    hall = in_use(2, Rules(first=2, opening=20))
    hall.meet(0, 1), hall.meet(1, 1)
    hall.ready(0)
    hall.council.take()
    hall.pass_time(20)
    said = hall.said(Opened, to=0)
    assert [word.usable for word in said] == [False]
    assert "member 1 (it did not confirm the roster in time" in said[0].why


def test_the_same_step_failing_on_three_members_ends_the_job() -> None:
    hall = in_use(4)
    for member in range(3):
        hall.council.progress(member, HasCommitted(6))
        hall.council.leave(member, Leave("ValueError: bad batch", failed=True), hall.now)
        assert bool(hall.council.ended) == (member == 2)
    assert hall.council.ended == (
        "step 7 failed on 3 members, last on member 2: ValueError: bad batch"
    )


def test_other_steps_failing_do_not_end_the_job() -> None:
    hall = in_use(4)
    for member in range(3):
        hall.council.progress(member, HasCommitted(member))
        hall.council.leave(member, Leave("ValueError", failed=True), hall.now)
    assert not hall.council.ended


def test_one_that_leaves_frees_the_others_after_a_second_only() -> None:
    hall = in_use(3)
    hall.council.leave(1, Leave("SIGTERM"), hall.now)
    assert hall.said(Changed) == []
    hall.meet(0, 4)
    hall.meet(2, 4)
    assert hall.roster() == (0, 2)
    assert hall.council.current.gone == {1: "SIGTERM"}


def test_when_all_have_finished_the_spares_hear_that_the_job_is_over() -> None:
    hall = in_use(2, spares=1)
    for member in range(2):
        hall.council.leave(member, Leave(finished=True), hall.now)
    said = hall.council.take()
    assert (2, Refused("all of its members have left", ended=True, well=True)) in said
    assert (AGENTS, Over("all of its members have left", failed=False)) in said


def test_after_the_whole_gang_is_killed_the_spares_begin() -> None:
    hall = in_use(2, Rules(first=2, gather=5), spares=1)
    hall.lose(0), hall.lose(1)
    hall.pass_time(5)
    assert hall.roster() == (2,)
    assert hall.council.current.source is None


def test_a_silent_member_is_fenced_and_given_up_if_no_agent_says_so() -> None:
    hall = in_use(2)
    hall.council.silent(1, "not heard of for 60 s", hall.now)
    assert hall.said(Fence) == [Fence(1, "not heard of for 60 s")]
    hall.pass_time(5)
    assert hall.council.gone == {1: "not heard of for 60 s"}


def linger(within: float) -> Hall:
    """Members 0 and 1 have lost member 3, and member 2 says that it lives, and does not come."""
    hall = in_use(4)
    hall.lose(3)
    for member in (0, 1):
        hall.meet(member, 5, "lost", within=within)
    hall.council.take()
    return hall


def test_a_member_that_lives_and_does_not_come_is_ended_before_the_others_give_up() -> None:
    hall = linger(within=600)
    hall.pass_time(479)
    assert hall.said(Fence) == []
    hall.pass_time(1)
    assert [fence.member for fence in hall.said(Fence)] == [2]
    hall.council.heard_again(2)  # its heart beats
    hall.pass_time(5)
    assert hall.roster() == (0, 1)
    assert hall.council.gone[2] == "others waited 480 s for it to come to their meeting"


def test_a_member_that_comes_late_to_a_meeting_is_in_the_roster_if_nobody_has_ended_it() -> None:
    hall = linger(within=600)
    hall.pass_time(481)
    hall.meet(2, 5, "late", within=600)
    assert hall.roster() == (0, 1, 2)
    hall.pass_time(1000)
    assert 2 in hall.council.living


def test_a_member_that_gives_up_goes_on_without_those_that_it_waited_for() -> None:
    hall = linger(within=1)
    hall.now += 1  # nobody has looked at the time
    hall.council.withdraw(0, Withdraw(hall.council._meeting[0].turn), hall.now)
    assert hall.roster() == (0, 1)


def test_nobody_is_ended_for_a_wait_of_less_than_a_second() -> None:
    hall = linger(within=0.5)
    hall.pass_time(10)
    assert hall.said(Fence) == []
    assert 2 in hall.council.living


def test_a_member_whose_connection_closed_may_come_back() -> None:
    hall = in_use(2)
    hall.council.disconnected(1, hall.now)
    hall.pass_time(1.9)
    word = Enrol(ProcessId("here", 1), 1, hall.council.current, True)
    assert hall.council.refusal(word) == ""
    assert hall.council.enrol(word, hall.now) == 1
    hall.pass_time(5)
    assert hall.council.gone == {}
    assert hall.council.phase is RosterPhase.IN_USE


def test_one_that_waits_no_longer_hears_for_whom_it_waited() -> None:
    hall = in_use(2)
    hall.meet(0, 1, "lost", turn=70)
    hall.council.withdraw(0, Withdraw(70), hall.now)
    (word,) = hall.said(Refused, to=0)
    assert word.turn == 70
    assert "member 1 (process 1 on here)" in word.why
    hall.meet(1, 1)
    assert hall.said(Decided) == []


def test_an_agent_has_a_number_before_it_starts_the_process() -> None:
    hall = Hall(Rules())
    assert [hall.council.enlist("here") for _ in range(2)] == [0, 1]
    assert again(hall, 1, None, pid=6) == ""
    assert hall.enrol(5) == 2  # started by somebody else


def test_agents_say_how_many_are_wanted_and_the_others_are_spares() -> None:
    hall = Hall(Rules())
    hall.council.agent(AgentHello("here", 2), 0.0)
    hall.council.agent(AgentHello("there", 1), 0.0)
    for pid in range(4):
        hall.meet(hall.enrol(pid))
    assert hall.roster() == (0, 1, 2)


def test_agents_hear_of_each_roster_that_is_in_use() -> None:
    hall = in_use(2, spares=1)
    hall.now = 3.0
    hall.lose(0)
    hall.meet(1, 4, "lost")
    hall.now = 3.5
    hall.council.take()
    hall.ready(1), hall.ready(2)
    assert hall.said(Formed, to=AGENTS) == [
        Formed(2, (1, 2), (), {0: "killed by SIGKILL"}, seconds=0.5, steps=4)
    ]


def test_a_process_that_its_agent_does_not_have_any_more_is_gone() -> None:
    hall = Hall(Rules())
    for _ in range(2):
        hall.council.enlist("here")
    hall.council.agent(AgentHello("here", 2, {1: 77}), 0.0)
    assert list(hall.council.gone) == [0]
    assert hall.council.living[1].process == ProcessId("here", 77)
    assert "process 77" in again(hall, 1, None, pid=78)


def test_too_few_end_the_job_at_once_when_agents_start_no_more() -> None:
    hall = in_use(2, Rules(first=2, least=2))
    hall.council.agent(AgentHello("elsewhere", 2), 0.0)
    hall.lose(0)
    hall.meet(1, 1, "lost")
    hall.council.no_more("elsewhere", "started 3 times", hall.now)
    assert "started 3 times" in hall.council.ended


def again(hall: Hall, member: int, roster, using: bool = True, pid: int | None = None) -> str:
    """Enrol with what a member remembers of the keeper before; the refusal, if there is one."""
    process = ProcessId("here", member if pid is None else pid)
    word = Enrol(process, member, roster, using)
    refusal = hall.council.refusal(word)
    if not refusal:
        hall.council.enrol(word, hall.now)
    return refusal


def replaced(old: Hall) -> Hall:
    council = old.council
    return Hall(council.rules, next_member=council.next_member, last_roster=council.last_roster)


def test_a_new_keeper_goes_on_with_the_roster_that_members_remember() -> None:
    old = in_use(3)
    hall = replaced(old)
    for member in range(3):
        assert again(hall, member, old.council.current) == ""
    assert hall.said(Changed) == []
    assert hall.council.phase is RosterPhase.IN_USE
    hall.lose(1)
    hall.meet(0, 5, "lost"), hall.meet(2, 5, "lost")
    hall.council.take()
    assert hall.council.current.number == 2
    assert hall.council.current.members == (0, 2)


def test_a_new_keeper_waits_for_members_that_others_remember() -> None:
    old = in_use(3)
    hall = replaced(old)
    again(hall, 0, old.council.current)
    hall.meet(0, 5, "lost")
    hall.pass_time(9.9)
    assert hall.said(Decided) == []
    hall.pass_time(0.1)
    assert hall.roster() == (0,)
    assert again(hall, 1, old.council.current).startswith("it was given up: it did not reconnect")


def test_a_new_keeper_hears_from_an_agent_who_died_with_the_one_before() -> None:
    old = in_use(3)
    hall = replaced(old)
    again(hall, 0, old.council.current)
    hall.meet(0, 5, "lost")
    hall.council.agent(AgentHello("here", 2, {0: 0, 2: 2}, {1: "killed by SIGKILL"}), hall.now)
    again(hall, 2, old.council.current)
    hall.meet(2, 5, "lost")
    assert hall.roster() == (0, 2)
    assert hall.council.current.gone == {1: "killed by SIGKILL"}
    # in whichever order
    hall = replaced(old)
    hall.council.agent(AgentHello("here", 2, {0: 0, 2: 2}, {1: "killed by SIGKILL"}), hall.now)
    for member in (0, 2):
        again(hall, member, old.council.current)
        hall.meet(member, 5, "lost")
    assert hall.roster() == (0, 2)


def test_a_new_keeper_does_not_let_spares_begin_before_members_are_back() -> None:
    old = in_use(2, spares=1)
    hall = replaced(old)
    again(hall, 2, None, using=False)
    hall.meet(2)
    assert hall.said(Decided) == []
    again(hall, 0, old.council.current)
    hall.pass_time(5)
    assert hall.said(Decided) == []


def test_one_that_rosters_went_on_without_is_told_so() -> None:
    old = in_use(3)
    before = old.council.current
    old.lose(2)
    old.meet(0, 1, "lost"), old.meet(1, 1, "lost")
    hall = replaced(old)
    again(hall, 2, before)
    again(hall, 0, old.council.current)
    assert hall.said(Refused, to=2) == [Refused("roster 2 was decided without it")]
    assert hall.council.current.members == (0, 1)


def test_a_process_that_lies_about_its_number_is_refused() -> None:
    hall = in_use(2)
    assert again(hall, 1, hall.council.current, pid=77) == (
        "member 1 is process 1 on here, not process 77 on here"
    )
    assert again(hall, 5, None) == "it names members that have never existed"
    stranger = hall.council.current
    stranger = type(stranger)(9, stranger.members, stranger.how_far)
    assert again(hall, 1, stranger) == "there has never been a roster 9"


def test_a_number_is_never_given_twice_not_even_by_a_new_keeper() -> None:
    old = in_use(2)
    old.lose(1)
    hall = replaced(old)
    assert hall.enrol(50) == 2


def test_a_member_that_says_twice_that_it_came_is_heard_once() -> None:
    hall = in_use(1)
    hall.meet(0, 1, turn=9)
    assert hall.roster() == (0,)
    number = hall.council.current.number
    hall.meet(0, 1, turn=9)
    assert [word.roster.number for word in hall.said(Decided)] == [number]  # and no other roster
    assert hall.council.phase is RosterPhase.OPENING


def test_a_spare_that_is_asked_to_leave_is_gone_at_once() -> None:
    hall = in_use(1, spares=1)
    hall.council.dismiss(1, "SIGTERM", hall.now)
    assert [w for w in hall.council.take() if isinstance(w[1], Refused)] == [
        (1, Refused("SIGTERM"))
    ]
    assert 1 not in hall.council.living


def test_a_member_whose_answer_was_lost_with_its_connection_is_answered_again() -> None:
    hall = Hall(Rules(first=2))
    for pid in (10, 11):
        hall.enrol(pid)
    for member in (0, 1):
        hall.meet(member, turn=1)
    assert hall.roster() == (0, 1)
    hall.meet(0, turn=1)  # as after a new connection
    assert [word.roster.members for word in hall.said(Decided, to=0)] == [(0, 1)]
    hall.lose(1)
    hall.council.take()
    hall.meet(0, turn=1)
    decided, changed = (word for _, word in hall.council.take())
    assert decided.roster.members == (0, 1)
    assert list(changed.change.members) == [1]


@pytest.mark.parametrize("first", [0, 1])
def test_a_member_that_cannot_use_any_roster_is_ended_and_the_others_go_on(first: int) -> None:
    """Whoever says first that it is in trouble may know that another is the cause."""
    hall = in_use(3)
    hall.lose(2)
    for _ in range(5):
        for member in (0, 1):
            hall.meet(member, why="lost")
        assert hall.roster() == (0, 1)
        for member in (first, 1 - first):
            hall.ready(member, "too many open files", culprit=1)
    assert hall.council.gone[1] == "it could not use 5 rosters: too many open files"
    assert [word.why for word in hall.said(Refused, 1)] == [hall.council.gone[1]]
    hall.meet(0, why="lost")
    assert hall.roster() == (0,)


def test_one_that_asks_a_new_keeper_before_those_who_know_come_is_answered() -> None:
    old = in_use(2)
    hall = replaced(old)
    again(hall, 1, old.council.current, using=False)  # its answer was lost with the old keeper
    hall.ready(1)
    assert hall.said(Opened) == []
    again(hall, 0, old.council.current)
    assert [word.usable for word in hall.said(Opened, to=1)] == [True]
