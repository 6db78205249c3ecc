"""Decides who trains together: events in, words to members out. No socket, no clock, no thread.

Whoever holds a :class:`Council` tells it what happened and when, one event at a time, and sends
what :meth:`Council.take` gives. What it holds is soft: after its holder died, a new one is filled
by members that enrol again with what they remember, and goes on. Two numbers alone must outlive it,
the next member's and the last roster's, so that neither is ever given twice.

A roster is *opening* until all of its members said that they can use it, then *in use*, and *given
up* once one of its members is gone or comes to the meeting. The next one is decided when every
living member of the current one has come. They keep the order of their ranks; newcomers follow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from math import inf

import msgspec

from .agents import AgentHello, Fence, Formed, KeeperWord, Over
from .roster import NOTHING, Roster, RosterChange
from .words import (
    Changed,
    Decided,
    Enrol,
    Enrolled,
    HasCommitted,
    Leave,
    Meet,
    Opened,
    ProcessId,
    Refused,
    SaysReady,
    ToMember,
    Withdraw,
)

AGENTS = -1  # whom a word is for: all agents
NO_ROSTER = Roster(0, (), ())
_LATE = 0.8  # of the time that members wait for others, after which those are ended
_SHORTEST = 1.0  # seconds; nobody is ended for less
UNKNOWN = ProcessId("", 0)  # of a member that others remember, and that has not come back yet


class Rules(msgspec.Struct, frozen=True):
    """How large rosters are, and how long to wait for what. Times are in seconds."""

    least: int = 1  # members of a roster
    most: int = 1 << 20  # until agents say how many they want
    first: int = 1  # members that come before the job begins; until agents say so
    gather: float = 600.0  # then it begins with fewer, if there are as many as ``least``
    too_few: float = 600.0  # fewer than ``least`` wait so long for newcomers; then the job ends
    opening: float = 300.0  # until all members of a roster have said whether they can use it
    patience: float = 1.0  # with members that have not come to a meeting that all should come to
    return_within: float = 10.0  # until members are back after the keeper was replaced
    reconnect_within: float = 2.0  # …or after their connection closed
    fence_within: float = 5.0  # until an agent has ended a silent member
    hosts: int = 0  # at a time; 0: any number
    unseen: float = 0.0  # that members may train on by themselves, with nobody who reaches them
    failures: int = 3  # of the same step that end the job
    troubles: int = 5  # rosters that one member could not use, which end it
    vain: int = 10  # rosters in a row that nobody could use, which end the job too


class RosterPhase(Enum):
    """Life of a roster."""

    OPENING = auto()  # members say whether they can use it
    IN_USE = auto()  # all can
    GIVEN_UP = auto()  # the next one is to be decided


@dataclass
class Living:
    """A member that is not gone, as far as the council knows."""

    process: ProcessId
    host: str = ""  # of the agent that started it
    heard: bool = False  # it has said so itself, to this council
    steps: int = NOTHING
    turn: int = 0  # of the last meeting that it was given a roster for
    lingers: bool = False  # it is heard of, and does not come to a meeting in time
    gone_at: float = inf  # unless it is heard of; one that lingers must come
    gone_why: str = ""


class Council:
    """The members of a job and their rosters. Every event has the time at which it is told."""

    def __init__(self, rules: Rules, now: float, next_member: int = 0, last_roster: int = 0):
        self.rules = rules
        self.next_member = next_member
        self.last_roster = last_roster
        self.living: dict[int, Living] = {}
        self.gone: dict[int, str] = {}
        self.current = NO_ROSTER
        self.phase = RosterPhase.GIVEN_UP
        self.ended = ""
        self.ended_well = False
        self._meeting: dict[int, Meet] = {}
        self._ready: set[int] = set()
        self._reasons: dict[int, str] = {}  # for giving the current roster up
        self._give_up_at = inf
        self._late_at = inf  # members that live and do not come to a meeting are ended then
        self._held_since = inf  # a decision, for want of members
        self._held_until = inf
        self._remember_until = now + rules.return_within if last_roster else inf
        self._complete_at = now + rules.return_within if last_roster else now
        self._unseen_until = -inf  # members of the current roster, which may train on
        self._wanted: dict[str, int] = {}  # members, by the agents of each host
        self._no_more: dict[str, str] = {}  # why agents of a host start no more
        self._lost_at = inf  # when the first was known that is not in the current roster any more
        self._finished = False
        self._failures: dict[int, int] = {}
        self._vain = 0
        self._troubles: dict[int, int] = {}  # rosters given up for a member, since one was used
        self._out: list[tuple[int, ToMember | KeeperWord]] = []

    def take(self) -> list[tuple[int, ToMember | KeeperWord]]:
        """Give what is to be sent, and to whom; each word once."""
        out, self._out = self._out, []
        return out

    def recall(self, roster: Roster, now: float, lost: str = "") -> None:
        """Know which roster was the last of the keeper before this one, which was elsewhere.

        ``lost``: why it cannot be used on, if so; its members are told when they come back.
        """
        self._adopt(roster, now)
        if lost:
            self._give_up(dict.fromkeys(roster.members, lost))

    # Members come and go.

    def agent(self, word: AgentHello, now: float) -> None:
        """Know how many members an agent wants, and which of its processes live."""
        self._wanted[word.host] = word.ranks
        self._no_more.pop(word.host, None)
        for member, pid in word.members.items():
            if member not in self.living and member not in self.gone:
                self.living[member] = Living(UNKNOWN, word.host)
            if member in self.living and self.living[member].process == UNKNOWN:
                self.living[member].process = ProcessId(word.host, pid)
            self.next_member = max(self.next_member, member + 1)
        for member, why in word.gone.items():
            if member in self.living:
                self.lose(member, why, now)
            elif member < self.next_member:
                self.gone.setdefault(member, why)
        for member, living in list(self.living.items()):
            if word.host == (living.host or living.process.host) and member not in word.members:
                self.lose(member, "its launcher no longer has it", now)
        self._announce_newcomers()
        self._decide(now)

    def hosts(self) -> set[str]:
        """Hosts whose agents have members that live, as far as is known."""
        found = {living.host or living.process.host for living in self.living.values()}
        return found - {""}

    def forget_hosts(self, but: set[str]) -> None:
        """Want no members of hosts that are gone."""
        for host in self._wanted.keys() - but:
            del self._wanted[host]
            self._no_more.pop(host, None)

    def is_complete(self, now: float) -> bool:
        """Whether everybody has had the time to come back after the keeper was replaced."""
        return now >= self._complete_at

    def enlist(self, host: str) -> int:
        """Give the number of a process that the agent of a host is about to start."""
        member = self.next_member
        self.next_member += 1
        self.living[member] = Living(UNKNOWN, host)
        return member

    def no_more(self, host: str, why: str, now: float) -> None:
        """No process will be started on a host any more."""
        self._no_more[host] = why
        self._decide(now)

    def enrol(self, word: Enrol, now: float) -> int:
        """Take a process as a member, or as the one that it says it is; give its number.

        ``word`` is one that :meth:`refusal` has nothing to say about.
        """
        member = self.enlist("") if word.member is None else word.member
        living = self.living.setdefault(member, Living(word.process))
        living.process = word.process
        living.heard = True
        self.heard_again(member)
        self._tell(member, Enrolled(member))
        if word.roster is not None:
            self._remember(member, word.roster, word.in_use, now)
        if self.ended:
            self._tell(member, self._end_change())
        self._decide(now)
        return member

    def refusal(self, word: Enrol) -> str:
        """Say why a process cannot be the member that it says it is; empty if it can."""
        if word.member is None:
            return "" if word.roster is None else "it names a roster but is not a member"
        members = {word.member} | set(() if word.roster is None else word.roster.members)
        if not all(0 <= member < self.next_member for member in members):
            return "it names members that have never existed"
        if word.roster is not None and not 0 < word.roster.number <= self.last_roster:
            return f"there has never been a roster {word.roster.number}"
        if word.roster is not None and not _could_be(word.roster, word.member):
            return f"roster {word.roster.number} cannot have been like this"
        if word.member in self.gone:
            return f"it was given up: {self.gone[word.member]}"
        living = self.living.get(word.member)
        if living is not None and living.process not in (UNKNOWN, word.process):
            return f"member {word.member} is {living.process}, not {word.process}"
        return ""

    def disconnected(self, member: int, now: float) -> None:
        """A member's connection has closed; it may come back."""
        if member in self.living:
            self._overdue(member, now + self.rules.reconnect_within, "its connection closed")

    def silent(self, member: int, why: str, now: float) -> None:
        """A member is not heard of any more: an agent has to end it, if there is one."""
        living = self.living.get(member)
        if living is not None and living.gone_at == inf:
            self._out.append((AGENTS, Fence(member, why)))
            self._overdue(member, now + self.rules.fence_within, why)

    def heard_again(self, member: int) -> None:
        """A member that was silent is not."""
        if member in self.living and not self.living[member].lingers:
            self.living[member].gone_at = inf

    def lose(self, member: int, why: str, now: float) -> None:
        """A member is gone for good."""
        if self._remove(member, why, now):
            self._give_up({member: why})
        self._decide(now)

    def leave(self, member: int, word: Leave, now: float) -> None:
        """A member leaves by itself."""
        if member not in self.living:
            return
        steps, why = self.living[member].steps, word.why or "it left"
        self._finished |= word.finished
        if self._remove(member, why, now):
            if word.failed or self.phase is not RosterPhase.IN_USE:
                self._give_up({member: why})
            else:
                self._give_up_soon({member: why}, now)
        if word.failed:
            self._failures[steps] = self._failures.get(steps, 0) + 1
            if self._failures[steps] >= self.rules.failures:
                text = f"step {max(steps, 0) + 1} failed on {self._failures[steps]} members"
                self.end(f"{text}, last on member {member}: {why}")
        elif not self._stayers() and member in self.current.members:
            self.end("all of its members have left", well=True)
        self._decide(now)

    def dismiss(self, member: int, why: str, now: float) -> None:
        """Ask a member to leave after its step; one that only waits is gone at once."""
        self._tell(member, Changed(RosterChange("leave", roster=self.current.number, why=why)))
        if member in self._meeting and member not in self.current.members:
            self._tell(member, Refused(why))
            self._remove(member, why, now)

    def end(self, why: str, well: bool = False) -> None:
        """End the job for all."""
        if self.ended:
            return
        self.ended, self.ended_well = why, well
        for member in self._meeting:
            self._tell(member, Refused(why, True, well))
        for member in self.living:
            self._tell(member, self._end_change())
        self._meeting.clear()
        self._out.append((AGENTS, Over(why, not well)))

    # Rosters.

    def meet(self, member: int, word: Meet, now: float) -> None:
        """A member waits for the next roster."""
        if self.ended or member not in self.living:
            self._tell(member, self._no_roster(member))
            return
        if word.turn <= self.living[member].turn:
            self._decide_again(member, word.turn)
            return
        self.living[member].steps = word.how_far.steps
        self._meeting[member] = word
        self.living[member].lingers, self.living[member].gone_at = False, inf
        if member in self.current.members and word.within >= _SHORTEST:
            self._late_at = min(self._late_at, now + _LATE * word.within)
        if member not in self.current.members:
            self._announce_newcomers()
        elif word.how_far.why or self.phase is RosterPhase.OPENING:
            self._give_up({member: word.how_far.why or "it arrived again"})
        elif self.phase is RosterPhase.IN_USE:
            self._give_up_soon({member: "it waits for the next roster"}, now)
        self._decide(now)

    def _decide_again(self, member: int, turn: int) -> None:
        """Answer a question that was sent twice: the answer may be lost with a connection."""
        if member not in self.current.members or turn != self.living[member].turn:
            return
        self._tell(member, Decided(self.current, turn))
        if self.phase is RosterPhase.GIVEN_UP:
            change = RosterChange("lost", dict(self._reasons), self.current.number)
            self._tell(member, Changed(change))

    def withdraw(self, member: int, word: Withdraw, now: float) -> None:
        """A member waits no longer; it hears for whom it waited, or goes on without them."""
        if self._late_at <= now:
            self._end_lingerers(now)
        for late in [m for m in self._missing() if self.living[m].lingers]:
            self.lose(late, self.living[late].gone_why, now)
        if member in self._meeting and self._meeting[member].turn == word.turn:
            why = self.awaited()
            del self._meeting[member]
            self._tell(member, Refused(why, turn=word.turn))

    def ready(self, member: int, word: SaysReady, now: float) -> None:
        """A member can use the current roster, or cannot."""
        current = word.roster == self.current.number and member in self.current.members
        if not current or self.phase is RosterPhase.GIVEN_UP or member in self._meeting:
            why = _in_words(self._reasons) if current else "it is not the current one"
            self._tell(member, Opened(word.roster, False, why))
        elif self.phase is RosterPhase.IN_USE and not word.trouble:
            self._tell(member, Opened(word.roster, True))
        else:
            self._ready.add(member)
            blamed = word.culprit if word.culprit in self._stayers() else member
            self._open(now) if not word.trouble else self._in_vain(blamed, word.trouble, now)
        self._decide(now)

    def progress(self, member: int, word: HasCommitted) -> None:
        """A member has committed steps."""
        if member in self.living:
            self.living[member].steps = word.steps

    def time(self, now: float) -> None:
        """Do what is due by now."""
        for member, living in list(self.living.items()):
            if living.gone_at <= now:
                if member in self.current.members:  # nobody saw it end
                    self._unseen_until = now + self.rules.unseen
                self.lose(member, living.gone_why, now)
        if self._unseen_until <= now:
            self._unseen_until = -inf
        if self._give_up_at <= now:
            self._give_up(self._reasons)
        if self._late_at <= now:
            self._end_lingerers(now)
        if self._remember_until <= now:
            self._remember_until = inf
        self._decide(now)

    def next_time(self) -> float:
        """Say when :meth:`time` has to be called, if nothing else happens before; may be inf."""
        times = [self._give_up_at, self._held_until, self._remember_until, self._late_at]
        if self._unseen_until > -inf:
            times.append(self._unseen_until)
        return min(times + [living.gone_at for living in self.living.values()])

    def awaited(self) -> str:
        """Say in words what a meeting waits for."""
        missing = {m: str(self.living[m].process) for m in self._missing()}
        if missing:
            return f"members that are alive have not arrived yet: {_in_words(missing)}"
        return f"{len(self._meeting)} have come, and at least {self.rules.least} are needed"

    def given_up_because(self) -> str:
        """Say in words why the current roster is given up."""
        return f"roster {self.current.number} is given up: {_in_words(self._reasons)}"

    # How it is done.

    def _decide(self, now: float) -> None:
        """Make the next roster if everybody that it waits for has come."""
        stayers = self._stayers()
        if self._finished and not stayers:
            self.end("it is finished", well=True)
        if self.ended or not self._meeting or self._missing() or self._remembers_too_little(now):
            self._held_since = self._held_until = inf
            return
        chosen = stayers + self._newcomers(len(stayers))
        if not stayers and now < self._unseen_until:
            return  # the whole roster may train on, where nobody sees it
        if self._are_too_few(chosen, stayers, now):
            return
        self._held_since = self._held_until = inf
        self._make_roster(chosen, now)

    def _are_too_few(self, chosen: list[int], stayers: list[int], now: float) -> bool:
        """Whether others have to come first; ends the job if they were waited for too long."""
        least = 1 if self._finished else self.rules.least
        first = sum(self._wanted.values()) or min(self.rules.first, self.rules.most)
        begins = not stayers and len(chosen) < first and not self._nobody_comes()
        if not begins and len(chosen) >= least:
            return False
        self._held_since = min(self._held_since, now)
        limit = self.rules.too_few if len(chosen) < least else self.rules.gather
        self._held_until = self._held_since + limit
        if now < self._held_until and not self._nobody_comes():
            return True
        if len(chosen) >= least:
            return False
        text = f"{len(chosen)} members are left, at least {least} are needed"
        none = f"none came in {self.rules.too_few:g} s"
        none = "; ".join(self._no_more.values()) if self._nobody_comes() else none
        self.end(f"{text}, and {none}; gone: {_in_words(self._reasons)}")
        return True

    def _nobody_comes(self) -> bool:
        """Whether all agents said that they start no more, and all that live have come."""
        told = bool(self._wanted) and self._no_more.keys() >= self._wanted.keys()
        return told and self.living.keys() <= self._meeting.keys()

    def _make_roster(self, members: list[int], now: float) -> None:
        """Number it, and tell those who are in it."""
        words = [self._meeting.pop(member) for member in members]
        gone = {m: self.gone[m] for m in self.current.members if m in self.gone}
        self.last_roster += 1
        how_far = tuple(word.how_far for word in words)
        self.current = Roster(self.last_roster, tuple(members), how_far, gone)
        self.phase = RosterPhase.OPENING
        self._ready, self._reasons = set(), {}
        self._give_up_at, self._late_at = now + self.rules.opening, inf
        for member, word in zip(members, words, strict=True):
            self.living[member].turn = word.turn
            self._tell(member, Decided(self.current, word.turn))

    def _end_lingerers(self, now: float) -> None:
        """End members that live and have not come, before those that wait for them give up."""
        self._late_at = inf
        waited = min((word.within for word in self._meeting.values()), default=inf)
        for member in self._missing():
            self.living[member].lingers = True
            why = f"others waited {_LATE * waited:.0f} s for it to come to their meeting"
            self._out.append((AGENTS, Fence(member, why)))
            soon = min(self.rules.fence_within, (1 - _LATE) * waited / 2)
            self._overdue(member, now + soon, why)

    def _open(self, now: float) -> None:
        """Let all use the current roster once each of them said that it can."""
        if self.phase is not RosterPhase.OPENING or len(self._ready) < len(self.current.members):
            return
        self.phase, self._give_up_at, self._vain = RosterPhase.IN_USE, inf, 0
        self._troubles.clear()
        for member in self.current.members:
            self._tell(member, Opened(self.current.number, True))
        self._out.append((AGENTS, self._formed(now)))
        self._lost_at = inf
        self._announce_newcomers()

    def _formed(self, now: float) -> Formed:
        current = self.current
        waiting = [m for m, one in self.living.items() if one.heard and m not in current.members]
        seconds = 0.0 if self._lost_at == inf else now - self._lost_at
        steps = max(current.steps, 0)
        return Formed(current.number, current.members, tuple(waiting), current.gone, seconds, steps)

    def _in_vain(self, member: int, trouble: str, now: float) -> None:
        """Give up a roster that a member cannot use; after several, dismiss it or end the job."""
        self._give_up({member: trouble})
        self._vain += 1
        count = self._troubles[member] = self._troubles.get(member, 0) + 1
        if count >= self.rules.troubles and len(self._stayers()) > 1:
            self._vain = 0
            self._dismiss_now(member, f"it could not use {count} rosters: {trouble}", now)
        elif self._vain >= self.rules.vain:
            text = f"{self._vain} rosters in a row could not be used"
            self.end(f"{text}, the last one by member {member}: {trouble}")

    def _give_up(self, reasons: Mapping[int, str]) -> None:
        """Free those who still open or use the current roster."""
        if self.phase is RosterPhase.OPENING and not reasons:
            late = [m for m in self.current.members if m not in self._ready]
            reasons = dict.fromkeys(late, "it did not confirm the roster in time")
        was, self.phase = self.phase, RosterPhase.GIVEN_UP
        self._reasons = {**self._reasons, **reasons}
        self._give_up_at = inf
        number = self.current.number
        for member in self._missing():
            if was is RosterPhase.OPENING and member in self._ready:
                self._tell(member, Opened(number, False, _in_words(reasons)))
            self._tell(member, Changed(RosterChange("lost", dict(reasons), number)))

    def _give_up_soon(self, reasons: Mapping[int, str], now: float) -> None:
        """Let members finish their step and come to the meeting, for a limited time."""
        self._reasons = {**self._reasons, **reasons}
        self._give_up_at = min(self._give_up_at, now + self.rules.patience)

    def _remove(self, member: int, why: str, now: float) -> bool:
        """Forget a living member; True if the current roster had it."""
        if self.living.pop(member, None) is None:
            return False
        self.gone[member] = why
        self._meeting.pop(member, None)
        if member in self.current.members:
            self._lost_at = min(self._lost_at, now)
        return member in self.current.members

    def _remember(self, member: int, roster: Roster, in_use: bool, now: float) -> None:
        """Learn from a member which roster was the current one for the keeper before this."""
        if roster.number > self.current.number:
            self._adopt(roster, now)
        if roster.number == self.current.number and in_use:
            self._ready.add(member)
            if self.phase is RosterPhase.OPENING:  # so all had said that they can use it
                self.phase, self._give_up_at = RosterPhase.IN_USE, inf
                for asked in self._ready:  # before it was known; the answer was lost
                    self._tell(asked, Opened(roster.number, True))
        if member in self.current.members and self.phase is RosterPhase.GIVEN_UP:
            self._tell(member, Changed(RosterChange("lost", self._reasons, roster.number)))
        # One that never used its roster is a newcomer like any other.
        if roster.number < self.current.number and member not in self.current.members and in_use:
            self._expel(member, now)

    def _adopt(self, roster: Roster, now: float) -> None:
        """Go on with a roster of the keeper before this one, whose members are to come back."""
        before, self.current = self.current, roster
        self.last_roster = max(self.last_roster, roster.number)
        self.phase = RosterPhase.OPENING
        self._ready, self._reasons = set(), {}
        self._give_up_at = now + self.rules.opening
        for member in roster.members:
            self.next_member = max(self.next_member, member + 1)
            if member not in self.living and member not in self.gone:
                self.living[member] = Living(UNKNOWN)
            if member in self.living and not self.living[member].heard:
                why = "it did not reconnect to the new keeper"
                self._overdue(member, now + self.rules.return_within, why)
        lost = {m: self.gone[m] for m in roster.members if m in self.gone}
        if lost or any(member in self._meeting for member in roster.members):
            self._give_up(lost or {m: "it meets" for m in roster.members if m in self._meeting})
        for member in set(before.members) - set(roster.members):
            self._expel(member, now)

    def _expel(self, member: int, now: float) -> None:
        """Tell a member that a roster was decided without it."""
        if member in self.living:
            text = f"roster {self.current.number} was decided without it"
            self._dismiss_now(member, text, now)

    def _dismiss_now(self, member: int, why: str, now: float) -> None:
        self._tell(member, Refused(why))
        self.lose(member, why, now)

    def _remembers_too_little(self, now: float) -> bool:
        """Whether members of a roster that a keeper before this one decided may be out there."""
        return self.current.number == 0 and now < self._remember_until < inf

    def _stayers(self) -> list[int]:
        return [member for member in self.current.members if member in self.living]

    def _missing(self) -> list[int]:
        return [member for member in self._stayers() if member not in self._meeting]

    def _newcomers(self, size: int) -> list[int]:
        """Who is let in beside so many: those with the lowest numbers of all who wait."""
        if self._finished:
            return []
        most = sum(self._wanted.values()) or self.rules.most
        waiting = sorted(m for m in self._meeting if m not in self.current.members)
        return waiting[: max(0, most - size)]

    def _announce_newcomers(self) -> None:
        """Tell those who train that others wait for the end of their step."""
        newcomers = self._newcomers(len(self._stayers()))
        if self.phase is RosterPhase.IN_USE and newcomers:
            change = RosterChange("waiting", dict.fromkeys(newcomers, ""), self.current.number)
            for member in self._missing():
                self._tell(member, Changed(change))

    def _overdue(self, member: int, when: float, why: str) -> None:
        living = self.living[member]
        if when < living.gone_at:
            living.gone_at, living.gone_why = when, why

    def _no_roster(self, member: int) -> Refused:
        if self.ended:
            return Refused(self.ended, True, self.ended_well)
        return Refused(self.gone.get(member, "it is no member"))

    def _end_change(self) -> Changed:
        number, well = self.current.number, self.ended_well
        return Changed(RosterChange("end", roster=number, why=self.ended, well=well))

    def _tell(self, member: int, word: ToMember) -> None:
        self._out.append((member, word))


def _could_be(roster: Roster, member: int) -> bool:
    """Whether a roster that a member remembers is valid."""
    different = len(set(roster.members)) == len(roster.members)
    return member in roster.members and different and len(roster.how_far) == len(roster.members)


def _in_words(reasons: Mapping[int, str]) -> str:
    return ", ".join(f"member {m} ({why})" for m, why in sorted(reasons.items())) or "none"
