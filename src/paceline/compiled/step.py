"""train_step: forward, backward, averages and the optimizer as one compiled call.

What is compiled is in ``program.py``, how it reaches the other ranks in ``wire.py``, in which order
it does so in ``schedule.py``. This file has what happens around the graph, and what happens when
there is none: a step that cannot be traced is done in eager mode, by the same rules, so it does not
matter to the other ranks which of the two this one does.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._reducer import Reducer
from .._torch import dynamo, foreach, optim
from .._torch.nn import backward_hooks, backward_pre_hooks
from ..ddp import DistributedDataParallel
from ..errors import (
    ModuleArgumentError,
    ModuleStateError,
    ModuleTypeError,
    NotCapturedError,
    PacelineError,
)
from . import graph_passes, program, reasons, step_plan, updates
from .binding import Binding
from .explain import Schedule
from .module_hooks import keep_hooks
from .program import Loss
from .replay import Replays
from .settings import Settings
from .shard_step import ShardStep
from .turns import Turns
from .wire import wire_of

log = logging.getLogger("paceline.compiled")


def train_step(
    ddp: DistributedDataParallel, optimizer: Optimizer, loss_fn: Loss, **options: Any
) -> Step | ShardStep:
    """Return a function that trains one step on a batch and returns the loss of this rank::

        step = paceline.compiled.train_step(ddp, optimizer, lambda model, x, y: f(model(x), y))
        for x, y in loader:
            loss = step(x, y)

    Every rank calls it, and all ranks make their first step together, because they compile in
    turns. ``loss_fn`` gets the wrapped module and the batch. A step does what ``zero_grad``,
    forward, ``backward`` and ``optimizer.step`` do. Parameters, buffers and optimizer state are
    updated in place, so you can mix it with eager steps. If the model is wrapped with ``shards``,
    the function takes a step of a ``ShardedLoader`` instead (:class:`ShardStep`). ``options`` are
    the fields of :class:`Settings`.
    """
    if not issubclass(type(ddp), DistributedDataParallel):  # torch's may pass for one by isinstance
        raise ModuleTypeError(
            "train_step: expected a paceline.DistributedDataParallel, got an object of type "
            f"{type(ddp).__name__}."
        )
    if ddp.shards is not None:
        return ShardStep(ddp, optimizer, loss_fn, Settings(**options))
    return Step(ddp, optimizer, loss_fn, Settings(**options))


class Step:
    """The function that :func:`train_step` returns."""

    def __init__(
        self, ddp: DistributedDataParallel, optimizer: Optimizer, loss_fn: Loss, settings: Settings
    ) -> None:
        self.ddp, self.optimizer, self.settings = ddp, optimizer, settings
        self.reason = ""  # why steps are done in eager mode; empty while they are compiled
        self.grad_norm: Tensor | None = None  # of the last step, before clipping
        self._loss_fn = loss_fn
        self._wire = wire_of(ddp)
        self._binding = binding = Binding(self._wire, optimizer, loss_fn, settings)
        self._planned: Reducer | None = None
        self._plan_ahead()
        self._scaling = binding.scaling
        self._scaling.refuse_halves(binding.params, self._wire.rank)
        group, timeout = ddp.replica.group, settings.compile_timeout
        device = binding.params[0].device
        self._turns = Turns(ddp, timeout, lambda: binding.scaling.agree(group, device, timeout))
        self._modules = list(ddp.module.modules())
        self.replays = self._make_replays()
        self._tracing = dynamo.tracing_backward()
        if self._binding.unfit:
            self._tell("the optimizer steps in eager mode", self._binding.unfit)
        if reason := reasons.never(ddp) or reasons.unbuildable(ddp, settings.backend):
            self._fall_back(reason)

    def _make_replays(self) -> Replays | None:
        """Steps as CUDA graphs, unless there cannot or should not be any.

        On several ranks only if asked for: two that shared a GPU were seen not to end.
        """
        graph, settings = self.settings.graph, self.settings
        reason = ""
        if self.ddp.device_type != "cuda":
            reason = f"the model is on {self.ddp.device_type}"
        elif settings.backend != "inductor":
            reason = "only code compiled by Inductor can be captured"
        elif settings.accumulate != 1:
            reason = "several calls are one step of the optimizer"
        if graph and reason:
            raise NotCapturedError(self._wire.rank, reason)
        if graph is False or reason or (graph is None and self.ddp.replica.group.size() > 1):
            return None
        return Replays(self._wire, self._binding, asked=bool(graph))

    # -- a step -------------------------------------------------------------------------------

    def __call__(self, *batch: Any, samples: float | None = None) -> Tensor:
        """Train on a batch, which counts as so many ``samples``; returns the loss, detached."""
        counted = contextlib.nullcontext() if samples is None else self.ddp.samples(samples)
        with counted:
            if self.settings.accumulate == 1:
                return self._step(batch, last=True)
            with self.ddp.accumulate(self.settings.accumulate) as last:
                return self._step(batch, last=last)

    def plan(self, *batch: Any, world_size: int | None = None) -> Schedule:
        """Return the collectives of a step, read from its graph, without running anything.

        With ``world_size``, for a group of that many ranks.
        """
        return step_plan.plan(self._binding, self._wire.reducer, batch, world_size)

    def _step(self, batch: Sequence[Any], *, last: bool) -> Tensor:
        if self.ddp.replica.averaging.is_first_of(self.settings.accumulate):
            self._drop_grads()
        inputs = self._wire.begin_step(batch)
        self._plan_ahead()
        if last:
            self._turns.before()
            self._wire.before_sending(self._turns.after)
            self._refuse_manual()
        if not self.reason and (reason := reasons.now(self.ddp, self._binding.params)):
            self._fall_back_now(reason)
        loss = None if self.reason else self._try_compiled(inputs, last)
        if loss is None:
            return self._eager_step(inputs, last)
        self._wire.reducer.handed.refuse_overdue()
        return loss

    def _plan_ahead(self) -> None:
        """Plan for the reducer of now, once, on all ranks alike; frozen layers lead to another."""
        if self._planned is self._wire.reducer:
            return
        self._planned = self._wire.reducer
        self._planned.handed.plan_ahead()
        self._binding.look()

    def _refuse_manual(self) -> None:
        """A step waits for its averages: it has an optimizer behind them."""
        if not self.ddp.require_manual_backward_finalization:
            return
        error = ModuleStateError(
            f"rank {self._wire.rank}: train_step with require_manual_backward_finalization: a step "
            "waits for its averages itself, and finalize_backward() would come too late. The other "
            "ranks get this error in their step.",
            "Set it to False on every rank, or write the loop yourself.",
        )
        self._turns.after()
        self.ddp.replica.tell_failure(str(error))
        raise error

    def _fall_back_now(self, reason: str) -> None:
        try:
            self._fall_back(reason)
        except ModuleArgumentError as error:
            self._turns.after()
            self.ddp.replica.tell_failure(str(error))
            raise

    def _try_compiled(self, inputs: Sequence[Any], last: bool) -> Tensor | None:
        """The loss, or None if there is no such step after all."""
        try:
            return self._compiled_step(inputs) if last else self._gather(inputs)
        except Exception as error:
            self._turns.after()
            reason = reasons.of(error)
            if not reason or self.settings.fullgraph:
                self.ddp.replica.forward_failed(error)
                if isinstance(error, NotCapturedError) and self._wire.reducer.averages:
                    self.ddp.replica.tell_failure(str(error))  # the others are in their step
                self._count_failed(error, last)
                raise
            self._fall_back(reason)
            return None

    def _count_failed(self, error: Exception, last: bool) -> None:
        """Count a step that failed here, since the other ranks have counted it already.

        It changes nothing on any rank; but whoever goes on has to count as the others do.
        """
        late = last and self._wire.reducer.reads_late and self._wire.reducer.group.size() > 1
        if late and (isinstance(error, NotCapturedError) or not isinstance(error, PacelineError)):
            updates.count_step(self._binding.classes, [True] * len(self._binding.params))

    def _drop_grads(self) -> None:
        for param in self._binding.params:
            param.grad = None

    # -- compiled -----------------------------------------------------------------------------

    def _compiled_step(self, inputs: Sequence[Any]) -> Tensor:
        binding = self._binding
        binding.settle()
        if self.replays is not None:
            self.replays.prepare()
        loss: Tensor
        loss, self.grad_norm, kept, used, found = self._run(
            binding.whole(self._compile), *binding.arguments(), *inputs
        )
        self._turns.after()
        self._wire.end_step(loss)
        self._conclude(kept, used, found)
        return loss

    def _gather(self, inputs: Sequence[Any]) -> Tensor:
        binding = self._binding
        binding.settle()
        loss: Tensor
        loss, grads = self._run(binding.gathering(self._compile), binding.scale, *inputs)
        self._wire.end_forward(loss)
        count = len(self._wire.reducer.params)
        self._wire.reducer.handed.gather(grads[:count])
        for param, grad in zip(binding.params[count:], grads[count:], strict=True):
            if grad is not None:
                param.grad = grad if param.grad is None else param.grad.add_(grad)
        return loss

    def _compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        settings, backend = self.settings, self.settings.backend
        options = None
        if backend == "inductor":
            launches = self._wire.reducer.averages
            options = graph_passes.inductor_options(settings.options, launches=launches)
        if self.replays is not None:
            backend = self.replays.backend(dynamo.compiler_of(backend, options))
            options = None
        return torch.compile(
            function,
            fullgraph=True,
            dynamic=settings.dynamic,
            backend=backend,
            options=options,
        )

    def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        in_step = self.ddp.traced.inside_step()
        with in_step, self._keep_hooks(), torch.no_grad(), self._tracing:
            return function(*arguments)

    def _keep_hooks(self) -> contextlib.AbstractContextManager[object]:
        """Backward hooks of modules are called by the graph."""
        hooked = any(backward_hooks(m) or backward_pre_hooks(m) for m in self._modules)
        return keep_hooks(self.ddp.module) if hooked else contextlib.nullcontext()

    # -- behind the graph ---------------------------------------------------------------------

    def _conclude(
        self, kept: Sequence[Tensor | None], used: Sequence[bool], found: Tensor | None
    ) -> None:
        """What the graph did not do: parameters that only other ranks reached, counts of steps."""
        for param, grad in zip(self._binding.params, kept, strict=False):
            if grad is not None:
                param.grad = grad
        if self._binding.unfit:
            self._step_eagerly()
        elif found is None:
            self._count(used)
        else:
            self._count_scaled(used, found)
        if not self.settings.keep_grads:
            self._drop_grads()

    def _count(self, used: Sequence[bool]) -> None:
        updates.count_step(self._binding.classes, used)
        optim.note_step(self.optimizer)
        if not all(used):
            self._step_unused(used)

    def _count_scaled(self, used: Sequence[bool], found: Tensor) -> None:
        """Count a step, unless a gradient was not finite, and choose the next scale."""
        params, classes = self._binding.params, self._binding.classes
        if self.settings.keep_grads or not all(used):
            self._scaling.unscale_held(params)
        if bool(found):
            updates.forget_unused(self.optimizer, classes, params, [False] * len(params))
        else:
            self._count(used)
        self._scaling.conclude(self.optimizer, found)

    def _step_unused(self, used: Sequence[bool]) -> None:
        params = self._binding.params
        updates.forget_unused(self.optimizer, self._binding.classes, params, used)
        missed = (p for p, own in zip(params, used, strict=True) if not own)
        rest = [p for p in missed if p.grad is not None]
        if not rest:
            return
        if self.settings.max_norm is not None and self.grad_norm is not None:
            factor = updates.clip_factor(self.grad_norm, self.settings.max_norm)
            foreach.mul_([p.grad for p in rest if p.grad is not None], factor)
        updates.step_only(self.optimizer, rest)

    # -- eager --------------------------------------------------------------------------------

    def _eager_step(self, inputs: Sequence[Any], last: bool) -> Tensor:
        self._turns.after()
        try:
            with program.casting(self.ddp.device_type, self.settings.autocast):
                loss = self._loss_fn(self.ddp.module, *inputs)
        except BaseException as error:
            self.ddp.replica.forward_failed(error)
            raise
        self._wire.end_forward(loss)
        self._scaling.of_loss(loss).backward()
        if last:
            self._binding.look()
            self._step_eagerly()
            if not self.settings.keep_grads:
                self._drop_grads()
        return loss.detach()

    def _step_eagerly(self) -> None:
        self._scaling.unscale(self.optimizer)
        if self.settings.max_norm is not None:
            self.grad_norm = nn.utils.clip_grad_norm_(self._binding.params, self.settings.max_norm)
        self._scaling.step(self.optimizer)

    def _fall_back(self, reason: str) -> None:
        rank = self._wire.rank
        if self.settings.fullgraph:
            raise ModuleArgumentError(
                f"rank {rank}: train_step(fullgraph=True): {reason}. The other ranks get "
                "this error in their step.",
                "Leave fullgraph out to run such steps in eager mode.",
            )
        self.reason = reason
        self._tell("steps are done in eager mode", reason)

    def _tell(self, what: str, reason: str) -> None:
        log.warning("rank %d: train_step: %s: %s", self._wire.rank, what, reason)
