"""new_group, the table of backends, the current group: torch's _dist2 to the letter, and more."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _current_process_group

import paceline
from paceline import Group, current_process_group, new_group, process_group, register_backend
from paceline.errors import (
    BackendTakenError,
    EngineUnavailableError,
    RendezvousError,
    UnexpectedOptionError,
    UnknownBackendError,
    UnknownOptionError,
)
from paceline.groups import backends, capabilities
from paceline.groups.engines import choice, offers
from paceline.groups.meetings import Meetings
from paceline.testing import Meeting, spawn_ranks
from tests.marks import needs_shm

SECOND = timedelta(seconds=1)


def lonely(backend: str = "fake", **options: object) -> Group:
    return new_group(backend, store=dist.HashStore(), rank=0, world_size=1, **options)  # type: ignore[arg-type]


@pytest.fixture
def clean_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_backends", dict(backends._backends))


# -- torch's _dist2, to the letter --------------------------------------------------------------


@pytest.mark.usefixtures("clean_table")
def test_a_name_registered_twice_is_a_value_error() -> None:
    register_backend("mine", lambda *args, **kwargs: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match="Backend mine already registered"):
        register_backend("mine", lambda *args, **kwargs: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(BackendTakenError):
        register_backend("gloo", lambda *args, **kwargs: None)  # type: ignore[arg-type, return-value]


def test_an_unknown_name_is_a_value_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="Backend nosuch not registered") as caught:
        new_group("nosuch", SECOND, "cpu")
    assert isinstance(caught.value, UnknownBackendError)
    assert "shm" in caught.value.known


def test_a_variable_that_names_no_backend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_BACKEND", "glue")
    with pytest.raises(UnknownBackendError, match=r"PACELINE_BACKEND is 'glue'.* auto, gloo, "):
        lonely("auto")


def test_gloo_refuses_unexpected_options() -> None:
    with pytest.raises(AssertionError, match="received unexpected kwargs"):
        lonely("gloo", mystery=1)


def test_nccl_refuses_an_unknown_option_with_a_key_error() -> None:
    if not dist.is_nccl_available():
        pytest.skip("this build of torch has no NCCL, so its options cannot be asked")
    from paceline.groups.engines.nccl import open_nccl

    with pytest.raises(KeyError, match="Unknown option mystery") as caught:
        open_nccl("nccl", dist.HashStore(), 0, 1, SECOND, torch.device("cuda", 0), mystery=1)
    assert isinstance(caught.value, UnknownOptionError)


@pytest.mark.usefixtures("clean_table")
def test_a_factory_gets_what_the_protocol_says_and_its_group_comes_back() -> None:
    seen: dict[str, object] = {}

    def make(store, rank, world_size, timeout, device, **kwargs):  # type: ignore[no-untyped-def]
        seen.update(locals())
        return dist.ProcessGroup(rank, world_size)

    register_backend("mine", make)
    group = new_group(
        "mine", SECOND, "cpu", store=dist.HashStore(), rank=0, world_size=1, colour="red"
    )
    assert isinstance(group, dist.ProcessGroup)
    assert (seen["rank"], seen["world_size"], seen["timeout"]) == (0, 1, SECOND)
    assert seen["device"] == torch.device("cpu")
    assert seen["kwargs"] == {"colour": "red"}


def test_the_names_of_dist2_are_all_here() -> None:
    _dist2 = pytest.importorskip("torch.distributed._dist2", reason="2.14 took it away")
    for name in _dist2.__all__:
        assert hasattr(paceline, name), name
    assert paceline.ProcessGroup is _dist2.ProcessGroup
    assert paceline.ReduceOp is _dist2.ReduceOp
    assert paceline.Store is dist.Store


# -- the current group --------------------------------------------------------------------------


def test_the_current_group_nests_is_seen_by_torch_and_belongs_to_the_thread() -> None:
    found = importlib.util.find_spec("torch.distributed._dist2")  # 2.14 took it away
    dist2 = found and importlib.import_module(found.name)
    outer, inner = lonely(), lonely()
    elsewhere: list[object] = []
    before = current_process_group()
    with process_group(outer):
        assert current_process_group() is outer
        with process_group(inner):
            assert current_process_group() is inner
            assert _current_process_group() is inner
            if dist2 is not None:
                assert dist2.current_process_group() is inner
            thread = threading.Thread(target=lambda: elsewhere.append(current_process_group()))
            thread.start()
            thread.join()
        assert current_process_group() is outer
    assert current_process_group() is before
    assert elsewhere == [None]


def test_the_current_group_is_restored_after_an_exception() -> None:
    before = current_process_group()
    with pytest.raises(KeyError), process_group(lonely()):
        raise KeyError
    assert current_process_group() is before


# -- meeting ------------------------------------------------------------------------------------


def sum_of_ranks(group: Group) -> float:
    total = torch.tensor(float(group.rank()))
    group.all_reduce(total)
    group.shutdown()
    return total.item()


def meet_by(meeting: Meeting, how: str, path: str) -> float:
    place = {"rank": meeting.rank, "world_size": meeting.size}
    if how == "env":
        return sum_of_ranks(new_group("shm"))
    if how == "file":
        return sum_of_ranks(new_group("shm", init_method=f"file://{path}", **place))
    if how == "tcp":
        import os

        port = os.environ["MASTER_PORT"]
        return sum_of_ranks(new_group("shm", init_method=f"tcp://127.0.0.1:{port}", **place))
    return sum_of_ranks(new_group("shm", store=meeting.store(), **place))


@pytest.mark.parametrize("how", ["env", "tcp", "file", "store"])
def test_ranks_meet_through(how: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("meet") / "store"
    assert spawn_ranks(3, meet_by, how, str(path)) == [3.0, 3.0, 3.0]


def open_several(meeting: Meeting) -> tuple[float, float, float, tuple[int, ...]]:
    store = meeting.store()
    place = {"store": store, "rank": meeting.rank, "world_size": meeting.size}
    whole = new_group("shm", **place)
    again = new_group("gloo", **place)
    mine = [2, 0] if meeting.rank in (0, 2) else [1, 3]
    part = new_group("shm", ranks=mine, **place)
    members = part.members
    assert part.rank() == mine.index(meeting.rank)
    return sum_of_ranks(whole), sum_of_ranks(again), sum_of_ranks(part), members


def test_one_store_serves_several_worlds_and_parts_of_them() -> None:
    results = spawn_ranks(4, open_several)
    assert [r[:3] for r in results] == [(6.0, 6.0, 1.0)] * 4
    assert [r[3] for r in results] == [(2, 0), (1, 3), (2, 0), (1, 3)]


def wait_for_a_rank_that_never_comes(meeting: Meeting) -> str:
    if meeting.rank == 1:
        return ""
    store, enter = meeting.store(), Meetings._enter

    def enter_and_meet(meetings: Meetings, *given: Any) -> int:
        before = enter(meetings, *given)
        store.set(f"{meeting.rank} is here", "")
        store.wait(["0 is here", "2 is here"])  # a process may start late
        return before

    Meetings._enter = enter_and_meet  # type: ignore[method-assign]
    with pytest.raises(RendezvousError) as caught:
        meeting.new_group("shm", timeout=timedelta(seconds=5))
    return str(caught.value)


def test_a_rank_that_never_comes_is_named() -> None:
    texts = spawn_ranks(3, wait_for_a_rank_that_never_comes)
    assert "after 5 s no sign of rank 1. " in texts[0]
    assert "after 5 s no sign of rank 1. " in texts[2], "rank 0 had come, though it left first"


def test_bad_places_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    with pytest.raises(RendezvousError, match="rank= and world_size="):
        new_group("fake", store=store)
    with pytest.raises(RendezvousError, match="rank 3 is not below the world size 2"):
        new_group("fake", store=store, rank=3, world_size=2)
    with pytest.raises(RendezvousError, match="not among the different ranks"):
        new_group("fake", store=store, rank=0, world_size=2, ranks=[1])
    with pytest.raises(TypeError, match=r"datetime\.timedelta"):
        new_group("fake", 5, store=store, rank=0, world_size=1)  # type: ignore[arg-type]
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RendezvousError, match="MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE"):
        new_group("fake")


# -- backends of others, options, what is here --------------------------------------------------


@pytest.mark.usefixtures("clean_table")
def test_a_third_partys_backend_is_found_by_its_entry_point(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = importlib.metadata.EntryPoint(
        "theirs", "tests.groups.test_factory:their_factory", backends.ENTRY_POINTS
    )

    def entry_points(*, group: str, name: str | None = None) -> list[importlib.metadata.EntryPoint]:
        return [entry] if group == backends.ENTRY_POINTS and name in (None, "theirs") else []

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    assert capabilities()["theirs"].available
    assert lonely("theirs").size() == 1


def their_factory(store, rank, world_size, timeout, device, **kwargs):  # type: ignore[no-untyped-def]
    return backends._backends["fake"](store, rank, world_size, timeout, device)


@pytest.mark.parametrize("backend", ["shm", "fake", "threads", "hybrid"])
def test_our_backends_refuse_options_they_do_not_read(backend: str) -> None:
    with pytest.raises(UnexpectedOptionError, match="mystery"):
        lonely(backend, mystery=1)


@needs_shm
def test_auto_passes_options_on_and_refuses_those_of_another_backend() -> None:
    lonely("auto", window=1 << 17).shutdown()
    with pytest.raises(UnexpectedOptionError):
        lonely("auto", mystery=1)


@needs_shm
def test_capabilities_say_why_a_backend_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    found = capabilities()
    assert found["gloo"].available
    assert found["shm"].available, found["shm"].reason
    if not torch.cuda.is_available():
        assert not found["nccl"].available
        assert found["nccl"].reason
    monkeypatch.setattr(offers, "unavailable", lambda: "no C compiler was there")
    found = capabilities()
    assert not found["shm"].available
    assert "no C compiler" in found["shm"].reason
    assert "picks gloo" in found["auto"].reason


def choose(meeting: Meeting, broken_rank: int | None) -> str:
    if meeting.rank == broken_rank:
        choice.shortage = lambda size: "no C compiler was there"
    group = meeting.new_group("auto")
    sum_of_ranks(group)
    return group.backend


@needs_shm
def test_auto_picks_shm_on_one_host_and_gloo_when_a_rank_cannot() -> None:
    assert spawn_ranks(2, choose, None) == ["shm", "shm"]
    assert spawn_ranks(3, choose, 1) == ["gloo", "gloo", "gloo"]


def test_a_backend_for_another_device_is_refused() -> None:
    with pytest.raises(EngineUnavailableError, match="CPU tensors"):
        lonely("shm", device="cuda")
    if not torch.cuda.is_available():
        with pytest.raises(EngineUnavailableError, match="nccl"):
            lonely("nccl", device="cuda")
