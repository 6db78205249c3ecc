"""Engines from outside the package: one class and one registration make a backend."""

from __future__ import annotations

import ast
import functools
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore, PrefixStore, ReduceOp, Store
from torch.testing import assert_close

import paceline
from paceline import DistributedDataParallel as DDP
from paceline import Group, new_group, register_backend
from paceline.errors import (
    BackendTakenError,
    CollectiveArgumentError,
    EngineUnavailableError,
    UnexpectedOptionError,
)
from paceline.groups import Availability, Call, Capabilities, Engine, EngineBackend, backends
from paceline.testing import Meeting, run_ranks, spawn_ranks
from tests.ddp.ranks import batch, grads_of, mean_grads, mlp, seeded

from .reference import check_all_collectives

SOON = timedelta(seconds=120)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
STEPS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}


# -- what each collective makes of everybody's tensors -------------------------------------------


def fold(parts: Sequence[Tensor], reduction: str) -> Tensor:
    """The ranks' tensors in one."""
    dtype = parts[0].dtype
    if dtype is torch.bool:
        reduction = {"sum": "max", "product": "min"}.get(reduction, reduction)
    wide = [p.double() if dtype.is_floating_point else p for p in parts]
    total = functools.reduce(STEPS[reduction], wide)
    if reduction == "avg":
        total = total.div(len(parts), rounding_mode=None if dtype.is_floating_point else "trunc")
    return total.to(dtype)


def rows(tensor: Tensor, splits: Sequence[int], size: int) -> Sequence[Tensor]:
    """What each rank is to have of one tensor's rows."""
    return tensor.split(list(splits) if splits else [len(tensor) // size] * size)


def deliver(call: Call, rank: int, given: Sequence[Sequence[Tensor]]) -> None:
    """Fill this rank's outputs; ``given[r]`` are rank r's inputs, in one tensor for each rank."""
    size, kind = len(given), call.kind
    if kind == "all_reduce" or (kind == "reduce" and rank == call.root):
        call.outputs[0].copy_(fold([g[0] for g in given], call.reduction))
    elif kind == "broadcast":
        call.outputs[0].copy_(given[call.root][0])
    elif kind == "all_gather" or (kind == "gather" and rank == call.root):
        for output, (tensor, *_) in zip(call.outputs, given, strict=True):
            output.copy_(tensor.view_as(output))
    elif kind == "all_gather_single":
        call.outputs[0].view(-1).copy_(torch.cat([g[0].reshape(-1) for g in given]))
    elif kind == "scatter":
        call.outputs[0].copy_(given[call.root][rank].view_as(call.outputs[0]))
    elif kind == "reduce_scatter":
        call.outputs[0].copy_(fold([g[rank] for g in given], call.reduction))
    elif kind == "reduce_scatter_single":
        parts = [g[0].reshape(-1).chunk(size)[rank] for g in given]
        call.outputs[0].view(-1).copy_(fold(parts, call.reduction))
    elif kind == "all_to_all":
        for output, theirs in zip(call.outputs, given, strict=True):
            output.copy_(theirs[rank].view_as(output))
    elif kind == "all_to_all_single":
        call.outputs[0].copy_(torch.cat([g[rank] for g in given]).view_as(call.outputs[0]))


def to_give(call: Call, size: int) -> Sequence[Tensor]:
    """This rank's inputs, cut where they are for different ranks."""
    if call.kind == "all_to_all_single":
        return rows(call.inputs[0], call.input_splits, size)
    return call.inputs


# -- one that runs over a store, between processes, and has an interface of its own --------------


class Promise(dist.Work):
    """torch's interface on a future of Python's."""

    def __init__(self, future: Future[int], outputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._future, self._outputs = future, outputs

    def wait(self, timeout: timedelta | float = timedelta(0)) -> bool:
        self._future.result()
        return True

    def is_completed(self) -> bool:
        return self._future.done()

    def is_success(self) -> bool:
        return self._future.exception() is None

    def result(self) -> list[Tensor]:
        self.wait()
        return list(self._outputs)

    def _source_rank(self) -> int:
        return self._future.result()

    source_rank = _source_rank

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        gate: torch.futures.Future[None] = torch.futures.Future()
        self._future.add_done_callback(lambda _: gate.set_result(None))
        return gate.then(lambda _: self.result())


class Letters:
    """Everybody leaves everything in the store. Derives from nothing."""

    def __init__(self, store: Store, rank: int, size: int, stamp: str) -> None:
        self._store, self._rank, self._size = PrefixStore(stamp, store), rank, size
        self._turn = itertools.count()
        self._in_order = ThreadPoolExecutor(1, "letters")
        self._any_time = ThreadPoolExecutor(8, "letters-from")
        self._sent: dict[tuple[int, int], int] = {}
        self._got: dict[tuple[int, int], int] = {}
        self.capabilities = Capabilities("letters", frozenset({"cpu"}), averages=True)

    def run(self, call: Call) -> None:
        call.root = self._begin(call).result()

    def start(self, call: Call) -> dist.Work:
        return Promise(self._begin(call), call.outputs or call.inputs)

    def _begin(self, call: Call) -> Future[int]:
        if call.kind == "recv":
            return self._any_time.submit(self._receive, call)
        if call.kind == "send":
            number = self._sent[call.root, call.tag] = self._sent.get((call.root, call.tag), 0) + 1
            self._put(f"{self._rank}>{call.root}/{call.tag}/{number}", call.inputs)
            done: Future[int] = Future()
            done.set_result(call.root)
            return done
        return self._in_order.submit(self._collective, call, next(self._turn))

    def _collective(self, call: Call, turn: int) -> int:
        self._put(f"{turn}/{self._rank}", to_give(call, self._size))
        deliver(call, self._rank, [self._get(f"{turn}/{r}") for r in range(self._size)])
        return call.root

    def _receive(self, call: Call) -> int:
        sources = range(self._size) if call.root < 0 else [call.root]
        end = time.monotonic() + call.timeout
        while time.monotonic() < end:
            for source in sources:
                number = self._got.get((source, call.tag), 0) + 1
                key = f"{source}>{self._rank}/{call.tag}/{number}"
                if self._store.check([key]):
                    self._got[source, call.tag] = number
                    call.outputs[0].copy_(self._get(key)[0])
                    return source
        raise TimeoutError(f"letters: nothing came from {list(sources)}")

    def _put(self, key: str, tensors: Sequence[Tensor]) -> None:
        parts = [
            (
                DTYPES.index(t.dtype),
                tuple(t.shape),
                t.reshape(-1).view(torch.uint8).numpy().tobytes(),
            )
            for t in tensors
        ]
        self._store.set(key, msgspec.msgpack.encode(parts))

    def _get(self, key: str) -> list[Tensor]:
        parts = msgspec.msgpack.decode(self._store.get(key))
        return [_tensor(DTYPES[dtype], shape, data) for dtype, shape, data in parts]

    def reduces(self, dtype: torch.dtype, reduction: str) -> bool:
        return dtype in DTYPES and reduction in STEPS and (dtype, reduction) != (torch.bool, "avg")

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype)

    def progress(self) -> None:
        """The threads do it."""

    def abort(self) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        self._in_order.shutdown(wait=False)
        self._any_time.shutdown(wait=False)


def _tensor(dtype: torch.dtype, shape: Sequence[int], data: bytes) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).view(shape)


def open_letters(
    store: Store, rank: int, size: int, timeout: timedelta, device: torch.device, stamp: str = ""
) -> Letters:
    return Letters(store, rank, size, stamp)


LETTERS = EngineBackend(open_letters, options=("stamp",), max_ranks=3)


# -- one for the threads of a process, which promises nothing and starts nothing -----------------


@dataclass
class Table:
    """Where the ranks of one group put their tensors."""

    barrier: threading.Barrier
    places: list[Sequence[Tensor]]


class Huddle(Engine):
    """Runs calls as they come, one at a time; adds, and does not divide; sends no messages."""

    tables: ClassVar[dict[str, Table]] = {}

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        name = store.compare_set("table", "", f"{id(store)}/{time.monotonic_ns()}").decode()
        self._table = self.tables.setdefault(name, Table(threading.Barrier(size), [()] * size))
        self.log: deque[str] = deque(maxlen=1000)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities("huddle", frozenset({"cpu"}), one_process=True)

    def run(self, call: Call) -> None:
        assert call.kind not in ("send", "recv"), "huddles send no messages"
        self.log.append(f"{call.kind} {call.reduction}".strip())
        self._table.places[self._rank] = to_give(call, self._size)
        self._table.barrier.wait(call.timeout)
        results = [torch.empty_like(t) for t in call.outputs]
        for result, output in zip(results, call.outputs, strict=True):
            result.copy_(output)
        instead = Call(call.kind, outputs=results, reduction=call.reduction, root=call.root)
        deliver(instead, self._rank, self._table.places)
        self._table.barrier.wait(call.timeout)  # all have read
        for result, output in zip(results, call.outputs, strict=True):
            output.copy_(result)

    def reduces(self, dtype: torch.dtype, reduction: str) -> bool:
        return dtype in DTYPES and reduction in STEPS and reduction != "avg"

    def abort(self) -> None:
        self._table.barrier.abort()


HUDDLE = EngineBackend(lambda store, rank, size, timeout, device: Huddle(store, rank, size))


@pytest.fixture(autouse=True)
def _own_table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(backends, "_backends", dict(backends._backends))
    yield
    Huddle.tables.clear()


def huddled(fn: Callable[[Group], None], size: int = 2) -> None:
    """Run ``fn`` on ranks as threads, over a group of that engine."""
    register_backend("huddle", HUDDLE)
    store = HashStore()

    def one_rank(threads: Group) -> None:
        with new_group("huddle", SOON, store=store, rank=threads.rank(), world_size=size) as group:
            fn(group)

    run_ranks(size, one_rank)


# -- they carry paceline ---------------------------------------------------------------------------


def train(group: Group) -> None:
    """Three steps of a wrapped model, and the averages that must come out."""
    model = seeded(mlp)
    ddp = DDP(model, process_group=group, bucket_cap_mb=0.0001)  # several buckets
    for step in range(3):

        def backward(local: nn.Module, rank: int, step: int = step) -> None:
            local(batch(rank, step)).square().mean().backward()

        ddp.zero_grad()
        expected = mean_grads(ddp.module, group.size(), backward)
        backward(ddp, group.rank())
        found = grads_of(ddp.module)
        for name, grad in expected.items():
            assert_close(found[name], grad, msg=lambda text, name=name: f"{name}: {text}")
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.1 * param.grad


def over_letters(_: Meeting) -> tuple[str, bool]:
    register_backend("letters", LETTERS)
    with new_group("letters", SOON, stamp="a") as group:  # over the TCP store of the ranks
        check_all_collectives(group)
        train(group)
        pair = group.split([1, 0])
        assert pair is not None
        with pair:
            tensor = torch.tensor([float(pair.rank())])
            pair.broadcast(tensor, 0)
            assert tensor.item() == 0
            assert pair.options.backend_options == {"stamp": "a"}
        return group.backend, group.capabilities.averages


def test_an_engine_over_a_store_carries_every_collective_and_a_wrapped_model() -> None:
    assert spawn_ranks(2, over_letters) == [("letters", True)] * 2


def test_an_engine_that_only_runs_and_only_adds_carries_them_too() -> None:
    def one_rank(group: Group) -> None:
        check_all_collectives(group, without=("transfers",))
        train(group)
        assert not any("avg" in line for line in group._engine.log)  # type: ignore[attr-defined]

    huddled(one_rank)


def test_a_reduction_that_an_engine_lacks_is_refused_before_anything_is_sent() -> None:
    def one_rank(group: Group) -> None:
        with pytest.raises(CollectiveArgumentError, match="huddle can reduce"):
            group.all_reduce(torch.ones(3), ReduceOp.AVG)
        with pytest.raises(CollectiveArgumentError, match="huddle can reduce"):
            group.all_reduce(torch.ones(3, dtype=torch.int16))
        tensor = torch.ones(3)
        group.all_reduce(tensor)
        assert tensor.tolist() == [2.0] * 3

    huddled(one_rank)


def test_a_work_of_an_engine_that_starts_nothing_is_done_and_has_its_tensors() -> None:
    def one_rank(group: Group) -> None:
        tensor = torch.full((2,), float(group.rank()))
        work = group.allreduce([tensor])
        assert work.is_completed()
        assert work.result()[0] is tensor
        assert work.get_future().wait()[0].tolist() == [1.0, 1.0]

    huddled(one_rank)


def test_groups_of_such_an_engine_split() -> None:
    def one_rank(group: Group) -> None:
        part = group.split([[0, 2], [1]])
        assert part is not None
        with part:
            tensor = torch.tensor([1.0 + group.rank()])
            part.all_reduce(tensor)
            assert tensor.item() == (2 if group.rank() == 1 else 4)
            assert part.backend == "huddle"

    huddled(one_rank, 3)


def test_a_rank_that_fails_frees_the_others_through_the_engines_abort() -> None:
    def one_rank(group: Group) -> None:
        if group.rank() == 0:
            group.abort()
        else:
            with pytest.raises(threading.BrokenBarrierError):
                group.barrier()

    huddled(one_rank)


# -- what the registration says --------------------------------------------------------------------


def lonely(backend: str, size: int = 1, **options: object) -> Group:
    return new_group(backend, SOON, store=HashStore(), rank=0, world_size=size, **options)  # type: ignore[arg-type]


def test_the_registration_says_which_options_and_how_many_ranks() -> None:
    register_backend("letters", LETTERS)
    with pytest.raises(UnexpectedOptionError, match="mystery"):
        lonely("letters", mystery=1)
    with pytest.raises(EngineUnavailableError, match="4 ranks, and it takes 3"):
        lonely("letters", size=4)
    with pytest.raises(BackendTakenError):
        register_backend("letters", LETTERS)


def test_one_engine_may_be_registered_under_two_names() -> None:
    register_backend("letters", LETTERS)
    register_backend("express", LETTERS)
    with lonely("express") as group, lonely("letters") as other:
        assert (group.options.backend, other.options.backend) == ("express", "letters")


def test_the_list_of_backends_has_it_with_its_reason() -> None:
    register_backend("letters", EngineBackend(open_letters))
    no = Availability(False, "no stamps here")
    register_backend("express", EngineBackend(open_letters, availability=lambda: no))
    found = paceline.groups.capabilities()
    assert found["letters"] == Availability(True)
    assert found["express"] == no


# -- nobody tells engines apart by their names ---------------------------------------------------

PACKAGE = Path(paceline.__file__).parent
NAMES = frozenset({"shm", "gloo", "nccl", "hybrid", "fake", "threads"})
MAY_NAME = {
    "groups/engines/": "the engines themselves, and which of them auto takes",
    "_transport/": "errors of the shared memory engine's own bytes say whose they are",
    "cli/demo/": "users choose by name, and torch's gloo is what the demo compares with",
    "cli/doctor/": "tells users by name what auto would take",
    "cli/run/start.py": "names that --backend takes",
    "cli/sharing.py": "the same",
    "groups/torch_init.py": "what scripts that are written for torch ask for",
    "compiled/explain.py": "opens a fake group to plan with",
    "compiled/objects.py": "opens a fake group to make types of",
    "_torch/nccl.py": "torch's names for its NCCL engines",
    "ddp/logging_data.py": "torch's logging data has fields named after gloo and nccl",
    "testing.py": "run_ranks opens threads groups",
}


@functools.cache
def sources() -> Sequence[tuple[str, ast.AST]]:
    """Every file that has such a name, or the word Engine, in it."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
    words = ("Engine", *(f'"{name}"' for name in NAMES))
    return [
        (path.relative_to(PACKAGE).as_posix(), ast.parse(text))
        for path, text in texts.items()
        if any(word in text for word in words)
    ]


def named(tree: ast.AST) -> list[tuple[int, str]]:
    """Where a name of ours stands as a string of its own."""
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return [(node.lineno, node.value) for node in found if node.value in NAMES]


def classes_asked(tree: ast.AST) -> list[tuple[int, str]]:
    """Where something is asked whether it is an engine of some class."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "type"):
            asked = [n.id for n in ast.walk(node) if isinstance(n, ast.Name)]
            found += [(node.lineno, name) for name in asked if name.endswith("Engine")]
    return found


def test_only_engines_and_those_who_must_name_an_engine() -> None:
    elsewhere = [
        f"{path}:{line}: {name!r}; ask group.capabilities instead"
        for path, tree in sources()
        for line, name in named(tree)
        if not any(path.startswith(start) for start in MAY_NAME)
    ]
    assert elsewhere == []


def test_whoever_may_name_an_engine_does() -> None:
    naming = [path for path, tree in sources() if named(tree)]
    assert [s for s in MAY_NAME if not any(path.startswith(s) for path in naming)] == []


def test_nobody_asks_for_the_class_of_an_engine() -> None:
    assert [(path, *found) for path, tree in sources() for found in classes_asked(tree)] == []


def test_a_comparison_of_names_and_a_question_for_a_class_are_found() -> None:
    tree = ast.parse('if group.backend in ("x", "shm"): isinstance(engine, (int, ShmEngine))')
    assert named(tree) == [(1, "shm")]
    assert classes_asked(tree) == [(1, "ShmEngine")]
