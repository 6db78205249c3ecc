"""The routes of messages that hold rows.

**Gathered.** Every rank sends its message to all others; each decodes all of them and adds them up
in the order of ranks. One collective. It is the way of two ranks, and of codecs like top-k: the sum
of such messages has more numbers than each of them.

**In two stages.** Every row has a rank that averages it. Rows go there encoded, are decoded, added
up in float32, encoded again and sent to all. A rank sends about twice its message, however many
ranks there are. What the second encoding loses is kept by the rank that did it.

Where ranks are weighted, a message says what its rank counts, and one that counts nothing is not
decoded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..dither import mix
from ..feedback import Held, forget_nonsense, take_over
from ..row_layout import OwnerOrder, spans_of
from ..wire import Frame
from .route import Route, RouteSetting, Works

Parts = dict[str, Tensor]

_SHARE, _SMALL = "/share", "/small"  # beside the codec's parts


class RowPacker(Protocol):
    """What encodes rows; ``RowCodec`` has the same methods and says more."""

    def pack(self, rows: Tensor, keys: Tensor) -> Parts:
        """``rows`` (float32, left as they are) encoded; ``keys`` choose what is random."""

    def unpack(self, parts: Mapping[str, Tensor], width: int) -> Tensor:
        """Rows of ``width`` elements."""

    def add_to(self, rows: Tensor, parts: Mapping[str, Tensor], *, subtract: bool = False) -> None:
        """Add what was encoded to ``rows``, or take it away from them."""


def row_route(packer: RowPacker, setting: RouteSetting, *, dense: bool) -> Route:
    """The cheaper of both routes; ``dense``: the mean of messages is no larger than one message."""
    staged = dense and setting.line.ranks > 2 and setting.layout.large
    kind = TwoStageRoute if staged and not setting.one_stage else GatherRoute
    return kind(packer, setting)


class RowRoute(Route):
    """What both routes share."""

    def __init__(self, packer: RowPacker, setting: RouteSetting) -> None:
        super().__init__(setting)
        self.packer = packer
        self.labels = self.layout.labels().to(self.device)
        self.rides = self.weighted or self.line.ranks <= 2  # small parameters are in the message
        self._frame: Frame | None = None

    def _encode(self, buffer: Tensor, step: int, share: float) -> Parts:
        if not share:
            return self.packer.pack(torch.zeros_like(self.memory.rows), self.labels)
        rows = self.memory.add(spans_of(buffer, self.layout.large))
        parts = self.packer.pack(rows, mix(self.labels, step, self.line.rank))
        if self.feedback:
            parts = {name: _apart_from(rows, part) for name, part in parts.items()}
            self.packer.add_to(rows, parts, subtract=True)
            self.memory.settle()
        return parts

    def _with_head(self, parts: Parts, small: Tensor, share: float) -> Parts:
        """The parts of a message, those of the codec among them."""
        if self.rides:
            parts = {**parts, _SMALL: small}
        if self.weighted:
            head = torch.tensor([share], dtype=torch.float64, device=self.device)
            parts = {**parts, _SHARE: head}
        return parts

    def _frame_for(self, parts: Parts) -> Frame:
        """Where parts lie in a message: the same for all messages of this route."""
        if self._frame is None:
            self._frame = Frame.of(parts)
        return self._frame

    def _mean(self, messages: Sequence[Parts]) -> tuple[Tensor, float]:
        """The mean of what the ranks sent, and the sum of their weights."""
        width = self.layout.block
        if not self.weighted:
            rows = self.packer.unpack(messages[0], width)
            for parts in messages[1:]:
                self.packer.add_to(rows, parts)
            return rows.div_(len(messages)), len(messages)
        rows, total = torch.zeros_like(self.packer.unpack(messages[0], width)), 0.0
        for parts in messages:
            share = parts[_SHARE].item()
            if share:
                rows.add_(self.packer.unpack(parts, width), alpha=share)
                total += share
        return rows.div_(total or 1.0), total

    def _sum_of_small(self, messages: Sequence[Parts]) -> Tensor:
        return torch.stack([parts[_SMALL] for parts in messages]).sum(0)


def _apart_from(rows: Tensor, part: Tensor) -> Tensor:
    """``part`` in memory of its own: what is sent will be taken away from ``rows``."""
    shared = part.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr()
    return part.clone() if shared else part


class GatherRoute(RowRoute):
    """All messages to all ranks."""

    def __init__(self, packer: RowPacker, setting: RouteSetting) -> None:
        super().__init__(packer, setting)
        self._own = self._all = torch.empty(0, dtype=torch.uint8, device=self.device)

    def travel(self, buffer: Tensor, step: int, *, share: float, now: bool) -> Iterator[Works]:
        small = self._small(buffer)
        parts = self._with_head(self._encode(buffer, step, share), small, share)
        frame = self._frame_for(parts)
        if self._own.numel() != frame.nbytes:
            self._own = frame.room(1, self.device).view(-1)
            self._all = frame.room(self.line.ranks, self.device)
        frame.write(self._own, parts)
        works = [] if self.rides else [self.line.add_up(small, now=now)]
        works.append(self.line.gather(self._all.view(-1), self._own, now=now))
        yield works
        messages = [frame.read(message) for message in self._all]
        if self.layout.large:
            self._give_large(buffer, self._mean(messages)[0])
        self._give_small(buffer, self._sum_of_small(messages) if self.rides else small)


class TwoStageRoute(RowRoute):
    """Each row to the rank that averages it, and the averages to all."""

    def __init__(self, packer: RowPacker, setting: RouteSetting) -> None:
        super().__init__(packer, setting)
        owners = self.layout.owners(self.line.ranks)
        turns = OwnerOrder.of(owners, self.line.ranks)
        self.order, self.place = turns.order.to(self.device), turns.place.to(self.device)
        self.mine = self.labels[self.order[self.line.rank]]
        self.count = turns.counts[self.line.rank]  # of this rank's rows, those that do not fill up
        self.left = torch.zeros(self.order.shape[1], self.layout.block, device=self.device)
        self._out = self._back = torch.empty(0, dtype=torch.uint8, device=self.device)
        if self.feedback:
            self._take_over(setting.owned, owners)

    def _take_over(self, owned: Held, owners: Tensor) -> None:
        """Keep here what was lost by this rank's own averages of these parameters' rows."""
        at = 0
        parts = owners.split(self.layout.counts)
        for span, part in zip(self.layout.large, parts, strict=True):
            rows = int((part == self.line.rank).sum())
            take_over(owned, span.name, self.left[at : at + rows])
            at += rows

    def hand_over(self, held: Held) -> None:
        """Have what the averages lost sent with this rank's own gradients, for the last time."""
        rows = torch.zeros_like(self.memory.rows)
        mine = self.order[self.line.rank, : self.count]
        rows[mine] = self.left[: self.count] * self.line.ranks  # it will be divided by that
        for span, lost in zip(self.layout.large, self.layout.stretches(rows), strict=True):
            if span.name in held:
                held[span.name].add_(lost)

    def travel(self, buffer: Tensor, step: int, *, share: float, now: bool) -> Iterator[Works]:
        small = self._small(buffer)
        frame = self._write_out(self._encode(buffer, step, share), small, share)
        works = [] if self.rides else [self.line.add_up(small, now=now)]
        works.append(self.line.exchange(self._back.view(-1), self._out.view(-1), now=now))
        yield works
        message = self._average(frame, step)
        yield [self.line.gather(self._back.view(-1), message, now=now)]
        messages = [frame.read(m) for m in self._back]
        self._give_small(buffer, messages[0][_SMALL] if self.rides else small)
        rows = [self.packer.unpack(parts, self.layout.block) for parts in messages]
        self._give_large(buffer, torch.cat(rows).index_select(0, self.place))

    def _write_out(self, parts: Parts, small: Tensor, share: float) -> Frame:
        """Write each rank's message: the rows that it averages."""
        for rank, rows in enumerate(self.order):
            own = self._with_head({n: p[rows] for n, p in parts.items()}, small, share)
            frame = self._frame_for(own)
            if self._out.numel() != self.line.ranks * frame.nbytes:
                self._out = frame.room(self.line.ranks, self.device)
                self._back = torch.zeros_like(self._out)
            frame.write(self._out[rank], own)
        return frame

    def _average(self, frame: Frame, step: int) -> Tensor:
        """The message for all: the mean of the rows that are this rank's."""
        messages = [frame.read(message) for message in self._back]
        mean, total = self._mean(messages)
        feeds_back = self.feedback and total > 0  # nobody takes a mean of nothing
        if feeds_back:
            mean.add_(self.left)
        keys = mix(self.mine, step, self.line.rank + self.line.ranks)
        parts = self.packer.pack(mean, keys)
        small = self._sum_of_small(messages) if self.rides else mean[:0]
        message = self._out[0]
        frame.write(message, self._with_head(parts, small, total))
        if feeds_back:
            self.packer.add_to(mean, parts, subtract=True)
            self.left.copy_(mean)
            self.left[self.count :].zero_()
            forget_nonsense(self.left)
        return message
