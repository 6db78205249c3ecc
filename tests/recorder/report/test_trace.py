"""The trace for Perfetto: its structure, as the trace event format has it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from paceline.recorder.report.trace import BUCKETS, CALLS, PASSES, rows, trace
from paceline.recorder.run import RankLog
from tests.recorder.report.runs import ZERO, made_up_run


@pytest.fixture(scope="module")
def logs() -> list[RankLog]:
    return made_up_run(3, 12, slow=1)


@pytest.fixture(scope="module")
def events(logs: list[RankLog]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = trace(logs, ZERO)["traceEvents"]
    return found


def test_every_event_has_what_its_phase_needs(events: list[dict[str, Any]]) -> None:
    needed = {
        "X": {"name", "pid", "tid", "ts", "dur"},
        "M": {"name", "pid", "args"},
        "s": {"id", "cat", "pid", "tid", "ts"},
        "t": {"id", "cat", "pid", "tid", "ts"},
        "f": {"id", "cat", "pid", "tid", "ts", "bp"},
    }
    assert {e["ph"] for e in events} == set(needed)
    for event in events:
        assert needed[event["ph"]] <= event.keys()
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0


def test_each_rank_is_a_process_and_each_thread_has_a_name(events: list[dict[str, Any]]) -> None:
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {rank: f"rank {rank} (node0, pid {4000 + rank})" for rank in range(3)}
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"} == named


def test_slices_of_a_thread_nest_or_follow_each_other(events: list[dict[str, Any]]) -> None:
    threads: defaultdict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            end = event["ts"] + event["dur"]
            threads[event["pid"], event["tid"]].append((event["ts"], -end))
    for slices in threads.values():
        open_ends: list[float] = []
        for began, negative in sorted(slices):
            while open_ends and open_ends[-1] <= began + 1e-3:
                open_ends.pop()
            assert not open_ends or -negative <= open_ends[-1] + 1e-3
            open_ends.append(-negative)


def test_an_arrow_leads_from_each_launch_over_the_flight_to_the_end(
    logs: list[RankLog], events: list[dict[str, Any]]
) -> None:
    arrows: defaultdict[int, dict[str, dict[str, Any]]] = defaultdict(dict)
    for event in events:
        if event["ph"] in "stf":
            arrows[event["id"]][event["ph"]] = event
    assert len(arrows) == sum(len(log.buckets) for log in logs)
    for arrow in arrows.values():
        assert arrow["s"]["ts"] == arrow["t"]["ts"] <= arrow["f"]["ts"]
        assert arrow["s"]["tid"] == arrow["f"]["tid"] == PASSES
        assert BUCKETS <= arrow["t"]["tid"] < CALLS
        assert len({part["pid"] for part in arrow.values()}) == 1


def test_slices_tell_step_bytes_and_line(events: list[dict[str, Any]]) -> None:
    bucket = next(e for e in events if e["ph"] == "X" and e["name"] == "bucket 2")
    assert bucket["args"]["line"] == "train.py:41"
    assert bucket["args"]["bytes"] == 6_291_456
    forward = [e for e in events if e["name"] == "forward" and e["pid"] == 0]
    assert [e["args"]["step"] for e in forward] == list(range(12))
    own = [e for e in events if e["name"] == "all_reduce"]
    assert {e["args"]["line"] for e in own} == {"train.py:57"}


def test_waiting_is_a_slice_inside_the_backward_pass(events: list[dict[str, Any]]) -> None:
    waits = [e for e in events if e["name"].startswith("wait for bucket")]
    assert waits
    assert {e["tid"] for e in waits} == {PASSES}


def test_overlapping_stretches_get_rows_of_their_own() -> None:
    assert rows([(0, 3), (1, 2), (2, 4), (3, 5)]) == [0, 1, 1, 0]


def test_a_trace_that_would_be_too_large_keeps_the_latest_events_and_says_so() -> None:
    logs = made_up_run(2, 40)
    whole, cut = trace(logs, ZERO), trace(logs, ZERO, most_events=240)
    assert whole["otherData"]["events_left_out"] == 0
    assert cut["otherData"]["events_left_out"] > 0
    steps = {e["args"]["step"] for e in cut["traceEvents"] if e["name"] == "forward"}
    assert max(steps) == 39
    assert min(steps) > 0
