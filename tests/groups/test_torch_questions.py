"""What torch asks of a group of ours that it opened or was given, on every version."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from paceline import Group
from paceline.errors import (
    CollectiveArgumentError,
    NotANumberError,
    RendezvousError,
    UnsupportedError,
)
from paceline.testing import Meeting, run_ranks, spawn_ranks

SOON = timedelta(seconds=0.2)


def open_in_torch(meeting: Meeting) -> Group:
    dist.init_process_group(
        "paceline", store=meeting.store(), rank=meeting.rank, world_size=meeting.size
    )
    group = dist.group.WORLD
    assert isinstance(group, Group)
    return group


# -- init_process_group -------------------------------------------------------------------------


def ask_everything(meeting: Meeting) -> list[float]:
    group = open_in_torch(meeting)
    asked = [name for name in dir(group) if name.startswith("supports_")]
    answers = {name: getattr(group, name) for name in asked if name != "supports_tensor_alloc"}
    assert answers.pop("supports_reconfigure")
    assert not any(answers.values())
    assert group.get_backend(torch.device("cpu")) is group
    c10d._add_ephemeral_timeout_for_all_pgs(timedelta(seconds=1))
    for register in (group.register_pre_hook, group.register_abort_hook):
        with pytest.raises(UnsupportedError, match=r"Group\.register_hooks"):
            register(7, print)
    half = dist.new_group([0])
    tensor = torch.full((2,), float(meeting.rank + 1))
    dist.all_reduce(tensor)
    if meeting.rank == 0:
        dist.all_reduce(tensor, group=half)
    # Attached to every group since 2.15, and nothing of ours passes where it listens.
    assert getattr(c10d._world, "pg_flight_recorder_hooks", {}) == {}
    dist.destroy_process_group()
    return tensor.tolist()


def test_torch_opens_a_group_and_gets_an_answer_to_every_question() -> None:
    assert spawn_ranks(2, ask_everything) == [[3.0, 3.0]] * 2


# -- gather_single --------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(6,), (3, 2)])
def test_the_root_has_all_tensors_in_one(shape: tuple[int, ...]) -> None:
    def gather(group: Group) -> Any:
        output = torch.zeros(shape) if group.rank() == 1 else None
        group.gather_single(output, torch.full((2,), float(group.rank())), 1)
        return output if output is None else output.view(-1).tolist()

    assert run_ranks(3, gather) == [None, [0.0, 0.0, 1.0, 1.0, 2.0, 2.0], None]


def test_an_output_of_another_size_is_refused_before_anything_is_sent() -> None:
    def gather(group: Group) -> None:
        if group.rank() == 0:
            for output in (None, torch.zeros(5), torch.zeros(2, 2).t()):
                with pytest.raises(CollectiveArgumentError, match="gather_single: output"):
                    group.gather_single(output, torch.zeros(2))
        output = torch.zeros(4)
        group.gather_single(output, torch.ones(2))
        assert group.rank() or output.sum() == 4

    run_ranks(2, gather)


def gather_as_torch_does(meeting: Meeting) -> Any:
    open_in_torch(meeting)
    output = torch.zeros(2, 2) if meeting.rank == 0 else None
    dist.gather_single(torch.full((2,), float(meeting.rank)), output)
    work = dist.gather_single(torch.ones(2), output, async_op=True)
    work.wait()
    dist.destroy_process_group()
    return None if output is None else output.sum().item()


@pytest.mark.skipif(not hasattr(dist, "gather_single"), reason="torch has it since 2.14")
def test_torchs_gather_single_takes_a_group_of_ours() -> None:
    assert spawn_ranks(2, gather_as_torch_does) == [4.0, None]


# -- TORCH_DIST_NAN_CHECK -------------------------------------------------------------------------


def give_nan(meeting: Meeting) -> str:
    os.environ["TORCH_DIST_NAN_CHECK"] = "1"
    group = open_in_torch(meeting)
    nan = torch.tensor([1.0, float("nan"), 2.0])
    clean = torch.zeros(3)
    dist.broadcast(clean if meeting.rank == 0 else nan.clone(), 0)  # only what the root gives
    dist.all_reduce(torch.arange(3))
    with pytest.raises(NotANumberError) as caught:
        dist.all_reduce(nan)
    dist.all_reduce(clean)  # nobody had begun the other
    part = group.split([1, 0])
    assert part is not None
    with pytest.raises(NotANumberError):
        part.all_reduce(nan)
    dist.destroy_process_group()
    return str(caught.value)


def test_torchs_check_for_nan_holds_for_our_groups_and_those_split_from_them() -> None:
    for rank, said in enumerate(spawn_ranks(2, give_nan)):
        assert f"rank {rank}: all_reduce: NaN found in input tensor, in 1 of 3 elements" in said


# -- reconfigure by torch's names -----------------------------------------------------------------


def options(handles: object, uuid: int = 1, timeout: timedelta | None = None) -> Any:
    """torch's ReconfigureOptions; before 2.14 what has its fields."""
    fields = {"uuid": uuid, "handles": handles, "timeout": timeout}
    if not hasattr(c10d, "ReconfigureOptions"):
        return SimpleNamespace(**fields)
    made = c10d.ReconfigureOptions()
    for name, value in fields.items():
        if value is not None:
            setattr(made, name, value)
    return made


def handles_of(group: Group) -> list[str]:
    return [str(handle) for handle in group.all_gather_object(group.get_reconfigure_handle())]


def test_handles_give_the_new_order_and_a_set_keeps_the_present_one() -> None:
    def go_on(group: Group) -> tuple[int, int, float]:
        zero, _, two = handles_of(group)
        if group.rank() == 1:
            return (-1, -1, -1.0)
        work = group.reconfigure(options([two, zero]))
        assert work.is_completed()
        first = group.rank()
        group.reconfigure(options({zero, two}, uuid=2))
        tensor = torch.ones(1)
        group.all_reduce(tensor)
        return first, group.rank(), tensor.item()

    assert run_ranks(3, go_on) == [(1, 1, 2.0), (-1, -1, -1.0), (0, 0, 2.0)]


def test_handles_of_other_groups_are_refused_and_another_uuid_meets_nobody() -> None:
    def go_on(group: Group) -> None:
        handles = handles_of(group)
        with pytest.raises(CollectiveArgumentError, match="handles of its 2 ranks"):
            group.reconfigure(options([*handles, "gloo:2:-1:2:"]))
        with pytest.raises(RendezvousError):
            group.reconfigure(options(handles, uuid=group.rank(), timeout=SOON))
        group.reconfigure(options(handles, uuid=7))
        group.barrier()

    run_ranks(2, go_on)


def reconfigure_in_torch(meeting: Meeting) -> float:
    group = open_in_torch(meeting)
    assert dist._supports_reconfigure()
    handles: list[Any] = [None] * meeting.size
    dist.all_gather_object(handles, dist._get_reconfigure_handle())
    dist._reconfigure(uuid=1, handles=handles[::-1]).wait()
    assert group.rank() == meeting.size - 1 - meeting.rank
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor.item()


@pytest.mark.skipif(not hasattr(dist, "_reconfigure"), reason="torch has it since 2.14")
def test_torchs_own_functions_reconfigure_a_group_of_ours() -> None:
    assert spawn_ranks(2, reconfigure_in_torch) == [2.0, 2.0]


# -- torchcomms -----------------------------------------------------------------------------------


def stand_in_for_torchcomms() -> list[str]:
    """Modules that torch takes for torchcomms; returns the backends that it was asked to open."""
    opened: list[str] = []

    def opens(backend: str, *args: Any, **options: Any) -> None:
        opened.append(backend)
        raise RuntimeError("torchcomms was asked")

    package, comms = ModuleType("torchcomms"), ModuleType("torchcomms._comms")
    hooks = ModuleType("torchcomms.hooks")
    package.is_backend_built = {"gloo", "nccl"}.__contains__
    package.new_comm = opens
    comms._BackendWrapper = type("_BackendWrapper", (), {})
    comms._is_backend_registered = lambda name: False
    hooks.FlightRecorderHook = object
    sys.modules |= {m.__name__: m for m in (package, comms, hooks)}
    return opened


def use_with_torchcomms(meeting: Meeting) -> list[str]:
    # A rank has imported torch long before it comes here: what torch looked for then is put in.
    opened = stand_in_for_torchcomms()
    from torch.distributed import config

    c10d._TORCHCOMM_AVAILABLE = True
    c10d._torchcomms_is_backend_built = sys.modules["torchcomms"].is_backend_built
    c10d._BackendWrapper = sys.modules["torchcomms._comms"]._BackendWrapper
    c10d.new_comm = sys.modules["torchcomms"].new_comm
    with config.patch(use_torchcomms=True):
        assert c10d._use_torchcomms_enabled()
        open_in_torch(meeting)
        gathered = [torch.empty(1) for _ in range(meeting.size)] if meeting.rank == 0 else None
        dist.gather(torch.full((1,), float(meeting.rank)), gathered)
        assert gathered is None or [t.item() for t in gathered] == [0.0, 1.0]
        part = dist.split_group(split_ranks=[[1, 0]])
        assert isinstance(part, Group)
        dist.all_reduce(torch.ones(1), group=part)
        other = dist.new_group([0, 1])
        dist.barrier(other)
        dist.destroy_process_group(other)
        with pytest.raises(RuntimeError, match="torchcomms was asked"):
            dist.new_group([0, 1], backend="gloo")  # the stand-in stands where torch looks
        dist.destroy_process_group()
    return opened


@pytest.mark.skipif(
    not hasattr(c10d, "_torchcomms_handles_backend"),
    reason="to 2.13 torchcomms, when on, take every group that torch opens",
)
def test_torchcomms_leave_our_groups_alone() -> None:
    assert spawn_ranks(2, use_with_torchcomms) == [["gloo"]] * 2
