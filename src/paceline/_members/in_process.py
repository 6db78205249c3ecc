"""A council that members in one process share: ranks as threads, for tests, without a socket."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from time import monotonic

from ..errors import MembershipError
from .agents import AgentHello, Dismiss, EndJob, Fence, Formed, Over
from .council import Rules
from .keys import AskKeys, CancelKeys, KeysAnswer
from .membership import Membership
from .service import HangUp, Incoming, Service
from .words import Alive, Enrol, FromMember, ProcessId, ToMember

AGENT = 0  # the line of whoever holds the council


class SharedCouncil:
    """One council for members that are threads of this process.

    ::

        with SharedCouncil(Rules(first=2)) as council:
            one, other = council.join(), council.join()
            ...  # each on a thread of its own: meet, store, ready
            council.kill(other.me)  # the one hears that it is lost
    """

    def __init__(self, rules: Rules | None = None):
        self._service = Service(rules or Rules(), monotonic())
        self._lock = threading.Condition()
        self._members: dict[int, ThreadMember] = {}  # by their lines
        self._calls: deque[Callable[[], None]] = deque()
        self._open = True
        self._lines = AGENT
        self.fenced: list[Fence] = []
        self.formed: list[Formed] = []
        self.over: Over | None = None
        self._service.open(AGENT)
        self._service.hear(AGENT, AgentHello("here", ranks=0), monotonic())
        self._thread = threading.Thread(target=self._run, name="paceline-council", daemon=True)
        self._thread.start()

    def join(self) -> ThreadMember:
        """Make one more member, as if a process had been started for it."""
        with self._lock:
            self._lines += 1
            process = ProcessId("here", self._lines)
            member = self._members[self._lines] = ThreadMember(self, self._lines, process)
            self._service.open(member.line)
            self._hear(member.line, Enrol(process))
        member.enrolled.wait()
        return member

    def kill(self, member: int, why: str = "killed by SIGKILL") -> None:
        """Let a member be gone: it is answered no more, and what it says reaches nobody."""
        with self._lock:
            dead = next(m for m in self._members.values() if m.me == member)
            del self._members[dead.line]
            self._service.lose(member, why, monotonic())
            self._send()
        dead.die(why)

    def dismiss(self, member: int, why: str = "SIGTERM") -> None:
        """Ask a member to leave after its step."""
        with self._lock:
            self._hear(AGENT, Dismiss(member, why))

    def end(self, why: str) -> None:
        """End the job for all members."""
        with self._lock:
            self._hear(AGENT, EndJob(why))

    def hear(self, who: ThreadMember, word: FromMember | AskKeys | CancelKeys) -> None:
        """Take what a member says; nobody hears one that is gone."""
        with self._lock:
            if who.line in self._members:
                self._hear(who.line, word)

    def forget(self, who: ThreadMember) -> None:
        """A member closed its end without a word: it is gone, unless it has left before."""
        with self._lock:
            if self._members.pop(who.line, None) is not None:
                self._service.lose(who.me, "it closed its connection", monotonic())
                self._send()

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

    def _hear(self, line: int, word: Incoming) -> None:
        self._service.hear(line, word, monotonic())
        self._send()

    def _send(self) -> None:
        for line, word in self._service.take():
            match word:
                case Fence():
                    self.fenced.append(word)
                case Formed():
                    self.formed.append(word)
                case Over():
                    self.over = word
                case HangUp():
                    self._members.pop(line, None)
                case _ if line in self._members:
                    self._calls.append(_telling(self._members[line], word))  # type: ignore[arg-type]
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
        self._lock.wait(max(0.0, self._service.next_time() - monotonic()))
        self._service.time(monotonic())
        self._send()


def _telling(member: ThreadMember, word: ToMember | Alive | KeysAnswer) -> Callable[[], None]:
    return lambda: member.hear(word)


class ThreadMember(Membership):
    """A member that shares its process with the council and with the others."""

    def __init__(self, council: SharedCouncil, line: int, process: ProcessId):
        super().__init__(process)
        self._council = council
        self.line = line
        self.enrolled = threading.Event()

    def close(self) -> None:
        """Leave without a message; the council then counts this member as gone."""
        self._council.forget(self)

    def hear(self, word: ToMember | Alive | KeysAnswer) -> None:
        """Take a word of the council."""
        self._hear(word)
        self.enrolled.set()

    def die(self, why: str) -> None:
        """Answer whoever waits on this member's side that it is gone."""
        self._end(MembershipError(self.me, why))

    def _say(self, word: FromMember | AskKeys | CancelKeys) -> None:
        self._council.hear(self, word)
