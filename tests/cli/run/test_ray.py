"""Ranks of ``--ray``: a stand-in for Ray, whose actors are threads, and real rank processes."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from types import SimpleNamespace

import pytest

from paceline.cli.run.launch import Conduct
from paceline.cli.run.on_ray import _RayRun
from paceline.cli.run.ray_actor import RankProcess
from tests.cli.run.test_ctrl_c import alive


class Actor:
    """One thread for each, as Ray has it: calls wait for those before them."""

    def __init__(self, notes: list[str]) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._rank = RankProcess()
        for name in ("start", "news", "stop"):
            setattr(self, name, SimpleNamespace(remote=self._call(name, notes)))

    def _call(self, name: str, notes: list[str]):
        def remote(*arguments: object) -> Future:
            notes.append(name)
            return self._thread.submit(getattr(self._rank, name), *arguments)

        return remote

    def end(self) -> None:
        if self._rank._process.poll() is None:  # the test has failed
            self._rank._send(signal.SIGKILL)
        self._thread.shutdown()


class Ray:
    exceptions = SimpleNamespace(RayError=OSError)

    def wait(self, references: list[Future], timeout: float):
        done, left = wait(references, timeout, FIRST_COMPLETED)
        return list(done), list(left)

    def get(self, reference: Future):
        return reference.result(60)


@pytest.fixture
def begin(tmp_path) -> Iterator:
    actors: list[Actor] = []

    def start(size: int, text: str, *words: str, **options: object) -> _RayRun:
        (tmp_path / "script.py").write_text(text)
        command = ["-c", "import sys; sys.argv.pop(0); exec(open(sys.argv[0]).read())"]
        for rank in range(size):
            actors.append(Actor([]))
            where = str(tmp_path / "script.py")
            actors[-1].start.remote([*command, where, *words], {"RANK": str(rank)}, "/").result(60)
        return _RayRun(Ray(), actors, (), **options)

    yield start
    for actor in actors:
        actor.end()


SAVES = """
import os, signal, sys
def save(*_):
    sys.stdout.write("x" * 1_000_000 + " is being saved\\n")  # more than a pipe holds
    sys.stdout.flush()
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("up", os.getpid(), flush=True)
for both_are_up in sys.argv[1:]:  # a named pipe, which opens when both ranks open it
    open(both_are_up, "rw"[int(os.environ["RANK"])]).close()
    if os.environ["RANK"] == "1":
        os._exit(3)
while True:
    signal.pause()
"""


def test_a_rank_that_saves_after_anothers_failure_is_read_and_waited_for(
    begin, capsys, tmp_path
) -> None:
    os.mkfifo(tmp_path / "both")
    run = begin(2, SAVES, str(tmp_path / "both"), conduct=Conduct(grace=600.0))
    assert run.until_the_end() == 3
    said = capsys.readouterr()
    assert "[0] saved" in said.out
    assert "rank 1 of 2 failed first: it ended with exit code 3" in said.err


def test_a_signal_to_the_launcher_is_handed_on_and_the_ranks_may_save(begin, capsys) -> None:
    run = begin(1, SAVES, conduct=Conduct(grace=600.0))
    said_up(run)
    run.signals.append(signal.SIGTERM)
    assert run.until_the_end() == 128 + signal.SIGTERM
    said = capsys.readouterr()
    assert "[0] saved" in said.out
    assert "stopped by SIGTERM; all ranks have ended" in said.err


STUBBORN = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("up", os.getpid(), flush=True)
os.close(1), os.close(2)
while True:
    signal.pause()
"""


def said_up(run: _RayRun) -> int:
    """The process of rank 0, which has come so far that it listens to signals."""
    said = b""
    while b"\n" not in said:
        said += run.actors[0].news.remote().result(60).out
    return int(said.split()[1])


@pytest.mark.parametrize("again", [False, True])
def test_a_rank_that_closed_its_output_and_does_not_listen_is_ended(begin, again) -> None:
    run = begin(1, STUBBORN, conduct=Conduct(grace=600.0 if again else 0.1))
    pid = said_up(run)
    run.signals += [signal.SIGINT] * (2 if again else 1)
    assert run.until_the_end() == 128 + signal.SIGINT
    assert not alive(pid)


def test_reports_count_on_the_launchers_clock(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    rank = RankProcess()
    (rank._notes / "rank-0.json").write_text('{"rank": 0, "when": 0.0}')
    monkeypatch.setattr("time.monotonic", lambda: 12.5)
    report = rank._read_report()
    rank._selector.close()
    assert report is not None
    assert report["when"] == -12.5
    assert not os.path.exists(rank._notes)
