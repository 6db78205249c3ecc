"""EarlySending: sums leave in the backward pass of a rank's last shard, as its gradients come.

``_reducer/step_sums.py`` says which buckets may leave before the ranks compare accounts, and why
that changes no bit. Here is when: hooks on a few parameters tell that the gradients of a bucket are
there; they are added to the sums, and the bucket is sent. What has not left when the backward pass
ends is sent then, so that all ranks that know their last shard send at the same place.

A gradient that was sent may still change inside the shard: another backward pass, a reentrant
checkpoint, a program that clips. So copies are kept (``_reducer/sent_terms.py``), and when the
shard ends, what has changed is corrected. As that costs more than sending early gains, all ranks
then stop doing it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .._reducer import SentTerms, StepSums
from .._torch.autograd import call_after_backward
from ..recorder import events


class EarlySending:
    """Sends the promised buckets of ``sums``, to which ``params`` belong by number."""

    def __init__(self, sums: StepSums, params: Mapping[int, nn.Parameter]) -> None:
        self._sums, self._params = sums, params
        self.wanted = sums.group.size() > 1 and all(p.device.type == "cpu" for p in params.values())
        self.corrected = False  # something that was sent has changed since, in this step
        self._handles: list[RemovableHandle] = []
        self._sent = SentTerms(sums.tensors)
        self._touched: dict[int, bool] = {}  # of those sent, whether an earlier shard had a term
        self._weight: Callable[[], int] = int
        self._sent_weight = 0
        self._order: list[int] = []  # of the gradients that have come
        self._telling: tuple[list[list[int]], set[int]] = [], set()  # which tell, for which buckets

    # -- the last shard of a rank ---------------------------------------------------------------

    def begin(self, weight: Callable[[], int]) -> None:
        """A forward pass of the last shard is done: send as its backward pass goes along.

        ``weight`` is what the shard counts as.
        """
        rows = self._sums.promised()
        if self._handles or self._sent or not self.wanted or not rows:
            return
        self._weight, self._order = weight, []
        known, telling = self._telling
        for number in telling if known == rows else [n for row in rows for n in row]:
            hook = partial(self._arrived, number)
            self._handles.append(self._params[number].register_post_accumulate_grad_hook(hook))

    def backward_begins(self) -> None:
        """Be there when the backward pass that runs now ends."""
        if self._handles:
            call_after_backward(self._send_rest)

    def _arrived(self, number: int, _param: Tensor) -> None:
        self._order.append(number)
        while (rows := self._sums.promised()) and self._is_complete(rows[0]):
            self._send(rows[0])

    def _is_complete(self, row: list[int]) -> bool:
        """Whether all gradients have come that are expected; others may come never."""
        sums, params = self._sums.sums, self._params
        return not any(params[n].grad is None and sums[n].expected is not None for n in row)

    def _send_rest(self) -> None:
        if not self._handles:
            return
        rows = self._sums.promised()
        self._learn(complete=not rows)
        for row in rows:
            self._send(row)

    def _send(self, row: list[int]) -> None:
        grads = {number: self._params[number].grad for number in row}
        terms = {number: grad for number, grad in grads.items() if grad is not None}
        if any(grad.layout is not torch.strided for grad in terms.values()):
            return  # the shard's end refuses it
        sums = self._sums.sums
        self._touched.update((number, sums[number].touched) for number in terms)
        self._sent_weight = self._weight()
        with torch.no_grad():
            if self._sent_weight:
                self._sums.add(terms, self._sent_weight)
            self._sent.note(terms)
        with events.calls_for(self._sums.group.board, events.SHARD_SUMS):
            self._sums.send_next()

    def _learn(self, *, complete: bool) -> None:
        """Let the last gradient of each bucket tell the next time, if that would be enough."""
        known, _ = self._telling
        rows = self._all_rows()
        if complete and known != rows:
            last = [[n for n in self._order if n in row] for row in rows]
            self._telling = rows, {found[-1] for found in last if found}
        elif not complete:
            self._telling = [], set()

    def _all_rows(self) -> list[list[int]]:
        return [row for row, promised in self._sums.rows() if promised]

    # -- its end --------------------------------------------------------------------------------

    def take_back(self, grads: Mapping[int, Tensor], weight: int) -> set[int]:
        """Which of a shard's gradients are sums already; those that have changed are none any more.

        ``grads`` are those that it ends with, by number, and ``weight`` is what it counts as.
        """
        sent = self._sent.numbers()
        if sent:
            now = grads if weight == self._sent_weight else {}
            self._correct(changed := self._sent.changed(now))
            sent -= set(changed)
        self.end()
        return sent

    def _correct(self, changed: Mapping[int, Tensor]) -> None:
        """Take back these terms, which are those that were sent."""
        if changed:
            self.corrected = True
            if self._sent_weight:
                self._sums.add(changed, -self._sent_weight)
            for number in changed:
                self._sums.sums[number].touched = self._touched[number]

    def end(self) -> None:
        """Listen no more."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._touched = [], {}
        self._sent.forget()
