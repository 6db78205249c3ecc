"""Layout: which bucket holds which parameter's gradient, now and from the next pass on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from ..groups import Group
from ..policies import Reduction
from . import header
from .bucket import Bucket, SparseBucket
from .plan import LITTLE, Assignment, Spec, first_plan, is_little, joined, learned_plan
from .stretches import ScatteredBucket
from .tensors import local

_LARGE = 256 * 1024  # bytes


class Layout:
    """The plan, and the buckets that were last laid out as one said."""

    def __init__(
        self, params: Sequence[nn.Parameter], sparse: Sequence[bool], policy: Reduction
    ) -> None:
        self.params = tuple(params)
        self.policy = policy
        self.buckets: list[Bucket] = []
        self.rebuilt = False  # the plan was made anew, in the order of arrival
        self.scattered = False  # each rank keeps a stretch of each bucket
        self._sparse = tuple(sparse) or (False,) * len(self.params)
        self.specs = [self._spec(number) for number in range(len(self.params))]
        static = policy.static_graph
        self.first_caps, _ = policy.caps.compute_bucket_size_limits(static, policy.find_unused)
        if policy.lazy:  # one bucket for all would have to be there at once
            self.first_caps = list(policy.caps.rebuilt)
        self.plan: Assignment = first_plan(self.specs, self.first_caps)
        self._laid_out: Assignment = ()  # the plan of the buckets
        self._placed: Assignment = ()  # the plan of the places
        self._place: dict[int, tuple[int, int]] = {}
        self.first_plan = self.plan

    def _spec(self, number: int) -> Spec:
        mine = local(self.params[number])
        return Spec(mine.nbytes, (mine.dtype, mine.device), self._sparse[number])

    def is_sparse(self, number: int) -> bool:
        """Whether a parameter's gradients are sparse."""
        return self._sparse[number]

    def is_large(self, number: int) -> bool:
        """Whether a gradient is taken, and its memory given back, as soon as it comes.

        Not on a device: there one copy of a whole bucket is worth more than its memory.
        """
        on_cpu = self.params[number].device.type == "cpu"
        return on_cpu and self.specs[number].nbytes >= _LARGE

    @property
    def place(self) -> dict[int, tuple[int, int]]:
        """Where each parameter is planned to lie: bucket and slot."""
        if self._placed is not self.plan:
            self._placed = self.plan
            self._place = {n: (b, s) for b, row in enumerate(self.plan) for s, n in enumerate(row)}
        return self._place

    @property
    def narrow(self) -> bool:
        """Whether gradients travel in 16 bits, where a number of tokens would overflow."""
        return any(self._travels_as(param).itemsize < 4 for param in self.params)

    def _travels_as(self, param: nn.Parameter) -> torch.dtype:
        """The type of a gradient in its bucket; complex ones, which nobody casts, keep theirs."""
        dtype = local(param).dtype
        return dtype if dtype.is_complex else self.policy.dtype or dtype

    # -- plans --------------------------------------------------------------------------------

    @property
    def rebuilds(self) -> bool:
        """Whether the plan is made anew in the order of arrival; torch's flag forbids it."""
        allowed = self.policy.static_graph or not self.policy.find_unused
        return allowed and not self.scattered

    def follow(self, order: Sequence[int]) -> None:
        """Plan in the order in which gradients arrive."""
        caps, ours = self.policy.caps.rebuilt, self.policy.caps.are_ours
        on_gpu = self.params[0].device.type == "cuda"
        if ours and not on_gpu and is_little(self.specs):
            caps = (LITTLE,)
        plan = learned_plan(self.specs, caps, order)
        self.plan = joined(plan, self.specs) if ours and on_gpu else plan
        self.rebuilt = True

    def keep_only(self, wanted: Callable[[int], bool]) -> None:
        """Drop parameters that are not ``wanted`` from the plan, unless that would drop all."""
        rows = (tuple(n for n in row if wanted(n)) for row in self.plan)
        self.plan = tuple(row for row in rows if row) or self.plan

    def forget(self) -> None:
        """Plan as before the first pass; the buckets are gone."""
        self.buckets = []
        self.plan, self.rebuilt = self.first_plan, False

    def scatter(self) -> None:
        """Keep to one plan from now on, of buckets of which each rank gets its stretch."""
        self.scattered = True
        self.first_plan = first_plan(self.specs, self.policy.caps.rebuilt)
        self.forget()

    # -- buckets ------------------------------------------------------------------------------

    @property
    def is_settled(self) -> bool:
        """Whether the buckets are laid out as planned."""
        if self.plan is not self._laid_out and self.plan == self._laid_out:
            self._laid_out = self.plan
        return bool(self.buckets) and self.plan is self._laid_out

    def settle(self, group: Group, *, header_rides: bool) -> bool:
        """Lay the buckets out as planned, if they are not; gradients move with them."""
        if self.is_settled:
            return False
        self._laid_out = self.plan
        held = {n: p.grad for n, p in enumerate(self.params) if p.grad is not None}
        views = {id(grad) for bucket in self.buckets for grad in bucket.lent()}
        self.buckets = []
        last = len(self.plan) - 1
        self.buckets = [
            self._allocate(i, row, group, header_rides=header_rides and i == last)
            for i, row in enumerate(self.plan)
        ]
        for bucket in self.buckets if views else ():
            for slot, number in enumerate(bucket.numbers):
                if bucket.lends and number in held and id(held[number]) in views:
                    bucket.claim()
                    bucket.views[slot].copy_(local(held.pop(number)))
                    bucket.params[slot].grad = bucket.grads[slot]
            bucket.let_go()
        return True

    def carries_header(self, numbers: Sequence[int]) -> bool:
        """Whether a header fits behind these parameters' gradients."""
        dtype = self._travels_as(self.params[numbers[0]])
        return not self.scattered and not self._sparse[numbers[0]] and header.can_ride(dtype)

    def _allocate(
        self, index: int, numbers: Sequence[int], group: Group, *, header_rides: bool
    ) -> Bucket:
        params = [self.params[n] for n in numbers]
        if self._sparse[numbers[0]]:
            return SparseBucket.hold(index, numbers[0], params[0])
        kind = ScatteredBucket if self.scattered else Bucket
        rides = header_rides and self.carries_header(numbers)
        extra = header.length(group.size(), len(self.params)) if rides else 0
        return kind.allocate(
            index,
            numbers,
            params,
            group,
            dtype=self._travels_as(params[0]),
            lends=self.policy.grads_are_views,
            extra=extra,
            lazy=self.policy.lazy,
        )


def agreed_order(
    group: Group, arrival: Sequence[int], params: int, device: torch.device
) -> list[int]:
    """The order in which gradients last came on rank 0; every rank calls it."""
    order = last_times(arrival)
    agreed = torch.full((params,), -1, dtype=torch.int64)
    agreed[: len(order)] = torch.tensor(order, dtype=torch.int64)
    agreed = agreed.to(device)
    group.broadcast(agreed, 0)
    return [number for number in agreed.tolist() if number >= 0]


def last_times(arrival: Sequence[int]) -> list[int]:
    """Each number once, in the order of its last occurrence."""
    return list(dict.fromkeys(reversed(arrival)))[::-1]
