"""Comparing: each rank compares its calls with the next rank's, beside the work, and tells once.

It costs a question every few seconds, and one at the end of a group. Nothing is exchanged with the
calls themselves, so what is found was found too late to stop it; ``groups/strict.py`` stops it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable

from . import events
from .order import Pairing, in_words, log_of
from .peers import Peers

EVERY = 5.0  # seconds between two questions about a group


class Comparing:
    """What a process has compared of its groups' calls."""

    patience = 0.5  # seconds that an answer may take; the end of a group waits so long for it

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._lock = threading.Lock()
        self._pairings: dict[int, Pairing] = {}  # by board
        self._due: dict[int, float] = {}

    def look(self, boards: Iterable[events.Board]) -> None:
        """Compare what is due."""
        now = time.monotonic()
        for board in boards:
            if board.made and now >= self._due.get(board.number, 0.0):
                self._due[board.number] = now + EVERY
                self.compare(board)
        for table in (self._pairings, self._due):
            for number in set(table) - events.boards.keys():
                table.pop(number, None)

    def compare(self, board: events.Board) -> None:
        """Compare the calls since the last time with those of the next rank; it may not answer."""
        other = board.rank + 1
        if other >= board.size or board.checks == "off" or not board.peers:
            return
        if not self._lock.acquire(timeout=self.patience):
            return
        try:
            pairing = self._pairings.setdefault(board.number, Pairing(board.checked))
            if board.made <= pairing.compared:
                return
            theirs = self._peers.log(board, other, pairing.compared, self.patience)
            if theirs is not None:
                swap = pairing.compare(log_of(board, pairing.compared), theirs)
                if swap is not None:
                    self._tell(board, in_words(swap, board, other))
        finally:
            self._lock.release()

    def _tell(self, board: events.Board, text: str) -> None:
        events.note(board, text)
        sys.stderr.write(f"paceline: {text}\n")
        sys.stderr.flush()
