"""Which ranks a run has lost and goes on without. Pure, but for the reading of notes.

When a rank fails, the others either end, or wait for it in vain and have to be ended, or form a
smaller group and go on (``Group.reconfigure``). Those that do so say it in a note
(``groups/launcher.py``), first when they begin and again when they have succeeded.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path

import msgspec

from .verdict import named


class Survivor(msgspec.Struct, frozen=True):
    """A rank that goes on without others."""

    rank: int
    without: tuple[int, ...]  # whom it has left behind so far
    members: tuple[int, ...]  # whom it goes on with; none: it has left and goes on alone
    done: bool  # False: it is about to


Survivors = Mapping[int, Survivor]  # by rank


def read_survivors(folder: Path) -> dict[int, Survivor]:
    """The notes that ranks have left in ``folder``."""
    found = {}
    for path in folder.glob("survivor-*.json"):
        with suppress(OSError, msgspec.DecodeError):  # such as taken back meanwhile
            note = msgspec.json.decode(path.read_bytes(), type=Survivor)
            found[note.rank] = note
    return found


def without(survivors: Survivors) -> set[int]:
    """The ranks that others have gone on without."""
    return {rank for survivor in survivors.values() if survivor.done for rank in survivor.without}


def tell_lost(rank: int, size: int, why: str, by: Survivor) -> str:
    """That a rank is lost, and who goes on."""
    others = f"{named(sorted(by.members))} go{'es' if len(by.members) == 1 else ''}"
    return f"rank {rank} of {size} is lost{why and f': {why}'}; {others} on without it"


def tell_missing(lost: Collection[int], size: int, well: bool) -> str:
    """At the end of a run: whom it went on without."""
    ranks = f"{named(sorted(lost))} of {size}, which {'was' if len(lost) == 1 else 'were'} lost"
    return f"the others {'have finished' if well else 'went on for a while'} without {ranks}"


class Outlook(Enum):
    """Whether a run in which ranks have failed goes on."""

    GOOD = auto()  # none has, or the others go on without them
    OPEN = auto()  # the others have not said yet
    HOPELESS = auto()  # they do not go on


@dataclass
class Losses:
    """The ranks that a run goes on without, and the failures that nobody has answered yet."""

    patience: float  # seconds that the others have to begin to recover
    lost: dict[int, Survivor] = field(default_factory=dict)  # by rank: one that recovered from it
    _silent_since: float = math.inf

    def look(
        self,
        failed: Collection[int],
        running: Collection[int],
        survivors: Survivors,
        now: float,
    ) -> Outlook:
        """Take in who has failed and who has said that it goes on."""
        for rank in failed:
            by = [s for s in survivors.values() if s.done and rank in s.without]
            by = [s for s in by if s.rank not in failed]
            if by and rank not in self.lost:
                self.lost[rank] = by[0]
        unanswered = set(failed) - self.lost.keys()
        if not unanswered:
            self._silent_since = math.inf
            return Outlook.GOOD
        about_to = [s for s in survivors.values() if s.rank in running and not s.done]
        if any(unanswered & set(s.without) for s in about_to):
            self._silent_since = math.inf
            return Outlook.OPEN  # that ends by itself: reconfigure has a timeout
        self._silent_since = min(self._silent_since, now)
        late = now - self._silent_since >= self.patience
        return Outlook.HOPELESS if late or not running else Outlook.OPEN

    def left_behind(self, running: Collection[int], survivors: Survivors) -> list[int]:
        """Who still runs though all others have gone on without it and have ended."""
        alone = bool(running) and without(survivors).issuperset(running)
        return sorted(running) if alone and not survivors.keys() & set(running) else []
