"""The ways of an encoded bucket to its mean over ranks.

**Gathered.** Every rank sends its message to all others; each decodes all of them and adds them up
in the order of ranks. One collective. It is the way of two ranks, and of codecs like top-k: the sum
of such messages has more numbers than each of them.

**In two stages.** Every row has a rank that averages it. Rows go there encoded, are decoded, added
up in float32, encoded again and sent to all. A rank sends about twice its message, however many
ranks there are. What the second encoding loses is kept by the rank that did it.

**Factored.** For PowerSGD: ranks average one thin matrix, then the other.

A way is an iterator: it begins collectives, hands out their works, and goes on when they are done.
All of it runs on the thread that runs the hook, and buckets advance in turn, so that every rank
makes the same calls in the same order. Every rank ends with the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed import Work as TorchWork

from .codecs.codec import RowCodec
from .codecs.dither import mix
from .codecs.powersgd import PowerSGD, orthonormal
from .feedback import Feedback, Held, forget_nonsense, take_over
from .row_layout import OwnerOrder, RowLayout, spans_of
from .wire import Frame, MeteredGroup

Works = Sequence[TorchWork]


class Route(ABC):
    """How buckets of one layout are averaged."""

    def __init__(
        self, layout: RowLayout, line: MeteredGroup, held: Held | None, like: Tensor
    ) -> None:
        self.layout, self.line = layout, line
        self.device = like.device
        self.feedback = held is not None
        self.memory = Feedback(layout, held, like.device)
        # Small parameters are added up in at least this precision.
        self.exact = torch.float64 if like.dtype == torch.float64 else torch.float32

    @abstractmethod
    def travel(self, buffer: Tensor, step: int, *, now: bool, silent: bool) -> Iterator[Works]:
        """Make ``buffer`` the mean over ranks.

        ``now``: nothing else is under way. ``silent``: this rank has nothing to say, nor does it
        send what is left from before.
        """

    def _small(self, buffer: Tensor) -> Tensor:
        """The small parameters' gradients, in one tensor."""
        parts = spans_of(buffer, self.layout.small)
        return torch.cat(parts).to(self.exact) if parts else buffer.new_empty(0, dtype=self.exact)

    def _give_small(self, buffer: Tensor, mean: Tensor) -> None:
        parts = spans_of(buffer, self.layout.small)
        if parts:
            torch._foreach_copy_(parts, list(mean.split([part.numel() for part in parts])))

    def _give_large(self, buffer: Tensor, mean: Tensor) -> None:
        parts = spans_of(buffer, self.layout.large)
        if parts:
            torch._foreach_copy_(parts, self.layout.stretches(mean))


class RowRoute(Route):
    """A way for codecs that work on rows."""

    def __init__(
        self,
        codec: RowCodec,
        layout: RowLayout,
        line: MeteredGroup,
        held: Held | None,
        like: Tensor,
    ) -> None:
        super().__init__(layout, line, held, like)
        self.codec = codec
        self.labels = layout.labels().to(like.device)

    def _encode(self, buffer: Tensor, step: int, silent: bool) -> dict[str, Tensor]:
        if silent:
            return self.codec.pack(torch.zeros_like(self.memory.rows), self.labels)
        rows = self.memory.add(spans_of(buffer, self.layout.large))
        parts = self.codec.pack(rows, mix(self.labels, step, self.line.rank))
        if self.feedback:
            self.codec.add_to(rows, parts, subtract=True)
            self.memory.settle()
        return parts

    def _decode_all(self, frame: Frame, messages: Tensor) -> Tensor:
        """The mean of what ranks sent."""
        rows = self.codec.unpack(frame.read(messages[0]), self.layout.block)
        for message in messages[1:]:
            self.codec.add_to(rows, frame.read(message))
        return rows.div_(len(messages))


class GatherRoute(RowRoute):
    """All messages to all ranks."""

    def __init__(
        self,
        codec: RowCodec,
        layout: RowLayout,
        line: MeteredGroup,
        held: Held | None,
        like: Tensor,
    ) -> None:
        super().__init__(codec, layout, line, held, like)
        self.rides = line.ranks <= 2  # small parameters travel in the message
        extra = layout.spare * self.exact.itemsize if self.rides else 0
        self.frame = Frame(codec, layout.rows, layout.block, extra)
        self.message = torch.zeros(self.frame.nbytes, dtype=torch.uint8, device=like.device)
        self.messages = torch.empty(line.ranks, self.frame.nbytes, dtype=torch.uint8).to(
            like.device
        )

    def travel(self, buffer: Tensor, step: int, *, now: bool, silent: bool) -> Iterator[Works]:
        self.frame.write(self.message, self._encode(buffer, step, silent))
        small = self._small(buffer)
        works = []
        if self.rides:
            self.message[self.frame.extra].copy_(small.view(torch.uint8))
        else:
            works.append(self.line.add_up(small, now=now))
        works.append(self.line.gather(self.messages.view(-1), self.message, now=now))
        yield works
        if self.layout.large:
            self._give_large(buffer, self._decode_all(self.frame, self.messages))
        if self.rides:
            small = self.messages[:, self.frame.extra].contiguous().view(self.exact).sum(0)
        self._give_small(buffer, small.div_(self.line.ranks))


class TwoStageRoute(RowRoute):
    """Each row to the rank that averages it, and the averages to all."""

    def __init__(
        self,
        codec: RowCodec,
        layout: RowLayout,
        line: MeteredGroup,
        held: Held | None,
        like: Tensor,
        owned: Held,
    ) -> None:
        super().__init__(codec, layout, line, held, like)
        owners = layout.owners(line.ranks)
        turns = OwnerOrder.of(owners, line.ranks)
        self.order, self.place = turns.order.to(like.device), turns.place.to(like.device)
        self.mine = self.labels[self.order[line.rank]]
        self.count = turns.counts[line.rank]  # of this rank's rows, those that do not fill up
        most = self.order.shape[1]
        self.frame = Frame(codec, most, layout.block)
        shape = (line.ranks, self.frame.nbytes)
        self.out = torch.zeros(shape, dtype=torch.uint8, device=like.device)
        self.back = torch.zeros_like(self.out)
        self.left = torch.zeros(most, layout.block, device=like.device)
        if self.feedback:
            self._take_over(owned, owners)

    def _take_over(self, owned: Held, owners: Tensor) -> None:
        """Keep here what was lost by this rank's own averages of these parameters' rows."""
        at = 0
        parts = owners.split(self.layout.counts)
        for piece, part in zip(self.layout.large, parts, strict=True):
            rows = int((part == self.line.rank).sum())
            take_over(owned, piece.name, self.left[at : at + rows])
            at += rows

    def hand_over(self, held: Held) -> None:
        """Have what the averages lost sent with this rank's own gradients, for the last time."""
        rows = torch.zeros_like(self.memory.rows)
        mine = self.order[self.line.rank, : self.count]
        rows[mine] = self.left[: self.count] * self.line.ranks  # it will be divided by that
        for piece, lost in zip(self.layout.large, self.layout.stretches(rows), strict=True):
            if piece.name in held:
                held[piece.name].add_(lost)

    def travel(self, buffer: Tensor, step: int, *, now: bool, silent: bool) -> Iterator[Works]:
        parts = self._encode(buffer, step, silent)
        for rank, rows in enumerate(self.order):
            self.frame.write(self.out[rank], {n: p[rows] for n, p in parts.items()})
        small = self._small(buffer)
        works = [self.line.add_up(small, now=now)]
        works.append(self.line.exchange(self.back.view(-1), self.out.view(-1), now=now))
        yield works
        message = self._average(step)
        yield [self.line.gather(self.back.view(-1), message, now=now)]
        self._give_small(buffer, small.div_(self.line.ranks))
        rows = [self.codec.unpack(self.frame.read(m), self.layout.block) for m in self.back]
        self._give_large(buffer, torch.cat(rows).index_select(0, self.place))

    def _average(self, step: int) -> Tensor:
        """The message for all: the mean of the rows that are this rank's."""
        mean = self._decode_all(self.frame, self.back)
        if self.feedback:
            mean.add_(self.left)
        parts = self.codec.pack(mean, mix(self.mine, step, self.line.rank + self.line.ranks))
        message = self.out[0]
        self.frame.write(message, parts)
        if self.feedback:
            self.codec.add_to(mean, parts, subtract=True)
            self.left.copy_(mean)
            self.left[self.count :].zero_()
            forget_nonsense(self.left)
        return message


class FactorRoute(Route):
    """PowerSGD's two averages."""

    def __init__(
        self,
        codec: PowerSGD,
        layout: RowLayout,
        line: MeteredGroup,
        held: Held | None,
        like: Tensor,
    ) -> None:
        super().__init__(layout, line, held, like)
        self.codec = codec

    def travel(self, buffer: Tensor, step: int, *, now: bool, silent: bool) -> Iterator[Works]:
        matrices = self._matrices(buffer, silent)
        lefts = [self.codec.left(m, name) for name, m in matrices.items()]
        sums = torch.cat([self._small(buffer), *(left.flatten() for left in lefts)])
        yield [self.line.add_up(sums, now=now)]
        sums.div_(self.line.ranks)
        self._give_small(buffer, sums[: self.layout.spare])
        means = _shaped(sums[self.layout.spare :].float(), lefts)
        lefts = [orthonormal(left) for left in means]
        own = [self.codec.right(m, p) for m, p in zip(matrices.values(), lefts, strict=True)]
        sums = torch.cat([right.flatten() for right in own]) if own else sums[:0]
        yield [self.line.add_up(sums, now=now)]
        rights = _shaped(sums.div_(self.line.ranks), own)
        stretches = spans_of(buffer, self.layout.large)
        for name, left, right, out in zip(matrices, lefts, rights, stretches, strict=True):
            out.copy_((left @ right.t()).flatten())
            self.codec.keep(name, right)
        if self.feedback and not silent:
            for matrix, left, right in zip(matrices.values(), lefts, own, strict=True):
                matrix.sub_(left @ right.t())  # what this rank has said of the mean
            self.memory.settle()

    def _matrices(self, buffer: Tensor, silent: bool) -> dict[str, Tensor]:
        """What this rank has to say; views of its memory."""
        flats = self.memory.stretches
        if silent:
            flats = [torch.zeros_like(flat) for flat in flats]
        else:
            self.memory.add(spans_of(buffer, self.layout.large))
        pieces = zip(self.layout.large, flats, strict=True)
        return {piece.name: flat.view(piece.shape[0], -1) for piece, flat in pieces}


def _shaped(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]
