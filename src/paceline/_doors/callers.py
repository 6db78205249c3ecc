"""Connections that have not shown yet who they are, and how little they may cost.

Only one whose first byte can be the beginning of TLS is worth a handshake; until that byte has
come, a connection costs a descriptor and a timer. Who was hung up on for the crowd of others calls
again (``tls.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

PATIENCE = 5.0  # seconds until a connection has to have shown who it is
CALLERS = 64  # such connections at a time
_HANDSHAKE = b"\x16"  # the first byte of every TLS connection


@dataclass(eq=False)
class Unproven:
    """A connection until it has shown who it is."""

    address: str
    connection: socket.socket
    greet: Callable[[Unproven], None]  # begins the handshake
    late: asyncio.TimerHandle
    greeted: bool = False


class Callers:
    """Those who wait to be let in, the oldest first."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.refused: Counter[str] = Counter()  # by reason
        self._loop = loop
        self._waiting: dict[int, Unproven] = {}  # by descriptor

    def add(
        self, connection: socket.socket, address: str, greet: Callable[[Unproven], None]
    ) -> None:
        """Wait for the first word of a connection, and then ``greet`` it."""
        late = self._loop.call_later(PATIENCE, self._give_up, connection.fileno())
        caller = Unproven(address, connection, greet, late)
        if self._hear(caller):
            return
        if len(self._waiting) >= CALLERS:
            self._hang_up(self._one_too_many(), "too many")
        self._waiting[connection.fileno()] = caller
        if not caller.greeted:
            self._loop.add_reader(connection, self._hear, caller)

    def let_in(self, caller: Unproven) -> None:
        """Count it no longer: it has shown who it is, or is gone."""
        caller.late.cancel()
        number = caller.connection.fileno()
        if self._waiting.get(number) is caller:
            del self._waiting[number]
            if not caller.greeted:
                self._loop.remove_reader(number)

    def close(self) -> None:
        """Hang up on all."""
        for caller in list(self._waiting.values()):
            self._hang_up(caller, "closed")

    def _hear(self, caller: Unproven) -> bool:
        """Take in the first byte, if it has come; whether the connection is done with."""
        try:
            first = caller.connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            first = b""
        if first != _HANDSHAKE:
            self._hang_up(caller, "not TLS" if first else "said nothing")
            return True
        self._loop.remove_reader(caller.connection)
        caller.greeted = True
        caller.greet(caller)
        return False

    def _give_up(self, number: int) -> None:
        if number in self._waiting:
            self._hang_up(self._waiting[number], "too slow")

    def _one_too_many(self) -> Unproven:
        """The oldest of the address that has the most, rather one that has said nothing."""
        crowds = Counter(caller.address for caller in self._waiting.values())
        ((largest, _),) = crowds.most_common(1)
        crowd = [one for one in self._waiting.values() if one.address == largest]
        return next((one for one in crowd if not one.greeted), crowd[0])

    def _hang_up(self, caller: Unproven, reason: str) -> None:
        self.refused[reason] += 1
        self.let_in(caller)
        if not caller.greeted:
            caller.connection.close()
            return
        with contextlib.suppress(OSError):
            caller.connection.shutdown(socket.SHUT_RDWR)  # whoever shakes hands with it closes it
