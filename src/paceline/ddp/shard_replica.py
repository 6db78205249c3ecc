"""ShardReplica: a replica whose steps have the same bits on any number of ranks.

A step is a fixed number of shards, each computed by some rank. Inside :meth:`ShardReplica.shard` a
shard has its own random numbers, finds the buffers as they were when the step began, and leaves
gradients that are added up on this rank, exactly (``_reducer/sums.py``). When a rank has computed
its shards, of which there may be none, it calls :meth:`ShardReplica.finish`: the ranks compare
accounts (``_reducer/account.py``), exchange sums, and each has the means in ``.grad``. Most of the
sums are sent before that, in the backward pass of a rank's last shard (``shard_sending.py``).

Nothing of this goes through the reducer's passes: they average what ranks have, and here it does
not matter who has what.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import replace
from enum import Enum, auto
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from .._reducer import Agreed, Done, StepSums, Summed, local, look_before_steps, settle, steps
from .._torch.ddp import optimizers_in_backward
from ..data import Shard, keyed_random
from ..errors import ModuleArgumentError, ModuleStateError, ModuleTypeError
from ..groups import Group
from ..policies import Reduction
from ..recorder import events
from .replica import Replica
from .same_bits import check_device, deterministic
from .shard_buffers import ShardBuffers
from .shard_sending import EarlySending
from .shard_switch import ShardSwitch
from .structure import tensors_in
from .trained import sparse_parameters

log = logging.getLogger(__name__)
Item = TypeVar("Item")

EMPTY: Mapping[str, str] = MappingProxyType({})
_LIMIT = 1 << 53  # samples of a shard
_IDLE = (
    "shards=%d on %d ranks: at least %d of them compute nothing in a step and only wait. "
    "Results are the same as on fewer ranks. Start no more ranks than shards, or begin a new run "
    "with more shards."
)


class StepPhase(Enum):
    """Where a rank is in a step of shards."""

    BETWEEN = auto()  # nothing of the next step is computed
    OPEN = auto()  # some of its shards may be
    INSIDE = auto()  # one is being computed


class ShardReplica(Replica):
    """A replica whose steps have as many shards as ``policy`` says."""

    def __init__(self, module: nn.Module, group: Group, policy: Reduction, **options: Any) -> None:
        assert policy.shards is not None
        self.shards = policy.shards
        super().__init__(module, group, policy, **options)
        self._refuse_unfit()
        self.averaging = ShardSwitch(group.rank())
        self._params = dict(self.trained.all)
        self._devices = {param.device for param in self._params.values()}
        self._buffers = ShardBuffers(self.buffers, group.rank())
        self._phase = StepPhase.BETWEEN
        self._weights: dict[int, int] = {}  # of the shards computed, by index
        self._weight: int | None = None  # of the shard that is computed now, if it was said
        self._same: dict[str, str] = {}  # what must be the same on all ranks
        self._base: dict[str, Tensor] = {}  # gradients from before the step
        self._passes = 0  # backward passes of the shard that is computed now
        self._all_passes: set[int] = set()  # of each of the shards computed
        self._last = False  # the next shard is this rank's last one of the step
        self._sums = self._make_sums()
        self._sending = self._make_sending()
        look_before_steps(self._sums, _Look(self))
        if self.shards < group.size() and group.rank() == 0:
            log.warning(_IDLE, self.shards, group.size(), group.size() - self.shards)

    # -- what it is made of ---------------------------------------------------------------------

    def _make_sums(self) -> StepSums:
        tensors = {**self._params, **self._buffers.tensors}
        self._numbers = {name: number for number, name in enumerate(tensors)}
        self._numbered = [(self._numbers[name], name, p) for name, p in self._params.items()]
        summed = [
            Summed(name, tensor.detach(), rare=name not in self._params)
            for name, tensor in tensors.items()
        ]
        return StepSums(summed, self.shards, self.group)

    def _make_sending(self) -> EarlySending:
        return EarlySending(self._sums, {number: param for number, _, param in self._numbered})

    def _refuse_unfit(self) -> None:
        sparse = sparse_parameters(self.module)
        for name, param in self.trained.all.items():
            if param in sparse or local(param) is not param or not param.is_floating_point():
                self._refuse(f"the gradient of {name} is sparse, complex or a DTensor's")
        for name, module in self.module.named_modules():
            if isinstance(module, nn.SyncBatchNorm):
                self._refuse(
                    f"{name} is a SyncBatchNorm layer, whose statistics are those of all ranks",
                    "Use BatchNorm: its running statistics are combined over the shards.",
                )
        check_device(self.group.device)

    def _refuse(self, what: str, remedy: str = "") -> None:
        rank = self.group.rank()
        raise ModuleArgumentError(
            f"rank {rank}: shards={self.shards}: {what}, so that results would not be the same on "
            "any number of ranks. Every rank raises this.",
            remedy or "Leave out shards=, or this.",
        )

    # -- one shard ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def shard(self, shard: Shard) -> Iterator[None]:
        """Compute ``shard`` inside: what its backward passes leave is this rank's term of it."""
        with self._telling():
            self._enter(shard)
            try:
                with keyed_random(shard, self._devices), deterministic():
                    yield
            except BaseException:
                self._phase = StepPhase.OPEN
                self._sending.end()
                raise
            self._leave(shard)

    def _enter(self, shard: Shard) -> None:
        self._check(shard)
        self.begin_step()
        self._same["step"] = shard.place
        self._phase, self._weight, self._passes = StepPhase.INSIDE, None, 0
        self._samples = shard.samples

    def _check(self, shard: Shard) -> None:
        rank = self.group.rank()
        if not isinstance(shard, Shard):
            raise ModuleTypeError(
                f"rank {rank}: shard: expected a paceline.data.Shard, got an object of type "
                f"{type(shard).__name__}. The other ranks get this error too."
            )
        if shard.count != self.shards:
            raise ModuleArgumentError(
                f"rank {rank}: a shard of {shard.count}, for a model wrapped with "
                f"shards={self.shards}. The other ranks get this error too.",
                "The number is fixed for a run; give the loader the same one.",
            )
        if self._phase is StepPhase.INSIDE or shard.index in self._weights:
            within = "inside another one" if self._phase is StepPhase.INSIDE else "a second time"
            raise ModuleStateError(
                f"rank {rank}: shard {shard.index} is computed {within}. The other ranks are told "
                "so, and the step's gradients are dropped.",
                "Compute each shard once in a step, one after the other; sync_grads() ends a step.",
            )
        step = shard.place
        if self._weights and self._same.get("step", step) != step:
            raise ModuleStateError(
                f"rank {rank}: a shard of {step} among those of {self._same['step']}. The other "
                "ranks get this error too, and the gradients are dropped.",
                "End a step before the next one begins: loop over ddp.shards_of(step), or call "
                "ddp.sync_grads().",
            )

    def begin_step(self) -> None:
        """Make room for the sums of a step, unless that is done; the first shard of it does so."""
        if self._phase is StepPhase.BETWEEN:
            self._begin_step()

    def _begin_step(self) -> None:
        trained = {name: p for name, p in self._params.items() if p.requires_grad}
        self._same = {
            "number of threads": str(torch.get_num_threads()),
            "trained parameters": ", ".join(trained),
        }
        before = {name: p.grad for name, p in trained.items() if p.grad is not None}
        self._buffers.begin_step()
        wanted = [*trained, *self._buffers.tensors]
        self._sums.begin(self._numbers[name] for name in wanted)
        # clones: their memory may be that of the sums
        self._base = {name: grad.detach().clone() for name, grad in before.items()}
        for name in before:
            trained[name].grad = None
        self._weights, self._all_passes = {}, set()
        self._phase = StepPhase.OPEN

    def _leave(self, shard: Shard) -> None:
        weight = self._counts_as()
        with torch.no_grad():
            terms = self._take_gradients()
            for number in self._sending.take_back(terms, weight):
                del terms[number]
            changes = self._buffers.take_changes()
            terms.update((self._numbers[name], change) for name, change in changes.items())
            if weight:  # otherwise it is as if it had not been
                self._sums.add(terms, weight)
        self._weights[shard.index] = weight
        self._all_passes.add(self._passes)
        self._phase = StepPhase.OPEN

    def _counts_as(self) -> int:
        """What the shard that is computed now counts as, as far as it was said."""
        return self._samples if self._weight is None else self._weight

    def _take_gradients(self) -> dict[int, Tensor]:
        found, sums = {}, self._sums.sums
        for number, name, param in self._numbered:
            grad = param.grad
            if grad is None:
                continue
            param.grad = None
            if number not in sums or grad.layout is not torch.strided:
                raise ModuleStateError(
                    f"rank {self.group.rank()}: {name} has a gradient that is sparse, or was "
                    "frozen when the step began. The other ranks get this error too.",
                    "Unfreeze parameters before a step, and use dense gradients.",
                )
            found[number] = grad
        return found

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Should this rank fail in it, let the others' step end with what happened here."""
        try:
            yield
        except Exception as error:
            if self.told_of is not error:
                self.told_of = error
                self.tell_failure(f"{type(error).__name__} in a shard: {error}")
            raise
        except BaseException:
            self._give_up()
            raise

    def tell_failure(self, text: str) -> None:
        """Let the other ranks' step end with this message; this rank's part of it is dropped."""
        log.error("rank %d: %s; telling the other ranks", self.group.rank(), text)
        instead = events.calls_for(self.group.board, events.STANDING_IN)
        with contextlib.suppress(Exception), instead:  # the user wants the first error
            self._sums.send_nothing()
            settle(self.group, self._done(text), len(self._numbers), {})
        self._sums.drop()
        self._give_up()

    def give_up(self) -> None:
        """Drop what was computed of a step; buffers and gradients are as when it began."""
        self._give_up()

    def _give_up(self) -> None:
        if self._phase is not StepPhase.BETWEEN:
            for name, param in self._params.items():
                param.grad = self._base.get(name)
            self._buffers.undo()
        self._sending.end()
        self._end_step()

    def _end_step(self) -> None:
        self._base, self._weights, self._last = {}, {}, False
        self._sending.corrected = False
        self._phase = StepPhase.BETWEEN

    # -- the end of a step ----------------------------------------------------------------------

    def each(self, items: Iterable[Item]) -> Iterator[Item]:
        """``items``, this rank's part of a step; after the last one the step ends."""
        if self._phase is not StepPhase.BETWEEN:
            with self._telling():
                raise ModuleStateError(
                    f"rank {self.group.rank()}: a step begins before the last one has ended: a "
                    "loop over its shards was left early. The other ranks get this error too.",
                    "Let the loop run to its end, or call ddp.sync_grads().",
                )
        yield from self.taken_from(items, _length(items))
        self.finish()

    def taken_from(self, items: Iterable[Item], count: int | None = None) -> Iterator[Item]:
        """``items``; should one of them not come, the other ranks' step ends with what happened.

        ``count`` is how many there are, if that is known: sums are sent in the last one.
        """
        source, number = iter(items), 0
        while True:
            with self._telling():
                item = next(source, _END)
            if item is _END:
                return
            number += 1
            self._last = number == count
            yield item

    def finish(self) -> None:
        """End a step: leave the means over all shards of all ranks in ``.grad``; all call it."""
        self.end_step()
        self.reducer.observers.tell_averages()

    def end_step(
        self, call: bool = False, *, same: Mapping[str, str] = EMPTY, finite: bool = False
    ) -> bool:
        """:meth:`finish`, without those who wait for averages; whether a rank came with ``call``.

        ``same`` must be the same on all ranks; with ``finite`` infinities and NaNs are refused.
        """
        if self._phase is StepPhase.INSIDE:
            raise ModuleStateError(
                f"rank {self.group.rank()}: a step ended inside a shard.",
                "Leave the shard first.",
            )
        with self._telling():  # the others already wait for this rank's account
            self.begin_step()
        self._same.update(same)
        try:
            with torch.no_grad(), events.calls_for(self.group.board, events.SHARD_SUMS):
                called = self._average(replace(self._done(), call=call, finite=finite))
        except BaseException:
            self._give_up()
            raise
        self._end_step()
        return called

    def tell_averages(self) -> None:
        """Let those who wait for averages know that they are there."""
        self.reducer.observers.tell_averages()

    @property
    def passes(self) -> str:
        """How many backward passes a shard has had in this step; empty where they differ."""
        return str(next(iter(self._all_passes))) if len(self._all_passes) == 1 else ""

    def _done(self, trouble: str = "") -> Done:
        if self._sums.interrupted:
            trouble = trouble or "a step was interrupted of which a part had been sent"
        late = self._sending.corrected
        return Done(self.shards, dict(self._weights), dict(self._same), trouble, late=late)

    def _settle(self, done: Done) -> Agreed:
        """Send all that was promised, and compare accounts."""
        self._sums.send_promised()
        try:
            agreed = settle(self.group, done, len(self._numbers), self._sums.sums)
        except BaseException:
            self._sums.drop()
            raise
        if agreed.late:
            self._sending.wanted = False
        return agreed

    def _average(self, done: Done) -> bool:
        agreed = self._settle(done)
        self._sums.exchange(agreed.levels, agreed.in_place)
        means = self._means(agreed)
        for number, name, param in self._numbered:
            if number in self._sums.sums:
                self._put_gradient(name, param, means.get(number))
        for name in self._buffers.tensors:
            if (mean := means.get(self._numbers[name])) is not None:
                self._buffers.change(name, mean)
        return agreed.call

    def _means(self, agreed: Agreed) -> dict[int, Tensor]:
        """By number, of all tensors that a shard had a term for."""
        if not agreed.weight:
            return {}
        sums, tensors = self._sums, self._sums.tensors
        counted = [number for number in sums.sums if number in agreed.touched]
        means = sums.means((n for n in counted if not tensors[n].exact), agreed.weight)
        for number in counted:
            if tensors[number].exact:
                means[number] = sums.mean_whole(number, agreed.weight)
        return means

    def _put_gradient(self, name: str, param: nn.Parameter, mean: Tensor | None) -> None:
        base = self._base.get(name)
        if mean is not None and base is not None:
            mean = base.add_(mean)
        param.grad = base if mean is None else mean

    def sync_grads(self) -> None:
        """End the step, as a loop over ``ddp.shards_of`` does."""
        self.finish()

    # -- what is different from other replicas --------------------------------------------------

    def before_forward(self) -> None:
        """Refuse a forward that trains, or changes buffers, and is no shard's."""
        trains = self.module.training and (torch.is_grad_enabled() or bool(self.buffers))
        if trains and self._phase is not StepPhase.INSIDE:
            raise ModuleStateError(
                f"rank {self.group.rank()}: a forward in training mode outside of any shard, for a "
                f"model wrapped with shards={self.shards}. Its gradients and buffers would be this "
                "rank's alone.",
                "Put it inside `with ddp.shard(shard):`; call ddp.eval() for an evaluation.",
            )

    def after_forward(self, output: Any) -> None:
        """Refuse a backward pass of a forward that was no shard's."""
        if not torch.is_grad_enabled():
            return
        found = (output,) if isinstance(output, Tensor) else tensors_in(output)
        outputs = [tensor for tensor in found if tensor.grad_fn is not None]
        if self._phase is StepPhase.INSIDE:
            for tensor in outputs[:1]:
                tensor.register_hook(self._count_backward)
            if self._last:
                self._sending.begin(self._counts_as)
            return
        for tensor in outputs:
            tensor.register_hook(self._refuse_backward)

    def _count_backward(self, _grad: Tensor) -> None:
        self._passes += 1
        self._sending.backward_begins()

    def _refuse_backward(self, _grad: Tensor) -> None:
        if self._phase is not StepPhase.INSIDE:
            raise ModuleStateError(
                f"rank {self.group.rank()}: a backward pass of a forward that was not inside a "
                "shard. Its gradients would be this rank's alone, and were dropped.",
                "Put both inside `with ddp.shard(shard):`.",
            )

    def forward_failed(self, error: BaseException) -> None:
        """Do nothing: the surrounding shard tells the other ranks."""

    def samples(self, count: float) -> Any:
        """Let the shard that is computed now count as ``count`` samples."""
        rank = self.group.rank()
        if self._phase is not StepPhase.INSIDE or self._weight is not None:
            raise ModuleStateError(
                f"rank {rank}: samples({count!r}) outside of a shard, or for the second time in "
                "one. The other ranks get this error too if it is inside.",
                "Call it at most once for each shard, inside `with ddp.shard(shard):`.",
            )
        whole = isinstance(count, int | float) and float(count).is_integer()
        if not whole or not 0 <= count < _LIMIT:
            raise ModuleArgumentError(
                f"rank {rank}: samples: expected a whole number of samples, got {count!r}: other "
                "numbers do not add up in the same way on any number of ranks."
            )
        self._weight = int(count)
        return contextlib.nullcontext()

    def set_hook(self, state: object, hook: Any) -> None:
        """Refused: what a hook does to a bucket depends on the rank."""
        name = getattr(hook, "__qualname__", type(hook).__name__)
        self._refuse(f"the communication hook {name} works on what a rank has gathered")

    def scatter_gradients(self) -> Any:
        """Refused: gradients are summed whole."""
        self._refuse("gradients are summed whole and cannot be scattered")

    def enter_join(self, **_options: Any) -> None:
        """Refused: ranks may have any number of shards anyway."""
        self._refuse("a Join", "A rank may have any number of shards in a step, also none.")

    def refuse_in_backward(
        self, params: Iterable[nn.Parameter], *, all_of_them: bool = False
    ) -> None:
        """Refuse optimizers that step inside a backward pass: shards are still missing there."""
        if all_of_them or any(optimizers_in_backward(param) for param in params):
            self._refuse("an optimizer steps in backward, before all shards are computed")

    def move_to(self, group: Group) -> None:
        """Go on in another group; a step that was begun is dropped."""
        self._give_up()
        super().move_to(group)
        self.averaging = ShardSwitch(group.rank())
        self._buffers = ShardBuffers(self.buffers, group.rank())
        before, wanted = self._sums, self._sending.wanted
        self._sums = self._make_sums()
        self._sums.come_after(before)
        self._sending = self._make_sending()
        self._sending.wanted = self._sending.wanted and wanted
        look_before_steps(self._sums, _Look(self))

    def refuse_step(self, optimizer: Optimizer) -> None:
        """Raise if an optimizer of these parameters steps while a step has not ended, or in part.

        One that cuts parameters at the number of ranks is no optimizer for shards.
        """
        cuts = getattr(optimizer, "cuts", False)
        if self._phase is StepPhase.BETWEEN and not cuts:
            return
        its = steps(optimizer)
        if not any(id(param) in its for param in self._params.values()):
            return
        if cuts:
            kind = type(optimizer).__name__
            self._refuse(f"{kind} cuts parameters by the number of ranks", "Give it ddp=.")
        with self._telling():
            raise ModuleStateError(
                f"rank {self.group.rank()}: {type(optimizer).__name__} steps while shards of a "
                "step are computed that were not averaged. The other ranks get this error too.",
                "Loop over ddp.shards_of(step), which ends a step, or call ddp.sync_grads().",
            )


_END: Any = object()


def _length(items: object) -> int | None:
    """How many there are, if that can be told."""
    with contextlib.suppress(TypeError):  # there are objects that have a length and do not know it
        return len(items) if isinstance(items, Sized) else None
    return None


class _Look:
    """Asks a replica before every step of an optimizer, as long as it lives."""

    def __init__(self, replica: ShardReplica) -> None:
        self._replica = weakref.ref(replica)

    def __call__(self, _sums: StepSums, optimizer: Optimizer) -> None:
        living = self._replica()
        if living is not None:
            living.refuse_step(optimizer)
