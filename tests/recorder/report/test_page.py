"""The page as text: all in one file, escaped, complete without its scripts."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from paceline import recorder
from paceline.recorder.report import read_report, trace_path, write_report
from paceline.recorder.report.facts import gather
from paceline.recorder.report.page import SCRIPTS, page
from paceline.recorder.report.read import Run
from paceline.recorder.report.trace import trace
from paceline.recorder.run import BucketPass, Collective, RankLog, StepRecord
from tests.recorder.report.runs import made_up_run, write_run


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("slow")
    return write_report(write_run(folder, made_up_run(4, 12, slow=3))).read_text()


def test_nothing_on_the_page_is_loaded_from_elsewhere(html: str) -> None:
    before_scripts = html.split("<script", 1)[0]
    assert re.findall(r"\b(?:src|href|action)\s*=\s*(\S+?)>", before_scripts) == ['"data:,"']
    assert "url(" not in html
    assert "@import" not in html
    assert "https://" not in html
    assert "http://" not in html
    assert not re.search(r"\b(fetch|XMLHttpRequest|WebSocket|importScripts|sendBeacon)\b", html)


def test_the_policy_lets_only_the_pages_own_script_run(html: str) -> None:
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    expected = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{expected}'" in html
    assert "default-src 'none'" in html


def test_every_part_of_the_script_is_on_the_page(html: str) -> None:
    folder = Path(recorder.__file__).parent / "report" / "assets"
    assert {path.stem for path in folder.glob("*.js")} == set(SCRIPTS)
    for path in folder.glob("*.js"):
        assert path.read_text() in html


class Tags(HTMLParser):
    """Checks that what is opened is closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in {"meta", "link", "input"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_every_tag_is_closed_in_order(html: str) -> None:
    tags = Tags()
    tags.feed(html)
    assert tags.open == []


def test_words_and_tables_are_there_without_the_scripts(html: str) -> None:
    for text in (
        "Rank 3 made the others wait",
        "Median step",
        "backend shm",
        "train.py:41",
        "Messages by size",
        "Longest waits",
        "trace.json",
    ):
        assert text in html
    assert html.count('<tr class="slow">') == 1


def test_names_from_the_run_cannot_become_part_of_the_page(tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=alert(1)>"
    (log,) = made_up_run(1, 3, notes=[evil])
    calls = [
        msgspec.structs.replace(c, line=evil, shape=evil, operation=evil) for c in log.collectives
    ]
    log = msgspec.structs.replace(log, host=evil, backend=evil, torch=evil, collectives=calls)
    html = write_report(write_run(tmp_path, [log])).read_text()
    assert "<img" not in html
    assert html.count("</script>") == 2
    data = re.findall(r'id="data">(.*?)</script>', html, re.DOTALL)[0]
    assert evil in json.loads(data)["names"]


def test_notes_of_ranks_are_shown_once_with_who_said_them(tmp_path: Path) -> None:
    logs = [msgspec.structs.replace(log, notes=["rank 9 is late"]) for log in made_up_run(2, 2)]
    html = write_report(write_run(tmp_path, logs)).read_text()
    assert html.count("rank 9 is late") == 1
    assert "<b>ranks 0, 1:</b> rank 9 is late" in html


def test_the_page_and_the_trace_lie_where_they_are_asked_to(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", made_up_run(1, 2))
    assert write_report(run) == run / "report.html"
    assert (run / "trace.json").exists()
    (tmp_path / "pages").mkdir()
    assert write_report(run, tmp_path / "pages") == tmp_path / "pages" / "report.html"
    mine = write_report(run, tmp_path / "new" / "mine.html")
    assert mine == tmp_path / "new" / "mine.html"
    assert trace_path(mine).name == "mine.trace.json"
    assert "mine.trace.json" in mine.read_text()
    assert json.loads(trace_path(mine).read_bytes())["traceEvents"]
    assert read_report(run).write_trace(tmp_path / "only.json").exists()
    assert not list(tmp_path.rglob("*.part"))


def test_the_door_writes_the_same_page(tmp_path: Path) -> None:
    run = write_run(tmp_path, made_up_run(2, 3))
    assert recorder.write_report(run).read_text() == write_report(run).read_text()
    assert recorder.read_report(run).said == read_report(run).said


MOMENT = st.one_of(st.just(0.0), st.floats(1.7e9, 1.7e9 + 60))
COUNT = st.integers(0, 5)
NAME = st.text(max_size=8)


def any_log(rank: int) -> st.SearchStrategy[RankLog]:
    """A log in which nothing need fit together."""
    step = st.builds(StepRecord, COUNT, MOMENT, MOMENT, MOMENT, MOMENT, st.floats(0, 60))
    bucket = st.builds(BucketPass, COUNT, COUNT, COUNT, MOMENT, MOMENT, MOMENT, MOMENT)
    number = st.integers(-1, 5)
    call = st.builds(
        Collective, COUNT, NAME, NAME, COUNT, COUNT, NAME, NAME, MOMENT, MOMENT, number, NAME
    )
    return st.builds(
        RankLog, st.just(rank), st.integers(rank + 1, 4), NAME, COUNT, NAME, NAME, NAME,
        st.just(0.0), st.lists(step, max_size=4), st.lists(bucket, max_size=6),
        st.lists(call, max_size=6), st.lists(NAME, max_size=2),
    )  # fmt: skip


@given(st.tuples(any_log(0), any_log(1), any_log(2)), st.integers(1, 3))
@settings(max_examples=40, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
def test_logs_in_which_nothing_fits_together_make_a_page_all_the_same(
    logs: tuple[RankLog, ...], ranks: int
) -> None:
    run = Run("any", logs[:ranks], ())
    facts = gather(run.logs)
    assert 0 <= facts.late_share <= facts.wait_share <= 1
    assert 0 <= facts.hidden_share <= 1
    tags = Tags()
    tags.feed(page(run, facts, "trace.json"))
    assert tags.open == []
    assert trace(run.logs, facts.began)["traceEvents"]
