"""The process in which PyTorch's tests find paceline where torch was; one test after the other.

Started by ``runner.py``. It imports torch once, puts paceline in its place, and forks a child for
every test, which forks the test's ranks: each inherits the replacement, and no test can spoil
another. Requests come in on stdin and results go out on stdout, a line of JSON each; when stdin
ends, so does the stage, with whatever still runs in it.

A test that ran on torch's own code proves nothing. So every rank looks whether torch's name means
ours before it begins, and what a test needs of ours notes that it was used (:class:`Uses`).
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import unittest
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

GPUS = 8  # that torch pretends to have, for tests that ask
WATCHED = (
    "DistributedDataParallel",
    "HierarchicalModelAverager",
    "PeriodicModelAverager",
    "_BucketCapacityConfig",
    "_dump_DDP_relevant_env_vars",
)
MODULES = ("averagers", "hierarchicalSGD")  # through which the tests reach some of them


@dataclass(frozen=True)
class Request:
    """A test to run: ``Class.test``, the name it must have used, and seconds it may take."""

    test: str
    needs: str
    deadline: float


@dataclass(frozen=True)
class Result:
    """How a test ended; ``why`` is one line, ``log`` all it said."""

    status: str  # pass, fail, skip; absent when this torch has no such test
    seconds: float
    why: str = ""
    log: str = ""


class Uses:
    """Which of the watched names a test has used, noted by all of its processes in one file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def note(self, name: str, origin: str) -> None:
        with self.path.open("a") as file:  # appended: ranks write at the same time
            file.write(f"{name} {origin}\n")

    def objection(self, name: str, implementation: str) -> str:
        """Say why a test that needs ``name`` proves nothing about the implementation, if so."""
        noted = dict(line.split() for line in self.path.read_text().splitlines())
        if name not in noted:
            return f"it made no use of {name}"
        if noted[name].split(".")[0] != implementation:
            return f"it ran on {noted[name]}.{name}, not on {implementation}'s"
        return ""


class Stage:
    """torch with paceline in its place, and the tests of the wheel."""

    def __init__(self, implementation: str, as_gpu: bool) -> None:
        import torch

        if as_gpu:
            from . import gpu_as_cpu

            gpu_as_cpu.pretend(GPUS)
        if implementation != "torch":
            importlib.import_module(implementation).install(strict=True)
        if as_gpu:
            gpu_as_cpu.ignore_device_ids(torch.nn.parallel.DistributedDataParallel)
        self.implementation = implementation
        self.uses = Uses(Path(os.devnull))
        self.deadline = 0.0  # of the test that runs
        # Only now: the tests keep what the names mean when they are imported.
        self.wheel = importlib.import_module("torch.testing._internal.distributed.distributed_test")
        homes = [self.wheel, *(getattr(self.wheel, name, None) for name in MODULES)]
        for name in WATCHED:
            for home in homes:
                if hasattr(home, name):  # an older torch has fewer of them
                    self._watch(home, name)
        self.classes = {**vars(self.wheel), "TestDistBackendWithSpawn": _with_ranks(self)}

    def require_ours(self) -> None:
        """Raise unless torch's class is the implementation's, by each of its names."""
        import torch.nn.parallel.distributed

        for place in (torch.nn.parallel, torch.nn.parallel.distributed, self.wheel):
            found = place.DistributedDataParallel.__module__
            if found.split(".")[0] != self.implementation:
                raise AssertionError(
                    f"{place.__name__}.DistributedDataParallel comes from {found}; "
                    f"the test would not run on {self.implementation}."
                )

    def _watch(self, home: Any, name: str) -> None:
        thing = getattr(home, name)
        if isinstance(thing, type):
            watched = self._noting(name, thing.__module__, thing.__init__)
            thing.__init__ = watched
        else:
            setattr(home, name, self._noting(name, thing.__module__, thing))

    def _noting(self, name: str, origin: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def noting(*args: Any, **options: Any) -> Any:
            self.uses.note(name, origin)
            return function(*args, **options)

        return noting

    # One test, in a child of this process.

    def run(self, request: Request) -> Result:
        """Run a test and leave no process of it behind."""
        folder = Path(tempfile.mkdtemp(prefix="parity-"))
        start = time.monotonic()
        child = os.fork()
        if child == 0:
            self._be_child(request, folder)
        in_time = _wait(child, request.deadline)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # the child's group: it and the ranks it forked
        code = os.waitpid(child, 0)[1]
        status, why = "fail", f"its process ended with {code} and no result"
        if not in_time:
            why = f"still running after {request.deadline:g} s"
        elif (folder / "result").exists():
            status, why = json.loads((folder / "result").read_text())
        log = (folder / "log").read_text(errors="replace") if (folder / "log").exists() else ""
        shutil.rmtree(folder, ignore_errors=True)
        return Result(status, round(time.monotonic() - start, 2), why, log[-20_000:])

    def _be_child(self, request: Request, folder: Path) -> None:
        try:
            os.setsid()
            _end_after(request.deadline)
            log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for stream in (sys.stdout.fileno(), sys.stderr.fileno()):
                os.dup2(log, stream)
            os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
            outcome = self._run_here(request, folder)
        except BaseException:
            traceback.print_exc()
            outcome = "fail", traceback.format_exc().splitlines()[-1]
        sys.stderr.flush()
        (folder / "part").write_text(json.dumps(outcome))
        (folder / "part").rename(folder / "result")
        os._exit(0)

    def _run_here(self, request: Request, folder: Path) -> tuple[str, str]:
        self.uses = Uses(folder / "uses")
        self.uses.path.touch()
        self.deadline = request.deadline
        if barrier := getattr(self.wheel, "Barrier", None):  # of ranks, which has 10 s by itself
            barrier.sync = functools.partial(barrier.sync, timeout=request.deadline)
        class_name, name = request.test.split(".")
        if not hasattr(self.classes.get(class_name), name):
            return "absent", "this torch has no such test"
        self.require_ours()
        result = unittest.TestResult()
        unittest.TestSuite([self.classes[class_name](name)]).run(result)
        for _, text in (*result.errors, *result.failures):
            print(text, file=sys.stderr)
            return "fail", _reason(text)
        if result.skipped:
            return "skip", result.skipped[0][1]
        if result.testsRun != 1 or result.unexpectedSuccesses:
            return "fail", f"{result}"
        objection = self.uses.objection(request.needs, self.implementation)
        return ("fail", objection) if objection else ("pass", "")


def _with_ranks(stage: Stage) -> type:
    """Make the class that runs the wheel's multi-process tests."""
    wheel: Any = stage.wheel

    class TestDistBackendWithSpawn(wheel.TestDistBackend, wheel.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            # torch spawns here, which takes seconds; a fork has everything imported.
            context = importlib.import_module("torch.multiprocessing").get_context("fork")
            self._start_processes(context.Process)

        @classmethod
        def _run(cls, *args: object, **options: object) -> None:
            _end_after(stage.deadline)
            stage.require_ours()
            super()._run(*args, **options)

    return TestDistBackendWithSpawn


def _end_after(seconds: float) -> None:
    """End this process then, also when the one that would kill it has itself been killed."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(seconds) + 5)


def _wait(child: int, seconds: float) -> bool:
    """Whether the child ended in time; ends the stage when nobody is left to hear of it."""
    ended = os.pidfd_open(child)
    ready = select.select([ended, sys.stdin], [], [], seconds)[0]
    os.close(ended)
    if sys.stdin in ready:  # no request comes before the result, so this is the end
        os.killpg(child, signal.SIGKILL)
        os._exit(1)
    return bool(ready)


def _reason(text: str) -> str:
    """Give the line that says what went wrong, of the first rank that failed."""
    of_rank = text.split("exited with error code")[1:2] or [text]
    lines = [line for line in of_rank[0].splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line.split(":")[0] and not line.startswith(" ")]
    return (named or lines)[-1].strip()[:300]


def main() -> None:
    """Serve the requests on stdin."""
    implementation, device = sys.argv[1:]
    sys.argv = sys.argv[:1]  # torch's tests read it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the runner hears it too, and ends this
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing else may write among the answers
    stage = Stage(implementation, as_gpu=device == "gpu")
    print("ready", file=answers, flush=True)
    while line := sys.stdin.readline():
        result = stage.run(Request(**json.loads(line)))
        print(json.dumps(asdict(result)), file=answers, flush=True)


if __name__ == "__main__":
    main()
