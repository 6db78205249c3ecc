"""What must outlive a keeper: the numbers that it gave, and the keys of the current roster.

A file beside the keeper's socket. Each record is written before anybody hears of what it is about,
so a keeper that is started after another one was killed gives no number twice, still has every key,
and knows which questions were answered already. A record that was cut off when the keeper was
killed is about something that nobody has heard of. It protects from the death of a process, not of
the host: nothing is flushed to a disk.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from .frames import FrameError, Unpacker, pack
from .keys import AskKeys, KeysAnswer

COMPACT_AT = 1 << 24  # bytes of a journal


class GivenNumbers(msgspec.Struct, frozen=True, tag=True):
    """The next member's number and that of the last roster."""

    next_member: int = 0
    last_roster: int = 0


class KeysBegin(msgspec.Struct, frozen=True, tag=True):
    """Keys from here on are those of this roster."""

    roster: int


class KeysChanged(msgspec.Struct, frozen=True, tag=True):
    """A member's question that changed keys was answered."""

    member: int
    question: AskKeys


class KeysRemembered(msgspec.Struct, frozen=True, tag=True):
    """An answer that a member may ask for again."""

    member: int
    answer: KeysAnswer


Record = GivenNumbers | KeysBegin | KeysChanged | KeysRemembered


class Journal:
    """The records of a keeper, in a file of its own."""

    def __init__(self, path: Path):
        self._path = path
        self._broken = False
        self.records = list(_read(path))
        self.rewrite(self.records)

    def note(self, record: Record) -> None:
        """Write a record; it is safe from the death of this process when this returns."""
        if not self._broken:
            data = pack(record)
            self._write(self._file, data)
            self.size += len(data)

    def rewrite(self, records: list[Record]) -> None:
        """Begin again with these records only."""
        fresh = self._path.with_suffix(".new")
        file = os.open(fresh, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_APPEND, 0o600)
        data = b"".join(map(pack, records))
        self._broken = False
        self._write(file, data)
        os.replace(fresh, self._path)
        self.close()
        self._file, self.size = file, len(data)

    def _write(self, file: int, data: bytes) -> None:
        """Write all, or nothing ever after: a keeper without a disk is better than none.

        A later keeper then refuses members that know of numbers that it has not read of.
        """
        try:
            self._broken = os.write(file, data) < len(data)
        except OSError:
            self._broken = True

    def close(self) -> None:
        """Close the file, which stays."""
        if hasattr(self, "_file"):
            os.close(self._file)
            del self._file


class NoJournal:
    """For a keeper whose members die with it."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.size = 0

    def note(self, record: Record) -> None:
        """Write nothing."""

    def rewrite(self, records: list[Record]) -> None:
        """Write nothing."""


def _read(path: Path) -> list[Record]:
    """The records of a file, up to one that is not whole."""
    unpacker: Unpacker[Record] = Unpacker(Record)
    found: list[Record] = []
    if path.exists():
        unpacker.feed(path.read_bytes())
    try:
        while (record := unpacker.next()) is not None:
            found.append(record)
    except FrameError:
        pass
    return found
