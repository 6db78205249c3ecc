"""PowerSGD: how near it comes, what it sends, what it remembers, and how that is saved."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from paceline import DistributedDataParallel as DDP
from paceline import hooks
from paceline.groups import Group
from paceline.testing import run_ranks
from tests.ddp.toys import TINY, assert_same, count_calls, data, fill, grads, stack
from tests.hooks.table import Net, batch, loss, power

SIZE = 16


def fixed(rank: int) -> Tensor:
    """A gradient with a decaying spectrum, different on each rank."""
    left, right = data(SIZE, SIZE, seed=1), data(SIZE, SIZE, seed=2)
    strong = left @ torch.diag(0.5 ** torch.arange(SIZE, dtype=torch.float64)) @ right
    return strong + 0.01 * data(SIZE, SIZE, seed=3 + rank)


class Fixed(nn.Module):
    """A weight whose gradient is always the same."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE, SIZE, dtype=torch.float64))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient).sum()


def averages(steps: int, hook: Any = hooks.powerSGD_hook, ranks: int = 2, **settings: Any) -> Any:
    """The average that each rank got in each step, and its state."""

    def one_rank(group: Group) -> tuple[list[Tensor], hooks.PowerSGDState]:
        ddp, state = DDP(Fixed(), process_group=group), power(group, **settings)
        ddp.register_comm_hook(state, hook)
        found = []
        for _ in range(steps):
            ddp.zero_grad()
            ddp(fixed(group.rank())).backward()
            found.append(ddp.module.weight.grad.clone())
        return found, state

    return run_ranks(ranks, one_rank)


MEAN = (fixed(0) + fixed(1)) / 2


def wrong(found: Tensor) -> float:
    return float((found - MEAN).norm() / MEAN.norm())


def test_the_first_steps_are_averaged_plainly() -> None:
    found, _ = averages(4)[0]
    for early in found[:2]:
        assert_close(early, MEAN)
    assert wrong(found[2]) > 1e-3


@pytest.mark.parametrize("hook", [hooks.powerSGD_hook, hooks.batched_powerSGD_hook])
def test_a_warm_start_finds_the_best_approximation_there_is(hook: Any) -> None:
    found, _ = averages(14, hook, use_error_feedback=False)[0]
    u, s, v = torch.linalg.svd(MEAN)
    best = u[:, :2] @ torch.diag(s[:2]) @ v[:2]
    assert_close(found[-1], best, rtol=0, atol=1e-3 * float(s[0]))
    assert wrong(found[-1]) <= wrong(found[2])


def test_without_warm_start_every_step_looks_elsewhere() -> None:
    found, state = averages(5, use_error_feedback=False, warm_start=False)[0]
    assert not torch.equal(found[3], found[4])
    assert not state.q_memory_dict


@pytest.mark.parametrize("hook", [hooks.powerSGD_hook, hooks.batched_powerSGD_hook])
@pytest.mark.parametrize("warm", [True, False])
def test_what_is_left_out_of_one_step_comes_in_the_next(hook: Any, warm: bool) -> None:
    """All that was ever given out, and what is still kept, are all that ever came."""
    ranks = averages(9, hook, warm_start=warm)
    kept = sum(state.error_dict[0].view(SIZE, SIZE) for _, state in ranks) / len(ranks)
    given_out = sum(ranks[0][0])
    assert_close(given_out + kept, 9 * MEAN)


def test_matrices_of_one_shape_give_the_same_in_a_batch() -> None:
    def one_rank(group: Group) -> list[Any]:
        found = []
        for batched in (False, True):
            ddp = DDP(Net(), process_group=group)
            state = power(group, batch_tensors_with_same_shape=batched)
            ddp.register_comm_hook(state, hooks.powerSGD_hook)
            for _ in range(5):
                ddp.zero_grad()
                loss(ddp, batch(group.rank())).backward()
            found.append(grads(ddp))
        return found

    for alone, together in run_ranks(2, one_rank):
        assert_same(alone, together)


def test_a_bucket_takes_two_collectives_and_few_bytes() -> None:
    def one_rank(group: Group) -> tuple[list[str], float, float]:
        model = stack(64, 64, 64)
        ddp, state = DDP(model, process_group=group), power(group, matrix_approximation_rank=1)
        ddp.register_comm_hook(state, hooks.powerSGD_hook)
        sent = []
        for step in range(4):
            before = group.traffic.bytes_sent
            calls = count_calls(group) if step == 3 else []
            ddp(data(3, 64, seed=group.rank())).sum().backward()
            sent.append(group.traffic.bytes_sent - before)
        return calls, sent[1], sent[3]

    for calls, plain, compressed in run_ranks(2, one_rank):
        assert calls == ["all_reduce"] * 3  # P with the biases, Q, and DDP's own header
        assert compressed < plain / 10


def test_the_statistics_count_elements() -> None:
    def one_rank(group: Group) -> list[tuple[float, int, int]]:
        ddp, state = DDP(stack(20, 30), process_group=group), power(group)
        ddp.register_comm_hook(state, hooks.powerSGD_hook)
        found = []
        for _ in range(4):
            ddp(data(3, 20, seed=group.rank())).sum().backward()
            found.append(state.compression_stats())
        return found

    sent = (20 + 30) * 2 + 30
    for found in run_ranks(2, one_rank):
        assert found[1] == (0, 0, 0)
        assert found[3] == (630 / sent, 2 * 630, 2 * sent)


class Pretended:
    """A bucket whose gradients a wrapper has multiplied by this rank's weight."""

    def __init__(self, model: Fixed, gradient: Tensor, weight: float) -> None:
        self._model, self._buffer, self.weight = model, gradient.flatten() * weight, weight

    def buffer(self) -> Tensor:
        return self._buffer

    def gradients(self) -> list[Tensor]:
        return [self._buffer.view(SIZE, SIZE)]

    def parameters(self) -> list[Tensor]:
        return [self._model.weight]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def test_what_is_left_out_is_kept_without_the_weight_it_had() -> None:
    """Else it would count a thousand times when a plain pass follows one of a thousand samples."""

    def one_rank(group: Group) -> list[Tensor]:
        found = []
        for weights in ([1.0] * 6, [1.0, 1.0, 1000.0, 1000.0, 1.0, 20.0]):
            model, state = Fixed(), power(group)
            for weight in weights:
                bucket: Any = Pretended(model, fixed(group.rank()), weight)
                result = hooks.powerSGD_hook(state, bucket).wait() / weight
            found.append(result)
        return found

    for plain, weighted in run_ranks(2, one_rank):
        assert_close(plain, weighted)


# Numbers that are none.


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_a_number_reaches_every_rank_and_is_forgotten_after(value: float) -> None:
    def one_rank(group: Group) -> list[Tensor]:
        ddp, state = DDP(Fixed(), process_group=group), power(group)
        ddp.register_comm_hook(state, hooks.powerSGD_hook)
        found = []
        for step in range(6):
            ddp.zero_grad()
            gradient = fixed(group.rank())
            if step == 4 and group.rank() == 1:
                gradient[3, 5] = value
            ddp(gradient).backward()
            found.append(ddp.module.weight.grad.clone())
        return found

    for found in run_ranks(2, one_rank):
        assert not found[4].isfinite().any()
        assert wrong(found[5]) < 1


# Gradients of all kinds.


def test_gradients_in_another_memory_order_are_averaged() -> None:
    def one_rank(group: Group) -> Any:
        model = fill(nn.Conv2d(8, 12, 3, dtype=torch.float64)).to(memory_format=torch.channels_last)
        ddp = DDP(model, process_group=group)
        whole = power(group, matrix_approximation_rank=12, min_compression_rate=0.1)
        ddp.register_comm_hook(whole, hooks.powerSGD_hook)
        for _ in range(3):
            ddp.zero_grad()
            ddp(data(1, 8, 5, 5, seed=group.rank())).square().sum().backward()
        return grads(ddp), whole.compression_stats()[0]

    def plain(group: Group) -> Any:
        ddp = DDP(fill(nn.Conv2d(8, 12, 3, dtype=torch.float64)), process_group=group)
        ddp(data(1, 8, 5, 5, seed=group.rank())).square().sum().backward()
        return grads(ddp)

    wanted = run_ranks(2, plain)[0]
    for found, rate in run_ranks(2, one_rank):
        assert rate > 0
        assert_same(found, wanted)


@pytest.mark.parametrize("hook", [hooks.powerSGD_hook, hooks.quantization_pertensor_hook])
def test_sparse_gradients_travel_as_they_are(hook: Any) -> None:
    def one_rank(group: Group) -> Tensor:
        table = nn.Embedding(50, 4, sparse=True, dtype=torch.float64)
        table.weight.data.fill_(1)
        ddp = DDP(nn.Sequential(table, stack(4, 2)), process_group=group)
        ddp.register_comm_hook(power(group) if hook is hooks.powerSGD_hook else group, hook)
        for _ in range(4):
            ddp.zero_grad()
            ddp(torch.tensor([group.rank(), 7])).sum().backward()
        return table.weight.grad.to_dense().any(1).nonzero().flatten()

    for touched in run_ranks(2, one_rank):
        assert touched.tolist() == [0, 1, 7]


# Saving.


def trained(group: Group, ddp: DDP, steps: range) -> list[Tensor]:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in steps:
        optimizer.zero_grad()
        loss(ddp, batch(group.rank(), step)).backward()
        optimizer.step()
    return [p.detach().clone() for p in ddp.parameters()]


@pytest.mark.parametrize("how", ["state_dict", "pickle"])
@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("cap", [None, TINY])
def test_a_resumed_run_goes_on_bit_by_bit(how: str, warm: bool, cap: float | None) -> None:
    """Though its wrapper is new and has yet to learn which bucket holds what."""

    def one_rank(group: Group) -> tuple[list[Tensor], list[Tensor]]:
        state = power(group, warm_start=warm, random_seed=5)
        ddp = DDP(Net(), process_group=group, bucket_cap_mb=TINY)
        ddp.register_comm_hook(state, hooks.powerSGD_hook)
        trained(group, ddp, range(6))
        if how == "pickle":
            again = pickle.loads(pickle.dumps(state))
            again.process_group = group
        else:
            again = power(group, warm_start=warm)
            again.load_state_dict(copy.deepcopy(state.state_dict()))
        resumed = DDP(copy.deepcopy(ddp.module), process_group=group, bucket_cap_mb=cap)
        resumed.register_comm_hook(again, hooks.powerSGD_hook)
        return trained(group, ddp, range(6, 12)), trained(group, resumed, range(6, 12))

    for straight, resumed in run_ranks(2, one_rank):
        assert all(map(torch.equal, straight, resumed))


def test_parameters_are_numbered_alike_however_the_first_buckets_are_cut() -> None:
    def numbers(*cuts: range) -> dict[int, int]:
        state, params = power(None), [nn.Parameter(torch.zeros(1)) for _ in range(5)]
        for bucket in cuts:
            state.indices_of([params[at] for at in bucket])
        return {at: state.indices_of([params[at]])[0] for at in range(5)}

    assert numbers(range(5)) == numbers(range(3, 5), range(3)) == numbers(range(4, 5), range(4))


def test_a_saved_state_is_made_of_tensors_and_numbers(tmp_path: Any) -> None:
    _, state = averages(4)[0]
    torch.save(state.state_dict(), tmp_path / "state")
    loaded = torch.load(tmp_path / "state", weights_only=True)
    again = power(None)
    again.load_state_dict(loaded)
    assert again.iter == 4
    assert torch.equal(again.error_dict[0], state.error_dict[0])


def test_a_state_that_lacks_something_is_refused() -> None:
    with pytest.raises(ValueError, match="errors, iter"):
        power(None).load_state_dict({"q": {}, "p": {}})


def test_pickling_tells_what_becomes_of_the_group(caplog: pytest.LogCaptureFixture) -> None:
    state = power(object())
    with caplog.at_level("WARNING", logger="torch.distributed"):
        pickled = pickle.dumps(state)
        again = pickle.loads(pickled)
    assert [record.name.startswith("torch.distributed") for record in caplog.records] == [True] * 2
    assert "Process group is not serializable" in caplog.messages[0]
    assert "Process group will be set to a default group" in caplog.messages[1]
    assert again.process_group is None
    assert again.rng.get_state() == state.rng.get_state()
    for name in set(state.__slots__) - {"process_group"}:
        assert getattr(again, name) == getattr(state, name)


# Settings.


@pytest.mark.parametrize("settings", [{}, {"warm_start": False}, {"use_error_feedback": False}])
def test_memory_needs_a_first_step_without_it(settings: dict[str, bool]) -> None:
    with pytest.raises(
        ValueError,
        match="> 1 if `use_error_feedback` or `warm_start` is enabled, because PowerSGD can only",
    ):
        hooks.PowerSGDState(None, start_powerSGD_iter=1, **settings)


def test_without_memory_it_may_begin_at_once() -> None:
    settings = {"start_powerSGD_iter": 0, "use_error_feedback": False, "warm_start": False}
    found, _ = averages(2, **settings)[0]
    assert wrong(found[0]) > 1e-3


def test_a_rank_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="matrix_approximation_rank is 0"):
        hooks.PowerSGDState(None, 0)


def test_it_has_the_attributes_that_torchs_state_has() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

    assert set(PowerSGDState.__slots__) == set(hooks.PowerSGDState.__slots__)
    ours, theirs = power(None), PowerSGDState(None, 2, 2)
    for name in set(ours.__slots__) - {"rng"}:
        assert getattr(ours, name) == getattr(theirs, name)
