"""LocalSGD: alone for a while, then the mean."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.optim.lr_scheduler import StepLR
from torch.testing import assert_close as close

from paceline import DistributedDataParallel, Group, Join
from paceline._exchange import local_values
from paceline.errors import (
    AveragingArgumentError,
    AveragingTypeError,
    RoundsMismatchError,
    RoundsStateError,
)
from paceline.optim import LocalSGD
from paceline.optim.rounds.schedule import RoundSchedule
from paceline.testing import Meeting, run_ranks, spawn_ranks
from tests.ddp.ranks import batch, watch
from tests.optim.local import (
    assert_all_equal,
    assert_close,
    loss_of,
    plain,
    sgd,
    small,
    train,
    weights_of,
)

# -- pure --------------------------------------------------------------------------------------


def test_fragments_begin_one_after_another_and_the_last_one_ends_the_round() -> None:
    schedule = RoundSchedule(sync_every=7, fragments=3, overlap=2)
    starts = {step: schedule.starting(step) for step in range(15)}
    assert {s: f for s, f in starts.items() if f is not None} == {
        2: 0,
        4: 1,
        7: 2,
        9: 0,
        11: 1,
        14: 2,
    }
    ends = {step: schedule.ending(step) for step in range(15)}
    assert {s: f for s, f in ends.items() if f is not None} == {4: 0, 6: 1, 9: 2, 11: 0, 13: 1}


@pytest.mark.parametrize("sync_every", [1, 2, 5, 12])
def test_every_fragment_has_a_turn_of_its_own_in_every_round(sync_every: int) -> None:
    for fragments in range(1, sync_every + 1):
        schedule = RoundSchedule(sync_every, fragments)
        for start in range(1, 2 * sync_every):
            turns = [schedule.starting(step) for step in range(start, start + sync_every)]
            assert sorted(t for t in turns if t is not None) == list(range(fragments))


@pytest.mark.parametrize(
    "settings", [(0,), (-1,), (4, 0), (4, 5), (4, 1, 4), (4, 1, -1), (True,), (2.0,), ("4",)]
)
def test_a_schedule_that_cannot_be_kept_is_refused(settings: tuple[Any, ...]) -> None:
    with pytest.raises(AveragingArgumentError) as caught:
        RoundSchedule(*settings)
    assert isinstance(caught.value, ValueError)


# -- what it does --------------------------------------------------------------------------------


def reference(ranks: int, steps: int, every: int, lr: float = 0.1) -> dict[str, Tensor]:
    """Local SGD in one process: all ranks' models side by side, averaged by hand."""
    models = [plain() for _ in range(ranks)]
    opts = [sgd(model, lr) for model in models]
    for step in range(steps):
        for rank, (model, opt) in enumerate(zip(models, opts, strict=True)):
            train(model, opt, rank, range(step, step + 1))
        if (step + 1) % every == 0:
            for together in zip(*(m.parameters() for m in models), strict=True):
                mean = torch.stack([p.detach() for p in together]).mean(0)
                for p in together:
                    p.data.copy_(mean)
    return weights_of(models[0])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_are_alone_within_a_round_and_alike_after_it(ranks: int) -> None:
    def one_rank(group: Group) -> tuple[Any, Any, int]:
        model = plain(seed=group.rank())  # rank 0's is what all start from
        opt = LocalSGD(model, sgd(model), 4, process_group=group)
        train(model, opt, group.rank(), range(3))
        alone = weights_of(model)
        calls = watch(group)
        train(model, opt, group.rank(), range(3, 8))
        return alone, weights_of(model), len(calls)

    found = run_ranks(ranks, one_rank)
    if ranks > 1:
        assert not torch.equal(found[0][0]["0.weight"], found[1][0]["0.weight"])
    assert_all_equal([together for _, together, _ in found])
    assert_close(found[0][1], reference(ranks, 8, 4))
    assert [calls for _, _, calls in found] == [2] * ranks  # two rounds, one collective each


def test_a_round_of_one_step_with_sgd_is_distributed_data_parallel() -> None:
    def one_rank(group: Group) -> tuple[Any, Any]:
        model, wrapped = plain(), plain()
        train(model, LocalSGD(model, sgd(model), 1, process_group=group), group.rank(), range(6))
        ddp = DistributedDataParallel(wrapped, process_group=group)
        train(ddp, sgd(ddp), group.rank(), range(6))
        return weights_of(model), weights_of(wrapped)

    for ours, ddps in run_ranks(2, one_rank):
        assert_close(ours, ddps)


def test_buffers_are_averaged_and_whole_numbers_take_the_largest() -> None:
    def one_rank(group: Group) -> tuple[Any, Any]:
        model = small()
        opt = LocalSGD(model, sgd(model), 1, process_group=group)
        loss_of(model, group.rank(), 0).backward()  # which the batch norm has seen
        model.norm.num_batches_tracked += 5 * group.rank()
        before = weights_of(model)
        opt.step()
        return before, weights_of(model)

    (a, alike), (b, other) = run_ranks(2, one_rank)
    assert_all_equal([alike, other])
    close(alike["norm.running_mean"], (a["norm.running_mean"] + b["norm.running_mean"]) / 2)
    assert alike["norm.num_batches_tracked"] == 6


def test_small_buffers_give_the_same_numbers_as_one() -> None:
    def one_rank(group: Group, cap: float) -> tuple[Any, int]:
        model = small()
        opt = LocalSGD(model, sgd(model), 2, process_group=group, bucket_cap_mb=cap)
        calls = watch(group)
        train(model, opt, group.rank(), range(4))
        return weights_of(model), len(calls)

    one = run_ranks(2, lambda g: one_rank(g, 25))
    many = run_ranks(2, lambda g: one_rank(g, 1e-4))
    assert_all_equal([weights for weights, _ in [*one, *many]])
    assert one[0][1] == 4  # in each of two rounds: real numbers, whole numbers
    assert many[0][1] > 8


def test_half_precision_travels_in_float32() -> None:
    def one_rank(group: Group) -> Tensor:
        held = nn.Parameter(torch.full((3,), 40000.0, dtype=torch.float16))  # the sum overflows
        held.grad = torch.zeros_like(held)
        LocalSGD([held], torch.optim.SGD([held], 0.1), 1, process_group=group).step()
        return held.detach()

    for found in run_ranks(2, one_rank):
        assert torch.equal(found, torch.full((3,), 40000.0, dtype=torch.float16))


def test_sync_makes_ranks_alike_wherever_the_round_is() -> None:
    def one_rank(group: Group) -> list[Any]:
        model = plain()
        opt = LocalSGD(model, sgd(model), 100, process_group=group)
        train(model, opt, group.rank(), range(3))
        alone = weights_of(model)
        opt.sync()
        opt.sync()  # nothing has happened since
        return [alone, weights_of(model)]

    (a, alike), (b, other) = run_ranks(2, one_rank)
    assert_all_equal([alike, other])
    assert_close(alike, {name: (a[name] + b[name]) / 2 for name in a})


# -- weights -----------------------------------------------------------------------------------


def test_ranks_count_by_the_samples_of_all_their_steps() -> None:
    sizes = [[3, 5], [1, 1]]

    def one_rank(group: Group) -> list[Any]:
        model = plain()
        opt = LocalSGD(model, sgd(model), 2, process_group=group)
        for step in range(2):
            opt.zero_grad()
            size = sizes[group.rank()][step]
            loss_of(model, group.rank(), step, size).backward()
            if step == 1:
                opt.optim.step()
                alone = weights_of(model)
                opt.optim = torch.optim.SGD(model.parameters(), 0.0)
            opt.step(samples=size)
        return [alone, weights_of(model)]

    (a, mean), (b, other) = run_ranks(2, one_rank)
    assert_all_equal([mean, other])
    assert_close(mean, {name: (8 * a[name] + 2 * b[name]) / 10 for name in a})


def test_with_weights_the_samples_count_alike_as_in_one_process() -> None:
    def one_rank(group: Group) -> Any:
        model, size = plain(), 2 + 3 * group.rank()
        opt = LocalSGD(model, sgd(model), 1, process_group=group)
        loss_of(model, group.rank(), 0, size).backward()
        opt.step(samples=size)
        return weights_of(model)

    alone = plain()
    (sum(loss_of(alone, r, 0, 2 + 3 * r) * (2 + 3 * r) for r in range(2)) / 7).backward()  # type: ignore[union-attr]
    sgd(alone).step()
    for found in run_ranks(2, one_rank):
        assert_close(found, weights_of(alone))


def test_a_rank_of_weight_zero_does_not_spoil_the_mean() -> None:
    def one_rank(group: Group) -> Any:
        model = plain()
        opt = LocalSGD(model, sgd(model), 1, process_group=group)
        loss_of(model, group.rank(), 0).backward()
        if group.rank() == 1:
            model[0].weight.grad.fill_(float("nan"))
        opt.step(samples=1 - group.rank())
        return weights_of(model)

    alone = plain()
    train(alone, sgd(alone), 0, range(1))
    for found in run_ranks(2, one_rank):
        assert_close(found, weights_of(alone))


@pytest.mark.parametrize("count", [-1, float("nan"), float("inf")])
def test_samples_that_are_no_number_are_refused_before_anything_happens(count: float) -> None:
    def one_rank(group: Group) -> None:
        model = plain()
        opt = LocalSGD(model, sgd(model), 1, process_group=group)
        before = weights_of(model)
        loss_of(model, 0, 0).backward()
        with pytest.raises(AveragingArgumentError, match="samples"):
            opt.step(samples=count)
        assert_all_equal([before, weights_of(model)])

    run_ranks(1, one_rank)


# -- as an optimizer ---------------------------------------------------------------------------


def test_schedulers_closures_and_groups_work_as_on_the_optimizer_inside() -> None:
    def one_rank(group: Group) -> None:
        model = plain()
        opt = LocalSGD(model, torch.optim.SGD(model[0].parameters(), 0.4), 2, process_group=group)
        assert isinstance(opt, torch.optim.Optimizer)
        scheduler = StepLR(opt, 1, gamma=0.5)
        opt.add_param_group({"params": model[2].weight, "lr": 0.01})
        with pytest.raises(AveragingArgumentError, match="diverge"):
            opt.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        assert len(opt.param_groups) == 2
        assert opt.step(lambda: 7) == 7
        scheduler.step()
        assert opt.optim.param_groups[0]["lr"] == 0.2

    run_ranks(1, one_rank)


def test_a_step_that_a_grad_scaler_skips_on_one_rank_keeps_ranks_together() -> None:
    def one_rank(group: Group) -> tuple[Any, int, float]:
        model = plain(dtype=torch.float32)
        opt = LocalSGD(model, sgd(model), 2, process_group=group)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(4):
            opt.zero_grad()
            scaler.scale(loss_of(model, group.rank(), step)).backward()
            if group.rank() == 1 and step == 1:
                model[0].weight.grad[0, 0] = float("inf")
            scaler.step(opt)
            scaler.update()
        return weights_of(model), opt.steps, scaler.get_scale()

    found = run_ranks(2, one_rank)
    assert_all_equal([weights for weights, _, _ in found])
    assert [steps for _, steps, _ in found] == [4, 4]
    assert [scale for _, _, scale in found] == [8.0, 4.0]
    assert all(torch.isfinite(value).all() for value in found[0][0].values())


def test_under_a_grad_scaler_the_numbers_are_those_without() -> None:
    def one_rank(group: Group, scaled: bool) -> Any:
        model = plain(dtype=torch.float32)
        opt = LocalSGD(model, sgd(model), 2, process_group=group)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaled)
        for step in range(4):
            opt.zero_grad()
            scaler.scale(loss_of(model, group.rank(), step)).backward()
            if step % 2:
                scaler.unscale_(opt)
            scaler.step(opt)
            scaler.update()
        return weights_of(model)

    scaled, bare = (run_ranks(2, lambda g, s=s: one_rank(g, s)) for s in (True, False))
    assert_close(scaled[0], bare[0])


# -- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda m, g: LocalSGD(m, sgd(m), 0, process_group=g), AveragingArgumentError, "sync_ev"),
        (lambda m, g: LocalSGD(m, m, 2, process_group=g), AveragingTypeError, "Optimizer"),
        (lambda m, g: LocalSGD([], sgd(m), 2, process_group=g), AveragingArgumentError, "no param"),
        (lambda m, g: LocalSGD([3], sgd(m), 2, process_group=g), AveragingTypeError, "type int"),
        (
            lambda m, g: LocalSGD(m[0], sgd(m), 2, process_group=g),
            AveragingArgumentError,
            "steps 2 parameters, the first of shape .2, 6.",
        ),
        (
            lambda m, g: LocalSGD(m, sgd(m), 2, process_group=g, bucket_cap_mb=0),
            AveragingArgumentError,
            "bucket_cap_mb",
        ),
    ],
)
def test_what_it_cannot_work_with_is_refused_at_once(make: Any, error: Any, words: str) -> None:
    def one_rank(group: Group) -> int:
        calls = watch(group)
        with pytest.raises(error, match=words):
            make(plain(), group)
        return len(calls)

    assert run_ranks(1, one_rank) == [0]


def test_ranks_that_disagree_all_hear_of_it() -> None:
    def one_rank(group: Group) -> tuple[str, int]:
        model = plain()
        with pytest.raises(RoundsMismatchError) as caught:
            LocalSGD(model, sgd(model), 2 + group.rank() // 2, process_group=group)
        return caught.value.fact, caught.value.peer

    assert run_ranks(3, one_rank) == [("sync_every", 2), ("sync_every", 2), ("sync_every", 0)]


def test_ranks_with_different_models_all_hear_of_it() -> None:
    def one_rank(group: Group) -> str:
        model = nn.Linear(2, 2 + group.rank())
        with pytest.raises(RoundsMismatchError) as caught:
            LocalSGD(model, sgd(model), 2, process_group=group)
        return caught.value.fact

    assert run_ranks(2, one_rank) == ["the shape of parameter 0"] * 2


# -- checkpoints ---------------------------------------------------------------------------------


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("stop", [2, 4, 5])
def test_training_goes_on_to_the_last_bit_from_a_checkpoint(stop: int) -> None:
    def one_rank(group: Group) -> tuple[Any, Any]:
        def new(seed: int) -> tuple[Any, LocalSGD]:
            model = small(seed)
            inner = torch.optim.Adam(model.parameters(), 0.01)
            return model, LocalSGD(model, inner, 4, process_group=group)

        model, opt = new(0)
        train(model, opt, group.rank(), range(stop), samples=1 + group.rank())
        saved = through_a_file([model.state_dict(), opt.state_dict()])
        train(model, opt, group.rank(), range(stop, 10), samples=1 + group.rank())
        other, resumed = new(1)
        other.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        train(other, resumed, group.rank(), range(stop, 10), samples=1 + group.rank())
        return weights_of(model), weights_of(other)

    for straight, resumed in run_ranks(2, one_rank):
        assert_all_equal([straight, resumed])


def test_a_plain_optimizers_state_begins_a_round() -> None:
    def one_rank(group: Group) -> None:
        model = plain()
        opt = LocalSGD(model, sgd(model, momentum=0.9), 3, process_group=group)
        train(model, opt, 0, range(2))
        with pytest.warns(UserWarning, match="no rounds"):
            opt.load_state_dict(opt.optim.state_dict())
        assert opt.steps == 0

    run_ranks(1, one_rank)


def test_another_kind_of_state_is_refused_and_nothing_is_loaded() -> None:
    def one_rank(group: Group) -> None:
        model = plain()
        opt = LocalSGD(model, sgd(model), 3, process_group=group)
        state = opt.state_dict()
        state["rounds"]["kind"] = "DiLoCo"
        state["param_groups"][0]["lr"] = 9.0
        with pytest.raises(RoundsStateError, match="saved by DiLoCo, and this is LocalSGD"):
            opt.load_state_dict(state)
        assert opt.param_groups[0]["lr"] == 0.1

    run_ranks(1, one_rank)


# -- Join ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [(2, 7), (7, 2), (0, 5), (4, 4), (8, 3)])
def test_ranks_may_run_out_at_different_times(steps: tuple[int, int]) -> None:
    def one_rank(group: Group) -> tuple[Any, int]:
        model = small()
        opt = LocalSGD(model, sgd(model), 4, process_group=group)
        with Join([opt]):
            train(model, opt, group.rank(), range(steps[group.rank()]))
        return weights_of(model), opt.steps

    found = run_ranks(2, one_rank)
    assert_all_equal([weights for weights, _ in found])
    assert found[0][1] == found[1][1] >= max(steps)


def test_a_rank_that_ran_out_counts_by_the_steps_it_did() -> None:
    counts = (1, 3, 7)

    def one_rank(group: Group) -> Any:
        model = plain()
        opt = LocalSGD(model, sgd(model), 4, process_group=group)
        with Join([opt]):
            train(model, opt, group.rank(), range(counts[group.rank()]))
        return weights_of(model)

    def by_hand() -> dict[str, Tensor]:
        models = [plain() for _ in counts]
        for start in (0, 4):
            shares = [max(0, min(4, count - start)) for count in counts]
            for rank, (model, share) in enumerate(zip(models, shares, strict=True)):
                train(model, sgd(model), rank, range(start, start + share))
            for together in zip(*(m.parameters() for m in models), strict=True):
                total = sum(s * p.detach() for s, p in zip(shares, together, strict=True))
                mean = total / sum(shares)  # type: ignore[operator]
                for p in together:
                    p.data.copy_(mean)
        return weights_of(models[0])

    found = run_ranks(3, one_rank)
    assert_all_equal(found)
    assert_close(found[0], by_hand())


def test_sync_inside_join_is_refused() -> None:
    def one_rank(group: Group) -> None:
        model = plain()
        opt = LocalSGD(model, sgd(model), 4, process_group=group)
        with pytest.raises(AveragingArgumentError, match="inside Join"), Join([opt]):
            opt.sync()
        opt.sync()

    run_ranks(1, one_rank)


def test_with_another_joinable_every_step_is_announced() -> None:
    def one_rank(group: Group) -> tuple[Any, Any]:
        models = small(), plain()
        opts = [LocalSGD(model, sgd(model), 3, process_group=group) for model in models]
        with Join(opts):
            for step in range(2 + 5 * group.rank()):
                for model, opt in zip(models, opts, strict=True):
                    train(model, opt, group.rank(), range(step, step + 1))
        return weights_of(models[0]), weights_of(models[1])

    found = run_ranks(2, one_rank)
    assert_all_equal([first for first, _ in found])
    assert_all_equal([second for _, second in found])


def test_early_termination_is_raised_on_all_ranks() -> None:
    def one_rank(group: Group) -> bool:
        model = plain()
        opt = LocalSGD(model, sgd(model), 2, process_group=group)
        with (
            pytest.raises(RuntimeError, match="exhausted"),
            Join([opt], throw_on_early_termination=True),
        ):
            train(model, opt, group.rank(), range(3 + group.rank()))
        return True

    assert run_ranks(2, one_rank) == [True, True]


# -- over real transports ------------------------------------------------------------------------


def on_processes(meeting: Meeting, backend: str) -> Any:
    """Train over a group of ours, or over torch's default one."""
    if backend == "torch":
        dist.init_process_group("gloo")
        group: Any = None
    else:
        group = meeting.new_group(backend)
    model = small()
    opt = LocalSGD(model, sgd(model), 3, process_group=group)
    train(model, opt, meeting.rank, range(6))
    with (TorchJoin if backend == "torch" else Join)([opt]):
        train(model, opt, meeting.rank, range(6, 7 + 2 * meeting.rank))
    found = weights_of(model)
    if backend == "torch":
        dist.destroy_process_group()
    else:
        group.shutdown()
    return found


def with_sharded_parameters(meeting: Meeting) -> list[Any]:
    """Parameters that are DTensors within a host of one, averaged between two hosts."""
    from torch.distributed.device_mesh import init_device_mesh  # these take a second to import
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("hosts", "shards"))
    found = []
    for sharded in (True, False):
        model = plain(seed=meeting.rank)
        if sharded:
            for layer in (model[0], model[2]):
                for name, param in list(layer.named_parameters()):
                    spread = distribute_tensor(param.detach(), mesh["shards"], [Shard(0)])
                    setattr(layer, name, nn.Parameter(spread))
        inner = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        opt = LocalSGD(model, inner, 2, process_group=mesh["hosts"].get_group())
        for step in range(4):
            opt.zero_grad()
            x = batch(meeting.rank, step, shape=(3, 4), dtype=torch.float64)
            if sharded:
                x = distribute_tensor(x, mesh["shards"], [Replicate()])
            model(x).pow(2).mean().backward()
            opt.step()
        found.append([local_values(p).clone() for p in model.parameters()])
    dist.destroy_process_group()
    return found


def test_each_rank_averages_its_part_of_sharded_parameters() -> None:
    first, second = spawn_ranks(2, with_sharded_parameters)
    for parts in zip(*first, *second, strict=True):
        for part in parts[1:]:
            close(part, parts[0])


def test_it_gives_the_same_numbers_over_shm_gloo_and_torchs_own_group() -> None:
    first = spawn_ranks(2, on_processes, "shm")
    for backend in ("gloo", "torch"):
        assert_all_equal([*first, *spawn_ranks(2, on_processes, backend)])
