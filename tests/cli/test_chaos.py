"""``paceline demo --chaos``: what it shows, whom it kills, and the command itself."""

import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from paceline.cli.demo import chaos
from paceline.cli.demo.chaos import Killer, _run, _tell
from paceline.cli.demo.chaos_board import ChaosBoard, chaos_page
from paceline.cli.demo.talk import MemberEnds, MemberStarts, Message, ShardLoss, TalkListener


def board(*, rough: bool = True) -> ChaosBoard:
    """Two members have done two steps of two shards, in one run or in both."""
    found = ChaosBoard(steps=4, shards=2)
    for again in (False, True)[: 1 + rough]:
        if again:
            found.begin_rough()
        for member in (0, 1):
            found.hear(MemberStarts(member, 1000 + member))
            for step in (0, 1):
                found.hear(ShardLoss(member, step, member, 3.0 - step + member))
    return found


def test_a_step_counts_once_all_its_shards_are_told() -> None:
    found = board()
    found.hear(ShardLoss(0, 2, 0, 1.0))
    assert found.rough.curve() == [3.5, 2.5]
    assert found.line() == "with kills: step 2 of 4  loss 2.500  0 killed"


def test_a_shard_that_is_computed_again_changes_nothing_if_it_is_the_same() -> None:
    found = board()
    found.hear(ShardLoss(0, 1, 1, 3.0))
    assert found.rough.differs_from(found.calm) == []
    found.hear(ShardLoss(0, 1, 1, 3.0000001))
    assert found.rough.differs_from(found.calm) == [1]


def test_the_page_shows_both_curves_and_who_was_killed() -> None:
    found = board()
    found.hear(MemberStarts(2, 1002))
    found.note_kill(1)
    screen = Console(file=io.StringIO(), width=100)
    screen.print(chaos_page(found))
    shown = screen.file.getvalue()
    for words in ("without faults", "with kills", "killed in step 1", "trains", "waits"):
        assert words in shown


def test_one_that_trains_is_killed_when_it_is_time_and_never_the_last() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    try:
        found = board()
        found.pids = {0: child.pid, 1: child.pid}
        killer = Killer(found, every=5.0)
        killer.look(100.0)  # at once when two train
        assert child.wait(120) == -signal.SIGKILL
        assert len(found.killed) == 1
        killer.look(200.0)
        assert len(found.killed) == 1
    finally:
        child.kill()
        child.wait()


def test_one_that_had_ended_already_was_not_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    found = board()
    found.pids = {0: child.pid, 1: child.pid}
    Killer(found, every=5.0).look(100.0)
    assert not found.killed


def test_somebody_is_killed_in_a_run_that_is_over_before_it_is_time() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    try:
        found = board()
        found.pids = {0: child.pid}
        killer = Killer(found, every=500.0)
        killer.look(100.0)  # one alone: it is not time before 600
        found.pids[1] = child.pid
        found.steps = 3 * found.step
        killer.look(101.0)
        assert child.wait(120) == -signal.SIGKILL
        assert len(found.killed) == 1
    finally:
        child.kill()
        child.wait()


def test_nobody_is_killed_in_the_run_without_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "kill", lambda pid, number: None)  # or else it would be this process
    found = board(rough=False)
    found.pids = {0: os.getpid(), 1: os.getpid()}
    Killer(found, every=0.0).look(100.0)
    assert not found.killed


def test_nobody_is_killed_when_the_others_may_have_finished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "kill", lambda pid, number: None)  # or else it would be this process
    found = board()
    found.pids = {0: os.getpid(), 1: os.getpid()}
    found.hear(ShardLoss(0, found.steps - 1, 0, 1.0))
    Killer(found, every=0.0).look(100.0)
    assert not found.killed


class LateListener(TalkListener):
    """Hears nothing before it is closed, as where its thread gets no turn."""

    def __init__(self, hear: Callable[[Message], None]) -> None:
        super().__init__(hear)
        self._closing = threading.Event()

    def __exit__(self, *exception: object) -> None:
        self._closing.set()
        super().__exit__(*exception)

    def _listen(self) -> None:
        self._closing.wait()
        super()._listen()


TELLS = """
import sys
from paceline.cli.demo.talk import MemberEnds, ShardLoss, Teller
with Teller(sys.argv[1]) as teller:
    teller.tell(ShardLoss(0, 0, 0, 1.5))
    teller.tell(MemberEnds(0, sys.argv[2]))
"""


def test_what_members_told_late_counts_for_their_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(chaos, "TalkListener", LateListener)
    found = ChaosBoard(steps=1, shards=1)
    for digest, losses in (("calm", found.calm), ("rough", found.rough)):

        def command(address: str, digest: str = digest) -> list[str]:
            return [sys.executable, "-c", TELLS, address, digest]

        assert _run(command, tmp_path / "said.txt", found, lambda now: None) == 0
        assert losses.curve() == [1.5]
        assert losses.digests == {digest}
        found.begin_rough()


@pytest.mark.parametrize(
    ("digests", "codes", "code", "words"),
    [
        (("a", "a"), [0, 0], 0, "bit by bit"),
        (("a", "a", "nobody killed"), [0, 0], 1, "no member was killed"),
        (("a", "b"), [0, 0], 1, "not the same, first in the weights at the end"),
        (("", "a"), [0, 0], 1, "no member told its weights at the end of the run without faults"),
        (("a", ""), [0, 0], 1, "no member told its weights at the end of the run with kills"),
        (("a", "a"), [3], 1, "the run without faults ended with exit code 3"),
        (("a", "a"), [0, 9], 1, "the run with kills ended with exit code 9"),
        (("a", "a"), [0, -9], 1, "the run with kills ended with exit code -9"),
    ],
)
def test_the_end_says_whether_both_runs_are_the_same(
    capsys, tmp_path, digests, codes, code, words
) -> None:
    found = ChaosBoard(steps=4, shards=2)
    found.hear(MemberEnds(0, digests[0]))
    found.begin_rough()
    found.killed = [] if digests[2:] else [(1, 2)]
    found.hear(MemberEnds(0, digests[1]))
    assert _tell(found, codes, tmp_path) == code
    said = capsys.readouterr()
    assert words in said.out + said.err


@pytest.mark.slow
def test_the_demo_ends_with_the_weights_of_the_run_without_faults(tmp_path) -> None:
    command = [sys.executable, "-m", "paceline", "demo", "--chaos", "--nproc", "2"]
    ended = subprocess.run(
        [*command, "--steps", "60", "--out", tmp_path],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "bit by bit" in ended.stdout
    assert "0 members were killed" not in ended.stdout
