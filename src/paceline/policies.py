"""Settings a user passes in: frozen, and checked when they are made."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from typing_extensions import Self

MIB = 1024 * 1024
DEFAULT_CAP_MIB = 25
FIRST_BUCKET_BYTES = MIB


@dataclass(frozen=True)
class BucketCaps:
    """How large the buckets of a reduction may grow.

    A bucket is closed by the gradient that makes it reach its cap. The first one is small unless a
    size was asked for, so that the exchange begins early.
    """

    bucket_bytes_cap: int
    per_bucket_bytes_caps: tuple[int, ...]  # one for each bucket; empty: the same for all
    first_bucket_bytes_cap: int

    @classmethod
    def create(
        cls,
        bucket_cap_mb: float | None,
        bucket_cap_mb_list: Sequence[float] | None,
        use_python_reducer: bool = False,
    ) -> Self:
        """From sizes in MiB; a list wins over the single size."""
        if not bucket_cap_mb_list:
            cap = int((DEFAULT_CAP_MIB if bucket_cap_mb is None else bucket_cap_mb) * MIB)
            return cls(cap, (), FIRST_BUCKET_BYTES if bucket_cap_mb is None else cap)
        if use_python_reducer:
            # an AssertionError because torch raises one here
            raise AssertionError("when using bucket_cap_mb_list, python reducer is not supported")
        caps = tuple(int(cap * MIB) for cap in bucket_cap_mb_list)
        return cls(max(caps), caps, max(caps))

    @property
    def bucket_cap_mb(self) -> int:
        """The cap in whole MiB."""
        return self.bucket_bytes_cap // MIB

    @property
    def are_ours(self) -> bool:
        """Whether nobody asked for a size."""
        return (
            self.first_bucket_bytes_cap < self.bucket_bytes_cap and not self.per_bucket_bytes_caps
        )

    @property
    def has_custom_per_bucket_caps(self) -> bool:
        """Whether each bucket was given a cap of its own."""
        return bool(self.per_bucket_bytes_caps)

    def compute_bucket_size_limits(
        self, static_graph: bool, find_unused_parameters: bool
    ) -> tuple[list[int], list[int]]:
        """Caps for the first pass, and for the plan made after it (empty: :attr:`rebuilt`).

        Before the order of arrival is known, one bucket for all is best: whatever would be sent
        early might be incomplete. Where the plan will not be made anew, it has its caps at once.
        """
        if self.per_bucket_bytes_caps:
            caps = list(self.per_bucket_bytes_caps)
            return caps, caps
        if static_graph or not find_unused_parameters:
            return [sys.maxsize], []
        return list(self.rebuilt), []

    @property
    def rebuilt(self) -> tuple[int, ...]:
        """Caps for buckets in order of arrival."""
        if self.per_bucket_bytes_caps:
            return self.per_bucket_bytes_caps
        if self.first_bucket_bytes_cap < self.bucket_bytes_cap:
            return self.first_bucket_bytes_cap, self.bucket_bytes_cap
        return (self.bucket_bytes_cap,)


@dataclass(frozen=True)
class Reduction:
    """How gradients are averaged."""

    caps: BucketCaps
    grads_are_views: bool = True  # .grad is a stretch of its bucket
    find_unused: bool = False  # torch's flag: the plan of the first pass is kept
    static_graph: bool = False  # a graph that changes is an error
    strict: bool = False  # refuse what torch refuses: unused parameters without find_unused
    skip_unused: bool = False  # leave out of the buckets what the first pass did not use
    dtype: torch.dtype | None = None  # of the exchange; None: that of the gradients
    reads_late: bool | None = None  # headers a pass later; None: where reading stops a device
    even_alone: bool = False  # go through the motions in a group of one as well
    lazy: bool = False  # buckets have memory only while a pass needs it
    shards: int | None = None  # of a step, summed in a way that does not depend on who has them
