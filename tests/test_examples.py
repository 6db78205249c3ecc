"""The examples and the benchmarks, run as a user runs them.

Most examples run in forked ranks, which is quicker than a launcher; one goes through
``paceline run``. Those that need other libraries are in ``tests/integrations``.
"""

import os
import re
import runpy
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from paceline.groups import capabilities

from .groups import netns
from .scripts import ROOT, on_ranks, run

needs_shm = pytest.mark.skipif(
    not capabilities()["shm"].available, reason=capabilities()["shm"].reason
)


# -- the loops --------------------------------------------------------------------------------


def losses(lines: list[str]) -> list[str]:
    """By epoch, to four digits, as the examples print them."""
    return [line.split("loss ")[1].split(",")[0] for line in lines if line.startswith("epoch ")]


@needs_shm
def test_a_bare_example_starts_its_ranks_with_paceline_run() -> None:
    said = run("examples/plain_loop.py")
    assert said[0].startswith("paceline run --nproc 2 ")
    assert sum("2 ranks over shm" in line for line in said) == 1
    assert "epoch 8: loss" in said[-1]


@pytest.fixture(scope="module")
def plain() -> list[str]:
    """The losses of the plain loop on two ranks."""
    return losses(on_ranks(2, "examples/plain_loop.py"))


def test_the_plain_loop_learns_the_same_on_any_number_of_ranks(plain: list[str]) -> None:
    assert losses(on_ranks(1, "examples/plain_loop.py")) == plain
    assert float(plain[-1]) < 0.1


@pytest.mark.slow  # tests/shards has the same, and more of it
def test_the_same_bits_come_out_on_one_two_and_three_ranks() -> None:
    said = [on_ranks(n, "examples/same_bits.py", "--steps", "4") for n in (1, 2, 3)]
    found = [re.fullmatch(r"(\d) ranks?: digest (\w{16}), .*", *lines) for lines in said]
    assert all(found), said
    assert [match[1] for match in found if match] == ["1", "2", "3"]
    assert len({match[2] for match in found if match}) == 1


def test_accumulated_small_batches_make_the_step_of_a_whole_batch() -> None:
    passes, same = on_ranks(2, "examples/accumulation.py")
    assert passes == "16 backward passes, 4 steps"
    assert float(same.split()[-1]) < 1e-6


@needs_shm
@pytest.mark.slow
def test_killed_members_of_a_job_change_no_bit() -> None:
    said = run("examples/elastic.py")
    found = [match[1] for line in said if (match := re.search(r"digest (\w{16}) after 12", line))]
    assert len(found) == 2
    assert len(set(found)) == 1


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # told to be so
def test_a_checkpoint_of_two_ranks_goes_on_on_four(tmp_path: Path) -> None:
    def train(folder: str, ranks: int, steps: int) -> str:
        words = ("--folder", str(tmp_path / folder), "--steps", str(steps))
        (said,) = on_ranks(ranks, "examples/checkpoint.py", *words)
        return said

    assert train("stopped", 2, 12).startswith("steps 0 to 12 on 2 ranks")
    assert train("stopped", 4, 20).startswith("steps 12 to 20 on 4 ranks")
    train("whole", 2, 20)
    stopped, whole = (weights(tmp_path / name / "step-000020") for name in ("stopped", "whole"))
    for one, other in zip(stopped, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    assert not torch.equal(whole[0], weights(tmp_path / "stopped" / "step-000012")[0])


def weights(folder: Path) -> list[Tensor]:
    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    names = [name for name in metadata if name.startswith("model.")]
    state = {name: torch.empty(metadata[name].size) for name in names}  # type: ignore[union-attr]
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return [state[name] for name in sorted(names)]


@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_half_precision_learns_and_all_ranks_scale_alike(dtype: str) -> None:
    said = on_ranks(2, "examples/mixed_precision.py", "--dtype", dtype)
    assert float(losses(said)[-1]) < 0.1
    scale = int(said[-1].split()[-1])
    assert scale == 1 if dtype == "bfloat16" else 1 < scale < 2**20  # some steps were left out


def test_fsdp2_shards_over_our_group_and_learns_what_the_plain_loop_does(
    plain: list[str],
) -> None:
    said = on_ranks(2, "examples/fsdp2.py")
    assert said[0].startswith("Group(")
    assert said[0].endswith("holds 2241 of 4482 parameters")
    assert list(map(float, losses(said))) == pytest.approx(list(map(float, plain)), abs=2e-4)


@pytest.mark.slow  # six processes: a launcher on each host, and four ranks
@needs_shm
@pytest.mark.skipif(bool(netns.unable()), reason=netns.unable())
def test_two_hosts_train_as_one_group_over_their_cable() -> None:
    said = run("examples/two_hosts.py")
    assert sum("4 ranks over hybrid" in line for line in said) == 1
    assert sum("epoch 8: loss" in line for line in said) == 1


def test_two_hosts_says_that_it_needs_root(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    script = runpy.run_path(str(ROOT / "examples/two_hosts.py"))
    assert script["main"]() == 2
    assert "takes root" in capsys.readouterr().out


@pytest.mark.slow
@needs_shm
def test_uneven_ranks_with_exact_weights_learn_what_one_process_does(tmp_path: Path) -> None:
    picture = tmp_path / "uneven.png"
    lines = on_ranks(2, "examples/uneven.py", "--quick", "--save", str(picture))
    few, many = (int(line.split()[2]) for line in lines[:2])  # batches
    assert 2 <= few < many
    means, exact, drawn = lines[-3:]
    assert float(means.split()[-4]) > 1e-2
    assert float(exact.split()[-4]) < 1e-4
    assert picture.exists() == drawn.startswith("drawn in")


# -- the demo and the benchmarks --------------------------------------------------------------


@pytest.mark.slow
@needs_shm
def test_the_example_on_a_bare_group_trains_on_two_ranks_and_agrees_with_one_process() -> None:
    pytest.importorskip("sklearn")
    lines = run("examples/digits.py", "--epochs", "2")
    assert [line.split()[:2] for line in lines[:2]] == [["epoch", "1"], ["epoch", "2"]]
    same, alone, accuracy, summary = lines[2:]
    assert same == "all 2 ranks hold the same weights, bit for bit"
    assert float(alone.split()[-3]) < 1e-5
    assert float(accuracy.split()[-1]) > 0.8
    assert summary.startswith("2 ranks over shm: ")


@pytest.mark.slow
@needs_shm
def test_the_example_on_a_bare_group_ends_with_an_error_when_its_ranks_do() -> None:
    pytest.importorskip("sklearn")
    with pytest.raises(AssertionError, match="UnknownBackendError"):
        run("examples/digits.py", "--backend", "no such thing")


@pytest.mark.slow
@needs_shm
def test_the_benchmark_of_join_saves_what_it_printed(tmp_path: Path) -> None:
    saved = tmp_path / "join.md"
    few = ["--models", "small", "--rounds", "1", "--save", str(saved)]
    lines = run("benchmarks/join.py", *few)
    assert saved.read_text().splitlines() == lines
    assert [line.split("|")[2].strip() for line in lines[-3:]] == [
        "torch, gloo",
        "paceline, gloo",
        "paceline, shm",
    ]


@pytest.mark.slow
@needs_shm
def test_the_benchmark_of_shards_saves_what_it_printed_and_draws_the_drift(tmp_path: Path) -> None:
    saved, drawn = tmp_path / "shards.md", tmp_path / "drift.svg"
    few = ["--models", "gpt", "--ranks", "2", "--rounds", "1", "--steps", "3", "--no-memory"]
    paths = ["--save", str(saved), "--picture", str(drawn)]
    lines = run("benchmarks/shards.py", *few, *paths)
    assert saved.read_text().splitlines() == lines
    theirs, ours = (line.split("|")[4].strip() for line in lines[-2:])
    assert 0 < float(theirs) < 1e-3
    assert ours == "0, the same bits"
    assert "paceline, shards=8, 2 ranks: the same bits" in drawn.read_text()


@pytest.mark.slow
@needs_shm
def test_the_benchmark_measures_and_saves_what_it_printed(tmp_path: Path) -> None:
    saved = tmp_path / "results.md"
    small = ["--ranks", "2", "--sizes", "4K", "--seconds", "0.2", "--no-mpi", "--no-ddp"]
    lines = run("benchmarks/collectives.py", "--quick", *small, "--save", str(saved))
    assert saved.read_text().splitlines() == lines
    assert lines[0].startswith("Machine: ")
    (cell,) = (line for line in lines if line.startswith("| 2 | 4 KiB |"))
    assert len(cell.split("|")) == len(lines[2].split("|"))
    assert "they raise after" in lines[-1]


@pytest.mark.slow
@needs_shm
def test_the_benchmark_of_peers_measures_what_is_here_and_names_what_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # so that there is no mpirun
    saved = tmp_path / "peers.md"
    few = ["--models", "small", "--only", "shm", "horovod", "--starts", "1", "--rounds", "1"]
    lines = run("benchmarks/peers.py", *few, "--save", str(saved))
    assert saved.read_text().splitlines() == lines
    ours, theirs = lines[-2:]
    assert re.fullmatch(r"\| paceline, shm \| \d+\.\d{3} \(.*\) \|", ours)
    assert theirs == "| Horovod, OpenMPI | not installed: the system has no mpirun |"


@pytest.mark.slow
@needs_shm
def test_the_benchmark_of_goodput_saves_what_it_printed(tmp_path: Path) -> None:
    saved = tmp_path / "goodput.md"
    few = ["--ranks", "2", "--seconds", "15", "--every", "6", "--ways", "elastic", "--no-overhead"]
    lines = run("benchmarks/goodput.py", *few, "--save", str(saved))
    assert saved.read_text().splitlines() == lines
    killed = [cell.strip() for cell in lines[-1].split("|")]
    assert int(killed[3]) >= 1
    assert int(killed[4]) > 0
