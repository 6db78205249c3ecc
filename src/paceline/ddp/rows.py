"""Rows: how SyncBatchNorm layers go on while ranks run out of inputs.

Inside Join every collective of every such layer of a model, in forward or backward, is one gather
of rows of one length. So a rank that has run out can take part without knowing which layer calls: a
thread of it gives empty rows, for as long as any rank calls. When a gather brings nothing but empty
rows, all have run out, and the threads end together.

That needs a group that nobody else uses, since the thread's gathers stand in no order with what
the rank itself does.
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress

import torch
from torch import Tensor

from ..errors import ModuleStateError, PeerDiedError
from ..groups import Group

log = logging.getLogger(__name__)

_EMPTY = 0  # the number of no call
_PATIENCE = 1.0  # seconds for a thread to see that its group is over


class Rows:
    """One rank's side of the gathers, for layers of at most ``channels`` channels."""

    def __init__(self, group: Group, channels: int, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._width = 2 + 2 * channels  # the call, two numbers a channel, a count
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def gather(self, call: int, values: Tensor) -> Tensor:
        """Every rank's ``values``, by rank; zeros from those that have run out.

        ``call`` is above zero and says which one it is: all ranks that call must agree.
        """
        rank = self._group.rank()
        if self._thread is not None:
            raise ModuleStateError(
                f"rank {rank}: a SyncBatchNorm layer was called inside Join after this rank had "
                "run out or failed; the other ranks go on without it.",
                "Let the exception end the Join context.",
            )
        rows = self._exchange(call, values)
        calls = rows[:, 0].tolist()
        if any(other not in (call, _EMPTY) for other in calls):
            raise ModuleStateError(
                f"rank {rank}: the ranks are in different SyncBatchNorm calls (by rank: "
                f"{[int(other) for other in calls]}; 0 has run out). Each of them raises this.",
                "Let all ranks run the same layers in the same order.",
            )
        return rows[:, 1 : 1 + values.numel()]

    def stand_in(self) -> None:
        """From now on answer the others' calls, in a thread; this rank makes none any more."""
        if self._thread is None:
            name = f"paceline-layers-{self._group.rank()}"
            self._thread = threading.Thread(target=self._answer, name=name, daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Answer until all ranks only answer; every rank calls it."""
        self.stand_in()
        assert self._thread is not None
        self._thread.join()
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """End the group, and with it every call and every answer; some rank does not close."""
        if self._thread is not None:
            self._thread.join(_PATIENCE)
            if isinstance(self._error, PeerDiedError):  # which says more than an abort would
                return
        with suppress(RuntimeError):
            self._group.abort()
        if self._thread is not None:
            self._thread.join(_PATIENCE)  # gloo frees nobody; the thread holds no process up

    def _answer(self) -> None:
        nothing = torch.empty(0, dtype=torch.float64, device=self._device)
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            while self._exchange(_EMPTY, nothing)[:, 0].any():
                pass
        except Exception as error:  # the others see it too, wherever they are
            log.warning("rank %d no longer takes part for Join: %s", self._group.rank(), error)
            self._error = error

    @torch.no_grad()
    def _exchange(self, call: int, values: Tensor) -> Tensor:
        own = torch.zeros(self._width, dtype=torch.float64, device=self._device)
        own[0] = call
        own[1 : 1 + values.numel()] = values.flatten()
        rows = own.new_empty(self._group.size(), self._width)
        self._group.all_gather_single(rows, own)
        return rows
