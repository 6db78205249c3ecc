"""Replica: one rank's copy of a model, kept in step with the others'.

The wrapper (``wrapper.py``), which a replicated module has too (``replicate.py``), puts one around
the forward of a model: :meth:`Replica.before_forward`, :meth:`Replica.after_forward`, and
:meth:`Replica.forward_failed` when there is no after.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._reducer import GradBucket, Ledger, Pass, Reducer, ScatteredGradients, local
from .._torch.autograd import NO_TASK, current_task
from ..errors import (
    GraphChangedError,
    MixedPassesError,
    ModuleArgumentError,
    ModuleStateError,
    PacelineError,
    PeerError,
    PeerLeftError,
    ScatterError,
    UnfinishedReductionError,
)
from ..groups import Group
from ..policies import Reduction
from ..recorder import events
from . import pending
from .averaging import AveragingSwitch
from .buffers import Buffers
from .logging_data import Times
from .models import arguments, broadcast, describe, verify
from .structure import tensors_in
from .sync_batchnorm import adopt, own_group
from .trained import Trained, sparse_parameters

log = logging.getLogger(__name__)

# What the wrapper sends by itself, as errors and the recorder call it.
COMPARISON = "the wrapper's comparison of the ranks' models"
MODEL = "the wrapper's broadcast of the model"
BUFFERS = "the wrapper's broadcast of buffers before a forward"
BUFFERS_IN_JOIN = "the wrapper's broadcast of buffers after a pass inside Join"


class SampleCount:
    """How many samples the next backward pass counts as, or as a context those inside."""

    def __init__(self, ledger: Ledger, count: float, rank: int) -> None:
        if not isinstance(count, int | float) or not 0 <= count < math.inf:
            raise ModuleArgumentError(
                f"rank {rank}: samples: expected a number of samples, got {count!r}."
            )
        self._ledger = ledger
        self._before = ledger.explicit, ledger.once
        ledger.explicit, ledger.once = float(count), True

    def __enter__(self) -> None:
        self._ledger.once = False

    def __exit__(self, *_: object) -> None:
        self._ledger.explicit, self._ledger.once = self._before


class Replica:
    """Averages the gradients of ``module`` over ``group``, and synchronizes its buffers."""

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        policy: Reduction,
        *,
        ignored: Collection[str] = (),
        init_sync: bool = True,
        init_buffers: bool = True,
        forward_buffers: bool = True,
        chunk_bytes: int = 250 * 1024 * 1024,
        in_join: Callable[[], bool] = lambda: False,
        companions: Sequence[Reducer] = (),
    ) -> None:
        self.module = module
        self.group = group
        self.trained = Trained(module, ignored)
        self.buffers = Buffers(module, ignored, in_forward=forward_buffers)
        self.averaging = AveragingSwitch()
        self.chunk_bytes = chunk_bytes
        self.companions = tuple(companions)  # whose passes end with those of the reducer
        self.told_of: BaseException | None = None  # a failure that the other ranks know of
        self.in_join = in_join
        self.joined_once = False
        self.layers: Group | None = None  # what SyncBatchNorm layers have for themselves
        self._before_failing: Callable[[], None] = self.leave_layers  # frees who waits there
        self.times = Times()
        self._passes_before = 0  # the forward that ran last
        self._given = arguments(policy, syncs_buffers=forward_buffers and bool(self.buffers))
        if init_sync:
            self.verify()
            self.broadcast(0, buffers=init_buffers)
        self.reducer = self._first_reducer(policy)
        self.expect_no_backward()
        pending.watch(self)
        self._lend_to_layers()

    # -- the ranks' models --------------------------------------------------------------------

    def verify(self) -> None:
        """Raise on every rank unless all wrap the same parameters, in the same order and way."""
        with events.calls_for(self.group.board, COMPARISON):
            verify(self.group, describe(self.trained.all), self._given, self.group.device)

    def broadcast(self, root: int, *, buffers: bool = True) -> None:
        """Broadcast the parameters and buffers of the root."""
        tensors = [local(p.detach()) for p in self.trained.all.values()]
        if buffers:
            tensors += self.buffers.named().values()
        with events.calls_for(self.group.board, MODEL):
            broadcast(self.group, tensors, root, self.chunk_bytes)

    def _first_reducer(self, policy: Reduction) -> Reducer:
        params, names, sparse = self.trained.place()
        reducer = Reducer(
            params,
            names,
            self.group,
            policy,
            sparse=sparse,
            wanted=self.averaging.now,
            heeds=self.in_join,  # ranks that have run out act on what is said at once
            hooks=policy.shards is None,  # whose sums are made elsewhere: shard_replica.py
        )
        reducer.observers.on_end(self._after_pass)
        reducer.observers.on_end(self.times.note)
        reducer.observers.on_failure(self._after_failure)
        return reducer

    def _follow_freezing(self) -> None:
        """Parameters frozen or thawed since the last forward: begin anew with what is trained.

        A model that freezes and thaws inside its forward (a GAN with an optimizer for each half)
        keeps what it has once trained.
        """
        if self.trained.toggles:
            self._take_in_thawed()
        elif self.trained.changed:
            self._begin_anew()

    def _take_in_thawed(self) -> None:
        """Begin anew if something is trained now that has no place in a bucket."""
        if self.trained.has_thawed:
            self.trained.toggles = True
            self._begin_anew(keep=self.trained.placed)

    def _begin_anew(self, keep: Collection[str] = ()) -> None:
        self.refuse_if_scattered("parameters were frozen or unfrozen")
        self.verify()
        before = list(self.trained.placed)
        self.reducer = self.reducer.successor(*self.trained.place(keep))
        pending.follow(self)
        averages = weakref.WeakMethod(self._is_averaged)
        self.trained.refuse_let_go(before, self.group.rank(), averages)

    def _lend_to_layers(self) -> None:
        """Give SyncBatchNorm layers a group, of their own where one can be made."""
        own = own_group(self.module, self.group)
        self.layers = None if own is self.group else own
        adopt(self.module, own, self.reducer.ledger)

    # -- around a forward ---------------------------------------------------------------------

    def before_forward(self) -> None:
        """Synchronize buffers, and prepare the reducer for a backward pass."""
        inside_backward = current_task() != NO_TASK
        if torch.is_grad_enabled() and not inside_backward:
            self.averaging.note_forward()
            self.reducer.make_good()
            self.refuse_unfinished()
            self._follow_freezing()
            self.reducer.begin_step()
            self.times.forward_start = time.perf_counter_ns()
            self._passes_before = self.reducer.passes
        if self.syncs_buffers and not self.buffers.hooked_after:
            self.sync_buffers()
        if torch.is_grad_enabled():
            self.reducer.forward_begins()
        else:
            self.hear()

    def refuse_unfinalized(self) -> None:
        """Raise if training continues before the averages of the last pass were waited for."""
        if torch.is_grad_enabled() and current_task() == NO_TASK:
            self.reducer.finalization.refuse_pending("a forward")

    def after_forward(self, output: Any) -> None:
        """Watch the output for the backward pass."""
        if self.syncs_buffers and self.buffers.hooked_after:
            self.sync_buffers()
        if self.buffers.futures and not self.reducer.averages:  # no pass will end with them
            self.buffers.settle()
        if not torch.is_grad_enabled():
            self.buffers.stale = False  # ranks may have unequal numbers of batches to look at
            return
        self.buffers.stale = self.averaging.on
        if self.reducer.passes != self._passes_before and self.trained.changed:
            self.trained.toggles = True  # a backward ran inside
        outputs = (output,) if isinstance(output, Tensor) else tensors_in(output)
        self.reducer.forward_ends(outputs, averaged=self.averaging.on)

    def expect_backward(self, outputs: Tensor | Sequence[Tensor]) -> None:
        """Average the next backward pass too, with what is trained now.

        Torch's ``prepare_for_backward``, for programs that call backward several times inside one
        forward, and freeze and thaw parameters between (Lightning's manual optimization).
        """
        self.averaging.note_forward()
        self._take_in_thawed()
        given = outputs if isinstance(outputs, Tensor) else list(outputs)
        self.reducer.expect_backward(tensors_in(given))

    def expect_no_backward(self) -> None:
        """Note that the gradients of the last forward have been averaged already."""
        self.reducer.expect_no_backward()

    def read_late(self) -> None:
        """Read failures of other ranks a pass late, as on a GPU; every rank calls it."""
        self.reducer.read_late()
        pending.watch(self)

    def hear(self) -> None:
        """Raise if a rank failed in the last pass, if this becomes known only a pass late.

        Called where the result of the last pass is used: before a state dict, at ``eval()``, in a
        forward without gradients, at the end of the group.
        """
        if current_task() == NO_TASK:
            for reducer in (self.reducer, *self.companions):
                reducer.hear()

    def forward_failed(self, error: BaseException) -> None:
        """Tell the other ranks, which will wait in their backward pass, why none follows here."""
        inside_backward = current_task() != NO_TASK
        if torch.is_grad_enabled():
            self.reducer.forward_failed()
        expected = torch.is_grad_enabled() and self.averaging.now() and not inside_backward
        if expected and isinstance(error, PeerLeftError) and self.layers is not None:
            self.reducer.stand_in()  # it left a layer's group; here it says why, and this raises
        if not expected or not isinstance(error, Exception) or isinstance(error, PacelineError):
            return
        self.tell_failure(f"{type(error).__name__} in forward: {error}")
        self.told_of = error

    def leave_layers(self) -> None:
        """Free ranks that wait in a layer for this one, which will not get there."""
        if self.layers is not None:
            self.layers.abort()

    def enter_join(
        self, *, by_active: bool, before_failing: Callable[[], None] | None = None
    ) -> None:
        """Begin a Join: ranks may run out; with ``by_active`` means are over those that have not.

        ``before_failing`` frees ranks that wait in a layer for this one, if it fails.
        """
        self.joined_once = True
        self.reducer.mean_over_active(by_active)
        self._before_failing = before_failing or self._before_failing

    def leave_join(self) -> None:
        """End a Join: all ranks have inputs again."""
        self.reducer.mean_over_active(False)
        self._before_failing = self.leave_layers

    def tell_failure(self, text: str) -> None:
        """Make the current or next pass of the other ranks fail with this message."""
        log.error("rank %d: %s; telling the other ranks", self.group.rank(), text)
        with contextlib.suppress(Exception):  # the user wants the first error
            self._before_failing()
        # the companions' passes end with the reducer's, unless it has none
        for reducer in [self.reducer] if self.reducer.averages else self.companions:
            try:
                reducer.stand_in(trouble=text)
            except PeerError:  # which is the one that all ranks get
                pass
            except Exception as error:  # the user wants the first one
                why = f"{type(error).__name__}: {error}"
                log.warning("rank %d: the others may not have heard: %s", self.group.rank(), why)

    def refuse_unfinished(self) -> None:
        """In strict mode, raise if the last pass did not reach all parameters."""
        missing = self.reducer.unfinished
        if not missing or not self.averaging.now():
            return
        rank = self.group.rank()
        names = [self.reducer.names[n] for n in missing]
        if dist.get_debug_level() == dist.DebugLevel.OFF:
            names = []
        error: UnfinishedReductionError
        if self.reducer.policy.static_graph:
            error = GraphChangedError(rank, missing, names, prior=True)
        else:
            error = UnfinishedReductionError(rank, missing, names)
        self.tell_failure(str(error))
        self.reducer.note_error(str(error))
        raise error

    # -- buffers ------------------------------------------------------------------------------

    @property
    def syncs_buffers(self) -> bool:
        """Return whether the next forward synchronizes buffers; in Join the end of a pass does."""
        wanted = self.buffers.stale and self.buffers.in_forward and bool(self.buffers)
        return wanted and not self.in_join()

    def sync_buffers(self, root: int = 0, purpose: str = BUFFERS) -> None:
        """Synchronize the buffers now."""
        with events.calls_for(self.group.board, purpose):
            self.buffers.sync(self.group, root)

    def _after_failure(self) -> None:
        """The engine calls no further callback of this backward pass: end what depends on one."""
        for companion in self.companions:
            with contextlib.suppress(PacelineError):
                companion.end_early()

    def _after_pass(self, _done: Pass) -> None:
        told = self.reducer.told
        if self.in_join() and self.buffers.in_forward and self.buffers and told is not None:
            active = told.stepping_ranks()
            if active:  # a rank that has run out has old ones; every rank knows who has not
                self.buffers.root = max(active)
                self.sync_buffers(self.buffers.root, BUFFERS_IN_JOIN)
        self.buffers.settle()

    # -- which passes are averaged ------------------------------------------------------------

    def _is_averaged(self) -> bool:
        """Whether gradients that come now belong to a pass that is averaged."""
        return self.averaging.now() and self.reducer.expects_backward

    def samples(self, count: float) -> SampleCount:
        """Let the next pass, or those inside the context, count as ``count`` samples."""
        self.reducer.finalization.refuse_pending("the weight of the next pass")
        if self.companions:
            raise ModuleStateError(
                f"rank {self.group.rank()}: ddp.samples() was called, and the parameters in "
                "delay_all_reduce_named_params are averaged without weights. Other ranks wait for "
                "this one in their next backward pass.",
                "Remove delay_all_reduce_named_params, or do not call ddp.samples().",
            )
        ledger = self.reducer.ledger
        if ledger.is_buried(self.reducer.params):
            raise MixedPassesError(self.group.rank())
        return SampleCount(ledger, count, self.group.rank())

    def sync_grads(self) -> None:
        """Average what ``.grad`` holds now, without a backward pass; every rank calls it."""
        self.reducer.sync()

    # -- hooks --------------------------------------------------------------------------------

    def set_hook(self, state: object, hook: Callable[[object, GradBucket], Any]) -> None:
        """Average with a communication hook.

        A hook that makes all its collectives before it returns can say so: it, or its state, has an
        attribute ``prompt`` that is True.
        """
        prompt = any(getattr(thing, "prompt", False) is True for thing in (hook, state))
        self.reducer.set_hook(lambda bucket: hook(state, bucket), prompt=prompt)

    def scatter_gradients(self) -> ScatteredGradients:
        """Leave each rank only the averages of its part of each bucket, from now on."""
        sparse = sparse_parameters(self.module)
        unfit = [
            name
            for name, param in self.trained.placed.items()
            if param in sparse or local(param) is not param or self.companions
        ]
        if unfit:
            raise ScatterError(self.group.rank(), unfit)
        return self.reducer.scatter()

    def refuse_if_scattered(self, what: str) -> None:
        """Raise if an optimizer holds this rank's part of the gradients."""
        if self.reducer.scattered:
            raise ModuleStateError(
                f"rank {self.group.rank()}: {what} while an optimizer holds its part of the "
                "gradients. Every rank stops here. Create the model and its optimizer again."
            )

    def make_static(self) -> None:
        """Make a graph that changes an error, from now on."""
        self.reducer.make_static()

    def move_to(self, group: Group) -> None:
        """Continue in another group; all its ranks call it at the same time."""
        self.refuse_if_scattered("the group was changed")
        self.group = group
        for reducer in (self.reducer, *self.companions):
            reducer.move_to(group)
        pending.watch(self)
        self._lend_to_layers()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy of the model is not kept in step until somebody says so
