"""Where ranks that are threads of one process meet, and leave messages for each other.

A collective is a :class:`SharedCall`: each rank brings its part, waits until all are there,
computes its results from the others' inputs into memory of its own, waits until all have read, and
only then writes; so a call may be in place. Agreement is judged once for all ranks, by the last
that comes.

A message is copied when it is sent and waits in the receiver's :class:`ThreadMailbox`; sends never
block.
"""

from __future__ import annotations

import os
import secrets
import threading
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import Store

from ...._transport import Clock, fetch
from ....errors import (
    CollectiveTimeoutError,
    EngineUnavailableError,
    GroupClosedError,
    GroupError,
    MismatchError,
    PeerLeftError,
    RendezvousError,
)
from ...engine import Call
from .calls import Difference, RankShare, find_difference, flat, results, settle

# Where ranks of one process find each other: by a key they have from their store. Forked children
# have the name of their parent, hence the process id beside it.
_worlds: weakref.WeakValueDictionary[str, World] = weakref.WeakValueDictionary()
_worlds_lock = threading.Lock()
_PROCESS = secrets.token_hex(8)


@dataclass(eq=False)
class SharedCall:
    """One collective, from the first rank that comes to the last that leaves."""

    parts: dict[int, RankShare] = field(default_factory=dict)
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
class ThreadMailbox:
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
        self._meetings: dict[int, SharedCall] = {}
        self._mailboxes = [ThreadMailbox() for _ in range(size)]
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
                raise RendezvousError(f"rank {late} arrived but did not stay", remedy, rank)

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
        """Why no further call can be made on ``rank``."""
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
        part = RankShare.of(call, rank, self.size)
        with self.changed:
            self._check(rank, call, sequence, ())
            meeting = self._arrive(rank, sequence, part)
            if meeting.difference is not None:
                self._depart(sequence, meeting)
                facts = vars(meeting.difference)
                raise MismatchError(rank, sequence, **facts)
        found = results([meeting.parts[r] for r in range(self.size)], rank)
        settle(found)
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
        settle(part.take)

    def _arrive(self, rank: int, sequence: int, part: RankShare) -> SharedCall:
        """Bring ``part`` and wait for the others' (the lock is held)."""
        meeting = self._meetings.setdefault(sequence, SharedCall())
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

    def _deserted(self, meeting: SharedCall) -> bool:
        return any(r not in meeting.parts for r in self._left)

    def _is_over(self) -> bool:
        return bool(self._aborted) or self._timeout is not None

    def _depart(self, sequence: int, meeting: SharedCall) -> None:
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
        settle([message.payload])
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

    def give_up(self, rank: int, receipt: Receipt, seconds: float) -> GroupError | None:
        """Ask no more; says who did not send, or None if it is here after all."""
        with self.changed:
            if receipt.here:
                return None
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
                flat(wanted).copy_(payload.view(-1))
            settle([wanted])
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
        """Raise if the last message of a sender did not fit."""
        if (error := self._owed.pop((rank, peer), None)) is not None:
            raise error
