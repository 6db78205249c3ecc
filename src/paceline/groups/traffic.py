"""How much a rank has put on the wire through a group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

# For N ranks and b bytes given by this one: what it has to send, at least, on average over ranks.
# The first number counts whole messages to each peer, the second 1/N-th parts to each.
_SHARES: Mapping[str, tuple[int, int]] = {
    "all_reduce": (0, 2),
    "reduce": (0, 1),
    "broadcast": (0, 1),
    "all_gather": (1, 0),
    "all_gather_single": (1, 0),
    "gather": (0, 1),
    "scatter": (0, 1),
    "reduce_scatter": (0, 1),
    "reduce_scatter_single": (0, 1),
    "all_to_all": (0, 1),
    "all_to_all_single": (0, 1),
    "send": (1, 0),
}


class Traffic:
    """The calls and bytes that this rank has sent in a group, counted when a call is made.

    Bytes are computed for the algorithm that sends the least (an all-reduce sends ``2 (N-1)/N`` of
    the payload, an all-gather sends it to ``N-1`` ranks), whichever one the engine uses.
    """

    __slots__ = ("_shares", "calls", "sent")

    def __init__(self, ranks: int) -> None:
        self.calls = 0
        self.sent: defaultdict[str, float] = defaultdict(float)  # bytes, for each kind of call
        self.resize(ranks)

    def resize(self, ranks: int) -> None:
        """Set the number of ranks for later calls."""
        self._shares = {kind: share(kind, ranks) for kind in _SHARES}

    def note(self, kind: str, nbytes: int) -> None:
        """Count a call of ``kind`` with this many bytes of payload."""
        self.calls += 1
        self.sent[kind] += nbytes * self._shares.get(kind, 0)

    @property
    def by_kind(self) -> dict[str, float]:
        """Return the bytes sent, for each kind of call."""
        return dict(self.sent)

    @property
    def bytes_sent(self) -> float:
        """The total number of bytes sent."""
        return sum(self.sent.values())

    def reset(self) -> None:
        """Set all counts to zero."""
        self.calls = 0
        self.sent.clear()

    def __repr__(self) -> str:
        return f"Traffic({self.calls} calls, {self.bytes_sent:.0f} bytes sent)"


def share(kind: str, ranks: int) -> float:
    """What a rank of ``ranks`` sends for each byte it gives to a call of ``kind``."""
    if kind == "send":
        return 1.0
    whole, parts = _SHARES.get(kind, (0, 0))
    return (ranks - 1) * (whole + parts / ranks)
