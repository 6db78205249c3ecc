"""Several ranks on one GPU, on a machine that has none: what is found, refused and told."""

from __future__ import annotations

import doctest
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from paceline.cli import sharing
from paceline.cli.doctor.command import fact_lines
from paceline.cli.machine import ThisMachine
from paceline.cli.run.plan import Asked, Become, Launch, make_plan
from paceline.cli.sharing import Mps, SharingFacts
from paceline.errors import LaunchError
from tests.cli.launches import paceline
from tests.cli.run.test_plan import CORES, GPUS, Box, srun
from tests.cli.test_doctor import healthy

NEW, OLD = SharingFacts("2.30.7", Mps.RUNS), SharingFacts("2.28.9", Mps.STOPPED)
ONE = Box(8, 1)

ENVIRONMENT = """
import json, os
wanted = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES",
          "NCCL_MULTI_RANK_GPU_ENABLE", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
print(json.dumps({name: os.environ.get(name) for name in wanted}))
"""


def test_the_examples_in_the_docstrings_are_true() -> None:
    assert doctest.testmod(sharing).failed == 0


# What is here.


def test_nccl_from_2_30_on_takes_several_ranks() -> None:
    assert NEW.refusal == ""
    assert "takes one rank" in OLD.refusal
    assert "2.28.9" in OLD.refusal
    assert SharingFacts("2.4.8").refusal, "4 is less than 30"
    assert SharingFacts("3.0.1").refusal == ""
    assert "no NCCL" in SharingFacts("").refusal


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")
@pytest.mark.skipif(dist.is_nccl_available(), reason="torch itself would load the stand-in")
def test_a_library_that_is_preloaded_is_the_one_whose_version_is_told(tmp_path: Path) -> None:
    source, library = tmp_path / "nccl.c", tmp_path / "libnccl.so.2"
    source.write_text("int ncclGetVersion(int *v) { *v = 23107; return 0; }")
    soname = f"-Wl,-soname,{library.name}"
    subprocess.run(["cc", "-shared", "-fPIC", soname, "-o", library, source], check=True)
    program = "from paceline.cli.sharing import loaded_nccl; print(loaded_nccl())"
    told = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert told.stdout.strip() == "2.31.7"


def test_mps_is_known_by_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert sharing.find_mps({}, tmp_path) is Mps.MISSING
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    for number, name in ((1, "init"), (20, "nvidia-persiste")):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "comm").write_text(f"{name}\n")
    (tmp_path / "30").mkdir()  # has just ended
    assert sharing.find_mps({}, tmp_path) is Mps.STOPPED
    (tmp_path / "30" / "comm").write_text("nvidia-cuda-mps\n")
    assert sharing.find_mps({}, tmp_path) is Mps.RUNS


def test_mps_outside_of_a_container_is_known_by_its_pipe(tmp_path: Path) -> None:
    environ = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "mps")}
    assert sharing.find_mps(environ, tmp_path) is not Mps.RUNS
    (tmp_path / "mps").mkdir()
    (tmp_path / "mps" / "control").touch()
    assert sharing.find_mps(environ, tmp_path) is Mps.RUNS


# What is refused.


def test_an_old_nccl_is_refused_with_what_to_do_and_gloo_is_not() -> None:
    with pytest.raises(LaunchError) as caught:
        sharing.check(OLD, 2, "auto")
    for word in ("2.28.9", "nvidia-nccl", "LD_PRELOAD", "--backend gloo"):
        assert word in str(caught.value)
    told = sharing.check(OLD, 2, "gloo")
    assert "over gloo" in told
    assert "take turns" in told


def test_what_works_is_said_with_mps() -> None:
    told = sharing.check(NEW, 4, "auto")
    assert told == "4 ranks on each GPU over NCCL 2.30.7; MPS runs"
    slow = sharing.check(replace(NEW, mps=Mps.STOPPED), 4, "nccl")
    assert "nvidia-cuda-mps-control -d" in slow
    assert "take turns" in slow


@pytest.mark.parametrize("number", [0, -1])
def test_a_number_that_cannot_be_is_refused(number: int) -> None:
    with pytest.raises(LaunchError, match="--ranks-per-gpu"):
        make_plan(Asked(ranks_per_gpu=number), {}, GPUS)


def test_without_a_gpu_there_is_nothing_to_share() -> None:
    with pytest.raises(LaunchError, match="torch sees no GPU"):
        make_plan(Asked("2", ranks_per_gpu=2), {}, CORES)


def test_more_ranks_than_seats_are_refused() -> None:
    with pytest.raises(LaunchError, match="5 ranks were asked for, and 2 on each of 2 GPUs are 4"):
        sharing.seat(5, 2, ["0", "1"])


def test_ray_and_shared_gpus_do_not_go_together(capsys, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("")
    ended = paceline(capsys, "run", "--ray", "local", "--ranks-per-gpu", 2, path)
    assert ended.code == 2
    assert "--ray" in ended.err


# Who sits where.


def test_auto_starts_so_many_for_each_gpu_and_says_so() -> None:
    plan = make_plan(Asked(ranks_per_gpu=3), {}, GPUS)
    assert isinstance(plan, Launch)
    assert (plan.nproc, plan.why) == (12, "3 for each GPU")
    assert make_plan(Asked("gpu", ranks_per_gpu=2), {}, ONE).nproc == 2
    assert make_plan(Asked(ranks_per_gpu=1), {}, GPUS).why == "one for each GPU"


def test_neighbours_share_a_gpu_and_each_sees_it_as_number_0() -> None:
    gpus = sharing.visible_gpus({"CUDA_VISIBLE_DEVICES": "2,GPU-5a,7"}, 3)
    seats = [sharing.rank_environment(g, 2, {}) for g in sharing.seat(5, 2, gpus)]
    named = [own["CUDA_VISIBLE_DEVICES"] for own in seats]
    assert named == ["2", "2", "GPU-5a", "GPU-5a", "7"]
    assert {own["LOCAL_RANK"] for own in seats} == {"0"}
    assert {own["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] for own in seats} == {"50"}
    assert {own["NCCL_MULTI_RANK_GPU_ENABLE"] for own in seats} == {"1"}


def test_what_the_user_has_set_is_kept() -> None:
    own = sharing.rank_environment("0", 4, {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "60"})
    assert own["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "60"


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ThisMachine, "gpus", 1)
    monkeypatch.setattr(sharing, "look", lambda environ: NEW)
    for name in ("CUDA_VISIBLE_DEVICES", sharing.SWITCH, sharing.PERCENTAGE):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("one_gpu")
def test_ranks_are_started_with_their_seats(capsys, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(ENVIRONMENT)
    ended = paceline(capsys, "run", "--ranks-per-gpu", 2, path)
    assert ended.code == 0
    assert "2 ranks on each GPU over NCCL 2.30.7; MPS runs" in ended.err
    found = [json.loads(line.partition(" ")[2]) for line in ended.out.splitlines()]
    assert sorted(own["RANK"] for own in found) == ["0", "1"]
    for own in found:
        assert own["LOCAL_RANK"] == own["CUDA_VISIBLE_DEVICES"] == "0"
        assert own["LOCAL_WORLD_SIZE"] == "2"
        assert own["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
        assert own["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "50"


@pytest.mark.usefixtures("one_gpu")
def test_too_old_a_library_starts_nothing(
    capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "look", lambda environ: OLD)
    path = tmp_path / "script.py"
    path.write_text("print('started')")
    ended = paceline(capsys, "run", "--ranks_per_gpu", 2, path)
    assert (ended.code, ended.out) == (2, "")
    assert "NCCL 2.28.9 takes one rank on each GPU" in ended.err


@pytest.mark.usefixtures("one_gpu")
def test_a_task_of_srun_takes_its_seat() -> None:
    from paceline.cli.run.start import share_gpus

    plan = make_plan(Asked(ranks_per_gpu=2), srun(1, 2, 1, "2"), ONE)
    assert isinstance(plan, Become)
    seated = share_gpus(plan, 2, "auto", ONE)
    assert seated.environment()["LOCAL_RANK"] == "0"
    assert seated.environment()["RANK"] == "1"
    assert seated.environment()["CUDA_VISIBLE_DEVICES"] == "0"


# The doctor.


def rows(**changes: object) -> str:
    return "\n".join(fact_lines(replace(healthy(), **changes)))


def test_the_doctor_says_whether_ranks_may_share_a_gpu_and_what_is_missing() -> None:
    works = rows(gpus=["H200, 139 GiB"], nccl="2.28.9", sharing=NEW)
    assert "paceline run --ranks-per-gpu works: NCCL 2.30.7, MPS runs" in works
    assert "2.30.7 (torch was built with 2.28.9)" in works
    stopped = rows(gpus=["H200"], nccl="2.30.7", sharing=replace(NEW, mps=Mps.STOPPED))
    assert "MPS does not run (nvidia-cuda-mps-control -d starts it)" in stopped
    old = rows(gpus=["H200"], nccl="2.28.9", sharing=OLD)
    assert "only over gloo: NCCL 2.28.9 takes one rank on each GPU" in old
    assert "LD_PRELOAD" in old


def test_without_a_gpu_the_doctor_says_nothing_of_sharing() -> None:
    assert "sharing" not in rows()
