"""The fake engine: any number of ranks and no peers, for planning and tracing.

Every call succeeds at once. Tensors that would come from other ranks get this rank's own values, so
shapes, dtypes and the order of calls are right, and the numbers are those of a world whose ranks
all hold the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..engine import Call, Capabilities
from ..work import Finished


class FakeEngine:
    """One rank of a world without other ranks."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self.capabilities = Capabilities(
            backend="fake",
            devices=frozenset({"cpu", "cuda", "meta", "mps", "xpu"}),
            abortable=True,
            averages=True,
            peers=False,
        )

    @torch.no_grad()
    def run(self, call: Call) -> None:
        given, taken = call.inputs, call.outputs
        if call.kind in ("all_gather", "gather"):
            for tensor in taken:
                if tensor.shape == given[0].shape:
                    tensor.copy_(given[0])
        elif call.kind == "all_gather_single":
            for part in taken[0].view(-1).split(given[0].numel() or 1):
                part.copy_(given[0].view(-1))
        elif call.kind in ("scatter", "reduce_scatter", "all_to_all") and given:
            for i, tensor in enumerate(taken):
                source = given[i if call.kind == "all_to_all" else self._rank]
                if source.shape == tensor.shape:
                    tensor.copy_(source)
        elif call.kind == "reduce_scatter_single":
            part = given[0].view(-1).split(taken[0].numel() or 1)[self._rank]
            taken[0].view(-1).copy_(part)
        elif call.kind == "all_to_all_single" and given[0].shape == taken[0].shape:
            taken[0].copy_(given[0])

    def start(self, call: Call) -> Finished:
        self.run(call)
        return Finished(call.outputs)

    def reduces(self, dtype: torch.dtype, reduction: str) -> bool:
        return True

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype)

    def progress(self) -> None:
        """Nothing to do."""

    def abort(self) -> None:
        """Nothing to do: nobody waits."""

    def shutdown(self) -> None:
        """Nothing to do: there are no resources."""
