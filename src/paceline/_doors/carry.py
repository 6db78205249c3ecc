"""Carries bytes between two connections until either ends, and sees them off."""

from __future__ import annotations

import asyncio
import contextlib

PIECE = 1 << 16
_GOODBYE = 1.0  # seconds to send what is left

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def settle(loop: asyncio.AbstractEventLoop) -> None:
    """Let what opens or closes take the few turns of the loop that it needs."""
    for _ in range(4):
        loop.run_until_complete(asyncio.sleep(0))


async def join(one: Streams, other: Streams) -> None:
    """Carry bytes both ways until either side ends; then both are hung up on."""
    ways = [
        asyncio.ensure_future(_carry(one[0], other[1])),
        asyncio.ensure_future(_carry(other[0], one[1])),
    ]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        await asyncio.gather(_hang_up(one[1]), _hang_up(other[1]))


async def _carry(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await source.read(PIECE):
            target.write(piece)
            await target.drain()


async def _hang_up(writer: asyncio.StreamWriter) -> None:
    """Close it once all is sent that was given to it."""
    writer.close()
    with contextlib.suppress(OSError, asyncio.TimeoutError):
        await asyncio.wait_for(writer.wait_closed(), _GOODBYE)
    writer.transport.abort()
