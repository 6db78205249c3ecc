"""The quick ones among PyTorch's own tests; ``runner.py`` runs them all."""

from collections.abc import Iterator

import pytest

from .runner import LIST, Case, StageProcess, read_cases

QUICK = [case for case in read_cases(LIST.read_text()) if case.quick]


@pytest.fixture(scope="module")
def stages() -> Iterator[dict[str, StageProcess]]:
    with StageProcess("paceline", "cpu", 60.0) as cpu, StageProcess("paceline", "gpu", 60.0) as gpu:
        yield {"cpu": cpu, "gpu": gpu}


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.id)
def test_a_test_of_torch_passes_on_paceline(case: Case, stages: dict[str, StageProcess]) -> None:
    result = stages[case.device].run(case)
    if result.status == "absent":
        pytest.skip(result.why)
    assert result.status == "pass", f"{result.why}\n{result.log}"
