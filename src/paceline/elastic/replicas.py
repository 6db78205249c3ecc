"""Whether all ranks have the same state, and who does not."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, cast

import torch

from ..errors import ReplicasDifferError, StartMismatchError, StepMismatchError
from ..groups import Group
from .digests import digests, in_one
from .state import GRADIENT, MODEL, Belongings, JobState

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Odd:
    """Ranks whose state is not that of the majority, of which ``root`` is one."""

    root: int
    others: Sequence[int]


def compare_replicas(group: Group, state: JobState) -> Odd | None:
    """Who has another state than most ranks; None if all have the same. All ranks call it."""
    parts = (MODEL, GRADIENT, "job.optimizers.")
    names = [name for name in state.tensors if name.startswith(parts)]
    mine = in_one(digests({name: state.tensors[name] for name in names}))
    own = torch.tensor([mine], dtype=torch.int64, device=group.device)
    found = torch.empty(group.size(), dtype=torch.int64, device=group.device)
    group.all_gather_single(found, own)
    return _judge(group, state, [int(number) for number in found.tolist()])


def _judge(group: Group, state: JobState, found: Sequence[int]) -> Odd | None:
    (usual, count), *others = Counter(found).most_common()
    if not others:
        return None
    odd = [rank for rank, number in enumerate(found) if number != usual]
    if 2 * count <= len(found):
        raise ReplicasDifferError(group.rank(), state.steps, list(found))
    log.error(
        "rank %d: after %d steps the state of %s differs from the others: a bit was flipped in "
        "memory, or something changed weights on that rank only. It gets the state of rank %d",
        group.rank(),
        state.steps,
        _named(odd),
        found.index(usual),
    )
    return Odd(found.index(usual), odd)


def compare_starts(group: Group, belongings: Belongings, saved: int) -> int:
    """The rank whose state all begin with: that with the newest save, or rank 0.

    All must have the same model, data and rules; where nobody has a save, the same optimizer
    settings too. Other initial weights than those of rank 0 are named.
    """
    _require_alike(group, belongings.likeness())
    model = {n: t for n, t in belongings.take(0).tensors.items() if n.startswith(MODEL)}
    mine = [saved, belongings.settings, in_one(digests(model))]
    everyone: Any = group.all_gather_object(mine)
    steps = [row[0] for row in everyone]
    if max(steps) >= 0:
        return steps.index(max(steps))
    settings = {rank: row[1] for rank, row in enumerate(everyone)}
    if len(set(settings.values())) > 1:
        raise StepMismatchError(group.rank(), "optimizer settings", settings)
    others = [rank for rank, row in enumerate(everyone) if row[2] != everyone[0][2]]
    if others:
        log.warning(
            "rank %d: %s had other initial weights than rank 0, and uses those of rank 0. "
            "If you did not intend this, use the same seed on all ranks",
            group.rank(),
            _named(others),
        )
    return 0


def _require_alike(group: Group, likeness: Mapping[str, str]) -> None:
    """Raise on all ranks, with the first thing that differs, unless all have the same."""
    mine = blake2b(repr(sorted(likeness.items())).encode(), digest_size=16).hexdigest()
    if len(set(cast("list[str]", group.all_gather_object(mine)))) == 1:
        return
    everyone = cast("list[dict[str, str]]", group.all_gather_object(dict(likeness)))
    for what in dict.fromkeys(name for one in everyone for name in one):
        said = {rank: one.get(what, "none") for rank, one in enumerate(everyone)}
        if len(set(said.values())) > 1:
            raise StartMismatchError(group.rank(), what, said)


def _named(ranks: Sequence[int]) -> str:
    return ", ".join(f"rank {rank}" for rank in ranks)
