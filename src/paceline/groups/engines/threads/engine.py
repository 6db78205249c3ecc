"""The threads engine: ranks that are threads of one process, for tests and debuggers.

Ranks share a :class:`World` (``world.py``), where collectives and messages meet.
"""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import Store
from torch.distributed import Work as TorchWork

from ...._transport import Clock
from ....errors import GroupError, MismatchError
from ...engine import Call, Capabilities
from ...work import Finished, Watcher, Work
from ..lane import Lane
from .calls import reduces, settle
from .world import Receipt, World


class Receiving(Work):
    """A message that was asked for. Its timeout runs from then on, and is noticed by who waits."""

    is_message = True

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
        if (error := world.give_up(rank, self._receipt, self._clock.seconds)) is not None:
            raise error
        return world.receive(rank, self._receipt, 0.0)  # it came in this moment

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
            abortable=True,
            checks_agreement=True,
            averages=True,
            one_process=True,
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
            settle([*call.inputs, *call.outputs])
            self.lane.run(lambda: self._collective(call))

    def start(self, call: Call) -> TorchWork:
        if call.kind in ("send", "recv"):
            return self._transfer(call)
        settle([*call.inputs, *call.outputs])
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
        settle([*call.inputs, *call.outputs])
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
