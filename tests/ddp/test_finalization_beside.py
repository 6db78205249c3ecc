"""Averages that the program waits for itself, beside failures, Join, optimizers and copies."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from paceline import DistributedDataParallel as DDP
from paceline import Join, replicate
from paceline.errors import PeerError, PeerFailedError, UnfinalizedError
from paceline.groups import Group
from paceline.optim import InBackward, ZeroRedundancyOptimizer
from paceline.testing import Meeting, run_ranks, spawn_ranks
from tests.ddp.by_hand import backward, expected, in_two, loss, manual, model, slow_average
from tests.ddp.toys import TINY, assert_same, data, grads, weights
from tests.marks import needs_shm

NAME = "require_manual_backward_finalization"

# Failures.


def test_an_exception_between_leaves_the_averages_to_be_had() -> None:
    def one_rank(group: Group) -> None:
        ddp = manual(group)
        with pytest.raises(ArithmeticError):
            backward(ddp, group)
            raise ArithmeticError("in the other work")
        with pytest.raises(UnfinalizedError):
            backward(ddp, group, 1)
        ddp.finalize_backward()
        assert_same(grads(ddp), expected())

    in_two(one_rank)


def failing(group, bucket):
    group.all_reduce(bucket.buffer())
    raise ArithmeticError("the hook")


def test_a_hook_that_fails_on_one_rank_is_raised_by_finalize_backward_on_all() -> None:
    def one_rank(group: Group) -> None:
        ddp = manual(group)
        ddp.register_comm_hook(group, failing if group.rank() == 1 else slow_average)
        backward(ddp, group)
        with pytest.raises(ArithmeticError if group.rank() == 1 else PeerError, match="the hook"):
            ddp.finalize_backward()
        assert all(p.grad is None for p in ddp.parameters())

    in_two(one_rank)


def test_a_forward_that_fails_elsewhere_is_heard_of_in_finalize_backward() -> None:
    def one_rank(group: Group) -> None:
        ddp = manual(group)
        backward(ddp, group)
        ddp.finalize_backward()
        ddp.zero_grad()
        if group.rank() == 1:
            with pytest.raises(RuntimeError, match="mat1"):
                ddp(data(4, 7))
        else:
            backward(ddp, group)
            with pytest.raises(PeerError, match="\nrank 1: "):
                ddp.finalize_backward()
        ddp.zero_grad()
        backward(ddp, group, 2)
        ddp.finalize_backward()
        assert_same(grads(ddp), expected(2))

    in_two(one_rank)


# With what else there is.


def test_inside_join_ranks_with_unequal_inputs_finalize_each_pass() -> None:
    def one_rank(group: Group) -> dict[str, Tensor]:
        ddp = manual(group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with Join([ddp]):
            for step in range(2 + 2 * group.rank()):
                backward(ddp, group, step)
                ddp.finalize_backward()
                optimizer.step()
                optimizer.zero_grad()
        return weights(ddp)

    one, two = run_ranks(2, one_rank)
    assert_same(one, two, rtol=0, atol=0)


def test_a_rank_that_runs_out_without_finalizing_is_refused_and_the_others_hear_of_it() -> None:
    def one_rank(group: Group) -> str:
        ddp = manual(group)
        try:
            with ddp.join():
                for step in range(1 + 2 * group.rank()):
                    backward(ddp, group, step)
                    if group.rank() == 1:
                        ddp.finalize_backward()
                        ddp.zero_grad()
        except (UnfinalizedError, PeerFailedError) as error:
            return type(error).__name__
        return "nothing"

    assert run_ranks(2, one_rank) == ["UnfinalizedError", "PeerFailedError"]


def test_an_optimizer_in_backward_steps_in_finalize_backward() -> None:
    def one_rank(group: Group) -> None:
        ddp = manual(group)
        optimizer = InBackward(ddp, torch.optim.SGD, lr=0.1)
        backward(ddp, group)
        assert optimizer.steps == 0
        ddp.finalize_backward()
        assert optimizer.steps == 1

    in_two(one_rank)


def test_a_sharded_optimizer_has_its_part_after_finalize_backward() -> None:
    def train(group: Group, by_hand: bool) -> dict[str, Tensor]:
        ddp = DDP(model(), process_group=group)
        ddp.require_manual_backward_finalization = by_hand
        optimizer = ZeroRedundancyOptimizer(
            ddp.parameters(), torch.optim.SGD, ddp=ddp, process_group=group, lr=0.1
        )
        for step in range(3):
            backward(ddp, group, step)
            if by_hand:
                with pytest.raises(UnfinalizedError):
                    optimizer.step()
                ddp.finalize_backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights(ddp)

    def one_rank(group: Group) -> None:
        assert_same(train(group, True), train(group, False), rtol=0, atol=0)

    in_two(one_rank)


def test_freezing_a_layer_keeps_who_waits() -> None:
    def one_rank(group: Group) -> None:
        ddp = manual(group)
        backward(ddp, group)
        ddp.finalize_backward()
        ddp.module[0].weight.requires_grad_(False)
        ddp.zero_grad()
        backward(ddp, group)
        with pytest.raises(UnfinalizedError):
            torch.optim.SGD(ddp.parameters(), lr=1).step()
        ddp.finalize_backward()
        assert ddp.module[0].bias.grad is not None

    in_two(one_rank)


def test_a_replicated_module_finalizes_through_its_wrapper() -> None:
    def one_rank(group: Group) -> None:
        module = replicate(model(), process_group=group)
        wrapper = replicate.state(module).wrapper
        wrapper.require_manual_backward_finalization = True
        for step in range(3):
            module.zero_grad()
            loss(module, group.rank(), step).backward()
            assert all(p.grad is None for p in module.parameters())
            wrapper.finalize_backward()
            assert_same(grads(module), expected(step))

    in_two(one_rank)


def test_a_copy_waits_by_hand_as_the_original() -> None:
    def one_rank(group: Group) -> None:
        twin = copy.deepcopy(manual(group))
        assert twin.require_manual_backward_finalization
        backward(twin, group)
        twin.finalize_backward()
        assert_same(grads(twin), expected())

    in_two(one_rank)


def in_processes(meeting: Meeting) -> None:
    group = meeting.new_group("shm")
    ddp = manual(group, bucket_cap_mb=TINY)
    for step in range(4):
        ddp.zero_grad()
        backward(ddp, group, step)
        torch.ones(64, 64) @ torch.ones(64, 64)
        ddp.finalize_backward()
        assert_same(grads(ddp), expected(step))
    group.shutdown()
    store = dist.PrefixStore("torch", meeting.store())
    dist.init_process_group("gloo", store=store, rank=meeting.rank, world_size=meeting.size)
    original = DDP(model())
    original.require_manual_backward_finalization = True
    twin = pickle.loads(pickle.dumps(original))
    assert twin.require_manual_backward_finalization
    loss(twin, meeting.rank).backward()
    twin.finalize_backward()
    assert_same(grads(twin), expected())
    dist.destroy_process_group()


@needs_shm
def test_it_works_over_shared_memory_and_over_torchs_group_after_a_pickle() -> None:
    spawn_ranks(2, in_processes)


@pytest.mark.skipif(not hasattr(TorchDDP, "finalize_backward"), reason="torch 2.15 has it")
def test_the_names_are_torchs() -> None:
    names = {n for n in vars(TorchDDP) if "finaliz" in n}
    assert NAME in names
    assert names <= set(dir(DDP))
