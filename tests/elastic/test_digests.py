"""Digests find what flips, moves or is missing, and nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.elastic.digests import digest, in_one

TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5), (300_000,)])
def test_the_same_bits_have_the_same_digest_wherever_they_lie(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = (torch.randn(shape) * 8).to(dtype)
    room = torch.empty(3 + tensor.numel(), dtype=dtype)  # at an odd address
    room[3:] = tensor.flatten()
    assert digest(tensor) == digest(tensor.clone()) == digest(room[3:].view(shape))
    if tensor.dim() == 2:
        turned = tensor.t().contiguous().t()  # the same numbers in another order of memory
        assert digest(turned) == digest(tensor)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4000), st.data())
def test_a_flipped_bit_always_shows(size: int, data: st.DataObject) -> None:
    tensor = torch.randint(-128, 128, (size,), dtype=torch.int8)
    before = digest(tensor)
    place, bit = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 7))
    tensor.view(torch.uint8)[place] ^= 1 << bit
    assert digest(tensor) != before


def test_swapped_numbers_and_other_lengths_show() -> None:
    tensor = torch.arange(200_000.0)
    swapped = tensor.clone()
    swapped[[3, 170_000]] = swapped[[170_000, 3]]
    found = {digest(t) for t in (tensor, swapped, tensor[:-1], torch.cat([tensor, tensor[:1] * 0]))}
    assert len(found) == 4
    assert digest(torch.zeros(3)) != digest(torch.zeros(4))


def test_names_and_order_count_in_a_digest_of_several() -> None:
    found = [{"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": 2, "b": 1}, {"a": 1, "c": 2}, {"a": 1}]
    assert len({in_one(numbers) for numbers in found}) == len(found)
    assert all(0 <= in_one(numbers) < 1 << 62 for numbers in found)
