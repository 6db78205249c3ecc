"""The account of a step: what each rank has done of it, and what all need to know before they add.

One small all-reduce, which takes the largest of each number. A number that must be the same on all
ranks goes twice, as it is and negative: when it is, the two maxima cancel. In the same way the
highest and the lowest rank that computed a shard come out, and the highest and the lowest level of
a tensor's terms (``sums.py``). Only when something is wrong do ranks exchange words.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import torch

from ..errors import (
    NonFiniteGradientError,
    PeerError,
    ShardAccountError,
    StepMismatchError,
)
from ..groups import Group, ReduceOp
from .sum_places import NONFINITE, Sum

_NOTHING = -(1 << 62)
_IN_PLACE = 2  # of a tensor: it has a term, and one of the expected level


@dataclass(frozen=True)
class Done:
    """What one rank has to say about a step."""

    shards: int  # of the step
    weights: Mapping[int, int]  # of the shards that this rank has computed
    same: Mapping[str, str]  # must be the same on all ranks that say anything; by what it is
    trouble: str = ""  # why this rank cannot go on
    call: bool = False  # this rank wants all ranks to stop and look after the step
    finite: bool = False  # infinities and NaNs are refused; the same on all ranks
    late: bool = False  # what this rank had sent early has changed since


@dataclass(frozen=True)
class Agreed:
    """What the ranks have done together."""

    weight: int  # of all shards
    touched: frozenset[int]  # tensors that a shard had a term for
    levels: dict[int, list[int]] = field(default_factory=dict)  # of their terms, highest first
    call: bool = False  # a rank wants all ranks to stop and look
    in_place: frozenset[int] = frozenset()  # promised tensors with terms of the expected level
    late: bool = False  # on some rank


def settle(group: Group, done: Done, tensors: int, sums: Mapping[int, Sum]) -> Agreed:
    """Exchange accounts; raises on all ranks unless each shard was computed once."""
    said = _write(group, done, tensors, sums)
    heard = _largest(group, said)
    fixed = 3 + 2 * len(_SAME)
    owners = heard[fixed : fixed + 3 * done.shards]
    if heard[0] or not _agrees(heard[3:fixed]) or not _complete(owners):
        _explain(group, done)
    terms, highest, lowest, nonfinite = _columns(4, heard[fixed + 3 * done.shards :])
    touched = frozenset(n for n, kind in enumerate(terms) if kind > 0)
    ends = enumerate(zip(highest, lowest, strict=True))
    levels = {n: [high, -low] for n, (high, low) in ends if high != _NOTHING}
    if done.finite and any(nonfinite):
        _name_nonfinite(group, sums)
    found = _all_levels(group, levels, sums) if levels else {}
    for number in [n for n, counted in enumerate(nonfinite) if counted]:
        beside = [] if sums[number].promised else [0]  # counted beside a level, be it one of zeros
        found[number] = [*found.get(number, beside), NONFINITE]
    in_place = frozenset(n for n, kind in enumerate(terms) if kind == _IN_PLACE)
    return Agreed(sum(owners[2::3]), touched, found, bool(heard[1]), in_place, bool(heard[2]))


_SAME = (
    "step",
    "number of threads",
    "trained parameters",
    "optimizer settings",
    "number of backward passes",
)


def _write(group: Group, done: Done, tensors: int, sums: Mapping[int, Sum]) -> list[int]:
    said = [int(bool(done.trouble)), int(done.call), int(done.late)]
    for name in _SAME:
        number = _digest(done.same[name]) if name in done.same else None
        said += [_NOTHING, _NOTHING] if number is None else [number, -number]
    rank, nobody = group.rank(), [_NOTHING, _NOTHING, 0]
    for shard in range(done.shards):
        mine = shard in done.weights
        said += [rank, -rank, done.weights[shard]] if mine else nobody
    for number in range(tensors):
        said += _row(sums.get(number))
    return said


def _row(found: Sum | None) -> list[int]:
    """Whether there is a term, the highest and lowest level, and whether all are finite."""
    if found is None or not (found.touched or found.others):
        return [0, _NOTHING, _NOTHING, 0]
    if found.promised and not found.others:
        return [1 if found.level is None else _IN_PLACE, _NOTHING, _NOTHING, 0]
    levels = [level for level in found.levels_left() if level != NONFINITE]
    ends = [max(levels), -min(levels)] if levels else [_NOTHING, _NOTHING]
    in_place = found.promised and found.level is not None
    touched = (_IN_PLACE if in_place else 1) if found.touched else 0
    return [touched, *ends, int(NONFINITE in found.others)]


def _all_levels(
    group: Group, ends: Mapping[int, Sequence[int]], sums: Mapping[int, Sum]
) -> dict[int, list[int]]:
    """From the highest and lowest level of each tensor; what lies between is asked for."""
    between = [(n, level) for n, (top, low) in ends.items() for level in range(top - 1, low, -1)]
    mine = [int(n in sums and level in sums[n].levels_left()) for n, level in between]
    found = dict(zip(between, _largest(group, mine), strict=True)) if between else {}
    return {
        n: [lv for lv in range(top, low - 1, -1) if lv in (top, low) or found[n, lv]]
        for n, (top, low) in ends.items()
    }


def _largest(group: Group, numbers: Sequence[int]) -> list[int]:
    if group.size() == 1:
        return list(numbers)
    tensor = torch.frombuffer(array("q", numbers), dtype=torch.int64).to(group.device)
    group.all_reduce(tensor, ReduceOp.MAX)
    heard: list[int] = tensor.tolist()
    return heard


def _agrees(pairs: Sequence[int]) -> bool:
    return all(high in (_NOTHING, -low) for high, low in zip(*_columns(2, pairs), strict=True))


def _complete(owners: Sequence[int]) -> bool:
    highest, lowest, _ = _columns(3, owners)
    return all(high == -low for high, low in zip(highest, lowest, strict=True))


def _columns(width: int, numbers: Sequence[int]) -> list[Sequence[int]]:
    """Of a table that is written row by row."""
    return [numbers[column::width] for column in range(width)]


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "little")


def _name_nonfinite(group: Group, sums: Mapping[int, Sum]) -> None:
    """Tell which ranks have infinities or NaNs in what: all know that one has."""
    mine = [found.of.name for found in sums.values() if NONFINITE in found.others]
    everyone: Any = group.all_gather_object(mine) if group.size() > 1 else [mine]
    named = {rank: tuple(names) for rank, names in enumerate(everyone) if names}
    raise NonFiniteGradientError(group.rank(), named)


def _explain(group: Group, done: Done) -> None:
    """Tell what is wrong: every rank comes here, since all have heard the same."""
    mine: Any = [sorted(done.weights), dict(done.same), done.trouble]
    everyone: Any = group.all_gather_object(mine) if group.size() > 1 else [mine]
    rank = group.rank()
    troubles = {r: text for r, (_, _, text) in enumerate(everyone) if text}
    if troubles:
        raise PeerError(rank, troubles, "in this step")
    for name in _SAME:
        values = {r: same[name] for r, (_, same, _) in enumerate(everyone) if name in same}
        if len(set(values.values())) > 1:
            raise StepMismatchError(rank, name, values)
    owners: dict[int, list[int]] = {shard: [] for shard in range(done.shards)}
    for r, (shards, _, _) in enumerate(everyone):
        for shard in shards:
            owners[shard].append(r)
    missing = [shard for shard, ranks in owners.items() if not ranks]
    twice = {shard: ranks for shard, ranks in owners.items() if len(ranks) > 1}
    raise ShardAccountError(rank, done.shards, missing, twice)
