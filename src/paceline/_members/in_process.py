"""A council that members in one process share: ranks as threads, for tests, without a socket."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from math import inf
from time import monotonic
from typing import TYPE_CHECKING

from ..errors import MembershipError
from .agents import Enlisted, Fence, Formed, Over
from .council import AGENTS, Council, Rules
from .membership import Membership
from .roster import RosterChange
from .words import (
    Enrol,
    FromMember,
    HasCommitted,
    Leave,
    Meet,
    ProcessId,
    SaysReady,
    ToMember,
    Withdraw,
)

if TYPE_CHECKING:
    from torch.distributed import HashStore, Store


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
            council.withdraw(member, word)
        case Enrol():
            raise TypeError("a member enrols once")


class SharedCouncil:
    """One council for members that are threads of this process.

    ::

        with SharedCouncil(Rules(first=2)) as council:
            one, other = council.join(), council.join()
            ...  # each on a thread of its own: meet, store, ready
            council.kill(other.me)  # the one hears that it is lost
    """

    def __init__(self, rules: Rules | None = None):
        self._council = Council(rules or Rules(), monotonic())
        self._lock = threading.Condition()
        self._members: dict[int, ThreadMember] = {}
        self._stores: dict[int, HashStore] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._open = True
        self._started = 0
        self.fenced: list[Fence] = []
        self.formed: list[Formed] = []
        self.over: Over | None = None
        self._thread = threading.Thread(target=self._run, name="paceline-council", daemon=True)
        self._thread.start()

    def join(self) -> ThreadMember:
        """Make one more member, as if a process had been started for it."""
        with self._lock:
            self._started += 1
            process = ProcessId("threads", self._started)
            member = ThreadMember(self, process)
            number = self._council.enrol(Enrol(process), monotonic())
            self._members[number] = member
            self._send()
        member.enrolled.wait()
        return member

    def kill(self, member: int, why: str = "killed by SIGKILL") -> None:
        """Let a member be gone: it is answered no more, and what it says reaches nobody."""
        with self._lock:
            dead = self._members.pop(member)
            self._council.lose(member, why, monotonic())
            self._send()
        dead.die(why)

    def dismiss(self, member: int, why: str = "SIGTERM") -> None:
        """Ask a member to leave after its step."""
        with self._lock:
            self._council.dismiss(member, why, monotonic())
            self._send()

    def end(self, why: str) -> None:
        """End the job for all members."""
        with self._lock:
            self._council.end(why)
            self._send()

    def hear(self, who: ThreadMember, word: FromMember) -> None:
        """Take what a member says; nobody hears one that is gone."""
        with self._lock:
            if self._members.get(who.me) is who:
                hear_member(self._council, who.me, word, monotonic())
                self._send()

    def store(self, number: int) -> HashStore:
        """Give the store of a roster; those of older ones are dropped."""
        from torch.distributed import HashStore

        with self._lock:
            for old in [n for n in self._stores if n < self._council.current.number]:
                del self._stores[old]
            return self._stores.setdefault(number, HashStore())

    def forget(self, who: ThreadMember) -> None:
        """A member closed its end without a word: it is gone, unless it has left before."""
        with self._lock:
            if self._members.get(who.me) is who:
                del self._members[who.me]
                self._council.lose(who.me, "it closed its connection", monotonic())
                self._send()

    def call_later(self, call: Callable[[], None]) -> None:
        """Call something on the thread that members hear on."""
        with self._lock:
            self._calls.append(call)
            self._lock.notify_all()

    def close(self) -> None:
        """End the thread."""
        with self._lock:
            self._open = False
            self._lock.notify_all()
        self._thread.join()

    def __enter__(self) -> SharedCouncil:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _send(self) -> None:
        for number, word in self._council.take():
            if isinstance(word, Fence):
                self.fenced.append(word)
            elif isinstance(word, Over):
                self.over = word
            elif isinstance(word, Formed):
                self.formed.append(word)
            elif number != AGENTS and number in self._members and not isinstance(word, Enlisted):
                self._calls.append(_telling(self._members[number], word))
        self._lock.notify_all()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._calls:
                    self._wait()
                if not self._open:
                    return
                call = self._calls.popleft() if self._calls else None
            if call is not None:
                call()

    def _wait(self) -> None:
        when = self._council.next_time()
        self._lock.wait(None if when == inf else max(0.0, when - monotonic()))
        self._council.time(monotonic())
        self._send()


def _telling(member: ThreadMember, word: ToMember) -> Callable[[], None]:
    return lambda: member.hear(word)


class ThreadMember(Membership):
    """A member that shares its process with the council and with the others."""

    def __init__(self, council: SharedCouncil, process: ProcessId):
        super().__init__(process)
        self._council = council
        self.enrolled = threading.Event()

    def store(self, number: int) -> Store:
        """Where the members of a roster find what others left for them, and nobody else's."""
        return self._council.store(number)

    def close(self) -> None:
        """Give back what it takes to be heard, without a word."""
        self._council.forget(self)

    def hear(self, word: ToMember) -> None:
        """Take a word of the council."""
        self._hear(word)
        self.enrolled.set()

    def die(self, why: str) -> None:
        """Answer whoever waits on this member's side that it is gone."""
        self._end(MembershipError(self.me, why))

    def _say(self, word: FromMember) -> None:
        self._council.hear(self, word)

    def _call_later(self, heard: Callable[[RosterChange], None], change: RosterChange) -> None:
        self._council.call_later(lambda: heard(change))
