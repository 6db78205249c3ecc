"""ShardStep: a step of shards, with the forward and backward pass of a shard as one compiled call.

The bits of a shard have to be the same on whichever rank computes it. So every size of a batch is
compiled for itself: code that serves any size would be other code, and a rank comes to it only when
it has seen two. For the same reason there is no eager mode to fall back to: a rank that did would
have other bits than the rest. What cannot be compiled is an error, on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._torch import dynamo
from ..data import Shard
from ..ddp import DistributedDataParallel
from ..errors import ModuleArgumentError
from . import graph_passes, program, reasons
from .program import Loss
from .settings import Settings
from .turns import HostTurn, job_place, say_doing

_DOING = "compiles the step of a shard"
# Of Inductor's options: those by which a process chooses code by timing it.
_TIMED = (
    "max_autotune",
    "max_autotune_gemm",
    "max_autotune_pointwise",
    "coordinate_descent_tuning",
)


class ShardStep:
    """What :func:`train_step` returns for a model that is wrapped with ``shards``."""

    def __init__(
        self, ddp: DistributedDataParallel, optimizer: Optimizer, loss_fn: Loss, settings: Settings
    ) -> None:
        self.ddp, self.optimizer, self.settings = ddp, optimizer, settings
        self.grad_norm: Tensor | None = None  # of the last step, before clipping
        self._loss_fn = loss_fn
        self._refuse_unfit()
        self._tracing = dynamo.tracing_backward()
        self._turn = HostTurn(job_place(), settings.compile_timeout)
        self._params: list[nn.Parameter] = []
        self._program: Callable[..., Any] | None = None
        self._known: set[object] = set()  # sizes of batches that are compiled

    def __call__(self, step: Iterable[tuple[Shard, Any]]) -> Tensor:
        """Train on a step of a ShardedLoader or of an elastic job.

        Returns the mean loss of this rank's shards, weighted by their samples, detached; 0 on a
        rank that had none.
        """
        shards = step if getattr(step, "ends_itself", False) else self.ddp.shards_of(step)
        losses: list[tuple[Tensor, int]] = []
        for shard, batch in shards:
            with self.ddp.shard(shard):
                losses.append((self._differentiate(batch), shard.samples))
        self._update()
        return self._mean(losses)

    # -- one shard ----------------------------------------------------------------------------

    def _differentiate(self, batch: Any) -> Tensor:
        """The loss of a batch; its gradients are left in ``.grad``, for this shard alone."""
        given = batch if isinstance(batch, tuple | list) else (batch,)
        inputs, _ = self.ddp.traced.begin_forward(*given)
        self._look_at_parameters()
        loss: Tensor
        loss, grads = self._run(*inputs)
        for param, grad in zip(self._params, grads, strict=True):
            param.grad = grad
        return loss

    def _run(self, *inputs: Any) -> Any:
        """Call the program; the first time for a size, one rank of a host after the other."""
        assert self._program is not None
        key = tuple(t.shape if isinstance(t, Tensor) else type(t) for t in inputs)
        fresh = key not in self._known
        board = self.ddp.replica.group.board
        if fresh:
            say_doing(board, _DOING)
            self._turn.take()
        try:
            with self.ddp.traced.inside_step(), torch.no_grad(), self._tracing:
                found = self._program(None, *inputs)
        finally:
            if fresh:
                self._turn.give_back()
                say_doing(board, "")
        self._known.add(key)
        return found

    def _look_at_parameters(self) -> None:
        """Compile for the parameters that are trained now."""
        trained = [param for param in self.ddp.module.parameters() if param.requires_grad]
        if self._program is not None and _same(trained, self._params):
            return
        if reason := reasons.now(self.ddp, trained):
            self._refuse(reason)
        self._params, self._known = trained, set()
        function = program.write_gathering(
            self.ddp.module, self._loss_fn, trained, self.settings.autocast
        )
        settings, options = self.settings, None
        if settings.backend == "inductor":
            options = graph_passes.inductor_options(settings.options)
        self._program = torch.compile(
            function, fullgraph=True, dynamic=False, backend=settings.backend, options=options
        )

    # -- behind the last ----------------------------------------------------------------------

    def _update(self) -> None:
        if self.settings.max_norm is not None:
            params = [p for group in self.optimizer.param_groups for p in group["params"]]
            self.grad_norm = nn.utils.clip_grad_norm_(params, self.settings.max_norm)
        self.optimizer.step()
        if not self.settings.keep_grads:
            self.optimizer.zero_grad()

    def _mean(self, losses: list[tuple[Tensor, int]]) -> Tensor:
        total = sum(samples for _, samples in losses)
        if not total:
            return torch.zeros((), device=self.ddp.replica.group.device)
        return torch.stack([loss * samples for loss, samples in losses]).sum() / total

    # -- what it cannot be --------------------------------------------------------------------

    def _refuse_unfit(self) -> None:
        settings = self.settings
        if self.ddp.device_type != "cpu":
            self._refuse(f"this was not tested on {self.ddp.device_type}")
        if settings.accumulate != 1:
            self._refuse("accumulate: a step has its shards already")
        if settings.scaler is not None:
            self._refuse("scaler: a scale of the gradients changes how their sums are rounded")
        if settings.dynamic:
            self._refuse("dynamic=True: code for any size rounds differently")
        if settings.graph:
            self._refuse("graph=True: several shards are not a single graph")
        if timed := [name for name in _TIMED if settings.options.get(name)]:
            self._refuse(f"{timed[0]} chooses code by timing it separately on each rank")
        never = reasons.never(self.ddp) or reasons.unbuildable(self.ddp, settings.backend)
        if never:
            self._refuse(never)

    def _refuse(self, why: str) -> None:
        rank = self.ddp.replica.group.rank()
        raise ModuleArgumentError(
            f"rank {rank}: train_step with shards={self.ddp.shards}: {why}. "
            "Every rank raises this.",
            "Leave that out, or write the loop yourself.",
        )


def _same(one: list[nn.Parameter], other: list[nn.Parameter]) -> bool:
    return len(one) == len(other) and all(p is q for p, q in zip(one, other, strict=True))
