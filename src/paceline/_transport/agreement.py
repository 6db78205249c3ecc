"""How ranks tell each other things through a store, and fail together or not at all.

A rank that cannot go on says so before the others wait for it, in the word that every rank gives at
the end of each part. So what :func:`agree` guards succeeds on all ranks or on none.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import msgspec
from torch.distributed import DistNetworkError, Store

from ..errors import EngineUnavailableError, RankUnableError, RendezvousError
from .terms import compare

R = TypeVar("R")


class Clock:
    """Time left until a deadline."""

    def __init__(self, timeout: timedelta) -> None:
        self.seconds = timeout.total_seconds()
        self._end = time.monotonic() + self.seconds

    def left(self) -> float:
        """Seconds left, never zero or less: torch's stores read that as "for ever"."""
        return max(self._end - time.monotonic(), 0.001)


def put(store: Store, key: str, value: object) -> None:
    store.set(key, msgspec.msgpack.encode(value))  # type: ignore[arg-type]  # the stub says str


@contextmanager
def reaching_store(rank: int) -> Iterator[None]:
    """Say what it means when the store is gone while ``rank`` uses it."""
    try:
        yield
    except DistNetworkError as error:
        raise RendezvousError(
            "the store in which the ranks meet cannot be reached any more",
            "The process that holds it, mostly rank 0 or a launcher, has ended, or the connection "
            "is lost. Look at its output first.",
            rank,
        ) from error


def fetch(store: Store, keys: Sequence[str], rank: int, clock: Clock) -> list[bytes]:
    """The values of ``keys``, one for each rank in order; names the ranks that did not come."""
    with reaching_store(rank):
        try:
            store.wait(list(keys), timedelta(seconds=clock.left()))
        except (RuntimeError, ValueError) as error:
            late = [str(r) for r, key in enumerate(keys) if not store.check([key])]
            if not late:
                raise
            raise RendezvousError(
                f"after {clock.seconds:g} s no sign of rank {', '.join(late)} of {len(keys)}",
                "Start every rank with the same world size, store and arguments, "
                "or give new_group a longer timeout.",
                rank,
            ) from error
        if store.has_extended_api():  # type: ignore[attr-defined]  # one question, not one a rank
            return list(store.multi_get(list(keys)))
        return [store.get(key) for key in keys]


class Word(msgspec.Struct, frozen=True):
    """What a rank says at the end of a part of a meeting."""

    failure: str = ""
    culprit: int = -1  # the rank whose failure it is, be it another one
    reached: list[int] = []  # lower ranks; msgspec copies it


# Decoders are made where their classes are, once, by the thread that imports: msgspec looks at a
# class when it is first read, and two threads that have it do so at once crash the process.
_WORDS = msgspec.msgpack.Decoder(Word)


def fetch_all(
    store: Store,
    part: str,
    decoder: msgspec.msgpack.Decoder[R],
    rank: int,
    size: int,
    clock: Clock,
) -> list[R]:
    found = fetch(store, [f"{part}/{r}" for r in range(size)], rank, clock)
    try:
        return [decoder.decode(data) for data in found]
    except msgspec.DecodeError as error:
        raise RendezvousError(
            f"a rank sent its {part} in a form that this version of paceline does not know",
            "Start every rank with the same version.",
            rank,
        ) from error


def agree(
    backend: str,
    store: Store,
    part: str,
    rank: int,
    size: int,
    clock: Clock,
    step: Callable[[], list[int]],
    hang_up: Callable[[], None] = lambda: None,
) -> list[Word]:
    """Do ``step`` and tell how it went; raises on every rank if it failed on any."""
    cause: Exception | None = None
    try:
        word = Word(reached=step())
    except Exception as error:
        cause = error
        word = Word(told(error), _blamed(error, rank))
    put(store, f"{part}/{rank}", word)
    if cause is not None:
        hang_up()  # who waits for a word on a line is free to fail, too
    words = fetch_all(store, part, _WORDS, rank, size, clock)
    failed = {r: word for r, word in enumerate(words) if word.failure}
    if not failed:
        return words
    # a rank that failed by itself is the cause of those that failed because of it
    first = next((r for r, word in failed.items() if word.culprit == r), min(failed))
    if isinstance(cause, RendezvousError) and first == rank:
        raise cause
    reason, culprit = failed[first].failure, failed[first].culprit
    raise RankUnableError(backend, reason, rank, culprit=culprit) from cause


def on_all(
    store: Store, rank: int, size: int, clock: Clock, make: Callable[[], R], backend: str
) -> R:
    """``make()``, if it succeeds on every rank; an error on every rank if it does not."""
    made: list[R] = []

    def note() -> list[int]:
        made.append(make())
        return []

    agree(backend, store, "all", rank, size, clock, note)
    return made[0]


class SilentError(ConnectionError):
    """A rank that had arrived did not answer."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} of this host was there and has not answered")
        self.rank = rank


def _blamed(error: Exception, rank: int) -> int:
    if isinstance(error, RankUnableError):
        return error.culprit
    return error.rank if isinstance(error, SilentError) else rank


def told(error: Exception) -> str:
    """What went wrong on this rank, as text for the other ranks."""
    if isinstance(error, OSError) and error.errno in _LIMITS:
        return f"{error.strerror} ({_LIMITS[error.errno]})"
    if isinstance(error, EngineUnavailableError):
        return error.reason
    return str(error) or type(error).__name__


_LIMITS = {
    errno.EMFILE: "the process has too many open files: ulimit -n",
    errno.ENFILE: "the host has too many open files",
    errno.EFBIG: "the file is larger than this process may create: ulimit -f",
    errno.ENOMEM: "out of memory or address space: ulimit -v",
}


def agree_on(
    store: Store, rank: int, size: int, timeout: timedelta, facts: Mapping[str, str]
) -> None:
    """Make sure that all ranks have the same ``facts``; an error on every rank if they have not."""
    put(store, f"facts/{rank}", dict(facts))
    keys = [f"facts/{r}" for r in range(size)]
    found = fetch(store, keys, rank, Clock(timeout))
    told_by = [msgspec.msgpack.decode(data, type=dict[str, str]) for data in found]
    for what in sorted(set().union(*told_by)):
        compare(what, {r: told.get(what, "nothing") for r, told in enumerate(told_by)}, rank)
