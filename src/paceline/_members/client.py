"""A member's connection to the keeper of its job; if the keeper dies, to the next one.

One thread does all reading and writing. Whatever was asked and not answered when a keeper died is
asked again of the next one, which knows what its predecessor had answered already.
"""

from __future__ import annotations

import os
import socket
import threading
import weakref
from collections import deque
from contextlib import suppress
from functools import cache
from selectors import EVENT_READ, EVENT_WRITE, DefaultSelector
from time import monotonic

from .._doors import connect_private
from ..errors import KeeperLostError, MembershipError, StrangerError
from .frames import FrameError, Unpacker, pack
from .keys import AskKeys, CancelKeys, KeysAnswer
from .membership import Membership
from .roster import Members
from .words import Alive, FromMember, ProcessId, ToMember

PATH_VARIABLE = "PACELINE_MEMBERS"
NUMBER_VARIABLE = "PACELINE_MEMBER"
HEARTBEAT = 0.5  # seconds between two
KEEPER_SILENT = 10.0  # seconds until a keeper that says nothing is left for another
KEEPER_WITHIN = 60.0  # seconds in which a keeper must be reached
RETRY = 0.01  # seconds between two attempts
CHUNK = 1 << 16


def connect(path: str = "", keeper_within: float = KEEPER_WITHIN) -> Members | None:
    """Be a member of the job whose keeper listens at ``path``.

    By default the path is the one that the launcher has put into the environment; None if there is
    none. Raises KeeperLostError if no keeper is reached in ``keeper_within`` seconds.
    """
    where = path or os.environ.get(PATH_VARIABLE, "")
    if not where:
        return None
    number = "" if path else os.environ.get(NUMBER_VARIABLE, "")
    return SocketMember(where, int(number) if number else None, keeper_within)


class SocketMember(Membership):
    """A member that reaches the keeper through a Unix socket."""

    def __init__(self, path: str, member: int | None = None, keeper_within: float = KEEPER_WITHIN):
        super().__init__(ProcessId(os.uname().nodename, os.getpid()), member)
        self._path = path
        self._keeper_within = keeper_within
        self._enrolled = threading.Event()
        self._heard_at = monotonic()
        self._words: deque[FromMember | AskKeys | CancelKeys] = deque()
        self._closing = False
        self._wakes, self._wake_end = socket.socketpair()
        self._wakes.setblocking(False)
        self._wake_end.setblocking(False)
        self._link: _Link | None = None
        _watch_forks()
        _members.add(self)
        self._thread = threading.Thread(target=self._run, name="paceline-members", daemon=True)
        self._thread.start()
        self._enrolled.wait()
        if not getattr(self._over, "well", False):  # else it is late, and not needed
            self._raise_if_over()

    def close(self) -> None:
        """Close the connection without telling the keeper."""
        if self._is_elsewhere():
            return
        self._closing = True
        self._wake_thread()
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)
        self._end(MembershipError(self.me, "its connection was closed"))

    def _is_elsewhere(self) -> bool:
        """Whether this is a forked child, which is not a member and owns no connection."""
        return os.getpid() != self._process.pid

    def _say(self, word: FromMember | AskKeys | CancelKeys) -> None:
        self._words.append(word)
        self._wake_thread()

    def _wake_thread(self) -> None:
        with suppress(OSError):  # full: it is awake; closed: nobody is there any more
            self._wake_end.send(b"\0")

    # On the thread.

    def _run(self) -> None:
        try:
            while self._reach_keeper():
                self._talk()
        except Exception as error:
            self._end(KeeperLostError(self.me, f"{type(error).__name__}: {error}"))
        finally:
            self._hang_up()
            self._enrolled.set()
            self._wakes.close()
            self._wake_end.close()

    def _reach_keeper(self) -> bool:
        """Connect and say who this is; False if this member is no more."""
        while self._over is None and not self._closing:
            self._words.clear()  # the enrolment has what matters of them
            try:
                self._link = _Link(connect_private(self._path, 1.0), self._wakes)
                self._link.say(*self._enrolment())
                return True
            except (OSError, StrangerError) as error:
                self._hang_up()  # the keeper may have been killed after it was reached
                _sleep(self._wakes, RETRY)
                self._give_up_after(error)
        return False

    def _give_up_after(self, error: Exception) -> None:
        """End this member if no keeper has been heard for too long."""
        if monotonic() - self._heard_at > self._keeper_within:
            text = f"nobody has answered at {self._path} for {self._keeper_within:g} s"
            self._end(KeeperLostError(self.me, f"{text} ({type(error).__name__}: {error})"))

    def _talk(self) -> None:
        """Carry words until the connection ends, or this member does."""
        assert self._link is not None
        try:
            while self._over is None:
                self._link.pass_on(self._words)
                if self._closing and not self._link.out:
                    return
                words = self._link.wait(HEARTBEAT)
                self._forgive(self._link.paused)
                for word in words:
                    self._hear(word)
                self._say_steps()
        except (OSError, FrameError) as error:
            self._forgive(self._link.pause(HEARTBEAT))
            self._give_up_after(error)
        self._link.finish(self._words)
        self._hang_up()

    def _hear(self, word: ToMember | Alive | KeysAnswer) -> None:
        super()._hear(word)
        self._heard_at = monotonic()
        if self._me is not None or self._over is not None:
            self._enrolled.set()

    def _forgive(self, seconds: float) -> None:
        """In so long nothing was asked, so nobody has been silent."""
        self._heard_at = min(monotonic(), self._heard_at + seconds)

    def _hang_up(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def drop_in_child(self) -> None:
        """Close a forked child's copies, so that they keep no connection of the parent open."""
        for end in (self._wakes, self._wake_end):
            end.close()
        if self._link is not None:
            self._link.close()
        why = f"this is a fork of process {self._process.pid}, which alone is the member"
        self._become_nobody(MembershipError(self.me, why))


class _Link:
    """One connection to one keeper."""

    def __init__(self, connection: socket.socket, wakes: socket.socket):
        self._socket = connection
        self._socket.setblocking(False)
        self._wakes = wakes
        self._words: Unpacker[ToMember | Alive | KeysAnswer] = Unpacker(
            ToMember | Alive | KeysAnswer
        )
        self.out = bytearray()
        try:
            self._selector = DefaultSelector()
        except OSError:  # there are no descriptors left
            connection.close()
            raise
        self._selector.register(connection, EVENT_READ)
        self._selector.register(wakes, EVENT_READ)
        self._heard_at = self._said_at = self._waited_at = monotonic()
        self.paused = 0.0  # seconds before the last wait had ended in which this got no turn

    def say(self, *words: FromMember | Alive | AskKeys | CancelKeys) -> None:
        """Put words on their way."""
        for word in words:
            self.out += pack(word)
        self._send()

    def pass_on(self, words: deque[FromMember | AskKeys | CancelKeys]) -> None:
        """Say what other threads want to be said, and that this member lives."""
        while words:
            self.out += pack(words.popleft())
        now = monotonic()
        if now - self._said_at >= HEARTBEAT:
            self._said_at = now
            self.out += pack(Alive())
        self._send()

    def wait(self, seconds: float) -> list[ToMember | Alive | KeysAnswer]:
        """Wait for words, or for something to say; raises OSError when the keeper is gone."""
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._wakes:
                with suppress(BlockingIOError):
                    self._wakes.recv(CHUNK)
            else:
                self._receive()
        now = monotonic()
        self.paused = self.pause(max(seconds, HEARTBEAT))
        self._waited_at = now
        self._heard_at = min(now, self._heard_at + self.paused)
        if now - self._heard_at > KEEPER_SILENT:
            raise ConnectionError("the keeper says nothing")
        found = []
        while (word := self._words.next()) is not None:
            found.append(word)
        return found

    def pause(self, usual: float) -> float:
        """Seconds since the last wait in which this got no turn, as if a thread kept the GIL."""
        return max(0.0, monotonic() - self._waited_at - usual)

    def finish(self, words: deque[FromMember | AskKeys | CancelKeys]) -> None:
        """Say what is left if the keeper can still hear it."""
        with suppress(OSError):
            self._socket.settimeout(1.0)
            while words:
                self.out += pack(words.popleft())
            self._socket.sendall(self.out)

    def close(self) -> None:
        """End the connection."""
        self._selector.close()
        self._socket.close()

    def _receive(self) -> None:
        with suppress(BlockingIOError):
            data = self._socket.recv(CHUNK)
            if not data:
                raise ConnectionError("the keeper is gone")
            self._words.feed(data)
            self._heard_at = monotonic()

    def _send(self) -> None:
        with suppress(BlockingIOError):
            while self.out:
                del self.out[: self._socket.send(self.out)]
        wanted = EVENT_READ | (EVENT_WRITE if self.out else 0)
        if self._selector.get_key(self._socket).events != wanted:
            self._selector.modify(self._socket, wanted)


def _sleep(wakes: socket.socket, seconds: float) -> None:
    """Sleep until woken."""
    with DefaultSelector() as selector:
        selector.register(wakes, EVENT_READ)
        if selector.select(seconds):
            with suppress(BlockingIOError):
                wakes.recv(CHUNK)


_members: weakref.WeakSet[SocketMember] = weakref.WeakSet()


@cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    for member in list(_members):
        member.drop_in_child()
    _members.clear()
