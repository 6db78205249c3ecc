"""The threads engine: ranks that are threads of one process, for tests and debuggers.

Ranks share a :class:`World`. A collective is a :class:`Meeting` in it: each rank brings its
:class:`Part`, waits until all are there, computes its results from the others' inputs into memory
of its own, waits until all have read, and only then writes; so a call may be in place. Agreement is
judged once for all ranks, by the last that comes.

A message is copied when it is sent and waits in the receiver's :class:`Mailbox`; sends never block.
"""

from __future__ import annotations

import functools
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import Store
from torch.distributed import Work as TorchWork

from .._transport import Clock, fetch
from ..errors import (
    CollectiveTimeoutError,
    EngineUnavailableError,
    GroupClosedError,
    GroupError,
    MismatchError,
    PeerLeftError,
    RendezvousError,
)
from .engine import REDUCING, Call, Capabilities
from .lane import Lane
from .work import Finished, Watcher, Work

_ROOTED = frozenset({"reduce", "broadcast", "gather", "scatter"})
_EQUAL = frozenset({"all_reduce", "reduce", "broadcast", "barrier"})  # one size on all ranks

# Where ranks of one process find each other: by a key they have from their store. Forked children
# have the name of their parent, hence the process id beside it.
_worlds: weakref.WeakValueDictionary[str, World] = weakref.WeakValueDictionary()
_worlds_lock = threading.Lock()
_PROCESS = secrets.token_hex(8)


# -- what a rank brings -----------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """One rank's share in a collective: flat views of its tensors, by the rank at the other end."""

    call: Call
    name: str  # of the collective, whichever form it was called in
    give: Sequence[Tensor]  # by receiver; empty where this rank gives nothing
    take: Sequence[Tensor]  # by sender; one for all of them together, or for the root; or empty
    uneven: bool  # sizes may differ by rank

    @classmethod
    def of(cls, call: Call, rank: int, size: int) -> Part:
        """Cut a call's tensors up."""
        name = call.kind.removesuffix("_single")
        if name in ("reduce_scatter", "scatter", "all_to_all"):
            give = _cut(call.inputs, call.input_splits, size)
        else:
            give = [_flat(t) for t in call.inputs] * size  # the same for everybody
        if name in REDUCING or name in ("broadcast", "scatter"):
            take = [_flat(t) for t in call.outputs]
        else:
            take = _cut(call.outputs, call.output_splits, size)
        if name == "broadcast":
            give, take = (give, []) if call.root == rank else ([], take)
        if name == "reduce" and call.root != rank:
            take = []
        single = call.kind.endswith("_single") and not call.input_splits and not call.output_splits
        return cls(call, name, give, take, uneven=not single and name not in _EQUAL)

    @property
    def essence(self) -> tuple[object, ...]:
        """What must be the same on every rank."""
        return self.name, self.dtype, self.call.reduction, self.call.root

    @property
    def dtype(self) -> torch.dtype | None:
        tensors = self.call.inputs or self.call.outputs
        return tensors[0].dtype if tensors else None

    @property
    def count(self) -> int:
        """Elements on this rank, of the tensor that is one and the same size everywhere."""
        tensors = self.call.outputs if "scatter" in self.name else self.call.inputs
        return sum(t.numel() for t in tensors)

    def wants(self, sender: int) -> Tensor:
        return self.take[sender if len(self.take) > 1 else 0]

    def tell(self, nbytes: int | None = None) -> str:
        """The call as errors show it; ``nbytes`` is what it has or expects between two ranks."""
        if self.name == "barrier":
            return "barrier()"
        parts = [f"{self.count} x {self.dtype}"]
        if nbytes is not None:
            parts.append(f"{nbytes} bytes between the two")
        if self.name in REDUCING:
            parts.append(self.call.reduction.upper())
        if self.name in _ROOTED:
            parts.append(f"root {self.call.root}")
        return f"{self.name}({', '.join(parts)})"


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1)


def _cut(tensors: Sequence[Tensor], splits: Sequence[int], size: int) -> list[Tensor]:
    """One flat piece for each rank, of one tensor for each rank or of one for all."""
    if len(tensors) != 1 or size == 1:
        return [_flat(t) for t in tensors]
    tensor = tensors[0]
    rows = tensor.shape[0] if tensor.dim() else 1
    if splits:
        row = tensor.numel() // rows if rows else 0
        return list(_flat(tensor).split([count * row for count in splits]))
    return list(_flat(tensor).split([tensor.numel() // size] * size))


@dataclass(frozen=True)
class Difference:
    """Two calls that do not fit."""

    rank_a: int
    call_a: str
    rank_b: int
    call_b: str


def find_difference(parts: Sequence[Part]) -> Difference | None:
    """The first two ranks whose parts do not fit; the same answer wherever it is asked."""
    first = parts[0]
    for rank, part in enumerate(parts):
        if part.essence != first.essence:
            return Difference(0, first.tell(), rank, part.tell())
    if not any(part.uneven for part in parts):
        for rank, part in enumerate(parts):
            if part.count != first.count:
                return Difference(0, first.tell(), rank, part.tell())
        return None
    for s, sender in enumerate(parts):
        for r, receiver in enumerate(parts):
            if not sender.give or not receiver.take:
                continue
            sent, wanted = sender.give[r].nbytes, receiver.wants(s).nbytes
            if sent != wanted:
                return Difference(s, sender.tell(sent), r, receiver.tell(wanted))
    return None


# -- what comes out ---------------------------------------------------------------------------


def results(parts: Sequence[Part], rank: int) -> list[Tensor]:
    """What ``rank`` takes, in the order of its part's ``take``, in memory of its own."""
    mine = parts[rank]
    if not mine.take:
        return []
    given = [part.give[rank] for part in parts if part.give]
    if mine.name in REDUCING:
        return [reduced(given, mine.call.reduction)]
    return [piece.clone() for piece in given]


def reduces(dtype: torch.dtype, reduction: str) -> bool:
    """Whether :func:`reduced` knows how."""
    if dtype.is_complex:
        return reduction in ("sum", "avg")
    if dtype is torch.bool:
        return reduction != "avg"
    return not (dtype.is_floating_point and reduction in ("band", "bor", "bxor"))


def reduced(tensors: Sequence[Tensor], reduction: str) -> Tensor:
    """Element by element over ``tensors`` in their order, so that every rank gets the same bits."""
    dtype = tensors[0].dtype
    if dtype.is_complex:
        real = reduced([torch.view_as_real(t) for t in tensors], reduction)
        return torch.view_as_complex(real)
    if dtype is torch.bool:  # a sum is "any", a product is "all"
        reduction = {"sum": "bor", "max": "bor", "product": "band", "min": "band"}.get(
            reduction, reduction
        )
    if dtype is torch.uint64:
        return _reduced_uint64(tensors, reduction)
    wide = _WIDE.get(dtype, dtype)
    if dtype.is_floating_point and dtype.itemsize < 4:
        wide = torch.float32
    total = functools.reduce(_STEPS[reduction], (t.to(wide) for t in tensors))
    if reduction == "avg" and wide.is_floating_point:
        total = total / len(tensors)
    elif reduction == "avg":  # a sum wraps before it is divided, as in shm
        total = torch.div(total.to(dtype).to(wide), len(tensors), rounding_mode="trunc")
    return total.clone() if total is tensors[0] else total.to(dtype)


_STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
_WIDE = {torch.uint16: torch.int64, torch.uint32: torch.int64}  # torch cannot add these themselves


def _reduced_uint64(tensors: Sequence[Tensor], reduction: str) -> Tensor:
    """The same on int64, which has the same bits but for order and division."""
    signed = [t.view(torch.int64) for t in tensors]
    if reduction in ("min", "max"):
        lowest = torch.iinfo(torch.int64).min
        return (reduced([t ^ lowest for t in signed], reduction) ^ lowest).view(torch.uint64)
    total = reduced(signed, "sum" if reduction == "avg" else reduction)
    if reduction == "avg" and len(tensors) > 1:
        count = len(tensors)
        half = (total >> 1) & torch.iinfo(torch.int64).max
        quotient = (half // count) << 1
        total = quotient + ((total - quotient * count) >= count)
    return total.view(torch.uint64)


# -- where ranks meet -------------------------------------------------------------------------


@dataclass(eq=False)
class Meeting:
    """One collective, from the first rank that comes to the last that leaves."""

    parts: dict[int, Part] = field(default_factory=dict)
    difference: Difference | None = None
    read: int = 0  # ranks that need the others' inputs no more
    left: int = 0


@dataclass(frozen=True)
class Timeout:
    """Who gave up waiting for whom."""

    reporter: int
    late: Sequence[int]
    seconds: float
    behind: Sequence[str]


@dataclass(eq=False)
class Receipt:
    """A message that a rank waits for, or has got."""

    call: Call
    source: int  # -1: any, until there is one
    here: bool = False
    difference: Difference | None = None

    def fits(self, message: Message) -> bool:
        return self.call.tag == message.tag and self.source in (-1, message.source)


@dataclass(frozen=True, eq=False)
class Message:
    """What a rank has sent."""

    source: int
    tag: int
    payload: Tensor
    sequence: int


@dataclass(eq=False)
class Mailbox:
    """Messages that a rank has not asked for, and receipts of those it has asked for in vain."""

    messages: list[Message] = field(default_factory=list)
    receipts: list[Receipt] = field(default_factory=list)


class World:
    """What the ranks of one group share. Its lock guards all of it; waiting is on ``changed``."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self._joined: set[int] = set()
        self._left: set[int] = set()
        self._aborted: list[int] = []  # the first one ended the group
        self._timeout: Timeout | None = None
        self._meetings: dict[int, Meeting] = {}
        self._mailboxes = [Mailbox() for _ in range(size)]
        self._owed: dict[tuple[int, int], MismatchError] = {}  # by sender and receiver
        self._positions: dict[int, str] = {}  # what each rank called last

    @classmethod
    def join(cls, store: Store, rank: int, size: int, timeout: timedelta) -> World:
        """Find the other ranks of this process; blocks until all have come."""
        clock = Clock(timeout)
        process = f"{_PROCESS}/{os.getpid()}"
        store.set(f"card/{rank}", f"{process}/{secrets.token_hex(8)}")
        cards = [c.decode() for c in fetch(store, [f"card/{r}" for r in range(size)], rank, clock)]
        strangers = [r for r in range(size) if cards[r].rpartition("/")[0] != process]
        if strangers:
            names = ", ".join(map(str, strangers))
            reason = f"the ranks are not threads of one process (not of this one: {names})"
            raise EngineUnavailableError("threads", reason, rank)
        with _worlds_lock:
            world = _worlds.get(cards[0])
            if world is None:
                world = _worlds[cards[0]] = cls(size)
        world._enter(rank, clock)
        return world

    def _enter(self, rank: int, clock: Clock) -> None:
        with self.changed:
            self._joined.add(rank)
            self.changed.notify_all()
            if not self.changed.wait_for(lambda: len(self._joined) == self.size, clock.left()):
                late = ", ".join(str(r) for r in range(self.size) if r not in self._joined)
                remedy = "It may have failed: look at its output."
                raise RendezvousError(f"rank {late} came but did not stay", remedy, rank)

    # The end. An end is for all: ranks that wait wake up and find it.

    def abort(self, rank: int) -> None:
        with self.changed:
            if rank not in self._left and rank not in self._aborted:
                self._aborted.append(rank)
                self._forget()

    def leave(self, rank: int) -> None:
        with self.changed:
            self._left.add(rank)
            self.changed.notify_all()

    def _forget(self) -> None:
        """Let go of tensors of a group that is over, and wake whoever waits for them."""
        self._meetings.clear()
        for mailbox in self._mailboxes:
            mailbox.messages.clear()
            mailbox.receipts.clear()
        self.changed.notify_all()

    def _end(self, rank: int, call: Call, sequence: int) -> GroupError | None:
        """Why nothing more can happen on ``rank``."""
        here = (rank, call.kind, sequence)
        if rank in self._left or rank in self._aborted:
            return GroupClosedError(*here, (rank,), aborted=rank in self._aborted)
        if (ended := self._timeout) is not None:
            return CollectiveTimeoutError(
                *here,
                ended.late,
                seconds=ended.seconds,
                reporter=ended.reporter,
                behind=ended.behind,
            )
        if self._aborted:
            return PeerLeftError(*here, (self._aborted[0],), aborted=True)
        return None

    def _check(self, rank: int, call: Call, sequence: int, needed: Collection[int]) -> None:
        """Raise if the group is over or a rank has left that is needed."""
        if (error := self._end(rank, call, sequence)) is not None:
            raise error
        if gone := sorted(self._left.intersection(needed)):
            raise PeerLeftError(rank, call.kind, sequence, gone)

    # Collectives.

    def meet(self, rank: int, sequence: int, call: Call) -> None:
        """Do a collective for ``rank``; it and the others number theirs alike."""
        part = Part.of(call, rank, self.size)
        with self.changed:
            self._check(rank, call, sequence, ())
            meeting = self._arrive(rank, sequence, part)
            if meeting.difference is not None:
                self._depart(sequence, meeting)
                facts = vars(meeting.difference)
                raise MismatchError(rank, sequence, **facts)
        found = results([meeting.parts[r] for r in range(self.size)], rank)
        _settle(found)
        with self.changed:
            meeting.read += 1
            if meeting.read == self.size:
                self.changed.notify_all()
            self.changed.wait_for(lambda: meeting.read == self.size or self._is_over())
            if meeting.read < self.size:
                self._check(rank, call, sequence, ())
            self._depart(sequence, meeting)
        for wanted, value in zip(part.take, found, strict=True):
            wanted.copy_(value)
        _settle(part.take)

    def _arrive(self, rank: int, sequence: int, part: Part) -> Meeting:
        """Bring ``part`` and wait for the others' (the lock is held)."""
        meeting = self._meetings.setdefault(sequence, Meeting())
        meeting.parts[rank] = part
        self._positions[rank] = f"operation {sequence} ({part.name})"
        if len(meeting.parts) == self.size:
            meeting.difference = find_difference([meeting.parts[r] for r in range(self.size)])
            self.changed.notify_all()
        call = part.call
        self.changed.wait_for(
            lambda: len(meeting.parts) == self.size or self._is_over() or self._deserted(meeting),
            call.timeout,
        )
        if late := [r for r in range(self.size) if r not in meeting.parts]:
            self._check(rank, call, sequence, late)
            self._timeout = Timeout(rank, late, call.timeout, [self._position(r) for r in late])
            self._forget()
            self._check(rank, call, sequence, ())
        return meeting

    def _deserted(self, meeting: Meeting) -> bool:
        return any(r not in meeting.parts for r in self._left)

    def _is_over(self) -> bool:
        return bool(self._aborted) or self._timeout is not None

    def _depart(self, sequence: int, meeting: Meeting) -> None:
        meeting.left += 1
        if meeting.left == self.size:
            self._meetings.pop(sequence, None)

    def _position(self, rank: int) -> str:
        last = self._positions.get(rank)
        return f"rank {rank} in {last}" if last else f"rank {rank} has not called anything yet"

    # Messages.

    def send(self, rank: int, call: Call) -> None:
        """Leave a copy of the tensor with the receiver."""
        message = Message(rank, call.tag, call.inputs[0].detach().clone(), call.sequence)
        _settle([message.payload])
        with self.changed:
            self._check(rank, call, call.sequence, (call.root,))
            self._raise_owed(rank, call.root)
            mailbox = self._mailboxes[call.root]
            for receipt in mailbox.receipts:
                if receipt.fits(message):
                    mailbox.receipts.remove(receipt)
                    self._hand_over(message, receipt, call.root)
                    break
            else:
                mailbox.messages.append(message)

    def ask(self, rank: int, call: Call) -> Receipt:
        """Take a message that is there, or be the next to get one that fits."""
        receipt = Receipt(call, call.root)
        with self.changed:
            self._check(rank, call, call.sequence, ())
            self._raise_owed(rank, call.root)
            mailbox = self._mailboxes[rank]
            for message in mailbox.messages:
                if receipt.fits(message):
                    mailbox.messages.remove(message)
                    self._hand_over(message, receipt, rank)
                    break
            else:
                mailbox.receipts.append(receipt)
        return receipt

    def receive(self, rank: int, receipt: Receipt, seconds: float) -> bool:
        """Wait for the message; False when it took longer. Raises if it cannot come, or differs."""
        call = receipt.call
        with self.changed:
            in_time = self.changed.wait_for(lambda: self.is_settled(rank, receipt), seconds)
            if receipt.difference is not None:
                raise MismatchError(rank, call.sequence, **vars(receipt.difference))
            if in_time and not receipt.here:
                self._check(rank, call, call.sequence, self._senders(rank, receipt))
        return in_time

    def is_settled(self, rank: int, receipt: Receipt) -> bool:
        """Whether the message is here, or cannot come any more."""
        with self.changed:
            nobody = self._left.issuperset(self._senders(rank, receipt)) or rank in self._left
            return receipt.here or nobody or self._is_over()

    def give_up(self, rank: int, receipt: Receipt, seconds: float) -> GroupError:
        """Ask no more; says who did not send."""
        with self.changed:
            receipts = self._mailboxes[rank].receipts
            if receipt in receipts:
                receipts.remove(receipt)
        senders = self._senders(rank, receipt)
        call = receipt.call
        return CollectiveTimeoutError(rank, call.kind, call.sequence, senders, seconds, rank)

    def _senders(self, rank: int, receipt: Receipt) -> list[int]:
        if receipt.source >= 0:
            return [receipt.source]
        return [r for r in range(self.size) if r != rank]

    def _hand_over(self, message: Message, receipt: Receipt, receiver: int) -> None:
        """Copy a message to where it is wanted, or note on both sides that it does not fit."""
        wanted, payload = receipt.call.outputs[0], message.payload
        receipt.source = message.source
        receipt.here = True
        if (wanted.dtype, wanted.numel()) == (payload.dtype, payload.numel()):
            with torch.no_grad():
                _flat(wanted).copy_(payload.view(-1))
            _settle([wanted])
        else:
            sent, expected = (
                f"{name}({t.nbytes} bytes of {t.dtype})"
                for name, t in (("send", payload), ("recv", wanted))
            )
            receipt.difference = Difference(message.source, sent, receiver, expected)
            self._owed[message.source, receiver] = MismatchError(
                message.source, message.sequence, **vars(receipt.difference)
            )
        self.changed.notify_all()

    def _raise_owed(self, rank: int, peer: int) -> None:
        """Tell a sender what became of its last message."""
        if (error := self._owed.pop((rank, peer), None)) is not None:
            raise error


def _settle(tensors: Sequence[Tensor]) -> None:
    """Wait for the GPU: ranks may be on different streams."""
    for device in {t.device for t in tensors if t.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


# -- the engine -------------------------------------------------------------------------------


class Receiving(Work):
    """A message that was asked for. Its timeout runs from then on, and is noticed by who waits."""

    def __init__(self, engine: ThreadsEngine, receipt: Receipt) -> None:
        super().__init__(receipt.call.outputs)
        self._engine = engine
        self._receipt = receipt
        self._clock = Clock(timedelta(seconds=receipt.call.timeout))

    def _block(self, seconds: float | None) -> bool:
        world, rank, left = self._engine.world, self._engine.rank, self._clock.left()
        if world.receive(rank, self._receipt, left if seconds is None else min(seconds, left)):
            return True
        if seconds is not None and seconds < left:
            return False
        raise world.give_up(rank, self._receipt, self._clock.seconds)

    def _poll(self) -> bool:
        return self._engine.world.is_settled(self._engine.rank, self._receipt)

    def _watcher(self) -> Watcher:
        return self._engine.lane.watcher

    def source_rank(self) -> int:
        return self._receipt.source


class ThreadsEngine:
    """One rank of a process that holds them all."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.lane = Lane(f"paceline-threads-{rank}")
        self._sequence = 0
        devices = {"cpu", "cuda"} if torch.cuda.is_available() else {"cpu"}
        self.capabilities = Capabilities(
            backend="threads",
            devices=frozenset(devices),
            in_place_memory=False,
            abortable=True,
            names_dead_ranks=False,
            checks_agreement=True,
            averages=True,
        )

    @classmethod
    def open(cls, store: Store, rank: int, size: int, timeout: timedelta) -> ThreadsEngine:
        """Meet the other ranks; every rank calls it, each on a thread of its own."""
        return cls(World.join(store, rank, size, timeout), rank)

    def run(self, call: Call) -> None:
        if call.kind in ("send", "recv"):
            work = self._transfer(call)
            work.wait()
            call.root = work.source_rank() if call.kind == "recv" else call.root
        else:
            _settle([*call.inputs, *call.outputs])
            self.lane.run(lambda: self._collective(call))

    def start(self, call: Call) -> TorchWork:
        if call.kind in ("send", "recv"):
            return self._transfer(call)
        _settle([*call.inputs, *call.outputs])
        return self.lane.start(lambda: self._collective(call), call.outputs or call.inputs)

    def _collective(self, call: Call) -> None:
        self._sequence += 1
        try:
            with torch.no_grad():
                self.world.meet(self.rank, self._sequence, call)
        except (GroupError, MismatchError):
            raise
        except BaseException:  # an interrupt, no memory: the other ranks must not wait for this one
            self.world.abort(self.rank)
            raise

    def _transfer(self, call: Call) -> Work:
        _settle([*call.inputs, *call.outputs])
        if call.kind == "send":
            self.world.send(self.rank, call)
            return Finished(call.inputs)
        return Receiving(self, self.world.ask(self.rank, call))

    def reduces(self, dtype: torch.dtype, reduction: str) -> bool:
        return reduces(dtype, reduction)

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype)

    def progress(self) -> None:
        """Started calls have a thread of their own."""

    def abort(self) -> None:
        self.world.abort(self.rank)

    def shutdown(self) -> None:
        """Finish started collectives and leave; messages still waited for will not come."""
        self.lane.run(lambda: None)
        self.world.leave(self.rank)
        self.lane.close()
