# mypy: disable-error-code="override"
"""Lineage: which other groups come out of a group, and what they inherit.

``split`` makes smaller ones, ``merge`` one of several, ``reconfigure`` another one in place of this
one. All ranks of a new group meet in a store (``meetings.py``) and open an engine of their own.
"""

from __future__ import annotations

import itertools
import secrets
from abc import abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch.distributed import Store
from typing_extensions import Self

from ..errors import CollectiveArgumentError, UnsupportedError
from .calling import FORKED
from .checks import Checker
from .collectives import Collectives
from .engine import Engine
from .launcher import going_on, tell_left
from .meetings import Meetings
from .merging import GroupCard, Merging
from .opening import Opening, OpeningGivenUp
from .options import GroupOptions
from .strict import Checks

Reopen = Callable[[Store, int, int, GroupOptions], Engine]


class Lineage(Collectives):
    """How groups are split, merged and moved; a part of :class:`Group`."""

    def __init__(
        self,
        engine: Engine,
        rank: int,
        size: int,
        options: GroupOptions,
        store: Store | None,
        reopen: Reopen | None,
        members: Sequence[int] | None,
    ) -> None:
        super().__init__(engine, rank, size, options.timeout.total_seconds())
        self._options = options
        self._store = self._home = store  # the latter stays the same, whatever becomes of members
        self._reopen = reopen
        self._members = tuple(members if members is not None else range(size))
        self._checks: Checks = "warn"
        self._barriers = itertools.count()
        self._group_name = self._group_desc = ""
        self._opening: Opening | None = None  # while the group is moved

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of this group, as numbered in the group it was first split from."""
        return self._members

    def number_members(self, members: Sequence[int]) -> None:
        """Set which ranks of a larger group the members are; call it before the group is used."""
        self._members = tuple(members)
        if self.board is not None:
            self.board.members = self._members

    def hear_of_engines(self, opened: Callable[[Engine], None]) -> None:
        """Call ``opened`` with the current engine, and with every engine that replaces it.

        It is also called for groups that are split or merged from this one. Tests use it to free
        all ranks.
        """
        opened(self._engine)
        reopen = self._need_reopen()

        def reopen_and_tell(store: Store, rank: int, size: int, options: GroupOptions, /) -> Engine:
            engine = reopen(store, rank, size, options)
            opened(engine)
            return engine

        self._reopen = reopen_and_tell

    @property
    def options(self) -> GroupOptions:
        """The options the group was opened with, with the timeout of :meth:`set_timeout`."""
        return self._options

    @property
    def device(self) -> torch.device:
        """The device the group was opened for."""
        return self._options.device

    @property
    def store(self) -> Store | None:
        """The store through which the ranks found each other, or None if they needed none."""
        return self._store

    def get_group_store(self) -> Store:
        """Return :attr:`store`; torch calls this method."""
        return self._need_store("get_group_store")

    def split(
        self,
        ranks: Sequence[int] | Sequence[Sequence[int]],
        *,
        timeout: timedelta | None = None,
        backend: str | None = None,
        device: torch.device | str | None = None,
        **backend_options: object,
    ) -> Self | None:
        """Return a new group of some of this group's ranks, or None on a rank that is in none.

        ``ranks`` is a list of ranks of this group, or several such lists; they may have different
        lengths, and their order gives the new ranks. Only ranks in a new group need to call it.
        Arguments that are not given are taken from :attr:`options`.
        """
        return self._split(ranks, self._options.changed(backend, timeout, device, backend_options))

    def _split(
        self, ranks: Sequence[int] | Sequence[Sequence[int]], options: GroupOptions
    ) -> Self | None:
        self._alive("split")
        parts = _parts(ranks)
        self._check_ranks("split", "ranks", [r for part in parts for r in part])
        mine = next((part for part in parts if self._rank in part), None)
        if mine is None:
            return None
        store, engine = self._meet(self._need_store("split"), "split", mine, options)
        members = [self._members[r] for r in mine]
        return self._like_this(engine, mine.index(self._rank), members, options, store)

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: object = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: object = None,
    ) -> Self | None:
        """Call :meth:`split`, with torch's arguments.

        ``opts`` is a :class:`GroupOptions`, or torch's options of a backend.
        """
        options = self._options.taken_from(opts).changed(timeout=timeout)
        group = self._split(ranks, options)
        return None if group is None else group._named(group_name, group_desc)

    def merge(
        self,
        store: Store,
        size: int,
        *,
        timeout: timedelta | None = None,
        backend: str | None = None,
        device: torch.device | str | None = None,
        **backend_options: object,
    ) -> Self:
        """Return one group of this group's ranks and those of other groups with the same store.

        All ranks of all groups call it. ``size`` is the number of ranks of the new group. Groups
        are ordered by the arrival of their first ranks; the order within a group stays.
        :attr:`members` keep their numbers; if two groups have the same number, the later one gets
        a new number. Arguments that are not given are taken from :attr:`options`; they must be the
        same in all groups.
        """
        self._alive("merge")
        reopen = self._need_reopen()
        options = self._options.changed(backend, timeout, device, backend_options)
        token = torch.tensor([secrets.randbits(62)], device=self.device)
        self.broadcast(token, 0)  # all ranks of this group go by it
        merging = Merging(
            store,
            size,
            GroupCard(self._members, f"{options.described()}, checks={self._checks}"),
            rank=self._rank,
            token=str(int(token)),
            timeout=options.timeout,
        )
        place, members = merging.line_up()
        rank = place.before + self._rank
        corner, engine = merging.open(place, lambda room: reopen(room, rank, size, options))
        return self._like_this(engine, rank, members, options, corner)

    def merge_remote_group(
        self,
        store: Store,
        size: int,
        timeout: timedelta = timedelta(minutes=30),
        group_name: str | None = None,
        group_desc: str | None = None,
    ) -> Self:
        """Call :meth:`merge`, with torch's arguments."""
        return self.merge(store, size, timeout=timeout)._named(group_name, group_desc)

    def _named(self, name: str | None, description: str | None) -> Self:
        if name is not None:
            self._group_name = name
        if description is not None:
            self._group_desc = description
        return self

    def _go_on(self, members: Sequence[int], timeout: timedelta | None, purpose: str) -> Self:
        """``Group.reconfigure``; only ranks with the same ``purpose`` meet."""
        if self._closed in ("shut down", FORKED):
            self._alive("reconfigure")
        new = list(members)
        self._check_ranks("reconfigure", "members", new or [-1])
        home, options = self._need_home(), self._options.changed(timeout=timeout)
        self._need_reopen()
        before, after = self._members, [self._members[r] for r in new]
        if self._rank not in new:
            self._close_engine("left by reconfigure")
            tell_left(before[self._rank])
            return self
        self._close_engine("aborted")
        with going_on(before[self._rank], before, after):
            store, engine = self._meet(home, purpose, new, options)
        self._adopt(engine, new.index(self._rank), after, store)
        return self

    def move(self, store: Store, rank: int, members: Sequence[int]) -> Self:
        """Continue as ``rank`` of ``members``, whichever ranks the group had; the object stays.

        Every member calls it, with a store that no other group uses. Collectives that are running
        are aborted. If it fails, the group stays closed, and you can move it again.
        :meth:`Group.abort` from another thread cancels it.
        """
        if self._closed in ("shut down", FORKED):
            self._alive("move")
        reopen, options = self._need_reopen(), self._options
        opening = Opening(lambda: reopen(store, rank, len(members), options), self.device)
        self._opening = opening  # from now on an abort is meant for the new engine
        try:
            self._close_engine("aborted")
            engine = opening.result()
            self._home = store
            self._adopt(engine, rank, members, store)
        except OpeningGivenUp:
            self._alive("move")
            raise
        except BaseException:  # an interrupt, too, must not leave an engine that nobody has
            opening.give_up()
            raise
        finally:
            self._opening = None
        if opening.given_up:  # when the new engine was there, but not yet the group's
            self.abort()
            self._alive("move")
        return self

    def _close_engine(self, why: str) -> None:
        self._closed = why
        self._abort_engine()
        self._engine.shutdown()

    def _adopt(self, engine: Engine, rank: int, members: Sequence[int], store: Store) -> None:
        """Go on with another engine; counts that ranks must agree on begin anew."""
        size = len(members)
        self._engine, self._members = engine, tuple(members)
        self._rank, self._size, self._store = rank, size, store
        self._barriers, self._sequence = itertools.count(), itertools.count(1)
        self.traffic.resize(size)
        self._checker = Checker(rank, size, engine)
        if self.board is not None:
            self.board.close()
        self._open_board()
        self._closed = ""

    def _need_home(self) -> Store:
        self._need_store("reconfigure")
        assert self._home is not None, "it is set together with the store"
        return self._home

    def _need_store(self, what: str) -> Store:
        if self._closed == FORKED:
            self._alive(what)
        if self._store is None:
            remedy = "Make the group with new_group(..., store=...)."
            raise UnsupportedError(
                self._engine.capabilities.backend, f"{what} without a store", remedy, self._rank
            )
        return self._store

    def _check_ranks(self, operation: str, argument: str, ranks: Sequence[int]) -> None:
        right = all(isinstance(r, int) and 0 <= r < self._size for r in ranks)
        if not right or len(set(ranks)) != len(ranks):
            expected = f"different ranks below {self._size}"
            raise CollectiveArgumentError(
                self._rank, operation, argument, expected, str(list(ranks))
            )

    def _meet(
        self, store: Store, purpose: str, ranks: Sequence[int], options: GroupOptions
    ) -> tuple[Store, Engine]:
        """Meet ``ranks`` of this group, in their order, and open an engine with them."""
        reopen, rank = self._need_reopen(), ranks.index(self._rank)
        if not self._engine.capabilities.peers:
            return store, reopen(store, rank, len(ranks), options)
        names = [str(self._members[r]) for r in ranks]
        meetings = Meetings(
            store,
            f"{purpose}/{','.join(names)}",
            len(ranks),
            options.timeout,
            rank=self._rank,
            name=str(self._members[self._rank]),
            names=names,
        )
        return meetings.open(
            meetings.arrive(),
            lambda room: reopen(room, rank, len(ranks), options),
            see_off=purpose == "split",
        )

    def _need_reopen(self) -> Reopen:
        if self._reopen is None:
            backend, remedy = self._engine.capabilities.backend, "Make the group with new_group."
            raise UnsupportedError(backend, "making another group like it", remedy, self._rank)
        return self._reopen

    @abstractmethod
    def _like_this(
        self, engine: Engine, rank: int, members: Sequence[int], options: GroupOptions, store: Store
    ) -> Self:
        """A group of its own around an engine that was opened for it."""

    @abstractmethod
    def abort(self) -> None:
        """Close the group now; every thread and every rank that waits in it raises an error."""

    @abstractmethod
    def _abort_engine(self) -> None:
        """Abort the engine, and let whoever holds on to it let go of it."""

    @abstractmethod
    def _open_board(self) -> None:
        """Let calls be recorded."""


def _parts(ranks: Sequence[int] | Sequence[Sequence[int]]) -> list[list[int]]:
    if ranks and isinstance(ranks[0], Sequence):
        return [list(part) for part in ranks]  # type: ignore[arg-type]
    return [list(ranks)]  # type: ignore[arg-type]
