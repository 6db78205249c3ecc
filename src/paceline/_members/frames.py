"""Words as bytes: each is msgpack of a known type, after its length in four bytes."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

W = TypeVar("W")
LIMIT = 1 << 24  # bytes of a word
_encoder = msgspec.msgpack.Encoder()


class FrameError(Exception):
    """Bytes that are no word; whoever sent them is not listened to any more."""


def pack(word: msgspec.Struct) -> bytes:
    """Give the bytes to send."""
    data = _encoder.encode(word)
    return len(data).to_bytes(4, "big") + data


class Unpacker(Generic[W]):
    """Takes bytes as they come and gives the words that are complete."""

    def __init__(self, kinds: Any, limit: int = LIMIT):
        self._decoder: msgspec.msgpack.Decoder[W] = msgspec.msgpack.Decoder(kinds)
        self.limit = limit
        self._data = bytearray()

    @property
    def is_inside(self) -> bool:
        """Whether a word has begun and is not complete."""
        return bool(self._data)

    def feed(self, data: bytes) -> None:
        """Take more bytes."""
        self._data += data

    def next(self) -> W | None:
        """Give the next word, or None if it is not complete. Raises FrameError."""
        if len(self._data) < 4:
            return None
        size = int.from_bytes(self._data[:4], "big")
        if size > self.limit:
            raise FrameError(f"a word of {size} bytes; {self.limit} are allowed")
        if len(self._data) < 4 + size:
            return None
        body = bytes(memoryview(self._data)[4 : 4 + size])
        del self._data[: 4 + size]
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # text that is no UTF-8
            raise FrameError(str(error)) from error
