"""Reading a run's folder: errors for what cannot be read, notes for what is missing."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import msgspec
import pytest

from paceline.errors import DamagedLogError, LogVersionError, RunMissingError
from paceline.recorder.report.read import listed, on_one_clock, read
from paceline.recorder.run import VERSION, path_of
from tests.recorder.report.runs import made_up_run, write_run


def test_a_folder_that_is_not_there_is_an_error_that_says_how_to_record(tmp_path: Path) -> None:
    with pytest.raises(RunMissingError, match="paceline run --record") as caught:
        read(tmp_path / "nothing")
    assert caught.value.path == str(tmp_path / "nothing")
    assert isinstance(caught.value, FileNotFoundError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_file_in_place_of_a_folder_is_an_error(tmp_path: Path) -> None:
    write_run(tmp_path, made_up_run(1, 1))
    with pytest.raises(RunMissingError, match="a file, not the folder"):
        read(path_of(tmp_path, 0))


def test_a_folder_without_logs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunMissingError, match="no log of a rank"):
        read(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b'{"version": 1, "rank": "zero"}', b"\xff\xfe"])
def test_a_damaged_log_is_named(tmp_path: Path, content: bytes) -> None:
    write_run(tmp_path, made_up_run(2, 1))
    path_of(tmp_path, 1).write_bytes(content)
    with pytest.raises(DamagedLogError) as caught:
        read(tmp_path)
    assert caught.value.path == str(path_of(tmp_path, 1))


def test_a_log_that_was_cut_off_is_damaged(tmp_path: Path) -> None:
    write_run(tmp_path, made_up_run(1, 3))
    path = path_of(tmp_path, 0)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DamagedLogError, match="truncated"):
        read(tmp_path)


def test_a_log_of_another_version_is_named_with_both_versions(tmp_path: Path) -> None:
    write_run(tmp_path, made_up_run(1, 1))
    path = path_of(tmp_path, 0)
    later = {**json.loads(path.read_text()), "version": VERSION + 1, "steps": "in another form"}
    path.write_text(json.dumps(later))
    with pytest.raises(LogVersionError, match="newer") as caught:
        read(tmp_path)
    assert (caught.value.found, caught.value.known) == (VERSION + 1, VERSION)


def test_missing_ranks_are_noted_and_the_others_are_read(tmp_path: Path) -> None:
    run = read(write_run(tmp_path, made_up_run(6, 2, absent=(1, 2, 5))))
    assert [log.rank for log in run.logs] == [0, 3, 4]
    assert "no logs of ranks 1-2, 5 of 6" in run.notes[0]


def test_a_whole_run_has_no_notes(tmp_path: Path) -> None:
    assert read(write_run(tmp_path, made_up_run(3, 2))).notes == ()


def test_ranks_with_different_versions_are_noted(tmp_path: Path) -> None:
    one, two = made_up_run(2, 2)
    run = read(write_run(tmp_path, [one, msgspec.structs.replace(two, torch="2.11.0")]))
    assert run.notes == (
        "The ranks do not have the same torch: 2.13.0 on rank 0; 2.11.0 on rank 1.",
    )


def test_logs_that_an_older_and_larger_run_left_behind_are_left_out(tmp_path: Path) -> None:
    write_run(tmp_path, made_up_run(4, 3))
    later = [msgspec.structs.replace(log, clock_offset=100.0) for log in made_up_run(2, 3)]
    write_run(tmp_path, [on_one_clock(log) for log in later])
    run = read(tmp_path)
    assert [log.rank for log in run.logs] == [0, 1]
    assert "older run, of world size 4 (ranks 2-3)" in run.notes[0]


def test_times_are_moved_to_the_clock_of_rank_0_and_what_never_happened_stays_so() -> None:
    (log,) = made_up_run(1, 3)
    endless = msgspec.structs.replace(log.collectives[0], finished=0.0)
    behind = msgspec.structs.replace(log, clock_offset=2.5, collectives=[endless])
    moved = on_one_clock(behind)
    assert moved.steps[1].forward_began == pytest.approx(log.steps[1].forward_began + 2.5)
    assert moved.steps[1].waited == log.steps[1].waited  # a length, not a moment
    assert moved.buckets[0].launched == pytest.approx(log.buckets[0].launched + 2.5)
    assert moved.buckets[0].waited == 0.0
    assert moved.collectives[0].finished == 0.0
    assert moved.clock_offset == 0.0


def test_ranks_are_listed_as_stretches() -> None:
    assert listed([3]) == "rank 3"
    assert listed([7, 0, 1, 2]) == "ranks 0-2, 7"
