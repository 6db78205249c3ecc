"""What can go wrong from outside: one clear message each, and never a stack of the launcher."""

import shutil
import socket
from pathlib import Path

import pytest

import paceline as package
from tests.cli.launches import Ended, paceline, start
from tests.marks import USUAL

# How the error begins that a rank gets when another one has gone; gloo has only torch's.
LOST = "Peer" if USUAL == "shm" else "RuntimeError"

# Two ranks that meet; what happens next is up to the test.
MEET = """
import os, sys, torch, paceline
rank = int(os.environ["RANK"])
group = paceline.new_group()
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text("print('ran')")
    return path


def refused(capsys: pytest.CaptureFixture[str], *words: object, **env: str) -> str:
    """The one line that a refusal is."""
    ended = paceline(capsys, "run", *words, **env)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("paceline: ")
    assert ended.err.count("\n") == 1, ended.err
    return ended.err


def launcher_has_no_stack(ended: Ended) -> bool:
    """Whether every traceback that was shown is a rank's."""
    lines = [line for line in ended.err.splitlines() if "Traceback" in line]
    return all(line.startswith("[") for line in lines) and "elastic" not in ended.err


def test_a_missing_script_is_named(script, capsys, monkeypatch) -> None:
    assert "there is no script trian.py in" in refused(capsys, "--nproc", 1, "trian.py")
    assert "give -m trian" in refused(capsys, "--nproc", 1, "trian")
    assert "there is no module trian" in refused(capsys, "--nproc", 1, "-m", "trian.main")
    (script.parent / "folder").mkdir()
    assert "without a __main__.py" in refused(capsys, "--nproc", 1, "folder")
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may read everything
    assert "train.py may not be read" in refused(capsys, "--nproc", 1, script)
    assert "missing argument 'script'" in refused(capsys, "--nproc", 1).lower()


def test_a_number_that_cannot_be_is_named(script, capsys) -> None:
    assert "--nproc is 0" in refused(capsys, "--nproc", 0, script)
    assert "--nproc is many" in refused(capsys, "--nproc", "many", script)
    assert "--threads is 0" in refused(capsys, "--nproc", 1, "--threads", 0, script)
    assert "--max-restarts is -1" in refused(capsys, "--nproc", 1, "--max-restarts", -1, script)
    assert "--show is first" in refused(capsys, "--nproc", 1, "--show", "first", script)
    assert "--nnodes is 0" in refused(capsys, "--nproc", 1, "--nnodes", 0, script)
    assert "Invalid value for '--threads'" in refused(capsys, "--threads", "two", script)


def test_an_unknown_option_or_backend_is_named(script, capsys) -> None:
    assert "No such option: --nprocs" in refused(capsys, "--nprocs", 2, script)
    said = refused(capsys, "--nproc", 1, "--backend", "infiniband", script)
    assert "there is no backend infiniband" in said
    assert "auto, gloo, hybrid, nccl, shm" in said


def test_a_backend_without_its_hardware_is_named(script, capsys) -> None:
    if package.groups.capabilities()["nccl"].available:
        pytest.skip("there is a GPU")
    said = refused(capsys, "--nproc", 1, "--backend", "nccl", script)
    assert "the nccl backend cannot be used here" in said


def test_a_port_that_is_taken_is_named(script, capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused(capsys, "--nproc", 1, "--master-port", port, script)
    assert f"port {port} on 127.0.0.1 is taken by another process" in said


def test_a_place_for_records_that_cannot_be_written_is_named(script, capsys) -> None:
    said = refused(capsys, "--nproc", 1, "--record", script / "below", script)
    assert f"cannot record into {script}/below" in said
    assert "cannot record into /proc" in refused(capsys, "--nproc", 1, "--record", "/proc", script)
    off = {"PACELINE_RECORDER": "0"}
    said = refused(capsys, "--nproc", 1, "--record", "run", script, **off)
    assert "PACELINE_RECORDER=0 turns the recorder off" in said


def test_a_launch_inside_a_rank_is_refused(script, capsys) -> None:
    inside = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}
    said = refused(capsys, "--nproc", 2, script, **inside)
    assert "rank 1 of 4 already" in said


def test_no_shared_memory_is_said_before_anything_starts(script, tmp_path) -> None:
    home = Path(package.__file__).parent
    without = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(home, tmp_path / "copy" / "paceline", ignore=without)
    launched = start(
        *("run", "--nproc", 2, "--backend", "shm", script),
        PYTHONPATH=str(tmp_path / "copy"),
        PYTHONDONTWRITEBYTECODE="1",
    )
    out, err = launched.communicate(timeout=300)
    assert (launched.returncode, out) == (2, "")
    assert err.startswith("paceline: the shm backend cannot be used here: its C library was not")
    assert err.count("\n") == 1


def test_a_script_that_raises_on_one_rank_is_told_first_and_last(script, capsys) -> None:
    script.write_text(
        MEET
        + """
def step():
    if rank == 1:
        raise ValueError("a bad batch")
    group.all_reduce(torch.ones(3))

try:
    step()
finally:
    group.shutdown()
"""
    )
    ended = paceline(capsys, "run", "--nproc", 2, "--patience", 60, script)
    assert ended.code == 1
    lines = ended.err.splitlines()
    assert lines[0] == "[1] Traceback (most recent call last):"
    assert lines[-1] == "[1] ValueError: a bad batch"
    assert ended.err.count("[1] ValueError: a bad batch\n") == 2
    assert "paceline: rank 1 of 2 failed first: ValueError: a bad batch (at train.py:8)" in lines
    (folded,) = [line for line in lines if line.startswith("  rank 0")]
    assert f"then failed with {LOST}" in folded
    assert "[0] Traceback" not in ended.err
    assert launcher_has_no_stack(ended)


def test_a_script_that_exits_on_one_rank_passes_its_code_on(script, capsys) -> None:
    script.write_text(
        """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")  # torch's own: its errors are told apart too
if dist.get_rank() == 1:
    sys.exit(3)
dist.all_reduce(torch.ones(3))
"""
    )
    ended = paceline(capsys, "run", "--nproc", 2, "--patience", 60, script)
    assert ended.code == 3
    said = "rank 1 of 2 failed first: it ended with exit code 3 (at train.py:5)"
    assert said in ended.err
    assert "  rank 0 then failed with RuntimeError: " in ended.err
    assert "Traceback" not in ended.err
    assert launcher_has_no_stack(ended)


def test_a_rank_that_ends_early_without_an_error_is_named_as_the_missing_one(
    script, capsys
) -> None:
    script.write_text(
        MEET
        + """
import time
if rank == 1:
    open("pid", "w").write(str(os.getpid()))
else:
    try:
        group.all_reduce(torch.ones(3))
    finally:  # only then has the launcher seen that it ended
        while os.path.exists(f"/proc/{open('pid').read()}"):
            time.sleep(0.01)
"""
    )
    ended = paceline(capsys, "run", "--nproc", 2, script)
    assert ended.code == 1
    assert f"paceline: rank 0 of 2 failed first: {LOST}" in ended.err
    assert "(at train.py:11)" in ended.err
    assert "  rank 1 had ended before, with exit code 0\n" in ended.err
    assert ended.err.count("Traceback") == 1
    assert launcher_has_no_stack(ended)


def test_a_rank_killed_by_a_signal_is_named_and_the_code_is_a_shells(script, capsys) -> None:
    script.write_text(
        "import os, signal, time\n"
        "if os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\n"
        "signal.pause()"
    )
    ended = paceline(capsys, "run", "--nproc", 2, script)
    assert ended.code == 128 + 9
    assert "rank 1 of 2 failed first: it was killed by SIGKILL" in ended.err
    assert "  rank 0 then was stopped\n" in ended.err


def test_ranks_that_did_not_train_together_are_an_error(script, capsys) -> None:
    script.write_text(
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)"
    )
    ended = paceline(capsys, "run", "--nproc", 2, script)
    assert ended.code == 1
    assert "2 ranks were started, but the script made its group of 1" in ended.err
    assert launcher_has_no_stack(ended)
