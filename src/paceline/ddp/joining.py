"""How DistributedDataParallel goes on while ranks run out of inputs.

A rank that has run out takes part in the others' passes with weight 0. Whether there are any others
it learns from the header of the very pass it takes part in (``_reducer/header.py``): when no rank
was active, all have run out. So ranks with inputs left send exactly what they send outside of Join.
Buffers are made alike at the end of a pass instead of before a forward, by the last of the active
ranks, which all know from the same header.

In a Join with other joinables, or in torch's, the protocol of ``join/protocol.py`` is spoken: a
rank says before a forward that it goes on, and whether an averaged pass will follow.

SyncBatchNorm layers have a group and a protocol of their own (``rows.py``).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch.distributed import Work as TorchWork
from torch.nn import SyncBatchNorm

from ..errors import ModuleStateError
from ..groups import ReduceOp
from ..join import Join, JoinConfig, JoinHook
from ..recorder import events
from .rows import Rows
from .sync_batchnorm import Lent, lend_rows

if TYPE_CHECKING:
    from .join_names import JoinsUneven


class DDPJoinHook(JoinHook):
    """What a wrapper does on a rank that has run out."""

    speaks_for_itself = True  # alone in a Join, it needs no announcements

    def __init__(self, ddp: JoinsUneven, *, by_active: bool) -> None:
        self.ddp = ddp
        self._by_active = by_active
        self._layers: Lent | None = None
        # Of a hook that speaks for itself: passes and forwards before this rank ran out.
        self._own_work: tuple[int, int] | None = None
        # At once, and until the end: torch's Join does not say when it is entered. Outside of any
        # context it makes no difference, since all ranks are active.
        ddp.replica.enter_join(by_active=by_active)

    def enter(self) -> None:
        """The context begins."""
        replica = self.ddp.replica
        self._own_work = None
        self._layers = lend_rows(self.ddp.module, replica.group)
        replica.enter_join(by_active=self._by_active, before_failing=self.answer_others)

    def leave(self, *, together: bool) -> None:
        """The context is over; ``together``: on every rank, whatever the reason."""
        self._end_layers(together)
        self.ddp.replica.leave_join()

    def answer_others(self) -> None:
        """Answer SyncBatchNorm layers of other ranks, which this rank no longer calls."""
        rows = self._rows()
        if rows is not None:
            rows.stand_in()

    def _rows(self) -> Rows | None:
        layers = self._layers
        return None if layers is None else layers.rows

    def _end_layers(self, together: bool) -> None:
        rows = self._rows()
        if rows is None:
            return
        try:
            rows.close() if together else rows.abandon()
        finally:
            assert self._layers is not None
            self._layers.rows = None
            self._layers = None

    def stand_in(self) -> bool:
        """Take part in the next pass, whenever it comes; False when no rank had one.

        If this rank still owes weighted gradients, it is a pass of its own, but it takes no step.
        """
        reducer = self.ddp.replica.reducer
        if self._own_work is None:
            self._own_work = reducer.passes, self.ddp.join_config.progress.step
        self.answer_others()
        with self._standing_in():
            told = reducer.stand_in()
        return told is not None and bool(told.active_ranks())

    def _standing_in(self) -> AbstractContextManager[None]:
        """Say of the calls made inside that they are for the ranks which have inputs."""
        return events.calls_for(self.ddp.replica.group.board, events.STANDING_IN)

    def fail(self, error: BaseException) -> None:
        """This rank leaves with an error: let the others know in their next pass."""
        replica = self.ddp.replica
        if replica.told_of is not error:
            replica.tell_failure(f"{type(error).__name__} inside Join: {error}")

    def main_hook(self) -> None:
        """The others have announced a step; take part if it is averaged."""
        refuse_foreign(self.ddp)
        self.answer_others()
        if any_averages(self.ddp, False):
            # The averages are for the joinables after this one: a spread optimizer steps here too.
            with self._standing_in():
                self.ddp.replica.reducer.stand_in(take=True)

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks take the model of the last one to run out."""
        self._end_layers(together=True)
        if self._own_work is None:
            sync_final_model(self.ddp, is_last_joiner)
        else:
            take_model(self.ddp, newest_rank(self.ddp, *self._own_work))
        self.ddp.replica.reducer.mean_over_active(False)


def announce_step(ddp: JoinsUneven) -> None:
    """Before a forward inside Join: tell the ranks that have run out what is coming."""
    notice = Join.notify_join_context(ddp)
    refuse_foreign(ddp, notice)
    if not getattr(ddp.join_config, "silent", False):
        replica = ddp.replica
        any_averages(ddp, torch.is_grad_enabled() and replica.averaging.on)


def refuse_foreign(ddp: JoinsUneven, notice: TorchWork | None = None) -> None:
    """torch's Join says neither when it begins nor that a rank has failed: no layer can rely on it.

    Called after the notice, so that the ranks that have run out come to their own refusal.
    """
    if isinstance(ddp.join_config, JoinConfig) or ddp.replica.group.size() == 1:
        return
    if any(isinstance(layer, SyncBatchNorm) for layer in ddp.module.modules()):
        if notice is not None:
            notice.wait()
        raise ModuleStateError(
            f"rank {ddp.replica.group.rank()}: a model with SyncBatchNorm layers is in torch's "
            "Join. A rank that has run out could not take part in their collectives.",
            "Use paceline.Join, or ddp.join().",
        )


def any_averages(ddp: JoinsUneven, mine: bool) -> bool:
    """Whether any rank will average the pass that comes; every rank calls it."""
    flag = torch.tensor([float(mine)], device=ddp.device)
    ddp.replica.group.all_reduce(flag, ReduceOp.MAX)
    return bool(flag.item())


def common_rank(ddp: JoinsUneven, candidate: bool) -> int:
    """The highest rank among the candidates; every rank calls it."""
    group = ddp.replica.group
    best = torch.tensor([group.rank() if candidate else -1], device=ddp.device)
    group.all_reduce(best, ReduceOp.MAX)
    return int(best.item())


def newest_rank(ddp: JoinsUneven, passes: int, forwards: int) -> int:
    """The highest rank among those with most averaged passes, of these with most forwards."""
    group = ddp.replica.group
    own = torch.tensor([passes, forwards, group.rank()], device=ddp.device)
    everyone = own.new_empty(group.size(), 3)
    group.all_gather_single(everyone, own)
    return int(max(everyone.tolist())[2])


def sync_final_model(ddp: JoinsUneven, is_last_joiner: bool) -> None:
    """Give every rank the parameters, and the buffers if kept alike, of one of the last."""
    take_model(ddp, common_rank(ddp, is_last_joiner))


def take_model(ddp: JoinsUneven, root: int) -> None:
    """Give every rank the root's parameters, and its buffers if they are kept alike."""
    replica = ddp.replica
    replica.buffers.root = root
    replica.broadcast(root, buffers=replica.buffers.in_forward)
