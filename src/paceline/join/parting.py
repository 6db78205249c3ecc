"""Parting: how the ranks leave a Join context when one of them fails inside it.

A rank that raises makes no more of the calls that the others make, so they would wait for it. What
can be done depends on the engine:

**One that compares calls** (shm, threads, hybrid). The failed rank calls a gather that nobody else
calls, and the engine raises a MismatchError on every rank, wherever each one is: in the notice
that begins a step, in a bucket, standing in for somebody. That takes them out of the body and here,
where they call the same gather. The failed rank repeats it until it goes through; then every rank
has a note from every other, and the group is as usable as before.

**Others** (gloo, NCCL, a stock torch group). A call that does not fit may be taken for one that
does, or end the process, so none is made. The failed rank leaves its note in the store. The others
are freed when its process ends, or by their timeout, and find the note.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Protocol

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store

from ..errors import MismatchError
from ..groups import Group, store_of

_ROOM = 1021  # bytes of a note; an odd number, so that hardly any other gather is as long
_LONGEST = 600  # bytes of its message


class PartingNote(msgspec.Struct, frozen=True, tag="paceline.join.note"):
    """What a rank that leaves tells the others."""

    rank: int
    step: int
    message: str
    echo: bool  # it failed only because another rank had

    @classmethod
    def of(cls, error: BaseException, rank: int, step: int, echo: bool) -> PartingNote:
        """Note down ``error``, cut to a length that fits."""
        text = f"{type(error).__name__}: {error}".encode()[:_LONGEST].decode(errors="ignore")
        return cls(rank, step, text, echo)


_NOTES = msgspec.msgpack.Decoder(
    PartingNote
)  # by the thread that imports; see _transport/agreement.py


class Parting(Protocol):
    """How notes reach the other ranks of a group."""

    meets: bool  # an exchange that brings notes brings everybody's, from all ranks at once

    def is_echo(self, error: BaseException) -> bool:
        """Whether ``error`` may be there only because another rank failed."""

    def exchange(self, note: PartingNote) -> Sequence[PartingNote]:
        """Give ``note`` to the others and return theirs, as far as they can be had."""


def parting_of(group: ProcessGroup, device: torch.device) -> Parting:
    """The best way for ``group``. Every rank calls it when it enters the context."""
    if group.size() == 1:
        return Alone()
    # A group for several devices compares calls on the CPU only.
    if isinstance(group, Group) and group.capabilities.checks_agreement and device.type == "cpu":
        return ByGather(group)
    store = store_of(group)
    if store is None:  # it was made without one
        return Alone()
    return ByStore(store, group.rank(), group.size(), Group.wrap(group, device).backend)


class Alone:
    """No other ranks, or no way to reach them."""

    meets = False

    def is_echo(self, error: BaseException) -> bool:
        """False: there are no notes to compare with."""
        return False

    def exchange(self, note: PartingNote) -> Sequence[PartingNote]:
        """Return no notes."""
        return ()


class ByGather:
    """Through an engine that compares calls."""

    meets = True

    def __init__(self, group: Group) -> None:
        self._group = group

    def is_echo(self, error: BaseException) -> bool:
        """Whether it is the engine's word that the calls differed."""
        # The text, because C++ that calls a group, such as torch's reducer, keeps nothing else.
        return any(
            isinstance(e, MismatchError) or "of the group differs between ranks" in str(e)
            for e in chain(error)
        )

    def exchange(self, note: PartingNote) -> Sequence[PartingNote]:
        """Gather all notes; blocks until every rank is here."""
        own = bytearray(msgspec.msgpack.encode(note).ljust(_ROOM, b"\0"))
        while True:
            notes = torch.empty(self._group.size() * _ROOM, dtype=torch.uint8)
            try:
                self._group.all_gather_single(notes, torch.frombuffer(own, dtype=torch.uint8))
                return [_read(part.numpy().tobytes()) for part in notes.split(_ROOM)]
            except MismatchError:
                continue  # the others were elsewhere; this has told them
            except msgspec.DecodeError:
                continue  # another gather of the same length, of all things
            except RuntimeError:
                return ()  # the group is over, which the others know


class ByStore:
    """Through the store where the ranks met."""

    meets = False

    def __init__(self, store: Store, rank: int, size: int, backend: str) -> None:
        turn = store.add(f"paceline/join/{rank}", 1)  # the ranks enter as often as each other
        self._store = PrefixStore(f"paceline/join/{turn}", store)
        self._size, self._backend = size, backend

    def is_echo(self, error: BaseException) -> bool:
        """Whether the engine speaks, which may be of a lost connection."""
        # gloo has no type of its own for that, but its errors begin with the file they are from.
        found = list(chain(error))
        return any(isinstance(e, dist.DistError) or self._backend in str(e).lower() for e in found)

    def exchange(self, note: PartingNote) -> Sequence[PartingNote]:
        """Read the notes that are there, then leave this rank's own; does not wait."""
        notes: list[PartingNote] = []
        with suppress(RuntimeError):  # a store may live in the process that is gone
            for rank in range(self._size):
                if self._store.check([str(rank)]):
                    notes.append(_read(self._store.get(str(rank))))
            own = msgspec.structs.replace(note, echo=note.echo and bool(notes))
            self._store.set(str(note.rank), msgspec.msgpack.encode(own))  # type: ignore[arg-type]
        return notes


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield ``error`` and what it came from."""
    found: BaseException | None = error
    seen: set[int] = set()
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or found.__context__


def _read(data: bytes) -> PartingNote:
    return _NOTES.decode(data.rstrip(b"\0"))
