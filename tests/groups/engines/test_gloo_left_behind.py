"""What a gloo group leaves behind in a process when it is moved to other ranks: nothing."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch.distributed import HashStore, PrefixStore

from paceline import Group, new_group

MOVES = 20
SLACK = 12  # one group of three ranks more or less; each that stays would add eight descriptors


@pytest.fixture
def _uncollected() -> Iterator[None]:
    """No help from the garbage collector, which may come by much later."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.collect()


def _held() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def _use(group: Group, together: threading.Barrier) -> None:
    group.all_reduce(torch.ones(64))
    together.wait(60)  # to move frees the others' calls


def _fail(group: Group, together: threading.Barrier) -> None:
    """Rank 0 waits for the others, which do not come, until it is told to stop."""
    if group.rank() == 0:
        freed = threading.Timer(0.01, group.abort)
        freed.start()
        with pytest.raises(RuntimeError):
            group.all_reduce(torch.ones(64))
        freed.join()


@pytest.mark.usefixtures("_uncollected")
@pytest.mark.parametrize(("size", "before"), [(2, _use), (3, _use), (3, _fail)])
def test_a_gloo_group_that_moves_twenty_times_holds_what_it_held_at_first(
    size: int, before: Callable[[Group, threading.Barrier], None]
) -> None:
    home, together = HashStore(), threading.Barrier(size)
    held: list[tuple[int, int]] = []

    def one_rank(rank: int) -> None:
        store = PrefixStore("first", home)
        group = new_group("gloo", timedelta(minutes=1), store=store, rank=rank, world_size=size)
        for number in range(MOVES):
            before(group, together)
            group.move(PrefixStore(str(number), home), rank, range(size))
            together.wait(60)
            if rank == 0:
                held.append(_held())
            together.wait(60)
        group.shutdown()

    with ThreadPoolExecutor(size) as ranks:
        list(ranks.map(one_rank, range(size)))
    (descriptors, threads), (more_descriptors, more_threads) = held[1], held[-1]
    assert more_descriptors - descriptors <= SLACK
    assert more_threads - threads <= SLACK
