"""Checks once, at construction, that all ranks have the same model, and broadcasts rank 0's."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch import foreach
from ..errors import ModelMismatchError, WrapperMismatchError
from ..groups import Group
from ..policies import MIB, Reduction

CHUNK_BYTES = 1024 * 1024


def describe(tensors: Mapping[str, Tensor]) -> list[str]:
    """One line for each tensor, with all that must be the same on every rank."""
    return [
        f"{name} {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        + ("" if tensor.requires_grad else " frozen")
        for name, tensor in tensors.items()
    ]


def arguments(policy: Reduction, *, syncs_buffers: bool) -> dict[str, str]:
    """What a wrapper was given that must be the same on every rank, by torch's names."""
    caps = policy.caps
    chosen = caps.first_bucket_bytes_cap >= caps.bucket_bytes_cap
    sizes = [f"{cap / MIB:g}" for cap in caps.per_bucket_bytes_caps]
    return {
        "bucket_cap_mb": f"{caps.bucket_bytes_cap / MIB:g}" if chosen else "None",
        "bucket_cap_mb_list": f"[{', '.join(sizes)}]" if sizes else "None",
        "find_unused_parameters": str(policy.find_unused),
        "static_graph": str(policy.static_graph),
        "skip_all_reduce_unused_params": str(policy.skip_unused),
        "mixed_precision": f"reduced as {policy.dtype}" if policy.dtype else "None",
        "forward_sync_buffers": str(syncs_buffers),
        "lazy_bucket_allocation": str(policy.lazy),
        "shards": str(policy.shards),
    }


def verify(
    group: Group, lines: Sequence[str], given: Mapping[str, str], device: torch.device
) -> None:
    """Raise on every rank, naming what differs, unless all have the same ``lines`` and ``given``.

    One small all-gather when all is well.
    """
    words = [*(f"{name}={value}" for name, value in given.items()), *lines]
    digest = hashlib.sha256("\n".join(words).encode()).digest()
    mine = torch.tensor(list(digest), dtype=torch.uint8, device=device)
    gathered = [torch.empty_like(mine) for _ in range(group.size())]
    group.all_gather(gathered, mine)
    digests = torch.stack(gathered).cpu()
    other = next((r for r in range(group.size()) if not digests[r].equal(digests[0])), None)
    if other is None:
        return
    found: Any = group.all_gather_object([list(lines), dict(given)])
    (model, ours), (another, theirs) = found[0], found[other]
    if ours != theirs:
        given = {
            name: f"{ours[name]} on rank 0 and {theirs[name]} on rank {other}"
            for name in ours
            if ours[name] != theirs[name]
        }
        raise WrapperMismatchError(group.rank(), other, given)
    raise ModelMismatchError(group.rank(), other, differences(model, another))


def differences(ours: Sequence[str], theirs: Sequence[str]) -> list[str]:
    """The differences between two descriptions, one sentence each."""
    if len(ours) != len(theirs):
        here = next(
            (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
            min(len(ours), len(theirs)),
        )
        a = ours[here] if here < len(ours) else "nothing"
        b = theirs[here] if here < len(theirs) else "nothing"
        return [f"{len(ours)} parameters against {len(theirs)}, number {here} is {a} against {b}"]
    return [
        f"parameter {i} is {a} against {b}"
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True))
        if a != b
    ]


def broadcast(group: Group, tensors: Sequence[Tensor], root: int, chunk: int = CHUNK_BYTES) -> None:
    """Give every rank the root's values: large tensors as they are, small ones in one message.

    A message of all of them would need as much memory again.
    """
    with torch.no_grad():
        for part in _chunks([t.detach() for t in tensors], min(chunk, CHUNK_BYTES)):
            if len(part) == 1 and part[0].is_contiguous():
                group.broadcast(part[0], root)
                continue
            flat = torch.cat([t.reshape(-1) for t in part])
            group.broadcast(flat, root)
            if group.rank() != root:
                pieces = flat.split([t.numel() for t in part])
                foreach.copy_(part, [p.view(t.shape) for p, t in zip(pieces, part, strict=True)])


def _chunks(tensors: Sequence[Tensor], limit: int) -> Iterator[list[Tensor]]:
    open_: dict[object, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        if tensor.nbytes >= limit:
            yield [tensor]
            continue
        kind = tensor.dtype, tensor.device
        chunk = open_.setdefault(kind, [])
        chunk.append(tensor)
        if sum(t.nbytes for t in chunk) >= limit:
            yield open_.pop(kind)
    yield from open_.values()
