"""How one rank's state comes to others: plain data first, then all tensors in large pieces.

Every rank of the group takes part; those that need no state pass the pieces on and keep nothing.
What was received lies in memory of its own until its digests are found right, so a copy that is
interrupted leaves a rank's state as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any, cast

import torch
from torch import Tensor

from .._transport import decode, encode
from ..errors import StateCopyError
from ..groups import Group, ReduceOp
from .digests import digests
from .state import JobState

_PIECE = 16 * 1024 * 1024  # bytes
_ALIGN = 64


def hand_over(group: Group, root: int, state: JobState | None, *, wanted: bool) -> JobState | None:
    """Give the root's ``state`` to the ranks that want it, which get it; all ranks call it."""
    said = _tell_head(group, root, state)
    if state is not None:
        _send(group, root, [_flat(tensor) for tensor in state.tensors.values()])
        group.broadcast_object(dict(state.digests), root)  # made while the others make theirs
        _agree(group, [])
        return None
    tensors = [_room(row, group.device) for row in said["tensors"]] if wanted else []
    sizes = [row[3] for row in said["tensors"]]
    _receive(group, root, sizes, [_flat(tensor) for tensor in tensors])
    named = {row[0]: tensor for row, tensor in zip(said["tensors"], tensors, strict=False)}
    mine, theirs = digests(named), cast("dict[str, int]", group.broadcast_object(None, root))
    _agree(group, [name for name, number in mine.items() if number != theirs.get(name)])
    return JobState(said["steps"], said["plain"], named, mine) if wanted else None


def _tell_head(group: Group, root: int, state: JobState | None) -> dict[str, Any]:
    """What the root has besides tensors, and which tensors; checked before anybody relies on it."""
    mine = encode(_head(state)) if state is not None else b""
    given = [blake2b(mine, digest_size=16).digest(), mine] if state is not None else None
    number, data = cast("list[bytes]", group.broadcast_object(given, root))
    right = blake2b(data, digest_size=16).digest() == number
    _agree(group, [] if right else ["the description of the state"])
    return cast("dict[str, Any]", decode(data))


def _head(state: JobState) -> dict[str, Any]:
    rows = [
        [name, t.dtype, list(t.shape), t.nbytes, t.device.type] for name, t in state.tensors.items()
    ]
    return {"steps": state.steps, "plain": state.plain, "tensors": rows}


def _room(row: Sequence[Any], home: torch.device) -> Tensor:
    _, dtype, shape, _, kind = row
    return torch.empty(shape, dtype=dtype, device="cpu" if kind == "cpu" else home)


def _flat(tensor: Tensor) -> Tensor:
    """A tensor's bytes; a view where it lies in one piece."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.contiguous().reshape(-1).view(torch.uint8)


def _pieces(sizes: Sequence[int]) -> Iterator[list[tuple[int, int, int, int]]]:
    """What goes into each piece: number of the tensor, from where to where, and at which place."""
    piece: list[tuple[int, int, int, int]] = []
    place = 0
    for number, size in enumerate(sizes):
        start = 0
        while start < size:
            stop = min(size, start + _PIECE - place)
            piece.append((number, start, stop, place))
            place += -(-(stop - start) // _ALIGN) * _ALIGN
            start = stop
            if place >= _PIECE:
                yield piece
                piece, place = [], 0
    if piece:
        yield piece


def _length(piece: Sequence[tuple[int, int, int, int]]) -> int:
    _, start, stop, place = piece[-1]
    return place + stop - start


def _send(group: Group, root: int, tensors: Sequence[Tensor]) -> None:
    buffer = _buffer(group, [t.numel() for t in tensors])
    for piece in _pieces([t.numel() for t in tensors]):
        for number, start, stop, place in piece:
            buffer[place : place + stop - start].copy_(tensors[number][start:stop])
        group.broadcast(buffer[: _length(piece)], root)


def _receive(group: Group, root: int, sizes: Sequence[int], tensors: Sequence[Tensor]) -> None:
    buffer = _buffer(group, sizes)
    for piece in _pieces(sizes):
        group.broadcast(buffer[: _length(piece)], root)
        for number, start, stop, place in piece if tensors else ():
            tensors[number][start:stop].copy_(buffer[place : place + stop - start])


def _buffer(group: Group, sizes: Sequence[int]) -> Tensor:
    padded = sum(-(-size // _ALIGN) * _ALIGN for size in sizes)
    return group.allocate(min(_PIECE, padded), torch.uint8)


def _agree(group: Group, wrong: Sequence[str]) -> None:
    """Raise on every rank if one has received something else than was sent."""
    bad = torch.tensor([len(wrong)], dtype=torch.int64, device=group.device)
    group.all_reduce(bad, ReduceOp.MAX)
    if int(bad):
        raise StateCopyError(group.rank(), list(wrong))
