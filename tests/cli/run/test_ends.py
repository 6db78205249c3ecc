"""How long ranks have to end, by which clock, and which signals end a launcher."""

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from paceline.cli.run.agent import ways_to_end
from paceline.cli.run.launch import Conduct
from tests.cli.launches import Launched, fork, paceline, signals_kept
from tests.cli.run.test_ctrl_c import alive
from tests.cli.run.test_machines import free_port

# On SIGTERM it saves, and that takes as long as nobody writes to the named pipe of its rank. Given
# another named pipe, rank 1 is killed; the pipe opens when both ranks open it.
SAVES = """
import os, signal, sys
def save(*_):
    print("saving", flush=True)
    open(sys.argv[1] + os.environ["RANK"]).read()
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("up", os.getpid(), flush=True)
for both_are_up in sys.argv[2:]:
    open(both_are_up, "rw"[int(os.environ["RANK"])]).close()
    if os.environ["RANK"] == "1":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGKILL)
while True:
    signal.pause()
"""


@pytest.fixture
def begin(tmp_path) -> Iterator:
    started: list[Launched] = []
    watchdogs: list[threading.Timer] = []

    def launch(*words: object, text: str = SAVES, **env: str) -> Launched:
        (tmp_path / "script.py").write_text(text)
        launched = fork(*words, TMPDIR=str(tmp_path), **env)
        started.append(launched)
        watchdogs.append(threading.Timer(120, launched.kill))
        watchdogs[-1].start()
        return launched

    yield launch
    for watchdog in watchdogs:
        watchdog.cancel()
    for launched in started:
        launched.end()


def line(launched: Launched, word: str) -> str:
    """The next line of the launcher's output with this word in it."""
    assert launched.stdout is not None
    for text in launched.stdout:
        if word in text:
            return text
    raise AssertionError(f"no line with {word}")


def test_ranks_have_30_seconds_by_default_as_under_torchrun(capsys) -> None:
    assert Conduct().grace == 30.0
    assert ways_to_end(False, 30.0) == ((signal.SIGTERM, 30.0),)
    assert ways_to_end(True, 30.0) == ((signal.SIGINT, 30.0), (signal.SIGTERM, 5.0))
    ended = paceline(capsys, "run", "--help", COLUMNS="200")
    assert re.search(r"--grace\s+SECONDS.*\[default: 30", re.sub(r"[│\n ]+", " ", ended.out))


@pytest.mark.parametrize("fails", [False, True])
def test_a_rank_that_saves_is_waited_for_and_the_launcher_ends_when_it_has(
    begin, tmp_path, fails
) -> None:
    for name in ("gate0", "gate1", "both"):
        os.mkfifo(tmp_path / name)
    words = ["run", "--nproc", 2, "--grace", 600, tmp_path / "script.py", tmp_path / "gate"]
    launched = begin(*words, *([tmp_path / "both"] if fails else []))
    line(launched, "up"), line(launched, "up")
    if not fails:
        launched.send_signal(signal.SIGTERM)
    saving = range(1 if fails else 2)
    for _ in saving:
        line(launched, "saving")
    for rank in saving:
        with open(tmp_path / f"gate{rank}", "w"):  # it waits for its rank, which reads to the end
            pass
    if not fails:
        line(launched, "saved")
    line(launched, "saved")
    _, err = launched.communicate(timeout=300)  # nobody waits for the other 600 s
    assert launched.returncode == (128 + signal.SIGKILL if fails else 128 + signal.SIGTERM), err


def test_a_rank_that_needs_longer_than_the_grace_is_killed(begin, tmp_path) -> None:
    os.mkfifo(tmp_path / "gate0")
    words = ["--shutdown-timeout", 0.2, tmp_path / "script.py", tmp_path / "gate"]
    launched = begin("run", "--nproc", 1, *words)
    pid = int(line(launched, "up").split()[2])
    launched.send_signal(signal.SIGTERM)
    line(launched, "saving")
    out, _ = launched.communicate(timeout=300)
    assert (launched.returncode, out) == (128 + signal.SIGTERM, "")
    assert not alive(pid)


def test_a_clock_that_is_set_while_ranks_end_cuts_nobody_short(
    tmp_path, capsys, monkeypatch
) -> None:
    """The script has failed, its process saves in a thread, and the wall clock runs wild."""
    script = tmp_path / "script.py"
    script.write_text(
        "import threading\n"
        "done = threading.Event()\n"
        "def save():\n"
        "    done.wait(0.5)\n"
        "    print('saved', flush=True)\n"
        "threading.Thread(target=save).start()\n"
        "raise ValueError('first')"
    )
    true_time = time.time
    began = true_time()
    monkeypatch.setattr(time, "time", lambda: true_time() + 3600 * (true_time() - began))
    ended = paceline(capsys, "run", "--nproc", 1, script)
    assert ended.out == "[0] saved\n"
    assert (ended.code, "ValueError: first" in ended.err) == (1, True)


def test_a_rank_whose_script_has_failed_and_that_does_not_end_is_ended_after_the_grace(
    tmp_path, capsys
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import threading\n"
        "threading.Thread(target=threading.Event().wait).start()\n"
        "raise ValueError('and a thread that waits for ever')"
    )
    ended = paceline(capsys, "run", "--nproc", 1, "--grace", 0.2, script)
    assert "rank 0 of 1 failed first: ValueError" in ended.err


@pytest.mark.parametrize("grace", ["-1", "nan", "inf", "1e300"])
def test_a_grace_that_is_no_time_is_refused(capsys, tmp_path, grace) -> None:
    (tmp_path / "script.py").touch()
    ended = paceline(capsys, "run", "--nproc", 1, f"--grace={grace}", tmp_path / "script.py")
    assert (ended.code, ended.out) == (2, "")
    assert f"--grace is {float(grace):g}. Give seconds" in ended.err


# Signals to the launcher.


def folder(where: Path) -> list[str]:
    return [path.name for path in where.iterdir() if path.name.startswith("paceline-run-")]


@pytest.mark.parametrize(
    ("node_rank", "number"), [(0, signal.SIGTERM), (0, signal.SIGINT), (1, signal.SIGHUP)]
)
def test_a_launcher_that_waits_for_other_machines_ends_at_once_and_leaves_nothing(
    begin, tmp_path, number, node_rank
) -> None:
    port = free_port()
    words = ["run", "--nproc", 1, "--nnodes", 2, "--key", "none", "--master-addr", "127.0.0.1"]
    words += ["--master-port", port, "--node-rank", node_rank, tmp_path / "script.py"]
    with signals_kept():
        signal.signal(number, signal.SIG_DFL)  # the tests may run under nohup
        launched = begin(*words)
    if node_rank == 0:
        store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60))
        store.wait(["paceline/round/1"])
    else:  # it waits for somebody to listen there: the handlers are set before
        wait_for_handler(launched.pid, number)
    launched.send_signal(number)
    _, err = launched.communicate(timeout=300)
    assert launched.returncode == 128 + number
    assert err == f"paceline: stopped by {number.name}; no rank runs\n"
    assert folder(tmp_path) == []


def wait_for_handler(pid: int, number: int) -> None:
    """Until the process has a handler for this signal."""
    while True:
        status = Path(f"/proc/{pid}/status").read_text()
        caught = int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16)
        if caught >> (number - 1) & 1:
            return


def test_what_nohup_has_a_launcher_ignore_stays_ignored(begin, tmp_path) -> None:
    hangups = """
import os, signal, sys
os.kill(os.getppid(), signal.SIGHUP)
print("still here", flush=True)
"""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # inherited, as from nohup
    try:
        launched = begin("run", "--nproc", 1, tmp_path / "script.py", text=hangups)
    finally:
        signal.signal(signal.SIGHUP, before)
    out, err = launched.communicate(timeout=300)
    assert (launched.returncode, out, err) == (0, "[0] still here\n", "")


def test_a_signal_between_two_attempts_is_not_lost(begin, tmp_path) -> None:
    """Rank 1 fails, rank 0 does not listen to SIGTERM: it arrives while the attempt is ended."""
    stubborn = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
open(sys.argv[1], "rw"[int(os.environ["RANK"])]).close()  # when both ranks open it
if os.environ["RANK"] == "1":
    os._exit(3)
while True:
    signal.pause()
"""
    os.mkfifo(tmp_path / "both")
    words = ["run", "--nproc", 2, "--max-restarts", 3, "--grace", 600, tmp_path / "script.py"]
    launched = begin(*words, tmp_path / "both", text=stubborn)
    line(launched, "asked")
    launched.send_signal(signal.SIGTERM)
    line(launched, "asked")
    launched.send_signal(signal.SIGTERM)
    out, err = launched.communicate(timeout=300)
    assert launched.returncode == 128 + signal.SIGTERM, err
    assert "start again" not in err
    assert out == ""


def test_the_text_of_a_ranks_error_does_not_act_on_the_terminal(tmp_path, capsys) -> None:
    """What a rank prints itself is its own: its output and its traceback come as they are."""
    script = tmp_path / "script.py"
    script.write_text(r"print('\x1b[32mgreen\x1b[0m', flush=True); raise ValueError('\x1b[2Jgone')")
    ended = paceline(capsys, "run", "--nproc", 2, "--patience", 60, script)
    assert ended.out.count("\x1b[32mgreen\x1b[0m") == 2
    told = ended.err[ended.err.index("failed first") :]
    assert "ValueError: \\x1b[2Jgone" in told
    assert "\x1b" not in told
