"""Ctrl-C ends every process: ranks, and what ranks have started."""

import os
import select
import signal
import threading

import pytest

from tests.cli.launches import Launched, fork

# A rank with two children: one in its process group, one in a group of its own.
FAMILY = """
import os, signal, subprocess, sys
polite = sys.argv[1] == "polite"
stubborn = {"preexec_fn": lambda: [signal.signal(s, signal.SIG_IGN) for s in (2, 15)]}
children = [
    subprocess.Popen(["sleep", "600"], **stubborn),
    subprocess.Popen(["sleep", "600"], process_group=0, **stubborn)
    if sys.version_info >= (3, 11) else subprocess.Popen(["sleep", "600"], **stubborn),
]
if not polite:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
try:
    print("up", os.getpid(), *(child.pid for child in children), flush=True)
    while True:
        signal.pause()
except KeyboardInterrupt:
    print("cleaning up", flush=True)
    raise
"""


@pytest.fixture
def family(tmp_path):
    """Start two such ranks; gives the launcher and everybody's pid once they are up."""
    started: list[Launched] = []

    def begin(manner: str) -> tuple[Launched, list[int]]:
        (tmp_path / "family.py").write_text(FAMILY)
        launcher = fork(
            *("run", "--nproc", 2, tmp_path / "family.py", manner), TMPDIR=str(tmp_path)
        )
        started.append(launcher)
        watchdog = threading.Timer(120, launcher.kill)
        watchdog.start()
        assert launcher.stdout is not None
        lines = [launcher.stdout.readline().split() for _ in range(2)]
        watchdog.cancel()
        assert [line[1] for line in lines] == ["up", "up"]
        return launcher, [int(pid) for line in lines for pid in line[2:]]

    yield begin
    for launcher in started:
        launcher.end()


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for init does not."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def outlives(pid: int) -> bool:
    """Whether a process still runs some seconds after its launcher: one that was killed may take
    a moment to be gone."""
    try:
        watch = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        return not select.select([watch], [], [], 20)[0]
    finally:
        os.close(watch)


def test_one_ctrl_c_lets_the_ranks_clean_up_and_leaves_nobody(family) -> None:
    launcher, pids = family("polite")
    assert all(map(alive, pids))
    launcher.send_signal(signal.SIGINT)
    out, err = launcher.communicate(timeout=300)
    assert launcher.returncode == 130
    assert sorted(out.splitlines()) == ["[0] cleaning up", "[1] cleaning up"]
    assert err.endswith("paceline: stopped by SIGINT; all ranks have ended\n")
    assert "Traceback" not in err
    assert [pid for pid in pids if outlives(pid)] == []


def test_a_second_ctrl_c_ends_ranks_that_do_not_listen_at_once(family) -> None:
    launcher, pids = family("stubborn")
    launcher.send_signal(signal.SIGINT)
    assert launcher.stderr is not None
    assert "Ctrl-C again ends them at once" in launcher.stderr.readline()
    launcher.send_signal(signal.SIGINT)
    _, err = launcher.communicate(timeout=300)
    assert launcher.returncode == 130
    assert "ending all ranks at once" in err
    assert [pid for pid in pids if outlives(pid)] == []


def test_ranks_do_not_outlive_a_launcher_that_was_killed(family) -> None:
    launcher, pids = family("stubborn")
    ranks = pids[::3]
    watches = [os.pidfd_open(pid) for pid in ranks]
    launcher.kill()
    launcher.communicate(timeout=300)
    for watch in watches:
        assert select.select([watch], [], [], 30.0)[0] == [watch]
        os.close(watch)
    for pid in pids:  # the children are this test's to end: nobody is left to do it
        if alive(pid):
            os.kill(pid, signal.SIGKILL)
