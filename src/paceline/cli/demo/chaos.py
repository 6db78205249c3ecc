"""``paceline demo --chaos``: the same training twice, the second time with members being killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from .. import say
from .chaos_board import SHARDS, ChaosBoard, chaos_page
from .live import REDRAW
from .talk import Message, TalkListener

STEPS = 300
KILL_EVERY = 4.0  # seconds, from when members train again
_LINE_EVERY = 5.0  # seconds, where nothing can be drawn
_PAUSE = 0.05
_MEMBER = "paceline.cli.demo.chaos_member"


def chaos(ranks: int, steps: int, out: Path, every: float = KILL_EVERY) -> int:
    """Train without faults, then with members killed every few seconds; 0 if both are the same."""
    board = ChaosBoard(steps, SHARDS)
    killer, view = Killer(board, every), _open_view(board)

    def look(now: float) -> None:
        killer.look(now)
        view.show()

    try:
        codes = [_run(partial(_command, steps, ranks, 0), out / "calm.txt", board, look)]
        if not codes[0]:
            board.begin_rough()
            codes.append(_run(partial(_command, steps, ranks, 1), out / "chaos.txt", board, look))
    finally:
        view.close()
    return _tell(board, codes, out)


class Killer:
    """Kills one of the members that train, some seconds after they began to or began again.

    Nobody is killed in the last tenth of the steps: whoever dies when others have finished is not
    replaced, and the run would end with its exit code.
    """

    def __init__(self, board: ChaosBoard, every: float, seed: int = 0) -> None:
        self._board, self._every = board, every
        self._due = 0.0
        self._draw = random.Random(seed)

    def look(self, now: float) -> None:
        """Kill one if it is time; the last one is left, since nobody would have its weights."""
        board = self._board
        trains = sorted(board.training & board.pids.keys())
        late = not board.killed and board.step >= board.steps // 3  # a short run has one kill, too
        if len(trains) < 2 or not board.is_rough:
            self._due = now + self._every
        elif board.step >= board.steps - max(1, board.steps // 10):
            return
        elif now >= self._due or late:
            self._due = now + self._every
            member = self._draw.choice(trains)
            with suppress(ProcessLookupError):  # it has ended, and what it says of that is to come
                os.kill(board.pids[member], signal.SIGKILL)
                board.note_kill(member)


def _command(steps: int, ranks: int, spares: int, address: str) -> list[str]:
    """What runs the job, with members that tell ``address`` how they do."""
    options = ["--elastic", "--nproc", str(ranks), "--spares", str(spares), "-m", _MEMBER]
    return [sys.executable, "-m", "paceline", "run", *options, address, str(steps)]


def _run(
    command: Callable[[str], list[str]],
    log: Path,
    board: ChaosBoard,
    look: Callable[[float], None],
) -> int:
    """Run a job, looking after it; what its launcher says goes into ``log``.

    All that members of this job told is on the board at the end, and nothing that others told.
    """
    inbox = SimpleQueue[Message]()
    with (
        TalkListener(inbox.put) as listener,
        log.open("wb") as said,
        subprocess.Popen(
            command(listener.address), stdout=said, stderr=said, start_new_session=True
        ) as job,
    ):
        try:
            while job.poll() is None:
                _hear(inbox, board)
                look(time.monotonic())
                time.sleep(_PAUSE)
        finally:
            if job.poll() is None:
                job.terminate()  # members leave after their step
    _hear(inbox, board)  # the listener has ended: nothing is on the way any more
    return job.returncode


def _hear(inbox: SimpleQueue[Message], board: ChaosBoard) -> None:
    while not inbox.empty():
        board.hear(inbox.get())


def _tell(board: ChaosBoard, codes: list[int], out: Path) -> int:
    """Say whether both runs came to the same weights; returns the exit code."""
    if any(codes):
        which = "without faults" if codes[0] else "with kills"
        name = "calm.txt" if codes[0] else "chaos.txt"
        say.complain(f"the run {which} ended with exit code {codes[-1]}; see {out / name}")
        return 1
    differ = board.rough.differs_from(board.calm)
    one = "member was" if len(board.killed) == 1 else "members were"
    print(f"{len(board.killed)} {one} killed in {board.steps} steps.")
    if not differ and not (board.calm.digests and board.rough.digests):
        which = "with kills" if board.calm.digests else "without faults"
        say.complain(f"no member told its weights at the end of the run {which}; see {out}")
        return 1
    if differ or board.calm.digests != board.rough.digests:
        where = f"step {differ[0]}" if differ else "the weights at the end"
        say.complain(f"the two runs are not the same, first in {where}")
        return 1
    if not board.killed:
        say.complain("nothing was tested: no member was killed; give more --steps or more --nproc")
        return 1
    print("Every loss and the weights at the end are those of the run without faults, bit by bit.")
    print(f"What the launcher said of it: {(out / 'chaos.txt').resolve()}")
    return 0


class ChaosLines:
    """A line every few seconds, for logs and pipes."""

    def __init__(self, board: ChaosBoard) -> None:
        self._board, self._due, self._killed = board, 0.0, 0

    def show(self) -> None:
        """Print a line if it is time for one, or somebody was killed."""
        now, killed = time.monotonic(), len(self._board.killed)
        if now >= self._due or killed != self._killed:
            if killed != self._killed:
                member, step = self._board.killed[-1]
                print(f"member {member} is killed in step {step}", flush=True)
            self._due, self._killed = now + _LINE_EVERY, killed
            print(self._board.line(), flush=True)

    def close(self) -> None:
        """Nothing is left to do."""


class ChaosPage:
    """A page in the terminal, drawn anew a few times a second."""

    def __init__(self, board: ChaosBoard) -> None:
        from rich.live import Live

        self._board, self._due = board, 0.0
        self._live = Live(chaos_page(board), auto_refresh=False)
        self._live.start(refresh=True)

    def show(self) -> None:
        """Draw, unless that was just done."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + REDRAW
            self._live.update(chaos_page(self._board), refresh=True)

    def close(self) -> None:
        """Draw a last time and leave the page where it is."""
        self._live.update(chaos_page(self._board), refresh=True)
        self._live.stop()


def _open_view(board: ChaosBoard) -> ChaosPage | ChaosLines:
    draws = sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
    return ChaosPage(board) if draws else ChaosLines(board)
