"""A rank's output cut into pieces that can be shown: whole lines, and progress bars.

Pure. A piece is a line that is over, or text that its writer means to overwrite: what was ended by
``\\r``, as progress bars do, or what has stood there for a while without an end, such as a prompt.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_END = re.compile(rb"\r\n|\n|\r(?!\n|$)|\r(?=\r)")
IDLE = 0.2  # seconds after which text without an end is shown as it stands
_LONGEST = 1 << 20  # bytes without an end that are kept; more is cut, not hoarded


@dataclass(frozen=True)
class Piece:
    """Text to show, without its line end."""

    text: str
    over: bool  # False: the next piece of this stream takes its place


@dataclass
class RankLines:
    """One stream of one rank."""

    _rest: bytes = b""
    _since: float = 0.0  # when the rest last grew
    _shown: bytes = b""  # what of the rest was shown because it stood idle

    def feed(self, data: bytes, now: float) -> Iterator[Piece]:
        """Take in what was written and give what can be shown."""
        whole, self._rest, self._since = self._rest + data, b"", now
        start = 0
        for end in _END.finditer(whole):
            text = whole[start : end.start()]
            start = end.end()
            over = end.group() != b"\r"
            if over or text.strip():
                yield Piece(_decode(text), over)
        self._rest = whole[start:]
        self._shown = b""
        if len(self._rest) > _LONGEST:
            yield from self.rest()

    def idle(self, now: float) -> Iterator[Piece]:
        """Give what has stood without an end for a while, once."""
        waiting = self._rest.strip() and self._rest != self._shown
        if waiting and now - self._since >= IDLE:
            self._shown = self._rest
            yield Piece(_decode(self._rest).rstrip("\r"), over=False)

    def rest(self) -> Iterator[Piece]:
        """Give what is left at the end of the stream."""
        text, self._rest, self._shown = self._rest, b"", b""
        if text.strip():
            yield Piece(_decode(text).rstrip("\r"), over=True)


def _decode(text: bytes) -> str:
    return text.decode("utf-8", errors="replace")
