"""One endpoint for all ranks of a host: who is told, who is not any more, and what is refused."""

import os
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from paceline.errors import RecorderArgumentError
from paceline.recorder import host_metrics
from paceline.recorder.export import Numbers
from paceline.recorder.host_metrics import HostNumbers, RankNumbers, begin
from paceline.recorder.run import write_whole

NUMBERS = Numbers(7, 20, 1024.0, 0, 0.25, 0.1)


def note(folder: Path, pid: int, rank: int) -> None:
    write_whole(folder / f"{pid}.json", msgspec.json.encode(RankNumbers(pid, {rank: NUMBERS})))


def told(folder: Path) -> dict[str, dict[str, float]]:
    """Values by metric and rank."""
    return {
        family.name: {sample.labels["rank"]: sample.value for sample in family.samples}
        for family in HostNumbers(folder).collect()
    }


def test_every_rank_that_runs_is_a_label_and_one_that_has_ended_is_none(tmp_path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(120)
    note(tmp_path, os.getpid(), 0)
    note(tmp_path, os.getppid(), 3)
    note(tmp_path, ended.pid, 5)
    (tmp_path / "1.json").write_text("half a no")
    found = told(tmp_path)
    assert found["paceline_steps"] == {"0": 7, "3": 7}
    assert found["paceline_wait_share"] == {"0": 0.1, "3": 0.1}
    assert not (tmp_path / f"{ended.pid}.json").exists()


def test_a_rank_that_does_not_answer_leaves_its_numbers(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(host_metrics.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "1")
    written = threading.Event()

    def write(path: Path, content: bytes) -> None:
        if not written.is_set():
            write_whole(path, content)
        written.set()

    monkeypatch.setattr(host_metrics, "write_whole", write)
    monkeypatch.setattr(host_metrics, "numbers_here", lambda: {2: NUMBERS})
    ends: list[Callable[[], object]] = []  # else its thread would write until this process ends
    monkeypatch.setattr(host_metrics, "atexit", types.SimpleNamespace(register=ends.append))
    begin("9400")
    assert written.wait(60)
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert told(folder)["paceline_steps"] == {"2": 7}
    ends[0]()


def test_a_folder_that_others_can_write_is_refused_and_training_goes_on(
    tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(host_metrics.tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / f"paceline-metrics-{os.geteuid()}-9400").mkdir(mode=0o755)
    begin("9400")
    assert "is open to other users" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["0", "port", "host:", "70000"])
def test_what_is_no_address_is_said(where, capsys) -> None:
    begin(where)
    assert "PORT or HOST:PORT" in capsys.readouterr().err
    with pytest.raises(RecorderArgumentError):
        host_metrics._address(where)
