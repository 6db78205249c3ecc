"""The weighted mean of a buffer that travels encoded, on ranks that are threads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline._exchange import CodedMean, RouteSetting, RowLayout, Standing
from paceline._exchange.wire import Meter, MeteredGroup
from paceline.errors import CodecSettingError
from paceline.groups import Group
from paceline.hooks import Codec, Fp16, Int8, PowerSGD, Sign, TopK
from paceline.testing import run_ranks

HEAD = 3


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_mean_through_int8_is_near_the_mean(ranks: int) -> None:
    """Over two stages and over one, with weights, and a rank that says nothing."""

    def one_rank(group: Group, one_stage: bool) -> tuple[Tensor, Standing, Standing]:
        exchange = CodedMean(group, Int8(), error_feedback=False, one_stage=one_stage)
        buffer = torch.empty(1003)
        buffer[:1000] = numbers(group.rank())
        said = exchange.start(buffer, Standing(float(group.rank()))).wait()
        mean = buffer[:1000].clone()
        nothing = exchange.start(buffer, Standing(0.0, 0.0, float(group.rank() == 1))).wait()
        return mean, said, nothing

    def numbers(rank: int) -> Tensor:
        return torch.randn(1000, generator=torch.Generator().manual_seed(rank))

    expected = sum(r * numbers(r) for r in range(ranks)) / sum(range(ranks))
    for one_stage in (True, False):
        found = run_ranks(ranks, lambda group, one_stage=one_stage: one_rank(group, one_stage))
        for mean, said, nothing in found:
            assert (said.weight > 0, said.active, said.failed) == (True, ranks, 0)
            assert (nothing.weight, nothing.active, nothing.failed) == (0, 0, 1)
            assert torch.equal(mean, found[0][0])
            torch.testing.assert_close(mean, expected, rtol=0, atol=0.06)


def test_ranks_round_at_random_each_in_its_own_way() -> None:
    same = torch.rand(1003, generator=torch.Generator().manual_seed(0))

    def one_rank(group: Group) -> Tensor:
        sent: list[Tensor] = []
        group.register_hooks(lambda call: sent.append(call.inputs[0].clone()))
        exchange = CodedMean(group, Int8(), error_feedback=False, one_stage=True)
        exchange.start(same.clone(), Standing(1.0)).wait()
        return sent[0]

    first, second = run_ranks(2, one_rank)
    assert not torch.equal(first, second)


def told(group: Group, exchange: CodedMean, value: float, weight: float = 1.0) -> Tensor:
    """Exchange a buffer of one value; what became of it."""
    buffer = torch.full((700 + HEAD,), value)
    exchange.start(buffer, Standing(weight)).wait()
    return buffer[:-HEAD].clone()


@pytest.mark.parametrize("make", [Int8, Fp16, lambda: TopK(0.5), lambda: PowerSGD(2)])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_of_weight_0_says_nothing_whatever_it_holds(
    make: Callable[[], Codec], ranks: int
) -> None:
    def one_rank(group: Group) -> Tensor:
        exchange = CodedMean(group, make(), error_feedback=True, one_stage=False)
        last = group.rank() == ranks - 1
        value = float("nan") if last else 2.0 + group.rank()
        return told(group, exchange, value, weight=0.0 if last else 1e6)

    expected = torch.tensor([2.0 + rank for rank in range(ranks - 1)]).mean()
    for found in run_ranks(ranks, one_rank):
        assert found[found != 0].numel() >= 350  # top-k sends half of them
        torch.testing.assert_close(found[found != 0].mean(), expected, rtol=0.01, atol=0)


def test_large_weights_do_not_overflow_what_travels() -> None:
    """Values are encoded as they are: times their weight they would not fit 16 bits."""

    class Half(Codec):
        """Without a scale of its own."""

        def encode(self, tensor: Tensor) -> Any:
            from paceline.hooks import Encoded

            return Encoded({"half": tensor.half()}, tensor.shape, tensor.dtype)

        def decode(self, encoded: Any) -> Tensor:
            return encoded.parts["half"].float()

    def one_rank(group: Group) -> Tensor:
        exchange = CodedMean(group, Half(), error_feedback=False, one_stage=True)
        return told(group, exchange, 100.0 * (1 + group.rank()), weight=1e6 * (1 + group.rank()))

    for found in run_ranks(3, one_rank):
        torch.testing.assert_close(found, torch.full((700,), 100.0 * 14 / 6), rtol=1e-3, atol=0)


def test_a_group_with_other_members_goes_on_without_what_belonged_to_a_rank() -> None:
    def one_rank(group: Group) -> Tensor | None:
        exchange = CodedMean(group, Sign(), error_feedback=True, one_stage=False)
        told(group, exchange, 1.0 + group.rank())
        assert exchange.state_dict()["lost_here"] is not None
        part = group.split([[0, 1, 2], [3]])
        assert part is not None
        exchange.group = part
        return told(group, exchange, 4.0) if group.rank() < 3 else None

    *found, _ = run_ranks(4, one_rank)
    for mean in found:
        assert torch.equal(mean, found[0])
        assert mean.isfinite().all()


@pytest.mark.parametrize("ranks", [2, 3])
def test_it_goes_on_from_its_state_to_the_last_bit(ranks: int) -> None:
    def one_rank(group: Group) -> tuple[Tensor, Tensor]:
        value = 1.37 + group.rank()
        exchange = CodedMean(group, Int8(), error_feedback=True, one_stage=False)
        told(group, exchange, value)
        saved = copy.deepcopy(exchange.state_dict())
        straight = told(group, exchange, value)
        other = CodedMean(group, Int8(), error_feedback=True, one_stage=False)
        other.load_state_dict(saved)
        return straight, told(group, other, value)

    for straight, resumed in run_ranks(ranks, one_rank):
        assert torch.equal(straight, resumed)


def test_factors_of_matrices_refuse_to_be_weighted() -> None:
    def one_rank(group: Group) -> None:
        line = MeteredGroup(group, Meter(), torch.device("cpu"))
        setting = RouteSetting(RowLayout((), (), 8), line, torch.zeros(3), None, weighted=True)
        with pytest.raises(CodecSettingError, match="ranks count alike"):
            PowerSGD(2).route(setting)

    run_ranks(1, one_rank)
