"""CodecHook on ranks that are threads: means, error feedback, weights, Join, changes, failures."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from paceline import DistributedDataParallel as DDP
from paceline.ddp import _MixedPrecision
from paceline.errors import CodecMismatchError, CodecSettingError, CodecStateError
from paceline.groups import Group
from paceline.hooks import (
    Bf16,
    Codec,
    CodecHook,
    Fp8,
    Fp16,
    Fp32,
    Int8,
    PowerSGD,
    RowCodec,
    Sign,
    TopK,
)
from paceline.join import Join
from paceline.testing import fail_on_cue, run_ranks
from tests.ddp.ranks import batch, seeded

SMALL = 200  # the toys' weights are larger, their biases smaller
TINY = 0.001  # MiB: a bucket for nearly every layer

MAKERS: dict[str, Callable[[], Codec]] = {
    "fp32": Fp32,
    "fp16": Fp16,
    "bf16": Bf16,
    "fp8": Fp8,
    "int8": Int8,
    "sign": lambda: Sign(64),
    "topk": lambda: TopK(0.1, block=256),
    "topk | int8": lambda: TopK(0.1, block=256) | Int8(),
    "powersgd": lambda: PowerSGD(2),
}
CLOSE = {"fp32": 1e-6, "fp16": 1e-3, "bf16": 8e-3, "fp8": 0.1, "int8": 0.03}  # of the norm
every = pytest.mark.parametrize("kind", MAKERS)
on_two_or_more = pytest.mark.parametrize(
    ("kind", "ranks"), [*((kind, 2) for kind in MAKERS), ("int8", 3), ("sign", 3), ("topk", 3)]
)


def toy() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 20)
    )


MODEL = seeded(toy)


def wrapped(group: Group, codec: Codec, **options: Any) -> tuple[DDP, CodecHook]:
    options.setdefault("bucket_cap_mb", TINY)
    feedback, warm_up = options.pop("error_feedback", True), options.pop("warm_up", 0)
    ddp = DDP(copy.deepcopy(MODEL), process_group=group, **options)
    hook = CodecHook(codec, small=SMALL, error_feedback=feedback, warm_up=warm_up)
    hook.register(ddp)
    return ddp, hook


def loss(model: nn.Module, rank: int, step: int = 0) -> Tensor:
    return model(batch(rank, step, shape=(4, 20))).square().sum()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten().float() for p in model.parameters()])


def step_of(ddp: DDP, rank: int, step: int = 0) -> Tensor:
    ddp.zero_grad()
    loss(ddp, rank, step).backward()
    return flat(ddp)


def steps_of(ddp: DDP, rank: int, steps: int) -> Tensor:
    return torch.stack([step_of(ddp, rank, step) for step in range(steps)])


def expected(ranks: int, steps: int = 1) -> Tensor:
    """The means over ranks, one row for each step."""
    model = copy.deepcopy(MODEL)
    rows = []
    for step in range(steps):
        model.zero_grad()
        for rank in range(ranks):
            (loss(model, rank, step) / ranks).backward()
        rows.append(flat(model))
    return torch.stack(rows)


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def assert_alike(results: list[Tensor]) -> None:
    for result in results[1:]:
        assert torch.equal(result, results[0])


# The mean over ranks.


@every
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_all_ranks_have_the_same_bits_and_they_are_close_to_the_mean(kind: str, ranks: int) -> None:
    def one_rank(group: Group) -> Tensor:
        return steps_of(wrapped(group, MAKERS[kind]())[0], group.rank(), 3)

    results = run_ranks(ranks, one_rank)
    assert_alike(results)
    for found, wanted in zip(results[0], expected(ranks, 3), strict=True):
        assert off(found, wanted) < CLOSE.get(kind, 1.2)


@pytest.mark.parametrize("kind", ["int8", "sign", "topk", "powersgd"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_small_parameters_are_averaged_exactly(kind: str, ranks: int) -> None:
    def one_rank(group: Group) -> list[Tensor]:
        ddp, _ = wrapped(group, MAKERS[kind]())
        step_of(ddp, group.rank())
        return [p.grad.clone() for p in ddp.parameters() if p.numel() < SMALL]

    model = copy.deepcopy(MODEL)
    for rank in range(ranks):
        (loss(model, rank) / ranks).backward()
    wanted = [p.grad for p in model.parameters() if p.numel() < SMALL]
    for found in run_ranks(ranks, one_rank):
        assert_close(found, wanted)


@pytest.mark.parametrize("kind", ["int8", "sign", "topk", "powersgd"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_passes_of_a_warm_up_are_averaged_exactly_and_those_after_it_are_not(
    kind: str, ranks: int
) -> None:
    def one_rank(group: Group) -> Tensor:
        ddp, _ = wrapped(group, MAKERS[kind](), warm_up=2)
        return steps_of(ddp, group.rank(), 4)

    results = run_ranks(ranks, one_rank)
    assert_alike(results)
    wanted = expected(ranks, 4)
    assert_close(results[0][:2], wanted[:2])
    for found, exact in zip(results[0][2:], wanted[2:], strict=True):
        assert off(found, exact) > 1e-4


@on_two_or_more
def test_with_error_feedback_the_sum_over_steps_comes_to_that_of_the_gradients(
    kind: str, ranks: int
) -> None:
    """The same gradient again and again: whatever one step leaves out, a later one brings."""
    steps = 20

    def one_rank(group: Group) -> Tensor:
        ddp, _ = wrapped(group, MAKERS[kind]())
        return torch.stack([step_of(ddp, group.rank()) for _ in range(steps)])

    wanted = expected(ranks)[0]
    sent = run_ranks(ranks, one_rank)[0].cumsum(0)
    errors = [off(sent[n - 1] / n, wanted) for n in (1, steps)]
    assert errors[-1] < 0.3
    if kind != "fp32":
        assert errors[-1] < 0.5 * errors[0] or errors[0] < 1e-4


@pytest.mark.parametrize("kind", ["sign", "topk"])
def test_without_error_feedback_it_does_not(kind: str) -> None:
    def one_rank(group: Group) -> Tensor:
        ddp, hook = wrapped(group, MAKERS[kind](), error_feedback=False)
        total = torch.stack([step_of(ddp, group.rank()) for _ in range(20)]).mean(0)
        assert not hook.residuals
        return total

    assert off(run_ranks(2, one_rank)[0], expected(2)[0]) > 0.3


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", ["int8", "sign", "topk | int8", "powersgd"])
def test_gradients_do_not_depend_on_how_buckets_are_laid_out(kind: str, ranks: int) -> None:
    def run(cap: float) -> Tensor:
        def one_rank(group: Group) -> Tensor:
            ddp, _ = wrapped(group, MAKERS[kind](), bucket_cap_mb=cap)
            return steps_of(ddp, group.rank(), 4)

        return run_ranks(ranks, one_rank)[0]

    assert torch.equal(run(TINY), run(25))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_is_left_survives_a_new_plan(ranks: int) -> None:
    """After the first pass buckets are laid out anew."""

    def one_rank(group: Group) -> None:
        ddp, hook = wrapped(group, Sign(64))
        step_of(ddp, group.rank())
        before = {name: left.clone() for name, left in hook.residuals.items()}
        assert len(hook._routes) == 1
        ddp.zero_grad()
        (loss(ddp, group.rank()) * 0).backward()
        assert len(hook._routes) > 1
        assert before.keys() == hook.residuals.keys() == {"0.weight", "2.weight", "4.weight"}
        for name, left in hook.residuals.items():  # nothing but the old errors was encoded
            assert float(left.norm()) < float(before[name].norm())
            assert float((left - before[name]).norm()) > 0

    run_ranks(ranks, one_rank)


# What other parts of a run do to gradients.


@on_two_or_more
def test_weights_make_it_the_mean_over_samples(kind: str, ranks: int) -> None:
    sizes = [1, 5, 3][:ranks]

    def rows(rank: int) -> Tensor:
        return batch(rank, shape=(sizes[rank], 20))

    def one_rank(group: Group) -> Tensor:
        ddp, _ = wrapped(group, MAKERS[kind]())
        sums = torch.zeros(())
        for _ in range(15):
            ddp.zero_grad()
            with ddp.samples(sizes[group.rank()]):
                ddp(rows(group.rank())).square().sum(1).mean().backward()
            sums = sums + flat(ddp)
        return sums / 15

    model = copy.deepcopy(MODEL)
    model(torch.cat([rows(rank) for rank in range(ranks)])).square().sum(1).mean().backward()
    results = run_ranks(ranks, one_rank)
    assert_alike(results)
    assert off(results[0], flat(model)) < 0.4


class Lent:
    """A bucket of one parameter, as a reducer would hand it over."""

    def __init__(self, param: nn.Parameter, gradient: Tensor, weight: float) -> None:
        self.weight = weight
        self._param, self._buffer = param, gradient * weight

    def buffer(self) -> Tensor:
        return self._buffer

    def gradients(self) -> list[Tensor]:
        return [self._buffer]

    def parameters(self) -> list[Tensor]:
        return [self._param]

    def is_last(self) -> bool:
        return True


@pytest.mark.parametrize("kind", sorted(set(MAKERS) - {"powersgd"}))
@pytest.mark.parametrize("ranks", [1, 3])
def test_what_is_left_is_weighted_as_the_gradients_it_is_sent_with(kind: str, ranks: int) -> None:
    param = nn.Parameter(torch.zeros(300))

    def run(weights: list[float]) -> Tensor:
        def one_rank(group: Group) -> Tensor:
            hook = CodecHook(MAKERS[kind](), group, small=SMALL)
            rows = []
            for step, weight in enumerate(weights):
                gradient = batch(group.rank(), step, shape=(300,))
                rows.append(hook.reduce(Lent(param, gradient, weight)).wait() / weight)
            return torch.stack(rows)

        return run_ranks(ranks, one_rank)[0]

    assert torch.equal(run([1, 1, 1, 1]), run([1, 8, 0.5, 2]))


@every
def test_a_rank_of_weight_zero_keeps_what_it_has(kind: str) -> None:
    param = nn.Parameter(torch.zeros(20, 30))

    def one_rank(group: Group) -> Tensor:
        hook = CodecHook(MAKERS[kind](), group, small=SMALL)
        for step, weight in enumerate([1.0, 0.0]):
            gradient = batch(group.rank(), step, shape=(600,))
            bucket: Any = Lent(param, gradient, weight if group.rank() else 1.0)
            bucket.gradients = lambda b=bucket: [b.buffer().view(20, 30)]
            mean = hook.reduce(bucket).wait()
            if step == 0:
                before = {name: left.clone() for name, left in hook.residuals.items()}
        if group.rank():
            assert torch.equal(hook.residuals["0"], before["0"])
        return mean

    results = run_ranks(2, one_rank)
    assert_alike(results)
    if kind in CLOSE:
        assert off(2 * results[0], batch(0, 1, shape=(600,))) < 2 * CLOSE[kind]


@pytest.mark.parametrize("kind", ["fp16", "int8", "sign", "topk | int8", "powersgd"])
def test_accumulated_gradients_are_averaged_once(kind: str) -> None:
    def one_rank(group: Group) -> tuple[Tensor, float]:
        ddp, hook = wrapped(group, MAKERS[kind]())
        sums = torch.zeros(())
        for _ in range(15):
            ddp.zero_grad()
            for micro in range(2):
                with ddp.accumulate(2):
                    loss(ddp, group.rank(), micro).backward()
            sums = sums + flat(ddp)
        assert hook.step == 15
        return sums / 15, hook.bytes_sent

    results = run_ranks(2, one_rank)
    assert torch.equal(results[0][0], results[1][0])
    assert off(results[0][0], expected(2, 2).sum(0)) < 0.4


@pytest.mark.parametrize("kind", ["fp16", "int8", "sign", "topk | int8", "powersgd"])
def test_a_rank_that_has_run_out_sends_nothing_new(kind: str) -> None:
    def one_rank(group: Group) -> Tensor:
        ddp, hook = wrapped(group, MAKERS[kind]())
        last = torch.empty(0)
        with Join([ddp], divide_by_initial_world_size=False):
            for step in range(2 if group.rank() else 12):
                last = step_of(ddp, group.rank(), 0 if step < 2 else 7)
        assert hook.step >= 12
        return last

    found = run_ranks(2, one_rank)[0]
    model = copy.deepcopy(MODEL)
    loss(model, 0, 7).backward()
    assert off(found, flat(model)) < max(CLOSE.get(kind, 0), 0.05) or kind not in CLOSE


@pytest.mark.parametrize("kind", ["fp16", "int8", "sign", "topk", "powersgd"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_gradients_of_other_types_keep_them(kind: str, ranks: int) -> None:
    for dtype in (torch.float64, torch.bfloat16):

        def one_rank(group: Group, dtype: torch.dtype = dtype) -> Tensor:
            ddp = DDP(copy.deepcopy(MODEL).to(dtype), process_group=group)
            CodecHook(MAKERS[kind](), small=SMALL).register(ddp)
            ddp(batch(group.rank(), shape=(4, 20)).to(dtype)).square().sum().backward()
            assert all(p.grad.dtype == dtype for p in ddp.parameters())
            return flat(ddp)

        results = run_ranks(ranks, one_rank)
        assert_alike(results)
        assert off(results[0], expected(ranks)[0]) < max(CLOSE.get(kind, 1.0), 0.05)


@pytest.mark.parametrize("kind", ["int8", "topk | int8", "powersgd"])
def test_mixed_precision_works_with_it(kind: str) -> None:
    precision = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def one_rank(group: Group) -> Tensor:
        ddp, _ = wrapped(group, MAKERS[kind](), mixed_precision=precision)
        return sum(step_of(ddp, group.rank()) for _ in range(15)) / 15

    results = run_ranks(2, one_rank)
    assert_alike(results)
    assert off(results[0], expected(2)[0]) < 0.4


def test_sparse_gradients_are_averaged_as_they_are() -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.EmbeddingBag(50, 20, sparse=True)
            self.out = nn.Linear(20, 20)

        def forward(self, rows: Tensor) -> Tensor:
            return self.out(self.table(rows))

    model = seeded(Bag)

    def work(model: nn.Module, rank: int) -> Tensor:
        return model(torch.tensor([[rank, 7], [rank + 1, 9]])).square().sum()

    def one_rank(group: Group) -> tuple[Tensor, float, float]:
        ddp = DDP(copy.deepcopy(model), process_group=group)
        hook = CodecHook(Int8(), small=SMALL)
        hook.register(ddp)
        before = group.traffic.bytes_sent
        work(ddp, group.rank()).backward()
        assert ddp.module.table.weight.grad.is_sparse
        assert 0 < hook.bytes_sent <= group.traffic.bytes_sent - before
        return ddp.module.table.weight.grad.to_dense()

    alone = copy.deepcopy(model)
    ((work(alone, 0) + work(alone, 1)) / 2).backward()
    for found in run_ranks(2, one_rank):
        assert_close(found, alone.table.weight.grad.to_dense())


# NaN and infinity.


@every
@pytest.mark.parametrize(("ranks", "bad"), [(2, math.nan), (3, math.inf)])
def test_what_is_not_finite_on_one_rank_is_so_on_all_and_gone_in_the_next_step(
    kind: str, bad: float, ranks: int
) -> None:
    def one_rank(group: Group) -> tuple[Tensor, Tensor]:
        ddp, hook = wrapped(group, MAKERS[kind]())
        step_of(ddp, group.rank())
        weight = ddp.module[2].weight

        def spoil(grad: Tensor) -> Tensor:
            grad = grad.clone()
            grad[3, 4] = bad
            return grad

        handle = weight.register_hook(spoil) if group.rank() == ranks - 1 else None
        step_of(ddp, group.rank())
        spoilt = weight.grad.clone()
        if handle is not None:
            handle.remove()
        assert all(left.isfinite().all() for left in hook.residuals.values())
        return spoilt[3, 4], step_of(ddp, group.rank())

    for at, after in run_ranks(ranks, one_rank):
        assert not at.isfinite()
        assert after.isfinite().all()


# Bytes.


@every
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_bytes_sent_are_those_the_group_has_counted(kind: str, ranks: int) -> None:
    def one_rank(group: Group) -> None:
        own = group.split(range(ranks))
        ddp = DDP(copy.deepcopy(MODEL), process_group=group, bucket_cap_mb=TINY)
        hook = CodecHook(MAKERS[kind](), own, small=SMALL)
        hook.register(ddp)
        own.traffic.reset()
        steps_of(ddp, group.rank(), 3)
        assert hook.bytes_sent == pytest.approx(own.traffic.bytes_sent)
        assert (hook.bytes_sent > 0) == (ranks > 1)
        plain = 3 * sum(p.numel() * 4 for p in MODEL.parameters()) * 2 * (ranks - 1) / ranks
        assert hook.ratio == pytest.approx(plain / hook.bytes_sent if ranks > 1 else 1.0)
        own.shutdown()

    run_ranks(ranks, one_rank)


def test_two_ranks_need_one_collective_for_each_bucket() -> None:
    def one_rank(group: Group) -> None:
        own = group.split(range(2))
        ddp = DDP(copy.deepcopy(MODEL), process_group=group, bucket_cap_mb=25)
        CodecHook(TopK(0.1) | Int8(), own, small=SMALL).register(ddp)
        own.traffic.reset()
        steps_of(ddp, group.rank(), 5)
        assert own.traffic.calls == 5
        own.shutdown()

    run_ranks(2, one_rank)


def test_in_two_stages_bytes_do_not_grow_with_the_number_of_ranks() -> None:
    def sent(ranks: int) -> float:
        def one_rank(group: Group) -> float:
            ddp, hook = wrapped(group, Int8(), bucket_cap_mb=25)
            steps_of(ddp, group.rank(), 2)
            return hook.bytes_sent * ranks / (ranks - 1)

        return run_ranks(ranks, one_rank)[0]

    assert sent(8) < 1.5 * sent(3)


# Changes.


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_codec_can_be_changed_and_what_the_old_one_lost_is_still_sent(ranks: int) -> None:
    def one_rank(group: Group) -> Tensor:
        ddp, hook = wrapped(group, Sign(64))
        rows = [step_of(ddp, group.rank()) for _ in range(3)]
        hook.change(Fp32())
        assert hook.codec == Fp32()
        rows += [step_of(ddp, group.rank()) for _ in range(2)]
        return torch.stack(rows)

    found = run_ranks(ranks, one_rank)[0]
    wanted = expected(ranks)[0]
    assert off(found[4], wanted) < 1e-5
    assert off(found.sum(0), 5 * wanted) < 1e-5  # all that three steps of signs left out


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_want_different_codecs_all_raise_and_go_on_with_the_old_one(ranks: int) -> None:
    def one_rank(group: Group) -> Tensor:
        ddp, hook = wrapped(group, Int8())
        step_of(ddp, group.rank())
        with pytest.raises(CodecMismatchError) as caught:
            hook.change(Sign() if group.rank() == 1 else Fp16())
        assert caught.value.rank == group.rank()
        assert len(caught.value.wanted) == ranks
        assert "Sign" in caught.value.wanted[1]
        assert hook.codec == Int8()
        return step_of(ddp, group.rank(), 1)

    results = run_ranks(ranks, one_rank)
    assert_alike(results)
    assert off(results[0], expected(ranks, 2)[1]) < 0.05


def test_different_codecs_are_refused_when_the_hook_is_registered() -> None:
    def one_rank(group: Group) -> None:
        ddp = DDP(copy.deepcopy(MODEL), process_group=group)
        with pytest.raises(CodecMismatchError):
            CodecHook(Int8(64) if group.rank() else Int8(128)).register(ddp)

    run_ranks(2, one_rank)


def test_different_settings_are_refused_with_the_first_bucket() -> None:
    def one_rank(group: Group) -> None:
        ddp = DDP(copy.deepcopy(MODEL), process_group=group)
        ddp.register_comm_hook(CodecHook(Int8(), group, small=group.rank()), CodecHook.reduce)
        with pytest.raises(CodecMismatchError):
            loss(ddp, group.rank()).backward()

    run_ranks(2, one_rank)


def test_registered_as_any_hook_it_works_too() -> None:
    def one_rank(group: Group) -> Tensor:
        ddp = DDP(copy.deepcopy(MODEL), process_group=group, bucket_cap_mb=TINY)
        hook = CodecHook(Int8(), group, small=SMALL)
        ddp.register_comm_hook(hook, CodecHook.reduce)
        return steps_of(ddp, group.rank(), 3)

    results = run_ranks(2, one_rank)
    assert_alike(results)
    assert off(results[0], expected(2, 3)) < 0.05


@pytest.mark.parametrize("kind", ["int8", "sign", "topk", "powersgd"])
def test_a_wrapper_that_moves_to_another_group_takes_the_hook_along(kind: str) -> None:
    def one_rank(group: Group) -> tuple[Tensor, float]:
        ddp, hook = wrapped(group, MAKERS[kind]())
        steps_of(ddp, group.rank(), 2)
        some = group.split([2, 0])
        if some is None:
            return torch.empty(0), 0.0
        ddp._update_process_group(some)
        assert hook.group is some
        before = some.traffic.bytes_sent
        rows = [step_of(ddp, group.rank()) for _ in range(15)]
        assert some.traffic.bytes_sent > before
        some.shutdown()
        return torch.stack(rows).mean(0), hook.bytes_sent

    (found, _), _, (other, _) = run_ranks(3, one_rank)
    assert torch.equal(found, other)
    model = copy.deepcopy(MODEL)
    for rank in (0, 2):
        (loss(model, rank) / 2).backward()
    assert off(found, flat(model)) < 0.4


def test_nothing_can_be_changed_or_saved_inside_a_pass() -> None:
    def one_rank(group: Group) -> None:
        ddp, hook = wrapped(group, Int8())
        step_of(ddp, group.rank())
        caught: list[str] = []

        def within(_grad: Tensor) -> None:
            for act in (lambda: hook.change(Fp16()), hook.state_dict):
                with pytest.raises(CodecStateError) as error:
                    act()
                caught.append(str(error.value))

        ddp.module[0].weight.register_hook(within)  # the last gradient; buckets are under way
        step_of(ddp, group.rank())
        assert len(caught) == 2
        assert "change()" in caught[0]

    run_ranks(2, one_rank)


# State.


@on_two_or_more
def test_a_run_that_is_resumed_gives_the_same_bits(kind: str, ranks: int) -> None:
    def one_rank(group: Group) -> tuple[Tensor, Tensor]:
        ddp, hook = wrapped(group, MAKERS[kind]())
        steps_of(ddp, group.rank(), 3)
        saved = hook.state_dict()
        went_on = torch.stack([step_of(ddp, group.rank(), step) for step in (3, 4, 5)])
        ddp, hook = wrapped(group, MAKERS[kind]())
        hook.load_state_dict(saved)
        assert hook.step == 3
        return went_on, torch.stack([step_of(ddp, group.rank(), step) for step in (3, 4, 5)])

    for went_on, resumed in run_ranks(ranks, one_rank):
        assert torch.equal(went_on, resumed)


def test_a_state_can_be_loaded_into_a_hook_that_has_run() -> None:
    def one_rank(group: Group) -> None:
        ddp, hook = wrapped(group, Sign(64))
        steps_of(ddp, group.rank(), 3)
        saved = hook.state_dict()
        first = step_of(ddp, group.rank(), 3)
        steps_of(ddp, group.rank(), 2)
        hook.load_state_dict(saved)
        assert torch.equal(step_of(ddp, group.rank(), 3), first)

    run_ranks(2, one_rank)


def test_a_state_that_does_not_fit_is_refused() -> None:
    def one_rank(group: Group) -> None:
        ddp, hook = wrapped(group, Sign(64))
        step_of(ddp, group.rank())
        saved = hook.state_dict()
        _, other = wrapped(group, Int8())
        with pytest.raises(CodecStateError, match="Sign"):
            other.load_state_dict(saved)
        _, same = wrapped(group, Sign(64))
        for name in ("strange", "0.weight"):
            with pytest.raises(CodecStateError, match=name):
                same.load_state_dict({**saved, "residuals": {name: torch.zeros(3)}})
        ddp = DDP(copy.deepcopy(MODEL), process_group=group)
        loose = CodecHook(Sign(64), group, small=SMALL)
        loose.load_state_dict({**saved, "residuals": {str(n): torch.zeros(3) for n in range(6)}})
        ddp.register_comm_hook(loose, CodecHook.reduce)
        with pytest.raises(CodecStateError, match="elements"):
            step_of(ddp, group.rank())

    run_ranks(1, one_rank)


def test_among_another_number_of_ranks_it_goes_on_with_what_was_left() -> None:
    def first(group: Group) -> dict[str, Any]:
        ddp, hook = wrapped(group, Sign(64))
        steps_of(ddp, group.rank(), 2)
        return hook.state_dict()

    saved = run_ranks(3, first)

    def then(group: Group) -> Tensor:
        ddp, hook = wrapped(group, Sign(64))
        hook.load_state_dict(saved[group.rank()])
        return step_of(ddp, group.rank(), 2)

    assert_alike(run_ranks(2, then))


# Failures.


def test_a_failed_collective_is_raised_on_the_rank_it_failed_on_and_nobody_hangs() -> None:
    def one_rank(group: Group) -> str:
        own = group.split(range(2))
        ddp = DDP(copy.deepcopy(MODEL), process_group=group, bucket_cap_mb=TINY)
        CodecHook(PowerSGD(2), own, small=SMALL).register(ddp)
        step_of(ddp, group.rank())
        with fail_on_cue(own, after=3), pytest.raises(Exception) as caught:
            step_of(ddp, group.rank())
        return type(caught.value).__name__

    assert len(run_ranks(2, one_rank)) == 2


def test_what_is_no_codec_of_ours_is_refused() -> None:
    with pytest.raises(CodecSettingError, match="int"):
        CodecHook(8)  # type: ignore[arg-type]
    with pytest.raises(CodecSettingError, match="negative"):
        CodecHook(Int8(), small=-1)


def test_a_codec_of_the_users_own_works() -> None:
    class Halves(RowCodec):
        """Every other number."""

        block = 64
        main = "even"

        def pack(self, rows: Tensor, keys: Tensor) -> dict[str, Tensor]:
            return {"even": rows[:, ::2].contiguous()}

        def unpack(self, parts: Any, width: int) -> Tensor:
            rows = torch.zeros(len(parts["even"]), width)
            rows[:, ::2] = parts["even"]
            return rows

        def __repr__(self) -> str:
            return "Halves()"

    for ranks in (2, 3):

        def one_rank(group: Group) -> float:
            ddp, hook = wrapped(group, Halves() | Int8())
            steps_of(ddp, group.rank(), 2)
            return hook.ratio

        assert run_ranks(ranks, one_rank)[0] > 2
