"""How a training run looks while it goes on: a small page in a terminal, plain lines elsewhere.

:class:`Scoreboard` takes in what the ranks tell and holds what is to be shown; it draws nothing
itself.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from .talk import Checked, Message, Stage, Tick

if TYPE_CHECKING:
    from rich.console import RenderableType

WINDOW = 12  # ticks of a rank over which its speed is taken
REDRAW, LINE_EVERY = 0.25, 5.0  # seconds
BARS = "▁▂▃▄▅▆▇█"
CURVE = 60  # characters, where there is room
NARROW, WIDE = 40, 100  # columns that the page is laid out for, at least and at most
ROWS = 16  # ranks that are listed


class Scoreboard:
    """What the ranks have told so far."""

    def __init__(self, title: str, measure: str, ranks: int) -> None:
        self.title, self.measure, self.ranks = title, measure, ranks
        self.stage = f"starting {ranks} rank{'s' * (ranks != 1)}"
        self.latest: dict[int, Tick] = {}
        self.losses: list[float] = []
        self.checks: list[Checked] = []
        self._ticks: dict[int, deque[Tick]] = {}

    def hear(self, message: Message) -> None:
        """Take in what a rank tells."""
        match message:
            case Tick():
                self.stage = "training"
                self._hear_tick(message)
            case Checked():
                self.checks.append(message)
            case Stage():
                self.stage = message.text

    def _hear_tick(self, tick: Tick) -> None:
        self.latest[tick.rank] = tick
        self._ticks.setdefault(tick.rank, deque(maxlen=WINDOW)).append(tick)
        if tick.rank == 0:
            losses = [own.loss for own in self.latest.values()]
            self.losses.append(sum(losses) / len(losses))

    @property
    def lead(self) -> Tick:
        """The latest of rank 0, or one that says that nothing has happened."""
        return self.latest.get(0, Tick(0, 0, 0.0, 0.0, 0, 0.0, 0.0, 0.0))

    @property
    def waiting(self) -> float:
        """The share of its time that a rank waits for others, on average."""
        shares = [tick.waiting for tick in self.latest.values()]
        return sum(shares) / len(shares) if shares else 0.0

    def samples_per_second(self) -> float:
        """Of all ranks together, of late."""
        return sum(_slope(list(ticks)) for ticks in self._ticks.values())

    def own_speed(self, rank: int) -> float:
        """Samples a second that a rank would do if it never waited."""
        tick = self.latest[rank]
        if not tick.step or not tick.own_seconds:
            return 0.0
        return tick.samples / tick.step / tick.own_seconds


def _slope(ticks: Sequence[Tick]) -> float:
    if not ticks or not ticks[-1].seconds:
        return 0.0
    seconds = ticks[-1].seconds - ticks[0].seconds
    samples = ticks[-1].samples - ticks[0].samples
    if seconds <= 0 or samples <= 0:  # one tick, or none of another step
        return ticks[-1].samples / ticks[-1].seconds
    return samples / seconds


def sparkline(values: Sequence[float], width: int = CURVE) -> str:
    """A curve in one line of text, at most ``width`` wide.

    >>> sparkline([3.0, 2.0, 1.0])
    '█▅▁'
    """
    shown = shrink(values, width)
    low, high = min(shown, default=0.0), max(shown, default=0.0)
    span = (high - low) or 1.0
    top = len(BARS) - 1
    return "".join(BARS[int((value - low) / span * top + 0.5)] for value in shown)


def shrink(values: Sequence[float], width: int) -> list[float]:
    """At most ``width`` values, each the mean of a stretch."""
    if len(values) <= width:
        return list(values)
    edges = [i * len(values) // width for i in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]


def line(board: Scoreboard) -> str:
    """Where it is, in one line."""
    tick = board.lead
    text = (
        f"{tick.seconds:5.0f} s  {tick.progress:4.0%}  step {tick.step:4d}  "
        f"loss {board.losses[-1] if board.losses else float('nan'):.3f}  "
        f"{board.samples_per_second():7,.0f} samples/s  waiting {board.waiting:5.1%}"
    )
    return text + (f"  {board.measure} {board.checks[-1].value:.3f}" if board.checks else "")


class PlainView:
    """Plain lines every few seconds, for logs and pipes."""

    def __init__(self, board: Scoreboard, stream: TextIO) -> None:
        self.board, self._stream = board, stream
        self._due = 0.0
        self._say(board.title)

    def hear(self, message: Message) -> None:
        """Take in ``message`` and print a line if it is time for one."""
        self.board.hear(message)
        if isinstance(message, Stage):
            self._say(message.text)
        if isinstance(message, Tick) and message.rank == 0:
            self._say_where(message.progress >= 1.0)

    def close(self) -> None:
        """Nothing is left to do."""

    def _say_where(self, at_end: bool) -> None:
        if at_end or time.monotonic() >= self._due:
            self._due = time.monotonic() + LINE_EVERY
            self._say(line(self.board))

    def _say(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


class PageView:
    """A page in the terminal that is drawn anew a few times a second."""

    def __init__(self, board: Scoreboard, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self.board = board
        self._console = Console(file=stream)
        self._live = Live(self._page(), console=self._console, auto_refresh=False, transient=False)
        self._live.start(refresh=True)
        self._due = 0.0

    def hear(self, message: Message) -> None:
        """Take in ``message`` and draw, unless that was just done."""
        self.board.hear(message)
        if time.monotonic() >= self._due or not isinstance(message, Tick):
            self._due = time.monotonic() + REDRAW
            self._live.update(self._page(), refresh=True)

    def close(self) -> None:
        """Draw a last time and leave the page where it is."""
        self._live.update(self._page(), refresh=True)
        self._live.stop()

    def _page(self) -> RenderableType:
        return page(self.board, self._console.width)


def open_view(board: Scoreboard, stream: TextIO | None = None) -> PageView | PlainView:
    """A page where ``stream`` is a terminal that can draw over what it shows, else lines."""
    stream = stream or sys.stdout
    unicode = (stream.encoding or "").lower().startswith("utf")
    draws = stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
    return PageView(board, stream) if draws and unicode else PlainView(board, stream)


def page(board: Scoreboard, width: int = WIDE) -> RenderableType:
    """The whole board, for a terminal that is ``width`` columns wide."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    inside = min(WIDE, max(NARROW, width)) - 4  # without the frame
    fits = len(board.title) + 2 <= inside
    above = () if fits else (Text(board.title, style="bold"), "")
    stage = Text(board.stage if board.stage != "training" else "", style="bold")
    parts = (*above, _head(board, inside), stage, _facts(board, inside), "", _ranks(board, inside))
    return Panel(Group(*parts), title=board.title if fits else None, expand=False)


def _head(board: Scoreboard, inside: int) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    tick = board.lead
    told = (f"{tick.progress:.0%}", f"step {tick.step}", f"{tick.seconds:.0f} s")
    head = Table.grid(padding=(0, 2))
    room = inside - sum(len(text) + 2 for text in told)
    head.add_row(ProgressBar(1.0, tick.progress, width=min(40, room)), *told)
    return head


def _facts(board: Scoreboard, inside: int) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    loss = f"{board.losses[-1]:.3f}" if board.losses else ""
    room = min(CURVE, inside - len(board.measure) - 2 - len(loss) - 2)
    facts = Table.grid(padding=(0, 2))
    curve = Text(sparkline(board.losses, room), style="cyan")
    facts.add_row("loss", curve, Text(loss, style="bold"))
    facts.add_row(board.measure, _told(board, room), "")
    facts.add_row("speed", f"{board.samples_per_second():,.0f} samples/s", "")
    facts.add_row("waiting", f"{board.waiting:.1%} of the time", "")
    return facts


def _told(board: Scoreboard, room: int) -> str:
    """The latest checks, as many as there is room for."""
    told = [f"{check.value:.3f}" for check in board.checks[-8:]]
    while len(told) > 1 and len("  ".join(told)) > room:
        del told[0]
    return "  ".join(told)


def _ranks(board: Scoreboard, inside: int) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for heading in ("rank", "own speed", "", "waiting"):
        table.add_column(heading, justify="left" if not heading else "right")
    shown = sorted(board.latest)[:ROWS]
    speeds = {rank: board.own_speed(rank) for rank in shown}
    fastest = max(speeds.values(), default=0.0) or 1.0
    longest = min(24, inside - 33)  # what the other columns leave
    for rank, speed in speeds.items():
        bar = Text("█" * max(1, round(longest * speed / fastest)), style="green")
        waiting = f"{board.latest[rank].waiting:.1%}"
        table.add_row(str(rank), f"{speed:,.0f} samples/s", bar, waiting)
    if len(board.latest) > ROWS:
        table.add_row("…", f"and {len(board.latest) - ROWS} more", "", "")
    return table
