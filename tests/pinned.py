"""Ranks on unequal cores: ``make test-pinned`` runs all tests so.

Even ranks may run on every core, odd ones on a single core each. Whatever a rank derives from its
cores (windows, threads, how it waits) then differs between ranks, and must not matter.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline import testing

_spawn_ranks = testing.spawn_ranks


def cores_of(rank: int, cores: list[int]) -> set[int]:
    """Where a rank may run, of the ``cores`` that there are."""
    return {cores[rank % len(cores)]} if rank % 2 else set(cores)


@dataclass(frozen=True, repr=False)
class Pinned:
    """A rank's function, on that rank's cores."""

    function: Callable[..., Any]

    def __call__(self, meeting: testing.Meeting, *args: object) -> Any:
        os.sched_setaffinity(0, cores_of(meeting.rank, sorted(os.sched_getaffinity(0))))
        return self.function(meeting, *args)

    def __repr__(self) -> str:
        return repr(self.function)  # as errors name it


def spawn_pinned_ranks(n: int, fn: Callable[..., Any], *args: object, **options: Any) -> list[Any]:
    """:func:`paceline.testing.spawn_ranks` with ranks on unequal cores."""
    return _spawn_ranks(n, Pinned(fn), *args, **options)


def pin_all_ranks() -> None:
    """Let test modules that are imported from now on have pinned ranks."""
    testing.spawn_ranks = spawn_pinned_ranks  # type: ignore[assignment]
