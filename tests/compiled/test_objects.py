"""Groups inside compiled code."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, ReduceOp

from paceline import Group, current_process_group, new_group, process_group
from paceline.compiled import UNAVAILABLE
from paceline.testing import run_ranks

from . import rows

pytestmark = [
    pytest.mark.skipif(bool(UNAVAILABLE), reason=UNAVAILABLE),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # torch renames its functions
]
Counter = torch._dynamo.testing.CompileCounterWithBackend


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def fake(rank: int = 0, size: int = 4) -> Group:
    return new_group("fake", store=HashStore(), rank=rank, world_size=size)


def compiled(function: Callable[..., Any], backend: str = "aot_eager") -> tuple[Any, Any]:
    counter = Counter(backend)
    return torch.compile(function, backend=counter, fullgraph=True), counter


# -- which group ----------------------------------------------------------------------------------


def reduce_and_tell(x: Tensor, group: Group) -> Tensor:
    y = x * 2
    group.all_reduce(y)
    return y + 10 * group.rank() + group.size()


def test_one_compile_serves_groups_of_equal_rank_and_size_and_each_call_uses_its_own() -> None:
    function, counter = compiled(reduce_and_tell)
    groups = [fake(), fake(), fake()]
    calls = [rows.heard(group) for group in groups]
    for number, group in enumerate(groups):
        function(torch.ones(3), group)
        assert [len(c) for c in calls] == [1] * (number + 1) + [0] * (2 - number)
    if torch.__version__ >= "2.13":  # 2.12 compiles once for each group
        assert counter.frame_count == 1


@pytest.mark.parametrize("other", [(1, 4), (0, 5)])
def test_a_group_of_another_rank_or_size_compiles_again(other: tuple[int, int]) -> None:
    function, counter = compiled(reduce_and_tell)
    function(torch.ones(3), fake())
    group = fake(*other)
    calls = rows.heard(group)
    assert torch.equal(function(torch.ones(3), group), reduce_and_tell(torch.ones(3), group))
    assert counter.frame_count == 2
    assert calls == ["all_reduce", "all_reduce"]


def test_a_reconfigured_group_compiles_again() -> None:
    function, counter = compiled(lambda x, group: x + group.size())
    group = fake(0, 4)
    assert function(torch.zeros(1), group) == 4
    group.reconfigure([0, 1, 3])
    assert function(torch.zeros(1), group) == 3
    assert counter.frame_count == 2


def test_groups_are_compared_as_they_are_in_this_call() -> None:
    def tell(x: Tensor, a: Group, b: Group) -> Tensor:
        return x + (1 if a == b else 2) + (10 if a is b else 20) + (100 if a != b else 200)

    if torch.__version__ < "2.12":
        pytest.skip("Dynamo of torch 2.11 refuses to compare groups")
    function, _ = compiled(tell, "eager")
    a, b = fake(), fake()
    for pair in [(a, b), (a, a), (b, b), (b, a)]:
        assert torch.equal(function(torch.zeros(1), *pair), tell(torch.zeros(1), *pair))


def test_a_group_is_a_key_of_dictionaries_from_inside_and_outside() -> None:
    def look(x: Tensor, table: dict[Group, int], a: Group, b: Group) -> Tensor:
        inside = {a: 10, b: 20}
        return x + table[a] + inside[a] + 100 * len(inside)

    if torch.__version__ < "2.12":
        pytest.skip("Dynamo of torch 2.11 refuses to hash groups")
    function, _ = compiled(look, "eager")
    a, b = fake(), fake()
    for first, second in [(a, b), (a, a), (b, a)]:
        given = (torch.zeros(1), {a: 1, b: 2}, first, second)
        assert torch.equal(function(*given), look(*given))


def test_a_comparison_with_none_does_not_pin_a_group() -> None:
    def default(x: Tensor, group: Group | None) -> Tensor:
        return x if group is None else x + group.size()

    function, counter = compiled(default, "eager")
    for group in (fake(), fake(), fake()):
        function(torch.zeros(1), group)
    if torch.__version__ >= "2.13":
        assert counter.frame_count == 1


def test_what_is_read_of_a_group_is_guarded_when_it_is_read() -> None:
    def facts(x: Tensor, group: Group) -> Any:
        return x + 1, group.members, group.group_name, group.name(), group.device, group.timeout

    function, _ = compiled(facts, "eager")
    first, second = fake(), new_group("fake", store=HashStore(), rank=0, world_size=4)
    second.register("guarded")
    second._members = (4, 5, 6, 7)
    second.set_timeout(7.0)
    try:
        for group in (first, second, first):
            assert function(torch.ones(1), group)[1:] == facts(torch.ones(1), group)[1:]
    finally:
        second.unregister()


def test_a_group_comes_back_as_the_object_that_was_given() -> None:
    function, _ = compiled(lambda x, group: (x + 1, group), "eager")
    for group in (fake(), fake()):
        assert function(torch.ones(1), group)[1] is group


def other_members(group: Group) -> Group:
    """Of the same rank and size, with other ranks in it."""
    group._members = tuple(member + 4 for member in group.members)
    return group


def test_what_torch_tells_of_a_group_is_guarded_too() -> None:
    def facts(x: Tensor, group: Group) -> Any:
        ranks = dist.get_process_group_ranks(group)
        return x + 1, ranks, dist.get_global_rank(group, 1), dist.get_group_rank(group, ranks[2])

    function, _ = compiled(facts, "eager")
    world = fake(0, 8).register(default=True)
    try:
        for group in (fake(), other_members(fake()), fake()):
            with group.register():
                assert function(torch.ones(1), group)[1:] == facts(torch.ones(1), group)[1:]
    finally:
        world.shutdown()


def test_a_group_is_written_as_it_writes_itself() -> None:
    def write(x: Tensor, group: Group) -> Any:
        return x + 1, repr(group), str(group), f"{group}"

    if torch.__version__ < "2.13":
        pytest.skip("Dynamo of older torch writes a stand-in")
    function, _ = compiled(write, "eager")
    closed = fake()
    closed.shutdown()
    for group in (fake(), closed, fake()):
        assert function(torch.ones(1), group)[1:] == (repr(group),) * 3


# -- torch.distributed's functions ----------------------------------------------------------------


@pytest.mark.skipif(torch.__version__ < "2.12", reason="2.11 sees torch's group there")
def test_a_call_without_a_group_goes_to_the_default_group() -> None:
    def reduce(x: Tensor) -> Tensor:
        y = x * 2
        work = dist.all_reduce(y, async_op=True)
        dist.barrier()
        work.wait()
        return y

    function, _ = compiled(reduce)
    for _ in range(2):
        group = fake().register(default=True)
        calls = rows.heard(group)
        try:
            function(torch.ones(2))
            assert calls == ["all_reduce", "barrier"]
        finally:
            group.shutdown()


def test_a_group_needs_no_name_for_torchs_functions() -> None:
    def talk(x: Tensor, group: Group) -> Tensor:
        y = x * 2
        dist.all_reduce(y, ReduceOp.MAX, group)
        works = [dist.isend(y, group=group, group_dst=1), dist.barrier(group, True)]
        for work in works:
            work.wait()
        dist.reduce(y, group_dst=2, op=ReduceOp.AVG, group=group)
        return y

    group = fake()
    calls = rows.heard(group)
    compiled(talk)[0](torch.ones(2), group)
    assert calls == ["all_reduce", "send", "barrier", "reduce"]


def test_a_root_that_is_named_in_no_way_is_refused_as_in_eager_mode() -> None:
    def ask(x: Tensor, group: Group) -> Tensor:
        dist.broadcast(x, group=group)
        return x

    group = fake().register(default=True)
    try:
        for function in (ask, torch.compile(ask, backend="eager")):
            with pytest.raises(ValueError, match="Must specify"):
                function(torch.ones(2), group)
    finally:
        group.shutdown()


# -- the current group ----------------------------------------------------------------------------


def test_the_current_group_is_that_of_each_call() -> None:
    def ask(x: Tensor) -> Tensor:
        y = x * 1
        current_process_group().all_reduce(y)
        return y + current_process_group().rank()

    function, _ = compiled(ask)
    groups = [fake(0), fake(1), fake(0)]
    calls = [rows.heard(group) for group in groups]
    for number, group in enumerate(groups):
        with process_group(group):
            assert function(torch.zeros(1)) == group.rank()
        assert len(calls[number]) == 1


def test_a_group_entered_in_the_graph_is_current_there_and_not_after_it() -> None:
    def nest(x: Tensor, a: Group, b: Group) -> Any:
        with process_group(a):
            outer = current_process_group().rank()
            with process_group(b):
                inner = current_process_group().rank()
            again = current_process_group().rank()
        return x + outer + 10 * inner + 100 * again, current_process_group()

    function, _ = compiled(nest, "eager")
    outside = fake(3)
    with process_group(outside):
        for a, b in [(fake(1), fake(2)), (fake(2), fake(1))]:
            got, after = function(torch.zeros(1), a, b)
            assert got == nest(torch.zeros(1), a, b)[0]
            assert after is current_process_group() is outside


# -- collectives ----------------------------------------------------------------------------------


def test_ranks_that_are_threads_run_compiled_collectives() -> None:
    function, _ = compiled(reduce_and_tell)
    for rank in range(2):  # Dynamo traces one thread at a time; ranks must not wait meanwhile
        function(torch.ones(2), fake(rank, 2))

    def one_rank(group: Group) -> bool:
        x = torch.ones(2) + group.rank()
        return torch.equal(function(x, group), torch.full((2,), 6.0) + 10 * group.rank() + 2)

    assert run_ranks(2, one_rank) == [True, True]


def test_a_work_that_leaves_the_graph_is_awaited_outside() -> None:
    def start(x: Tensor, group: Group) -> Any:
        y = x * 2
        return y, group.all_reduce(y, async_op=True)

    function, _ = compiled(start)
    group = fake(0, 1)
    y, work = function(torch.ones(2), group)
    assert work.wait()
    assert work.is_completed()
    assert torch.equal(y, torch.full((2,), 2.0))


def test_a_collective_whose_result_nobody_uses_is_still_made() -> None:
    def ignore(x: Tensor, group: Group) -> Tensor:
        y = x * 2
        group.all_reduce(y)
        group.barrier()
        return x + 1

    function, _ = compiled(ignore)
    group = fake()
    calls = rows.heard(group)
    function(torch.ones(2), group)
    assert calls == ["all_reduce", "barrier"]


def test_an_argument_that_is_changed_in_place_is_changed_for_the_caller() -> None:
    def halves(x: Tensor, group: Group) -> None:
        group.all_reduce(x[::2], ReduceOp.AVG)
        group.all_reduce(x.view(2, 4).t())

    def one_rank(meeting: Group) -> None:
        x, y = torch.arange(8.0), torch.arange(8.0)
        halves(x, meeting)
        torch.compile(halves, backend="aot_eager", fullgraph=True)(y, meeting)
        assert torch.equal(x, y)

    one_rank(fake(0, 1))


def test_gradients_pass_a_collective_in_the_graph_as_they_do_in_eager_mode() -> None:
    def loss(x: Tensor, group: Group) -> Tensor:
        y = x * 3
        group.all_reduce(y)
        return y.square().sum()

    function, _ = compiled(loss)
    grads = []
    for call in (loss, function):
        x = torch.ones(3, requires_grad=True)
        call(x, fake(0, 1)).backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


LONG = timedelta(seconds=30)


def test_a_timeout_may_be_a_timedelta_from_outside_the_graph() -> None:
    def late(x: Tensor, group: Group) -> Tensor:
        y = x * 1
        group.all_reduce(y, timeout=LONG)
        return y

    group, seconds = fake(), []
    group.register_hooks(before=lambda call: seconds.append(call.timeout))
    compiled(late)[0](torch.ones(1), group)
    assert seconds == [30.0]


def test_what_cannot_be_traced_is_a_graph_break_and_right() -> None:
    def gather(x: Tensor, group: Group) -> Any:
        y = x * 2
        everywhere = group.all_gather_object({"rank": group.rank()})
        sparse = torch.eye(2).to_sparse()
        group.all_reduce(sparse)
        return y + 1, everywhere, sparse.to_dense()

    group = fake(1, 3)
    with pytest.warns(UserWarning, match="Dynamo does not know how to trace"):
        got = torch.compile(gather, backend="aot_eager")(torch.ones(2), group)
    assert rows.same(got, gather(torch.ones(2), group))


# -- around it ------------------------------------------------------------------------------------


def test_importing_paceline_compiled_does_not_import_dynamo() -> None:
    code = "import sys, paceline.compiled; print('torch._dynamo' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert out.stdout.strip() == "False", out.stderr


def test_a_torch_without_these_names_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline._torch import opaque, patches
    from paceline.compiled import objects

    monkeypatch.setattr(opaque, "missing", lambda: "torch 9 has no opaque types")
    monkeypatch.setattr(opaque, "name_as_input", None)
    monkeypatch.setattr(patches, "put", None)
    objects.offer_groups()


def test_torchs_own_groups_trace_as_before() -> None:
    def reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
        y = x * 2
        dist.all_reduce(y, ReduceOp.SUM, group)
        return y

    def start(x: Tensor, group: dist.ProcessGroup) -> Tensor:
        dist.all_reduce(x, group=group, async_op=True).wait()
        return x

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        function, counter = compiled(reduce)
        assert torch.equal(function(torch.ones(2), dist.group.WORLD), torch.full((2,), 2.0))
        assert counter.frame_count == 1
        with pytest.raises(torch._dynamo.exc.Unsupported, match="async_op=True"):
            compiled(start)[0](torch.ones(2), dist.group.WORLD)
    finally:
        dist.destroy_process_group()
