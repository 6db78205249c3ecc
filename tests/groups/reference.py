"""What every collective must give, in plain torch from all ranks' inputs; and a check of them all.

The functions of the first part know nothing of groups. :func:`check_all_collectives` is called on
every rank, inside it, by the tests of each backend.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)
from torch.distributed import ReduceOp
from torch.distributed import Work as TorchWork
from torch.testing import assert_close

from paceline.groups import Group

# What must come out, by rank where it differs by rank.


def reduced(inputs: Sequence[Tensor], reduction: str) -> Tensor:
    """Element by element, in 64 bits, rounded once."""
    dtype = inputs[0].dtype
    if dtype is torch.bool:  # a sum is "any", a product is "all"
        names = {"sum": "bor", "max": "bor", "product": "band", "min": "band"}
        return _folded(inputs, names.get(reduction, reduction))
    wide = torch.complex128 if dtype.is_complex else torch.float64
    if not dtype.is_complex and not dtype.is_floating_point:
        wide = torch.int64
    total = _folded([t.to(wide) for t in inputs], "sum" if reduction == "avg" else reduction)
    if reduction == "avg":
        rounding = "trunc" if wide is torch.int64 else None
        total = torch.div(total, len(inputs), rounding_mode=rounding)
    return total.to(dtype)


def _folded(inputs: Sequence[Tensor], reduction: str) -> Tensor:
    steps = {
        "sum": torch.add,
        "product": torch.mul,
        "min": torch.minimum,
        "max": torch.maximum,
        "band": torch.bitwise_and,
        "bor": torch.bitwise_or,
        "bxor": torch.bitwise_xor,
    }
    return functools.reduce(steps[reduction], inputs)


def all_reduce(inputs: Sequence[Tensor], reduction: str) -> list[Tensor]:
    return [reduced(inputs, reduction)] * len(inputs)


def reduce(inputs: Sequence[Tensor], reduction: str, root: int) -> list[Tensor]:
    return [reduced(inputs, reduction) if r == root else t for r, t in enumerate(inputs)]


def reduce_scatter(inputs: Sequence[Sequence[Tensor]], reduction: str) -> list[Tensor]:
    """``inputs[s][d]`` is what rank s has for rank d."""
    return [reduced(column, reduction) for column in zip(*inputs, strict=True)]


def broadcast(inputs: Sequence[Tensor], root: int) -> list[Tensor]:
    return [inputs[root]] * len(inputs)


def all_gather(inputs: Sequence[Tensor]) -> list[list[Tensor]]:
    return [list(inputs)] * len(inputs)


def gather(inputs: Sequence[Tensor], root: int) -> list[list[Tensor]]:
    return [list(inputs) if r == root else [] for r in range(len(inputs))]


def scatter(inputs: Sequence[Tensor]) -> list[Tensor]:
    """``inputs`` are the root's."""
    return list(inputs)


def all_to_all(inputs: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """``inputs[s][d]`` is what rank s has for rank d."""
    return [list(column) for column in zip(*inputs, strict=True)]


# Inputs that every rank can compute for all ranks.

REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
COMPLEX = (torch.complex64, torch.complex128)
REDUCIBLE = (*FLOATS, *INTEGERS, *UNSIGNED, *COMPLEX, torch.bool)
SOME = (torch.float32, torch.bfloat16, torch.int64, torch.bool)


def values(rank: int, shape: int | Sequence[int], dtype: torch.dtype, salt: int = 0) -> Tensor:
    """Small numbers, different by rank and place; sums and products over few ranks are exact."""
    size = torch.Size([shape] if isinstance(shape, int) else shape)
    whole = (torch.arange(size.numel()).view(size) * (rank + 2) + 3 * rank + salt) % 7
    if dtype is torch.bool:
        return whole % 2 == 0
    if dtype.is_complex:
        return torch.complex(whole.double() - 2, 1 - whole.double()).to(dtype)
    return (whole if dtype in (torch.uint8, *UNSIGNED) else whole - 2).to(dtype)


def blank(like: Tensor) -> Tensor:
    """Room for a result, with something else in it."""
    return torch.full_like(like, 1)


def same(found: Tensor, expected: Tensor) -> bool:
    """Whether two tensors have the same bits."""
    a, b = found.contiguous().view(-1), expected.contiguous().view(-1)
    return (
        found.dtype == expected.dtype
        and found.shape == expected.shape
        and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    )


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor], about: object = "") -> None:
    """What was only moved must not have changed."""
    assert len(found) == len(expected), about
    for f, e in zip(found, expected, strict=True):
        assert same(f, e), (about, f, e)


def assert_reduced(found: Tensor, expected: Tensor, about: object = "") -> None:
    """What was reduced may be rounded differently, if there is anything to round."""
    assert_close(found, expected, equal_nan=True, msg=lambda text: f"{about}: {text}")


# How a collective is called.


class Form:
    """Sync, async, or as torch calls: with lists and options, and a work that is waited for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.torch_style = name == "torch"
        self.options = {"async_op": True} if name == "async" else {}

    def one(self, tensor: Tensor) -> Tensor | list[Tensor]:
        return [tensor] if self.torch_style else tensor

    def many(self, tensors: Sequence[Tensor]) -> list[Tensor] | list[list[Tensor]]:
        nested = [list(tensors)] if tensors else []
        return nested if self.torch_style else list(tensors)

    def end(self, work: TorchWork) -> None:
        assert work.wait()
        assert work.is_completed()

    def __repr__(self) -> str:
        return self.name


FORMS = [Form("sync"), Form("async"), Form("torch")]


def _op(reduction: str) -> ReduceOp:
    return getattr(ReduceOp, reduction.upper())


def _options(options: object, **fields: object) -> object:
    for name, value in fields.items():
        setattr(options, name, value)
    options.asyncOp = True
    return options


# The checks. Each takes (group, form) and covers sizes, types and roots.


def check_all_reduce(group: Group, form: Form) -> None:
    n, me = group.size(), group.rank()
    plenty = [(d, (2, 3)) for d in REDUCIBLE] + [(torch.float32, s) for s in (0, (), 1, 3001)]
    for dtype, shape in plenty:
        for reduction in REDUCTIONS:
            if not group._engine.reduces(dtype, reduction):
                continue
            inputs = [values(r, shape, dtype) for r in range(n)]
            tensor = inputs[me].clone()
            if form.torch_style:
                work = group.allreduce(
                    [tensor], _options(AllreduceOptions(), reduceOp=_op(reduction))
                )
            else:
                work = group.all_reduce(tensor, _op(reduction), **form.options)
            form.end(work)
            assert_reduced(tensor, all_reduce(inputs, reduction)[me], (dtype, shape, reduction))


def check_premul_sum(group: Group, form: Form) -> None:
    inputs = [values(r, 5, torch.float32) for r in range(group.size())]
    tensor = inputs[group.rank()].clone()
    op = torch.distributed._make_nccl_premul_sum(0.5)
    form.end(group.all_reduce(tensor, op, **form.options))
    assert_reduced(tensor, 0.5 * reduced(inputs, "sum"))


def check_sparse_all_reduce(group: Group, form: Form) -> None:
    dense = [values(r, (4, 3), torch.float32) for r in range(group.size())]
    tensor = dense[group.rank()].to_sparse()
    form.end(group.all_reduce(form.one(tensor), ReduceOp.SUM))
    assert_reduced(tensor.to_dense(), reduced(dense, "sum"))


def check_reduce(group: Group, form: Form) -> None:
    n, me = group.size(), group.rank()
    for root in range(n):
        for dtype in SOME:
            inputs = [values(r, (3, 2), dtype, root) for r in range(n)]
            tensor = inputs[me].clone()
            if form.torch_style:
                work = group.reduce(
                    [tensor], _options(ReduceOptions(), rootRank=root, reduceOp=_op("sum"))
                )
            else:
                work = group.reduce(tensor, root, ReduceOp.SUM, **form.options)
            form.end(work)
            if me == root:
                assert_reduced(tensor, reduce(inputs, "sum", root)[me], (dtype, root))
            elif group.backend != "nccl":  # which may use it as room
                assert_same([tensor], [inputs[me]], (dtype, root))


def check_broadcast(group: Group, form: Form) -> None:
    n, me = group.size(), group.rank()
    for root in range(n):
        for dtype, shape in [(d, (2, 2)) for d in SOME] + [(torch.float32, 0)]:
            inputs = [values(r, shape, dtype) for r in range(n)]
            tensor = inputs[me].clone()
            if form.torch_style:
                options = _options(BroadcastOptions(), rootRank=root)
                work = group.broadcast([tensor], options)
            else:
                work = group.broadcast(tensor, root, **form.options)
            form.end(work)
            assert_same([tensor], [broadcast(inputs, root)[me]], (dtype, shape, root))


def _all_gather_of(group: Group, form: Form, inputs: Sequence[Tensor]) -> None:
    outputs = [blank(t) for t in inputs]
    arguments = form.many(outputs), form.one(inputs[group.rank()].clone())
    if form.torch_style:
        form.end(group.allgather(*arguments, _options(AllgatherOptions())))
    else:
        form.end(group.all_gather(*arguments, **form.options))
    assert_same(outputs, all_gather(inputs)[group.rank()], inputs[0].dtype)


def check_all_gather(group: Group, form: Form) -> None:
    for dtype in SOME:
        _all_gather_of(group, form, [values(r, (2, 3), dtype) for r in range(group.size())])
    _all_gather_of(group, form, [torch.empty(0)] * group.size())


def check_uneven_all_gather(group: Group, form: Form) -> None:
    inputs = [values(r, r * 3 % 5, torch.float32) for r in range(group.size())]  # rank 0 has none
    _all_gather_of(group, form, inputs)


def check_all_gather_single(group: Group, form: Form) -> None:
    n, me = group.size(), group.rank()
    for dtype, shape in [(d, (2, 3)) for d in SOME] + [(torch.float32, 0)]:
        inputs = [values(r, shape, dtype) for r in range(n)]
        expected = torch.cat(inputs)
        output = blank(expected)
        if form.torch_style:
            work = group._allgather_base(output, inputs[me].clone(), _options(AllgatherOptions()))
        else:
            work = group.all_gather_single(output, inputs[me].clone(), **form.options)
        form.end(work)
        assert_same([output], [expected], (dtype, shape))


def _gather_of(group: Group, form: Form, inputs: Sequence[Tensor], root: int) -> None:
    me = group.rank()
    outputs = [blank(t) for t in inputs] if me == root else []
    arguments = form.many(outputs), form.one(inputs[me].clone())
    if form.torch_style:
        form.end(group.gather(*arguments, _options(GatherOptions(), rootRank=root)))
    else:
        form.end(group.gather(*arguments, root, **form.options))
    assert_same(outputs, gather(inputs, root)[me], root)


def check_gather(group: Group, form: Form) -> None:
    for root in range(group.size()):
        for dtype in SOME:
            inputs = [values(r, (2, 3), dtype) for r in range(group.size())]
            _gather_of(group, form, inputs, root)


def check_uneven_gather(group: Group, form: Form) -> None:
    inputs = [values(r, r * 3 % 5, torch.float32) for r in range(group.size())]
    for root in range(group.size()):
        _gather_of(group, form, inputs, root)


def _scatter_of(group: Group, form: Form, inputs: Sequence[Tensor], root: int) -> None:
    me = group.rank()
    output = blank(inputs[me])
    given = form.many([t.clone() for t in inputs] if me == root else [])
    if form.torch_style:
        form.end(group.scatter([output], given, _options(ScatterOptions(), rootRank=root)))
    else:
        form.end(group.scatter(output, given, root, **form.options))
    assert_same([output], [scatter(inputs)[me]], root)


def check_scatter(group: Group, form: Form) -> None:
    for root in range(group.size()):
        for dtype in SOME:
            inputs = [values(r, (2, 3), dtype, root) for r in range(group.size())]
            _scatter_of(group, form, inputs, root)


def check_uneven_scatter(group: Group, form: Form) -> None:
    inputs = [values(r, r * 3 % 5, torch.float32) for r in range(group.size())]
    for root in range(group.size()):
        _scatter_of(group, form, inputs, root)


def _reduce_scatter_of(
    group: Group, form: Form, inputs: Sequence[Sequence[Tensor]], reduction: str
) -> None:
    me = group.rank()
    output = blank(inputs[me][me])
    given = form.many([t.clone() for t in inputs[me]])
    if form.torch_style:
        options = _options(ReduceScatterOptions(), reduceOp=_op(reduction))
        form.end(group.reduce_scatter([output], given, options))
    else:
        form.end(group.reduce_scatter(output, given, _op(reduction), **form.options))
    assert_reduced(output, reduce_scatter(inputs, reduction)[me], reduction)


def check_reduce_scatter(group: Group, form: Form) -> None:
    ranks = range(group.size())
    for dtype in (*SOME, torch.complex64):
        for reduction in ("sum", "avg", "max"):
            if group._engine.reduces(dtype, reduction):
                inputs = [[values(s, (2, 2), dtype, d) for d in ranks] for s in ranks]
                _reduce_scatter_of(group, form, inputs, reduction)


def check_uneven_reduce_scatter(group: Group, form: Form) -> None:
    ranks = range(group.size())
    inputs = [[values(s, d * 3 % 5, torch.float32, d) for d in ranks] for s in ranks]
    _reduce_scatter_of(group, form, inputs, "sum")


def check_reduce_scatter_single(group: Group, form: Form) -> None:
    n, me = group.size(), group.rank()
    for dtype in (*SOME, torch.complex64):
        for reduction in ("sum", "avg", "min"):
            if not group._engine.reduces(dtype, reduction):
                continue
            inputs = [values(r, (2 * n, 3), dtype) for r in range(n)]
            output = blank(inputs[me][:2])
            if form.torch_style:
                options = _options(ReduceScatterOptions(), reduceOp=_op(reduction))
                work = group._reduce_scatter_base(output, inputs[me].clone(), options)
            else:
                work = group.reduce_scatter_single(
                    output, inputs[me].clone(), _op(reduction), **form.options
                )
            form.end(work)
            expected = reduce_scatter([t.split(2) for t in inputs], reduction)[me]
            assert_reduced(output, expected, (dtype, reduction))


def _all_to_all_of(group: Group, form: Form, inputs: Sequence[Sequence[Tensor]]) -> None:
    me = group.rank()
    expected = all_to_all(inputs)[me]
    outputs = [blank(t) for t in expected]
    given = [t.clone() for t in inputs[me]]
    if form.torch_style:
        form.end(group.alltoall(outputs, given, _options(AllToAllOptions())))
    else:
        form.end(group.all_to_all(outputs, given, **form.options))
    assert_same(outputs, expected)


def check_all_to_all(group: Group, form: Form) -> None:
    ranks = range(group.size())
    for dtype in SOME:
        _all_to_all_of(group, form, [[values(s, (2, 2), dtype, d) for d in ranks] for s in ranks])


def check_uneven_all_to_all(group: Group, form: Form) -> None:
    ranks = range(group.size())
    inputs = [[values(s, (s + 2 * d) % 4, torch.float32, d) for d in ranks] for s in ranks]
    _all_to_all_of(group, form, inputs)


def _all_to_all_single_of(group: Group, form: Form, rows: Callable[[int, int], int]) -> None:
    me, ranks = group.rank(), range(group.size())
    inputs = [[values(s, (rows(s, d), 3), torch.float32, d) for d in ranks] for s in ranks]
    expected = all_to_all(inputs)[me]
    given, output = torch.cat(inputs[me]), blank(torch.cat(expected))
    even = len({rows(s, d) for s in ranks for d in ranks}) == 1
    splits = ([], []) if even else ([len(t) for t in expected], [len(t) for t in inputs[me]])
    if form.torch_style:
        form.end(group.alltoall_base(output, given, *splits, _options(AllToAllOptions())))
    else:
        form.end(group.all_to_all_single(output, given, *splits, **form.options))
    assert_same([output], [torch.cat(expected)])


def check_all_to_all_single(group: Group, form: Form) -> None:
    _all_to_all_single_of(group, form, lambda s, d: 2)


def check_uneven_all_to_all_single(group: Group, form: Form) -> None:
    _all_to_all_single_of(group, form, lambda s, d: (s + 2 * d) % 4)


def check_coalesced(group: Group, form: Form) -> None:
    n, me, f32 = group.size(), group.rank(), torch.float32
    inputs = [[values(r, size, f32) for size in (3, 1, 4)] for r in range(n)]
    columns = list(zip(*inputs, strict=True))
    own = [t.clone() for t in inputs[me]]
    form.end(group.all_reduce_coalesced(own, ReduceOp.SUM, **form.options))
    assert_same(own, [reduced(column, "sum") for column in columns])
    lists = [[blank(t) for t in row] for row in inputs]
    form.end(group.all_gather_coalesced(lists, inputs[me], **form.options))
    for found, row in zip(lists, inputs, strict=True):
        assert_same(found, row)
    flats = [blank(torch.cat(column)) for column in columns]
    form.end(group.all_gather_single_coalesced(flats, inputs[me], **form.options))
    assert_same(flats, [torch.cat(column) for column in columns])
    wide = [[values(r, size * n, f32) for size in (2, 3)] for r in range(n)]
    parts = [torch.ones(2), torch.ones(3)]
    form.end(group.reduce_scatter_single_coalesced(parts, wide[me], ReduceOp.SUM, **form.options))
    sums = [reduced(column, "sum") for column in zip(*wide, strict=True)]
    assert_same(parts, [t.chunk(n)[me] for t in sums])


def check_strided(group: Group, form: Form) -> None:
    """Tensors that are not contiguous, on both sides."""
    n, me, f32 = group.size(), group.rank(), torch.float32
    inputs = [values(r, (4, 3), f32).t() for r in range(n)]
    own = inputs[me].clone(memory_format=torch.preserve_format)
    assert not own.is_contiguous()
    form.end(group.all_reduce(form.one(own), ReduceOp.SUM, **form.options))
    assert_same([own], [reduced(inputs, "sum")])
    outputs = [torch.ones(4, 3).t() for _ in range(n)]
    form.end(group.all_gather(form.many(outputs), form.one(inputs[me]), **form.options))
    assert_same(outputs, inputs)
    room = torch.ones(3, 4, 2)[:, :, 1]
    room.copy_(inputs[me])
    form.end(group.broadcast(form.one(room), n - 1, **form.options))
    assert_same([room], [inputs[n - 1]])


def check_many_in_flight(group: Group, form: Form) -> None:
    n, me, f32 = group.size(), group.rank(), torch.float32
    tensors = [values(me, 10, f32, salt) for salt in range(20)]
    works = [group.all_reduce(form.one(t), ReduceOp.SUM, **form.options) for t in tensors]
    for salt in reversed(range(20)):
        form.end(works[salt])
        expected = reduced([values(r, 10, f32, salt) for r in range(n)], "sum")
        assert_same([tensors[salt]], [expected])


def check_barriers(group: Group, form: Form) -> None:
    if form.torch_style:
        form.end(group.barrier(_options(BarrierOptions())))
    else:
        form.end(group.barrier(**form.options))
    if group.store is not None:
        group.monitored_barrier()


def check_transfers(group: Group, form: Form) -> None:
    """Round the ring, by tags out of order, and from any rank."""
    n, me, f32 = group.size(), group.rank(), torch.float32
    if n == 1:
        return
    onward, back = (me + 1) % n, (me - 1) % n
    sent = [group.send(values(me, 3 + tag, f32, tag), onward, tag, async_op=True) for tag in (1, 2)]
    for tag in (2, 1):
        room = torch.ones(3 + tag)
        work = group.recv(form.one(room), back, tag, **form.options)
        form.end(work)
        assert work.source_rank() == work._source_rank() == back
        assert_same([room], [values(back, 3 + tag, f32, tag)])
    for work in sent:
        work.wait()
    if me != 0:
        group.send(values(me, 4, torch.int64), 0, 7, async_op=True).wait()
    else:
        _receive_from_anybody(group, form)
    group.barrier()


def _receive_from_anybody(group: Group, form: Form) -> None:
    seen = set()
    for _ in range(group.size() - 1):
        room = torch.ones(4, dtype=torch.int64)
        if form.torch_style:
            work = group.recv_anysource([room], 7)
        else:
            work = group.recv(room, None, 7, **form.options)
        form.end(work)
        seen.add(work.source_rank())
        assert_same([room], [values(work.source_rank(), 4, torch.int64)])
    assert seen == set(range(1, group.size()))


def check_objects(group: Group, form: Form) -> None:
    n, me = group.size(), group.rank()
    things = [{"rank": r, "words": ["x" * r, None, 1.5]} for r in range(n)]
    assert group.all_gather_object(things[me]) == things
    for root in range(n):
        assert group.broadcast_object(things[me], root) == things[root]
        assert group.gather_object(things[me], root) == (things if me == root else None)
        assert group.scatter_object(things if me == root else None, root) == things[me]


def check_futures(group: Group, form: Form) -> None:
    tensor = torch.ones(3)
    work = group.all_reduce(tensor, async_op=True)
    (result,) = work.get_future().wait()
    assert_same([result], [torch.full((3,), float(group.size()))])
    assert work.wait()
    if group.backend != "nccl":  # torch's work for it refuses the question
        assert work.is_success()
    assert work.result()[0] is tensor


CHECKS: dict[str, Callable[[Group, Form], None]] = {
    name.removeprefix("check_"): check
    for name, check in list(globals().items())
    if name.startswith("check_") and inspect.isfunction(check)
}


def check_all_collectives(
    group: Group, *, without: Collection[str] = (), only: Collection[str] = ()
) -> None:
    """Assert that every collective gives what it must, sync, async and called as torch calls.

    Every rank of ``group`` calls it. ``without`` and ``only`` name entries of :data:`CHECKS`, for
    engines that lack one.
    """
    assert CHECKS.keys() >= {*without, *only}
    for name, check in CHECKS.items():
        if name in without or (only and name not in only):
            continue
        for form in FORMS:
            try:
                check(group, form)
            except BaseException as error:
                where = f"rank {group.rank()} of {group.size()}, {group.backend}"
                raise AssertionError(f"{where}: {name}, {form}: {error!r}") from error
