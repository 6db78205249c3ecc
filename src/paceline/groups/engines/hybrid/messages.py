"""Transfers between two ranks of a hybrid group.

All go through gloo, also between ranks of a host: a recv from any source could not watch both. A
header says how much comes, of what type, and under which tag of its own, so that gloo never gets to
see a size that does not fit.
"""

from __future__ import annotations

import itertools
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import Work as TorchWork

from ...._torch.c10d import source_rank
from ...._transport import DTYPE_CODES
from ....errors import CollectiveArgumentError, MismatchError
from ...engine import Call
from ...work import Together, Watcher, Work
from .calls import DTYPES, as_bytes
from .steps import Steps

_TAGS = 1 << 30  # a user's tags are even ones of gloo's, payloads have the odd ones


class Messages:
    """Sends and receives of one rank."""

    def __init__(self, steps: Steps, watcher: Watcher) -> None:
        self._steps, self._rank, self._watcher = steps, steps.hosts.rank, watcher
        self._slots = itertools.count()

    def send(self, call: Call) -> Work:
        data = as_bytes(call.inputs[0])
        slot = next(self._slots) % _TAGS
        header = torch.tensor([data.numel(), DTYPE_CODES[call.inputs[0].dtype], slot])
        works = [self._steps.gloo.send(header, call.root, 2 * self._tag(call))]
        if data.numel():
            works.append(self._steps.gloo.send(data, call.root, 2 * slot + 1))
        return Together(works, call.inputs, self._watcher)

    def expect(self, call: Call) -> tuple[Tensor, TorchWork]:
        header = torch.empty(3, dtype=torch.int64)
        return header, self._steps.gloo.recv(header, call.root, 2 * self._tag(call))

    def receive(self, call: Call, expected: tuple[Tensor, TorchWork]) -> None:
        header, work = expected
        work.wait(timedelta(seconds=call.timeout))
        source = source_rank(work) if call.root < 0 else call.root
        result = call.outputs[0]
        count, dtype, slot = header.tolist()
        fits = count == result.nbytes and dtype == DTYPE_CODES[result.dtype]
        data = as_bytes(result) if fits else torch.empty(count, dtype=torch.uint8)
        if count:
            self._steps.gloo.recv(data, source, 2 * slot + 1).wait(timedelta(seconds=call.timeout))
        call.root = source
        if not fits:
            raise MismatchError(
                self._rank,
                call.sequence,
                source,
                f"send({count} bytes of {DTYPES[dtype]})",
                self._rank,
                f"recv({result.nbytes} bytes of {result.dtype})",
            )

    def _tag(self, call: Call) -> int:
        if not 0 <= call.tag < _TAGS:
            expected, found = f"one below {_TAGS}", str(call.tag)
            raise CollectiveArgumentError(self._rank, call.kind, "tag", expected, found)
        return call.tag
