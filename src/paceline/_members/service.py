"""What a keeper does with words, whoever carries them: it has a council and the keys of a roster.

A *line* is a connection of a member or of an agent, known by a number. Words go in one by one with
:meth:`Service.hear`, and what is to be sent comes out of :meth:`Service.take`. By then everything
that must outlive this process is in the journal.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from math import inf

import msgspec

from ..errors import TermOverError
from .agents import (
    AgentHello,
    AgentWord,
    Dismiss,
    EndJob,
    Enlist,
    Enlisted,
    Gone,
    HostWaits,
    KeeperWord,
    NoMore,
)
from .council import AGENTS, Council, RosterPhase, Rules
from .journal import (
    COMPACT_AT,
    GivenNumbers,
    Journal,
    KeysBegin,
    KeysChanged,
    KeysRemembered,
    NoJournal,
)
from .keys import CHANGING, Answered, AskKeys, CancelKeys, Keys, KeysAnswer
from .roster import Roster
from .terms import TermRight
from .words import (
    Alive,
    Enrol,
    FromMember,
    HasCommitted,
    Leave,
    Meet,
    Refused,
    SaysReady,
    ToMember,
    Withdraw,
)

REMEMBERED = 256  # answers of each member, for questions that are asked again
WAITING = 1024  # questions of one member that may wait


class HangUp(msgspec.Struct, frozen=True, tag=True):
    """Not sent: close this line after what was said before."""

    why: str


Incoming = FromMember | Alive | AskKeys | CancelKeys | AgentWord
Outgoing = ToMember | Alive | KeysAnswer | KeeperWord | HangUp


@dataclass
class KeeperLine:
    """Who is at the other end."""

    pid: int = 0  # of the process that connected, which may only carry what another one says
    member: int | None = None
    is_own: bool = False  # the process that connected is the member's
    agent: str | None = None  # its host
    hello: AgentHello | None = None  # of an agent whose host waits until another is gone
    enlists: int = 0  # numbers that it has asked for since
    waiting: set[int] = field(default_factory=set)  # questions without an answer

    @property
    def is_known(self) -> bool:
        """Whether it has said who it is."""
        return self.member is not None or self.agent is not None


class Service:
    """A council and keys, and who hears of what."""

    def __init__(
        self,
        rules: Rules,
        now: float,
        journal: Journal | NoJournal | None = None,
        silent_after: float = inf,
        right: TermRight | None = None,
    ):
        self._journal = journal or NoJournal()
        self._right = right
        self._silent_after = silent_after
        self._answers: dict[int, OrderedDict[int, KeysAnswer]] = {}
        self._keys = Keys(0)
        self._numbers = GivenNumbers()
        self._replay()
        if right is not None:
            self._numbers = GivenNumbers(right.state.next_member, right.state.last_roster)
        self.council = Council(rules, now, self._numbers.next_member, self._numbers.last_roster)
        if right is not None and right.state.roster is not None:
            self._recall(right.state.roster, now)
        self.lines: dict[int, KeeperLine] = {}
        self._member_lines: dict[int, int] = {}
        self._heard_at: dict[int, float] = {}
        self._time = now
        self._out: list[tuple[int, Outgoing]] = []

    # Lines.

    def open(self, line: int, pid: int = 0) -> None:
        """Somebody has connected; ``pid`` is the process if the kernel says so."""
        self.lines[line] = KeeperLine(pid)

    def closed(self, line: int, now: float) -> None:
        """A connection has closed."""
        member = self.lines.pop(line).member
        if member is not None and self._member_lines.get(member) == line:
            del self._member_lines[member]
            self._heard_at.pop(member, None)
            self._keys.forget(member)
            self.council.disconnected(member, now)
            self._settle()

    def hear(self, line: int, word: Incoming, now: float) -> None:
        """Take a word. One that a line has no right to ends it."""
        who = self.lines[line]
        if isinstance(word, Enrol):
            self._enrol(line, word, now)
        elif isinstance(word, AgentWord):
            self._hear_agent(line, word, now)
        elif isinstance(word, Alive) and who.agent is not None:
            self._out.append((line, word))
        elif who.member is None:
            self._out.append((line, HangUp("its first word has to say who it is")))
        else:
            self._hear_member(line, who.member, word, now)
        self._settle()

    def lose(self, member: int, why: str, now: float) -> None:
        """A member's process has ended."""
        self.council.lose(member, why, now)
        self._settle()

    def time(self, now: float) -> None:
        """See who is silent, and what was to happen by now."""
        stopped = now - self._time  # by whoever stopped this process; members could not be heard
        if stopped > 5.0:
            self._heard_at = {m: at + stopped for m, at in self._heard_at.items()}
        self._time = now
        for member, at in list(self._heard_at.items()):
            if now - at >= self._silent_after:
                self.council.silent(member, f"nothing was heard from it for {now - at:.0f} s", now)
        self.council.time(now)
        self._admit_hosts(now)
        self._settle()

    def next_time(self) -> float:
        """Say when :meth:`time` is to be called, at the latest."""
        silent = min(self._heard_at.values(), default=inf) + self._silent_after
        return min(self.council.next_time(), max(silent, self._time + 0.5), self._time + 1.0)

    def take(self) -> list[tuple[int, Outgoing]]:
        """Give what is to be sent, and on which line."""
        out, self._out = self._out, []
        return out

    # Words of members.

    def _enrol(self, line: int, word: Enrol, now: float) -> None:
        is_own = self.lines[line].pid == word.process.pid
        why = self._refusal(line, word, is_own)
        if why:
            self._out += [(line, Refused(why)), (line, HangUp(why))]
            return
        member = self.council.enrol(word, now)
        before = self._member_lines.get(member)
        if before is not None:  # the same process, which has lost that connection
            self.lines[before] = KeeperLine()
            self._out.append((before, HangUp("it has connected again")))
            self._keys.forget(member)
        self.lines[line].member, self.lines[line].is_own = member, is_own
        self._member_lines[member] = line
        self._heard_at[member] = now

    def _refusal(self, line: int, word: Enrol, is_own: bool) -> str:
        if self.lines[line].is_known:
            return "it has said already who it is"
        before = None if word.member is None else self._member_lines.get(word.member)
        if before is not None and self.lines[before].is_own and not is_own:
            return f"member {word.member} is connected, from a process of its own"
        return self.council.refusal(word)

    def _hear_member(
        self,
        line: int,
        member: int,
        word: FromMember | Alive | AskKeys | CancelKeys,
        now: float,
    ) -> None:
        self._heard_at[member] = now
        match word:
            case AskKeys():
                self._ask(line, member, word)
            case CancelKeys():
                self._keys.cancel(member, word.id)
                self.lines[line].waiting.discard(word.id)
            case Alive():
                self.council.heard_again(member)
                self._out.append((line, word))
            case _:
                hear_member(self.council, member, word, now)

    def _ask(self, line: int, member: int, question: AskKeys) -> None:
        answers = self._answers.get(member)
        if answers is not None and question.id in answers:
            self._out.append((line, answers[question.id]))
            return
        waiting = self.lines[line].waiting
        if question.roster == self.council.current.number and not self._shares_keys(member):
            why = f"member {member} is not in roster {question.roster}"
            self._out.append((line, KeysAnswer(question.id, error="over", why=why)))
        elif len(waiting) >= WAITING:
            why = "too many questions wait"
            self._out.append((line, KeysAnswer(question.id, error="full", why=why)))
        else:
            waiting.add(question.id)
            self._answered(self._keys.ask(member, question))

    def _shares_keys(self, member: int) -> bool:
        return member in self.council.current.members

    def _answered(self, answers: list[Answered]) -> None:
        for who, question, answer in answers:
            if question.op in CHANGING and not answer.error:
                self._write(KeysChanged(who, question))
                self._remember(who, answer)
            line = self._member_lines.get(who)
            if line is not None:
                self.lines[line].waiting.discard(question.id)
                self._out.append((line, answer))

    # Words of agents.

    def _hear_agent(self, line: int, word: AgentWord, now: float) -> None:
        who = self.lines[line]
        if who.member is not None or (who.agent is None) != isinstance(word, AgentHello):
            self._out.append((line, HangUp("an agent says who it is, once, and first")))
            return
        match word:
            case AgentHello():
                who.agent = word.host
                self._greet(line, who, word, now)
            case Enlist() if who.hello is not None:
                who.enlists += 1
            case Enlist():
                self._out.append((line, Enlisted(self.council.enlist(who.agent or ""))))
            case Gone():
                self.council.lose(word.member, word.how, now)
            case NoMore():
                self.council.no_more(who.agent or "", word.why, now)
            case Dismiss():
                self.council.dismiss(word.member, word.why, now)
            case EndJob():
                self.council.end(word.why)

    def _greet(self, line: int, who: KeeperLine, hello: AgentHello, now: float) -> None:
        """Take an agent's host in, or have it wait if there are as many as there may be."""
        most = self.council.rules.hosts
        if not most or hello.members or self._has_room(hello.host, now):
            self.council.agent(hello, now)
            return
        who.hello = hello
        self._out.append((line, HostWaits(most)))

    def _hosts(self) -> set[str]:
        agents = {one.agent for one in self.lines.values() if one.agent and one.hello is None}
        return agents | self.council.hosts()

    def _has_room(self, host: str, now: float) -> bool:
        if host in self.council.hosts():
            return True
        others = self._hosts() - {host}
        return len(others) < self.council.rules.hosts and self.council.is_complete(now)

    def _admit_hosts(self, now: float) -> None:
        """Take in hosts that wait, while there is room, those that came first before others."""
        for line, who in list(self.lines.items()):
            if who.hello is None or not self._has_room(who.hello.host, now):
                continue
            hello, who.hello = who.hello, None
            self.council.forget_hosts(self._hosts())
            self.council.agent(hello, now)
            for _ in range(who.enlists):
                self._out.append((line, Enlisted(self.council.enlist(hello.host))))

    # What follows from it.

    def _settle(self) -> None:
        """Write what must outlive this process; then let words go out."""
        council = self.council
        numbers = GivenNumbers(council.next_member, council.last_roster)
        if self._right is not None:
            self._promise(self._right, numbers)
        if numbers != self._numbers:
            self._numbers = numbers
            self._journal.note(numbers)
        if council.current.number > self._keys.roster:
            self._answered(self._keys.close("another roster was decided"))
            self._begin_keys(council.current.number)
        given_up = council.phase is RosterPhase.GIVEN_UP and not self._keys.over
        if given_up and 0 < council.current.number == self._keys.roster:
            self._answered(self._keys.close(council.given_up_because()))
        for whom, word in council.take():
            if whom == AGENTS:
                self._out += [(n, word) for n, line in self.lines.items() if line.agent is not None]
            elif whom in self._member_lines:
                self._out.append((self._member_lines[whom], word))
        self._hang_up_on_the_gone()

    def _promise(self, right: TermRight, numbers: GivenNumbers) -> None:
        """Write what must outlive this host; what nobody may hear of any more is not said."""
        council = self.council
        try:
            if numbers != self._numbers:
                right.write(numbers.next_member, numbers.last_roster, council.current)
            if council.ended and not right.state.ended:
                right.end(council.ended, council.ended_well)
        except TermOverError:
            self._out.clear()
            council.take()
            raise

    def _hang_up_on_the_gone(self) -> None:
        for member in [m for m in self._member_lines if m in self.council.gone]:
            line = self._member_lines.pop(member)
            self._heard_at.pop(member, None)
            self._answers.pop(member, None)
            self._keys.forget(member)
            gone = Refused(self.council.gone[member])
            self._out += [(line, gone), (line, HangUp("it is no longer a member"))]

    def _begin_keys(self, roster: int) -> None:
        self._keys = Keys(roster)
        self._answers.clear()
        self._journal.rewrite([self._numbers, KeysBegin(roster)])

    def _write(self, record: KeysChanged) -> None:
        self._journal.note(record)
        if self._journal.size > COMPACT_AT:
            keys = [KeysChanged(AGENTS, q) for q in self._keys.as_questions()]
            given = [KeysRemembered(m, a) for m, all in self._answers.items() for a in all.values()]
            self._journal.rewrite([self._numbers, KeysBegin(self._keys.roster), *keys, *given])

    def _remember(self, member: int, answer: KeysAnswer) -> None:
        answers = self._answers.setdefault(member, OrderedDict())
        answers[answer.id] = answer
        if len(answers) > REMEMBERED:
            answers.popitem(last=False)

    def _recall(self, roster: Roster, now: float) -> None:
        """Go on with the roster of a keeper that may have been on another host."""
        lost = "" if self._keys.roster == roster.number else "its keys were lost with the keeper"
        if lost:
            self._keys = Keys(roster.number)
            self._keys.close(lost)
            self._answers.clear()
        self.council.recall(roster, now, lost)

    def _replay(self) -> None:
        """Restore the state of the previous keeper from its journal."""
        for record in self._journal.records:
            match record:
                case GivenNumbers():
                    self._numbers = record
                case KeysBegin():
                    self._keys = Keys(record.roster)
                    self._answers.clear()
                case KeysChanged():
                    for who, _, answer in self._keys.ask(record.member, record.question):
                        self._remember(who, answer)
                case KeysRemembered():
                    self._remember(record.member, record.answer)


def hear_member(council: Council, member: int, word: FromMember, now: float) -> None:
    """Tell a council what a member said that is enrolled."""
    match word:
        case Meet():
            council.meet(member, word, now)
        case SaysReady():
            council.ready(member, word, now)
        case HasCommitted():
            council.progress(member, word)
        case Leave():
            council.leave(member, word, now)
        case Withdraw():
            council.withdraw(member, word, now)
        case Enrol():
            raise TypeError("a member enrols once")
