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
import itertools
import queue
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store
from torch.distributed import Work as TorchWork

from .._transport import DTYPE_CODES, Clock, prove_hosts, unavailable
from ..errors import (
    CollectiveArgumentError,
    CollectiveTimeoutError,
    EngineUnavailableError,
    GroupClosedError,
    GroupError,
    MismatchError,
    PeerDiedError,
    PeerLeftError,
    RendezvousError,
    UnsupportedError,
)
from .engine import Call, Capabilities, Kind
from .hybrid_calls import DTYPES, HEAD, INLINE, as_bytes, describe, is_inline, pairs, tell
from .hybrid_faults import News
from .hybrid_hosts import Gloo, Hosts
from .lane import Lane, LaneWork
from .shm_backend import ShmEngine
from .work import Together, Work

_T = TypeVar("_T")

STRIPED_FROM = 1 << 20  # bytes; below, all ranks of a host taking part costs more than it gains
WINDOW = 2 << 20  # bytes; of larger tensors, a part is summed while another one crosses
GATHERED_UP_TO = 32 << 10  # bytes over all hosts; so little is sent whole, in one round, not two

_UNSIGNED = frozenset({torch.uint16, torch.uint32, torch.uint64})  # torch can hardly add them
_HALVES = frozenset({torch.float16, torch.bfloat16})
_COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
_TAGS = 1 << 30  # a user's tags are even ones of gloo's, payloads have the odd ones


class _Time:
    """What is left of a call's timeout, for each of its steps.

    Steps that wait for a rank that waits itself get a little more, so that the rank that waits for
    the culprit gives up first, and says who it was.
    """

    def __init__(self, seconds: float) -> None:
        self._clock = Clock(timedelta(seconds=seconds))
        self._patience = min(0.5, seconds / 10)

    def left(self, detours: int = 0) -> float:
        return self._clock.left() + detours * self._patience


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
        self._where = torch.tensor(list(hosts.places.values())).unbind(1)
        self._lane = Lane("paceline-hybrid")
        self._slots = itertools.count()
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
        self._carry_out: dict[str, Callable[[Call, _Time], None]] = {
            "all_reduce": self._all_reduce,
            "reduce": self._reduce,
            "broadcast": self._broadcast,
            "all_gather": self._all_gather,
            "all_gather_single": self._all_gather,
            "gather": self._pairwise,
            "scatter": self._pairwise,
            "reduce_scatter": self._reduce_scatter,
            "reduce_scatter_single": self._reduce_scatter,
            "all_to_all": self._pairwise,
            "all_to_all_single": self._pairwise,
            "barrier": lambda call, time: None,  # the agreement was one
        }

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
        met = prove_hosts(PrefixStore("hosts", store), rank, size, timeout, unavailable())
        if met.unable:
            who, why = next(iter(met.unable.items()))
            raise EngineUnavailableError("hybrid", f"rank {who} has no shared memory: {why}", rank)
        hosts = Hosts(met.components, rank)
        corner = PrefixStore(f"host/{hosts.host}", store)
        left = timedelta(seconds=clock.left())
        local = ShmEngine.open(corner, hosts.place, len(hosts.here), left)
        gloo = Gloo.open(store, hosts, clock) if len(met.components) > 1 else None
        engine = cls(hosts, local, gloo, News(PrefixStore("faults", store), rank), striped)
        try:
            engine._agree_on_options(_Time(clock.left()))
        except BaseException:
            engine.abort()
            engine.shutdown()
            raise
        return engine

    def _agree_on_options(self, time: _Time) -> None:
        own = -1 if self._striped is None else int(self._striped)
        chosen = self._exchange(torch.tensor([own]), time)
        if len({int(c) for c in chosen}) > 1:
            told = {r: {-1: None, 0: False, 1: True}[int(c)] for r, c in enumerate(chosen)}
            raise RendezvousError(
                f"the ranks gave different options, striped by rank: {told}",
                "Give every rank the same.",
                self._rank,
            )

    @property
    def _gloo(self) -> Gloo:
        assert self._groups is not None, "on one host nothing is sent across"
        return self._groups

    # -- calls --------------------------------------------------------------------------------

    def run(self, call: Call) -> None:
        if self._groups is None:
            self._local.run(call)
        elif call.kind == "send":
            self._guard(call, lambda: self._send(call).wait(timedelta(seconds=call.timeout)))
        elif call.kind == "recv":
            self._guard(call, lambda: self._receive(call, self._expect(call)))
        else:
            self._lane.run(lambda: self._guard(call, lambda: self._collective(call)))

    def start(self, call: Call) -> TorchWork:
        if self._groups is None:
            return self._local.start(call)
        if call.kind == "send":
            sent = self._guard(call, lambda: self._send(call))
            limit = timedelta(seconds=call.timeout)
            return self._lane.aside(
                lambda: self._guard(call, lambda: sent.wait(limit)), call.inputs
            )
        if call.kind == "recv":
            expected = self._guard(call, lambda: self._expect(call))

            made: queue.SimpleQueue[LaneWork] = queue.SimpleQueue()

            def receive() -> None:
                self._guard(call, lambda: self._receive(call, expected))
                made.get().source = call.root

            work = self._lane.aside(receive, call.outputs)
            made.put(work)
            return work
        return self._lane.start(
            lambda: self._guard(call, lambda: self._collective(call)), call.outputs or call.inputs
        )

    def _collective(self, call: Call) -> None:
        time = _Time(call.timeout)
        inline = is_inline(call)
        row = torch.zeros(HEAD + INLINE // 8, dtype=torch.int64)
        row[:HEAD] = torch.tensor(describe(call, self._size))
        if inline:
            given = as_bytes(call.inputs[0])
            row[HEAD:].view(torch.uint8)[: given.numel()] = given
        rows = self._exchange(row, time)
        self._agree(call, rows[:, :HEAD])
        if inline:
            self._finish_inline(call, rows[:, HEAD:].contiguous())
        else:
            self._carry_out[call.kind](call, time)

    def _finish_inline(self, call: Call, rows: Tensor) -> None:
        """Make the result of what every rank gave, which is all here."""
        tensor = call.outputs[0]
        if call.kind == "broadcast":
            as_bytes(tensor).copy_(as_bytes(rows[call.root])[: tensor.nbytes])
        elif call.kind == "all_gather_single":
            own = tensor.nbytes // self._size
            as_bytes(tensor).copy_(rows.view(torch.uint8)[:, :own].reshape(-1))
        elif call.kind == "all_gather":
            for row, output in zip(rows, call.outputs, strict=True):
                as_bytes(output).copy_(as_bytes(row)[: output.nbytes])
        elif call.kind == "all_reduce" or self._rank == call.root:
            total = self._combine(rows.view(tensor.dtype)[:, : tensor.numel()], call)
            tensor.copy_(total.view_as(tensor))

    # -- agreement ----------------------------------------------------------------------------

    def _exchange(self, row: Tensor, time: _Time) -> Tensor:
        """Every rank's ``row`` of numbers, by rank."""
        hosts, width = self._hosts, row.numel()
        if self._groups is None:
            rows = row.new_empty(self._size, width)
            self._locally("all_gather_single", [row], [rows], time)
            return rows
        longest = max(map(len, hosts.components))
        block = row.new_zeros(longest, width)
        table = row.new_empty(len(hosts.components), longest, width)
        taken = list(block[: len(hosts.here)]) if hosts.place == 0 else []
        self._locally("gather", [row], taken, time, root=0)
        if hosts.place == 0:
            self._across("all_gather_single", [block.view(-1)], [table.view(-1)], time)
        self._locally("broadcast", [table], [table], time, root=0, detours=2)
        return table[self._where]

    def _agree(self, call: Call, rows: Tensor) -> None:
        differing = (rows != rows[0]).any(dim=1)
        if differing.any():
            other = int(differing.int().argmax())
            first, second = tell(rows[0].tolist()), tell(rows[other].tolist())
            raise MismatchError(self._rank, call.sequence, 0, first, other, second)

    # -- steps --------------------------------------------------------------------------------

    def _locally(
        self,
        kind: Kind,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        time: _Time,
        reduction: str = "",
        root: int = -1,
        detours: int = 0,
    ) -> None:
        """A step among the ranks of this host, who are numbered by their places."""
        if len(self._hosts.here) == 1 and inputs and outputs and inputs[0] is outputs[0]:
            return
        seconds = time.left(detours)
        self._local.run(Call(kind, inputs, outputs, reduction, root, timeout=seconds))

    def _across(
        self,
        kind: Kind,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        time: _Time,
        root: int = -1,
        splits: tuple[Sequence[int], Sequence[int]] = ((), ()),
    ) -> None:
        """A step between this rank's counterparts on all hosts, who are numbered by host."""
        self._start_across(kind, inputs, outputs, time, root, splits).wait()

    def _start_across(
        self,
        kind: Kind,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        time: _Time,
        root: int = -1,
        splits: tuple[Sequence[int], Sequence[int]] = ((), ()),
    ) -> TorchWork:
        call = Call(kind, inputs, outputs, "", root, 0, *splits, time.left(1))
        return self._gloo.stripe.start(call)

    # -- reductions ---------------------------------------------------------------------------

    def _all_reduce(self, call: Call, time: _Time) -> None:
        flat = call.outputs[0].reshape(-1)
        if not flat.numel():
            return
        windows = flat.split(WINDOW // flat.element_size())
        steps = self._striped_steps if self._stripes(flat) else self._leader_steps
        # Three times through the windows, so that the first ones cross while the last ones are
        # still summed, and are handed down while the last ones cross.
        under_way = [steps(window, call, time) for window in windows]
        for _ in range(3):
            for window in under_way:
                next(window, None)

    def _striped_steps(self, flat: Tensor, call: Call, time: _Time) -> Iterator[None]:
        parts = flat.tensor_split(len(self._hosts.here))
        mine = parts[self._hosts.place]
        self._locally("reduce_scatter", parts, [mine], time, _local_reduction(call))
        yield from self._cross(mine, call, time)
        self._locally("all_gather", [mine], parts, time, detours=2)

    def _leader_steps(self, flat: Tensor, call: Call, time: _Time) -> Iterator[None]:
        self._locally("reduce", [flat], [flat], time, _local_reduction(call), root=0)
        if self._hosts.place == 0:
            yield from self._cross(flat, call, time)
        else:
            yield
            yield
        self._locally("broadcast", [flat], [flat], time, root=0, detours=2)

    def _stripes(self, flat: Tensor) -> bool:
        """Whether every rank of a host sends its own part; all ranks decide alike."""
        if not self._hosts.equal or flat.numel() < len(self._hosts.here):
            return False
        return flat.nbytes >= STRIPED_FROM if self._striped is None else self._striped

    def _cross(self, flat: Tensor, call: Call, time: _Time) -> Iterator[None]:
        """Reduce ``flat`` over this rank's counterparts, in place; yields twice meanwhile."""
        hosts = len(self._hosts.components)
        if not flat.numel():
            yield
            yield
            return
        if flat.nbytes * hosts <= GATHERED_UP_TO:
            rows = flat.new_empty(hosts, flat.numel())
            work = self._start_across("all_gather_single", [as_bytes(flat)], [as_bytes(rows)], time)
            yield
            yield
            work.wait()
            flat.copy_(self._combine(rows, call))
            return
        whole = _padded(flat, hosts)
        rows = whole.new_empty(hosts, whole.numel() // hosts)
        work = self._start_across("all_to_all_single", [as_bytes(whole)], [as_bytes(rows)], time)
        yield
        work.wait()
        mine = self._combine(rows, call)
        work = self._start_across("all_gather_single", [as_bytes(mine)], [as_bytes(whole)], time)
        yield
        work.wait()
        if whole is not flat:
            flat.copy_(whole[: flat.numel()])

    def _scatter_across(
        self, whole: Tensor, call: Call, time: _Time, counts: Sequence[int] = ()
    ) -> Tensor:
        """This host's part (``counts``: elements for each host) of the reduction of ``whole``."""
        hosts, host = len(self._hosts.components), self._hosts.host
        own = counts[host] if counts else whole.numel() // hosts
        rows, item = whole.new_empty(hosts, own), whole.element_size()
        splits = ([n * item for n in counts], [own * item] * hosts) if counts else ((), ())
        self._across("all_to_all_single", [as_bytes(whole)], [as_bytes(rows)], time, splits=splits)
        return self._combine(rows, call)

    def _combine(self, rows: Tensor, call: Call) -> Tensor:
        """Reduce the hosts' ``rows`` in their order; for an average, divide by the ranks."""
        combine = _COMBINE[_local_reduction(call)]
        total = rows[0].float() if rows.dtype in _HALVES else rows[0]
        for row in rows[1:]:
            combine(total, row, out=total)
        if call.reduction == "avg":
            whole = not (total.is_floating_point() or total.is_complex())
            total.div_(self._size, rounding_mode="trunc" if whole else None)
        return total.to(rows.dtype)

    def _reduce(self, call: Call, time: _Time) -> None:
        given, hosts = call.inputs[0].reshape(-1), self._hosts
        if not given.numel():
            return
        root_host, root_place = hosts.places[call.root]
        result = call.outputs[0].reshape(-1) if self._rank == call.root else given
        total = torch.empty_like(given) if hosts.place == 0 else given
        self._locally("reduce", [given], [total], time, _local_reduction(call), root=0)
        if hosts.place == 0:
            whole = _padded(total, len(hosts.components))
            mine = self._scatter_across(whole, call, time)
            parts = list(as_bytes(whole).chunk(len(hosts.components)))
            taken = parts if hosts.host == root_host else []
            self._across("gather", [as_bytes(mine)], taken, time, root=root_host)
            total = whole[: given.numel()]
        if self._rank == call.root and root_place == 0:
            result.copy_(total)
        elif self._rank == call.root:
            seconds = time.left(2)
            self._local.run(Call("recv", (), [result], root=0, timeout=seconds))
        elif hosts.host == root_host and hosts.place == 0:
            self._local.run(Call("send", [total], (), root=root_place, timeout=time.left(2)))

    def _reduce_scatter(self, call: Call, time: _Time) -> None:
        result, hosts, size = call.outputs[0].reshape(-1), self._hosts, self._size
        inputs = [t.reshape(-1) for t in call.inputs]
        if call.kind == "reduce_scatter_single":
            inputs = list(inputs[0].chunk(size)) if inputs[0].numel() else [result] * size
        counts = [sum(inputs[r].numel() for r in ranks) for ranks in hosts.components]
        if not sum(counts):
            return
        whole = torch.cat([inputs[r] for r in hosts.order])
        self._locally("reduce", [whole], [whole], time, _local_reduction(call), root=0)
        parts: Sequence[Tensor] = ()
        if hosts.place == 0:
            total = self._scatter_across(whole, call, time, counts)
            parts = total.split([inputs[r].numel() for r in hosts.here])
        self._locally("scatter", parts, [result], time, root=0, detours=2)

    # -- moving -------------------------------------------------------------------------------

    def _broadcast(self, call: Call, time: _Time) -> None:
        data, hosts = as_bytes(call.outputs[0]), self._hosts
        if not data.numel():
            return
        root_host, root_place = hosts.places[call.root]
        if hosts.host == root_host:
            self._locally("broadcast", [data], [data], time, root=root_place)
        if hosts.place == 0:
            self._across("broadcast", [data], [data], time, root=root_host)
        if hosts.host != root_host:
            self._locally("broadcast", [data], [data], time, root=0, detours=2)

    def _all_gather(self, call: Call, time: _Time) -> None:
        hosts, size = self._hosts, self._size
        outputs = [as_bytes(t) for t in call.outputs]
        flat = outputs[0] if call.kind == "all_gather_single" else None
        if flat is not None:
            outputs = list(flat.chunk(size)) if flat.numel() else [flat] * size
        counts = [outputs[r].numel() for r in hosts.order]
        if not sum(counts):
            return
        in_place = flat is not None and hosts.order == sorted(hosts.order)
        whole = (
            flat if flat is not None and in_place else torch.empty(sum(counts), dtype=torch.uint8)
        )
        parts = dict(zip(hosts.order, whole.split(counts), strict=True))
        blocks = whole.split([sum(outputs[r].numel() for r in ranks) for ranks in hosts.components])
        taken = [parts[r] for r in hosts.here] if hosts.place == 0 else []
        self._locally("gather", [as_bytes(call.inputs[0])], taken, time, root=0)
        if hosts.place == 0:
            block = blocks[hosts.host]
            if len({b.numel() for b in blocks}) == 1:
                self._across("all_gather_single", [block], [whole], time)
            else:
                self._across("all_gather", [block], blocks, time)
        self._locally("broadcast", [whole], [whole], time, root=0, detours=2)
        if not in_place:
            for r, output in enumerate(outputs):
                output.copy_(parts[r])

    def _pairwise(self, call: Call, time: _Time) -> None:
        """What each rank has for each other rank, through the gloo group of all."""
        give, take = pairs(call, self._rank, self._size)
        given, taken = [t.numel() for t in give], [t.numel() for t in take]
        self._agree_on_pairs(call, self._exchange(torch.tensor([*given, *taken]), time))
        sent, received = torch.cat(give), torch.empty(sum(taken), dtype=torch.uint8)
        splits, seconds = (given, taken), time.left()
        everyone = self._gloo.everyone
        everyone.run(Call("all_to_all_single", [sent], [received], "", -1, 0, *splits, seconds))
        for target, part in zip(take, received.split(taken), strict=True):
            target.copy_(part)

    def _agree_on_pairs(self, call: Call, rows: Tensor) -> None:
        given, taken = rows[:, : self._size], rows[:, self._size :].t()
        if torch.equal(given, taken):
            return
        a, b = (int(n) for n in (given != taken).nonzero()[0])
        raise MismatchError(
            self._rank,
            call.sequence,
            a,
            f"{call.kind} with {int(given[a, b])} bytes for rank {b}",
            b,
            f"{call.kind} with room for {int(taken[a, b])} bytes from rank {a}",
        )

    # -- transfers between two ranks ----------------------------------------------------------
    #
    # All go through gloo, also between ranks of a host: a recv from any source could not watch
    # both. A header says how much comes, of what type, and under which tag of its own, so that
    # gloo never gets to see a size that does not fit.

    def _send(self, call: Call) -> Work:
        data = as_bytes(call.inputs[0])
        slot = next(self._slots) % _TAGS
        header = torch.tensor([data.numel(), DTYPE_CODES[call.inputs[0].dtype], slot])
        works = [self._gloo.send(header, call.root, 2 * self._tag(call))]
        if data.numel():
            works.append(self._gloo.send(data, call.root, 2 * slot + 1))
        return Together(works, call.inputs, self._lane.watcher)

    def _expect(self, call: Call) -> tuple[Tensor, TorchWork]:
        header = torch.empty(3, dtype=torch.int64)
        return header, self._gloo.recv(header, call.root, 2 * self._tag(call))

    def _receive(self, call: Call, expected: tuple[Tensor, TorchWork]) -> None:
        header, work = expected
        work.wait(timedelta(seconds=call.timeout))
        source = work._source_rank() if call.root < 0 else call.root
        result = call.outputs[0]
        count, dtype, slot = header.tolist()
        fits = count == result.nbytes and dtype == DTYPE_CODES[result.dtype]
        data = as_bytes(result) if fits else torch.empty(count, dtype=torch.uint8)
        if count:
            self._gloo.recv(data, source, 2 * slot + 1).wait(timedelta(seconds=call.timeout))
        call.root = source
        if not fits:
            raise MismatchError(
                self._rank,
                call.sequence,
                source,
                f"send({count} bytes of {DTYPES[dtype]})",
                self._rank,
                f"recv({result.nbytes} bytes of {result.dtype})",
            )

    def _tag(self, call: Call) -> int:
        if not 0 <= call.tag < _TAGS:
            expected, found = f"one below {_TAGS}", str(call.tag)
            raise CollectiveArgumentError(self._rank, call.kind, "tag", expected, found)
        return call.tag

    # -- faults -------------------------------------------------------------------------------

    def _guard(self, call: Call, step: Callable[[], _T]) -> _T:
        """Do ``step``; a fault in it ends the group on all ranks."""
        if self._over.is_set():
            raise GroupClosedError(
                self._rank, call.kind, call.sequence, (self._rank,), aborted=True
            )
        try:
            return step()
        except (MismatchError, CollectiveArgumentError):
            raise  # on every rank alike, and nothing was moved
        except GroupError as error:
            fault = self._translate(call, error)
            self._end(fault)
            raise fault from None
        except RuntimeError as error:
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
        if isinstance(error, CollectiveTimeoutError):
            facts["seconds"] = call.timeout
            facts["behind"] = [_renumber(text, here) for text in error.behind]
        return dataclasses.replace(error, **facts)

    def _blame(self, call: Call, error: RuntimeError) -> GroupError:
        """What gloo says, as an error with the ranks it may be about."""
        if self._over.is_set():
            return self._news.of_others(call) or self._closed(call)
        if (known := self._news.of_others(call)) is not None:
            return known
        at = (self._rank, call.kind, call.sequence)
        text = str(error)
        if "imed out" in text or "imeout" in text:
            return CollectiveTimeoutError(*at, self._hosts.elsewhere, seconds=call.timeout)
        ranks = self._gloo.links.ranks_in(text) or self._hosts.elsewhere
        if re.search("closed|reset|refused|broken pipe|unreachable", text, re.IGNORECASE):
            return PeerDiedError(*at, ranks, reporter=self._rank)
        return PeerLeftError(*at, ranks, aborted=True)

    def _closed(self, call: Call) -> GroupError:
        return GroupClosedError(self._rank, call.kind, call.sequence, (self._rank,), aborted=True)

    def _end(self, fault: GroupError) -> None:
        """Tell the others, and free those that wait."""
        if self._over.is_set():
            return
        self._over.set()
        self._news.tell(fault)
        self._local.abort()
        if self._groups is not None:
            self._groups.links.cut()

    # -- the rest -----------------------------------------------------------------------------

    def reduces(self, dtype: torch.dtype, reduction: str) -> bool:
        return dtype not in _UNSIGNED and self._local.reduces(dtype, reduction)

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._local.allocate(numel, dtype)

    def progress(self) -> None:
        """The lane's thread sees to it."""

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
    if between == "nccl" and device.type == "cuda":
        remedy = "Use backend='nccl', which knows the hosts by itself."
        raise UnsupportedError("hybrid", "GPUs", remedy, rank)
    if between == "nccl":
        raise EngineUnavailableError(
            "hybrid", f"nccl moves GPU tensors, not those on {device}", rank
        )
    if device.type != "cpu":
        reason = f"it moves CPU tensors, and the device is {device}"
        raise EngineUnavailableError("hybrid", reason, rank)


def _local_reduction(call: Call) -> str:
    """An average is summed on the way, and divided once, at the end."""
    return "sum" if call.reduction == "avg" else call.reduction


def _padded(flat: Tensor, parts: int) -> Tensor:
    """``flat`` itself if ``parts`` divides it, or a longer copy."""
    count = flat.numel()
    if count % parts == 0:
        return flat
    padded = flat.new_zeros(-(-count // parts) * parts)
    padded[:count] = flat
    return padded


def _renumber(text: str, ranks: Sequence[int]) -> str:
    """A sentence about a rank of this host, with its rank in the whole group."""
    return re.sub(r"\brank (\d+)", lambda found: f"rank {ranks[int(found[1])]}", text)
