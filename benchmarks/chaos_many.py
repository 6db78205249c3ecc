"""Many faults in one run: what each cost, and what is left of them (``chaos.py --many``)."""

from __future__ import annotations

import itertools
import os
import random
import signal
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from chaos import DEADLINE, FAULTS, STARTED, Run, alone, children, launched, suffer

STEPS, PAUSE = 30, 0.05  # for each fault, and seconds; the last are done without pauses
SPARES = 2
NAMES = ["rank", "rank_0", "two_at_once", "during_recovery", "stopped", "keeper",
         "keeper_and_rank", "joiner", "reset"]  # fmt: skip


@dataclass(frozen=True)
class Used:
    """What a process takes."""

    descriptors: int
    threads: int
    megabytes: float

    @classmethod
    def by(cls, pid: int) -> Used:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return cls(
            len(os.listdir(f"/proc/{pid}/fd")),
            len(os.listdir(f"/proc/{pid}/task")),
            pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20),
        )

    def __str__(self) -> str:
        return f"{self.descriptors} | {self.threads} | {self.megabytes:.1f} MiB"

    def is_back_to(self, before: Used) -> bool:
        """Whether nothing has been left of the faults between the two."""
        few = self.descriptors <= before.descriptors + 3 and self.threads <= before.threads + 1
        return few and self.megabytes <= before.megabytes * 1.05


def joiner(run: Run, ranks: dict[int, int]) -> None:
    """Kill a rank, and the one that joins in its place while it gets the state."""
    waiting = [p for p in children(run.process.pid) if p not in ranks.values() and _trains(p)]
    os.kill(ranks[1], signal.SIGKILL)
    time.sleep(random.uniform(0.0, 0.05))
    for pid in waiting[:1]:
        os.kill(pid, signal.SIGKILL)


def reset(run: Run, ranks: dict[int, int]) -> None:
    os.kill(ranks[1], signal.SIGUSR1)


FAULTS.update(joiner=joiner, reset=reset)


PARTS = ["until ranks meet", "until the roster", "until it is open", "until two more steps"]


def parts(run: Run, begun: float, seconds: float) -> list[float]:
    """What a recovery consisted of, in seconds; none where nobody met.

    *Until ranks meet*: the fault is noticed, and the first rank that waited is free. *Until the
    roster*: the others have come too, and the keeper has decided. Where there were several
    meetings, as when a second rank is lost in one, what follows is counted from the last.
    """
    rows = [(float(w[0]), w[2]) for w in run.lines(1 << 15) if len(w) == 3]
    rows = [(when - begun, what) for when, what in rows if begun <= when <= begun + seconds]
    ends = [max((t for t, what in rows if what == name), default=0.0)
            for name in ("decided", "opened")]  # fmt: skip
    first = min((t for t, what in rows if what == "meets"), default=0.0)
    if not first or not first <= ends[0] <= ends[1]:
        return []
    moments = [0.0, first, *ends, seconds]
    return [late - early for early, late in itertools.pairwise(moments)]


def _write(path: Path, text: str) -> None:
    """Have a file be there whole."""
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    draft.replace(path)


def _trains(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return b"chaos_rank.py" in command and b"template_process.py" not in command
    except OSError:
        return False


def many(count: int, engine: str, folder: Path, seed: int) -> bool:
    """Let ``count`` faults happen in one run; prints what they did, and whether all held."""
    chance, steps = random.Random(seed), -(-(count + 4) * STEPS // 100) * 100
    expected = alone(steps, folder)
    times: dict[str, list[float]] = {}
    shares: list[list[float]] = []
    failed: list[str] = []
    names = [name for name in NAMES if engine == "gloo" or name != "reset"]
    with launched(engine, steps, folder, SPARES, count * 3, PAUSE) as run:
        before: dict[str, Used] = {}
        for number in range(count):
            name = names[number] if number < len(names) else chance.choice(names)
            run.wait(run.ranks, STARTED)
            _write(run.log.with_suffix(".due"), str((number + 2) * STEPS))
            found = suffer(run, name)
            if found is not None and number == min(len(names), count) - 1:  # each kind was there
                before = {"agent": Used.by(run.process.pid), "keeper": Used.by(run.keeper())}
            if found is None:
                failed.append(name)
                _tell_stuck(run, number, name)
                if run.process.poll() is not None:
                    break
                continue
            times.setdefault(name, []).append(found.went_on)
            shares += [part] if (part := parts(run, found.begun, found.went_on)) else []
            print(f"{number + 1:4} {name:16} {found.went_on:.2f} s", file=sys.stderr, flush=True)
        run.wait(run.ranks, DEADLINE)
        if run.process.poll() is not None:
            print("\n".join(line for _, line in run.said[-80:]), file=sys.stderr)
            return False
        after = {"agent": Used.by(run.process.pid), "keeper": Used.by(run.keeper())}
        step = step_time(run)
        run.log.with_suffix(".hurry").touch()
    _tell(times, failed)
    _tell_parts(shares, step)
    clean = _tell_used(run, before, after)
    return _tell_end(run, expected) and clean and not failed


def _tell_stuck(run: Run, number: int, name: str) -> None:
    """Print what a fault left behind from which nobody went on."""
    now = time.monotonic()
    print(f"{number + 1:4} {name:16} did not go on; the last commits and words:", file=sys.stderr)
    for commit in run.commits()[-6:]:
        print(f"     {commit.when - now:8.2f} s  {commit}", file=sys.stderr)
    for when, line in run.said[-12:]:
        print(f"     {when - now:8.2f} s  {line}", file=sys.stderr, flush=True)


def _tell(times: dict[str, list[float]], failed: list[str]) -> None:
    print("\n| fault | times | mean until two more steps | longest |\n|---|---|---|---|")
    for name, found in times.items():
        print(f"| {name.replace('_', ' ')} | {len(found)} | {statistics.mean(found):.2f} s "
              f"| {max(found):.2f} s |")  # fmt: skip
    every = [seconds for found in times.values() for seconds in found]
    print(f"| **all** | {len(every)} | {statistics.mean(every):.2f} s | {max(every):.2f} s |")
    for name in failed:
        print(f"| {name.replace('_', ' ')} | **did not go on in {DEADLINE:g} s** | | |")


def _tell_parts(shares: list[list[float]], step: float) -> None:
    print("\n| part of a recovery | median | mean | longest |\n|---|---|---|---|")
    for name, found in zip(PARTS, zip(*shares, strict=True), strict=False):
        print(f"| {name} | {statistics.median(found):.3f} s | {statistics.mean(found):.3f} s "
              f"| {max(found):.2f} s |")  # fmt: skip
    print(f"\na step without a fault, with its pause: {step:.3f} s (median)")


def step_time(run: Run) -> float:
    """Seconds between two commits of one rank."""
    last: dict[str, float] = {}
    gaps = []
    for words in run.lines(1 << 30):
        if len(words) == 8:
            gaps.append(float(words[0]) - last.get(words[3], float(words[0])))
            last[words[3]] = float(words[0])
    return statistics.median(gap for gap in gaps if gap)


def _tell_used(run: Run, before: dict[str, Used], after: dict[str, Used]) -> bool:
    """Print what processes take; whether it is no more than before."""
    print("\n| process | when | descriptors | threads | resident |\n|---|---|---|---|---|")
    rows = [line for line in run.lines(1 << 30) if len(line) == 8]
    longest = max(
        ([row for row in rows if row[3] == pid] for pid in {row[3] for row in rows}), key=len
    )
    early, late = longest[min(100, len(longest) // 10)], longest[-1]
    before = {**before, "the rank that lived longest": _used_in(early)}
    after = {**after, "the rank that lived longest": _used_in(late)}
    for name, used in before.items():
        print(f"| {name} | when each kind had happened, or in its 100th step | {used} |")
        print(f"| {name} | after the last | {after[name]} |")
    leaked = [name for name, used in before.items() if not after[name].is_back_to(used)]
    print(f"\nleft of the faults: {f'**something, in {leaked}**' if leaked else 'nothing'}")
    return not leaked


def _used_in(row: list[str]) -> Used:
    return Used(int(row[5]), int(row[6]), float(row[7]))


def _tell_end(run: Run, expected: str) -> bool:
    said = [line for _, line in run.said]
    digests = [line for line in said if "digest" in line]
    same = len(digests) == 1 and digests[0].endswith(expected) and run.process.returncode == 0
    counted = [line for line in said if "times in" in line]
    print(f"\nweights at the end: {'those of a run without faults' if same else '**others**'}")
    print("\n".join(counted) or "**nobody came to the end**")
    once = len(counted) == 1 and "each sample once" in counted[0]
    if not (same and once):
        print("\n".join(said[-80:]), file=sys.stderr)
    return same and once
