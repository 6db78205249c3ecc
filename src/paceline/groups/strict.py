"""Strict groups: every collective is made from the same line on all ranks, or it is an error.

Two calls of equal kind and size that one rank makes in another order fit together for every engine,
and each gets the other's numbers. By default the recorder notices it afterwards and says so. In a
strict group the ranks compare their lines before each call: one small all-gather more, and a
started call waits for the other ranks to make it too. It is meant for finding a mistake.
"""

from __future__ import annotations

import hashlib
import os
import sys
from typing import Literal

import torch
from torch.distributed import Store

from ..errors import MismatchError, RendezvousError
from ..recorder import events
from .engine import Call, Engine

Checks = Literal["off", "warn", "strict"]
CHECKS = ("off", "warn", "strict")
_ANYWHERE = 0  # in the place of a line
_TEXT = 192  # bytes of a line and a call, in words


def check_setting(checks: str, store: Store, rank: int, size: int) -> None:
    """Refuse an invalid setting, and a group that is strict on some ranks only."""
    if checks not in CHECKS:
        raise RendezvousError(f"checks is {checks!r}", f"Give one of {', '.join(CHECKS)}.", rank)
    store.set(f"checks/{rank}", checks)
    if checks != "strict":
        return
    chosen = {r: store.get(f"checks/{r}").decode() for r in range(size)}
    if set(chosen.values()) != {"strict"}:
        raise RendezvousError(
            f"the ranks gave different options, checks by rank: {chosen}",
            "Give every rank the same.",
            rank,
        )


def agree(call: Call, engine: Engine, rank: int, size: int, *, anywhere: bool = False) -> None:
    """Return once all ranks make a call from this line; raise on all if one makes another.

    ``anywhere``: the library makes the call on this rank, whose line is another than that of ranks
    that do the same.
    """
    line = events.line_of(*events.caller(sys._getframe(1)))
    what = _digest(f"{call.kind} {call.reduction} {call.root}")
    where = _ANYWHERE if anywhere else _digest(os.path.basename(line))
    numbers = _gather(torch.tensor([what, where]), call, engine, size)
    if (differing := _differing(numbers)) is None:
        return
    one, other = differing
    said = f"{_words(call)}\0{line}".encode()[:_TEXT].ljust(_TEXT, b"\0")
    texts = _gather(torch.frombuffer(bytearray(said), dtype=torch.uint8), call, engine, size)
    (call_a, line_a), (call_b, line_b) = (_read(texts[r]) for r in (one, other))
    at = (rank, call.sequence, one, call_a, other, call_b)
    raise MismatchError(*at, line_a=line_a, line_b=line_b)


def _digest(text: str) -> int:
    return 1 + int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def _differing(numbers: torch.Tensor) -> tuple[int, int] | None:
    """Two ranks that make different calls, by what each calls and where; None if none do."""
    what, where = numbers.T
    told = where != _ANYWHERE
    one = int(told.int().argmax())  # 0 if nobody tells
    differs = (what != what[one]) | (told & (where != where[one]))
    return (one, int(differs.int().argmax())) if bool(differs.any()) else None


def _gather(own: torch.Tensor, call: Call, engine: Engine, size: int) -> torch.Tensor:
    """Every rank's numbers, by rank."""
    tensors = (*call.inputs, *call.outputs)
    fallback = "cpu" if "cpu" in engine.capabilities.devices else "cuda"
    device = tensors[0].device if tensors else torch.device(fallback)
    own = own.to(device)
    gathered = own.new_empty(size * own.numel())
    engine.run(
        Call(
            "all_gather_single",
            (own,),
            (gathered,),
            timeout=call.timeout,
            sequence=call.sequence,
        )
    )
    return gathered.cpu().view(size, -1)


def _words(call: Call) -> str:
    tensors = call.inputs or call.outputs
    parts = [f"{tensors[0].numel()} x {tensors[0].dtype}"] if tensors else []
    parts += [call.reduction.upper()] if call.reduction else []
    parts += [f"root {call.root}"] if call.root >= 0 else []
    return f"{call.kind}({', '.join(parts)})"


def _read(row: torch.Tensor) -> tuple[str, str]:
    call, _, line = bytes(row.tolist()).rstrip(b"\0").partition(b"\0")
    return call.decode(errors="replace"), line.decode(errors="replace") or "no line of yours"
