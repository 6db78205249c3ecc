"""Ring one: whom the ranks wait for, from what they tell."""

import pytest

from paceline.recorder.account import Account, Spot, Told, Went
from paceline.recorder.peers import Silence
from paceline.recorder.verdict import Case, Trouble, Verdict, first_skipped, judge, same


def call(number: int, operation: str = "all_reduce", count: int = 4, **more: object) -> Told:
    facts: dict[str, object] = {
        "sequence": number,
        "operation": operation,
        "shape": f"float32[{count}]",
        "dtype": "torch.float32",
        "count": count,
        "reduction": "sum" if "reduce" in operation else "",
        "root": -1,
        "line": f"train.py:{number}",
        "running": False,
    }
    return Told(**{**facts, **more})  # type: ignore[arg-type]


def account(rank: int, *calls: Told, **more: object) -> Account:
    facts: dict[str, object] = {"steps": [], "made": max((c.sequence for c in calls), default=0)}
    return Account(rank=rank, pid=1, host="h", calls=list(calls), **{**facts, **more})  # type: ignore[arg-type]


LATE = call(5, running=True)
HISTORY = [call(n) for n in range(1, 5)]


def verdict(**said: Account | Silence) -> Verdict:
    """Of rank 0, which waits in call 5; ``said`` has keys such as ``r1``."""
    case = Case(account(0, *HISTORY, LATE), LATE, "gloo:0,1,2", 12.3)
    return judge(case, {int(key[1:]): what for key, what in said.items()})


LOADER = Spot("data.py:17", "batches", "row = queue.get()")


def test_a_rank_that_has_not_made_the_call_is_missing_at_its_line() -> None:
    behind = account(1, *HISTORY, user=LOADER)
    found = verdict(r1=behind, r2=account(2, *HISTORY, LATE))
    assert (found.kind, found.rank) == (Trouble.ELSEWHERE, 1)
    assert found.text == (
        "rank 0 has waited 12.3 s in all_reduce SUM of float32[4] (call 5 of the group "
        "gloo:0,1,2), called at train.py:5. Rank 1 is missing: it is at data.py:17 in batches "
        "(row = queue.get()). It has made 4 of 5 calls. Rank 2 waits too. If it is only slow, all "
        "ranks continue when it arrives."
    )


def test_a_rank_that_compiles_is_said_to_compile() -> None:
    compiles = account(1, *HISTORY, user=LOADER, doing="compiles its first step")
    found = verdict(r1=compiles, r2=account(2, *HISTORY, LATE))
    assert (found.kind, found.rank) == (Trouble.BUSY, 1)
    assert "Rank 1 compiles its first step: it is at data.py:17 in batches" in found.text
    assert "missing" not in found.text
    assert found.text.endswith("All ranks continue when it is done.")


def test_a_rank_that_failed_in_the_same_call_is_not_to_blame_for_another() -> None:
    failed = account(1, *HISTORY, call(5, error="PeerDiedError"), ended="its process has ended")
    found = verdict(r1=failed, r2=Silence.ENDED)
    assert (found.kind, found.rank) == (Trouble.ENDED, 2)
    found = verdict(r1=failed, r2=account(2, *HISTORY, user=LOADER))
    assert (found.kind, found.rank) == (Trouble.ELSEWHERE, 2)
    found = verdict(r1=failed, r2=account(2, *HISTORY, LATE, inside=True))
    assert (found.kind, found.rank) == (Trouble.ENDED, 1), "if there is nobody else"


def test_ranks_that_the_engine_named_are_looked_at_first() -> None:
    case = Case(account(0, *HISTORY, LATE), LATE, "shm:0,1,2", 12.3, suspects=(2,))
    late = account(1, *HISTORY[:2], user=LOADER), account(2, *HISTORY, user=LOADER)
    assert judge(case, {1: late[0], 2: late[1]}).rank == 2
    waits = account(2, *HISTORY, LATE, inside=True)
    assert judge(case, {1: late[0], 2: waits}).rank == 1, "it waits itself"


def test_of_several_the_one_that_is_furthest_behind_is_named() -> None:
    found = verdict(r1=account(1, *HISTORY), r2=account(2, *HISTORY[:2], user=LOADER))
    assert found.rank == 2


def test_a_rank_that_waits_in_another_group_comes_after_the_one_it_waits_for() -> None:
    waits = account(1, *HISTORY[:2], elsewhere="all_reduce of the group shm:1,2 at train.py:8")
    found = verdict(r1=waits, r2=account(2, *HISTORY, user=LOADER))
    assert found.rank == 2
    assert "Rank 2 is missing: it is at data.py:17" in found.text
    assert "Rank 1 is missing too: " in found.text


def test_several_that_are_missing_are_all_told_and_many_are_counted() -> None:
    late = {f"r{rank}": account(rank, *HISTORY, user=LOADER) for rank in range(1, 7)}
    found = verdict(**late)
    assert found.rank == 1
    assert found.text.count("is missing too: it is at data.py:17") == 3
    assert "So are 2 more." in found.text


def test_ranks_are_called_as_the_job_counts_them_and_the_groups_number_is_added() -> None:
    case = Case(account(0, LATE), LATE, "gloo:1,4,6", 12.3, members=(1, 4, 6))
    found = judge(case, {1: account(1, LATE), 2: account(2, user=LOADER)})
    assert found.rank == 2, "as the group counts: it is for programs"
    assert found.text.startswith("rank 1 (0 in the group) has waited")
    assert "Rank 6 (2 in the group) is missing" in found.text
    assert "Rank 4 waits too." in found.text


def test_the_first_call_that_differs_is_named_though_later_ones_are_awaited() -> None:
    other = call(3, "broadcast", 9, root=0, line="eval.py:8")
    found = verdict(r1=account(1, *HISTORY[:2], other, HISTORY[3], LATE))
    assert (found.kind, found.rank) == (Trouble.DIFFERS, 1)
    assert "Call 3 of the group is not the same on all ranks" in found.text
    assert "rank 0 called all_reduce SUM of float32[4] at train.py:3" in found.text
    assert "rank 1 called broadcast root 0 of float32[9] at eval.py:8" in found.text


@pytest.mark.parametrize(
    ("theirs", "fits"),
    [
        (call(1), True),
        (call(1, shape="float32[2, 2]"), True),
        (call(1, count=5), False),
        (call(1, dtype="torch.float64"), False),
        (call(1, reduction="avg"), False),
        (call(1, "reduce_scatter_single"), False),
    ],
)
def test_calls_fit_when_operation_type_and_size_do(theirs: Told, fits: bool) -> None:
    assert same(call(1), theirs) is fits


def test_ranks_may_gather_different_amounts() -> None:
    assert same(call(1, "all_gather", 3), call(1, "all_gather", 8))
    assert not same(call(1, "all_gather", 3, dtype="torch.int64"), call(1, "all_gather", 3))


def test_a_rank_that_is_gone_is_named_with_its_last_call() -> None:
    gone = account(1, *HISTORY, ended="its process has ended with KeyError at a.py:3: 'x'")
    found = verdict(r1=gone)
    assert (found.kind, found.rank) == (Trouble.ENDED, 1)
    assert "ended with KeyError at a.py:3" in found.text
    assert "the last call it made is number 4, all_reduce SUM of float32[4], at train.py:4" in (
        found.text
    )
    assert verdict(r1=Silence.ENDED).kind is Trouble.ENDED


def test_a_rank_that_left_the_group_is_named_with_the_line_of_its_leaving() -> None:
    found = verdict(r1=account(1, *HISTORY, closed="train.py:99"))
    assert (found.kind, found.rank) == (Trouble.LEFT, 1)
    assert "it has left the group, at train.py:99" in found.text


def test_a_rank_that_made_the_call_and_left_afterwards_is_not_to_blame() -> None:
    left = account(2, *HISTORY, LATE, closed="train.py:99")
    assert verdict(r1=account(1, *HISTORY, user=LOADER), r2=left).rank == 1


def test_a_rank_that_finished_the_call_and_ended_afterwards_is_not_to_blame() -> None:
    ended = account(2, *HISTORY, call(5), ended="its process has ended")
    assert verdict(r1=account(1, *HISTORY, user=LOADER), r2=ended).rank == 1
    broken = account(2, *HISTORY, LATE, ended="its process has ended")
    assert verdict(r1=account(1, *HISTORY, LATE, inside=True), r2=broken).rank == 2


def test_a_rank_that_does_not_answer_is_named_when_no_other_is_to_blame() -> None:
    found = verdict(r1=Silence.MUTE)
    assert (found.kind, found.rank) == (Trouble.SILENT, 1)
    assert verdict(r1=Silence.MUTE, r2=account(2, *HISTORY, user=LOADER)).rank == 2
    assert verdict(r1=Silence.UNKNOWN).kind is Trouble.SILENT


def test_a_rank_that_started_the_call_and_went_elsewhere_is_named() -> None:
    found = verdict(r1=account(1, *HISTORY, LATE, user=LOADER, inside=False))
    assert (found.kind, found.rank) == (Trouble.ELSEWHERE, 1)
    assert "has started the call and not waited for it: it is at data.py:17" in found.text


def test_a_rank_whose_device_has_not_come_to_the_call_is_named() -> None:
    found = verdict(r1=account(1, *HISTORY, LATE, inside=True, not_reached=5))
    assert (found.kind, found.rank) == (Trouble.BUSY, 1)
    assert "Rank 1 has made this call too at train.py:5, but its device is still" in found.text
    # of another call it says nothing
    assert verdict(r1=account(1, *HISTORY, LATE, inside=True, not_reached=6)).rank == -1


def test_a_rank_whose_device_does_the_call_may_be_anywhere() -> None:
    there = call(5, running=True, on_device=True)
    assert verdict(r1=account(1, *HISTORY, there, user=LOADER)).kind is Trouble.NOBODY


def test_nobody_is_blamed_when_all_wait_in_the_same_call() -> None:
    found = verdict(r1=account(1, *HISTORY, LATE, inside=True))
    assert (found.kind, found.rank) == (Trouble.NOBODY, -1)


def test_a_message_waits_for_the_rank_it_comes_from() -> None:
    waiting = call(0, "recv", running=True, root=1)
    case = Case(account(0, waiting), waiting, "shm:0,1", 3.0)
    found = judge(case, {1: account(1, user=LOADER), 2: account(2)})
    assert found.rank == 1
    assert "in recv of float32[4] (rank 1, group shm:0,1)" in found.text


# -- skipped backward passes ------------------------------------------------------------------


def steps(*backward: bool, model: int = 1) -> list[Went]:
    return [Went(model, n, f"train.py:{10 + n}", done) for n, done in enumerate(backward, 1)]


def test_a_skipped_backward_is_the_first_that_the_other_rank_ran() -> None:
    skipped = first_skipped(steps(True, True, True), steps(True, False, True), last=False)
    assert skipped is not None
    assert (skipped.number, skipped.line) == (2, "train.py:12")


def test_a_step_that_goes_on_is_not_skipped_yet() -> None:
    mine, theirs = steps(True, True), steps(True, False)
    assert first_skipped(mine, theirs, last=False) is None
    assert first_skipped(mine, theirs, last=True) == theirs[-1]


def test_steps_of_another_model_do_not_count() -> None:
    assert first_skipped(steps(True, True, model=2), steps(False, True), last=True) is None


def test_an_evaluation_on_one_rank_is_no_skipped_backward() -> None:
    alone = [
        *steps(True),
        Went(1, 2, "evaluate.py:7", backward=False),
        *steps(True, True, True)[2:],
    ]
    assert first_skipped(steps(True, True, True), alone, last=True) is None
    behind = account(1, *HISTORY, user=LOADER, steps=steps(True, True, False))
    case = Case(account(0, LATE, steps=steps(True, False, True)), LATE, "g", 1.0)
    assert judge(case, {1: behind}).kind is Trouble.ELSEWHERE, "who waits has skipped nothing"


def test_what_all_ranks_skip_is_not_skipped() -> None:
    assert first_skipped(steps(False, True), steps(False, True), last=True) is None


def test_a_skipped_backward_explains_a_difference() -> None:
    mine = account(0, LATE, steps=steps(True, True, True))
    other = call(5, "barrier", line="train.py:50")
    theirs = account(1, other, steps=steps(True, False, True))
    for case, said in (
        (Case(mine, LATE, "g", 1.0), {1: theirs}),
        (Case(theirs, other, "g", 1.0), {0: mine}),
    ):
        found = judge(case, said)
        assert (found.kind, found.rank) == (Trouble.SKIPPED, 1)
        assert "Rank 1 skipped a backward pass: the forward of step 2 at train.py:12" in found.text
