"""Ranks for tests, as threads or as processes, with a deadline; and collectives that fail on cue.

:func:`run_ranks` is quick and a debugger works in it; :func:`spawn_ranks` has real processes and
leaves nothing of them behind.

Each rank of :func:`spawn_ranks` is forked from a server process that has already imported torch, so
that a test costs a fraction of a second, not an import. The server starts with the first call and
ends with the process that called.
"""

from __future__ import annotations

import faulthandler
import gc
import itertools
import multiprocessing
import os
import pickle
import queue
import random
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import FrameType
from typing import Any, Generic, Literal, TypeVar, get_args, get_type_hints

import torch
from torch.distributed import FileStore, HashStore, Store
from typing_extensions import Self

from paceline.errors import PeerDiedError, PeerLeftError, RanksFailedError
from paceline.groups import Call, Engine, Group, new_group
from paceline.recorder import finish_explaining, frames

__all__ = ["Cue", "Meeting", "fail_on_cue", "hold_on_cue", "run_ranks", "spawn_ranks"]

R = TypeVar("R")


@dataclass(frozen=True)
class Meeting:
    """What a rank needs to find the others: its rank, their number, and the store."""

    rank: int
    size: int
    store_path: str

    def store(self, timeout: timedelta | None = None) -> FileStore:
        """Open the store that all ranks share; each call opens a new connection to it."""
        # Without the size: with it, the file goes once that many handles are closed, be they all
        # of one rank. spawn_ranks removes it.
        store = FileStore(self.store_path)
        if timeout is not None:
            store.set_timeout(timeout)
        return store

    def new_group(self, backend: str, **options: Any) -> Group:
        """Open a group of all ranks; ``options`` are passed to :func:`paceline.groups.new_group`.

        Every rank must call it. Shut the group down when you are done.
        """
        return new_group(
            backend, store=self.store(), rank=self.rank, world_size=self.size, **options
        )


# What both kinds of ranks have in common.

_GRACE = 5.0  # seconds the others have to end, once a rank's failure is heard of
_LONGEST = 86_400.0  # seconds; a longer deadline is a mistake, and select would overflow


def _in_words(error: BaseException) -> str:
    finish_explaining()
    return "".join(traceback.format_exception(error))


def _check_numbers(caller: str, n: int, deadline: float) -> None:
    if n < 1:
        raise ValueError(f"{caller}: n is {n}; it takes at least one rank.")
    if not 0 < deadline <= _LONGEST:
        raise ValueError(f"{caller}: deadline is {deadline}; give seconds, above 0, up to a day.")


# Ranks as threads.


def run_ranks(n: int, fn: Callable[[Group], R], *, deadline: float = 60.0) -> list[R]:
    """Call ``fn(group)`` on ``n`` threads and return the results by rank.

    Each thread gets its rank's object of one group with the ``threads`` backend. ``fn`` may be any
    function, also a lambda or a closure. When it returns, its group is shut down, together with
    groups split from it; a rank that still waits for this one fails at once.

    If a rank raises, its groups are aborted, so that the others do not wait for it; they have five
    seconds to end. After ``deadline`` seconds all groups are aborted. Both raise
    :class:`~paceline.errors.RanksFailedError` with the tracebacks, the first failure first, with
    its exception as the cause, and with the stacks of ranks that hang. A thread cannot be killed:
    one that hangs outside its group stays until it ends. ::

        def test_the_sum_reaches_every_rank():
            def total(group):
                ranks = torch.tensor(group.rank())
                group.all_reduce(ranks)
                return ranks.item()

            assert run_ranks(3, total) == [3, 3, 3]
    """
    _check_numbers("run_ranks", n, deadline)
    ended: queue.SimpleQueue[_Thread[R]] = queue.SimpleQueue()
    store = HashStore()
    threads = [_Thread(rank, n, fn, store, ended) for rank in range(n)]
    for thread in threads:
        thread.start()
    try:
        _await_threads(threads, ended, deadline)
    finally:  # an interrupt, too, must not leave them waiting for each other
        for thread in threads:
            thread.abort()
    failed = sorted((t for t in threads if t.failure), key=lambda t: (t.is_echo(), t.when))
    if failed:
        raise RanksFailedError([(t.rank, t.failure) for t in failed], n) from failed[0].error
    return [thread.result for thread in threads]


class _Thread(threading.Thread, Generic[R]):
    """A rank: its group, and how it ended."""

    result: R

    def __init__(
        self,
        rank: int,
        size: int,
        fn: Callable[[Group], R],
        store: Store,
        ended: queue.SimpleQueue[_Thread[R]],
    ) -> None:
        super().__init__(name=f"rank {rank}", daemon=True)
        self.rank, self.size, self.store, self.ended = rank, size, store, ended
        self.when, self.failure = 0.0, ""
        self.error: BaseException | None = None
        self._fn = fn
        self._engines: list[Engine] = []  # of the group and of all that were split off it

    def run(self) -> None:
        try:
            group = self._open()
            self.result = self._fn(group)
            group.shutdown()
            for engine in self._engines:
                engine.shutdown()
        except BaseException as error:
            if not self.failure:  # else it was found to hang, and this is what the abort did
                self.error, when = error, time.monotonic()
                self._fail(_in_words(error), when)
            self.abort()
        self.ended.put(self)

    def abort(self) -> None:
        """Free this rank and those that wait for it; does nothing to groups that were shut down."""
        for engine in list(self._engines):
            engine.abort()

    def hang(self, why: str) -> None:
        """Note that it hangs, and where."""
        frame = frames().get(self.ident or 0)
        stack = "".join(traceback.format_stack(frame)) if frame else "(it has just ended)"
        self._fail(f"{why}. Its stack:\n{stack}", time.monotonic())

    def is_echo(self) -> bool:
        """Whether it failed only because another rank had aborted the group."""
        return isinstance(self.error, PeerLeftError) and self.error.aborted

    def _fail(self, why: str, when: float) -> None:
        self.when, self.failure = when, why

    def _open(self) -> Group:
        group = new_group("threads", store=self.store, rank=self.rank, world_size=self.size)
        group.hear_of_engines(self._engines.append)
        return group


def _await_threads(
    threads: Sequence[_Thread[R]], ended: queue.SimpleQueue[_Thread[R]], deadline: float
) -> None:
    """Wait until every rank has ended, and note where those are that do not in time."""
    until = time.monotonic() + deadline
    late = f"hung: it was still running after {deadline:g} s"
    running = set(threads)
    while running:
        try:
            thread = ended.get(timeout=max(until - time.monotonic(), 0.0))
        except queue.Empty:
            for thread in running:
                thread.hang(late)
            return
        running.remove(thread)
        thread.join()
        if thread.failure and (soon := time.monotonic() + _GRACE) < until:
            until = soon
            late = f"hung: it was still running {_GRACE:g} s after rank {thread.rank} failed"


# Failures on cue.


class Cue:
    """A collective of one rank that a test has selected, until :meth:`remove` or the end of a with.

    ``reached`` is set when the rank has reached it. Only that one collective is affected.
    """

    def __init__(
        self,
        group: Group,
        act: Callable[[Call], None],
        operation: str | None,
        after: int,
        when: Literal["before", "after"],
    ) -> None:
        known = get_args(get_type_hints(Call)["kind"])
        if operation is not None and operation not in known:
            raise ValueError(f"no collective is called {operation!r}; there is {', '.join(known)}.")
        if when not in ("before", "after"):
            raise ValueError(f"when is {when!r}; it can be 'before' or 'after'.")
        self.reached = threading.Event()
        self._act, self._operation, self._after = act, operation, after
        self._seen = itertools.count()
        before, later = (self._notice, None) if when == "before" else (None, self._notice)
        self._handle = group.register_hooks(before, later)

    def _notice(self, call: Call) -> None:
        if self._operation in (None, call.kind) and next(self._seen) == self._after:
            self.reached.set()
            self._act(call)

    def remove(self) -> None:
        """Cancel the cue; a rank that has reached the collective already stays in it."""
        self._handle.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


def fail_on_cue(
    group: Group,
    *,
    operation: str | None = None,
    after: int = 0,
    when: Literal["before", "after"] = "before",
    error: BaseException | Callable[[], BaseException] | None = None,
) -> Cue:
    """Make one collective of this rank raise: the one that follows ``after`` others.

    With ``operation`` only collectives of that name count, such as ``"all_reduce"`` or ``"send"``.
    It raises ``error``, or a PeerDiedError that names the next rank. It does so ``before`` anything
    is sent, so that the other ranks wait in vain, or ``after`` the collective has succeeded
    here. ::

        def one_rank(group):
            if group.rank() == 0:
                fail_on_cue(group, operation="all_reduce", after=1)
            group.all_reduce(torch.ones(1))  # succeeds
            group.all_reduce(torch.ones(1))  # raises PeerDiedError on rank 0


        with pytest.raises(RanksFailedError):
            run_ranks(2, one_rank)
    """

    def act(call: Call) -> None:
        if error is None:
            other = (group.rank() + 1) % group.size()
            raise PeerDiedError(group.rank(), call.kind, call.sequence, (other,))
        raise error if isinstance(error, BaseException) else error()

    return Cue(group, act, operation, after, when)


def hold_on_cue(
    group: Group,
    until: threading.Event,
    *,
    operation: str | None = None,
    after: int = 0,
    when: Literal["before", "after"] = "before",
) -> Cue:
    """Make one collective of this rank wait for ``until``; :func:`fail_on_cue` says which one.

    Tests can hold a rank this way without sleeping::

        released = threading.Event()
        cue = hold_on_cue(group, released)
        ...  # in another thread:
        cue.reached.wait()  # the rank is there
        released.set()  # and continues
    """

    def act(call: Call) -> None:
        until.wait()

    return Cue(group, act, operation, after, when)


# Ranks as processes.

_LAST_WORDS = 2.0  # seconds a hung rank has to write its stack, before it is killed
_STACK_SIGNAL = signal.SIGRTMAX - 1  # not one that a test or a library is likely to use

# Imported by the server, once, instead of by every rank; the latter only if this process has them.
_PRELOADED = ("paceline.testing", "paceline.groups", "sympy")  # sympy: for torch.testing
_PRELOADED_IF_HERE = (
    "numpy",
    "pytest",
    "hypothesis",
    "torch.distributed.checkpoint",
    "torch.distributed.optim",
    "torch.distributed.tensor",
    "torch._dynamo",
    "torch._dynamo.testing",
)
_DYNAMO, _WITH_DYNAMO = "torch._dynamo", "torch._inductor.compile_fx"  # for the first compile


def spawn_ranks(
    n: int,
    fn: Callable[..., R],
    *args: object,
    deadline: float = 60.0,
    env: Mapping[str, str] | None = None,
    may_die: Collection[int] = (),
) -> list[R]:
    """Call ``fn(meeting, *args)`` in ``n`` processes and return the results by rank.

    ``fn`` must be importable: a function at the top of a module, not a lambda or a closure. ``fn``,
    ``args`` and the results are pickled, with tensors by value. In each process

    - ``meeting`` is its :class:`Meeting`, with an empty store;
    - the environment is that of this process, with ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``,
      ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` for ``env://``, and with ``env``;
    - output goes where the output of this process goes, and torch uses one thread.

    After all processes have started they have ``deadline`` seconds; then those still running are
    killed. If a rank fails, the others have five seconds to end before they are killed. Both raise
    :class:`~paceline.errors.RanksFailedError` with the tracebacks, the first failure first, with
    its exception as the cause, and with the stacks of ranks that hang. A rank that dies without an
    exception has failed too, except for those in ``may_die``, whose result is None.

    As always with :mod:`multiprocessing`, a script that calls this needs
    ``if __name__ == "__main__":``. ::

        def total(meeting):
            torch.distributed.init_process_group("gloo")
            ranks = torch.tensor(meeting.rank)
            torch.distributed.all_reduce(ranks)
            torch.distributed.destroy_process_group()
            return ranks.item()


        def test_the_sum_reaches_every_rank():
            assert spawn_ranks(3, total) == [3, 3, 3]
    """
    _check_numbers("spawn_ranks", n, deadline)
    call = _pickle_call(fn, args)
    with tempfile.TemporaryDirectory(prefix="paceline-ranks-") as folder:
        longest = deadline + _GRACE + _LAST_WORDS
        plan = _Plan(n, call, longest, folder, os.environ | _meeting_point(n), dict(env or {}))
        with _started(plan) as ranks:
            _watch(ranks, deadline, may_die)
            _raise_failures(ranks)
            return [rank.result() for rank in ranks]


def _pickle_call(fn: Callable[..., object], args: tuple[object, ...]) -> bytes:
    try:
        pickle.dumps(fn)
    except Exception as error:
        raise TypeError(
            f"spawn_ranks: {fn!r} cannot be sent to another process ({error}). "
            "Give a function defined at the top of a module, and what it needs as arguments."
        ) from error
    return pickle.dumps((fn, args))  # by hand: multiprocessing would share a tensor's memory


def _meeting_point(n: int) -> dict[str, str]:
    port = _free_port()
    return {
        "WORLD_SIZE": str(n),
        "LOCAL_WORLD_SIZE": str(n),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _free_port() -> int:
    """A port that nobody has now, and that the system gives to nobody who asks for any."""
    with suppress(OSError, ValueError):
        first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
        for port in random.SystemRandom().sample(range(first_given // 2, first_given), 20):
            with suppress(OSError), socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
                return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class _Plan:
    """What all ranks of one call have in common."""

    size: int
    call: bytes
    longest: float  # seconds that a rank may run
    folder: str  # holds the store, and the stacks of ranks that hang or crash
    environ: dict[str, str]
    env: dict[str, str]  # the caller's, which win over the rank's own

    def stack_path(self, rank: int) -> Path:
        return Path(self.folder, f"stack-{rank}")


@dataclass(frozen=True)
class _RankReport:
    """How a rank ended: with a failure, or with a result. What is bytes is pickled."""

    when: float
    result: bytes = b""
    failure: str = ""
    error: bytes = b""


_SILENT = _RankReport(0.0)  # of a rank that has not reported


# In the rank's process.


def _run(plan: _Plan, rank: int, reports: Connection, output: Sequence[Connection]) -> None:
    gc.freeze()  # what the server has imported stays; a collection would take a third of a second
    for stream, number in zip(output, (1, 2), strict=True):
        os.dup2(stream.fileno(), number)  # the server's own are from when it started
    os.environ.clear()
    os.environ.update(plan.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | plan.env)
    # If the process that spawned this one is itself killed, nobody else ends a hung rank. One that
    # lives but gets no turn on a busy machine is given time: it knows more to say.
    signal.alarm(int(plan.longest) + 60)
    stack = plan.stack_path(rank).open("w")  # stays open: faulthandler keeps it
    faulthandler.enable(stack)
    # Chained to the default handler, which ends the process once its stack is written.
    faulthandler.register(_STACK_SIGNAL, stack, chain=True)
    torch.set_num_threads(1)
    reports.send_bytes(pickle.dumps(_call(plan, rank)))


def _call(plan: _Plan, rank: int) -> _RankReport:
    try:
        fn, args = pickle.loads(plan.call)
        result = fn(Meeting(rank, plan.size, str(Path(plan.folder, "store"))), *args)
        return _RankReport(time.monotonic(), result=pickle.dumps(result))
    except BaseException as error:  # SystemExit too: a rank that returns nothing has failed
        when = time.monotonic()
        return _RankReport(when, failure=_in_words(error), error=_pickle_error(error))


def _pickle_error(error: BaseException) -> bytes:
    try:
        return pickle.dumps(error)
    except Exception:  # the text must do
        return b""


# In the process that spawns them.


@dataclass(eq=False)
class _Rank:
    """A rank's process, seen from outside."""

    number: int
    process: ForkServerProcess
    reports: Connection  # closed when there is nothing more to come
    stack_path: Path
    report: _RankReport = _SILENT
    ended: bool = False

    def signs(self) -> list[Connection | int]:
        """List what to wait for: its report, its end."""
        return [self.process.sentinel, *([] if self.reports.closed else [self.reports])]

    def hear(self, may_die: bool) -> None:
        """Take in its report if it is there, and its end if it came without one."""
        code = self.process.exitcode  # before the report: what is not there now will not come
        if not self.reports.closed and self.reports.poll():
            with suppress(EOFError, OSError):  # it died before, or in mid-sentence
                self.report = pickle.loads(self.reports.recv_bytes())
            self.reports.close()
        self.ended = code is not None
        lost = self.ended and (code != 0 or self.report is _SILENT)
        if lost and not may_die and not self.report.failure:
            self.fail(_last_words(code or 0, returned=self.report is not _SILENT))

    def fail(self, why: str) -> None:
        """Settle that it failed, and add the stack that it has left, if any."""
        stack = self.stack_path.read_text(errors="replace") if self.stack_path.exists() else ""
        text = f"{why}. Its stack:\n{stack}" if stack else f"{why}."
        self.report = _RankReport(time.monotonic(), failure=text)

    def result(self) -> Any:
        return pickle.loads(self.report.result) if self.report.result else None


def _last_words(code: int, returned: bool) -> str:
    if code < 0:
        how = f"was killed by {_signal_name(-code)}"
    else:
        how = f"exited with status {code}"
    return f"{how} after it had returned" if returned else f"{how} and returned nothing"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {number}"


@contextmanager
def _started(plan: _Plan) -> Iterator[list[_Rank]]:
    """Start the ranks; when the block ends, however it does, none of them is left."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_preloaded())
    ranks: list[_Rank] = []
    try:
        with _one_thread():
            for number in range(plan.size):
                with _interrupt_later():  # else a rank that has just started is in no list
                    ranks.append(_start(context, plan, number))
        yield ranks
    finally:
        for rank in ranks:
            rank.process.kill()
        for rank in ranks:
            rank.process.join()
            rank.process.close()
            rank.reports.close()


@contextmanager
def _interrupt_later() -> Iterator[None]:
    """Leave the first SIGINT to its handler only at the end; a second one is not kept waiting.

    Blocking it would not do: another thread gets it then, and the handler runs in this one all the
    same.
    """
    before = signal.getsignal(signal.SIGINT)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield  # no handler, or none that runs here
        return
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if noted:
            before(number, frame)
        noted.append(number)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if noted:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let the server be started with OMP_NUM_THREADS=1.

    ``torch.set_num_threads`` comes too late for libraries that count the cores when they are
    loaded: on ARM two ranks then took four times as long for small matrix products.
    """
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        os.environ.pop("OMP_NUM_THREADS")
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before


def _preloaded() -> list[str]:
    here = [name for name in _PRELOADED_IF_HERE if name in sys.modules]
    if (
        torch.cuda.is_available()
    ):  # torch's compiler looks for GPUs, and forked ranks have none then
        return [*_PRELOADED, *(name for name in here if not name.startswith("torch."))]
    return [*_PRELOADED, *here, *([_WITH_DYNAMO] if _DYNAMO in here else [])]


def _start(context: ForkServerContext, plan: _Plan, number: int) -> _Rank:
    reports, theirs = context.Pipe(duplex=False)
    # As connections, because multiprocessing knows how to send those.
    output = [Connection(os.dup(fd), readable=False) for fd in (1, 2)]
    process = context.Process(
        target=_run, args=(plan, number, theirs, output), name=f"rank {number}"
    )
    try:
        process.start()
    except BaseException:
        reports.close()
        raise
    finally:
        for mine in (theirs, *output):
            mine.close()
    return _Rank(number, process, reports, plan.stack_path(number))


def _watch(ranks: Sequence[_Rank], deadline: float, may_die: Collection[int]) -> None:
    """Wait until every rank has ended, and end those that do not in time."""
    until = time.monotonic() + deadline
    late = f"hung: it was still running after {deadline:g} s"
    while running := [rank for rank in ranks if not rank.ended]:
        ready = wait([sign for rank in running for sign in rank.signs()], until - time.monotonic())
        if not ready:
            return _end(running, late)
        for rank in running:
            rank.hear(rank.number in may_die)
        failed = [rank for rank in running if rank.report.failure]
        if failed and (soon := time.monotonic() + _GRACE) < until:
            until = soon
            first = min(failed, key=lambda rank: rank.report.when)
            late = f"hung: it was still running {_GRACE:g} s after rank {first.number} failed"
    return None


def _end(hung: Sequence[_Rank], why: str) -> None:
    """Ask each for its stack, which ends it, and kill those that do not answer."""
    for rank in hung:
        assert rank.process.pid, "it was started"
        with suppress(ProcessLookupError):  # it ended just now
            os.kill(rank.process.pid, _STACK_SIGNAL)
    until = time.monotonic() + _LAST_WORDS
    while running := [rank for rank in hung if rank.process.exitcode is None]:
        if not wait([rank.process.sentinel for rank in running], until - time.monotonic()):
            break
    for rank in hung:
        rank.process.kill()
        rank.process.join()
        if not rank.report.failure:
            rank.fail(why if rank.report is _SILENT else f"{why}, though its function had returned")


def _raise_failures(ranks: Sequence[_Rank]) -> None:
    failed = sorted((r for r in ranks if r.report.failure), key=lambda rank: rank.report.when)
    if failed:
        failures = [(rank.number, rank.report.failure) for rank in failed]
        raise RanksFailedError(failures, len(ranks)) from _unpickle_error(failed[0].report.error)


def _unpickle_error(data: bytes) -> BaseException | None:
    try:
        error = pickle.loads(data)
    except Exception:  # it was not sent, or its class takes other arguments than it keeps
        return None
    return error if isinstance(error, BaseException) else None
