"""16 bits on the wire."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import DistributedDataParallel as DDP
from paceline import hooks
from paceline.groups import Group
from paceline.testing import run_ranks
from tests.ddp.toys import stack

HOOKS = {
    "fp16": hooks.fp16_compress_hook,
    "bf16": hooks.bf16_compress_hook,
    "fp16 wrapper": hooks.fp16_compress_wrapper(hooks.allreduce_hook),
    "bf16 wrapper": hooks.bf16_compress_wrapper(hooks.allreduce_hook),
}


class Bias(nn.Module):
    """Its gradient is what it is called with."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, gradient: Tensor) -> Tensor:
        return self.bias @ gradient


def average(name: str, gradients: list[Tensor]) -> list[Tensor]:
    def one_rank(group: Group) -> Tensor:
        ddp = DDP(Bias(len(gradients[0])), process_group=group)
        ddp.register_comm_hook(group, HOOKS[name])
        ddp(gradients[group.rank()]).backward()
        return ddp.module.bias.grad

    return run_ranks(len(gradients), one_rank)


@pytest.mark.parametrize("name", HOOKS)
def test_half_as_many_bytes_are_sent(name: str) -> None:
    def one_rank(group: Group) -> list[float]:
        sent = []
        for hook in (hooks.allreduce_hook, HOOKS[name]):
            ddp = DDP(stack(64, 64).float(), process_group=group)
            ddp.register_comm_hook(group, hook)
            ddp(torch.ones(1, 64)).sum().backward()
            before = group.traffic.bytes_sent
            ddp(torch.ones(1, 64)).sum().backward()
            sent.append(group.traffic.bytes_sent - before)
        return sent

    for plain, compressed in run_ranks(2, one_rank):
        assert compressed < 0.55 * plain


@pytest.mark.parametrize("name", HOOKS)
def test_gradients_keep_their_type(name: str) -> None:
    for found in average(name, [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]):
        assert found.dtype == torch.float32
        assert found.tolist() == [2.0, 3.0]


def test_a_sum_that_16_bits_cannot_hold_does_no_harm() -> None:
    for found in average("fp16", [torch.tensor([60_000.0])] * 3):
        assert abs(float(found) - 60_000) < 100


def test_a_gradient_that_16_bits_cannot_hold_is_infinite_for_all() -> None:
    for found in average("fp16", [torch.tensor([1.0, 1e6]), torch.tensor([1.0, 0.0])]):
        assert found.tolist() == [1.0, torch.inf]


@pytest.mark.parametrize("name", HOOKS)
def test_what_is_not_a_number_reaches_every_rank(name: str) -> None:
    for found in average(name, [torch.tensor([torch.nan, 1.0]), torch.tensor([1.0, 1.0])]):
        assert found.isnan().tolist() == [True, False]


def test_a_wrapper_gives_the_bucket_back_as_it_was() -> None:
    seen: list[tuple[torch.dtype, torch.dtype]] = []

    def inner(state: Any, bucket: Any) -> Any:
        now = bucket.buffer().dtype
        return hooks.allreduce_hook(state, bucket).then(lambda f: (seen.append(now), f.value())[1])

    wrapper = hooks.bf16_compress_wrapper(inner)

    def one_rank(group: Group) -> torch.dtype:
        kept = []
        ddp = DDP(Bias(), process_group=group)

        def outer(state, bucket):
            kept.append(bucket)
            return wrapper(state, bucket)

        ddp.register_comm_hook(group, outer)
        ddp(torch.ones(4)).backward()
        return kept[0].buffer().dtype

    assert run_ranks(1, one_rank) == [torch.float32]
    assert seen == [torch.bfloat16]


def test_a_gradient_without_a_bucket_is_taken_as_torchs_compiled_reducer_gives_it() -> None:
    def one_rank(group: Group) -> list[float]:
        gradient = torch.full((2,), float(group.rank()))
        pair: Any = (gradient, nn.Parameter(torch.zeros(2)))
        return hooks.fp16_compress_hook(group, pair).wait().tolist()

    assert run_ranks(2, one_rank) == [[0.5, 0.5]] * 2
