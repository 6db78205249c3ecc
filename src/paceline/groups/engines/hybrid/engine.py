"""The hybrid engine: shared memory inside each host, gloo between hosts.

**Who talks to whom.** Hosts are proven, not guessed (``_transport/rendezvous.py``), and may have
unequal numbers of ranks in any order. The first rank of each host is its leader. Ranks with the
same place on their hosts form a *stripe*; the leaders are stripe 0, and when all hosts have equally
many ranks there is a stripe for every place. Transfers between two ranks, and the collectives where
each pair of ranks has something of its own to say (gather, scatter, all-to-all), use a gloo group
of all ranks. All ranks of a host share one link, so what is reduced or repeated crosses it once.

**Agreement.** gloo reads a wrong size as the right one, or ends the process. So before any data,
each call's description goes to every rank (one small all-gather: up through shared memory, across,
and down again), all ranks come to the same verdict, and after a mismatch the group stays usable.

**Reductions.** Between hosts, each member of a stripe gets its part of every host's sum and adds
them in the order of hosts, with torch's arithmetic; half-width floats are added in float32. Every
element is computed once and copied, or computed everywhere in the same order, so all ranks have the
same bits. An average is the sum over all ranks, divided once.

**Faults.** Whoever notices one writes it into the store, then ends its host's shared memory and
shuts down the sockets that gloo opened, since gloo cannot be aborted. That frees whoever waits, who
reads in the store what happened, and does the same. After a fault the group is over.
"""

from __future__ import annotations

import dataclasses
import queue
import re
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store
from torch.distributed import Work as TorchWork

from ...._transport import Clock, on_all, prove_hosts, shortage
from ....errors import (
    CollectiveArgumentError,
    CollectiveTimeoutError,
    EngineUnavailableError,
    GroupClosedError,
    GroupError,
    MismatchError,
    PeerDiedError,
    PeerLeftError,
    RankUnableError,
    UnsupportedError,
)
from ...engine import Call, Capabilities
from .. import integer_mean
from ..lane import Lane, LaneWork
from ..shm import ShmEngine
from .calls import HEAD, INLINE, as_bytes, describe, is_inline, tell
from .collectives import HybridCollectives
from .faults import News
from .hosts import Gloo, Hosts
from .messages import Messages
from .steps import Steps, Time

_T = TypeVar("_T")

_LEAST, _MOST = 0.5, 2.0  # seconds that others have to tell who is missing, after a timeout
_UNSIGNED = frozenset({torch.uint16, torch.uint32, torch.uint64})  # torch can hardly add them


class HybridEngine:
    """Ranks on several hosts, some of which share one. CPU tensors only."""

    def __init__(
        self,
        hosts: Hosts,
        local: ShmEngine,
        gloo: Gloo | None,
        news: News,
        striped: bool | None,
    ) -> None:
        self._hosts, self._rank, self._size = hosts, hosts.rank, len(hosts.places)
        self._local, self._groups, self._news = local, gloo, news
        self._striped = striped
        self._lane = Lane("paceline-hybrid")
        self._steps = Steps(hosts, local, gloo)
        self._collectives = HybridCollectives(self._steps, striped)
        self._messages = Messages(self._steps, self._lane.watcher)
        self._over = threading.Event()
        self.capabilities = Capabilities(
            backend="hybrid",
            devices=frozenset({"cpu"}),
            in_place_memory=True,
            abortable=True,
            names_dead_ranks=False,
            checks_agreement=True,
            averages=True,
        )

    @classmethod
    def open(
        cls,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        device: torch.device,
        *,
        between: str = "gloo",
        striped: bool | None = None,
    ) -> HybridEngine:
        """Find the hosts and open the groups within and between them; every rank calls it.

        ``striped``: whether all ranks of a host send their part of an all-reduce (True), or its
        leader sends for all of them (False); without it, the size decides. ``between="nccl"``,
        with GPUs, is not there yet: there was no pair of GPU hosts to try it on.
        """
        _refuse_devices(between, device, rank)
        clock = Clock(timeout)
        met = prove_hosts(PrefixStore("hosts", store), rank, size, timeout, shortage(1))
        if met.unable:
            culprit, why = next(iter(met.unable.items()))
            raise RankUnableError("hybrid", why, rank, culprit=culprit)
        hosts = Hosts(met.components, rank)
        corner = PrefixStore(f"host/{hosts.host}", store)
        left = timedelta(seconds=clock.left())

        def share() -> ShmEngine:
            try:
                return ShmEngine.open(corner, hosts.place, len(hosts.here), left)
            except RankUnableError as error:
                culprit = hosts.here[error.culprit]
                raise RankUnableError("hybrid", error.reason, rank, culprit=culprit) from error

        local = on_all(PrefixStore("local", store), rank, size, clock, share, "hybrid")
        gloo = Gloo.open(store, hosts, clock) if len(met.components) > 1 else None
        return cls(hosts, local, gloo, News(PrefixStore("faults", store), rank), striped)

    # -- calls --------------------------------------------------------------------------------

    def run(self, call: Call) -> None:
        if self._groups is None:
            self._local.run(call)
        elif call.kind == "send":
            self._guard(
                call, lambda: self._messages.send(call).wait(timedelta(seconds=call.timeout))
            )
        elif call.kind == "recv":
            self._guard(call, lambda: self._messages.receive(call, self._messages.expect(call)))
        else:
            self._lane.run(lambda: self._guard(call, lambda: self._collective(call)))

    def start(self, call: Call) -> TorchWork:
        if self._groups is None:
            return self._local.start(call)
        if call.kind == "send":
            sent = self._guard(call, lambda: self._messages.send(call))
            limit = timedelta(seconds=call.timeout)
            return self._lane.aside(
                lambda: self._guard(call, lambda: sent.wait(limit)), call.inputs
            )
        if call.kind == "recv":
            expected = self._guard(call, lambda: self._messages.expect(call))

            made: queue.SimpleQueue[LaneWork] = queue.SimpleQueue()

            def receive() -> None:
                self._guard(call, lambda: self._messages.receive(call, expected))
                made.get().source = call.root

            work = self._lane.aside(receive, call.outputs)
            made.put(work)
            return work
        return self._lane.start(
            lambda: self._guard(call, lambda: self._collective(call)), call.outputs or call.inputs
        )

    def _collective(self, asked: Call) -> None:
        if not integer_mean.applies(asked):
            self._agree_and_run(asked, asked)
            return
        instead, finish = integer_mean.as_sum(asked, self._rank, self._size)
        self._agree_and_run(asked, instead)
        finish()

    def _agree_and_run(self, asked: Call, call: Call) -> None:
        """Do ``call``, which stands for what was ``asked``, if all ranks asked for the same."""
        time = Time(call.timeout)
        inline = is_inline(call)
        row = torch.zeros(HEAD + INLINE // 8, dtype=torch.int64)
        row[:HEAD] = torch.tensor(describe(asked, self._size))
        if inline:
            given = as_bytes(call.inputs[0])
            row[HEAD:].view(torch.uint8)[: given.numel()] = given
        rows = self._steps.exchange(row, time)
        self._agree(asked, rows[:, :HEAD])
        if inline:
            self._collectives.finish_inline(call, rows[:, HEAD:].contiguous())
        else:
            self._collectives.run(call, time)

    def _agree(self, call: Call, rows: Tensor) -> None:
        differing = (rows != rows[0]).any(dim=1)
        if differing.any():
            other = int(differing.int().argmax())
            first, second = tell(rows[0].tolist()), tell(rows[other].tolist())
            raise MismatchError(self._rank, call.sequence, 0, first, other, second)

    # -- faults -------------------------------------------------------------------------------

    def _guard(self, call: Call, step: Callable[[], _T]) -> _T:
        """Do ``step``; a fault in it ends the group on all ranks."""
        if self._over.is_set():
            raise GroupClosedError(
                self._rank, call.kind, call.sequence, (self._rank,), aborted=True
            )
        try:
            with torch.no_grad():  # in whichever thread
                return step()
        except (MismatchError, CollectiveArgumentError):
            raise  # on every rank alike, and nothing was moved
        except GroupError as error:
            self._news.here(call)
            fault = self._translate(call, error)
            self._end(fault)
            raise fault from None
        except RuntimeError as error:
            self._news.here(call)
            fault = self._blame(call, error)
            self._end(fault)
            raise fault from error
        except BaseException:
            self.abort()
            raise

    def _translate(self, call: Call, error: GroupError) -> GroupError:
        """What shared memory reports, with ranks of the whole group."""
        here = self._hosts.here
        if (isinstance(error, PeerLeftError) and error.aborted) or self._over.is_set():
            return self._news.of_others(call) or self._closed(call)
        facts: dict[str, Any] = {
            "rank": self._rank,
            "operation": call.kind,
            "sequence": call.sequence,
            "ranks": [here[r] for r in error.ranks],
        }
        reporter = getattr(error, "reporter", -1)
        if reporter >= 0:
            facts["reporter"] = here[reporter]
        if isinstance(error, CollectiveTimeoutError) and self._steps.detour:
            return self._find_missing(call, facts["ranks"])
        if isinstance(error, CollectiveTimeoutError):
            facts["seconds"] = call.timeout
            facts["behind"] = [_renumber(text, here) for text in error.behind]
        return dataclasses.replace(error, **facts)

    def _blame(self, call: Call, error: RuntimeError) -> GroupError:
        """What gloo says, as an error with the ranks it may be about."""
        if self._over.is_set():
            return self._news.of_others(call) or self._closed(call)
        text = str(error)
        if "imed out" in text or "imeout" in text:
            return self._find_missing(call, self._hosts.elsewhere)
        if (known := self._news.of_others(call)) is not None:
            return known
        at = (self._rank, call.kind, call.sequence)
        ranks = self._steps.gloo.links.ranks_in(text) or self._hosts.elsewhere
        if re.search("closed|reset|refused|broken pipe|unreachable", text, re.IGNORECASE):
            return PeerDiedError(*at, ranks, reporter=self._rank)
        return PeerLeftError(*at, ranks, aborted=True)

    def _find_missing(self, call: Call, waited_for: Sequence[int]) -> GroupError:
        """The timeout was spent on ranks that may wait themselves: ask around who is missing.

        Whoever waits for the missing rank directly knows it, and may have begun to wait later than
        this rank. If nobody tells, all are freed, and those that had come to the call say so.
        """
        patience = min(max(call.timeout, _LEAST), _MOST)
        if (known := self._news.of_others(call, patience)) is not None:
            return known
        self._over.set()
        self._news.ask()
        self._free()
        missing = [] if call.kind in ("send", "recv") else self._news.missing(self._size)
        at = (self._rank, call.kind, call.sequence)
        fault = CollectiveTimeoutError(*at, missing or waited_for, seconds=call.timeout)
        self._news.tell(fault)
        return self._news.of_others(call) or fault  # unless another rank told first

    def _closed(self, call: Call) -> GroupError:
        return GroupClosedError(self._rank, call.kind, call.sequence, (self._rank,), aborted=True)

    def _end(self, fault: GroupError) -> None:
        """Tell the others, and free those that wait."""
        if self._over.is_set():
            return
        self._over.set()
        self._news.tell(fault)
        self._free()

    def _free(self) -> None:
        """Free all waiting ranks, on this host and on the others."""
        self._local.abort()
        if self._groups is not None:
            self._groups.links.cut()

    # -- the rest -----------------------------------------------------------------------------

    def reduces(self, dtype: torch.dtype, reduction: str) -> bool:
        return dtype not in _UNSIGNED and self._local.reduces(dtype, reduction)

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._local.allocate(numel, dtype)

    def progress(self) -> None:
        """Nothing to do: the lane's thread does it."""

    def abort(self) -> None:
        self._end(PeerLeftError(self._rank, "abort", 0, [self._rank], aborted=True))

    def shutdown(self) -> None:
        self._lane.run(lambda: None)
        self._lane.close()
        self._over.set()
        self._local.shutdown()
        if self._groups is not None:
            self._groups.close()


def _refuse_devices(between: str, device: torch.device, rank: int) -> None:
    if between not in ("gloo", "nccl"):
        raise EngineUnavailableError("hybrid", f"between is {between!r}, not gloo or nccl", rank)
    if device.type == "cuda":  # by decision: see "Several hosts" in docs/howto/gpu.md
        remedy = "Use backend='nccl', which knows the hosts by itself."
        raise UnsupportedError("hybrid", "GPUs", remedy, rank)
    if between == "nccl":
        raise EngineUnavailableError(
            "hybrid", f"nccl moves GPU tensors, not those on {device}", rank
        )
    if device.type != "cpu":
        reason = f"it moves CPU tensors, and the device is {device}"
        raise EngineUnavailableError("hybrid", reason, rank)


def _renumber(text: str, ranks: Sequence[int]) -> str:
    """A sentence about a rank of this host, with its rank in the whole group."""
    return re.sub(r"\brank (\d+)", lambda found: f"rank {ranks[int(found[1])]}", text)
