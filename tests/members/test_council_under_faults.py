"""A council under random faults: what holds whatever happens, and in whatever order.

Words travel both ways in queues, so each may arrive late or, when the keeper is replaced, never.
"""

from collections import defaultdict, deque
from dataclasses import dataclass, field

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
)

from paceline._members import NOTHING, Council, HowFar, Roster, Rules
from paceline._members.agents import Fence, Formed, Over
from paceline._members.council import AGENTS
from paceline._members.service import hear_member
from paceline._members.words import (
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
)

RULES = Rules(least=1, most=4, first=2, gather=30, too_few=60, opening=20)


@dataclass
class Proc:
    """A process, with what its side of the connection remembers."""

    pid: int
    member: int | None = None
    roster: Roster | None = None
    in_use: bool = False
    steps: int = NOTHING
    turn: int = 0
    meeting: Meet | None = None
    asks_ready: SaysReady | None = None
    must_meet: bool = False
    over: str = ""
    dead: bool = False
    hung_up: bool = False
    up: deque = field(default_factory=deque)
    down: deque = field(default_factory=deque)

    @property
    def is_free(self) -> bool:
        """Whether its program runs, and waits for nobody."""
        waits = self.meeting is not None or self.asks_ready is not None
        return self.member is not None and not (self.dead or self.over or waits)

    def enrol(self) -> None:
        self.hung_up = False
        self.up.clear(), self.down.clear()
        self.up.append(Enrol(ProcessId("h", self.pid), self.member, self.roster, self.in_use))
        self.up.append(HasCommitted(self.steps))
        self.up.extend(word for word in (self.meeting, self.asks_ready) if word is not None)

    def meet(self, why: str) -> None:
        self.turn += 1
        self.must_meet = False
        self.meeting = Meet(HowFar(self.steps, why=why), self.turn)
        self.up.append(self.meeting)

    def hear(self, word: object) -> None:
        match word:
            case Enrolled():
                self.member = word.member
            case Decided() if self.meeting is not None and word.turn == self.meeting.turn:
                self.meeting, self.roster, self.in_use = None, word.roster, False
                self.must_meet = False
            case Opened() if self.asks_ready is not None and word.roster == self.asks_ready.roster:
                self.asks_ready, self.in_use = None, word.usable
                self.must_meet = not word.usable
                if word.usable:  # and the state of whoever is farthest
                    self.steps = max(self.roster.steps, 0)
            case Changed() if word.change.kind == "end":
                self.over = word.change.why
            case Changed():
                number = 0 if self.roster is None else self.roster.number
                waits = self.meeting is not None
                self.must_meet |= word.change.roster == number and not waits
            case Refused() if not word.turn:
                self.over = word.why


class CouncilUnderFaults(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.now = 0.0
        self.council = Council(RULES, self.now)
        self.procs: list[Proc] = []
        self.unreported: list[Proc] = []
        self.rosters: dict[int, Roster] = {}
        self.gave_up_on: set[int] = set()  # members that some council said are gone
        self.said_ready: dict[int, set[int]] = defaultdict(set)
        self.ended = False

    # Faults and other events.

    @precondition(lambda self: len(self.procs) < 12)
    @rule()
    def start(self) -> None:
        proc = Proc(len(self.procs))
        proc.enrol()
        self.procs.append(proc)

    def pick(self, number: int, wanted) -> Proc | None:
        found = [proc for proc in self.procs if wanted(proc)]
        return found[number % len(found)] if found else None

    @rule(number=st.integers(0, 99), why=st.sampled_from(["", "reset"]))
    def someone_meets(self, number: int, why: str) -> None:
        if proc := self.pick(number, lambda p: p.is_free and not p.asks_ready):
            proc.meet(why)

    @rule(number=st.integers(0, 99))
    def someone_follows_what_it_heard(self, number: int) -> None:
        if proc := self.pick(number, lambda p: p.is_free and p.must_meet):
            proc.meet("lost")

    @rule(number=st.integers(0, 99), trouble=st.sampled_from(["", "", "", "no memory"]))
    def someone_says_whether_it_can(self, number: int, trouble: str) -> None:
        def can_say(p: Proc) -> bool:
            return p.is_free and p.roster is not None and not p.in_use and not p.must_meet

        if proc := self.pick(number, can_say):
            proc.asks_ready = SaysReady(proc.roster.number, trouble)
            proc.up.append(proc.asks_ready)
            if not trouble:
                self.said_ready[proc.roster.number].add(proc.member)

    @rule(number=st.integers(0, 99))
    def someone_commits(self, number: int) -> None:
        if proc := self.pick(number, lambda p: p.is_free and p.in_use and not p.must_meet):
            others = [p.steps for p in self.procs if p.roster == proc.roster and not p.dead]
            if proc.steps <= min(others):  # ranks differ by one step at most
                proc.steps += 1
                proc.up.append(HasCommitted(proc.steps))

    @rule(number=st.integers(0, 99))
    def someone_dies(self, number: int) -> None:
        if proc := self.pick(number, lambda p: not p.dead):
            proc.dead = True
            proc.up.clear(), proc.down.clear()
            self.unreported.append(proc)

    @precondition(lambda self: self.unreported)
    @rule()
    def a_death_is_reported(self) -> None:
        proc = self.unreported.pop(0)
        members = [n for n, one in self.council.living.items() if one.process.pid == proc.pid]
        for member in members:
            self.council.lose(member, "killed", self.now)
        self.collect()

    @rule(number=st.integers(0, 99), failed=st.booleans())
    def someone_leaves(self, number: int, failed: bool) -> None:
        if proc := self.pick(number, lambda p: p.is_free):
            proc.up.append(Leave("left", failed))
            proc.over = "left"

    @rule(number=st.integers(0, 99))
    def someone_is_silent(self, number: int) -> None:
        if proc := self.pick(number, lambda p: p.member in self.council.living):
            self.council.silent(proc.member, "silent", self.now)
            self.collect()

    @rule(number=st.integers(0, 99))
    def a_connection_closes(self, number: int) -> None:
        if proc := self.pick(number, lambda p: p.is_free or p.meeting or p.asks_ready):
            if proc.dead or proc.over or proc.member is None:
                return
            self.council.disconnected(proc.member, self.now)
            proc.enrol()
            self.collect()

    @rule()
    def the_keeper_is_replaced(self) -> None:
        old = self.council
        self.council = Council(RULES, self.now, old.next_member, old.last_roster)
        for proc in self.procs:
            if not (proc.dead or proc.over):
                proc.enrol()
            else:
                proc.up.clear(), proc.down.clear()

    @rule(seconds=st.sampled_from([0.2, 1.0, 3.0, 12.0]))
    def time_passes(self, seconds: float) -> None:
        self.pass_time(seconds)

    @rule(number=st.integers(0, 99), words=st.integers(1, 4))
    def words_arrive_at_the_keeper(self, number: int, words: int) -> None:
        if proc := self.pick(number, lambda p: p.up):
            for _ in range(min(words, len(proc.up))):
                self.arrive(proc)

    @rule(number=st.integers(0, 99))
    def words_arrive_at_a_member(self, number: int) -> None:
        if proc := self.pick(number, lambda p: p.down):
            while proc.down:
                proc.hear(proc.down.popleft())

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.council.time(self.now)
        self.collect()
        assert self.council.ended or self.council.next_time() > self.now, "it would not sleep"

    # The wires.

    def arrive(self, proc: Proc) -> None:
        word = proc.up.popleft()
        if isinstance(word, Enrol):
            if refusal := self.council.refusal(word):
                proc.up.clear()
                proc.down.append(Refused(refusal))
                return
            member = self.council.enrol(word, self.now)
            assert word.member in (None, member)
            proc.member = member if proc.member is None else proc.member
        else:
            hear_member(self.council, proc.member, word, self.now)
        self.collect()

    def collect(self) -> None:
        """Take what the council says, and see that it may say that."""
        for whom, word in self.council.take():
            if whom == AGENTS:
                assert isinstance(word, Fence | Formed | Over)
                continue
            proc = next((p for p in self.procs if p.member == whom), None)
            if isinstance(word, Decided):
                self.check_roster(whom, word.roster)
            if isinstance(word, Opened) and word.usable:
                assert self.said_ready[word.roster] >= set(self.rosters[word.roster].members)
            if proc is not None and not proc.dead:
                proc.down.append(word)
        for proc in self.procs:  # as the service does with one that is gone
            if proc.member in self.council.gone and not proc.hung_up:
                proc.hung_up = True
                proc.up.clear()
                proc.down.append(Refused(self.council.gone[proc.member]))

    def check_roster(self, whom: int, roster: Roster) -> None:
        known = self.rosters.setdefault(roster.number, roster)
        assert known == roster, "two rosters have one number"
        assert whom in roster.members
        assert not set(roster.members) & self.council.gone.keys(), "one that is gone is in it"
        assert (
            RULES.least
            <= len(set(roster.members))
            == len(roster.members)
            <= max(RULES.most, len(self.before(roster)))
        )
        kept = [m for m in self.before(roster) if m in roster.members]
        assert list(roster.members[: len(kept)]) == kept, "ranks have not kept their order"
        newcomers = list(roster.members[len(kept) :])
        assert newcomers == sorted(newcomers)
        said = {p.member: p for p in self.procs}
        for member, how_far in zip(roster.members, roster.how_far, strict=True):
            assert how_far.steps == said[member].steps, "it has not said so"
        if roster.source is not None:
            assert said[roster.members[roster.source]].steps == roster.steps
        for member in self.before(roster):  # nobody goes on with the one before
            proc = said[member]
            left_behind = member in self.council.gone or proc.dead or proc.over
            assert left_behind or member in roster.members or proc.meeting is not None

    def before(self, roster: Roster) -> tuple[int, ...]:
        """The members of the roster before it that anybody was told of."""
        earlier = [n for n in self.rosters if n < roster.number]
        return self.rosters[max(earlier)].members if earlier else ()

    # What holds in the end.

    def teardown(self) -> None:
        """After all faults, everybody who lives trains, or was told why not."""
        if not hasattr(self, "council"):
            return
        for _ in range(200):
            moved = self.one_quiet_round()
            if not moved and self.is_settled():
                break
            self.pass_time(1.0)
        assert self.is_settled(), [p for p in self.procs if not p.dead and not p.over]

    def one_quiet_round(self) -> bool:
        moved = False
        while self.unreported:
            self.a_death_is_reported()
        for proc in self.procs:
            while proc.up and not proc.dead:
                self.arrive(proc)
                moved = True
        for proc in self.procs:
            while proc.down and not proc.dead:
                proc.hear(proc.down.popleft())
                moved = True
            if proc.is_free and (proc.roster is None or proc.must_meet):
                proc.meet("lost")
                moved = True
            elif proc.is_free and not proc.in_use:
                proc.asks_ready = SaysReady(proc.roster.number)
                proc.up.append(proc.asks_ready)
                self.said_ready[proc.roster.number].add(proc.member)
                moved = True
        return moved

    def is_settled(self) -> bool:
        living = [p for p in self.procs if not p.dead and not p.over and p.member is not None]
        if any(p.down or p.up for p in living):
            return False
        training = [p for p in living if p.in_use]
        waiting = [p for p in living if not p.in_use]
        if len({p.roster.number for p in training}) > 1:
            return False
        current = training[0].roster.members if training else ()
        if {p.member for p in training} != set(current):
            return False
        # Those who wait have no room.
        return not waiting or (all(p.meeting for p in waiting) and len(training) >= RULES.most)


TestCouncilUnderFaults = CouncilUnderFaults.TestCase
TestCouncilUnderFaults.settings = settings(
    max_examples=100,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking takes longer than reading
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
