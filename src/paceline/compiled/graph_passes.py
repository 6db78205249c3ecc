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


def inductor_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options for Inductor: those ``given``, and our passes over every graph before it is built."""
    return inductor.with_pass_over_graphs(given, _change, _fingerprint())


def _change(graph: Graph) -> None:
    channels_last.order_convolutions(graph)
    schedule.launch_early(graph)


@cache
def _fingerprint() -> str:
    """Another one when the code of the passes is another."""
    files = [Path(str(module.__file__)) for module in (channels_last, schedule)]
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
