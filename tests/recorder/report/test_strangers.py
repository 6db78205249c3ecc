"""A recorded run that comes from a stranger: one clear error, or a report in which nothing acts."""

from __future__ import annotations

import json
import os
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline._shown import shown, shown_lines
from paceline.cli import main
from paceline.errors import DamagedLogError, LogVersionError
from paceline.recorder import read_run
from paceline.recorder.report import read_report
from paceline.recorder.report.read import MOST_TOGETHER, read
from paceline.recorder.report.trace import rows
from paceline.recorder.run import MOST_BYTES, path_of, write_whole
from tests.recorder.report.runs import ZERO, made_up_run, write_run

# A terminal obeys escapes, C1 controls and carriage returns; readers are misled by the rest.
ACTS = "\x00\x07\x08\x0d\x1b\x7f\x85\x9b\u061c\u200b\u202e\u2028\u2066\ufeff\ud800"
EVIL = "\x1b]0;owned\x07\x1b[2J\u202e<script>alert(1)</script>'\"><img src=x onerror=alert(1)>\r\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", made_up_run(2, 4))


def change(run: Path, rank: int, alter: Callable[[dict[str, Any]], object]) -> None:
    """Alter the log of ``rank`` on disk."""
    path = path_of(run, rank)
    content = json.loads(path.read_text())
    alter(content)
    path.write_text(json.dumps(content))


def acts(text: str) -> set[str]:
    return {c for c in text if not c.isprintable() and c not in "\n\t"}


def refused(run: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line in which ``paceline report`` refuses the run."""
    assert main(["report", str(run)]) == 2
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert not acts(line)
    assert line.startswith("paceline: ")
    assert said.out == ""
    return line


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("world_size", 10**9),
        ("world_size", 0),
        ("rank", -1),
        ("rank", 10**9),
        ("pid", 10**400),
        ("clock_offset", 1e300),
        ("clock_offset", float("nan")),
        ("host", None),
        ("notes", [[]]),
        ("steps", {"many": 1}),
        ("version", 10**30),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_its_file(
    run: Path, capsys: pytest.CaptureFixture[str], field: str, value: object
) -> None:
    change(run, 1, lambda log: log.update({field: value}))
    assert "rank-00001.json is damaged" in refused(run, capsys)


@pytest.mark.parametrize("moment", [1e300, -1.0, 1e999, -1e-300, float("nan"), "soon", None])
@pytest.mark.parametrize(
    ("events", "field"),
    [("steps", "forward_began"), ("buckets", "launched"), ("collectives", "finished")],
)
def test_a_time_that_is_no_date_is_refused_with_its_place(
    run: Path, capsys: pytest.CaptureFixture[str], events: str, field: str, moment: object
) -> None:
    change(run, 1, lambda log: log[events][2].update({field: moment}))
    line = refused(run, capsys)
    assert "rank-00001.json is damaged" in line
    assert "Remove the file to report on the other ranks" in line


def test_times_that_lie_centuries_apart_are_refused(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(run, 1, lambda log: log["steps"][2].update(backward_ended=ZERO + 1e10))
    line = refused(run, capsys)
    assert "rank-00001.json is damaged: it ends 317 years after the beginning of rank 0's" in line


def test_missing_fields_deep_nests_and_more_events_than_can_be_are_refused(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, whole = path_of(run, 1), path_of(run, 1).read_text()
    change(run, 1, lambda log: log.pop("buckets"))
    assert "missing required field `buckets`" in refused(run, capsys)
    path.write_text('{"deep": ' + "[" * 500_000 + "]" * 500_000 + "," + whole[1:])
    assert "nested too deeply" in refused(run, capsys)
    change_to = json.loads(whole) | {"notes": [""] * 200_000}
    path.write_text(json.dumps(change_to))
    assert "length <= 100000 - at `$.notes`" in refused(run, capsys)


def test_a_log_under_another_ranks_name_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path_of(run, 0).replace(path_of(run, 7))
    assert "rank-00007.json is damaged: it is the log of rank 0 by its content" in refused(
        run, capsys
    )


def test_a_rank_beyond_the_size_that_is_left_of_its_group_is_counted(run: Path) -> None:
    change(run, 1, lambda log: log.update(world_size=1))
    change(run, 0, lambda log: log.update(world_size=1))
    assert read_report(run).facts.world_size == 2


# What lies in the folder.


def test_links_pipes_devices_and_folders_are_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = path_of(run, 1)
    elsewhere = path.rename(tmp_path / "elsewhere.json")
    path.symlink_to(elsewhere)
    assert "rank-00001.json is damaged: it is a link" in refused(run, capsys)
    with pytest.raises(DamagedLogError, match="it is a link"):
        read_run(run)
    path.unlink()
    os.mkfifo(path)  # who opens it to read waits for a writer, without end
    assert "it is not a regular file" in refused(run, capsys)
    path.unlink()
    path.mkdir()
    assert "it is not a regular file" in refused(run, capsys)
    path.rmdir()
    path.symlink_to("/dev/zero")
    assert "it is a link" in refused(run, capsys)


def test_a_huge_file_is_refused_before_it_is_read(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    os.truncate(path_of(run, 1), 10 << 30)
    line = refused(run, capsys)
    assert "its 2 logs have 10.7 GB" in line
    os.truncate(path_of(run, 1), MOST_BYTES + 1)
    assert "rank-00001.json is damaged: it has 67.1 MB, and a log has 67 MB at most" in refused(
        run, capsys
    )
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # kB
    assert MOST_TOGETHER >= 100 * 5_000_000, "a run of 100 ranks fits"


def test_the_report_is_not_written_through_a_link_that_lies_in_its_place(
    run: Path, tmp_path: Path
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for name in ("report.html", "report.html.part", "trace.json", "trace.json.part"):
        (run / name).symlink_to(precious)
    assert main(["report", str(run)]) == 0
    assert precious.read_text() == "mine"
    assert (run / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert not (run / "report.html").is_symlink()


def test_a_pipe_in_place_of_a_draft_does_not_stop_a_rank_that_saves(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log.json.part")
    write_whole(tmp_path / "log.json", b"{}")
    assert (tmp_path / "log.json").read_bytes() == b"{}"


# What is shown.


def test_nothing_from_the_run_acts_on_the_terminal_the_page_or_the_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = made_up_run(2, 4)
    calls = [
        msgspec.structs.replace(c, operation=EVIL, group=EVIL, shape=EVIL, line=EVIL, error=EVIL)
        for c in one.collectives
    ]
    names = {"host": EVIL, "backend": EVIL, "torch": EVIL, "paceline": EVIL}
    bad = msgspec.structs.replace(one, **names, collectives=calls, notes=[EVIL])
    run = write_run(tmp_path / "bidi\u202e\x1b[2Jrun", [bad, two])
    assert main(["report", str(run)]) == 0
    said = capsys.readouterr()
    assert "The ranks do not have the same torch: \\x1b]0;owned\\x07" in said.err
    page, trace = (run / "report.html").read_text(), (run / "trace.json").read_text()
    for text in (said.out, said.err, page, json.dumps(json.loads(trace), ensure_ascii=False)):
        assert not acts(text)
    assert not acts("".join(strings(json.loads(trace))))
    assert "<script>alert" not in page
    assert "<img" not in page


def strings(value: object) -> list[str]:
    """All strings in a JSON value."""
    if isinstance(value, dict):
        return [text for pair in value.items() for one in pair for text in strings(one)]
    if isinstance(value, list):
        return [text for one in value for text in strings(one)]
    return [value] if isinstance(value, str) else []


def test_what_acts_is_shown_as_an_escape_and_the_rest_stays() -> None:
    assert not acts(shown(ACTS))
    assert shown("é 漢 שלום 🙂") == "é 漢 שלום 🙂"
    assert shown("x" * 1000) == "x" * 399 + "…"
    assert shown_lines("a\n\tb\x1b") == "a\n\tb\\x1b"
    assert re.fullmatch(r"[ -~]+", shown(ACTS))


# Whatever it is.

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)
wild = json_values | st.sampled_from(
    [0, -1, 1, 2**53, 2**63, 10**30, 1e-300, 5e-324, 1e11, 2.5e11, ZERO, EVIL, "", [], {}]
)


def places(value: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)  # type: ignore[call-overload]
    found = [path] if path else []
    for key, one in inner:
        found += places(one, (*path, key)) if isinstance(one, dict | list) else [(*path, key)]
    return found


WHOLE = json.loads(msgspec.json.encode(made_up_run(2, 2)[1]))
PLACES = places(WHOLE)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.sampled_from(PLACES), wild), min_size=1, max_size=4))
def test_any_altered_log_is_reported_or_refused_in_one_way(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[tuple[Any, ...], object]]
) -> None:
    run = write_run(tmp_path_factory.mktemp("run"), made_up_run(2, 2)[:1])
    log = json.loads(json.dumps(WHOLE))
    for (*way, last), value in changes:
        try:
            place = log
            for key in way:
                place = place[key]
            place[last] = value
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change has taken the place away
    path_of(run, 1).write_text(json.dumps(log), encoding="utf-8", errors="surrogatepass")
    try:
        report = read_report(run)
    except (DamagedLogError, LogVersionError):
        return
    page = report.write()
    assert not acts(page.read_text())
    assert not acts("".join((*report.said, *report.notes)))


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused_in_one_way(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    run = tmp_path_factory.mktemp("run")
    path_of(run, 0).write_bytes(content)
    with pytest.raises((DamagedLogError, LogVersionError)):
        read(run)


def test_many_slices_that_overlap_are_laid_out_quickly() -> None:
    """Rows are found in a heap: to look through all of them took minutes for a stranger's run."""
    stretches = [(float(i), 1e9) for i in range(60_000)]
    assert rows(stretches) == list(range(60_000))
