"""The private names of torch's class that its tests, torchft and others use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline import DistributedDataParallel as DDP
from paceline import ddp as paceline_ddp
from paceline.groups import Group
from paceline.testing import Meeting, run_ranks, spawn_ranks
from tests.ddp.toys import (
    TINY,
    Branches,
    Grads,
    assert_same,
    count_calls,
    data,
    grads,
    mean_grads,
    stack,
)


def loss(model: Any, rank: int) -> Tensor:
    return model(data(4, 3, seed=rank)).square().sum()


# Logging.


def _log_under_both(meeting: Meeting) -> tuple[dict[str, Any], dict[str, Any]]:
    dist.init_process_group("gloo")
    logs = []
    for wrap in (DDP, nn.parallel.DistributedDataParallel):
        ddp = wrap(Branches(), bucket_cap_mb=TINY, gradient_as_bucket_view=True)
        for _ in range(3):
            ddp.zero_grad()
            loss(ddp, meeting.rank).backward()
        logs.append(ddp._get_ddp_logging_data())
    dist.destroy_process_group()
    return logs[0], logs[1]


def test_logging_data_has_torchs_keys_and_values() -> None:
    changing = {"master_port", "iteration", "num_buckets_reduced", "can_set_static_graph"}
    for ours, theirs in spawn_ranks(2, _log_under_both):
        assert set(theirs) <= set(ours) | {"comm_hook"}
        alike = [k for k in theirs if "time" not in k and k not in changing and k in ours]
        assert {k: ours[k] for k in alike} == {k: theirs[k] for k in alike}
        for key in ours:
            if key.endswith("_time"):
                assert ours[key] > 0
        assert ours["can_set_static_graph"] == 0, "Lightning would advise what gains nothing here"


def _log_under_a_backend_of_ones_own(meeting: Meeting) -> list[str]:
    dist.Backend.register_backend("custom", dist.ProcessGroupGloo, devices=["cpu"])
    dist.init_process_group("custom")
    wrapped = [kind(nn.Linear(2, 2)) for kind in (DDP, nn.parallel.DistributedDataParallel)]
    found = [ddp._get_ddp_logging_data()["backend_name"] for ddp in wrapped]
    found.append(dist.get_backend())
    dist.destroy_process_group()
    return found


def test_a_backend_that_somebody_registered_is_reported_under_its_name() -> None:
    assert spawn_ranks(1, _log_under_a_backend_of_ones_own) == [["custom"] * 3]


def test_logging_data_tells_what_is_set() -> None:
    def one_rank(group: Group) -> None:
        model = nn.Sequential(stack(3, 2), nn.Linear(2, 2))
        ddp = DDP(model, process_group=group, bucket_cap_mb=1, find_unused_parameters=True)
        found = ddp._get_ddp_logging_data()
        expected = {
            "world_size": 2,
            "rank": group.rank(),
            "module_name": "Sequential",
            "backend_name": "threads",
            "total_parameter_size_bytes": 8 * 8 + 6 * 4,
            "num_parameter_tensors": 4,
            "bucket_cap_bytes": 1024 * 1024,
            "find_unused_parameters": 1,
            "gradient_as_bucket_view": 0,
            "static_graph": 0,
            "has_error": 0,
            "has_sync_bn": 0,
            "iteration": 0,
            "dtypes": "double, float",
        }
        assert {key: found[key] for key in expected} == expected
        assert "error" not in found

    run_ranks(2, one_rank)


def test_logging_data_names_the_hook_and_the_error() -> None:
    def named_hook(state, bucket):
        raise ArithmeticError("no luck")

    def one_rank(group: Group) -> None:
        ddp = DDP(stack(3, 2), process_group=group)
        ddp.register_comm_hook(None, named_hook)
        with pytest.raises(ArithmeticError):
            loss(ddp, 0).backward()
        found = ddp._get_ddp_logging_data()
        assert found["comm_hook"].endswith("named_hook")
        assert (found["has_error"], found["error"]) == (1, "no luck")

    run_ranks(2, one_rank)


def test_times_are_sampled_at_the_rate_that_was_set() -> None:
    def one_rank(group: Group) -> list[int]:
        ddp = DDP(stack(3, 2), process_group=group)
        ddp._set_ddp_runtime_logging_sample_rate(5)
        seen = []
        for _ in range(17):
            loss(ddp, group.rank()).backward()
            seen.append(ddp._get_ddp_logging_data()["iteration"])
        return seen

    assert run_ranks(2, one_rank)[0] == [*range(10), 10, 10, 10, 10, 10, 15, 15]


@pytest.mark.parametrize("rate", [0, -1])
def test_a_sample_rate_below_one_is_refused(rate: int) -> None:
    def one_rank(group: Group) -> None:
        ddp = DDP(stack(3, 2), process_group=group)
        with pytest.raises(ValueError, match="equal or greater than 1"):
            ddp._set_ddp_runtime_logging_sample_rate(rate)

    run_ranks(1, one_rank)


# Another group.


def passes(ddp: DDP, rank: int, count: int = 3) -> Grads:
    for _ in range(count):
        ddp.zero_grad()
        loss(ddp, rank).backward()
    return grads(ddp)


@pytest.mark.parametrize("cap", [None, TINY])
def test_a_group_of_others_may_follow(cap: float | None) -> None:
    def one_rank(group: Group) -> tuple[Grads, Grads]:
        pair = group.split([[0, 1], [2]])
        ddp = DDP(Branches(), process_group=group, bucket_cap_mb=cap)
        passes(ddp, group.rank())
        ddp._update_process_group(pair)
        small = passes(ddp, group.rank())
        ddp._update_process_group(group)
        return small, passes(ddp, group.rank())

    results = run_ranks(3, one_rank)
    everybody = mean_grads(Branches(), 3, loss)
    pair = mean_grads(Branches(), 2, loss)
    alone = mean_grads(Branches(), 1, lambda m, _: loss(m, 2))
    for rank, (small, large) in enumerate(results):
        assert_same(small, alone if rank == 2 else pair)
        assert_same(large, everybody)


@pytest.mark.parametrize("newcomer", [0, 1])
@pytest.mark.parametrize("cap", [None, TINY])
def test_members_may_have_had_other_buckets(newcomer: int, cap: float | None) -> None:
    """One rank comes from a group of its own, where it never made any, and went another way."""

    def one_rank(group: Group) -> Grads:
        rank = group.rank()
        home = group.split([[newcomer], [r for r in range(3) if r != newcomer]])
        ddp = DDP(Branches(), process_group=home, bucket_cap_mb=cap)
        for step in range(4 if rank == newcomer else 2):
            ddp.zero_grad()
            order = (2, 0) if rank == newcomer else (0, 1, 2)
            ddp(data(4, 3, seed=step), order).sum().backward()
        ddp._update_process_group(group)
        return passes(ddp, rank)

    for found in run_ranks(3, one_rank):
        assert_same(found, mean_grads(Branches(), 3, loss))


def test_gradients_gathered_before_are_averaged_in_the_next_group() -> None:
    def one_rank(group: Group) -> Grads:
        alone = group.split([[0], [1]])
        ddp = DDP(Branches(), process_group=alone)
        loss(ddp, group.rank()).backward()
        ddp._update_process_group(group)
        loss(ddp, group.rank() + 2).backward()
        return grads(ddp)

    expected = mean_grads(Branches(), 2, lambda m, rank: loss(m, rank) + loss(m, rank + 2))
    for found in run_ranks(2, one_rank):
        assert_same(found, expected)


def test_a_hook_goes_along_into_another_group() -> None:
    def one_rank(group: Group) -> Grads:
        alone = group.split([[0], [1]])
        ddp = DDP(Branches(), process_group=alone)
        ddp.register_comm_hook(None, averaging(ddp))
        passes(ddp, group.rank())
        ddp._update_process_group(group)
        return passes(ddp, group.rank())

    for found in run_ranks(2, one_rank):
        assert_same(found, mean_grads(Branches(), 2, loss))


def averaging(ddp: DDP) -> Any:
    return lambda state, bucket: ddp.reducer._run_allreduce_hook(bucket)


def _update_torch_groups(meeting: Meeting) -> tuple[Grads, Grads]:
    dist.init_process_group("gloo")
    pair, rest = dist.new_group([0, 1]), dist.new_group([2])
    ddp = DDP(Branches(), bucket_cap_mb=TINY)
    passes(ddp, meeting.rank)
    ddp._update_process_group(pair if meeting.rank < 2 else rest)
    small = passes(ddp, meeting.rank)
    ddp._update_process_group(dist.group.WORLD)
    large = passes(ddp, meeting.rank)
    dist.barrier()
    dist.destroy_process_group()
    return small, large


def test_torchs_groups_may_follow_each_other() -> None:
    results = spawn_ranks(3, _update_torch_groups)
    for rank, (small, large) in enumerate(results):
        assert_same(large, mean_grads(Branches(), 3, loss))
        if rank < 2:
            assert_same(small, mean_grads(Branches(), 2, loss))


# The reducer.


def test_without_its_hooks_a_wrapper_averages_no_more() -> None:
    def one_rank(group: Group) -> None:
        ddp = DDP(Branches(), process_group=group, bucket_cap_mb=TINY)
        passes(ddp, group.rank())
        ddp._remove_autograd_hooks()
        calls = count_calls(group)
        found = passes(ddp, group.rank())
        assert calls == []
        assert_same(found, mean_grads(Branches(), 1, lambda m, _: loss(m, group.rank())))

    run_ranks(2, one_rank)


def test_another_wrapper_may_take_the_model_over() -> None:
    def one_rank(group: Group) -> Grads:
        model = Branches()
        first = DDP(model, process_group=group)
        passes(first, group.rank())
        first._remove_autograd_hooks()
        second = DDP(model, process_group=group, bucket_cap_mb=TINY)
        return passes(second, group.rank())

    for found in run_ranks(2, one_rank):
        assert_same(found, mean_grads(Branches(), 2, loss))


def test_a_finished_reducer_passes_the_check() -> None:
    def one_rank(group: Group) -> None:
        ddp = DDP(Branches(), process_group=group)
        ddp._check_reducer_finalized()
        passes(ddp, group.rank())
        ddp._check_reducer_finalized()

    run_ranks(2, one_rank)


def test_a_strict_reducer_that_missed_parameters_fails_the_check() -> None:
    def one_rank(group: Group) -> None:
        ddp = DDP(Branches(), process_group=group)
        ddp(data(4, 3), (0,)).sum().backward()
        with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
            ddp._check_reducer_finalized()

    paceline_ddp.set_strict(True)
    try:
        run_ranks(2, one_rank)
    finally:
        paceline_ddp.set_strict(False)


def test_the_used_map_counts_ranks() -> None:
    def one_rank(group: Group) -> list[int]:
        ddp = DDP(Branches(), process_group=group)
        for _ in range(2):
            ddp.zero_grad()
            ddp(data(4, 3), (0, 1) if group.rank() else (0,)).sum().backward()
        return ddp.reducer._get_local_used_map().tolist()

    assert run_ranks(3, one_rank) == [[3, 3, 3, 3, 2, 2, 0, 0]] * 3


# Names of parameters.


def test_parameters_are_mapped_to_their_names() -> None:
    def one_rank(group: Group) -> None:
        model = Branches()
        model.first.bias.requires_grad_(False)
        DDP._set_params_and_buffers_to_ignore_for_model(model, ["others.0.bias"])
        ddp = DDP(model, process_group=group)
        trained, sparse = ddp._build_params_for_reducer()
        names = ddp._build_debug_param_to_name_mapping(trained)
        assert names == {
            0: "first.weight",
            1: "others.0.weight",
            2: "others.1.weight",
            3: "others.1.bias",
            4: "others.2.weight",
            5: "others.2.bias",
        }
        assert sparse == [False] * 6
        with pytest.raises(ValueError, match="not DDP parameters"):
            ddp._build_debug_param_to_name_mapping(trained[1:])

    run_ranks(1, one_rank)


def test_ignored_parameters_are_left_out_of_the_data_parallel_ones() -> None:
    model = Branches()
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["first.weight", "first.bias"])
    named = dict(DDP._get_data_parallel_params(model, named_params=True))
    assert list(named) == [n for n, _ in model.named_parameters() if not n.startswith("first")]
    assert list(DDP._get_data_parallel_params(model)) == list(named.values())
    assert model._ddp_params_and_buffers_to_ignore == ["first.weight", "first.bias"]


def test_torchs_class_reads_what_ours_marked() -> None:
    model = Branches()
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["first.weight"])
    theirs = nn.parallel.DistributedDataParallel._get_data_parallel_params(model)
    assert all(a is b for a, b in zip(theirs, DDP._get_data_parallel_params(model), strict=True))


def test_it_is_an_instance_of_torchs_class() -> None:
    def one_rank(group: Group) -> bool:
        ddp = DDP(stack(3, 2), process_group=group)
        return isinstance(ddp, nn.parallel.DistributedDataParallel)

    assert run_ranks(1, one_rank) == [True]


def test_no_sync_shows_in_torchs_attribute() -> None:
    def one_rank(group: Group) -> None:
        ddp = DDP(stack(3, 2), process_group=group)
        assert ddp.require_backward_grad_sync
        with ddp.no_sync():
            assert not ddp.require_backward_grad_sync
        assert ddp.require_backward_grad_sync

    run_ranks(1, one_rank)


def test_static_graphs_are_set_once_and_early() -> None:
    def one_rank(group: Group) -> None:
        ddp = DDP(Branches(), process_group=group)
        ddp._set_static_graph()
        assert ddp.static_graph
        with pytest.warns(UserWarning, match="no need to set it again"):
            ddp._set_static_graph()
        late = DDP(Branches(), process_group=group, init_sync=False)
        late.register_comm_hook(None, averaging(late))
        loss(late, 0).backward()
        with pytest.raises(RuntimeError, match="before training loop starts"):
            late._set_static_graph()

    run_ranks(1, one_rank)


def test_the_reducer_knows_whether_the_graph_was_static() -> None:
    def one_rank(group: Group) -> list[bool]:
        ddp = DDP(Branches(), process_group=group)
        found = []
        for order in [(0, 1, 2), (0, 1, 2), (0,)]:
            ddp.zero_grad()
            ddp(data(4, 3), order).sum().backward()
            found.append(ddp.reducer._ddp_graph_static())
        return found

    assert run_ranks(2, one_rank) == [[True, True, False]] * 2


def test_a_torch_tensor_type_of_gradients_is_kept() -> None:
    def one_rank(group: Group) -> None:
        ddp = DDP(stack(3, 2), process_group=group)
        passes(ddp, group.rank())
        assert all(type(p.grad) is torch.Tensor for p in ddp.parameters())

    run_ranks(2, one_rank)
