"""Which stretches of the heap are in use: nothing overlaps, nothing is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline._transport.heap import ALIGNMENT, Heap

START, END = 4096, 4096 + 64 * ALIGNMENT


def test_neighbours_grow_together_again() -> None:
    heap = Heap(START, END)
    parts = [heap.take(16 * ALIGNMENT) for _ in range(4)]
    assert heap.take(1) is None
    for part in (parts[1], parts[3], parts[0], parts[2]):
        assert part is not None
        heap.give_back(part)
    assert heap.take(END - START) == START


def test_the_first_stretch_that_fits_is_taken() -> None:
    heap = Heap(START, END)
    first, second = heap.take(ALIGNMENT), heap.take(ALIGNMENT)
    assert (first, second) == (START, START + ALIGNMENT)
    heap.give_back(START)
    assert heap.take(2 * ALIGNMENT) == START + 2 * ALIGNMENT
    assert heap.take(1) == START


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 20 * ALIGNMENT)), max_size=60))
def test_stretches_never_overlap_and_all_come_back(steps: list[tuple[bool, int]]) -> None:
    heap = Heap(START, END)
    held: dict[int, int] = {}
    for free, number in steps:
        if free and held:
            start = sorted(held)[number % len(held)]
            heap.give_back(start)
            del held[start]
            continue
        start = heap.take(number)
        if start is None:
            continue
        assert start % ALIGNMENT == 0
        assert start >= START
        assert start + number <= END
        assert all(start + number <= s or s + n <= start for s, n in held.items() if n and number)
        held[start] = number
    for start in held:
        heap.give_back(start)
    assert heap.used == 0
    assert heap.take(END - START) == START
