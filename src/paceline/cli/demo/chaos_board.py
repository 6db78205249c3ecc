"""What ``paceline demo --chaos`` shows: the losses of two runs, and who was killed in the second.

:class:`ChaosBoard` takes in what members tell; it kills nobody and draws nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .live import CURVE, sparkline
from .talk import MemberEnds, MemberStarts, Message, ShardLoss

if TYPE_CHECKING:
    from rich.console import RenderableType

SHARDS = 8  # of a step


@dataclass
class RunLosses:
    """The losses of one run, by step and shard."""

    shards: int
    of_step: dict[int, dict[int, float]] = field(default_factory=dict)
    digests: set[str] = field(default_factory=set)

    def curve(self) -> list[float]:
        """The mean loss of each step that all shards have told of, in order."""
        whole = [self.of_step[step] for step in sorted(self.of_step)]
        return [sum(found.values()) / self.shards for found in whole if len(found) == self.shards]

    def differs_from(self, other: RunLosses) -> list[int]:
        """The steps that both have whole, and whose losses are not the same to the last bit."""
        both = self.of_step.keys() & other.of_step.keys()
        pairs = {step: (self.of_step[step], other.of_step[step]) for step in both}
        whole = [s for s, (a, b) in pairs.items() if len(a) == len(b) == self.shards]
        return sorted(step for step in whole if pairs[step][0] != pairs[step][1])


@dataclass
class ChaosBoard:
    """Both runs, and what happens to the members of the second."""

    steps: int
    shards: int
    calm: RunLosses = field(init=False)
    rough: RunLosses = field(init=False)
    is_rough: bool = False  # which of them runs now
    pids: dict[int, int] = field(default_factory=dict)  # of members that run
    training: set[int] = field(default_factory=set)  # members that have told of a step
    killed: list[tuple[int, int]] = field(default_factory=list)  # member, and at which step

    def __post_init__(self) -> None:
        self.calm, self.rough = RunLosses(self.shards), RunLosses(self.shards)

    @property
    def losses(self) -> RunLosses:
        """Of the run that runs now."""
        return self.rough if self.is_rough else self.calm

    @property
    def step(self) -> int:
        """The step that the members are in."""
        return max(self.losses.of_step, default=0)

    def begin_rough(self) -> None:
        """The run without faults is over."""
        self.is_rough = True
        self.pids.clear()
        self.training.clear()

    def hear(self, message: Message) -> None:
        """Take in what a member tells."""
        match message:
            case MemberStarts():
                self.pids[message.member] = message.pid
            case ShardLoss():
                self.training.add(message.member)
                self.losses.of_step.setdefault(message.step, {})[message.shard] = message.loss
            case MemberEnds():
                self.pids.pop(message.member, None)
                if message.digest:
                    self.losses.digests.add(message.digest)

    def note_kill(self, member: int) -> None:
        """A member was killed."""
        self.killed.append((member, self.step))
        self.training.discard(member)
        del self.pids[member]

    def line(self) -> str:
        """Where it is, in one line."""
        name = "with kills" if self.is_rough else "without faults"
        curve = self.losses.curve()
        loss = f"{curve[-1]:.3f}" if curve else "-"
        killed = f"  {len(self.killed)} killed" if self.is_rough else ""
        return f"{name}: step {self.step} of {self.steps}  loss {loss}{killed}"


def chaos_page(board: ChaosBoard) -> RenderableType:
    """The board for a terminal."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    curves = Table.grid(padding=(0, 2))
    for name, losses, style in (
        ("without faults", board.calm, "cyan"),
        ("with kills", board.rough, "green"),
    ):
        values = losses.curve()
        width = max(1, CURVE * len(values) // board.steps) if values else 1
        last = Text(f"{values[-1]:.3f}" if values else "", style="bold")
        curves.add_row(name, Text(sparkline(values, width), style=style), last)
    members = Table(box=None, pad_edge=False)
    members.add_column("member", justify="right")
    members.add_column("")
    for member, at in board.killed[-8:]:
        members.add_row(str(member), Text(f"killed in step {at}", style="red"))
    for member in sorted(board.pids):
        busy = member in board.training
        members.add_row(str(member), Text("trains" if busy else "waits", style="green" * busy))
    return Panel(Group(curves, "", board.line(), "", members), title="paceline demo --chaos")
