"""Carries bytes between Unix sockets and the port that other hosts reach.

A service (a store, a keeper) listens on a Unix socket and knows nothing of hosts. On its host,
:meth:`Porter.serve` lets in who shows a certificate of the job and carries what it says to the
service that it asked for. On another host, :meth:`Porter.reach` gives that service a Unix socket
there. So processes of a job hold no certificates, and open no port. A service may also be a folder
of sockets, such as one for each rank: then who calls names the one it wants (``names.py``), and
:meth:`Porter.lead` takes processes here to any such socket of any host.

A stranger keeps nobody waiting: who has not shown its certificate in time is hung up on, and of
many such at once the oldest of the address that has the most goes (``callers.py``). No byte reaches
a service before that. One thread does all of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from ..errors import StrangerError
from .callers import PATIENCE, Callers, Unproven
from .carry import PIECE, Streams, join, settle
from .certificates import AGENT, Identity
from .names import GONE, Wanted, frame, read_frame, socket_in
from .tls import HUNG_UP, PAUSE, WELCOME, calling, explain, stay_in_touch
from .unix import check_user

LETTER = 1 << 16  # bytes that a process may say that hangs up without an answer
REST = 0.2  # seconds until another is taken in, when there was no descriptor for one
_AT_ONCE = 4  # connections that are taken in before others get a turn; each may cost a signature
_SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Porter:
    """A thread that carries bytes, until it is closed."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._callers = Callers(self._loop)
        self._doors: list[socket.socket] = []
        self._talks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="paceline-porter", daemon=True)
        self._thread.start()

    @property
    def strangers(self) -> Counter[str]:
        """How many were hung up on, by reason."""
        return self._callers.refused

    def serve(
        self, listener: socket.socket, identity: Identity, services: Mapping[str, str | Path]
    ) -> None:
        """Let other hosts reach ``services``: their names, and the Unix socket of each.

        A folder instead of a socket lets them reach every socket in it, by name.
        """
        context = identity.answering()
        context.set_alpn_protocols(list(services))
        places = {name: str(path) for name, path in services.items()}

        def greet(caller: Unproven) -> None:
            self._start(self._admit(caller, context, places))

        def take(connection: socket.socket, address: Any) -> None:
            self._callers.add(connection, str(address[0]), greet)

        self._watch(listener, take)

    def reach(
        self,
        listener: socket.socket,
        address: tuple[str, int],
        identity: Identity,
        service: str,
        name: str = AGENT,
    ) -> None:
        """Carry what is said at ``listener``, a Unix socket, to a service of another host."""
        context = calling(identity, service)

        def take(connection: socket.socket, _: Any) -> None:
            if self._is_ours(connection):
                self._start(self._forward(connection, address, context, name))

        self._watch(listener, take)

    def lead(
        self, listener: socket.socket, identity: Identity, service: str, name: str = AGENT
    ) -> None:
        """Carry what is said at ``listener`` to the socket that is asked for there.

        ``service`` is the folder of sockets that other hosts serve.
        """
        context = calling(identity, service)

        def take(connection: socket.socket, _: Any) -> None:
            if self._is_ours(connection):
                self._start(self._lead(connection, context, name))

        self._watch(listener, take)

    def close(self) -> None:
        """Hang up on all, and give the ports back."""
        with contextlib.suppress(RuntimeError):  # it is closed
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)

    # -- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            for door in self._doors:  # who comes now would be taken in and not seen off
                self._loop.remove_reader(door)
            self._callers.close()
            settle(self._loop)  # what has begun can be cancelled, and else cannot be closed
            for task in self._talks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*self._talks, return_exceptions=True))
            settle(self._loop)
        finally:
            for door in self._doors:
                door.close()
            self._loop.close()

    def _start(self, talk: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(talk)
        self._talks.add(task)
        task.add_done_callback(self._talks.discard)
        return task

    def _watch(self, door: socket.socket, take: Callable[[socket.socket, Any], None]) -> None:
        door.setblocking(False)

        def begin() -> None:
            self._doors.append(door)
            self._loop.add_reader(door, self._accept, door, take)

        self._loop.call_soon_threadsafe(begin)

    def _accept(self, door: socket.socket, take: Callable[[socket.socket, Any], None]) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, address = door.accept()
            except OSError as error:
                if error.errno in _SHORT:  # poll would come back at once
                    self._loop.remove_reader(door)
                    again = (door, self._accept, door, take)
                    self._loop.call_later(REST, self._loop.add_reader, *again)
                return
            connection.setblocking(False)
            take(connection, address)

    def _is_ours(self, connection: socket.socket) -> bool:
        """Whether it is of this user; else it is hung up on."""
        try:
            check_user(connection)
            return True
        except StrangerError:
            self.strangers["another user"] += 1
            connection.close()
            return False

    # -- one connection -----------------------------------------------------------------------

    async def _admit(
        self, waits: Unproven, context: ssl.SSLContext, places: Mapping[str, str]
    ) -> None:
        """Let a caller in that shows its certificate, to the service that it asked for."""
        try:
            caller = await self._shake_hands(waits.connection, context)
        except (OSError, ValueError) as error:
            self.strangers[getattr(error, "reason", None) or type(error).__name__] += 1
            return
        finally:
            self._callers.let_in(waits)
        place = places.get(caller[1].get_extra_info("ssl_object").selected_alpn_protocol())
        try:
            if place is None:
                self.strangers["no such service"] += 1
                return
            service = await self._find(caller, place)
            caller[1].write(WELCOME)
            await join(caller, service)
        except (ValueError, EOFError, asyncio.TimeoutError) as error:
            self.strangers[type(error).__name__] += 1
        except OSError:
            pass  # the service is gone; the caller is hung up on
        finally:
            caller[1].transport.abort()

    async def _find(self, caller: Streams, place: str) -> Streams:
        """The service at ``place``; where that is a folder, the one that the caller names."""
        if not os.path.isdir(place):
            return await asyncio.open_unix_connection(place)
        name = await asyncio.wait_for(read_frame(caller[0]), PATIENCE)
        try:
            return await asyncio.open_unix_connection(socket_in(place, name))
        except OSError:
            caller[1].write(GONE)
            caller[1].close()
            await caller[1].wait_closed()
            raise

    async def _shake_hands(self, connection: socket.socket, context: ssl.SSLContext) -> Streams:
        stay_in_touch(connection)
        reader = asyncio.StreamReader(limit=PIECE, loop=self._loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=self._loop)
        try:
            transport, _ = await self._loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=context, ssl_handshake_timeout=PATIENCE
            )
        except BaseException:
            connection.close()
            raise
        return reader, asyncio.StreamWriter(transport, protocol, reader, self._loop)

    async def _forward(
        self,
        connection: socket.socket,
        address: tuple[str, int],
        context: ssl.SSLContext,
        name: str,
    ) -> None:
        """Carry what a process here says to a service of another host."""
        here = await asyncio.open_unix_connection(sock=connection)
        try:
            there = await self._call(address, context, name)
            try:
                if await asyncio.wait_for(there[0].read(1), PATIENCE) == WELCOME:
                    await join(here, there)
            finally:
                there[1].transport.abort()
        except (OSError, asyncio.TimeoutError) as error:
            told = explain(error, f"{address[0]}:{address[1]}")
            self.strangers[type(told).__name__] += 1
        finally:
            here[1].transport.abort()

    async def _lead(self, connection: socket.socket, context: ssl.SSLContext, name: str) -> None:
        """Take a process here to the socket of another host that it asks for."""
        here = await asyncio.open_unix_connection(sock=connection, limit=LETTER)
        try:
            wanted = Wanted.read(await asyncio.wait_for(read_frame(here[0]), PATIENCE))
            letter = b"" if wanted.answer else await asyncio.wait_for(_all(here[0]), PATIENCE)
            there, said = await self._call_by_name(wanted, context, name)
            try:
                if wanted.answer:
                    here[1].write(said)
                    await join(here, there)
                elif said == WELCOME:
                    there[1].write(letter)
                    await asyncio.wait_for(there[0].read(-1), PATIENCE)  # it hangs up: it has it
            finally:
                there[1].transport.abort()
        except (OSError, ValueError, EOFError, asyncio.TimeoutError) as error:
            self.strangers[type(error).__name__] += 1
        finally:
            here[1].transport.abort()

    async def _call_by_name(
        self, wanted: Wanted, context: ssl.SSLContext, name: str
    ) -> tuple[Streams, bytes]:
        """A connection, and whether the socket is there; again if it was hung up on in a crowd."""
        until = self._loop.time() + PATIENCE
        while True:
            there = await self._call(wanted.address, context, name)
            try:
                there[1].write(frame(wanted.name))
                if said := await asyncio.wait_for(there[0].read(1), PATIENCE):
                    return there, said
            except HUNG_UP:
                pass
            there[1].transport.abort()
            if self._loop.time() > until:
                raise ConnectionResetError("it hung up")
            await asyncio.sleep(PAUSE)

    async def _call(self, address: tuple[str, int], context: ssl.SSLContext, name: str) -> Streams:
        until = self._loop.time() + PATIENCE
        while True:
            calls = asyncio.open_connection(
                *address, ssl=context, server_hostname=name, ssl_handshake_timeout=PATIENCE
            )
            try:
                reader, writer = await asyncio.wait_for(calls, PATIENCE)
                break
            except HUNG_UP:
                if self._loop.time() > until:
                    raise
                await asyncio.sleep(PAUSE)
        connection = writer.get_extra_info("socket")
        if connection is None:  # the service was not there yet
            raise ConnectionResetError("it hung up")
        stay_in_touch(connection)
        return reader, writer


async def _all(reader: asyncio.StreamReader) -> bytes:
    """What is said until the end; ValueError if that is too much."""
    said = bytearray()
    while piece := await reader.read(PIECE):
        said += piece
        if len(said) > LETTER:
            raise ValueError(f"more than {LETTER} bytes")
    return bytes(said)
