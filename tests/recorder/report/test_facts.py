"""From logs to facts and sentences, without a file or a page."""

from __future__ import annotations

import msgspec
import pytest

from paceline.recorder.report.columns import NEVER, columns
from paceline.recorder.report.facts import band, durations, gather, hidden, size_bands
from paceline.recorder.report.late import blame, calls_together, longest_waits, passes
from paceline.recorder.report.words import (
    percent,
    seconds,
    sentences,
    size,
    slow_rank,
    slow_sentence,
    waiting_sentence,
)
from paceline.recorder.run import BucketPass, Collective, RankLog, StepRecord
from tests.recorder.report.runs import ZERO, made_up_run


def log(rank: int, world_size: int = 2, **events: list[object]) -> RankLog:
    filled = {"steps": [], "buckets": [], "collectives": [], **events}
    return RankLog(rank, world_size, "node0", 1, "shm", "2.13", "0.1", 0.0, **filled)  # type: ignore[arg-type]


def call(sequence: int, began: float, finished: float, **more: object) -> Collective:
    facts = {"operation": "all_reduce", "group": "world", "ranks": 2, "nbytes": 1000}
    facts |= {"shape": "float32[250]", "line": "train.py:7"}
    return Collective(sequence=sequence, began=began, finished=finished, **{**facts, **more})  # type: ignore[arg-type]


# Who came last.


def test_waiting_before_the_last_launch_is_charged_to_who_launched_last() -> None:
    early = BucketPass(0, 0, 8, filled=1.0, launched=1.0, finished=6.0, waited=2.0)
    late = BucketPass(0, 0, 8, filled=5.0, launched=5.0, finished=6.0, waited=5.5)
    found = blame(passes([log(0, buckets=[early]), log(1, buckets=[late])]))
    assert found.cost[1] == pytest.approx(3.0)  # from 2 to 5: rank 0 stood there for nothing
    assert found.cost.get(0, 0.0) == 0.0
    assert found.lost[0] == pytest.approx(3.0)
    assert found.waited == pytest.approx({0: 4.0, 1: 0.5})
    assert [(s.number, s.rank) for s in found.steps] == [(0, 1)]


def test_waiting_for_any_bucket_is_charged_to_who_has_yet_to_launch_its_last() -> None:
    def bucket(index: int, launched: float, finished: float, waited: float) -> BucketPass:
        return BucketPass(0, index, 8, launched, launched, finished, waited)

    quick = log(0, buckets=[bucket(0, 1.0, 7.0, 3.0), bucket(1, 2.0, 9.0, 7.0)])
    slow = log(1, buckets=[bucket(0, 2.5, 7.0, 0.0), bucket(1, 8.0, 9.0, 8.5)])
    found = blame(passes([quick, slow]))
    assert found.cost[1] == pytest.approx(5.0)  # 3 to 8: both had launched bucket 0 by then
    assert found.lost == pytest.approx({0: 5.0})


def test_a_rank_that_did_not_wait_lost_nothing() -> None:
    busy = BucketPass(0, 0, 8, filled=1.0, launched=1.0, finished=6.0)
    late = BucketPass(0, 0, 8, filled=5.0, launched=5.0, finished=6.0, waited=5.5)
    found = blame(passes([log(0, buckets=[busy]), log(1, buckets=[late])]))
    assert sum(found.cost.values()) == 0.0
    assert found.last_in() == {1: 1}


def test_the_last_bucket_of_a_step_says_who_came_last_in_it() -> None:
    def bucket(index: int, launched: float) -> BucketPass:
        return BucketPass(3, index, 8, launched, launched, 9.0)

    one = log(0, buckets=[bucket(0, 2.0), bucket(1, 3.0)])
    two = log(1, buckets=[bucket(0, 1.0), bucket(1, 4.0)])
    (step,) = blame(passes([one, two])).steps
    assert (step.number, step.rank) == (3, 1)


def test_two_models_with_the_same_step_and_bucket_are_told_apart_by_their_order() -> None:
    first = BucketPass(1, 0, 8, 1.0, 1.0, 2.0)
    second = BucketPass(1, 0, 16, 3.0, 3.0, 4.0)
    found = passes([log(0, buckets=[first, second]), log(1, buckets=[first, second])])
    assert [{one.nbytes for one in each.values()} for each in found.values()] == [{8}, {16}]


def test_a_slow_rank_is_found_and_named_in_a_sentence() -> None:
    facts = gather(made_up_run(4, 30, slow=2))
    assert slow_rank(facts) == 2
    text = slow_sentence(facts)
    assert text.startswith("Rank 2 made the others wait: it launched last in 30 of 30 steps")
    assert "Its own work takes" in text
    assert facts.late_share > 0.1


def test_what_others_lost_to_a_late_start_is_a_share_of_their_own_time() -> None:
    """The late rank's first step begins when that of the other has almost ended."""

    def bucket(step: int, launched: float, finished: float, waited: float) -> BucketPass:
        return BucketPass(step, 0, 8, launched, launched, finished, waited)

    def steps(first: float, waited: float) -> list[StepRecord]:
        begun = first + 0.5
        return [StepRecord(0, first, begun, begun, 10.0, waited), StepRecord(1, 10.0, 11.0)]

    early = log(0, steps=steps(0.0, 9.0), buckets=[bucket(0, 1.0, 10.0, 1.0)])
    late = log(1, steps=steps(9.0, 0.1), buckets=[bucket(0, 9.8, 10.0, 9.9)])
    text = slow_sentence(gather([early, late]))
    assert "Rank 1 made the others wait" in text
    assert "they lost 8.80 s to it, 88% of their time" in text  # not of half of 10 and 1 s


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_ranks_that_are_late_by_chance_are_not_blamed(ranks: int) -> None:
    facts = gather(made_up_run(ranks, 30, seed=5))
    assert slow_rank(facts) == -1
    assert "made the others wait:" not in " ".join(sentences(facts))


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_one_slow_rank_is_found_among_any_number(ranks: int) -> None:
    assert slow_rank(gather(made_up_run(ranks, 12, slow=ranks - 1))) == ranks - 1


# Time.


def test_a_step_lasts_until_the_next_forward_begins_and_the_last_one_is_left_out() -> None:
    steps = [StepRecord(n, float(n), n + 0.2, n + 0.3, n + 0.5, 0.1) for n in range(4)]
    found = durations(log(0, steps=steps))
    assert [(step.number, lasted) for step, lasted in found] == [(0, 1.0), (1, 1.0), (2, 1.0)]


def test_a_pass_without_a_backward_is_not_a_step_of_training() -> None:
    trained = StepRecord(0, 0.0, 0.2, 0.3, 0.5)
    judged = StepRecord(1, 1.0, 1.4)
    found = durations(log(0, steps=[trained, judged, judged]))
    assert [step.number for step, _ in found] == [0]


def test_the_only_step_lasts_until_its_averages_are_there() -> None:
    ((_, lasted),) = durations(log(0, steps=[StepRecord(0, 1.0, 1.2, 1.3, 1.75)]))
    assert lasted == pytest.approx(0.75)


def test_shares_of_waiting_add_up_to_what_steps_say() -> None:
    logs = made_up_run(3, 20, slow=0)
    facts = gather(logs)
    counted = [pair for one in logs for pair in durations(one)]
    waited = sum(step.waited for step, _ in counted)
    assert facts.wait_share == pytest.approx(waited / sum(lasted for _, lasted in counted))
    assert 0 < facts.late_share < facts.wait_share


def test_travel_that_nobody_waits_for_is_hidden() -> None:
    free = BucketPass(0, 0, 8, 1.0, 1.0, 2.0)
    waited_for = BucketPass(0, 1, 8, 2.0, 2.0, 3.0, waited=2.0)
    assert hidden([log(0, buckets=[free])]) == 1.0
    assert hidden([log(0, buckets=[free, waited_for])]) == pytest.approx(0.5)
    assert hidden([log(0, buckets=[waited_for])]) == 0.0


# Messages.


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [(0, (0, 1)), (1, (1, 3)), (3, (3, 10)), (999, (300, 1000)), (1000, (1000, 3000))],
)
def test_a_size_falls_into_its_half_decade(nbytes: int, expected: tuple[int, int]) -> None:
    assert band(nbytes) == expected


def test_the_same_call_of_two_ranks_counts_once_and_its_time_runs_from_the_last_start() -> None:
    logs = [log(0, collectives=[call(1, 0.0, 5.0)]), log(1, collectives=[call(1, 4.0, 5.0)])]
    (found,) = size_bands(calls_together(logs))
    assert (found.calls, found.nbytes, found.low, found.high) == (1, 1000, 1000, 3000)
    assert found.seconds == pytest.approx(1.0)
    assert found.rate == pytest.approx(1000.0)


def test_a_call_whose_end_nobody_saw_has_no_rate() -> None:
    (found,) = size_bands(calls_together([log(0, collectives=[call(1, 2.0, 0.0)])]))
    assert (found.calls, found.seconds, found.rate) == (1, 0.0, 0.0)


def test_calls_that_share_a_name_but_cannot_be_one_stand_alone() -> None:
    other = call(1, 1.0, 2.0, operation="broadcast")
    assert (
        len(calls_together([log(0, collectives=[call(1, 1.0, 2.0)]), log(1, collectives=[other])]))
        == 2
    )
    messages = [log(rank, collectives=[call(0, 1.0, 2.0, operation="send")]) for rank in (0, 1)]
    assert len(calls_together(messages)) == 2  # messages between two ranks have no number
    crowd = [log(rank, 3, collectives=[call(1, 1.0, 2.0)]) for rank in range(3)]
    assert len(calls_together(crowd)) == 3  # three claim a call of two


def test_two_groups_of_one_name_keep_their_calls_apart() -> None:
    logs = [log(rank, collectives=[call(1, 1.0, 2.0), call(1, 3.0, 4.0)]) for rank in (0, 1)]
    assert [len(each) for each in calls_together(logs)] == [2, 2]


# Longest waits.


def test_the_longest_waits_come_first_with_their_line_and_who_came_last() -> None:
    logs = made_up_run(3, 10, slow=1)
    waits = longest_waits(logs, passes(logs), calls_together(logs), most=5)
    assert len(waits) == 5
    assert [w.seconds for w in waits] == sorted((w.seconds for w in waits), reverse=True)
    first = waits[0]
    assert first.late_rank == 1
    assert first.rank != 1
    assert first.line == "train.py:41"
    assert 0 < first.late_seconds <= first.seconds
    assert set(first.ranks) >= {0, 2}


def test_a_long_call_of_the_users_own_is_among_the_waits() -> None:
    steps = [StepRecord(7, 1.0, 1.1, 1.2, 1.3)]
    slow = [
        log(0, collectives=[call(1, 2.0, 9.0)], steps=steps),
        log(1, collectives=[call(1, 8.5, 9.0)]),
    ]
    (wait,) = longest_waits(slow, passes(slow), calls_together(slow))
    assert (wait.rank, wait.step, wait.what, wait.line) == (0, 7, "all_reduce", "train.py:7")
    assert (wait.late_rank, wait.late_seconds) == (1, pytest.approx(6.5))


# Words.


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, "0 s"),
        (12e-6, "12.0 µs"),
        (3.4e-3, "3.40 ms"),
        (1.25, "1.25 s"),
        (59.94, "59.9 s"),
        (125, "2 min 05 s"),
    ],
)
def test_seconds_are_told_with_a_fitting_unit(value: float, expected: str) -> None:
    assert seconds(value) == expected


def test_sizes_and_shares_are_told_with_a_fitting_unit() -> None:
    assert [size(n) for n in (0, 512, 4_200_000, 3e9)] == ["0 B", "512 B", "4.20 MB", "3.00 GB"]
    assert [percent(s) for s in (0, 0.004, 0.12, 1)] == ["0%", "0.4%", "12%", "100%"]


def test_a_run_of_one_rank_has_nobody_to_wait_for() -> None:
    assert "nobody to wait for" in waiting_sentence(gather(made_up_run(1, 4)))


def test_a_run_without_steps_says_so() -> None:
    assert "No step was recorded" in sentences(gather([log(0)]))[0]


def test_most_of_the_waiting_for_one_bucket_is_worth_a_sentence() -> None:
    assert "is for bucket 3 of 4" in sentences(gather(made_up_run(2, 30)))[-1]


# Columns.


def test_columns_add_up_to_the_times_they_came_from() -> None:
    logs = made_up_run(2, 5)
    found = columns(logs, ZERO, ZERO + 1)
    launched, sums = found["ranks"][1]["buckets"]["launched"], []
    for distance in launched:
        sums.append((sums[-1] if sums else 0) + distance)
    expected = [round((one.launched - ZERO) * 1e6) for one in logs[1].buckets]
    assert sums == expected
    assert found["span"] == 1_000_000


def test_what_did_not_happen_is_marked_in_the_columns() -> None:
    only_forward = StepRecord(0, ZERO, ZERO + 1)
    endless = call(1, ZERO + 2, 0.0)
    stuck = BucketPass(0, 0, 8, ZERO, ZERO + 1, 0.0)
    found = columns(
        [log(0, steps=[only_forward], collectives=[endless], buckets=[stuck])], ZERO, ZERO + 9
    )
    (rank,) = found["ranks"]
    assert rank["steps"]["ended"] == rank["calls"]["lasted"] == rank["buckets"]["flight"] == [NEVER]


def test_calls_that_carried_a_bucket_are_not_drawn_twice() -> None:
    logs = made_up_run(2, 10)
    found = columns(logs, ZERO, ZERO + 1)
    assert len(found["ranks"][0]["calls"]["began"]) == 1  # the loss of step 9
    assert len(found["ranks"][0]["buckets"]["step"]) == 40
    assert msgspec.json.decode(msgspec.json.encode(found)) == found
