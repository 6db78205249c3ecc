"""PostLocalSGDOptimizer: any optimizer, then an averager."""

from __future__ import annotations

import io
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging import averagers as theirs
from torch.optim.lr_scheduler import StepLR

from paceline import Group
from paceline.errors import AveragingTypeError
from paceline.optim import PeriodicModelAverager, PostLocalSGDOptimizer
from paceline.testing import Meeting, run_ranks, spawn_ranks
from tests.optim.local import assert_all_equal, assert_close, loss_of, plain, sgd, train, weights_of


def make(group: Group, period: int = 4, warmup: int = 3, **options: Any) -> tuple[Any, Any]:
    model = plain()
    averager = PeriodicModelAverager(period, warmup, group)
    return model, PostLocalSGDOptimizer(sgd(model, **options), averager)


def test_it_steps_the_optimizer_and_averages_when_it_is_time() -> None:
    def one_rank(group: Group) -> tuple[Any, Any]:
        model, opt = make(group)
        train(model, opt, group.rank(), range(3))
        alone = weights_of(model)
        train(model, opt, group.rank(), range(3, 4))
        return alone, weights_of(model)

    (alone0, both0), (alone1, both1) = run_ranks(2, one_rank)
    assert not torch.equal(alone0["0.weight"], alone1["0.weight"])
    assert_all_equal([both0, both1])


def test_it_is_an_optimizer_with_the_groups_and_the_state_of_the_one_inside() -> None:
    def one_rank(group: Group) -> None:
        model, opt = make(group, momentum=0.9)
        assert isinstance(opt, torch.optim.Optimizer)
        assert repr(opt) == repr(opt.optim)
        train(model, opt, 0, range(2))
        assert opt.state is opt.optim.state
        opt.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
        assert opt.param_groups is opt.optim.param_groups
        assert len(opt.param_groups) == 2
        opt.zero_grad()
        assert all(p.grad is None for p in model.parameters())

    run_ranks(1, one_rank)


def test_schedulers_step_hooks_and_closures_work() -> None:
    def one_rank(group: Group) -> None:
        model, opt = make(group)
        seen: list[str] = []
        opt.register_step_post_hook(lambda *_: seen.append("after"))
        scheduler = StepLR(opt, step_size=1, gamma=0.5)

        def closure() -> Any:
            opt.zero_grad()
            loss = loss_of(model, 0, 0)
            loss.backward()
            return loss

        assert opt.step(closure).item() > 0
        scheduler.step()
        assert opt.optim.param_groups[0]["lr"] == 0.05
        assert seen == ["after"]

    run_ranks(1, one_rank)


def test_a_scheduler_still_has_its_way_after_a_state_dict_was_loaded() -> None:
    def one_rank(group: Group) -> None:
        model, opt = make(group, momentum=0.9)
        train(model, opt, 0, range(2))
        opt.load_state_dict(opt.state_dict())
        opt.param_groups[0]["lr"] = 0.0
        before = weights_of(model)
        opt.optim.param_groups[0]["momentum"] = 0.0
        train(model, opt, 0, range(1))
        assert_close(weights_of(model), before)

    run_ranks(1, one_rank)


def test_the_count_of_steps_is_saved_and_one_without_it_is_warned_of() -> None:
    def one_rank(group: Group) -> None:
        model, opt = make(group)
        train(model, opt, group.rank(), range(5))
        file = io.BytesIO()
        torch.save(opt.state_dict(), file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
        _, other = make(group)
        other.load_state_dict(state)
        assert other.averager.step == 5
        del state["step"]
        with pytest.warns(UserWarning, match="does not contain a step counter for an averager"):
            other.load_state_dict(state)
        assert other.averager.step == 0

    run_ranks(1, one_rank)


def test_something_that_is_no_optimizer_is_refused() -> None:
    def one_rank(group: Group) -> None:
        with pytest.raises(AveragingTypeError, match=r"expected a torch\.optim\.Optimizer"):
            PostLocalSGDOptimizer([torch.ones(1)], PeriodicModelAverager(2, 0, group))  # type: ignore[arg-type]

    run_ranks(1, one_rank)


def compare_optimizers(meeting: Meeting) -> tuple[Any, Any]:
    """The same training under torch's optimizer and ours."""
    warnings.simplefilter("ignore")
    from torch.distributed.optim import PostLocalSGDOptimizer as Theirs

    dist.init_process_group("gloo")
    results = []
    for optimizer, averager in (
        (Theirs, theirs.PeriodicModelAverager),
        (PostLocalSGDOptimizer, PeriodicModelAverager),
    ):
        model = plain(dtype=torch.float32)
        opt = optimizer(sgd(model, momentum=0.9), averager(period=4, warmup_steps=2))
        train(model, opt, meeting.rank, range(12))
        state = opt.state_dict()
        assert state["step"] == 12
        results.append(weights_of(model))
    dist.destroy_process_group()
    return results[0], results[1]


def test_torchs_optimizer_and_ours_train_alike_over_gloo() -> None:
    for reference, ours in spawn_ranks(2, compare_optimizers):
        assert_close(ours, reference)
