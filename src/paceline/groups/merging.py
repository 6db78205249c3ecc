"""Merging: how several groups that know nothing of each other line up as one.

The first rank of each group comes to a meeting (``meetings.py``) for all of its ranks, and leaves
word in the store for the others of its group where they stand. Every rank reads who came with which
members, and numbers all of them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import msgspec
from torch.distributed import PrefixStore, Store

from ..errors import RendezvousError
from .engine import Engine
from .meetings import Meetings, Place


class GroupCard(msgspec.Struct, frozen=True):
    """What a group tells the others."""

    members: Sequence[int]
    options: str


class MergeWord(msgspec.Struct, frozen=True):
    """What the first rank of a group tells its other ranks: their new ranks, or why it failed."""

    number: int
    before: int
    failure: str = ""


# Made by the thread that imports; see _transport/agreement.py.
_CARDS = msgspec.msgpack.Decoder(GroupCard)
_WORDS = msgspec.json.Decoder(MergeWord)


class Merging:
    """One rank's part in making one group of several."""

    def __init__(
        self, store: Store, size: int, part: GroupCard, *, rank: int, token: str, timeout: timedelta
    ) -> None:
        self._part, self._rank, self._token = part, rank, token
        self._words = PrefixStore("paceline/merge/words", store)  # by token, which a group has once
        corner = PrefixStore("paceline/merge", store)
        self._meetings = Meetings(corner, f"of {size}", size, timeout, rank=rank, name=token)

    def line_up(self) -> tuple[Place, list[int]]:
        """Where this group stands, and the members of all; blocks until all groups have come."""
        place = self._lead() if self._rank == 0 else self._follow()
        parts = [_CARDS.decode(card.note) for card in self._meetings.cards(place)]
        if len(kinds := {part.options for part in parts}) > 1:
            raise RendezvousError(
                f"groups of different kinds cannot be one: {'; '.join(sorted(kinds))}",
                "Give merge the same backend and options on all of them.",
                self._rank,
            )
        return place, renumbered([part.members for part in parts])

    def open(self, place: Place, opener: Callable[[Store], Engine]) -> tuple[Store, Engine]:
        """Open an engine of all ranks; returns when every one has."""
        return self._meetings.open(place, opener, see_off=True)

    def _lead(self) -> Place:
        note = msgspec.msgpack.encode(self._part)
        try:
            place = self._meetings.arrive(len(self._part.members), note)
        except BaseException as error:
            self._tell(MergeWord(0, 0, str(error) or type(error).__name__))
            raise
        self._tell(MergeWord(place.number, place.before))
        return place

    def _follow(self) -> Place:
        word = _WORDS.decode(self._meetings.hear(self._words, self._token))
        if word.failure:
            raise RendezvousError(
                f"rank 0 of this group could not merge it: {word.failure}", "", self._rank
            )
        return Place(word.number, word.before)

    def _tell(self, word: MergeWord) -> None:
        self._words.set(self._token, msgspec.json.encode(word).decode())


def renumbered(parts: Sequence[Sequence[int]]) -> list[int]:
    """All members of groups in a row: each keeps its number, unless an earlier one has it.

    Those get numbers above all others: one in between may be that of a rank that died.

    >>> renumbered([(0, 2), (0,), (5, 2)])
    [0, 2, 6, 5, 7]
    """
    fresh = max((n for part in parts for n in part), default=-1) + 1
    found: list[int] = []
    for number in (n for part in parts for n in part):
        if number in found:
            number, fresh = fresh, fresh + 1
        found.append(number)
    return found
