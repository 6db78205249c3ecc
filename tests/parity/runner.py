"""Do PyTorch's own tests pass with paceline where torch's DistributedDataParallel was?

    python -m tests.parity.runner                  all of tests.txt, in about two minutes
    python -m tests.parity.runner --quick          a dozen of them
    python -m tests.parity.runner -k no_sync -v    those whose id matches, with the log of failures
    python -m tests.parity.runner --impl torch     torch itself, to see that the machine is sound

The tests are those inside the installed torch wheel; ``tests.txt`` says which. ``stage.py`` runs
them, in processes of its own. Prints a line a test and a summary; exits with 1 when one fails.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import select
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from typing_extensions import Self

from .stage import Request, Result

LIST = Path(__file__).with_name("tests.txt")
START = 400.0  # seconds a stage may take to import torch and all tests
SLACK = 15.0  # seconds it may take to end a test that is past its deadline


@dataclass(frozen=True)
class Case:
    """A line of the list."""

    area: str
    device: str
    test: str
    needs: str
    quick: bool

    @property
    def id(self) -> str:
        return f"{self.area}/{self.device}/{self.test.removeprefix('TestDistBackendWithSpawn.')}"


def read_cases(text: str) -> list[Case]:
    """Read the list; its form is told at its top."""
    area, cases = "", []
    for number, line in enumerate(text.splitlines(), 1):
        match line.split("#")[0].split():
            case []:
                continue
            case [head] if head.startswith("["):
                area = head.strip("[]")
            case [*star, "cpu" | "gpu" as device, test, needs] if star in ([], ["*"]):
                cases.append(_case(area, device, test, needs, bool(star)))
            case [*star, "cpu" | "gpu" as device, test] if star in ([], ["*"]):
                cases.append(_case(area, device, test, "DistributedDataParallel", bool(star)))
            case _:
                raise ValueError(f"line {number} of the list is not understood: {line!r}")
    return cases


def _case(area: str, device: str, test: str, needs: str, quick: bool) -> Case:
    full = test if "." in test else f"TestDistBackendWithSpawn.{test}"
    return Case(area, device, full, needs, quick)


class StageProcess:
    """A ``stage.py`` for tests on one device, started by the first test; a context that ends it."""

    def __init__(self, implementation: str, device: str, deadline: float) -> None:
        self.deadline = deadline
        self._command = [sys.executable, "-m", "tests.parity.stage", implementation, device]
        self._process: subprocess.Popen[str] | None = None
        self._usable = False  # until one has started

    def run(self, case: Case) -> Result:
        """Run a test. When the stage itself fails, so does the test, and the next has a new one."""
        request = Request(case.test, case.needs, self.deadline)
        try:
            process = self._process or self._start()
            self._usable = True
            assert process.stdin is not None
            process.stdin.write(json.dumps(asdict(request)) + "\n")
            process.stdin.flush()
            return Result(**json.loads(self._hear(process, self.deadline + SLACK)))
        except (OSError, EOFError) as error:
            self.close()
            if not self._usable:  # nor will it be for the next test
                raise
            return Result("fail", 0.0, f"the stage failed: {error}")

    def _start(self) -> subprocess.Popen[str]:
        env = os.environ | {
            "BACKEND": "gloo",
            "WORLD_SIZE": "2",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        }
        pipe, root = subprocess.PIPE, Path(__file__).parents[2]
        self._process = process = subprocess.Popen(
            self._command, stdin=pipe, stdout=pipe, text=True, env=env, cwd=root
        )
        self._hear(process, START)
        return process

    def _hear(self, process: subprocess.Popen[str], seconds: float) -> str:
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], seconds)[0]:
            raise TimeoutError(f"no word after {seconds:g} s")
        line = process.stdout.readline()
        if not line:
            raise EOFError("it ended; what it said is above")
        return line

    def close(self) -> None:
        """End it and what it runs."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(OSError):
            process.stdin.close()  # which it takes as the end
        try:
            process.wait(SLACK)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def run_cases(cases: Iterable[Case], args: argparse.Namespace) -> dict[Case, Result]:
    """Run tests on ``args.jobs`` stages at a time, first those for the CPU, and print results."""
    results: dict[Case, Result] = {}
    for device in ("cpu", "gpu"):
        todo: queue.SimpleQueue[Case] = queue.SimpleQueue()
        for case in cases:
            if case.device == device:
                todo.put(case)
        stages = [StageProcess(args.impl, device, args.deadline) for _ in range(args.jobs)]
        work = [(stage, todo, results, args.verbose) for stage in stages]
        threads = [threading.Thread(target=_run_all, args=each) for each in work]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        finally:  # in vain, unless interrupted
            while not todo.empty():
                todo.get()
            for stage in stages:
                stage.close()
    return results


def _run_all(
    stage: StageProcess,
    todo: queue.SimpleQueue[Case],
    results: dict[Case, Result],
    verbose: bool,
) -> None:
    with stage, suppress(queue.Empty):
        while True:
            case = todo.get_nowait()
            result = results[case] = stage.run(case)
            log = result.log if verbose and result.status == "fail" else ""
            line = f"{result.status:4} {result.seconds:6.1f} s  {case.id}  {result.why}"
            print(line.rstrip() + ("\n" + log if log else ""), flush=True)


def summary(results: dict[Case, Result]) -> str:
    """Tell by area how many passed."""
    total = Counter(case.area for case, result in results.items() if result.status != "absent")
    passed = Counter(case.area for case, result in results.items() if result.status == "pass")
    lines = [f"{area:26} {passed[area]:4} of {total[area]:4}" for area in total]
    lines.append(f"{'all':26} {passed.total():4} of {total.total():4}")
    return "\n".join(lines)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="PyTorch's own tests, on paceline.")
    parser.add_argument("--quick", action="store_true", help="only those with a star in the list")
    parser.add_argument("-k", metavar="PATTERN", default="", help="only ids that match it")
    parser.add_argument("-v", "--verbose", action="store_true", help="show the logs of failures")
    parser.add_argument("-j", "--jobs", type=int, default=2, help="tests at a time (2)")
    parser.add_argument("--impl", default="paceline", help="what has install(); torch for itself")
    parser.add_argument("--deadline", type=float, default=120.0, help="seconds for a test (120)")
    return parser.parse_args()


def main() -> int:
    """Run what was asked for; 1 when a test failed or none was found."""
    args = read_arguments()
    cases = [
        case
        for case in read_cases(LIST.read_text())
        if re.search(args.k, case.id) and (case.quick or not args.quick)
    ]
    results = run_cases(cases, args)
    print(summary(results))
    # A skipped one counts as failed: torch did not skip it when the list was made.
    bad = [result for result in results.values() if result.status in ("fail", "skip")]
    return 1 if bad or not results or len(results) < len(cases) else 0


if __name__ == "__main__":
    sys.exit(main())
