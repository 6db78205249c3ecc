"""How each collective goes over several hosts; the essay is in ``engine.py``.

Every rank has described its call and knows that all others have called the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ....errors import MismatchError
from ...engine import COMBINE, Call
from .calls import as_bytes, pairs
from .steps import Steps, Time

STRIPED_FROM = 1 << 20  # bytes; below, all ranks of a host taking part costs more than it gains
WINDOW = 2 << 20  # bytes; of larger tensors, a part is summed while another one crosses
GATHERED_UP_TO = 32 << 10  # bytes over all hosts; so little is sent whole, in one round, not two

_HALVES = frozenset({torch.float16, torch.bfloat16})


class HybridCollectives:
    """The collectives of one rank, each a few steps within its host and between hosts."""

    def __init__(self, steps: Steps, striped: bool | None) -> None:
        self._steps, self._striped = steps, striped
        self._hosts, self._rank, self._size = steps.hosts, steps.hosts.rank, steps.size
        self._ways: dict[str, Callable[[Call, Time], None]] = {
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

    def run(self, call: Call, time: Time) -> None:
        self._ways[call.kind](call, time)

    def finish_inline(self, call: Call, rows: Tensor) -> None:
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

    # -- reductions ---------------------------------------------------------------------------

    def _all_reduce(self, call: Call, time: Time) -> None:
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

    def _striped_steps(self, flat: Tensor, call: Call, time: Time) -> Iterator[None]:
        parts = flat.tensor_split(len(self._hosts.here))
        mine = parts[self._hosts.place]
        self._steps.locally("reduce_scatter", parts, [mine], time, _local_reduction(call))
        yield from self._cross(mine, call, time)
        self._steps.locally("all_gather", [mine], parts, time, detours=2)

    def _leader_steps(self, flat: Tensor, call: Call, time: Time) -> Iterator[None]:
        self._steps.locally("reduce", [flat], [flat], time, _local_reduction(call), root=0)
        if self._hosts.place == 0:
            yield from self._cross(flat, call, time)
        else:
            yield
            yield
        self._steps.locally("broadcast", [flat], [flat], time, root=0, detours=2)

    def _stripes(self, flat: Tensor) -> bool:
        """Whether every rank of a host sends its own part; all ranks decide alike."""
        if not self._hosts.equal or flat.numel() < len(self._hosts.here):
            return False
        return flat.nbytes >= STRIPED_FROM if self._striped is None else self._striped

    def _cross(self, flat: Tensor, call: Call, time: Time) -> Iterator[None]:
        """Reduce ``flat`` over this rank's counterparts, in place; yields twice meanwhile."""
        hosts = len(self._hosts.components)
        if not flat.numel():
            yield
            yield
            return
        if flat.nbytes * hosts <= GATHERED_UP_TO:
            rows = flat.new_empty(hosts, flat.numel())
            work = self._steps.start_across(
                "all_gather_single", [as_bytes(flat)], [as_bytes(rows)], time
            )
            yield
            yield
            work.wait()
            flat.copy_(self._combine(rows, call))
            return
        whole = _padded(flat, hosts)
        rows = whole.new_empty(hosts, whole.numel() // hosts)
        work = self._steps.start_across(
            "all_to_all_single", [as_bytes(whole)], [as_bytes(rows)], time
        )
        yield
        work.wait()
        mine = self._combine(rows, call)
        work = self._steps.start_across(
            "all_gather_single", [as_bytes(mine)], [as_bytes(whole)], time
        )
        yield
        work.wait()
        if whole is not flat:
            flat.copy_(whole[: flat.numel()])

    def _scatter_across(
        self, whole: Tensor, call: Call, time: Time, counts: Sequence[int] = ()
    ) -> Tensor:
        """This host's part (``counts``: elements for each host) of the reduction of ``whole``."""
        hosts, host = len(self._hosts.components), self._hosts.host
        own = counts[host] if counts else whole.numel() // hosts
        rows, item = whole.new_empty(hosts, own), whole.element_size()
        splits = ([n * item for n in counts], [own * item] * hosts) if counts else ((), ())
        self._steps.across(
            "all_to_all_single", [as_bytes(whole)], [as_bytes(rows)], time, splits=splits
        )
        return self._combine(rows, call)

    def _combine(self, rows: Tensor, call: Call) -> Tensor:
        """Reduce the hosts' ``rows`` in their order; for an average, divide by the ranks."""
        combine = COMBINE[_local_reduction(call)]
        total = rows[0].float() if rows.dtype in _HALVES else rows[0]
        for row in rows[1:]:
            combine(total, row, out=total)
        if call.reduction == "avg":  # of integers there are only sums (integer_mean.py)
            total.div_(self._size)
        return total.to(rows.dtype)

    def _reduce(self, call: Call, time: Time) -> None:
        given, hosts = call.inputs[0].reshape(-1), self._hosts
        if not given.numel():
            return
        root_host, root_place = hosts.places[call.root]
        result = call.outputs[0].reshape(-1) if self._rank == call.root else given
        total = torch.empty_like(given) if hosts.place == 0 else given
        self._steps.locally("reduce", [given], [total], time, _local_reduction(call), root=0)
        if hosts.place == 0:
            whole = _padded(total, len(hosts.components))
            mine = self._scatter_across(whole, call, time)
            parts = list(as_bytes(whole).chunk(len(hosts.components)))
            taken = parts if hosts.host == root_host else []
            self._steps.across("gather", [as_bytes(mine)], taken, time, root=root_host)
            total = whole[: given.numel()]
        if self._rank == call.root and root_place == 0:
            result.copy_(total)
        elif self._rank == call.root:
            seconds = time.left(2)
            self._steps.local.run(Call("recv", (), [result], root=0, timeout=seconds))
        elif hosts.host == root_host and hosts.place == 0:
            self._steps.local.run(Call("send", [total], (), root=root_place, timeout=time.left(2)))

    def _reduce_scatter(self, call: Call, time: Time) -> None:
        result, hosts, size = call.outputs[0].reshape(-1), self._hosts, self._size
        inputs = [t.reshape(-1) for t in call.inputs]
        if call.kind == "reduce_scatter_single":
            inputs = list(inputs[0].chunk(size)) if inputs[0].numel() else [result] * size
        counts = [sum(inputs[r].numel() for r in ranks) for ranks in hosts.components]
        if not sum(counts):
            return
        whole = torch.cat([inputs[r] for r in hosts.order])
        self._steps.locally("reduce", [whole], [whole], time, _local_reduction(call), root=0)
        parts: Sequence[Tensor] = ()
        if hosts.place == 0:
            total = self._scatter_across(whole, call, time, counts)
            parts = total.split([inputs[r].numel() for r in hosts.here])
        self._steps.locally("scatter", parts, [result], time, root=0, detours=2)

    # -- moving -------------------------------------------------------------------------------

    def _broadcast(self, call: Call, time: Time) -> None:
        data, hosts = as_bytes(call.outputs[0]), self._hosts
        if not data.numel():
            return
        root_host, root_place = hosts.places[call.root]
        if hosts.host == root_host:
            self._steps.locally("broadcast", [data], [data], time, root=root_place)
        if hosts.place == 0:
            self._steps.across("broadcast", [data], [data], time, root=root_host)
        if hosts.host != root_host:
            self._steps.locally("broadcast", [data], [data], time, root=0, detours=2)

    def _all_gather(self, call: Call, time: Time) -> None:
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
        self._steps.locally("gather", [as_bytes(call.inputs[0])], taken, time, root=0)
        if hosts.place == 0:
            block = blocks[hosts.host]
            if len({b.numel() for b in blocks}) == 1:
                self._steps.across("all_gather_single", [block], [whole], time)
            else:
                self._steps.across("all_gather", [block], blocks, time)
        self._steps.locally("broadcast", [whole], [whole], time, root=0, detours=2)
        if not in_place:
            for r, output in enumerate(outputs):
                output.copy_(parts[r])

    def _pairwise(self, call: Call, time: Time) -> None:
        """What each rank has for each other rank, through the gloo group of all."""
        give, take = pairs(call, self._rank, self._size)
        given, taken = [t.numel() for t in give], [t.numel() for t in take]
        self._agree_on_pairs(call, self._steps.exchange(torch.tensor([*given, *taken]), time))
        sent, received = torch.cat(give), torch.empty(sum(taken), dtype=torch.uint8)
        splits, seconds = (given, taken), time.left()
        everyone = self._steps.gloo.everyone
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
