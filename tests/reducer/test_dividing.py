"""What means are divided by: the header of a pass, on the device it is on."""

import math

import pytest
import torch
from torch import Tensor

from paceline._reducer import header
from paceline._reducer.bucket import Bucket
from paceline._reducer.dividing import Divider, divide, divisor
from paceline._reducer.header import Said

FLOATS = [torch.float32, torch.float64]
PLAIN = [Said(active=0), Said(active=1)]
WEIGHTED = [
    Said(active=0, weight=3.0, weighted=True),
    Said(active=1, weight=0.7, weighted=True),
]
ROUNDS = {
    "plain": (PLAIN, 1.0, 1.0),
    "weighted": (WEIGHTED, 1.85, 1.85),
    "one weighted": ([PLAIN[0], WEIGHTED[1]], 0.85, 0.85),
    "nothing to weigh": ([Said(active=r, weight=0.0, weighted=True) for r in (0, 1)], 0.0, 0.0),
    "one stands in": ([PLAIN[0], Said(weight=0.0)], 1.0, 0.5),
    "trouble": ([PLAIN[0], Said(active=1, trouble=True)], math.inf, math.inf),
    "late": ([*PLAIN[:1], Said(active=1, late=True)], math.inf, math.inf),
}


def said(ranks: list[Said], dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """The header of a pass in which each rank said its part."""
    total = torch.zeros(header.length(len(ranks), 3), dtype=dtype)
    for part in ranks:
        memory = torch.empty_like(total)
        header.write(memory, part, 1 / len(ranks), len(ranks))
        total += memory
    return total.to(device)


def bucket(size: int, dtype: torch.dtype) -> Bucket:
    """One whose means are random, with a 7 behind them."""
    buffer = torch.randn(size + 1, dtype=torch.float64).to("cuda", dtype)
    buffer[-1] = 7
    return Bucket(0, (), (), buffer, (), (), lends=True, size=size)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ROUNDS)
def test_the_divisor_is_what_the_ranks_said(name: str, dtype: torch.dtype) -> None:
    ranks, plain, by_active = ROUNDS[name]
    memory = said(ranks, dtype)
    assert divisor(memory, 2, by_active=False).item() == pytest.approx(plain)
    assert divisor(memory, 2, by_active=True).item() == pytest.approx(by_active)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.bfloat16, torch.float16])
def test_every_tensor_is_divided(dtype: torch.dtype) -> None:
    means = [torch.full((5,), 6.0, dtype=dtype), torch.ones(2, dtype=dtype).to_sparse()]
    divide(means, torch.tensor(2.0))
    assert means[0].tolist() == [3.0] * 5
    assert means[1].to_dense().tolist() == [0.5, 0.5]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("by_active", [False, True])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.bfloat16])
@pytest.mark.parametrize("header_dtype", FLOATS)
@pytest.mark.parametrize("name", ROUNDS)
def test_a_gpu_comes_to_the_same_bits(
    name: str, header_dtype: torch.dtype, dtype: torch.dtype, by_active: bool
) -> None:
    memory = said(ROUNDS[name][0], header_dtype, "cuda")
    given = [bucket(n, dtype) for n in (1, 100_003, 17)]
    expected = [one.means.clone() for one in given]
    divide(expected, divisor(memory, 2, by_active=by_active))
    divider = Divider()
    divider.divide(given, memory, 2, by_active=by_active)
    for ours, plain in zip(given, expected, strict=True):
        assert torch.equal(ours.means, plain)
        assert ours.buffer[-1] == 7, "what rides behind is left alone"
    others = [bucket(9, dtype)]  # as after a new plan
    expected = [others[0].means.clone()]
    divide(expected, divisor(memory, 2, by_active=by_active))
    divider.divide(others, memory, 2, by_active=by_active)
    assert torch.equal(others[0].means, expected[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_leaves_means_alone_when_there_is_nothing_to_divide_by() -> None:
    given = bucket(1000, torch.float32)
    before = given.buffer.clone()
    Divider().divide([given], said(PLAIN, torch.float32, "cuda"), 2, by_active=True)
    assert torch.equal(given.buffer, before)
