"""Runs the members of one host: starts them, watches them, and tells the keeper what it sees.

One loop, which sleeps until a process has ended, a word has come or a tenth of a second is over.
A member that ends is told to the keeper before anything else happens, since others wait for it, and
one that is killed as soon as it cannot run any more. Those who are left meet first; only then is
another process started, which would take the cores from them. A member that is stopped, or that the
keeper has not heard of, is killed first and told then: whatever it would have written later reaches
nobody.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path

from ...._members import (
    AgentHello,
    Alive,
    Enlist,
    Enlisted,
    Fence,
    Formed,
    Gone,
    HostWaits,
    KeeperWord,
    NoMore,
    Over,
)
from ... import say
from ..screen import OutputReader
from ..signals import signals_noted
from ..verdict import FailureReport, RankEnding, describe, read_reports, runs, signal_name
from .keeper import Keeping
from .link import KeeperLink
from .places import Places
from .process import MemberProcess
from .starting import MemberStart
from .story import JobStory, tell_formed, tell_loss
from .strays import Strays

_TICK = 0.1  # seconds between two looks at what nobody reports
_GLANCE = 0.02  # …and at whether a member is being killed
_MEETING = 0.5  # seconds that those who are left have for meeting before others are started
_ASK = 1.0  # seconds between two questions whether the keeper is there
_REMEMBERED = 256  # ends of members that a new keeper is told of
_LINGER = 1.0  # seconds between two looks for members whose script has failed


class AgentPhase(Enum):
    """How far the end of a job has come, on this host."""

    RUNNING = auto()
    OVER = auto()  # the job has ended; members end by themselves
    LEAVING = auto()  # members were asked to finish their step and leave
    ENDING = auto()  # what is left was killed


@dataclass(frozen=True)
class AgentLimits:
    """How long this agent waits for what, in seconds."""

    grace: float = 30.0  # for members to end, once they are asked to
    patience: float = 2.0  # for members to end by themselves, once the job has failed
    stopped_after: float = 0.5
    keeper_within: float = 60.0  # for a keeper to answer


@dataclass
class ElasticAgent:
    """The members of this host, from the first start to the last end."""

    host: str
    places: Places
    start: MemberStart
    limits: AgentLimits
    keeper: Keeping
    link: KeeperLink
    reader: OutputReader
    notes: Path
    show: Sequence[int] = ()  # ranks whose output is shown; none: all
    story: JobStory = field(default_factory=JobStory)
    strays: Strays = field(default_factory=Strays)
    phase: AgentPhase = AgentPhase.RUNNING
    over: Over | None = None
    signals: Sequence[int] = ()  # that have come
    processes: dict[int, MemberProcess] = field(default_factory=dict)
    reports: dict[int, FailureReport] = field(default_factory=dict)
    _gone: dict[int, str] = field(default_factory=dict)  # how members ended, the latest
    _had_keeper: bool = False
    _has_heard: bool = False  # from the keeper that it is connected to
    _asked: int = 0  # numbers that were asked for and have not come
    _told_no_more: bool = False
    _ask_at: float | None = None
    _kill_at: float | None = None
    _failing_since: dict[int, float] = field(default_factory=dict)
    _lingerers_at: float = 0.0  # when it last looked for some
    _looked_at: float = field(default_factory=time.monotonic)  # the last look
    _heard_at: float = field(default_factory=time.monotonic)  # when the keeper last said something
    _asked_at: float = 0.0  # when it was last asked whether it is there
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def run(self) -> None:
        """Return when every member has ended and no other will be started."""
        with signals_noted() as self.signals:
            try:
                while not self.places.over or self._is_needed_elsewhere():
                    self._sleep()
                    self._look(time.monotonic())
            finally:
                self._end_all()

    # -- one look -----------------------------------------------------------------------------

    def _sleep(self) -> None:
        """Wait until something has happened that can be waited for, or a member is dying."""
        until = time.monotonic() + (_TICK if self.link.connected else self.keeper.pause)
        while (left := until - time.monotonic()) > 0:
            if self._note_dying() or self._selector.select(min(left, _GLANCE)):
                return

    def _look(self, now: float) -> None:
        self._note_pause(now)
        for process in list(self.processes.values()):
            if (ending := process.ending()) is not None:
                self._note_end(process, ending)
        self._keep_in_touch(now)
        if not self.link.connected or self._has_heard:  # else there may be another roster by now
            self._end_without_a_word()
        for process in self.processes.values():
            if process.stopped_for(now) >= self.limits.stopped_after:
                self._fence(process, f"it was stopped for {self.limits.stopped_after:g} s")
        self._end_lingerers(now)
        self._fill_places(now)
        self.strays.look()
        self._heed(now)

    def _note_pause(self, now: float) -> None:
        """While this process got no turn it did not ask: that nobody answered was no silence."""
        self._heard_at += max(0.0, now - self._looked_at - _ASK)
        self._looked_at = now

    def _keep_in_touch(self, now: float) -> None:
        """See that there is a keeper, and hear what it says."""
        if how := self.keeper.look(now):
            self._disconnect()
            self.story.keepers += self._had_keeper
            say.note(how)
        if self.link.connected:
            self._talk(now)
        elif self.link.connect(self._hello()):
            self._asked, self._told_no_more, self._asked_at = 0, False, 0.0
            self._had_keeper, self._has_heard = True, False
            self._selector.register(self.link, selectors.EVENT_READ)
        if self.keeper.over is not None:
            self._note_over(self.keeper.over, now)
        if now - self._heard_at > self.limits.keeper_within:
            raise self.keeper.unheard(self.limits.keeper_within)

    def _talk(self, now: float) -> None:
        """Hear what the keeper says, and ask it to say something now and then."""
        for word in self.link.heard():
            self._heard_at, self._has_heard = now, True
            self._hear(word, now)
        if now - self._asked_at > _ASK:
            self._asked_at = now
            self.link.say(Alive())
        self.link.flush()
        if not self.link.connected:
            self._disconnect()

    def _is_needed_elsewhere(self) -> bool:
        """Whether members of other hosts train on with the keeper of this one."""
        others = set(self.story.members) - self.places.endings.keys()
        waits = self.keeper.serves_others and self.over is None and len(self.signals) < 2
        return waits and bool(others)

    def _hello(self) -> AgentHello:
        members = {number: one.pid for number, one in self.processes.items() if not one.told}
        return AgentHello(self.host, self.places.size.ranks, members, dict(self._gone))

    def _disconnect(self) -> None:
        for key in list(self._selector.get_map().values()):
            if key.fileobj is self.link:
                self._selector.unregister(key.fd)
        self.link.close()

    def _hear(self, word: KeeperWord, now: float) -> None:
        if isinstance(word, Enlisted):
            self._asked = max(0, self._asked - 1)
            self._start(word.member, now)
        elif isinstance(word, Formed):
            self._note_roster(word)
        elif isinstance(word, Fence):
            if word.member in self.processes:
                self._fence(self.processes[word.member], word.why)
        elif isinstance(word, HostWaits):
            hosts = "one host is" if word.most == 1 else f"{word.most} hosts are"
            say.note(
                f"{hosts} in the job, MAX of --nnodes; this one waits to take a lost one's place"
            )
        elif isinstance(word, Over):
            self._note_over(word, now)

    # -- members ------------------------------------------------------------------------------

    def _fill_places(self, now: float) -> None:
        """Ask for numbers for those that are to be started; they are when the numbers come."""
        meets = self.story.meets(self.processes.keys(), now, _MEETING)
        due = 0 if meets else self.places.due(now)
        if self.link.connected and due > self._asked:
            for _ in range(self._startable(due, now) - self._asked):
                self._asked += 1
                self.link.say(Enlist())
        if (why := self.places.exhausted) and not self._told_no_more and self.link.connected:
            self._told_no_more = True
            say.note(f"lost members are no longer replaced: {why}")
            self.link.say(NoMore(why))

    def _startable(self, due: int, now: float) -> int:
        """How many of ``due`` processes can be started.

        The first ranks at once; spares and those in others' places when what they are forked from
        is there.
        """
        first = self.places.first_ranks
        if due <= first:
            return due
        self.strays.adopt()
        return due if self.start.prepare(now) else first

    def _start(self, number: int, now: float) -> None:
        if not self.places.due(now):  # the job has ended, or others were started meanwhile
            self.link.say(Gone(number, "it was not started", failed=False))
            return
        seat = self.places.start(number)
        try:
            process = self.start.start(number, seat)
        except OSError as error:
            how = f"it could not be started ({error.strerror})"
            self.places.end(number, RankEnding(1, now), failed=True)
            self.link.say(Gone(number, how))
            say.complain(f"member {number}: {how}")
            return
        self.processes[number] = process
        self._selector.register(process.ended, selectors.EVENT_READ)
        for which, pipe in process.pipes.items():
            self.reader.read(pipe, number, which)

    def _note_dying(self) -> bool:
        """Tell the keeper of members that were killed and have not ended yet; False if none was."""
        found = False
        for process in self.processes.values():
            if not process.told and (signal := process.dying_of()):
                found = True
                process.kill()  # what it has started
                self._tell_end(process, RankEnding(-signal, time.monotonic(), process.asked_to_end))
        return found

    def _note_end(self, process: MemberProcess, ending: RankEnding) -> None:
        """Tell the keeper, and give the place to another."""
        number = process.number
        if not process.told:
            self._tell_end(process, ending)
        del self.processes[number]
        self.places.end(number, ending, self._has_failed(number, ending))
        self._selector.unregister(process.ended)
        process.close()
        self.strays.left_by(process.pid)

    def _has_failed(self, number: int, ending: RankEnding) -> bool:
        return ending.code != 0 and not (ending.stopped and number not in self.reports)

    def _tell_end(self, process: MemberProcess, ending: RankEnding) -> None:
        number = process.number
        process.told = True
        self.reports.update(read_reports(self.notes))
        failed = self._has_failed(number, ending)
        how = process.fenced or describe(ending, self.reports.get(number))
        self.link.say(Gone(number, how, failed))
        self._gone[number] = how
        while len(self._gone) > _REMEMBERED:
            del self._gone[next(iter(self._gone))]
        if failed and self.phase is AgentPhase.RUNNING:
            self._tell_loss(number, how, ending.when)

    def _tell_loss(self, number: int, how: str, when: float) -> None:
        if number in self.places.seen:
            self.story.lose(number, how, when)
        instead = "" if self.places.exhausted_by_one_more else "; another is started"
        left = sum(not process.told for process in self.processes.values())
        say.complain(tell_loss(number, how, left, instead))

    def _fence(self, process: MemberProcess, why: str) -> None:
        """Kill a member that the job has given up, before it can write anything."""
        if process.fenced:
            return
        process.fenced = why
        say.complain(f"member {process.number} is ended: {why}")
        process.kill()

    def _end_lingerers(self, now: float) -> None:
        """End members whose script has failed and whose process goes on, such as in a lock."""
        if now - self._lingerers_at < _LINGER:
            return
        self._lingerers_at = now
        self.reports.update(read_reports(self.notes))
        for number in self.reports.keys() & self.processes.keys():
            if now - self._failing_since.setdefault(number, now) > self.limits.grace:
                self.processes[number].kill()

    # -- what the keeper says -----------------------------------------------------------------

    def _note_roster(self, word: Formed) -> None:
        newcomers = set(word.members) - set(self.story.members)
        self.places.took_part({*word.members, *word.waiting}, word.steps)
        seconds = self.story.form(word.members, time.monotonic())
        with suppress(OSError):
            (self.notes / "first").unlink(missing_ok=True)  # the next to fail prints its traceback
        if self.show:
            self.reader.show({word.members[r] for r in self.show if r < len(word.members)})
        say.note(tell_formed(word.number, word.members, newcomers, seconds or word.seconds))

    def _note_over(self, word: Over, now: float) -> None:
        """Let members end by themselves, and those that were never needed at once."""
        if self.over is not None:
            return
        self.over = word
        self.places.close()
        if self.phase is not AgentPhase.RUNNING:
            return
        self.phase = AgentPhase.OVER
        if word.failed:
            self._ask_at = now + self.limits.patience
            return
        for number, process in self.processes.items():
            if number not in self.story.members:
                process.ask_to_end()
        self._kill_at = now + self.limits.grace

    def _end_without_a_word(self) -> None:
        """Notice that all who trained have ended well, though the keeper could not say so."""
        members = set(self.story.members)
        ended = members & self.places.endings.keys()
        well = [n for n in ended if self.places.endings[n].code == 0]
        if self.over is None and members and ended == members and well:
            self._note_over(Over("it is finished", failed=False), time.monotonic())

    # -- the end ------------------------------------------------------------------------------

    def _heed(self, now: float) -> None:
        """Act on signals and on deadlines."""
        if len(self.signals) > 1 and self.phase is not AgentPhase.ENDING:
            say.note("ending all members at once")
            self._kill(self.processes)
        elif self.signals and self.phase in (AgentPhase.RUNNING, AgentPhase.OVER):
            self._ask_all(f"after {signal_name(self.signals[0])}, ", now)
        elif self._ask_at is not None and now >= self._ask_at:
            self._ask_at = None
            self._ask_all("", now)
        elif self._kill_at is not None and now >= self._kill_at:
            self._kill([n for n, process in self.processes.items() if process.asked_to_end])
        elif self.phase is AgentPhase.RUNNING and self.places.exhausted and not self.processes:
            self.places.close()

    def _ask_all(self, after: str, now: float) -> None:
        self.phase = AgentPhase.LEAVING
        self.places.close()
        if self.processes and after:
            say.note(
                f"{after}members finish their step and leave; they have {self.limits.grace:g} s, "
                "and a second signal ends them at once"
            )
        for process in self.processes.values():
            process.ask_to_end()
        self._kill_at = now + self.limits.grace

    def _kill(self, numbers: Mapping[int, MemberProcess] | Sequence[int]) -> None:
        if numbers:
            self.phase = AgentPhase.ENDING
        self.places.close()
        for number in numbers:
            self.processes[number].asked_to_end = True
            self.processes[number].kill()
        self._kill_at = None

    def _end_all(self) -> None:
        """Leave no process and no descriptor, however the job ended."""
        self.places.close()
        for process in self.processes.values():
            process.asked_to_end = True
            process.kill()
        while self.processes:
            for process in list(self.processes.values()):
                if (ending := process.wait()) is not None:
                    self._note_end(process, ending)
        self.start.end()
        self.strays.close()
        self._disconnect()
        self._selector.close()
        self.keeper.end()

    def verdict_numbers(self) -> set[int]:
        """Members whose end nobody has gone on from."""
        if self.over is not None and not self.over.failed:
            return set(self.story.members)
        return self.places.endings.keys() - (self.story.losses.keys() - self.story.unanswered)

    def who_was_left(self) -> str:
        """The members that trained last, in words."""
        return runs(sorted(self.story.members))
