"""How much a rank's gradients count: the mean is ``sum(w * g) / sum(w)`` over ranks and passes.

A plain pass counts as 1 and is added to ``.grad`` by autograd. A *weighted* pass counts as what the
user said, the number of samples for instance, so its gradient must be multiplied before it is added
to anything. For the time of the pass, whatever ``.grad`` held is therefore put aside: ``gathered``,
the sum of the weighted passes since the last average, and ``base``, what was there before the first
of them: an earlier average, or gradients of this rank alone. What a rank gives is
``gathered + w * g + total * base``, so ``base`` counts as it does in a plain pass: the mean over
ranks is ``sum(total * (base + mean of its passes)) / sum(total)``. An average, equal on all ranks,
stays what it is, whatever they add to it; what differs is equal afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .._torch.tensors import values_of, version_of
from .tensors import add_part, local

_Mark = tuple[int, int]  # tells whether a gradient is the same and was not written to


@dataclass(frozen=True, eq=False, slots=True)
class _Release:
    """How the mean in the ``.grad`` of a frozen parameter was made, in case it thaws."""

    base: Tensor | None  # what was added to it
    times: float  # what it was divided by
    mark: _Mark


@dataclass(eq=False, slots=True)
class Ledger:
    """What this rank owes to the next average."""

    explicit: float | None = None  # weight of the passes that run now; None: they are plain
    once: bool = False  # it is for the next pass only
    total: float = 0.0  # of the weighted passes since the last average
    plain: int = 0  # plain passes since then that were not averaged; a weighted one counts them in
    unit: float = 1.0  # weights travel as multiples of it, so that 16 bits can hold the sums
    keeps: float = 1.0  # what float16 gradients are divided by while they gather: they end at 65504
    open: bool = False  # a weighted pass runs
    gathered: dict[int, Tensor] = field(default_factory=dict)
    base: dict[int, Tensor] = field(default_factory=dict)
    used: bool = False  # there were weighted passes
    _under: dict[int, Tensor] = field(default_factory=dict)  # what plain passes were added to
    _buried: bool = False  # they were added to something that nobody kept
    _thawed: set[int] = field(default_factory=set)  # no pass has added to what these hold
    _versions: dict[nn.Parameter, _Mark] = field(default_factory=dict)  # of .grad, as it was left
    _released: dict[nn.Parameter, _Release] = field(default_factory=dict)  # since the last average

    @property
    def weighs(self) -> bool:
        """Whether the next pass is weighted."""
        return self.explicit is not None or self.total > 0

    @property
    def weight(self) -> float:
        """Of the pass that runs."""
        return 1.0 if self.explicit is None else self.explicit

    @contextmanager
    def counting_as(self, weight: float | None) -> Iterator[None]:
        """Let the pass inside count as ``weight``, whatever the user said.

        That holds again afterwards, unless it was for one pass only and this pass has ended it.
        """
        explicit, once = self.explicit, self.once
        self.explicit = weight
        try:
            yield
        finally:
            if self.once or not once:
                self.explicit = explicit

    def begin(self, params: Sequence[nn.Parameter]) -> None:
        """Put aside what ``.grad`` holds; before any gradient of the pass arrives."""
        if not self.total:
            self.total, self.keeps = float(self.plain), 1.0
            self._versions = self._versions if self.plain else {}
        self.plain, self.used = 0, True
        held = {n: p.grad for n, p in enumerate(params) if p.grad is not None}
        if self.owes(params):
            self.base |= {n: held[n].clone() for n in self._thawed & held.keys()}
            self.gathered = {n: grad for n, grad in held.items() if n not in self._thawed}
            self._set_base_apart(params)
        else:  # in memory of its own: the pass will use that of the buckets
            self.keeps = 2.0 ** round(math.log2(self.weight)) if self.weight else 1.0
            self.base = {number: grad.clone() for number, grad in held.items()}
        for number in held:
            params[number].grad = None
        self._thawed, self.open = set(), True

    def _set_base_apart(self, params: Sequence[nn.Parameter]) -> None:
        """Take what the plain passes were added to out of what was gathered."""
        for number, under in self._under.items():
            if number not in self.gathered:
                continue
            grad, param = self.gathered[number], params[number]
            self.base[number] = under
            local(grad).sub_(local(under))
            if _is_something(grad):
                self._versions[param] = _mark(grad)
            else:  # no pass came by it
                del self.gathered[number]
                self._versions.pop(param, None)
        self._under = {}

    def owes(self, params: Sequence[nn.Parameter]) -> bool:
        """Whether weighted passes wait to be averaged; not when the user has cleared ``.grad``.

        Cleared in place (``zero_grad(set_to_none=False)``) they are still there, and zero.
        """
        if not self.total:
            return False
        if self._is_cleared():
            self.forget_gathered()
            return False
        for number in [n for n in self.base if self._is_gone(params[n])]:
            del self.base[number]  # one that is zero may be so by itself
        for number in [n for n in self._under if self._was_cleared(params[n])]:
            del self._under[number]
        return True

    def _is_cleared(self) -> bool:
        """Whether nothing is left of what passes before left in ``.grad``."""
        return bool(self._versions) and all(map(self._was_cleared, self._versions))

    def _is_all_gone(self) -> bool:
        """As :meth:`_is_cleared`, without a look into gradients, which a device would wait for."""
        return bool(self._versions) and all(map(self._is_gone, self._versions))

    def _is_gone(self, param: nn.Parameter) -> bool:
        """Whether passes before left something in this ``.grad``, which is None now."""
        return param.grad is None and param in self._versions

    def _was_cleared(self, param: nn.Parameter) -> bool:
        """Whether passes before left something in this ``.grad`` that is there no more."""
        if param not in self._versions or param.grad is None:
            return param in self._versions
        return self._versions[param] != _mark(param.grad) and not _is_something(param.grad)

    def forget_gathered(self) -> None:
        """Drop what weighted passes have accumulated."""
        self.total = 0.0
        self.base = {}
        self.forget_plain()

    def forget_plain(self) -> None:
        """Drop what is known of plain passes: they were averaged, or cleared."""
        self.plain = 0
        self._under, self._thawed, self._buried = {}, set(), False
        self._versions, self._released = {}, {}

    def fold(self, number: int, param: nn.Parameter) -> None:
        """Make ``.grad`` the weighted sum of this pass and those before it."""
        before, grad = self.gathered.pop(number, None), param.grad
        if (
            self.weight == 0 or grad is None
        ):  # the mean over no samples is nothing, often not even a number
            param.grad = before
        elif before is None:
            local(grad).mul_(self.weight / self.kept(grad))
        else:
            local(before).add_(local(grad), alpha=self.weight / self.kept(grad))
            param.grad = before

    def kept(self, grad: Tensor) -> float:
        """What a gradient like ``grad`` is divided by until it is in its bucket; mostly 1."""
        return self.keeps if self.open and grad.dtype is torch.float16 else 1.0

    def give(self, number: int, param: nn.Parameter) -> bool:
        """Make ``.grad`` what this rank gives to the average; True if no weighted pass came by it.

        A rank that counts nothing gives nothing of what it held either.
        """
        self.fold(number, param)
        held, weight = self.base.get(number), self.total + self.weight
        untouched = held is not None and param.grad is None
        if held is not None and weight:
            add_part(param, held, weight / self.kept(held))
        return untouched

    def end(self, params: Sequence[nn.Parameter]) -> None:
        """A weighted pass that is not averaged is over."""
        for number, param in enumerate(params):
            self.fold(number, param)
        self.total += self.weight
        if self.weight and all(param.grad is None for param in params):
            self.total = 0.0  # somebody has used up all that was gathered
        if not self.total:  # as if it had not been
            self._put_back(self.base, params)
            self.base = {}
        self._note_versions(params)
        self._close()

    def begin_plain(self, params: Sequence[nn.Parameter]) -> None:
        """A plain pass begins that is not averaged: keep what it is added to, if weights are used.

        Behind the pass nobody can tell them apart, and what was there counts otherwise.
        """
        if self.plain and (self._is_cleared() if self.used else self._is_all_gone()):
            self.forget_plain()
        held = {n: p.grad for n, p in enumerate(params) if p.grad is not None}
        if self.plain:
            for number in [n for n in self._under if self._was_cleared(params[n])]:
                del self._under[number]
            self._under |= {n: held[n].clone() for n in self._thawed & held.keys()}
        else:
            self._under = {n: grad.clone() for n, grad in held.items()} if self.used else {}
            self._buried = bool(held) and not self.used
        self._thawed = set()

    def is_buried(self, params: Sequence[nn.Parameter]) -> bool:
        """Whether plain passes were added to something, and nobody can tell them apart now."""
        if self.plain and self._buried and self._is_cleared():
            self.forget_plain()
        return bool(self.plain) and self._buried

    def keep_plain(self, params: Sequence[nn.Parameter]) -> None:
        """A plain pass that is not averaged is over."""
        self.plain += 1
        self._note_versions(params)
        if not self._versions:  # somebody has used up all that came
            self.forget_plain()

    def _note_versions(self, params: Sequence[nn.Parameter]) -> None:
        held = ((p, p.grad) for p in params)
        self._versions = {p: _mark(g) for p, g in held if g is not None}

    @property
    def counts(self) -> bool:
        """Whether what is sent now says its weight: in other units plain passes do so too."""
        return self.open or self.unit != 1.0

    def owed(self) -> float:
        """The weight of what is sent now, in units."""
        return (self.total + self.weight) / self.unit if self.open else 1.0 / self.unit

    def choose_unit(self, mean: float, *, of: float | None = None) -> None:
        """For the next pass; ``mean`` is that of what ranks owed, so all choose the same.

        ``of``: the unit it is a multiple of, if not that of now.
        """
        if mean > 0:
            self.unit = (of or self.unit) * 2.0 ** round(math.log2(mean))

    def settle(self, params: Sequence[nn.Parameter], sent: Container[int]) -> None:
        """All that was ``sent`` is averaged; the rest of what was put aside comes back."""
        rest = {number: grad for number, grad in self.base.items() if number not in sent}
        self._put_back(rest, params)
        self.forget()

    def cancel(self, params: Sequence[nn.Parameter]) -> None:
        """Nothing of the pass counts after all: the next one finds everything as this one did."""
        aside = self.gathered if self.total else self.base
        for number, param in enumerate(params):
            param.grad = aside.get(number)
        if not self.total:
            self.base = {}
        self.gathered, self.open = {}, False

    def follow(self, before: Sequence[nn.Parameter], after: Sequence[nn.Parameter]) -> None:
        """Other parameters are trained from now on: what is known of each stays with it.

        One that is trained no more keeps the mean of its weighted passes, beside what was put
        aside for it, as it keeps the sum of plain ones. One that thaws before the average has its
        passes in it again; what others hold that thaw is what they were added to.
        """
        places = {id(param): number for number, param in enumerate(after)}
        moved = {n: places[id(param)] for n, param in enumerate(before) if id(param) in places}
        frozen = [n for n in range(len(before)) if n not in moved]
        if self.plain and self._is_cleared():
            self.forget_plain()
        if self.owes(before) or self.plain:
            self._release([n for n in frozen if n not in self._thawed], before)
        if not moved and self._released.keys().isdisjoint(after):
            self.forget_gathered()  # nothing is trained any more of what these passes were for
        self.base = {moved[n]: grad for n, grad in self.base.items() if n in moved}
        self._under = {moved[n]: grad for n, grad in self._under.items() if n in moved}
        self._thawed = {moved[n] for n in self._thawed if n in moved}
        stays = {param: self._versions[param] for param in after if param in self._versions}
        self._versions = stays or self._versions  # this rank may have reached frozen ones only
        if self.total or self.plain:
            thawed = sorted(set(range(len(after))).difference(moved.values()))
            self._thawed.update(n for n in thawed if not self._take_back(n, after[n]))

    @torch.no_grad()
    def _release(self, frozen: Sequence[int], params: Sequence[nn.Parameter]) -> None:
        """Make ``.grad`` of these what it would be without weights."""
        for number in frozen:
            param, grad, times = params[number], params[number].grad, 1.0
            base = (self._under if self.plain else self.base).pop(number, None)
            if grad is not None and not self.plain:
                times = self.total / (self.keeps if grad.dtype is torch.float16 else 1.0)
                local(grad).div_(times)
            if base is not None and not self.plain:
                add_part(param, base)
            if grad is not None and param.grad is not None:
                mark = _mark(param.grad)
                self._released[param] = _Release(base, times, mark)
                if param in self._versions:
                    self._versions[param] = mark

    @torch.no_grad()
    def _take_back(self, number: int, param: nn.Parameter) -> bool:
        """Make the mean of one that thaws a weighted sum again, unless it was changed."""
        released = self._released.pop(param, None)
        if released is None or param.grad is None or _mark(param.grad) != released.mark:
            return False
        if released.base is not None and self.plain:
            self._under[number] = released.base
        elif released.base is not None:
            local(param.grad).sub_(local(released.base))
            self.base[number] = released.base
        local(param.grad).mul_(released.times)
        self._versions[param] = _mark(param.grad)
        return True

    def _put_back(self, aside: dict[int, Tensor], params: Sequence[nn.Parameter]) -> None:
        for number, grad in aside.items():
            add_part(params[number], grad)

    def forget(self) -> None:
        """Nothing is owed any more."""
        self.gathered, self.base = {}, {}
        self.total = 0.0
        self.forget_plain()
        self._close()

    def _close(self) -> None:
        self.open = False
        self.use_up()

    def use_up(self) -> None:
        """The pass that a weight was for has been, well or badly."""
        if self.once:
            self.explicit, self.once = None, False


def _mark(grad: Tensor) -> _Mark:
    return id(grad), version_of(grad)


def _is_something(grad: Tensor) -> bool:
    mine = local(grad)
    return bool((values_of(mine) if mine.is_sparse else mine).any())
