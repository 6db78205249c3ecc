"""Sums that do not depend on order, and how exact they are."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline._reducer import SentTerms, StepSums, Summed
from paceline._reducer.step_sums import NONFINITE
from paceline._reducer.sums import WIDTH, Grid
from paceline._transport import (
    ANY_LEVEL,
    NO_LEVEL,
    OTHER_LEVEL,
    add_terms,
    add_whole,
    means_of_whole,
)
from paceline.groups import Group
from paceline.testing import run_ranks


def mean_of(terms: list[Tensor], weights: list[int]) -> Tensor:
    """As one rank makes it of terms in this order."""

    def one_rank(group: Group) -> Tensor:
        sums = StepSums([Summed("p", torch.empty_like(terms[0]))], len(terms), group)
        sums.begin([0])
        for term, weight in zip(terms, weights, strict=True):
            sums.add({0: term}, weight)
        found = sums.sums[0]
        levels = sorted((lv for lv in found.levels() if lv != NONFINITE), reverse=True)
        if NONFINITE in found.others:
            levels = [*(levels or [0]), NONFINITE]
        sums.exchange({0: levels} if levels else {})
        return sums.means([0], sum(weights))[0].clone()

    (mean,) = run_ranks(1, one_rank)
    return mean


def terms_of(
    source: random.Random, count: int, numel: int, spread: int, dtype: Any
) -> list[Tensor]:
    """Terms whose elements differ by up to ``spread`` binary orders of magnitude."""
    generator = torch.Generator().manual_seed(source.randrange(1 << 30))
    found = []
    for _ in range(count):
        sizes = torch.randint(-spread, 1, (numel,), generator=generator)
        term = torch.randn(numel, generator=generator, dtype=torch.float64)
        found.append(torch.ldexp(term, sizes).to(dtype))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@given(seed=st.integers(0, 1 << 20), count=st.integers(1, 24), spread=st.sampled_from([0, 8, 80]))
@settings(max_examples=15, deadline=None)
def test_the_order_of_terms_is_not_seen(dtype: Any, seed: int, count: int, spread: int) -> None:
    source = random.Random(seed)
    terms = terms_of(
        source, count, 37, min(spread, 12) if dtype == torch.float16 else spread, dtype
    )
    weights = [source.choice([1, 3, 1000, 2**20]) for _ in terms]
    pairs = list(zip(terms, weights, strict=True))
    first = mean_of(terms, weights)
    source.shuffle(pairs)
    again = mean_of([t for t, _ in pairs], [w for _, w in pairs])
    assert torch.equal(first, again)


def test_a_float32_sum_is_no_less_exact_than_torchs() -> None:
    terms = terms_of(random.Random(1), 24, 4000, 20, torch.float32)
    exact = sum(term.double() for term in terms) / 24
    ours = (mean_of(terms, [1] * 24).double() - exact).abs()
    plain = terms[0].clone()
    for term in terms[1:]:
        plain += term
    theirs = (plain / 24 - exact).abs()
    assert ours.max() <= theirs.max()
    assert ours.sum() < theirs.sum()


def test_small_elements_beside_large_ones_keep_what_float32_keeps_of_them() -> None:
    terms = [torch.tensor([1.0, 2.0**-24 * (1 + k * 2.0**-20), 2.0**-40]) for k in range(1, 20)]
    exact = sum(term.double() for term in terms) / 19
    error = (mean_of(terms, [1] * 19).double() / exact - 1).abs()
    assert error[1] <= 2.0**-24
    assert error[2] <= 2.0**-8


def test_float64_keeps_all_its_digits() -> None:
    terms = terms_of(random.Random(2), 7, 500, 40, torch.float64)
    exact = torch.stack(terms).sum(0) / 7
    torch.testing.assert_close(mean_of(terms, [1] * 7), exact, rtol=1e-13, atol=1e-16)


def test_terms_of_very_different_size_are_added_in_several_integers() -> None:
    sizes = [1e30, 1e-30, 1.0, -1e30, 3e-30]
    terms = [torch.full((5,), size) for size in sizes]
    assert mean_of(terms, [1] * 5).tolist() == pytest.approx([0.2] * 5)
    only_small = mean_of([terms[0], terms[3], terms[1], terms[4]], [1] * 4)
    assert only_small.tolist() == pytest.approx([1e-30] * 5)


def test_the_largest_whole_numbers_do_not_overflow() -> None:
    largest = torch.finfo(torch.float32).max
    for count in (1, 2, 3, 24):
        found = mean_of([torch.tensor([largest, -largest])] * count, [2**20] * count)
        assert found.tolist() == [largest, -largest]


def test_infinities_and_nans_come_out_as_in_any_order() -> None:
    inf, nan = math.inf, math.nan
    terms = [
        torch.tensor([1.0, inf, inf, nan, 2.0, -inf]),
        torch.tensor([2.0, 1.0, -inf, 1.0, 2.0, 5.0]),
        torch.tensor([3.0, inf, 3.0, inf, 2.0, 5.0]),
    ]
    for _ in range(3):
        terms = [*terms[1:], terms[0]]
        found = mean_of(terms, [1, 1, 1]).tolist()
        assert found[:2] == [2.0, inf]
        assert found[4:] == [2.0, -inf]
        assert all(map(math.isnan, found[2:4]))
    assert math.isnan(mean_of([torch.tensor([nan])], [1]).item())


def test_a_product_with_a_weight_that_overflows_is_infinite() -> None:
    assert mean_of([torch.tensor([1e308], dtype=torch.float64)], [1000]).item() == math.inf


@given(st.floats(min_value=2.0**-149, max_value=2.0**180, allow_nan=False))
def test_a_level_has_room_for_its_largest_element(largest: float) -> None:
    grid = Grid(24)
    level = grid.level(largest)
    assert level is not None
    whole = largest / grid.unit(level)
    assert whole <= 2.0**grid.bits
    assert whole >= 2.0 ** (grid.bits - WIDTH - 1)
    assert 24 * 2**grid.bits <= 2**62


@pytest.mark.parametrize("numel", [1, 3, 4, 255, 256, 257, 1000])
def test_loops_in_c_give_what_torch_gives(numel: int, monkeypatch: Any) -> None:
    terms = terms_of(random.Random(numel), 5, numel, 30, torch.float32)
    terms[2][0] = 0.5  # halves of a unit are rounded to even by both
    for weights in ([3, 1, 1 << 20, 7, 11], [1, 1, 4, 1, 1]):  # the second ones add up to 8
        ours = mean_of(terms, weights)
        with monkeypatch.context() as patch:
            patch.setattr("paceline._transport.whole.load", lambda: "there is no compiler")
            assert torch.equal(mean_of(terms, weights), ours)


@given(
    largest=st.floats(2.0**-149, 2.0**127, width=32),
    weight=st.sampled_from([1, -1, 3, -1000, 2**40]),
    terms=st.integers(1, 24),
)
def test_loops_in_c_find_the_same_level(largest: float, weight: int, terms: int) -> None:
    grid, place = Grid(terms), torch.empty(1, 3, dtype=torch.int64)
    term = torch.tensor([0.0, -largest, largest / 3])
    (level,) = add_terms([place.data_ptr()], [term], [3], [ANY_LEVEL], [True], grid.numbers, weight)
    assert level == grid.level(largest * abs(weight))
    expected = torch.empty_like(place)
    grid.add(term, weight, level, expected, fresh=True)
    assert torch.equal(place, expected)


LARGE = 1 << 17  # elements: enough to be added in one go, as what it is expected to be


@pytest.mark.parametrize("at", [0, 5000, LARGE - 1])
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("size", [1.0, 0.0, 300.0, 1e-9, math.inf, math.nan])
def test_a_large_term_that_is_not_of_the_expected_level_leaves_no_trace(
    at: int, fresh: bool, size: float
) -> None:
    grid = Grid(8)
    term = torch.zeros(LARGE) if size == 0.0 else torch.full((LARGE,), min(size, 1.0) / 7)
    term[at] = size
    place = torch.arange(LARGE).view(1, -1)
    (level,) = add_terms(
        [place.data_ptr()], [term], [LARGE], [grid.level(1.0)], [fresh], grid.numbers, 1
    )
    if size == 1.0:
        expected = torch.arange(LARGE).view(1, -1)
        grid.add(term, 1, level, expected, fresh=fresh)
        assert torch.equal(place, expected)
    else:
        assert level == (NO_LEVEL if size == 0.0 else OTHER_LEVEL)
        assert fresh or torch.equal(place, torch.arange(LARGE).view(1, -1))


def sent_terms(numel: int) -> tuple[SentTerms, dict[int, Tensor]]:
    terms = {n: torch.randn(numel // 2, 2) for n in range(3)}
    sent = SentTerms(tuple(Summed(str(n), torch.empty(numel // 2, 2)) for n in range(3)))
    sent.note(terms)
    return sent, terms


def write(terms: dict[int, Tensor]) -> None:
    terms[1][0, 1] += 1


def write_unseen(terms: dict[int, Tensor]) -> None:
    terms[1].data[0, 1] += 1


def put_another(terms: dict[int, Tensor]) -> None:
    terms[1] = terms[1] + 1


def take_away(terms: dict[int, Tensor]) -> None:
    del terms[1]


def give_other_memory(terms: dict[int, Tensor]) -> None:
    terms[1].data = terms[1].new_ones(1, 2)


@pytest.mark.parametrize("numel", [8, 1 << 16])
@pytest.mark.parametrize("change", [write, write_unseen, put_another, take_away, give_other_memory])
def test_a_term_that_changes_after_it_was_sent_is_found_as_it_was(numel: int, change: Any) -> None:
    sent, terms = sent_terms(numel)
    before = terms[1].clone()
    assert sent.numbers() == {0, 1, 2}
    assert sent.changed(terms) == {}
    change(terms)
    (found,) = sent.changed(terms).items()
    assert found[0] == 1
    assert torch.equal(found[1], before)
    sent.forget()
    assert not sent


def test_a_small_term_that_is_turned_after_it_was_sent_is_found_as_it_was() -> None:
    term = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    sent = SentTerms((Summed("p", torch.empty(2, 2)),))
    sent.note({0: term})
    term.t_()
    assert sent.changed({0: term})[0].tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_halves_are_rounded_to_even_by_loops_in_c_and_by_torch() -> None:
    halves = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 3.5, 1e9, 0.0, -2.5, 4.5])
    ours, theirs = torch.empty(2, 1, 10, dtype=torch.int64)
    for fresh in (True, False):
        add_whole([ours], [halves], [1.0], [fresh])
        Grid(1).add(halves * 4, 1, 8, theirs, fresh=fresh)  # a unit is 2**(8 * 8 - 62), which is 4
    assert ours.tolist() == theirs.tolist()
    assert (ours[0, :4] / 2).tolist() == [0, 2, 2, 0]


def test_whole_numbers_of_any_size_are_exact_in_loops_in_c() -> None:
    """Also those of more digits than a double has; the number of elements is no multiple of any."""
    chance = random.Random(1)
    values = [math.ldexp(chance.choice((-1, 1)) * chance.random(), e % 64 - 3) for e in range(1031)]
    terms = torch.tensor(values)
    scale = 3 * 2.0**-1  # half of them end in one half, or in a quarter
    exact = [round(scale * value) for value in terms.tolist()]
    sums = torch.empty(1031, dtype=torch.int64)
    add_whole([sums], [terms], [scale], [True])
    assert sums.tolist() == exact
    add_whole([sums], [terms], [-scale], [False])
    assert not sums.any()

    sums.copy_(torch.tensor(exact) + torch.arange(1031))
    for weight in (1.0, 3.0):
        found, expected = sums.clone(), (sums.double() * 0.5 / weight).float()
        means_of_whole([found.data_ptr()], [1031], [0.5], weight)
        assert torch.equal(found.view(torch.float32)[:1031], expected)


def test_terms_of_zeros_have_no_level_and_give_zeros() -> None:
    assert Grid(3).level(0.0) is None
    assert mean_of([torch.zeros(4)] * 3, [1, 1, 1]).tolist() == [0.0] * 4
