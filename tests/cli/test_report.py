"""``paceline report``: what it writes, what it says, and how it refuses."""

from __future__ import annotations

import json
import webbrowser
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.recorder.run import path_of
from tests.recorder.report.runs import made_up_run, write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", made_up_run(3, 12, slow=1))


def test_it_writes_the_page_and_the_trace_and_says_what_stands_out(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(run)]) == 0
    said = capsys.readouterr()
    assert "Rank 1 made the others wait" in said.out
    assert str(run / "report.html") in said.out
    assert said.err == ""
    assert (run / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert json.loads((run / "trace.json").read_bytes())["traceEvents"]


def test_out_names_the_pages_file(run: Path, tmp_path: Path) -> None:
    assert main(["report", str(run), "--out", str(tmp_path / "x" / "page.html")]) == 0
    assert (tmp_path / "x" / "page.html").exists()
    assert (tmp_path / "x" / "page.trace.json").exists()
    assert not (run / "report.html").exists()


def test_out_names_a_folder_that_is_still_to_be_made(run: Path, tmp_path: Path) -> None:
    assert main(["report", str(run), "--out", str(tmp_path / "new" / "pages")]) == 0
    assert (tmp_path / "new" / "pages" / "report.html").exists()
    assert (tmp_path / "new" / "pages" / "trace.json").exists()


def test_open_shows_the_page(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: shown.append(url) or True)
    assert main(["report", str(run), "--open"]) == 0
    assert shown == [(run / "report.html").resolve().as_uri()]


def test_where_no_browser_can_be_started_it_says_what_to_open(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(webbrowser, "open", lambda url: False)
    assert main(["report", str(run), "--open"]) == 0
    assert "open " + str((run / "report.html").resolve()) in capsys.readouterr().err


def test_missing_ranks_are_said_and_the_others_are_reported(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path_of(run, 1).unlink()
    assert main(["report", str(run)]) == 0
    assert "There is no log of rank 1 of 3" in capsys.readouterr().err
    assert "There is no log of rank 1 of 3" in (run / "report.html").read_text()


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a refusal is told in."""
    assert main(["report", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("paceline: ")
    return line


def test_a_folder_that_is_not_there_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused([str(tmp_path / "nowhere")], capsys)
    assert "nowhere: there is no such folder. Record one with" in line


def test_a_folder_without_logs_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "no log of a rank" in refused([str(tmp_path)], capsys)


def test_a_damaged_log_is_refused_by_name(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path_of(run, 2).write_text("{")
    line = refused([str(run)], capsys)
    assert "rank-00002.json is damaged" in line
    assert not (run / "report.html").exists()


def test_a_log_of_another_version_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = path_of(run, 0)
    path.write_text(path.read_text().replace('"version":1', '"version":7'))
    assert "version 7" in refused([str(run)], capsys)


def test_a_place_that_cannot_be_written_to_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocked = run / "rank-00000.json" / "page.html"  # below a file
    line = refused([str(run), "--out", str(blocked)], capsys)
    assert "rank-00000.json" in line


def test_no_run_at_all_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "RUN" in refused([], capsys)
