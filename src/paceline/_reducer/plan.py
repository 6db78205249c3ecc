"""Which bucket holds what: pure functions on sizes and kinds."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

Assignment = tuple[tuple[int, ...], ...]  # for each bucket, the numbers of its parameters

LITTLE = 2 * 1024 * 1024  # bytes


@dataclass(frozen=True)
class Spec:
    """What the planner needs to know of a parameter."""

    nbytes: int
    kind: Hashable  # only gradients of one kind (type, device) share a bucket
    sparse: bool = False  # travels alone


def assign(
    specs: Sequence[Spec], caps: Sequence[int], order: Sequence[int] | None = None
) -> Assignment:
    """Fill buckets one after the other, each kind its own row of them.

    A bucket takes parameters until it reaches its cap; the last cap holds for all further buckets
    of that kind. With ``order`` the parameters are taken in it and buckets stand in the order they
    were closed; without, buckets stand in the order of their first parameters.
    """
    done: list[list[int]] = []
    open_: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    turn: dict[Hashable, int] = {}
    for number in range(len(specs)) if order is None else order:
        spec = specs[number]
        if spec.sparse:
            done.append([number])
            continue
        bucket = open_.setdefault(spec.kind, [])
        bucket.append(number)
        filled[spec.kind] = filled.get(spec.kind, 0) + spec.nbytes
        if filled[spec.kind] >= caps[turn.get(spec.kind, 0)]:
            done.append(open_.pop(spec.kind))
            filled[spec.kind] = 0
            turn[spec.kind] = min(turn.get(spec.kind, 0) + 1, len(caps) - 1)
    done.extend(bucket for bucket in open_.values() if bucket)
    if order is None:
        done.sort(key=min)
    return tuple(map(tuple, done))


def first_plan(specs: Sequence[Spec], caps: Sequence[int]) -> Assignment:
    """Before anything is known: gradients come about in the reverse order of the parameters."""
    return tuple(reversed(assign(specs, caps)))


def learned_plan(specs: Sequence[Spec], caps: Sequence[int], arrival: Sequence[int]) -> Assignment:
    """Plan in the order of arrival; parameters without a gradient come last, the last one first."""
    came = set(arrival)
    rest = [number for number in reversed(range(len(specs))) if number not in came]
    return assign(specs, caps, [*arrival, *rest])


def is_little(specs: Sequence[Spec]) -> bool:
    """Whether all gradients that share buckets had better leave at once.

    Each bucket is one more time at which ranks wait for each other. For two buckets of 0.8 MiB that
    takes longer than the exchange of the first, which an early start could hide (0.3 ms of a step
    of 11 ms, two ranks over shm on 16 cores).
    """
    return sum(spec.nbytes for spec in specs if not spec.sparse) <= LITTLE


def joined(plan: Assignment, specs: Sequence[Spec]) -> Assignment:
    """Join neighbours of one kind, two by two, but for the first bucket and the last two.

    On a GPU the call that sends a bucket off takes its time (0.2 ms of Python's, two ranks on an
    H200) however large the bucket is. The first is left small, so that the exchange begins early,
    and the last ones, so that it ends soon.
    """
    first, middle, last = plan[:1], plan[1:-2], plan[max(1, len(plan) - 2) :]
    rows: list[tuple[int, ...]] = []
    may_grow = False  # the bucket before was not joined yet
    for row in middle:
        alike = may_grow and specs[rows[-1][0]].kind == specs[row[0]].kind
        if alike and not specs[row[0]].sparse and not specs[rows[-1][0]].sparse:
            rows[-1] += row
            may_grow = False
        else:
            rows.append(row)
            may_grow = True
    return (*first, *rows, *last)


def triggers(
    plan: Assignment, arrival: Sequence[int], large: frozenset[int]
) -> dict[int, int | None]:
    """Which parameters tell of their arrival, each with the bucket it completes, if any.

    A hook for every parameter would cost more than the exchange of a small model. The one that
    came last in a bucket speaks for all in it; large ones speak for themselves, so that the memory
    of their gradients is given back at once.
    """
    place = {number: at for at, number in enumerate(arrival)}
    speaking: dict[int, int | None] = dict.fromkeys(sorted(large))
    for index, bucket in enumerate(plan[:-1]):  # the last one waits for the end anyway
        came = [number for number in bucket if number in place]
        if came:
            speaking[max(came, key=place.__getitem__)] = index
    return speaking
