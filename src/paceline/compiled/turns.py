"""Turns: who compiles first, so that the others find the work done, and nobody runs out of time.

Compiled code is kept on disk, for all processes of a host. When all ranks compile at once, all do
the same work, and whoever is done first waits in a collective whose timeout was never meant for
that. So one rank of each host compiles while the others wait, and then they find what it left.

In a compiled step every rank takes part, so barriers say whose turn it is (:class:`Turns`). Of
``torch.compile(ddp)`` nobody knows which ranks do so, and when; there a locked file says that
somebody on this host compiles (:class:`WrapperTurns`), and a process that dies leaves none locked.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from .._torch import dynamo
from ..ddp import DistributedDataParallel
from ..groups import Group
from ..recorder import events
from .settings import Settings

_LOOK = 0.02  # seconds between two looks at a lock
_NO_FILE = -1
_COMPILES = "compiles, or waits for its turn to"


class Turns:
    """The first step; every rank goes through it once, whether it compiles or not."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        timeout: timedelta,
        agree: Callable[[], None] = lambda: None,
    ) -> None:
        """``agree`` is called on all ranks together, before the first of them compiles."""
        self._ddp, self._agree = ddp, agree
        self._group = ddp.replica.group
        self._timeout = timeout
        self._leads = os.environ.get("LOCAL_RANK", str(self._group.rank())) == "0"
        self._reducer = ddp.replica.reducer
        self._passes = self._reducer.passes
        self._open = False

    def before(self) -> None:
        """Wait until it is this rank's turn.

        No turns are taken behind other passes, or in a Join: there a rank that has run out could
        not take part, and all ranks have to decide alike.
        """
        reducer = self._ddp.replica.reducer
        first = reducer is self._reducer and reducer.passes == self._passes
        self._open = False
        if first and self._group.size() > 1 and not self._ddp.replica.in_join():
            self._agree()
            self._open = True
        if self._open and not self._leads:
            self._group.barrier(self._timeout)
        if self._open:
            say_doing(self._group.board, "compiles its first step")

    def after(self) -> None:
        """This rank has compiled: wait for all others, unless it has done so already."""
        if not self._open:
            return
        self._open = False
        say_doing(self._group.board, "")
        if self._leads:
            self._group.barrier(self._timeout)
        self._group.barrier(self._timeout)


def say_doing(board: events.Board | None, doing: str) -> None:
    """Let ranks that wait for this one know why."""
    if board is not None:
        board.doing = doing


# -- torch.compile(ddp) -----------------------------------------------------------------------


class HostTurn:
    """A turn among the processes of a host that know the same ``path``.

    The first one that asks for it has it alone. Those that ask meanwhile wait for the end of it,
    ``timeout`` at most, and then go on together.
    """

    def __init__(self, path: Path, timeout: timedelta) -> None:
        self._path, self._timeout = path, timeout
        self._file = _NO_FILE

    def take(self) -> None:
        """Wait for this process's turn; nothing happens while it has one."""
        if self._file != _NO_FILE:
            return
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError:  # nothing can be kept there either, so there is nothing to wait for
            return
        until = time.monotonic() + self._timeout.total_seconds()
        free = self._lock(fcntl.LOCK_EX)
        while not free and time.monotonic() < until:
            time.sleep(_LOOK)
            free = self._lock(fcntl.LOCK_SH)

    def give_back(self) -> None:
        """Let the others go on."""
        if self._file != _NO_FILE:
            self._lock(fcntl.LOCK_UN)  # processes that were forked meanwhile have it open too
            os.close(self._file)
            self._file = _NO_FILE

    def _lock(self, kind: int) -> bool:
        try:
            fcntl.flock(self._file, kind | fcntl.LOCK_NB)
        except OSError:
            return False
        return True


class WrapperTurns:
    """This process's turns at compiling wrappers, forward and backward."""

    def __init__(self) -> None:
        self._compilations: dict[str, events.Board | None] = {}  # of wrappers, by torch's names
        self._turn: HostTurn | None = None
        self._timeout = Settings().compile_timeout

    def take(self, ddp: DistributedDataParallel) -> None:
        """Called while Dynamo traces a wrapper that will be averaged."""
        group = ddp.replica.group
        if group.capabilities.one_process or not dynamo.uses_inductor():
            return  # there is one process, or nothing is kept
        compilation = dynamo.this_compilation()
        self._compilations[compilation] = group.board
        say_doing(group.board, _COMPILES)
        dynamo.hear_of_compilations(self._begins, self._ends)
        self._take()
        _be_patient(ddp, group, self._timeout)

    def _begins(self, compilation: str) -> None:
        if compilation in self._compilations:  # the backward pass of one
            say_doing(self._compilations[compilation], _COMPILES)
            self._take()

    def _ends(self, compilation: str) -> None:
        if compilation in self._compilations:
            say_doing(self._compilations[compilation], "")
        if self._turn is not None:
            self._turn.give_back()

    def _take(self) -> None:
        if self._turn is None:
            self._turn = HostTurn(job_place(), self._timeout)
        self._turn.take()


def _be_patient(ddp: DistributedDataParallel, group: Group, timeout: timedelta) -> None:
    """Wait longer for other ranks until the first pass is over, since they may still compile."""
    usual, reducer = group.timeout, ddp.replica.reducer
    if usual >= timeout or reducer.passes:
        return

    def be_as_usual(_done: object) -> None:
        handle.remove()
        if group.timeout == timeout:
            group.set_timeout(usual)

    group.set_timeout(timeout)
    handle = reducer.observers.on_end(be_as_usual)


def job_place() -> Path:
    """The file that the ranks of this job have in common; it stays, and is empty."""
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    job = [os.environ.get(name, "") for name in names]
    digest = hashlib.sha256("/".join(job).encode()).hexdigest()[:2]
    usual = Path(tempfile.gettempdir(), f"paceline_{os.getuid()}")
    return Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", usual), f"compiling-{digest}.lock")
