"""Accelerate and the Trainer of transformers, on paceline and on torch: the same losses."""

import pytest

from ..scripts import on_ranks

quiet = pytest.mark.filterwarnings("ignore")


def losses(lines: list[str]) -> list[float]:
    """All numbers after the word loss or losses, in the order they were printed."""
    found = [line.split("loss", 1)[1].removeprefix("es") for line in lines if "loss" in line]
    return [float(number) for text in found for number in text.split()]


@quiet
def test_accelerate_prepares_our_wrapper_and_learns_what_it_learns_on_torch() -> None:
    pytest.importorskip("accelerate")
    ours = on_ranks(2, "examples/accelerate_loop.py", deadline=180)
    theirs = on_ranks(2, "examples/accelerate_loop.py", "--torch", deadline=180)
    assert ours[0].startswith("paceline.ddp.wrapper, Group(")
    assert theirs[0].startswith("torch.nn.parallel.distributed, ")
    assert losses(ours) == pytest.approx(losses(theirs), abs=2e-4)
    assert len(losses(ours)) == 8


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
    lines = on_ranks(2, "examples/hf_trainer.py", *arguments, deadline=240)
    return [line for line in lines if line.startswith(("paceline.", "torch.", "losses "))]
