"""Which rank failed first, and what the others made of it: pure."""

import doctest
import signal

from paceline.cli.run import verdict
from paceline.cli.run.verdict import (
    LONE,
    FailureReport,
    RankEnding,
    judge,
    read_reports,
    tell_lone,
    why_again,
)


def report(
    rank: int, when: float, kind: str = "ValueError", consequence: bool = False
) -> FailureReport:
    trace = f"Traceback of {rank}\n"
    return FailureReport(
        rank, when, kind, f"words of {rank}\nmore", trace, "train.py:7", consequence
    )


def test_the_example_in_the_docstring_is_true() -> None:
    assert doctest.testmod(verdict).failed == 0


def test_nothing_failed_where_all_ended_with_0() -> None:
    assert judge({0: RankEnding(0, 1), 1: RankEnding(0, 2)}, {}, 2) is None


def test_the_earliest_failure_is_the_first_whoever_ended_first() -> None:
    endings = {0: RankEnding(1, 5.0), 1: RankEnding(1, 6.0)}
    verdict = judge(endings, {0: report(0, 4.0), 1: report(1, 3.0)}, 2)
    assert verdict is not None
    assert (verdict.rank, verdict.code, verdict.traceback) == (1, 1, "Traceback of 1\n")
    assert verdict.headline == "rank 1 of 2 failed first: ValueError: words of 1 (at train.py:7)"
    assert verdict.others == ("rank 0 then failed with ValueError: words of 0",)


def test_a_rank_that_noticed_anothers_end_comes_after_it_though_it_raised_before() -> None:
    endings = {0: RankEnding(1, 5.0), 1: RankEnding(1, 6.0)}
    noticed = report(0, 2.0, "PeerLeftError", consequence=True)
    verdict = judge(endings, {0: noticed, 1: report(1, 3.0)}, 2)
    assert verdict is not None
    assert verdict.rank == 1
    assert not verdict.consequence


def test_a_restart_blames_no_rank_that_only_noticed_a_failure_of_another_machine() -> None:
    endings = {0: RankEnding(1, 5.0)}
    noticed = judge(endings, {0: report(0, 2.0, "PeerLeftError", consequence=True)}, 2)
    assert why_again(noticed, machines=2) == "a rank of another host has failed"
    assert why_again(noticed, machines=1).startswith("rank 0 of 2 failed first: PeerLeftError")
    assert why_again(judge(endings, {}, 2), machines=2).startswith("rank 0 of 2 failed first")
    assert why_again(None, machines=2) == "another host starts its ranks again"


def test_a_killed_rank_is_the_cause_of_what_others_noticed() -> None:
    endings = {0: RankEnding(1, 2.0), 1: RankEnding(-signal.SIGSEGV, 3.0)}
    verdict = judge(endings, {0: report(0, 2.0, "PeerDiedError", consequence=True)}, 2)
    assert verdict is not None
    assert (verdict.rank, verdict.code, verdict.traceback) == (1, 128 + 11, "")
    assert verdict.headline == "rank 1 of 2 failed first: it was killed by SIGSEGV"


def test_an_exit_code_passes_through_with_its_place() -> None:
    leaving = FailureReport(1, 1.0, "SystemExit", "", "", "train.py:3", False)
    verdict = judge({0: RankEnding(-15, 3.0, stopped=True), 1: RankEnding(3, 2.0)}, {1: leaving}, 2)
    assert verdict is not None
    assert verdict.code == 3
    assert verdict.headline.endswith("it ended with exit code 3 (at train.py:3)")
    assert verdict.others == ("rank 0 then was stopped",)


def test_ranks_that_ended_well_are_named_only_where_they_were_missed() -> None:
    endings = {0: RankEnding(1, 2.0), 1: RankEnding(0, 1.0), 2: RankEnding(0, 1.0)}
    verdict = judge(endings, {0: report(0, 2.0, "PeerLeftError", consequence=True)}, 3)
    assert verdict is not None
    assert verdict.others == ("ranks 1, 2 had ended before, with exit code 0",)
    verdict = judge(endings, {0: report(0, 2.0)}, 3)
    assert verdict is not None
    assert verdict.others == ()


def test_ranks_of_one_fate_share_a_line() -> None:
    endings = {rank: RankEnding(1, 2.0) for rank in range(8)}
    reports = {r: report(r, 2.0, "PeerDiedError", consequence=True) for r in range(1, 8)}
    verdict = judge(endings, reports | {0: report(0, 1.0)}, 8)
    assert verdict is not None
    assert verdict.others == ("ranks 1-7 then failed with PeerDiedError: words of 1",)


def test_a_rank_that_failed_and_had_to_be_stopped_still_has_failed() -> None:
    verdict = judge({0: RankEnding(-9, 9.0, stopped=True)}, {0: report(0, 1.0)}, 1)
    assert verdict is not None
    assert verdict.code == 1


def test_ranks_that_have_ended_while_others_run_are_told_after_a_while() -> None:
    ended = {2: RankEnding(0, 5.0)}
    assert tell_lone(ended, [0, 1], (), 4.9 + LONE) == ""
    said = tell_lone(ended, [0, 1], (), 5.0 + LONE)
    assert said == (
        "rank 2 ended 10 s ago with exit code 0; ranks 0, 1 still run, maybe waiting for it"
    )
    ended[1] = RankEnding(0, 6.0)
    assert tell_lone(ended, [0], (), 5.0 + LONE) == ""
    assert tell_lone(ended, [0], (), 6.0 + LONE) == (
        "ranks 1, 2 ended 10 s ago with exit code 0; rank 0 still runs"
    )
    assert tell_lone(ended, [], (), 6.0 + LONE) == ""


def test_nobody_waits_for_ranks_that_were_lost_or_left_behind() -> None:
    ended = {1: RankEnding(-signal.SIGKILL, 5.0), 2: RankEnding(0, 5.0)}
    assert tell_lone(ended, [0], {1, 2}, 99.0) == ""
    assert tell_lone(ended, [0], {1}, 99.0).startswith("rank 2 ended")


def test_notes_are_read_back_and_unfinished_ones_are_left(tmp_path) -> None:
    (tmp_path / "rank-3.part").write_text("{")
    (tmp_path / "rank-1.json").write_text(
        '{"rank": 1, "when": 2.5, "kind": "ValueError", "message": "m", "traceback": "t",'
        ' "place": "a.py:1", "consequence": false}'
    )
    assert read_reports(tmp_path) == {
        1: FailureReport(1, 2.5, "ValueError", "m", "t", "a.py:1", False)
    }
