"""The parts of a global batch, and who computes which. Pure: no tensor, no group.

A global batch is cut into ``count`` shards, a number that is fixed for the life of a run. Ranks
only share them out. What a shard is, which samples and which random numbers it has, follows from
the numbers in :class:`Shard` and from nothing else: not from the rank that computes it, nor from
how many ranks there are. So any rank may compute any shard, and again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from ..errors import ShardNumberError, ShareError

__all__ = ["Shard", "share_out", "sizes_of_parts"]

_LIMIT = 1 << 64  # numbers are packed as eight bytes into keys


@dataclass(frozen=True, slots=True)
class Shard:
    """One of the ``count`` parts of the global batch of a step; ``index`` is its number.

    ``step`` counts from 0 within ``epoch``; without epochs, count all steps and leave ``epoch`` at
    0. ``samples`` is the number of samples, which is its weight in an average over samples; a shard
    with 0 samples is allowed. ``source`` describes the data it was cut from: ranks whose shards
    have different sources do not work on one batch.
    """

    seed: int
    step: int
    index: int
    count: int
    epoch: int = 0
    samples: int = 1
    source: str = ""

    def __post_init__(self) -> None:
        for field in ("seed", "step", "index", "count", "epoch", "samples"):
            value = getattr(self, field)
            if type(value) is not int or not 0 <= value < _LIMIT:
                raise ShardNumberError(field, value, "is no whole number from 0 to 2**64 - 1")
        if self.index >= self.count:
            raise ShardNumberError("index", self.index, f"is not below count={self.count}")

    @property
    def place(self) -> str:
        """A description of the step, equal for all its shards."""
        source = f", of {self.source}" if self.source else ""
        return f"step {self.step} of epoch {self.epoch} with seed {self.seed}{source}"

    def key(self, purpose: str = "training") -> bytes:
        """Return 32 bytes that depend on seed, epoch, step, index and ``purpose`` only.

        It is a hash. With a sum such as ``seed + step``, the second step of seed 0 would have the
        random numbers of the first step of seed 1.
        """
        numbers = (self.seed, self.epoch, self.step, self.index)
        packed = b"".join(number.to_bytes(8, "little") for number in numbers)
        return blake2b(packed + purpose.encode(), digest_size=32, person=b"paceline shard").digest()


def share_out(
    count: int, members: int | Sequence[int], rank: int, *, step: int = 0
) -> tuple[int, ...]:
    """Return which of ``count`` shards ``rank`` computes; each shard is computed by one rank.

    ``members`` is the number of ranks, or the list of ranks if some are missing, in any order. Each
    rank gets consecutive shards, and their numbers differ by at most one. If ``count`` cannot be
    divided equally, the first members get one more; with ``step`` these change from step to step.
    """
    ranks = range(members) if isinstance(members, int) else sorted(members)
    if len(set(ranks)) != len(ranks) or rank not in ranks:
        raise ShareError(rank, tuple(ranks))
    turn = step % len(ranks)
    sizes = sizes_of_parts(count, len(ranks))
    sizes = sizes[-turn:] + sizes[:-turn] if turn else sizes
    place = ranks.index(rank)
    start = sum(sizes[:place])
    return tuple(range(start, start + sizes[place]))


def sizes_of_parts(total: int, parts: int) -> list[int]:
    """``total`` cut into ``parts`` whole numbers, as equal as can be; the larger ones first."""
    least, more = divmod(total, parts)
    return [least + (part < more) for part in range(parts)]
