"""Do ranks that are killed or stopped while they train cost anything but a moment?

    python benchmarks/chaos.py                          every fault, over shm and over gloo
    python benchmarks/chaos.py --engines shm --faults rank keeper
    python benchmarks/chaos.py --many 100               a hundred random ones in one run
    python benchmarks/chaos.py --calm 600 --load 20     none, for ten minutes beside busy loops

Three ranks and a spare train under ``paceline run --elastic``. Faults come one after the other,
each when all three ranks train: *detected* is until the launcher says so, *went on* until two more
steps are committed. A step waits 20 ms, so that there is time for a fault in it. A fault held if
the others went on within its deadline; the run held if it ended well, with the weights of one
process that trained alone, bit by bit. With ``--calm`` nobody may be given up, however slow a rank
becomes. Exits with 1 if anything did not hold.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
RANK = str(Path(__file__).with_name("chaos_rank.py"))
PAUSE = 0.02  # seconds of a step
STARTED = 180.0  # seconds until all ranks train
DEADLINE = 60.0  # seconds for the others to go on, and for a member to be replaced
RANKS = 3
CALM = 900.0  # seconds for a run without faults beside busy loops


@dataclass(frozen=True)
class Commit:
    when: float
    step: int
    rank: int
    pid: int
    ranks: int


@dataclass
class Run:
    """A launcher, what it says and when, and what its members commit."""

    process: subprocess.Popen[str]
    log: Path
    said: list[tuple[float, str]] = field(default_factory=list)

    def listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append((time.monotonic(), line.rstrip()))

    def lines(self, last: int = 1 << 13) -> list[list[str]]:
        """The words of the last lines of the log, as many as fit into so many bytes."""
        if not self.log.exists():
            return []
        with self.log.open("rb") as log:
            begin = max(0, log.seek(0, os.SEEK_END) - last)
            log.seek(begin)
            whole = log.read().split(b"\n")[1 if begin else 0 : -1]
        return [line.decode().split() for line in whole]

    def commits(self) -> list[Commit]:
        """The last of them."""
        words = [line for line in self.lines() if len(line) == 8]
        return [Commit(float(w[0]), *map(int, w[1:5])) for w in words]

    def ranks(self) -> dict[int, int]:
        """The processes of the ranks, if all have committed the same step lately."""
        commits = self.commits()
        if not commits:
            return {}
        last = [c for c in commits if c.step == commits[-1].step and c.ranks == RANKS]
        return {c.rank: c.pid for c in last} if len(last) == RANKS else {}

    def wait(self, what: Callable[[], T], seconds: float) -> T:
        """What ``what`` returns, as soon as it is something; at the deadline, whatever it is."""
        until = time.monotonic() + seconds
        while not (found := what()) and time.monotonic() < until and self.process.poll() is None:
            time.sleep(0.002)
        return found

    def keeper(self) -> int:
        """The process that holds the list of members: of its two, the one that has the socket."""
        for child in children(self.process.pid):
            command = Path(f"/proc/{child}/cmdline").read_bytes()
            sockets = [_target(link) for link in Path(f"/proc/{child}/fd").iterdir()]
            if b"paceline._members" in command and sum("socket:" in s for s in sockets) > 1:
                return child
        raise LookupError("no keeper")


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for tasks in found for child in tasks.read_text().split()]


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


# Each fault gets the run and the processes of its ranks.


def rank(run: Run, ranks: dict[int, int]) -> None:
    os.kill(ranks[1], signal.SIGKILL)


def rank_0(run: Run, ranks: dict[int, int]) -> None:
    os.kill(ranks[0], signal.SIGKILL)


def two_at_once(run: Run, ranks: dict[int, int]) -> None:
    for number in (0, 2):
        os.kill(ranks[number], signal.SIGKILL)


def during_recovery(run: Run, ranks: dict[int, int]) -> None:
    os.kill(ranks[1], signal.SIGKILL)
    time.sleep(random.uniform(0.0, 0.02))
    os.kill(ranks[0], signal.SIGKILL)


def stopped(run: Run, ranks: dict[int, int]) -> None:
    os.kill(ranks[1], signal.SIGSTOP)


def keeper(run: Run, ranks: dict[int, int]) -> None:
    os.kill(run.keeper(), signal.SIGKILL)


def keeper_and_rank(run: Run, ranks: dict[int, int]) -> None:
    os.kill(run.keeper(), signal.SIGKILL)
    os.kill(ranks[2], signal.SIGKILL)


FAULTS: dict[str, Callable[[Run, dict[int, int]], None]] = {
    one.__name__: one
    for one in (rank, rank_0, two_at_once, during_recovery, stopped, keeper, keeper_and_rank)
}


@contextmanager
def launched(
    engine: str,
    steps: int,
    folder: Path,
    spares: int = 1,
    restarts: int = 100,
    pause: float = PAUSE,
) -> Iterator[Run]:
    options = ["--elastic", "--nproc", str(RANKS), "--spares", str(spares)]
    options += ["--max-restarts", str(restarts)]
    command = [sys.executable, "-m", "paceline", "run", *options, "--backend", engine]
    log = folder / f"{engine}.log"
    words = [*command, RANK, str(log), str(steps), str(pause)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(words, **pipes) as process:  # type: ignore[call-overload]
        run = Run(process, log)
        listener = threading.Thread(target=run.listen, daemon=True)
        listener.start()
        try:
            yield run
            process.wait(steps * pause * 10 + DEADLINE)
            listener.join(10)
        finally:
            process.terminate()


def alone(steps: int, folder: Path) -> str:
    """The weights of one process."""
    log = str(folder / "alone.log")
    words = [sys.executable, RANK, log, str(steps), "0"]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()[-1]


@dataclass(frozen=True)
class Suffered:
    """A fault: when it happened, and the seconds until it was noticed and until it was over."""

    begun: float
    noticed: float  # by the launcher
    went_on: float


def suffer(run: Run, name: str) -> Suffered | None:
    """Let a fault happen; returns when the others have gone on, None if they have not."""
    ranks, heard = run.wait(run.ranks, STARTED if not run.commits() else DEADLINE), len(run.said)
    if not ranks:
        return None
    begun = time.monotonic()
    FAULTS[name](run, ranks)
    last = run.commits()[-1].step
    if not run.wait(lambda: run.commits()[-1].step > last + 1, DEADLINE):
        return None
    went_on = next(c.when for c in run.commits() if c.step > last + 1) - begun

    def noticed() -> list[float]:
        return [when for when, line in run.said[heard:] if re.search("lost|replaced|ended", line)]

    seen = run.wait(noticed, 5.0)
    return Suffered(begun, seen[0] - begun if seen else float("nan"), went_on)


def chaos(engine: str, faults: list[str], expected: str, steps: int, folder: Path) -> bool:
    held = True
    with launched(engine, steps, folder) as run:
        for name in faults:
            found = suffer(run, name)
            held &= found is not None
            times = (
                "| — | — | **no** |"
                if found is None
                else f"| {found.noticed:.2f} s | {found.went_on:.2f} s | yes |"
            )
            print(f"| {name.replace('_', ' ')} | {engine} {times}", flush=True)
    words = [line for _, line in run.said if "digest" in line]
    equal = len(words) == 1 and words[0].endswith(expected) and run.process.returncode == 0
    print(f"| *all of it* | {engine} | | | {'same bits' if equal else '**no**'} |", flush=True)
    if not (held and equal):
        print("\n".join(line for _, line in run.said[-60:]), file=sys.stderr)
    return held and equal


def many_on(engines: list[str], count: int, seed: int) -> int:
    """Let many faults happen in one run, on each engine."""
    from chaos_many import many  # which builds upon this file

    held = []
    for engine in engines:
        with tempfile.TemporaryDirectory() as folder:
            print(f"\n{count} faults in one run over {engine}", flush=True)
            held.append(many(count, engine, Path(folder), seed))
    return 0 if all(held) else 1


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def calm(engines: list[str], seconds: float, load: int) -> int:
    """Train without faults beside busy loops, one run after the other until the time is over."""
    steps, held = 300, True
    print("| engine | runs | seconds | longest step | given up | held |\n|---|---|---|---|---|---|")
    for engine in engines:
        with tempfile.TemporaryDirectory() as folder:
            expected = alone(steps, Path(folder))
            runs, longest, lost, good = 0, 0.0, list[str](), True
            began = time.monotonic()
            with busy_loops(load):
                while time.monotonic() < began + seconds:
                    said, slowest = calm_run(engine, steps, Path(folder))
                    lost += [line for line in said if re.search("lost|replaced|is ended", line)]
                    words = [line for line in said if "digest" in line]
                    good &= len(words) == 1 and words[0].endswith(expected)
                    runs, longest = runs + 1, max(longest, slowest)
        taken, fine = time.monotonic() - began, good and not lost
        print(f"| {engine} | {runs} | {taken:.0f} | {longest:.2f} s | {len(lost)} "
              f"| {'yes' if fine else '**no**'} |", flush=True)  # fmt: skip
        print("\n".join(lost), file=sys.stderr)
        held &= fine
    return 0 if held else 1


def calm_run(engine: str, steps: int, folder: Path) -> tuple[list[str], float]:
    """What the launcher said, and the longest time between two steps of a rank."""
    with launched(engine, steps, folder) as run:
        run.process.wait(CALM)
    last: dict[int, float] = {}
    longest = 0.0
    for words in run.lines(1 << 30):
        if len(words) == 8:
            when, pid = float(words[0]), int(words[3])
            longest = max(longest, when - last.get(pid, when))
            last[pid] = when
    run.log.unlink()
    return [line for _, line in run.said], longest


def main() -> int:
    parser = argparse.ArgumentParser(description="Faults in a job that ranks leave and join.")
    parser.add_argument("--engines", nargs="+", default=["shm", "gloo"])
    parser.add_argument("--faults", nargs="+", default=list(FAULTS), choices=list(FAULTS))
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--many", type=int, default=0, metavar="N", help="so many in one run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calm", type=float, default=0.0, metavar="SECONDS", help="without faults")
    parser.add_argument("--load", type=int, default=0, help="busy loops beside --calm")
    asked = parser.parse_args()
    if asked.calm:
        return calm(asked.engines, asked.calm, asked.load)
    if asked.many:
        return many_on(asked.engines, asked.many, asked.seed)
    steps = asked.steps or 300 * len(asked.faults)
    print("| fault | engine | detected | went on | held |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        expected = alone(steps, Path(folder))
        held = [chaos(e, asked.faults, expected, steps, Path(folder)) for e in asked.engines]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.modules["chaos"] = sys.modules["__main__"]  # the same faults for chaos_many.py
    sys.exit(main())
