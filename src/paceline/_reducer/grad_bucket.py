"""GradBucket: a bucket as communication hooks see it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from .bucket import Bucket


class GradBucket:
    """A bucket as communication hooks see it; the interface of ``torch.distributed.GradBucket``."""

    def __init__(self, bucket: Bucket, *, last: bool, weight: float = 1.0) -> None:
        self._bucket = bucket
        self._last = last
        self._buffer = bucket.payload
        # What this rank's gradients were multiplied by, 0 while it stands in. A hook that keeps
        # something from one pass to the next keeps it without: the next weight may be another.
        self.weight = weight

    def index(self) -> int:
        """The bucket's place; buckets are launched in this order."""
        return self._bucket.index

    def buffer(self) -> Tensor:
        """All gradients, flat."""
        return self._buffer

    def gradients(self) -> list[Tensor]:
        """All gradients, each in the shape of its parameter."""
        if self._buffer.is_sparse:
            return [self._buffer]
        if self._buffer.data_ptr() == self._bucket.buffer.data_ptr():
            return list(self._bucket.views)
        sizes = [view.numel() for view in self._bucket.views]
        parts = self._buffer.split(sizes)
        return [part.view(p.shape) for part, p in zip(parts, self._bucket.params, strict=True)]

    def parameters(self) -> list[Tensor]:
        """The parameters they belong to."""
        return list(self._bucket.params)

    def is_last(self) -> bool:
        """Whether no bucket comes after this one in the pass."""
        return self._last

    def set_buffer(self, buffer: Tensor) -> None:
        """Put another tensor of the same size in the place of the buffer."""
        self._buffer = buffer

    def __repr__(self) -> str:
        return f"GradBucket({self.index()}, {self._buffer.numel()} x {self._buffer.dtype})"
