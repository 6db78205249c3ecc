"""Answers the ranks of a run on one machine: their store, behind a Unix socket of their user.

The launcher has it in a thread. Ranks ask through ``_paceline_store.py``. Every start of the ranks
has keys of its own.
"""

from __future__ import annotations

import asyncio
import threading
from itertools import count
from pathlib import Path
from typing import Any

from .._doors import bind_private, check_user, settle
from ..errors import StrangerError
from .frames import FrameError, Unpacker, pack
from .keys import Answered, AskKeys, Keys

_GOODBYE = 5.0  # seconds for the thread to end


class StoreHost:
    """A thread that answers at ``path``, until it is closed."""

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        self._listener = bind_private(path)
        self._listener.setblocking(False)
        self._keys = Keys(0)
        self._lines: dict[int, _RankLine] = {}
        self._numbers = count(1)
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="paceline-store", daemon=True)
        self._thread.start()

    def begin(self, number: int) -> None:
        """Begin with no keys, for start ``number`` of the ranks; those of the start before fail."""
        done = threading.Event()
        self._loop.call_soon_threadsafe(self._begin, number, done)
        done.wait(_GOODBYE)

    def close(self) -> None:
        """Answer no more."""
        if not self._closed:  # a second time would cut short what the first one began
            self._closed = True
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_GOODBYE)

    # -- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        opening = self._loop.create_unix_server(lambda: _RankLine(self), sock=self._listener)
        server = self._loop.create_task(opening)  # it may be closed before that has happened
        try:
            self._loop.run_forever()
        finally:
            settle(self._loop)
            server.result().close()
            settle(self._loop)  # who was being let in can be hung up on, and else would not be
            for line in list(self._lines.values()):
                line.hang_up()
            settle(self._loop)
            self._loop.close()

    def _begin(self, number: int, done: threading.Event) -> None:
        self._send(self._keys.close("the ranks were started again"))
        self._keys = Keys(number)
        done.set()

    def next_number(self) -> int:
        """Give a number that no other connection ever has."""
        return next(self._numbers)

    def came(self, line: _RankLine) -> None:
        """Note a connection."""
        self._lines[line.number] = line

    def gone(self, line: _RankLine) -> None:
        """Forget a connection, and what it waits for."""
        self._lines.pop(line.number, None)
        self._keys.forget(line.number)

    def ask(self, line: _RankLine, question: AskKeys) -> None:
        """Answer a question, and those that waited for what it changes."""
        self._send(self._keys.ask(line.number, question))

    def _send(self, answers: list[Answered]) -> None:
        for who, _, answer in answers:
            if who in self._lines:
                self._lines[who].send(pack(answer))


class _RankLine(asyncio.Protocol):
    """A connection of a rank."""

    def __init__(self, host: StoreHost) -> None:
        self.number = host.next_number()
        self._host = host
        self._words: Unpacker[AskKeys] = Unpacker(AskKeys)
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Let in who is of the same user."""
        self._transport = transport
        connection = transport.get_extra_info("socket")
        try:
            check_user(connection)
        except StrangerError:
            self.hang_up()
            return
        self._host.came(self)

    def data_received(self, data: bytes) -> None:
        """Take questions; bytes that are none end the connection."""
        self._words.feed(data)
        try:
            while (question := self._words.next()) is not None:
                self._host.ask(self, question)
        except FrameError:
            self.hang_up()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget this connection."""
        self._host.gone(self)

    def send(self, data: bytes) -> None:
        """Send, or keep until there is room."""
        self._transport.write(data)

    def hang_up(self) -> None:
        """End the connection."""
        self._transport.abort()
