"""Scripts that are hard on their launcher: it tells what happened, ends, and leaves nothing."""

import os
import signal
import time
from pathlib import Path

import pytest

from paceline.cli.run.survivors import read_survivors
from paceline.cli.run.verdict import read_reports
from tests.cli.launches import Ended, paceline


@pytest.fixture
def launch(tmp_path, capsys):
    def run(text: str, *words: object) -> Ended:
        (tmp_path / "script.py").write_text(text)
        return paceline(capsys, "run", *words, tmp_path / "script.py")

    return run


def test_an_error_whose_text_is_no_unicode_is_told(launch) -> None:
    """Names of files may hold any bytes, and Python has them as lone surrogates."""
    ended = launch("open(b'/nowhere/caf\\xe9.txt')\n", "--nproc", 1)
    assert "rank 0 of 1 failed first: FileNotFoundError" in ended.err
    ended = launch("raise ValueError('caf\\udce9')", "--nproc", 1)
    assert r"rank 0 of 1 failed first: ValueError: caf\udce9 (at script.py:1)" in ended.err
    assert ended.code == 1


def test_a_rank_without_descriptors_still_tells_how_it_failed(launch) -> None:
    text = """
import os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))
kept = []
try:
    while True:
        kept.append(os.dup(0))
except OSError:
    pass
raise ValueError("none is left")
"""
    ended = launch(text, "--nproc", 1)
    assert "rank 0 of 1 failed first: ValueError: none is left (at script.py:10)" in ended.err
    assert ended.err.startswith("[0] Traceback")


def test_a_rank_whose_notes_cannot_be_written_prints_its_traceback(launch) -> None:
    text = "import os, shutil; shutil.rmtree(os.environ['PACELINE_NOTES']); raise ValueError('x')"
    ended = launch(text, "--nproc", 1)
    assert "[0] ValueError: x" in ended.err
    assert "rank 0 of 1 failed first: it ended with exit code 1" in ended.err


def test_notes_that_cannot_be_read_are_none(tmp_path: Path) -> None:
    for name in ("rank-0.json", "survivor-0.json"):
        (tmp_path / name).write_text("{")
    (tmp_path / "rank-1.json").mkdir()
    assert read_reports(tmp_path) == {}
    assert read_survivors(tmp_path) == {}


def test_a_rank_that_is_stopped_is_woken_to_end(launch) -> None:
    """SIGTERM waits until a stopped process goes on; nobody would wait for its 600 s."""
    text = """
import os, signal
if os.environ["RANK"] == "0":
    os.kill(os.getpid(), signal.SIGSTOP)
def state(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rsplit(")")[1].split()[0]
    except OSError:
        return "gone"
while os.environ["RANK"] == "1":
    parent = os.getppid()
    mates = open(f"/proc/{parent}/task/{parent}/children").read().split()
    if "T" in map(state, mates):
        os._exit(4)
"""
    began = time.monotonic()
    ended = launch(text, "--nproc", 2, "--patience", 0.1, "--grace", 600)
    assert ended.code == 4
    assert "rank 0 then was stopped" in ended.err
    assert time.monotonic() - began < 300


@pytest.mark.parametrize(
    "text",
    [
        "import sys; sys.stdout.close()",
        "import sys; sys.stdout = None",
        "import os; os.close(1)",
    ],
)
def test_a_rank_that_has_closed_its_output_fails_as_any_other(launch, text) -> None:
    ended = launch(text + "\nraise KeyboardInterrupt", "--nproc", 1)
    assert ended.code == 128 + signal.SIGINT
    assert "Traceback" not in ended.err.partition("failed first")[0]


def test_bytes_that_are_no_text_are_shown_as_far_as_they_are(launch) -> None:
    text = """
import os
os.write(1, b"\\x00\\xff\\xfe before\\n" + b"x" * 2_000_000)
os.write(1, b"\\nafter")
"""
    ended = launch(text, "--nproc", 1)
    lines = ended.out.splitlines()
    assert (ended.code, ended.err) == (0, "")
    assert lines[0] == "[0] \x00\ufffd\ufffd before"
    assert lines[-1] == "[0] after"
    assert sum(line.count("x") for line in lines) == 2_000_000


def test_what_a_rank_forked_is_no_rank(launch) -> None:
    """A child that fails, and one that goes on after its rank has ended well, change nothing."""
    text = """
import os, time
if os.fork() == 0:
    raise ValueError("in a child")
os.wait()
alive, rank = os.pipe()
if os.fork() == 0:
    os.close(alive)
    time.sleep(600)
print(os.getpid(), flush=True)
"""
    ended = launch(text, "--nproc", 1)
    assert ended.code == 0
    assert "failed first" not in ended.err
    session = int(ended.out.split()[1])
    left = [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and of(session, p)]
    assert len(left) == 1, "the run has ended though it goes on"
    os.kill(left[0], signal.SIGKILL)


def of(session: int, process: Path) -> bool:
    try:
        fields = (process / "stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return False
    return int(fields[3]) == session and fields[0] != "Z"
