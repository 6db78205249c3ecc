"""What compiled code does with distributed objects: one row for each thing that users write.

``measure`` runs every row on this rank, over groups of paceline's or over torch's own, and gives a
verdict in words. ``test_objects.py`` and ``test_mesh.py`` say what the verdicts must be, and
``python -m tests.compiled.table`` prints them side by side for docs/compile.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo.testing
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import paceline
import paceline.compiled
from paceline.testing import Meeting

Row = Callable[[Tensor, Any], Any]

ONE_GRAPH = "one graph"
BREAKS = "graph break"
RIGHT = "right"
WRONG = "wrong answer"
FAILS = "error"
NOT_TRIED = "not tried"


@dataclass(frozen=True)
class World:
    """What a rank's rows work with: two groups of both ranks, and one of this rank alone."""

    both: Any
    others: Any
    alone: Any
    mesh: DeviceMesh
    current: Callable[[], Any]
    within: Callable[[Any], Any]
    ours: bool


def of_paceline(meeting: Meeting, backend: str) -> World:
    both = meeting.new_group(backend).register("both", default=True)
    others = meeting.new_group(backend).register("others")
    alone = both.split([[0], [1]])
    assert alone is not None
    alone.register("alone")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    current, within = paceline.current_process_group, paceline.process_group
    return World(both, others, alone, mesh, current, within, ours=True)


def of_torch(meeting: Meeting) -> World:
    as_shipped()
    dist.init_process_group("gloo", store=meeting.store(), rank=meeting.rank, world_size=2)
    both, others = dist.new_group([0, 1]), dist.new_group([0, 1])
    alone = [dist.new_group([0]), dist.new_group([1])][meeting.rank]
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    from torch.distributed import _dist2  # 2.14 took it away

    current, within = _dist2.current_process_group, _dist2.process_group
    return World(both, others, alone, mesh, current, within, ours=False)


def as_shipped() -> None:
    """Take back what paceline has told Dynamo of torch's functions, in this process."""
    paceline.uninstall()


# -- groups: (x, group) -> what the user wants ----------------------------------------------------


def rank_and_size(x: Tensor, group: Any) -> Any:
    return x + 10 * group.rank() + group.size()


def backend_name(x: Tensor, group: Any) -> Any:
    return x + 1, group.name()


def returned(x: Tensor, group: Any) -> Any:
    return x + 1, group


def dictionary_key(x: Tensor, group: Any) -> Any:
    return x + {group: 5}[group]


def method_waited(x: Tensor, group: Any) -> Any:
    y = x * 2
    group.allreduce([y]).wait()
    return y + 1


def method_overlapped(x: Tensor, group: Any) -> Any:
    y = x * 2
    work = group.allreduce([y])
    z = x.cos()
    work.wait()
    return y + z


def broadcast_method(x: Tensor, group: Any) -> Any:
    y = x + group.rank()
    group.broadcast(y, 0).wait()
    return y


def barrier_method(x: Tensor, group: Any) -> Any:
    group.barrier().wait()
    return x + 1


def all_reduce_function(x: Tensor, group: Any) -> Any:
    y = x * 2
    dist.all_reduce(y, group=group)
    return y + 1


def all_gather_function(x: Tensor, group: Any) -> Any:
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x, group=group)
    return parts


def all_to_all_function(x: Tensor, group: Any) -> Any:
    y = torch.empty_like(x)
    dist.all_to_all_single(y, x, group=group)
    return y


def broadcast_function(x: Tensor, group: Any) -> Any:
    y = x + group.rank()
    dist.broadcast(y, group_src=0, group=group)
    return y


def barrier_function(x: Tensor, group: Any) -> Any:
    dist.barrier(group)
    return x + 1


def async_function(x: Tensor, group: Any) -> Any:
    y = x * 2
    work = dist.all_reduce(y, group=group, async_op=True)
    z = x.cos()
    work.wait()
    return y + z


def other_async_functions(x: Tensor, group: Any) -> Any:
    """Everything is started, then something is computed, then everything is awaited."""
    n, first = group.size(), group.rank() == 0
    parts, gathered = [torch.empty_like(x) for _ in range(n)], x.new_empty(n * x.numel())
    swapped, sent, summed = torch.empty_like(x), x + 1, x + 2
    roots = [torch.empty_like(x) for _ in range(n)] if first else None
    taken = torch.empty_like(x)
    works = [
        dist.all_gather(parts, x, group=group, async_op=True),
        dist.all_gather_into_tensor(gathered, x, group=group, async_op=True),
        dist.all_to_all_single(swapped, x, group=group, async_op=True),
        dist.broadcast(sent, group_src=0, group=group, async_op=True),
        dist.reduce(summed, group_dst=0, group=group, async_op=True),
        dist.gather(x, roots, group_dst=0, group=group, async_op=True),
        dist.scatter(
            taken,
            [x + r for r in range(n)] if first else None,
            group_src=0,
            group=group,
            async_op=True,
        ),
        dist.barrier(group, async_op=True),
    ]
    y = x.cos()
    for work in works:
        work.wait()
    return [y, *parts, gathered, swapped, sent, taken, *(roots or [])] + [summed] * first


def returned_work(x: Tensor, group: Any) -> Any:
    y = x * 2
    return Awaited(dist.all_reduce(y, group=group, async_op=True)), y


class Awaited:
    """A work; those of one call equal those of another when both can be awaited."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def __eq__(self, other: Any) -> bool:
        return bool(self.work.wait()) and bool(other.work.wait())

    __hash__ = None  # type: ignore[assignment]


def messages(x: Tensor, group: Any) -> Any:
    taken = torch.empty_like(x)
    if group.size() == 1:
        return x + 1
    other = 1 - group.rank()
    works = [
        dist.isend(x, group=group, group_dst=other),
        dist.irecv(taken, group=group, group_src=other),
    ]
    y = x.cos()
    for work in works:
        work.wait()
    return taken + y


def messages_waited(x: Tensor, group: Any) -> Any:
    y = torch.empty_like(x)
    if group.size() == 1:
        return x + 1
    if group.rank() == 0:
        dist.send(x, group=group, group_dst=1)
        return x + 1
    return y, dist.recv(y, group=group, group_src=0), y + 1


def batched_messages(x: Tensor, group: Any) -> Any:
    taken = torch.empty_like(x)
    if group.size() == 1:
        return x + 1
    other = 1 - group.rank()
    operations = [
        dist.P2POp(dist.isend, x, group=group, group_peer=other),
        dist.P2POp(dist.irecv, taken, group=group, group_peer=other),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return taken + 1


def written(x: Tensor, group: Any) -> Any:
    return x + 1, repr(group), str(group), f"{group}"


def told_by_torch(x: Tensor, group: Any) -> Any:
    return x + dist.get_rank(group) + 10 * dist.get_world_size(group), dist.is_initialized()


def told_of_members(x: Tensor, group: Any) -> Any:
    ranks = dist.get_process_group_ranks(group)
    mine = dist.get_group_rank(group, ranks[-1]), dist.get_global_rank(group, 0)
    return x + 1, ranks, mine, str(dist.get_backend(group))


def properties(x: Tensor, group: Any) -> Any:
    return x + 1, group.group_name, list(group.members), str(group.device)


def functional_collective(x: Tensor, group: Any) -> Any:
    return functional.all_reduce(x * 2, "sum", group) + 1


class Holder(nn.Module):
    """A module that keeps its group."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        return x + 10 * self.group.rank() + self.group.size()


def module_attribute(x: Tensor, group: Any) -> Any:
    return Holder(group)(x)


GROUP_ROWS: dict[str, Row] = {
    "`g.rank()`, `g.size()`": rank_and_size,
    "`g.name()`": backend_name,
    "`repr(g)`, `str(g)`": written,
    "`g.group_name`, `g.members`, `g.device`": properties,
    "`dist.get_rank(g)`, `get_world_size(g)`, `is_initialized()`": told_by_torch,
    "`dist.get_process_group_ranks(g)`, `get_global_rank`, `get_backend`": told_of_members,
    "a group is returned": returned,
    "a group as a dictionary key": dictionary_key,
    "a group in a module": module_attribute,
    "`g.allreduce([t]).wait()`": method_waited,
    "started, computed, waited for": method_overlapped,
    "`g.broadcast(t, 0).wait()`": broadcast_method,
    "`g.barrier().wait()`": barrier_method,
    "`dist.all_reduce(t, group=g)`": all_reduce_function,
    "`dist.all_gather(ts, t, group=g)`": all_gather_function,
    "`dist.all_to_all_single(o, t, group=g)`": all_to_all_function,
    "`dist.broadcast(t, group_src=0, group=g)`": broadcast_function,
    "`dist.barrier(g)`": barrier_function,
    "`dist.all_reduce(..., async_op=True)`": async_function,
    "gather, scatter, broadcast and others with `async_op=True`": other_async_functions,
    "a work is returned, and awaited outside": returned_work,
    "`dist.send`, `dist.recv`": messages_waited,
    "`dist.isend`, `dist.irecv`": messages,
    "`dist.batch_isend_irecv`, with torch's switch for it": batched_messages,
    "functional collective": functional_collective,
}

HALVES = (messages_waited, messages, batched_messages)  # half a failure is a wait for ever


# -- across a graph break: what was made before it is used after it --------------------------------


def group_across(x: Tensor, group: Any) -> Any:
    y = x + group.rank()
    torch._dynamo.graph_break()
    dist.all_reduce(y, group=group)
    return y + group.size()


def key_across(x: Tensor, group: Any) -> Any:
    table, y = {group: 3}, x + 1
    torch._dynamo.graph_break()
    return y + table[group], group


def work_across(x: Tensor, group: Any) -> Any:
    y = x * 2
    work = dist.all_reduce(y, group=group, async_op=True)
    torch._dynamo.graph_break()
    work.wait()
    return y + 1


def mesh_across(x: Tensor, mesh: DeviceMesh) -> Any:
    y = x + mesh.size()
    torch._dynamo.graph_break()
    return y + mesh.get_local_rank("dp")


def mesh_group_across(x: Tensor, mesh: DeviceMesh) -> Any:
    group = mesh.get_group("dp")
    y = x + group.rank()
    torch._dynamo.graph_break()
    dist.all_reduce(y, group=group)
    return y + group.size()


def mesh_part_across(x: Tensor, mesh: DeviceMesh) -> Any:
    part = mesh["dp"]
    y = x + part.size()
    torch._dynamo.graph_break()
    return y + part.size() + part.ndim


def placement_across(x: Tensor, _: Any) -> Any:
    placement, y = Shard(0), x + 1
    torch._dynamo.graph_break()
    return y + (1 if placement == Shard(0) else 2), placement.is_shard(), placement.dim


def dtensor_across(x: Tensor, mesh: DeviceMesh) -> Any:
    part = DTensor.from_local(x, mesh, [Shard(0)])
    torch._dynamo.graph_break()
    return part.redistribute(mesh, [Replicate()]).to_local()


GROUPS_ACROSS: dict[str, Row] = {
    "a group, behind a graph break": group_across,
    "a group as a dictionary key, behind a break": key_across,
    "a work, awaited behind a break": work_across,
}
MESHES_ACROSS: dict[str, Row] = {
    "a mesh, behind a break": mesh_across,
    "a group from a mesh, behind a break": mesh_group_across,
    "a part of a mesh, behind a break": mesh_part_across,
    "a placement, behind a break": placement_across,
    "a DTensor, behind a break": dtensor_across,
}


# -- two groups, the current group, the world -----------------------------------------------------


def compared(x: Tensor, pair: Any) -> Any:
    first, second = pair
    return x + (1 if first == second else 2) + (10 if first is second else 20)


def current_rows(world: World) -> dict[str, Row]:
    current, within = world.current, world.within

    def read(x: Tensor, _: Any) -> Any:
        return x + 10 * current().rank() + current().size()

    def entered(x: Tensor, group: Any) -> Any:
        with within(group):
            y = x + 10 * current().rank() + current().size()
        return y

    return {"current group, read": read, "`with process_group(g):`": entered}


def default_group(x: Tensor, _: Any) -> Any:
    return x + dist.get_rank() + 10 * dist.get_world_size() + 100 * dist.group.WORLD.size()


# -- meshes and placements ------------------------------------------------------------------------


def mesh_facts(x: Tensor, mesh: DeviceMesh) -> Any:
    names = mesh.mesh_dim_names
    return x + mesh.size() + mesh.ndim, mesh.get_coordinate(), names, mesh.get_local_rank("dp")


def mesh_group(x: Tensor, mesh: DeviceMesh) -> Any:
    group = mesh.get_group("dp")
    return x + group.rank() + 10 * group.size()


def mesh_collective(x: Tensor, mesh: DeviceMesh) -> Any:
    y = x * 2
    dist.all_reduce(y, group=mesh.get_group("dp"))
    return y


def mesh_part(x: Tensor, mesh: DeviceMesh) -> Any:
    return x + mesh["dp"].size()


def mesh_compared(x: Tensor, mesh: DeviceMesh) -> Any:
    return x + (1 if mesh == mesh["dp"] else 2)


def placements(x: Tensor, _: Any) -> Any:
    a, b = Shard(0), Replicate()
    facts = (a.is_shard(), a.is_shard(1), b.is_replicate(), Partial("sum").is_partial())
    return x + (1 if a == Shard(0) else 2) + (10 if a == Shard(1) else 20), facts


def placement_key(x: Tensor, _: Any) -> Any:
    return x + {Shard(0): 1, Replicate(): 2}[Shard(0)]


def dtensor(x: Tensor, mesh: DeviceMesh) -> Any:
    whole = DTensor.from_local(x, mesh, [Shard(0)]).redistribute(mesh, [Replicate()])
    return (whole * 2).to_local()


def dtensor_summed(x: Tensor, mesh: DeviceMesh) -> Any:
    part = DTensor.from_local(x, mesh, [Partial()], run_check=False)
    return part.redistribute(mesh, [Replicate()]).to_local() + 1


MESH_ROWS: dict[str, Row] = {
    "mesh: size, ndim, names, coordinate, local rank": mesh_facts,
    "`mesh.get_group()`, its rank and size": mesh_group,
    "a collective over `mesh.get_group()`": mesh_collective,
    "`mesh['dp']`": mesh_part,
    "meshes compared": mesh_compared,
    "placements: made, asked, compared": placements,
    "a placement as a dictionary key": placement_key,
    "`DTensor.from_local`, `redistribute`, `to_local`": dtensor,
    "a partial DTensor summed": dtensor_summed,
}


# -- verdicts -------------------------------------------------------------------------------------


def measure_groups(world: World) -> dict[str, str]:
    """A verdict for every row about groups; each is called with three groups, one after another."""
    groups = (world.both, world.others, world.alone)
    tried = {title: row for title, row in GROUP_ROWS.items() if world.ours or row not in HALVES}
    found = dict.fromkeys(GROUP_ROWS, NOT_TRIED)
    found |= {title: verdict(row, groups) for title, row in tried.items()}
    pairs = [(world.both, world.both), (world.both, world.others), (world.others, world.others)]
    found["`g == h`, `g is h`"] = verdict(compared, pairs)
    for title, row in current_rows(world).items():
        found[title] = verdict(row, groups, world.within)
    found["the default group, its rank and size"] = verdict(default_group, [None])
    return found


def measure_meshes(world: World) -> dict[str, str]:
    """A verdict for every row about meshes and placements."""
    return {title: verdict(row, [world.mesh]) for title, row in MESH_ROWS.items()}


def about_groups() -> list[str]:
    """The rows that :func:`measure_groups` has a verdict for."""
    current = ("current group, read", "`with process_group(g):`")
    return [*GROUP_ROWS, "`g == h`, `g is h`", *current, "the default group, its rank and size"]


def measure_across(world: World) -> dict[str, str]:
    """A verdict for every row about a graph break."""
    groups = (world.both, world.others, world.alone)
    found = {title: behind(row, groups) for title, row in GROUPS_ACROSS.items()}
    return {**found, **{t: behind(row, [world.mesh]) for t, row in MESHES_ACROSS.items()}}


def behind(row: Row, arguments: Sequence[Any]) -> str:
    """Whether ``row``, which breaks its graph, does what it does in eager mode."""
    try:
        found = _tried(row, arguments, None, fullgraph=False)
    except Exception as error:
        return f"{FAILS} ({type(error).__name__})"
    return found.replace(ONE_GRAPH, RIGHT)


def verdict(row: Row, arguments: Sequence[Any], within: Any = None) -> str:
    """How ``row`` does under torch.compile, called with one argument after the other."""
    try:
        found = _tried(row, arguments, within, fullgraph=True)
    except Exception as whole:
        try:
            found = _tried(row, arguments, within, fullgraph=False)
        except Exception:
            return f"{FAILS} ({type(whole).__name__})"
        return BREAKS if found.startswith(ONE_GRAPH) else found
    return found


def _tried(row: Row, arguments: Sequence[Any], within: Any, *, fullgraph: bool) -> str:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(row, backend=counter, fullgraph=fullgraph, dynamic=False)
    x = torch.arange(4.0) + 1 + dist.get_rank()
    with _switched(row):
        for number, argument in enumerate(arguments):
            wanted, got = (_called(f, x, argument, within) for f in (row, compiled))
            if not same(got, wanted):
                return WRONG if number == 0 else f"{WRONG} for another group"
    return f"{ONE_GRAPH}, {counter.frame_count} compiled"


def _switched(row: Row) -> Any:
    """What torch wants to be told before it traces a ``P2POp``."""
    config = torch._dynamo.config
    if row is batched_messages and hasattr(config, "enable_p2p_compilation"):
        return config.patch(enable_p2p_compilation=True)
    return contextlib.nullcontext()


def heard(group: Any) -> list[str]:
    """A list that grows with every collective of ``group``."""
    calls: list[str] = []
    group.register_hooks(before=lambda call: calls.append(call.kind))
    return calls


def _called(row: Row, x: Tensor, argument: Any, within: Any) -> Any:
    if within is None:
        return row(x.clone(), argument)
    with within(argument):
        return row(x.clone(), argument)


def same(a: Any, b: Any) -> bool:
    """Whether two results are the same, tensors by value and groups by identity."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a is b if isinstance(a, dist.ProcessGroup) else bool(a == b)
