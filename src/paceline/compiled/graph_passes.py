"""What Inductor does with every graph of a compiled step before it builds code."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch.fx import Graph

from .._torch import inductor
from . import channels_last, schedule

# Both would move gradients of weights away from where autograd computes them, in many models to the
# end: the first puts what has one use right before it (Inductor takes a whole step for inference,
# since there is no autograd left in it), the second looks for the order with the least memory.
AS_WRITTEN = {"reorder_for_locality": False, "reorder_for_peak_memory": False}


def inductor_options(given: Mapping[str, Any], *, launches: bool = False) -> dict[str, Any]:
    """Options for Inductor: those ``given``, and our passes over every graph before it is built.

    ``launches``: buckets are sent off in the graph, so gradients have to come one after the other.
    """
    options = {**AS_WRITTEN, **given} if launches else given
    return inductor.with_pass_over_graphs(options, _change, _fingerprint())


def _change(graph: Graph) -> None:
    channels_last.order_convolutions(graph)
    schedule.launch_early(graph)


@cache
def _fingerprint() -> str:
    """Another one when the code of the passes is another."""
    files = [Path(str(module.__file__)) for module in (channels_last, schedule)]
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
