"""Collectives of plain objects, without pickle (``_transport/codec.py`` says what it carries).

An object that cannot be carried is refused on its own rank with its type named; the other ranks get
an error that names that rank, at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._transport import decode, encode
from ..errors import CodecError

if TYPE_CHECKING:
    from .group import Group

_REFUSED = -1


def all_gather_object(group: Group, value: object) -> list[object]:
    """Every rank's object, in the order of ranks."""
    data, refusal = _encoded(group, [value])
    sizes = _sizes(group, data[0], refusal)
    parts = [_room(group, size) for size in sizes]
    group.all_gather(parts, data[0])
    return [_decoded(part) for part in parts]


def broadcast_object(group: Group, value: object, root: int) -> object:
    """The root's object, on every rank."""
    data, refusal = _encoded(group, [value] if group.rank() == root else [None])
    size = _number(group, _REFUSED if refusal else data[0].numel())
    group.broadcast(size, root)
    _raise_refusal(refusal, [root] if int(size.item()) == _REFUSED else [])
    payload = data[0] if group.rank() == root else _room(group, int(size.item()))
    group.broadcast(payload, root)
    return value if group.rank() == root else _decoded(payload)


def gather_object(group: Group, value: object, root: int) -> list[object] | None:
    """Every rank's object on the root, None elsewhere."""
    data, refusal = _encoded(group, [value])
    sizes = _sizes(group, data[0], refusal)
    here = group.rank() == root
    if len(set(sizes)) > 1 and not group.capabilities.checks_agreement:  # gloo, nccl: equal sizes
        everywhere = [_room(group, size) for size in sizes]
        group.all_gather(everywhere, data[0])
        return [_decoded(part) for part in everywhere] if here else None
    parts = [_room(group, size) for size in sizes] if here else []
    group.gather(parts, data[0], root)
    return [_decoded(part) for part in parts] if here else None


def scatter_object(group: Group, values: Sequence[object] | None, root: int) -> object:
    """The root's object for this rank."""
    here = group.rank() == root
    wrong = here and (values is None or len(values) != group.size())
    data, refusal = _encoded(group, list(values or ()) if here and not wrong else [None])
    if wrong:
        found = "none" if values is None else str(len(values))
        refusal = CodecError(f"scatter_object needs one object for each rank, got {found}")
    longest = _REFUSED if refusal else max((d.numel() for d in data), default=0)
    size = _number(group, longest)
    group.broadcast(size, root)
    _raise_refusal(refusal, [root] if int(size.item()) == _REFUSED else [])
    # padded to one size, with the true one in front: not every engine scatters unequal tensors
    room = _room(group, int(size.item()) + 8)
    parts = []
    for item in data if here else ():
        part = torch.zeros_like(room)
        part[:8] = _number(group, item.numel()).view(torch.uint8)
        part[8 : 8 + item.numel()] = item
        parts.append(part)
    group.scatter(room, parts, root)
    return _decoded(room[8 : 8 + int(room[:8].view(torch.int64).item())])


def _encoded(group: Group, values: Sequence[object]) -> tuple[list[Tensor], CodecError | None]:
    try:
        parts = [bytearray(encode(value)) for value in values]
    except CodecError as error:
        return [_room(group, 0)], error
    tensors = [torch.frombuffer(part, dtype=torch.uint8).to(group.device) for part in parts]
    return tensors, None


def _decoded(data: Tensor) -> object:
    return decode(data.cpu().numpy().tobytes())


def _room(group: Group, size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=group.device)


def _number(group: Group, value: int) -> Tensor:
    return torch.tensor([value], dtype=torch.int64, device=group.device)


def _sizes(group: Group, data: Tensor, refusal: CodecError | None) -> list[int]:
    own = _number(group, _REFUSED if refusal else data.numel())
    sizes = torch.empty(group.size(), dtype=torch.int64, device=group.device)
    group.all_gather_single(sizes, own)
    listed = [int(size) for size in sizes.tolist()]
    _raise_refusal(refusal, [r for r, size in enumerate(listed) if size == _REFUSED])
    return listed


def _raise_refusal(own: CodecError | None, ranks: Sequence[int]) -> None:
    if own is not None:
        raise own
    if ranks:
        names = ", ".join(map(str, ranks))
        raise CodecError(f"rank {names} has an object of an unsupported type; its error says which")
