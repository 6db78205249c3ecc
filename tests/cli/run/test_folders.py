"""Folders of launches: who removes which."""

import fcntl
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.run.folders import LaunchFolder

KILLED = """
import os, signal, sys
sys.argv[0] = "paceline"  # as the command line has it, which does not import torch
from paceline.cli.run.folders import LaunchFolder
folder = LaunchFolder("paceline-run-", sys.argv[1])
(folder.path / "note").write_text("of a rank")
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def left(tmp_path) -> Path:
    """The folder of a launcher that was killed."""
    ended = subprocess.run([sys.executable, "-c", KILLED, tmp_path], check=False, timeout=300)
    assert ended.returncode == -signal.SIGKILL
    (found,) = tmp_path.glob("paceline-run-*")
    return found


def test_a_folder_is_its_users_alone_and_gone_at_the_end(tmp_path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with LaunchFolder("paceline-run-", str(tmp_path)) as folder:
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
        (folder.path / "inside").mkdir()
    assert not list(tmp_path.iterdir())
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_folder_of_a_launcher_that_was_killed_is_removed_by_the_next(left, tmp_path) -> None:
    with LaunchFolder("paceline-run-", str(tmp_path)) as folder:
        assert list(tmp_path.iterdir()) == [folder.path]


def test_the_folder_of_a_launcher_that_lives_is_left_alone(tmp_path) -> None:
    with LaunchFolder("paceline-run-", str(tmp_path)) as first:
        with LaunchFolder("paceline-run-", str(tmp_path)):
            pass
        assert first.path.is_dir()


def test_a_folder_whose_keeper_lives_is_left_alone_until_it_has_ended(left, tmp_path) -> None:
    with (left / "members.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        LaunchFolder("paceline-run-", str(tmp_path)).close()
        assert (left / "note").exists()
    LaunchFolder("paceline-run-", str(tmp_path)).close()
    assert not left.exists()


def test_folders_that_are_not_those_of_a_launch_of_this_host_are_left_alone(left, tmp_path) -> None:
    (left / "launch.lock").write_text("another host, or before it was started last")
    other = tmp_path / "paceline-run-of-mine"
    other.mkdir()
    link = tmp_path / "paceline-run-link"
    link.symlink_to(left)
    LaunchFolder("paceline-run-", str(tmp_path)).close()
    assert left.exists()
    assert other.exists()
