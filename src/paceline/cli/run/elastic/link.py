"""An agent's connection to the keeper: words out and in, without waiting for either."""

from __future__ import annotations

import socket
import struct
from collections import deque
from contextlib import suppress

import msgspec

from ...._members import AgentHello, AgentWord, Alive, KeeperWord

_LENGTH = struct.Struct(">I")
_LONGEST = 1 << 20  # bytes of a word
_CHUNK = 1 << 16
_BACKLOG = 1 << 22  # bytes that a keeper may leave unread before it is taken for dead


class KeeperLink:
    """Connected to the socket at ``path`` while a keeper listens there; :meth:`look` sees to it.

    Nothing here blocks: a keeper may be stopped, or about to be replaced.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._socket: socket.socket | None = None
        self._in, self._out = bytearray(), bytearray()
        self._decoder = msgspec.msgpack.Decoder(KeeperWord)
        self._encoder = msgspec.msgpack.Encoder()

    @property
    def connected(self) -> bool:
        """Whether words can be said."""
        return self._socket is not None

    def connect(self, hello: AgentHello) -> bool:
        """Try to reach the keeper, and say who we are; False if nobody listens."""
        found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        found.setblocking(False)
        try:
            found.connect(self.path)
        except OSError:
            found.close()
            return False
        self._socket = found
        self.say(hello)
        return self.connected  # not if it was hung up on at once

    def fileno(self) -> int:
        """The descriptor to watch while connected."""
        return self._socket.fileno() if self._socket else -1

    def say(self, word: AgentWord | Alive) -> None:
        """Send a word; what nobody hears is not kept, since the next hello says how things are."""
        if self._socket is None:
            return
        text = self._encoder.encode(word)
        self._out += _LENGTH.pack(len(text)) + text
        self.flush()

    def flush(self) -> None:
        """Send what is left, as far as it goes."""
        if self._socket is None:
            return
        try:
            while self._out:
                del self._out[: self._socket.send(self._out)]
        except BlockingIOError:
            if len(self._out) > _BACKLOG:
                self.close()
        except OSError:
            self.close()

    def heard(self) -> list[KeeperWord]:
        """The words that have come; closes the connection when it has ended."""
        words: deque[KeeperWord] = deque()
        try:
            while self._socket is not None and (data := self._socket.recv(_CHUNK)):
                self._in += data
                words.extend(self._decoded())
            self.close()
        except BlockingIOError:
            pass
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            self.close()
        return list(words)

    def _decoded(self) -> list[KeeperWord]:
        words: list[KeeperWord] = []
        while len(self._in) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._in)
            if size > _LONGEST:
                raise msgspec.DecodeError(f"a word of {size} bytes")
            if len(self._in) < _LENGTH.size + size:
                break
            words.append(self._decoder.decode(self._in[_LENGTH.size : _LENGTH.size + size]))
            del self._in[: _LENGTH.size + size]
        return words

    def close(self) -> None:
        """End the connection; the next one begins with nothing."""
        if self._socket is not None:
            with suppress(OSError):
                self._socket.close()
        self._socket = None
        self._in.clear()
        self._out.clear()
