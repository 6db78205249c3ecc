"""The keeper: a process that listens on a Unix socket and holds a service.

One thread with a selector. Nobody can make it wait: reads and writes never block, who does not say
at once who it is is hung up on, a word has to be whole within seconds, everybody gets the same
number of words per turn, and what is held for one connection is limited. So idle sockets, garbage
and floods cost the others no more than the time that it takes to turn them away.
"""

from __future__ import annotations

import fcntl
import os
import selectors
import socket
import traceback
from contextlib import suppress
from math import inf
from pathlib import Path
from time import monotonic, sleep

from .._doors import bind_private, check_user
from ..errors import KeeperTakenError, StrangerError, TermOverError
from .council import Rules
from .frames import LIMIT, FrameError, Unpacker, pack
from .journal import Journal
from .service import HangUp, Incoming, Service
from .terms import TermRight

FIRST_LIMIT = 1 << 20  # bytes of a first word
FIRST_WITHIN = 2.0  # seconds until it is whole
WHOLE_WITHIN = 30.0  # …and any other
UNKNOWN = 64  # connections that have not said yet who they are; the oldest makes room
CALLERS = 4096  # connections of any kind
WORDS = 32  # of one connection per turn
ACCEPTS = 32  # connections per turn
CHUNK = 1 << 16
UNREAD = 1 << 26  # bytes that somebody may leave unread
ALONE = 30.0  # seconds without a member and an agent, after which it ends
AGENT_KNOWS = 0.1  # seconds in which an agent says how a process ended


class KeeperCaller:
    """One connection, and the bytes that are on the way."""

    def __init__(self, number: int, connection: socket.socket, now: float):
        self.number = number
        self.socket = connection
        self.words: Unpacker[Incoming] = Unpacker(Incoming, FIRST_LIMIT)
        self.out = bytearray()
        self.known = False
        self.deadline = now + FIRST_WITHIN
        self.backlog = False  # words are left from the last turn

    def read(self) -> bool:
        """Take what has come; False if the connection has ended."""
        try:
            data = self.socket.recv(CHUNK)
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            return False
        self.words.feed(data)
        return bool(data)

    def write(self) -> bool:
        """Send what can be sent; False if the connection has ended, or nobody reads it."""
        try:
            while self.out:
                del self.out[: self.socket.send(self.out)]
        except (BlockingIOError, InterruptedError):
            return len(self.out) <= UNREAD
        except OSError:
            return False
        return True

    def heard(self, now: float) -> None:
        """Note that a word was whole; the next one has its time from here on."""
        self.known, self.words.limit = True, LIMIT
        self.deadline = inf

    def check_time(self, now: float) -> bool:
        """Whether it may go on with the word that it has begun."""
        if self.known:
            is_inside = self.words.is_inside
            self.deadline = min(self.deadline, now + WHOLE_WITHIN) if is_inside else inf
        return now < self.deadline


class Keeper:
    """Serves members and agents at a path until the job is over and everybody has gone."""

    def __init__(
        self,
        path: str | Path,
        rules: Rules,
        silent_after: float = 60.0,
        right: TermRight | None = None,
    ):
        self._right = right
        self._path = Path(path)
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = _take_place(self._path.with_suffix(".lock"))
        journal = Journal(self._path.with_suffix(".journal"))
        self._service = Service(rules, monotonic(), journal, silent_after, right)
        self._selector = selectors.DefaultSelector()
        self._callers: dict[int, KeeperCaller] = {}
        self._unknown: dict[int, KeeperCaller] = {}  # the oldest first
        self._next_line = 1
        self._pidfds: dict[int, int] = {}  # of members' processes: which member
        self._ending: dict[int, float] = {}  # members whose process has ended: until when an agent
        self._alone_since = monotonic()
        self._listener = self._listen()

    def _listen(self) -> socket.socket:
        """Take the place of a keeper that was killed, without a moment in which nobody listens."""
        fresh = self._path.with_suffix(".new")
        with suppress(FileNotFoundError):
            fresh.unlink()
        listener = bind_private(fresh)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        os.replace(fresh, self._path)
        return listener

    def run(self) -> None:
        """Serve until there is nobody left to serve; raises TermOverError if it may not."""
        while not self._is_over(monotonic()):
            self.turn()

    def turn(self, longest: float = 1.0) -> None:
        """Wait for something to happen, at most so many seconds, and see to it."""
        self._selector.select(self._wait(longest))
        if self._right is not None:
            self._right.check()
        now = monotonic()  # what has come by now is heard before anybody is found to be late by now
        for key, ready in self._selector.select(0):
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.data, KeeperCaller):
                self._serve(key.data, ready)
            else:
                self._ended(key.fd)
        for caller in [c for c in self._callers.values() if c.backlog]:
            self._hear(caller, now)
        self._keep_time(now)
        self._send()

    def close(self) -> None:
        """Hang up on everybody."""
        for caller in list(self._callers.values()):
            self._drop(caller)
        for pidfd in list(self._pidfds):
            self._forget_process(pidfd)
        self._listener.close()
        self._selector.close()
        if self._service.council.ended:
            for suffix in (self._path.suffix, ".journal", ".lock"):
                self._path.with_suffix(suffix).unlink(missing_ok=True)
        os.close(self._lock)

    def _wait(self, longest: float) -> float:
        if any(caller.backlog for caller in self._callers.values()):
            return 0.0
        now = monotonic()
        until = min([self._service.next_time(), now + longest, *self._ending.values()])
        if self._right is not None:
            until = min(until, self._right.until)
        if self._unknown:
            until = min(until, next(iter(self._unknown.values())).deadline)
        return max(0.0, until - now)

    # Connections.

    def _accept(self) -> None:
        for _ in range(ACCEPTS):
            try:
                connection, _ = self._listener.accept()
            except OSError:  # nobody is left, or there are no descriptors: those who wait, wait
                return
            try:
                self._welcome(connection, check_user(connection))
            except (OSError, StrangerError):
                connection.close()

    def _welcome(self, connection: socket.socket, pid: int) -> None:
        connection.setblocking(False)
        caller = KeeperCaller(self._next_line, connection, monotonic())
        self._next_line += 1
        self._callers[caller.number] = self._unknown[caller.number] = caller
        self._service.open(caller.number, pid)
        self._selector.register(connection, selectors.EVENT_READ, caller)
        self._serve(caller, selectors.EVENT_READ)  # most have said who they are already
        if len(self._unknown) > UNKNOWN or len(self._callers) > CALLERS:
            self._drop(next(iter((self._unknown or self._callers).values())))

    def _serve(self, caller: KeeperCaller, ready: int) -> None:
        if caller.number not in self._callers:
            return
        if ready & selectors.EVENT_WRITE and not self._flush(caller):
            return
        if ready & selectors.EVENT_READ and not caller.backlog:
            alive = caller.read()
            self._hear(caller, monotonic())
            if not alive:
                self._drop(caller)

    def _hear(self, caller: KeeperCaller, now: float) -> None:
        """Take as many words of one connection as it is due in one turn."""
        caller.backlog = False
        try:
            for _ in range(WORDS):
                word = caller.words.next()
                if word is None or caller.number not in self._callers:
                    return
                self._take(caller, word, now)
        except FrameError:
            self._drop(caller)
            return
        except TermOverError:
            raise
        except Exception:  # a bug of ours: it must not be in anybody's power to end the keeper
            traceback.print_exc()
            self._drop(caller)
            return
        caller.backlog = caller.number in self._callers

    def _take(self, caller: KeeperCaller, word: Incoming, now: float) -> None:
        self._service.hear(caller.number, word, now)
        line = self._service.lines[caller.number]
        if line.is_known and caller.number in self._unknown:
            del self._unknown[caller.number]
            if line.member is not None and line.is_own:
                self._watch_process(line.member, line.pid, now)
        caller.heard(now)
        self._send()

    def _send(self) -> None:
        """Put words on their way; a line that is to be closed is, once they are."""
        touched: dict[int, KeeperCaller] = {}
        for number, word in self._service.take():
            caller = self._callers.get(number)
            if caller is None:
                continue
            if isinstance(word, HangUp):
                caller.write()
                self._drop(caller)
            else:
                caller.out += pack(word)
                touched[number] = caller
        for number, caller in touched.items():
            if number in self._callers:
                self._flush(caller)

    def _flush(self, caller: KeeperCaller) -> bool:
        if not caller.write():
            self._drop(caller)
            return False
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if caller.out else 0)
        if self._selector.get_key(caller.socket).events != wanted:
            self._selector.modify(caller.socket, wanted, caller)
        return True

    def _drop(self, caller: KeeperCaller) -> None:
        if self._callers.pop(caller.number, None) is None:
            return
        self._unknown.pop(caller.number, None)
        self._selector.unregister(caller.socket)
        caller.socket.close()
        self._service.closed(caller.number, monotonic())

    # Time, and processes.

    def _keep_time(self, now: float) -> None:
        for caller in list(self._callers.values()):
            if not caller.check_time(now):
                self._drop(caller)
        for member in [m for m, when in self._ending.items() if when <= now]:
            del self._ending[member]
            self._service.lose(member, "its process has ended", now)
        self._service.time(now)
        if len(self._callers) > len(self._unknown):
            self._alone_since = now

    def _watch_process(self, member: int, pid: int, now: float) -> None:
        """See a member's process end even if no agent does."""
        try:
            pidfd = os.pidfd_open(pid)
        except (OSError, AttributeError):  # an old kernel: its connection closes too
            return
        self._pidfds[pidfd] = member
        self._selector.register(pidfd, selectors.EVENT_READ)

    def _ended(self, pidfd: int) -> None:
        member = self._pidfds[pidfd]
        self._forget_process(pidfd)
        has_agent = any(line.agent is not None for line in self._service.lines.values())
        self._ending[member] = monotonic() + (AGENT_KNOWS if has_agent else 0.0)

    def _forget_process(self, pidfd: int) -> None:
        del self._pidfds[pidfd]
        self._selector.unregister(pidfd)
        os.close(pidfd)

    def _is_over(self, now: float) -> bool:
        nobody = len(self._callers) == len(self._unknown)
        return nobody and now - self._alone_since > (1.0 if self._service.council.ended else ALONE)


def _take_place(path: Path, within: float = 10.0) -> int:
    """Hold the lock that a keeper at this path has while it lives; two would decide twice."""
    lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    until = monotonic() + within
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if monotonic() > until:
                os.close(lock)
                raise KeeperTakenError(str(path), within) from None
            sleep(0.005)
