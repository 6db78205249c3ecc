"""ReducerSummary: what a reducer can say about its buckets and passes, for torch's logging data."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from .plan import Assignment


@dataclass(frozen=True)
class ReducerSummary:
    """Buckets and passes so far; parameters are given by their indices."""

    sizes: Sequence[int]  # of the parameters, in bytes
    first_plan: Assignment  # what each bucket held before the first pass
    first_caps: Sequence[int]  # how large buckets could be then, in bytes
    plan: Assignment  # what each bucket holds now
    rebuilt: bool  # the plan was made anew, in the order in which gradients came
    arrival: Sequence[int]  # that order
    unused: Collection[int]  # parameters that this rank's last two passes did not reach
    used: Sequence[int]  # by parameter: how many ranks' graphs reached it in the last pass
    steady: bool  # there were passes, and all reached the same parameters

    @property
    def bucket_sizes(self) -> list[int]:
        """In bytes, of the buckets of now."""
        return self._sizes_of(self.plan)

    @property
    def first_bucket_sizes(self) -> list[int]:
        """In bytes, of the buckets before the first pass."""
        return self._sizes_of(self.first_plan)

    def _sizes_of(self, plan: Assignment) -> list[int]:
        return [sum(self.sizes[index] for index in row) for row in plan]
