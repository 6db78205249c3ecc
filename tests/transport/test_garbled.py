"""A rank whose shared memory holds what no rank writes there is named, and nothing else happens."""

from __future__ import annotations

import ctypes
import os
import random
import subprocess
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from paceline import Group
from paceline._transport import clib, shm
from paceline._transport.clib import CallRecord
from paceline.errors import (
    GarbledMemoryError,
    GroupError,
    MismatchError,
    PacelineError,
    RankUnableError,
    RendezvousError,
)
from paceline.testing import Meeting, spawn_ranks
from tests.marks import needs_shm

pytestmark = needs_shm

_ALIGNED = 128  # places of the words in a Control: see shm_core.h
PROGRESS, FAULT, CALL = 0, 3 * _ALIGNED, 4 * _ALIGNED


def own_memory(group: Group) -> int:
    return int(group._engine.shm._resources.segment.address)


def calls_of(group: Group) -> ctypes.Array[CallRecord]:
    return (CallRecord * 2).from_address(own_memory(group) + CALL)


def word(
    group: Group, at: int, kind: type[ctypes._SimpleCData] = ctypes.c_uint64
) -> ctypes._SimpleCData:  # type: ignore[type-arg]
    return kind.from_address(own_memory(group) + at)


def claim(group: Group, **fields: int) -> None:
    """Say that this rank has come to the next operation with an all-reduce of shared memory."""
    sequence = (word(group, PROGRESS).value >> 24) + 1
    told = calls_of(group)[sequence & 1]
    usual = {"kind": 1, "dtype": 7, "reduce": 0, "root": -1, "count": 50_000, "tables": 0}
    heap = int(clib.load().pl_heap_at(group.size()))  # type: ignore[union-attr]
    for name, value in (usual | {"offset": heap + 1, "small": 0} | fields).items():
        setattr(told, name, value)
    word(group, PROGRESS).value = sequence << 24 | 1


def past_the_barrier(group: Group, meeting: Meeting) -> None:
    """Rank 1 goes on when rank 0 reads nothing of it any more."""
    group.barrier()
    if meeting.rank == 0:
        meeting.store().set("past", b"")
    else:
        meeting.store().wait(["past"])


LIES: dict[str, Callable[[Group], None]] = {
    "an offset far outside": lambda g: claim(g, offset=1 << 60),
    "an offset that wraps": lambda g: claim(g, offset=(1 << 64) - 1),
    "an offset into the control words": lambda g: claim(g, offset=1),
    "an offset between two elements": lambda g: claim(
        g,
        offset=int(clib.load().pl_heap_at(2)) + 3,  # type: ignore[union-attr]
    ),
    "an operation that does not exist": lambda g: claim(g, kind=77),
    "a count near the end of numbers": lambda g: claim(g, count=(1 << 64) - 1),
    "progress from the future": lambda g: setattr(word(g, PROGRESS), "value", 99 << 24),
    "a fault that does not exist": lambda g: setattr(word(g, FAULT, ctypes.c_int32), "value", -99),
}


def hear_a_lie(meeting: Meeting, lie: str) -> list[int]:
    group = meeting.new_group("shm", timeout=timedelta(seconds=20))
    past_the_barrier(group, meeting)
    tensor = group.allocate(50_000)
    if meeting.rank == 1:
        LIES[lie](group)
        meeting.store().wait(["heard"])
        os._exit(0)  # its engine has nothing true to say any more
    try:
        with pytest.raises(GarbledMemoryError) as caught:
            group.all_reduce(tensor)
    finally:
        meeting.store().set("heard", b"")
    assert "rank 1" in str(caught.value)
    return list(caught.value.ranks)


@pytest.mark.parametrize("lie", LIES)
def test_a_rank_is_named_that_tells(lie: str) -> None:
    assert spawn_ranks(2, hear_a_lie, lie, may_die=[1])[0] == [1]


def hear_an_unknown_type(meeting: Meeting) -> str:
    group = meeting.new_group("shm", timeout=timedelta(seconds=20))
    past_the_barrier(group, meeting)
    if meeting.rank == 1:
        claim(group, dtype=200, reduce=7)
        meeting.store().wait(["heard"])
        os._exit(0)
    try:
        with pytest.raises(MismatchError) as caught:
            group.all_reduce(group.allocate(50_000))
    finally:
        meeting.store().set("heard", b"")
    return str(caught.value)


def test_a_type_that_does_not_exist_is_told_as_such() -> None:
    told = spawn_ranks(2, hear_an_unknown_type, may_die=[1])[0]
    assert "unknown (200)" in told


def hear_noise(meeting: Meeting, seed: int) -> str:
    """Rank 1 scribbles over its own words; rank 0 ends with an error, or with what it asked for."""
    group = meeting.new_group("shm", timeout=timedelta(seconds=20))
    past_the_barrier(group, meeting)
    store = meeting.store()
    if meeting.rank == 1:
        source = random.Random(seed)
        odd = [0, 1, 77, 1 << 24, 1 << 31, 1 << 62, (1 << 64) - 1, 1 << 63]
        while not store.check(["heard"]):
            for _ in range(50):
                at = source.randrange(CALL // 8, (CALL + 2048) // 8) * 8
                word(group, at).value = source.choice(odd)
            word(group, PROGRESS).value = source.randrange(1, 6) << 24 | source.choice([1, 2])
        os._exit(0)
    try:
        for _ in range(3):
            group.all_reduce(group.allocate(50_000), timeout=0.2)
            group.all_gather([torch.empty(9), torch.empty(9)], torch.ones(9), timeout=0.2)
    except (GroupError, MismatchError) as error:
        return type(error).__name__
    finally:
        store.set("heard", b"")
    return "nothing noticed"


@pytest.mark.parametrize("seed", range(4))
def test_noise_in_shared_memory_crashes_nobody(seed: int) -> None:
    assert spawn_ranks(2, hear_noise, seed, may_die=[1])[0]


# -- memory that is not what was agreed on --------------------------------------------------------


def unsealed(size: int) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    return fd


def no_memory(size: int) -> int:
    return os.open("/dev/null", os.O_RDWR)


@pytest.mark.parametrize("make", [unsealed, no_memory])
def test_memory_is_refused_that_could_be_cut_off(make: Callable[[int], int]) -> None:
    fd = make(4096)
    with pytest.raises(RendezvousError, match="rank 3 gave"):
        shm.check_segment(fd, 4096, 3)
    os.close(fd)


def give_other_memory(meeting: Meeting) -> str:
    if meeting.rank == 1:

        class Unsealed(shm.Segment):
            def __init__(self, size: int, heap: int, nonce: bytes) -> None:
                super().__init__(size, heap, nonce)
                os.close(self.fd)
                self.fd = unsealed(self.bytes)

        shm.Segment = Unsealed  # type: ignore[misc]
    with pytest.raises(PacelineError) as caught:
        meeting.new_group("shm", timeout=timedelta(seconds=10))
    assert isinstance(caught.value, (RendezvousError, RankUnableError))
    return str(caught.value)


def test_unsealed_memory_of_a_rank_is_an_error_on_all() -> None:
    for told in spawn_ranks(2, give_other_memory):
        assert "what rank 1 gave as its memory is not" in told


def keep_it_whole(meeting: Meeting) -> None:
    with meeting.new_group("shm") as group:
        fd = group._engine.shm._resources.segment.fd
        for size in (0, 1 << 40):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)


def test_shared_memory_can_be_neither_cut_nor_grown() -> None:
    spawn_ranks(2, keep_it_whole)


# -- the engine itself, under sanitizers ----------------------------------------------------------


@pytest.mark.slow
def test_the_sanitizers_find_nothing_in_the_engine(tmp_path: Path) -> None:
    script = Path(__file__).with_name("engine") / "sanitize.sh"
    done = subprocess.run([script, tmp_path], capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("nothing found") + done.stdout.count("skipped") >= 1
