"""How an epoch is cut into steps, and a step into shards. Pure.

An epoch is one row of samples. Steps of ``batch`` samples are cut off it one after another, and
each step into ``shards`` parts that differ by one sample at most, the larger ones first. What is
left at the end is a smaller step; if it has fewer samples than there are shards, it goes into the
step before, so that no shard is ever empty. Nothing here knows how many ranks there are.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import LoaderArgumentError
from .shards import sizes_of_parts

__all__ = ["EpochCut"]


@dataclass(frozen=True, slots=True)
class EpochCut:
    """Positions in an epoch of ``length`` samples: which belong to a step, which to a shard."""

    length: int
    batch: int
    shards: int
    drop_last: bool = False

    def __post_init__(self) -> None:
        for name in ("batch", "shards"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise LoaderArgumentError(name, value, "it must be an integer above 0")
        if self.batch < self.shards:
            problem = f"the {self.shards} shards of a step need a sample each"
            raise LoaderArgumentError("batch", self.batch, problem)
        least = self.batch if self.drop_last else self.shards
        if self.length < least:
            problem = f"it has {self.length} samples, and the first step needs {least}"
            raise LoaderArgumentError("dataset", f"of length {self.length}", problem)

    @property
    def steps(self) -> int:
        """How many steps an epoch has."""
        whole, rest = divmod(self.length, self.batch)
        return whole + (not self.drop_last and (rest >= self.shards or not whole))

    def step(self, step: int) -> range:
        """The positions of a step's samples."""
        start = step * self.batch
        ends_epoch = step == self.steps - 1 and not self.drop_last
        return range(start, self.length if ends_epoch else start + self.batch)

    def shard(self, step: int, index: int) -> range:
        """The positions of one shard's samples: neighbours in the epoch's row."""
        positions = self.step(step)
        sizes = sizes_of_parts(len(positions), self.shards)
        start = sum(sizes[:index])
        return positions[start : start + sizes[index]]
