"""Join: ranks that have run out stand in for themselves until the others have run out too.

Inside ``with Join([a, b]):`` each rank trains for as long as it has inputs. Before the collectives
of a step, the first joinable says "I am still here" (:meth:`Join.notify_join_context`): an
all-reduce of a one. A rank that reaches the end of the block has *joined*: it answers with a zero,
and as long as the sum is not zero it lets every joinable's :class:`JoinHook` make the calls that
the others make in a step (``main_hook``). When the sum is zero, all have joined, and the hooks end
the matter together (``post_hook``), for instance with the weights of whoever came last.

The all-reduces are those of ``torch.distributed.algorithms.join``, so torch's own joinables, such
as its ZeroRedundancyOptimizer, go into our Join, and ours into torch's.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed import Work as TorchWork
from torch.distributed.algorithms.join import Joinable as TorchJoinable
from torch.distributed.algorithms.join import JoinHook as TorchJoinHook
from typing_extensions import Self

from ..errors import (
    EarlyTerminationError,
    GroupError,
    InputsExhaustedError,
    JoinArgumentError,
    NestedJoinError,
    NotJoinableError,
    PeerDiedError,
    PeerDiedUnjoinedError,
    PeerError,
    PeerExhaustedError,
    PeerFailedError,
    PeerLeftError,
    PeerLeftUnjoinedError,
)
from ..groups import group_to_call
from ..recorder import events
from .parting import Alone, Parting, PartingNote, chain, parting_of

_MANY = 1000  # steps that a rank may stand in for before it says so


class JoinHook(TorchJoinHook):
    """What a joined rank does for one joinable; by default nothing."""

    def main_hook(self) -> None:
        """Make the collectives of one step, without contributing to them."""

    def post_hook(self, is_last_joiner: bool) -> None:
        """Finish, once all ranks have joined; called once on every rank.

        ``is_last_joiner`` is True on the ranks that joined last; there is at least one.
        """


class Joinable(TorchJoinable):
    """Base class of objects whose collectives a :class:`JoinHook` can make for a joined rank.

    A subclass calls :meth:`Join.notify_join_context` before the collectives of a step, and
    ``super().__init__()`` in its constructor.
    """

    _join_config: Any  # JoinConfig, or torch's own while the object is in torch's Join

    def __init__(self) -> None:
        # Past torch's own, which would do the same with its own type.
        super(TorchJoinable, self).__init__()
        self._join_config = JoinConfig.construct_disabled_join_config()

    @property
    def join_config(self) -> Any:
        """The state of the Join this object is in: a :class:`JoinConfig`, or torch's class."""
        return self._join_config

    @abstractmethod
    def join_hook(self, **kwargs: Any) -> TorchJoinHook:
        """Return the hook for one Join; ``kwargs`` are the keyword arguments of that Join.

        All joinables of a Join get the same arguments; ignore those that are for others.
        """

    @property
    @abstractmethod
    def join_device(self) -> torch.device:
        """The device for the tensors of Join's own all-reduces."""

    @property
    @abstractmethod
    def join_process_group(self) -> Any:
        """The group for Join's own all-reduces; None is torch's default group."""


@dataclass
class Progress:
    """How far this rank is in a Join context."""

    step: int = 0  # of those begun or stood in for
    terminated: bool = False  # it was told that another rank has run out, and has raised


@dataclass(frozen=True)
class JoinConfig:
    """What a joinable knows about the Join context it is in."""

    enable: bool
    throw_on_early_termination: bool
    is_first_joinable: bool
    progress: Progress | None = None
    silent: bool = False  # the only joinable speaks for itself: nothing is announced

    @staticmethod
    def construct_disabled_join_config() -> JoinConfig:
        """Return the configuration for use outside of any Join."""
        return JoinConfig(enable=False, throw_on_early_termination=False, is_first_joinable=False)


class Join:
    """A context in which ranks may run out of inputs at different times.

    ``joinables`` share one process group; their hooks are called in the given order, and
    ``join_device`` of the first one is used. ``enable=False`` makes the context do nothing. With
    ``throw_on_early_termination`` every rank raises as soon as one has run out: that rank at the
    end of the block, the others at the beginning of their next step. ``kwargs`` are passed to
    ``join_hook`` of every joinable.

    If a rank raises inside the block, the other ranks raise too. Blocks on one group cannot be
    nested. ::

        with Join([model, optimizer]):
            for batch in batches:  # as many as this rank happens to have
                model(batch).sum().backward()
                optimizer.step()
    """

    def __init__(
        self,
        joinables: Sequence[TorchJoinable],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        **kwargs: Any,
    ) -> None:
        self._joinables = list(joinables)
        self._group = _common_group(self._joinables)
        self._device = torch.device(self._joinables[0].join_device)
        self._enable = enable
        self._throw = throw_on_early_termination
        self._hooks = [joinable.join_hook(**kwargs) for joinable in self._joinables]
        self._progress = Progress()
        self._parting: Parting = Alone()
        self._together = False  # all ranks leave now, each knowing that the others do
        speaks = len(self._hooks) == 1 and getattr(self._hooks[0], "speaks_for_itself", False)
        self._silent = speaks and enable and not throw_on_early_termination

    def __enter__(self) -> Self:
        self._refuse_nesting()
        self._progress, self._together = Progress(), False
        if self._enable:
            self._parting = parting_of(self._group, self._device)
            self._tell_hooks("enter")
        self._configure(active=True)
        _entered.set((*_entered.get(), self))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if not self._enable:
                return
            if self._is_terminated(error):
                self._together = True
                return
            if error is not None:
                self._part(error)
                return  # this rank's own error is the one to raise
            self._join()
        finally:
            if self._enable:
                self._tell_hooks("leave", together=self._together)
            _entered.set(tuple(other for other in _entered.get() if other is not self))
            for joinable in self._joinables:
                joinable._join_config = JoinConfig.construct_disabled_join_config()

    @staticmethod
    def notify_join_context(joinable: TorchJoinable) -> TorchWork | None:
        """Tell the ranks that have joined that this rank begins another step.

        A joinable calls it before the collectives of a step. Only the first joinable of a Join
        sends something; it gets the Work of an all-reduce whose sum is the number of ranks that
        have not joined. You need not wait for it.
        """
        config = getattr(joinable, "_join_config", None)
        if config is None:
            raise NotJoinableError(str(type(joinable)))
        if not config.enable or not config.is_first_joinable:
            return None
        if getattr(config, "silent", False):
            config.progress.step += 1
            return None
        group, device = _group_of(joinable), joinable.join_device
        progress = getattr(config, "progress", None) or Progress()  # torch's configs have none
        progress.step += 1
        work = _all_reduce(group, torch.ones(1, device=device))
        if config.throw_on_early_termination and _total(group, device, 0.0) > 0:
            progress.terminated = True
            raise PeerExhaustedError(group.rank(), progress.step)
        return work

    # -- entering -----------------------------------------------------------------------------

    def _refuse_nesting(self) -> None:
        mine = {id(joinable) for joinable in self._joinables}
        for outer in _entered.get():
            if not (outer._enable or outer is self):
                continue
            if any(id(joinable) in mine for joinable in outer._joinables):
                raise NestedJoinError(self._group.rank(), "joinable")
            if self._enable and outer._group == self._group:
                raise NestedJoinError(self._group.rank(), "process group")

    def _tell_hooks(self, what: str, **said: bool) -> None:
        for hook in self._hooks:
            getattr(hook, what, lambda **_: None)(**said)

    def _configure(self, *, active: bool) -> None:
        """Tell the joinables where they are; a hook that steps must not say "still here"."""
        for index, joinable in enumerate(self._joinables):
            first = active and index == 0
            config = JoinConfig(self._enable, self._throw, first, self._progress, self._silent)
            joinable._join_config = config

    # -- leaving ------------------------------------------------------------------------------

    def _join(self) -> None:
        """Stand in until all have joined, then end the matter together."""
        self._configure(active=False)
        own = self._progress.step
        try:
            board = getattr(self._group, "board", None)  # a torch group has none
            with events.calls_for(board, events.STANDING_IN):
                self._stand_in(own)
        except EarlyTerminationError:
            self._together = True
            raise
        except BaseException as error:
            self._part(error)
            raise
        for hook in self._hooks:
            hook.post_hook(self._progress.step == own)
        self._together = True

    def _stand_in(self, own: int) -> None:
        """Take part in the others' steps until nobody has one; ``own`` were this rank's."""
        while self._others_go_on():
            for hook in () if self._silent else self._hooks:
                hook.main_hook()
            self._warn_of_skew(self._progress.step - own)

    def _others_go_on(self) -> bool:
        """Learn whether any rank begins another step, which is then this one's too."""
        if self._silent:
            goes_on: bool = self._hooks[0].stand_in()  # type: ignore[attr-defined]
            self._progress.step += goes_on
            return goes_on
        if _total(self._group, self._device, 0.0) == 0:
            return False
        if self._throw:
            _total(self._group, self._device, 1.0)  # the others look at the sum, and raise
            raise InputsExhaustedError(self._group.rank(), self._progress.step)
        self._progress.step += 1
        return True

    def _warn_of_skew(self, steps: int) -> None:
        if steps == _MANY + 1:
            warnings.warn(
                f"Detected uneven input skew of greater than {_MANY}. This means that rank "
                f"{self._group.rank()} has at least {_MANY} fewer inputs than other "
                "currently-active ranks: it takes part without data. This level of skew could lead "
                "to performance degradation during training; distribute the data more evenly.",
                stacklevel=5,
            )

    def _is_terminated(self, error: BaseException | None) -> bool:
        """Whether all ranks are raising because one has run out."""
        # The text, for joinables that ask torch's Join.
        text = "Detected at least one rank that exhausted inputs"
        told = error is not None and self._throw and any(text in str(e) for e in chain(error))
        return told or self._progress.terminated

    def _part(self, error: BaseException) -> None:
        """Free ranks that wait for this one; raise if another rank's failure came first."""
        rank, step = self._group.rank(), self._progress.step
        if isinstance(error, GroupError):  # the engine has told the others, or cannot
            _raise_with_step(error, step)
            return
        if self._silent:
            self._part_in_a_pass(error)
            return
        told = any(isinstance(e, PeerError) for e in chain(error))  # by the pass it failed in
        echo = told or self._parting.is_echo(error)
        self._tell_hooks("answer_others")  # some may wait for this rank in another group
        notes = self._parting.exchange(PartingNote.of(error, rank, step, echo))
        self._together = self._parting.meets and bool(notes)
        failed = [note for note in notes if note.rank != rank and not note.echo]
        if echo and failed:
            ranks = [note.rank for note in failed]
            raise PeerFailedError(rank, ranks, failed[0].step, failed[0].message) from error

    def _part_in_a_pass(self, error: BaseException) -> None:
        """The ranks that go on hear of it in their next pass, on any engine."""
        self._together = True
        if isinstance(error, PeerError):
            rank, step = self._group.rank(), self._progress.step
            failed = list(error.messages)
            said = "; ".join(error.messages.values())
            raise PeerFailedError(rank, failed, step, said) from error
        self._hooks[0].fail(error)  # type: ignore[attr-defined]


# The contexts that this thread is in, outermost first.
_entered: ContextVar[tuple[Join, ...]] = ContextVar("paceline_join", default=())


def _common_group(joinables: Sequence[TorchJoinable]) -> ProcessGroup:
    if not joinables:
        raise JoinArgumentError(
            "The join context manager requires at least one joinable", "Give it your model."
        )
    if len({id(joinable) for joinable in joinables}) < len(joinables):
        raise JoinArgumentError(
            "Using join context manager with the same joinable twice", "Give it once."
        )
    groups = [_group_of(joinable) for joinable in joinables]
    if any(group != groups[0] for group in groups):
        raise JoinArgumentError(
            "Using join context manager with multiple process groups",
            "Make all joinables with the same process group.",
        )
    return groups[0]


def _group_of(joinable: TorchJoinable) -> ProcessGroup:
    group = joinable.join_process_group
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, ProcessGroup):
        raise JoinArgumentError(
            f"Using join context manager with {type(joinable).__name__}, which has no process "
            "group on this rank",
            "Make it with one, or call torch.distributed.init_process_group first.",
        )
    return group


def _all_reduce(group: ProcessGroup, tensor: torch.Tensor) -> TorchWork:
    # of any group, registered with torch or not
    return group_to_call(group, tensor.device).allreduce([tensor])


def _total(group: ProcessGroup, device: torch.device, own: float) -> float:
    tensor = torch.full((1,), own, device=device)
    _all_reduce(group, tensor).wait()
    return float(tensor.item())


def _raise_with_step(error: GroupError, step: int) -> None:
    """Say of a rank that is gone which step it was in; other errors say enough."""
    kinds = {PeerDiedError: PeerDiedUnjoinedError, PeerLeftError: PeerLeftUnjoinedError}
    if type(error) in kinds:
        facts = {field.name: getattr(error, field.name) for field in fields(error)}
        raise kinds[type(error)](**facts, step=step) from error
