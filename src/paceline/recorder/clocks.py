"""How far this rank's clock is from rank 0's."""

from __future__ import annotations

import msgspec

from . import events
from .peers import peers
from .places import machine


def offset(board: events.Board) -> float:
    """Seconds to add to this rank's times to be on rank 0's clock.

    0 on one host, and where rank 0 cannot be asked (any more).
    """
    if board.rank == 0:
        return 0.0
    address = peers.known(board, 1.0).get(0)
    if address is None or address.machine == machine():
        return 0.0
    try:
        return peers.clock(address)
    except (OSError, msgspec.DecodeError):
        return 0.0
