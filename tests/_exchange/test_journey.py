"""A buffer on its way along a route."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from torch.distributed import Work

from paceline._exchange.journey import Journey


def test_what_a_route_raises_is_raised_by_every_wait() -> None:
    def steps() -> Iterator[Sequence[Work]]:
        yield ()
        raise OSError("the second stage cannot start")

    journey = Journey(steps())
    for _ in range(2):  # an iterator that has raised has ended
        with pytest.raises(OSError, match="second stage"):
            journey.wait()
