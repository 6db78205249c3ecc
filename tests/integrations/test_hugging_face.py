"""Accelerate and the Trainer of transformers, on paceline and on torch: the same losses."""

import os
import sys

import pytest

from paceline.errors import IntegrationMissingError

from ..scripts import on_ranks, run
from .digests import assert_two_equal_digests

quiet = pytest.mark.filterwarnings("ignore")


def losses(lines: list[str]) -> list[float]:
    """All numbers after the word loss or losses, in the order they were printed."""
    found = [line.split("loss", 1)[1].removeprefix("es") for line in lines if "loss" in line]
    return [float(number) for text in found for number in text.split()]


@quiet
def test_accelerate_prepares_our_wrapper_and_learns_what_it_learns_on_torch() -> None:
    pytest.importorskip("accelerate")
    ours = on_ranks(2, "examples/accelerate_loop.py")
    theirs = on_ranks(2, "examples/accelerate_loop.py", "--torch")
    assert ours[0].startswith("paceline.ddp.wrapper, Group(")
    assert theirs[0].startswith("torch.nn.parallel.distributed, ")
    assert losses(ours) == pytest.approx(losses(theirs), abs=2e-4)
    assert len(losses(ours)) == 8


@quiet
@pytest.mark.slow
def test_killed_members_of_an_accelerate_loop_change_no_bit() -> None:
    pytest.importorskip("accelerate")
    assert_two_equal_digests(run("examples/accelerate_elastic.py"))


@quiet
def test_an_elastic_accelerator_knows_of_no_other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState

    from paceline.integrations.accelerate import elastic_accelerator

    monkeypatch.setenv("LOCAL_RANK", "2")  # by which it would look for a group of torch's
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        accelerator = elastic_accelerator(cpu=True)
        assert (accelerator.num_processes, accelerator.process_index) == (1, 0)
        assert os.environ["LOCAL_RANK"] == "2", "the job still finds its place"
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def test_without_accelerate_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.integrations.accelerate import elastic_accelerator

    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(IntegrationMissingError, match="paceline\\[integrations\\]"):
        elastic_accelerator()


@quiet
def test_the_trainer_of_transformers_learns_on_paceline_what_it_learns_on_torch() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    ours, theirs = told(), told("--torch")
    assert ours[0].startswith("paceline.ddp.wrapper, Group(")
    assert theirs[0].startswith("torch.nn.parallel.distributed, ")
    assert losses(ours) == pytest.approx(losses(theirs), abs=2e-4)
    assert losses(ours)[-1] < 0.5


def told(*arguments: str) -> list[str]:
    """What the example itself says, apart from what the Trainer prints."""
    lines = on_ranks(2, "examples/hf_trainer.py", *arguments)
    return [line for line in lines if line.startswith(("paceline.", "torch.", "losses "))]
