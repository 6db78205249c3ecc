"""Signals to an elastic launch, and the end of its agent: nothing is left, nobody is cut short."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from tests.cli.run.elastic.conftest import STAND_IN
from tests.cli.run.elastic.member import MEMBER
from tests.waiting import until

ASKED = """
def asked(number, frame):
    mark(f"asked {me}")
    if me == 0 and "again" in sys.argv:
        os.kill(os.getppid(), signal.SIGTERM)
signal.signal(signal.SIGTERM, asked)
mark(f"ready {me}")
if me == 0:
    wait_for("ready 0", "ready 1")
    os.kill(os.getppid(), getattr(signal, os.environ["FIRST"]))
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_members_finish_what_they_do_and_nobody_is_started_again(run, tmp_path, name) -> None:
    ended = run(
        ASKED + "wait_for('asked 0', 'asked 1'); mark(f'saved {me}')", "--nproc", 2, FIRST=name
    )
    assert ended.code == 128 + getattr(signal, name), ended.err
    assert (tmp_path / "saved 0").exists()
    assert (tmp_path / "saved 1").exists()
    assert not (tmp_path / "2").exists()
    assert f"after {name}, members finish their step and leave; they have 30 s" in ended.err
    assert f"stopped by {name}; all members have ended" in ended.err


def test_a_second_signal_ends_all_at_once(run, tmp_path) -> None:
    script = ASKED.replace('"again" in sys.argv', "True") + "\nwhile True: signal.pause()"
    ended = run(script, "--nproc", 2, FIRST="SIGTERM")
    assert ended.code == 128 + signal.SIGTERM
    assert "ending all members at once" in ended.err


def test_members_that_need_longer_than_the_grace_are_killed(run) -> None:
    ended = run(
        ASKED + "\nwhile True: signal.pause()", "--nproc", 2, "--grace", 0.2, FIRST="SIGTERM"
    )
    assert ended.code == 128 + signal.SIGTERM


def test_a_signal_before_members_take_part_ends_them(run) -> None:
    ended = run("#!\nimport os, signal\nos.kill(os.getppid(), 15)\nsignal.pause()", "--nproc", 1)
    assert ended.code == 128 + signal.SIGTERM


# An agent that is killed. It is a process of its own, whose keeper is the stand-in.

PACELINE = """
import sys
from paceline.cli.run.elastic import launch
launch.keeper_command = lambda path, *rest: [sys.executable, {stand_in!r}, path]
from paceline.cli import main
sys.exit(main())
"""
TALKS = """
print(os.getppid(), flush=True)
wait_for("killed")
for number in range(3000):
    print("nobody reads these lines, and they are more than a pipe holds", number)
    print("this one neither", file=sys.stderr)
mark(f"done {me}")
"""


def test_members_of_an_agent_that_is_killed_go_on_and_may_print(tmp_path) -> None:
    command = tmp_path / "paceline"  # by that name it imports torch late
    command.write_text(PACELINE.format(stand_in=str(STAND_IN)))
    script = tmp_path / "member.py"
    script.write_text(MEMBER + TALKS)
    with subprocess.Popen(
        [sys.executable, command, "run", "--elastic", "--nproc", "2", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        start_new_session=True,
    ) as agent:
        watchdog = threading.Timer(60, agent.kill)
        watchdog.start()
        try:
            assert agent.stdout is not None
            assert [int(agent.stdout.readline().split()[1]) for _ in range(2)] == [agent.pid] * 2
        finally:
            watchdog.cancel()
            agent.kill()
    (tmp_path / "killed").touch()
    done = [tmp_path / "done 0", tmp_path / "done 1"]
    assert until(lambda: all(path.exists() for path in done))
