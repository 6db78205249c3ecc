"""What a group was opened with, and what the groups that come out of it are opened with."""

import dataclasses
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import Backend
from torch.distributed import HashStore, PrefixStore

from paceline import Group, new_group
from paceline.errors import RendezvousError, UnexpectedOptionError, UnknownBackendError
from paceline.groups import GroupOptions
from paceline.testing import Meeting, run_ranks, spawn_ranks
from tests.marks import needs_shm

MINUTE, HALF = timedelta(minutes=1), timedelta(seconds=30)
CPU = torch.device("cpu")


def test_options_are_frozen_and_checked() -> None:
    given: dict[str, object] = {"window": 4096}
    options = GroupOptions("shm", MINUTE, CPU, given)
    given["window"] = 0
    assert options.backend_options == {"window": 4096}
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.timeout = HALF  # type: ignore[misc]
    with pytest.raises(TypeError):
        options.backend_options["window"] = 1  # type: ignore[index]
    with pytest.raises(TypeError, match="timedelta"):
        GroupOptions("shm", 3.0, CPU)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="more than zero"):
        GroupOptions("shm", timedelta(0), CPU)


def test_others_replace_what_they_name() -> None:
    options = GroupOptions("shm", MINUTE, CPU, {"window": 4096})
    assert options.changed() == options
    assert options.changed(timeout=HALF).backend_options == {"window": 4096}
    assert options.changed(backend_options={"window": 8192}).backend_options == {"window": 8192}
    assert options.changed("gloo").backend_options == {}, "they were for another backend"


def test_options_of_torch_are_read() -> None:
    options = GroupOptions("gloo", MINUTE, CPU)
    assert options.taken_from(None) is options
    assert options.taken_from(Backend.Options("gloo", HALF)) == options.changed(timeout=HALF)
    assert options._timeout == MINUTE


def open_and_split(meeting: Meeting, backend: str, given: dict[str, Any]) -> None:
    with meeting.new_group(backend, timeout=MINUTE, **given) as group:
        assert group.options == GroupOptions(backend, MINUTE, CPU, given)
        carried = group.split([1, 0])
        assert carried is not None
        assert carried.options == group.options
        other = group.split([0, 1], timeout=HALF, backend="gloo")
        assert other is not None
        assert other.options == GroupOptions("gloo", HALF, CPU)
        assert (other.backend, other.timeout) == ("gloo", HALF)
        again = other.split([0, 1])
        assert again is not None
        assert again.options == other.options
        merged = carried.merge(PrefixStore("both", meeting.store()), 2)
        assert merged.options == group.options
        for made in (carried, other, again, merged):
            tensor = torch.ones(3)
            made.all_reduce(tensor)
            assert tensor.tolist() == [2.0] * 3
            made.shutdown()
        group.set_timeout(HALF)
        assert group.options.timeout == group.timeout == HALF
        group.reconfigure([1, 0], timeout=MINUTE)
        assert group.options.timeout == HALF, "that was for the meeting alone"
        group.barrier()


@pytest.mark.parametrize(
    ("backend", "given"),
    [
        pytest.param("shm", {"window": 1 << 16}, marks=needs_shm),
        pytest.param("hybrid", {"striped": True}, marks=needs_shm),
        ("gloo", {}),
        ("auto", {}),
    ],
)
def test_groups_hand_their_options_on_and_take_others(backend: str, given: dict[str, Any]) -> None:
    spawn_ranks(2, open_and_split, backend, given)


def test_groups_of_threads_do_so_too() -> None:
    def one_rank(group: Group) -> None:
        assert group.options.backend == "threads"
        part = group.split_group(
            [0, 1], HALF, Backend.Options("gloo", MINUTE), group_name="part", group_desc="for this"
        )
        assert part is not None
        assert part.options == group.options.changed(timeout=HALF)
        assert part._get_backend(CPU).options._timeout == HALF  # as torch asks
        assert (part.group_name, part.group_desc) == ("part", "for this")
        whole = part.split_group([1, 0], opts=GroupOptions("threads", MINUTE, CPU))
        assert whole is not None
        assert whole.timeout == MINUTE

    run_ranks(2, one_rank)


def test_a_merged_group_is_named_and_timed_as_torch_asks() -> None:
    store = HashStore()

    def one_rank(group: Group) -> None:
        alone = group.split_group([group.rank()])
        assert alone is not None
        merged = alone.merge_remote_group(store, 2, timedelta(seconds=40), "merged", "of two")
        assert merged._get_backend(CPU).options._timeout == timedelta(seconds=40)
        assert (merged.group_name, merged.group_desc, merged.size()) == ("merged", "of two", 2)

    run_ranks(2, one_rank)


def test_options_that_a_backend_does_not_know_are_refused_on_all_ranks() -> None:
    def one_rank(group: Group) -> None:
        with pytest.raises((UnexpectedOptionError, RendezvousError), match="window"):
            group.split([0, 1], window=4096)
        with pytest.raises((UnknownBackendError, RendezvousError), match="carrier pigeon"):
            group.split([0, 1], backend="carrier pigeon")
        group.barrier()

    run_ranks(2, one_rank)


def test_a_wrapped_group_says_what_it_was_given() -> None:
    group = new_group("fake", MINUTE, store=HashStore(), rank=0, world_size=4)
    assert group.options == GroupOptions("fake", MINUTE, CPU)
    assert Group.wrap(group) is group
