"""A codec from outside the package: one class, nothing registered, in a hook and in DiLoCo."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from paceline import DistributedDataParallel as DDP
from paceline.errors import CodecSettingError, CodecStateError
from paceline.groups import Group
from paceline.hooks import Codec, CodecHook, Encoded, Int8, RowCodec
from paceline.optim import DiLoCo
from paceline.testing import run_ranks
from tests.ddp.ranks import batch, seeded


@dataclass(frozen=True)
class Halves:
    """What a class that knows nothing of ours makes of a tensor."""

    parts: Mapping[str, Tensor]
    scale: float = 1.0


class Duck:
    """No base class: two methods, and a repr that ranks compare."""

    def encode(self, tensor: Tensor) -> Halves:
        return Halves({"half": tensor.to(torch.float16)})

    def decode(self, encoded: Halves) -> Tensor:
        return encoded.parts["half"].float()

    def __repr__(self) -> str:
        return "Duck()"


class Mean(Codec):
    """Every tensor as its rows' means, and what they miss; counts what it encoded."""

    def __init__(self) -> None:
        self._encoded = 0

    def gains(self, shape: Any) -> bool:
        return len(shape) != 2 or shape[0] > 20  # the others travel as they are

    def encode(self, tensor: Tensor) -> Encoded:
        self._encoded += 1
        rest = (tensor - tensor.mean()).bfloat16()
        return Encoded({"mean": tensor.mean(), "rest": rest}, tensor.shape, tensor.dtype)

    def decode(self, encoded: Encoded) -> Tensor:
        return encoded.parts["rest"].float() + encoded.parts["mean"]

    def state_dict(self) -> dict[str, object]:
        return {"encoded": self._encoded}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self._encoded = int(state["encoded"])  # type: ignore[call-overload]


class Halved(RowCodec):
    """All rows of a bucket in one call; averaged in two stages by three ranks and more."""

    main = "values"

    def pack(self, rows: Tensor, keys: Tensor) -> dict[str, Tensor]:
        return {"values": rows.half()}

    def unpack(self, parts: Mapping[str, Tensor], width: int) -> Tensor:
        return parts["values"].float()


TOYS = {"two methods": Duck, "a codec": Mean, "of rows": Halved}
MODEL = seeded(lambda: nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 20)))

every_toy = pytest.mark.parametrize("toy", TOYS)


def loss(model: nn.Module, rank: int, step: int = 0) -> Tensor:
    return model(batch(rank, step, shape=(4, 20))).square().sum()


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@every_toy
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_hook_averages_with_it(toy: str, ranks: int) -> None:
    def one_rank(group: Group) -> tuple[Tensor, Tensor, float]:
        plain = DDP(copy.deepcopy(MODEL), process_group=group)
        loss(plain, group.rank()).backward()
        ddp = DDP(copy.deepcopy(MODEL), process_group=group, bucket_cap_mb=0.001)
        hook = CodecHook(TOYS[toy](), small=50)
        hook.register(ddp)
        loss(ddp, group.rank()).backward()
        return gradients(ddp), gradients(plain), hook.ratio

    found = run_ranks(ranks, one_rank)
    for mean, exact, ratio in found:
        assert torch.equal(mean, found[0][0])
        assert_close(mean, exact, rtol=0.01, atol=0.01)
        assert not torch.equal(mean, exact)
        assert ranks == 1 or ratio > 1.1


@every_toy
def test_a_model_with_nothing_large_enough_to_encode_is_averaged_as_it_is(toy: str) -> None:
    def one_rank(group: Group) -> tuple[Tensor, Tensor]:
        plain = DDP(copy.deepcopy(MODEL), process_group=group)
        loss(plain, group.rank()).backward()
        ddp = DDP(copy.deepcopy(MODEL), process_group=group)
        CodecHook(TOYS[toy](), small=10_000).register(ddp)
        loss(ddp, group.rank()).backward()
        return gradients(ddp), gradients(plain)

    for mean, exact in run_ranks(3, one_rank):
        assert_close(mean, exact)


@every_toy
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("overlap", [0, 1])
def test_diloco_exchanges_with_it(toy: str, ranks: int, overlap: int) -> None:
    def one_rank(group: Group, codec: Any) -> Tensor:
        model = copy.deepcopy(MODEL)
        inner = torch.optim.SGD(model.parameters(), 0.01)
        opt = DiLoCo(model, inner, sync_every=2, overlap=overlap, codec=codec, process_group=group)
        for step in range(5):
            opt.zero_grad()
            loss(model, group.rank(), step).backward()
            opt.step(samples=1 + group.rank())
        opt.sync()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    exact = run_ranks(ranks, lambda group: one_rank(group, None))
    found = run_ranks(ranks, lambda group: one_rank(group, TOYS[toy]()))
    for own, plain in zip(found, exact, strict=True):
        assert torch.equal(own, found[0])
        assert_close(own, plain, rtol=0.02, atol=0.02)
        assert not torch.equal(own, plain)


@every_toy
def test_what_it_loses_is_sent_later(toy: str) -> None:
    """A number that no toy can say in 16 bits: over many passes its mean is right."""

    def one_rank(group: Group) -> tuple[Tensor, Tensor]:
        value = torch.full((600,), 1 + 1e-4)
        value[::2] = 0.3  # so that its mean is not the number itself
        param = nn.Parameter(torch.zeros(600))
        model = nn.Module()
        model.param = param
        model.forward = lambda: param @ value  # type: ignore[method-assign]
        ddp = DDP(model, process_group=group)
        CodecHook(TOYS[toy](), small=0).register(ddp)
        total = torch.zeros(600)
        for _ in range(64):
            ddp.zero_grad()
            ddp().backward()
            total += param.grad
        return total / 64, value

    for mean, value in run_ranks(2, one_rank):
        assert_close(mean, value, rtol=2e-5, atol=2e-5)


@every_toy
def test_a_run_with_it_resumes_to_the_last_bit(toy: str) -> None:
    def one_rank(group: Group) -> None:
        ddp = DDP(copy.deepcopy(MODEL), process_group=group)
        hook = CodecHook(TOYS[toy](), small=50)
        hook.register(ddp)
        for step in range(2):
            ddp.zero_grad()
            loss(ddp, group.rank(), step).backward()
        saved = copy.deepcopy(hook.state_dict())
        other = DDP(copy.deepcopy(MODEL), process_group=group)
        resumed = CodecHook(TOYS[toy](), small=50)
        resumed.register(other)
        resumed.load_state_dict(saved)
        for model in (ddp, other):
            model.zero_grad()
            loss(model, group.rank(), 2).backward()
        assert torch.equal(gradients(ddp), gradients(other))
        assert hook.codec.state_dict() == resumed.codec.state_dict()

    run_ranks(2, one_rank)


class AsItIs:
    """Gives back what it gets, not a copy of it."""

    def encode(self, tensor: Tensor) -> Halves:
        return Halves({"values": tensor})

    def decode(self, encoded: Halves) -> Tensor:
        return encoded.parts["values"]

    def __repr__(self) -> str:
        return "AsItIs()"


class RowsAsTheyAre(RowCodec):
    """Gives back the rows it gets, and views of messages."""

    def pack(self, rows: Tensor, keys: Tensor) -> dict[str, Tensor]:
        return {"values": rows}

    def unpack(self, parts: Mapping[str, Tensor], width: int) -> Tensor:
        return parts["values"]


@pytest.mark.parametrize("codec", [AsItIs, RowsAsTheyAre])
@pytest.mark.parametrize("ranks", [2, 3])
def test_it_need_not_copy_what_it_is_given(codec: Any, ranks: int) -> None:
    def one_rank(group: Group) -> tuple[Tensor, Tensor]:
        ddp = DDP(copy.deepcopy(MODEL), process_group=group)
        CodecHook(codec(), small=50).register(ddp)
        loss(ddp, group.rank()).backward()
        model = nn.Linear(1, 300, bias=False)
        nn.init.zeros_(model.weight)
        opt = DiLoCo(
            model,
            torch.optim.SGD(model.parameters(), 1.0),
            partial(torch.optim.SGD, lr=1.0),
            sync_every=1,
            codec=codec(),
            error_feedback=True,
            process_group=group,
        )
        model.weight.grad = torch.full_like(model.weight, 1.0 + group.rank())
        opt.step(samples=1 + group.rank())
        return gradients(ddp), model.weight.detach().clone()

    def exact(group: Group) -> Tensor:
        ddp = DDP(copy.deepcopy(MODEL), process_group=group)
        loss(ddp, group.rank()).backward()
        return gradients(ddp)

    weights = torch.arange(1.0, ranks + 1)
    outer = -float(weights.square().sum() / weights.sum())
    for (mean, moved), plain in zip(
        run_ranks(ranks, one_rank), run_ranks(ranks, exact), strict=True
    ):
        assert_close(mean, plain)
        assert_close(moved, torch.full_like(moved, outer))


def test_it_may_say_what_gains_by_it() -> None:
    def one_rank(group: Group) -> tuple[set[str], bool]:
        ddp = DDP(copy.deepcopy(MODEL), process_group=group)
        hook = CodecHook(Mean(), small=25)
        hook.register(ddp)
        loss(ddp, group.rank()).backward()
        return set(hook.residuals), hook.codec == Mean()

    # the first weight is 30 by 20 and gains; the second is 20 by 30; one bias is small
    assert run_ranks(1, one_rank) == [({"0.weight", "0.bias"}, True)]


def test_rows_of_ones_own_may_be_chained() -> None:
    assert repr(Halved() | Int8()) == "Halved() | Int8(block=256)"
    with pytest.raises(CodecSettingError, match="both work on rows"):
        Halved() | Mean()


def test_parts_that_change_their_size_are_refused_before_anything_is_sent() -> None:
    class Growing(Duck):
        """Sends more with every tensor."""

        def __init__(self) -> None:
            self.size = 0

        def encode(self, tensor: Tensor) -> Halves:
            self.size += 1
            return Halves({"half": tensor.half(), "more": torch.ones(self.size)})

    def one_rank(group: Group) -> int:
        ddp = DDP(copy.deepcopy(MODEL), process_group=group)
        hook = CodecHook(Growing(), small=500)
        hook.register(ddp)
        with pytest.raises(CodecStateError, match="as at first"):
            for _ in range(4):  # buckets may be laid out anew in the second pass
                loss(ddp, group.rank()).backward()
        return 1

    assert run_ranks(1, one_rank) == [1]


def test_what_cannot_decode_is_refused() -> None:
    with pytest.raises(CodecSettingError, match="has encode and decode"):
        CodecHook("int8")  # type: ignore[arg-type]
