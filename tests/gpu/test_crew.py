"""The crew tells by rank what became of a test, and no test spoils the next."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from . import machine, planted
from .__main__ import main
from .crew import Crew, CrewFailed, Outcome, Task
from .machine import Machine, choose
from .scene import judge


@pytest.fixture(scope="module")
def two() -> Iterator[Crew]:
    crew = Crew(machine.here(), 2)
    yield crew
    crew.close()


def run(crew: Crew, name: str, deadline: float = 30.0, **params: str) -> list[Outcome]:
    return crew.run(Task(planted.__name__, name, params, deadline))


def test_ranks_stay_from_test_to_test(two: Crew) -> None:
    for _ in range(3):
        judge(run(two, "adds_up"))
    judge(run(two, "tells_its_process", variable="PACELINE_PLANTED"))
    assert two.starts == 1
    with pytest.raises(pytest.fail.Exception, match="is left from another test"):
        judge(run(two, "tells_its_process", variable="PACELINE_PLANTED"))


def test_a_test_that_raises_on_one_rank_fails_and_the_next_has_new_ranks(two: Crew) -> None:
    before = two.starts
    judge(run(two, "adds_up"))
    outcomes = run(two, "raises_on_one")
    assert outcomes[1].how == "failed"
    assert "planted" in outcomes[1].text
    with pytest.raises(pytest.fail.Exception, match="rank 1 failed"):
        judge(outcomes)
    judge(run(two, "adds_up"))
    assert two.starts > before


def test_a_test_that_hangs_on_one_rank_fails_with_its_stack(two: Crew) -> None:
    outcomes = run(two, "hangs_on_one", deadline=5.0)
    assert outcomes[1].how == "lost"
    assert "still ran after 5 s" in outcomes[1].text
    assert "_hangs_on_one" in outcomes[1].text
    judge(run(two, "adds_up"))


def test_a_test_that_ends_a_rank_fails(two: Crew) -> None:
    outcomes = run(two, "dies_on_one")
    assert outcomes[1].how == "lost"
    assert "exited with status 7" in outcomes[1].text
    judge(run(two, "adds_up"))


def test_a_rank_with_other_numbers_fails_everywhere(two: Crew) -> None:
    outcomes = run(two, "wrong_on_one")
    # The first to fail ends the other, perhaps before that one can tell.
    assert {outcome.how for outcome in outcomes} <= {"failed", "lost"}
    assert any("other numbers" in outcome.text for outcome in outcomes)


def test_a_test_that_skips_itself_is_skipped(two: Crew) -> None:
    with pytest.raises(pytest.skip.Exception, match="planted"):
        judge(run(two, "skips"))


def test_ranks_that_cannot_start_are_tried_once_and_said_why() -> None:
    crew = Crew(Machine("cpu", 0, "no such backend"), 2)
    try:
        for _ in range(2):
            with pytest.raises(CrewFailed, match="no such backend"):
                run(crew, "adds_up")
        assert crew.starts == 1
    finally:
        crew.close()


# Which machine it is.


def test_without_a_gpu_make_gpu_says_so_and_is_no_success(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main([]) == 2
    assert "nothing was tested" in capsys.readouterr().err


def test_without_a_gpu_two_ranks_run_on_the_cpu() -> None:
    found = choose(0, ())
    assert (found.device, found.ranks) == ("cpu", (2,))
    assert "no GPU here" in str(found)
    assert found.environment(2) == {}


def test_over_nccl_where_it_takes_the_ranks_and_else_over_gloo_with_the_reason() -> None:
    takes = choose(1, ("H200",), lambda count: "")
    assert takes.backend == "nccl"
    assert "2 and 4 ranks over nccl on 1 GPU (H200)" in str(takes)
    refuses = choose(1, ("H200",), lambda count: "Duplicate GPU detected")
    assert refuses.backend == "gloo"
    assert "over gloo" in str(refuses)
    assert "Duplicate GPU detected" in str(refuses)


def test_only_ranks_that_share_a_gpu_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(machine.PERCENTAGE, raising=False)
    one, four = Machine("cuda", 1, "nccl"), Machine("cuda", 4, "nccl")
    assert one.environment(4) == {machine.SHARING: "1", machine.PERCENTAGE: "25"}
    assert four.environment(4) == {}
    assert four.environment(8)[machine.PERCENTAGE] == "50"
