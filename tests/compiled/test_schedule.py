"""When a compiled step sends what; read from graphs and from generated code, not timed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.distributed import HashStore
from torch.fx import Graph

import paceline
from paceline.compiled import explain, train_step
from paceline.compiled.schedule import launch_early
from paceline.errors import NotPlannedError

from .generated import Does, Entry, launches_between, read_code
from .marks import needs_compiler, no_instances

CODE = """
    def call(self, args):
        # extern_kernels.mm in a comment is not run
        buf0 = empty_strided_cpu((32, 16), (16, 1), torch.float32)
        extern_kernels.addmm(arg1_1, arg2_1, reinterpret_tensor(arg0_1), alpha=1, beta=1, out=buf0)
        cpp_fused_relu_0(buf0, buf1)
        buf9 = torch.ops.paceline.launch.default([buf7, reinterpret_tensor(buf8)], [4, 5], arg8_1)
        extern_kernels.mm(buf6, arg5_1, out=buf11)
        buf16 = torch.ops.paceline.launch.default([buf13], [2], arg8_1)
        torch.ops.paceline.settle.default([arg9_1], [buf9, buf16], arg8_1)
        cpp_fused_add_1(buf2)
"""


def test_generated_code_is_read_line_by_line() -> None:
    does = [entry.does.value for entry in read_code(CODE)]
    assert does == ["compute", "compute", "launch", "compute", "launch", "settle", "compute"]
    assert read_code(CODE)[2] == Entry(Does.LAUNCH, "4, 5")


def test_launches_count_that_have_something_to_compute_behind_them() -> None:
    assert launches_between(read_code(CODE)) == 1
    launch, compute = Entry(Does.LAUNCH, ""), Entry(Does.COMPUTE, "mm")
    assert launches_between([compute, launch, launch, Entry(Does.SETTLE, ""), compute]) == 0
    assert launches_between([launch, compute, launch, compute, Entry(Does.SETTLE, "")]) == 2


def test_a_launch_moves_to_right_behind_its_last_gradient() -> None:
    peerless()  # with the first group of a process come the operators
    graph = Graph()
    given, wire = graph.placeholder("given"), graph.placeholder("wire")
    first = graph.call_function(torch.ops.aten.sin.default, (given,))
    second = graph.call_function(torch.ops.aten.cos.default, (first,))
    third = graph.call_function(torch.ops.aten.neg.default, (second,))
    early = graph.call_function(torch.ops.paceline.launch.default, ([first], [0], wire))
    late = graph.call_function(torch.ops.paceline.launch.default, ([third], [1], wire))
    graph.output((early, late))
    launch_early(graph)
    graph.lint()
    names = [node.name for node in graph.nodes]
    assert names.index(early.name) == names.index(first.name) + 1
    assert names.index(late.name) == names.index(third.name) + 1


def deep(group: Any, layers: int = 4) -> Any:
    torch.manual_seed(0)
    pairs = [(nn.Linear(32, 32), nn.Tanh()) for _ in range(layers)]
    model = nn.Sequential(*[layer for pair in pairs for layer in pair])
    return paceline.DistributedDataParallel(model, process_group=group, bucket_cap_mb=4e-3)


def peerless() -> Any:
    return paceline.new_group("fake", store=HashStore(), rank=0, world_size=2)


def test_a_step_is_planned_for_any_number_of_ranks_and_never_run() -> None:
    group = peerless()
    ddp = deep(group)
    calls: list[str] = []
    step = train_step(ddp, torch.optim.AdamW(ddp.parameters()), lambda m, x: m(x).sum())
    group.register_hooks(lambda call: calls.append(call.kind))
    before = [param.detach().clone() for param in ddp.parameters()]
    schedule = step.plan(torch.ones(4, 32), world_size=1024)
    assert calls == []
    torch.testing.assert_close(list(ddp.parameters()), before, rtol=0, atol=0)
    assert [c.kind for c in schedule.collectives] == ["all_reduce"] * 4
    assert {c.ranks for c in schedule.collectives} == {1024}
    params = sum(param.nbytes for param in ddp.parameters())
    header = 4 * (4 + 1024 + 8)
    assert schedule.nbytes == params + header
    busy = [c.meanwhile for c in schedule.collectives]
    assert busy == sorted(busy, reverse=True)
    assert busy[0] > busy[1] > busy[2] > 0
    assert busy[3] == 0
    assert explain(step, torch.ones(4, 32), world_size=1024).nbytes == schedule.nbytes


def test_large_gradients_are_handed_over_one_by_one() -> None:
    """So that they are copied while they are in cache; the bucket still leaves as one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 300), nn.Linear(300, 300))
    ddp = paceline.DistributedDataParallel(model, process_group=peerless(), bucket_cap_mb=8)
    step = train_step(ddp, torch.optim.SGD(ddp.parameters(), 0.1), lambda m, x: m(x).sum())
    schedule = step.plan(torch.ones(4, 8))
    assert len(schedule.collectives) == 1
    assert step._binding.layout.launches == ((5, 4), (3, 2, 1, 0))


def test_a_group_of_one_has_nothing_to_plan() -> None:
    ddp = deep(paceline.new_group("fake", store=HashStore(), rank=0, world_size=1))
    step = train_step(ddp, torch.optim.SGD(ddp.parameters(), 0.1), lambda m, x: m(x).sum())
    with pytest.raises(NotPlannedError, match="one rank"):
        step.plan(torch.ones(4, 32))


@pytest.mark.slow
@needs_compiler
def test_inductor_launches_between_the_matmuls_and_waits_last() -> None:
    ddp = deep(peerless())

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    step = train_step(ddp, torch.optim.SGD(ddp.parameters(), 0.1), loss_fn)
    _, codes = run_and_get_code(step, torch.ones(4, 32))
    assert step.reason == ""
    assert len(codes) == 1  # forward, backward and update are one graph
    schedule = read_code(codes[0])
    does = [entry.does for entry in schedule]
    buckets = len(ddp.replica.reducer.buckets)
    assert buckets == 4
    assert does.count(Does.LAUNCH) == buckets
    assert launches_between(schedule) == buckets - 1
    settle = does.index(Does.SETTLE)
    assert Does.LAUNCH in does[:settle]
    assert all("mm" not in entry.what for entry in schedule[settle:])  # only the update is behind


class Residual(nn.Module):
    """As a layer of a transformer: what comes in is added to what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.back = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(torch.tanh(self.wide(self.norm(x))))


@pytest.mark.slow
@needs_compiler
def test_gradients_of_weights_are_computed_where_the_backward_pass_has_them() -> None:
    """Not all at its end, where nothing would be left to compute while buckets travel."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Residual() for _ in range(3)])
    ddp = paceline.DistributedDataParallel(model, process_group=peerless(), bucket_cap_mb=8e-3)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    step = train_step(ddp, optimizer, lambda m, x: m(x).sum(), autocast=torch.bfloat16)
    _, codes = run_and_get_code(step, torch.randn(4, 32))
    schedule = read_code(codes[0])
    does = [entry.does for entry in schedule]
    between = schedule[does.index(Does.LAUNCH) : does.index(Does.SETTLE)]
    assert does.count(Does.LAUNCH) == 6
    products = sum("mm" in entry.what for entry in between)
    assert products >= 2 * 4, schedule  # each layer has four in its backward pass


@needs_compiler
def test_a_step_reads_no_number_back() -> None:
    """On a GPU everything would be awaited for it."""
    ddp = deep(peerless(), layers=1)  # with more there is only more to compile
    step = train_step(ddp, torch.optim.AdamW(ddp.parameters()), lambda m, x: m(x).sum())
    _, codes = run_and_get_code(step, torch.ones(4, 32))
    assert step.reason == ""
    assert ".item()" not in codes[0]


@no_instances
@needs_compiler
def test_a_compiled_wrapper_launches_between_the_matmuls_of_its_backward_graph() -> None:
    ddp = deep(peerless())
    compiled = torch.compile(ddp, fullgraph=True)

    def train() -> None:
        compiled(torch.ones(4, 32)).square().mean().backward()

    _, codes = run_and_get_code(train)
    forward, backward = (read_code(code) for code in codes)  # a graph each
    assert {entry.does for entry in forward} == {Does.COMPUTE}
    does = [entry.does for entry in backward]
    assert does.count(Does.LAUNCH) == 4
    assert launches_between(backward) >= 3
    assert does[-1] is Does.SETTLE
