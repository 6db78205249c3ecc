"""``paceline doctor``: what it finds, what follows from it, and the command itself."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.cli.doctor import command
from paceline.cli.doctor.advice import advise, pick
from paceline.cli.doctor.facts import MachineFacts, gather, launchers_in, settings_in
from paceline.cli.doctor.machine import (
    Cores,
    Host,
    Interface,
    Memory,
    interfaces,
    read_memory,
)
from paceline.cli.doctor.probe import Probe, probe
from paceline.cli.failures import last_line
from paceline.cli.machine import cpu_quota
from paceline.groups import Availability, capabilities

GIB = 1 << 30
WELL = Probe("auto", "shm", True, "", 11.0, 6.5)

needs_shm = pytest.mark.skipif(
    not capabilities()["shm"].available, reason=capabilities()["shm"].reason
)


def healthy() -> MachineFacts:
    """A machine on which nothing is to be changed."""
    return MachineFacts(
        paceline="0.1",
        torch="2.13.0+cpu",
        python="3.11.7",
        system="Linux",
        cpu="",
        cores=Cores(8, 8, math.inf, 8),
        load=0.5,
        memory=Memory(32 * GIB, 30 * GIB, 16 * GIB, 16 * GIB, True),
        compiler="/usr/bin/cc",
        engines={
            "shm": Availability(True),
            "gloo": Availability(True),
            "nccl": Availability(False, "no NCCL"),
        },
        host=Host("here", "10.0.0.1", True),
        interfaces=[Interface("lo", "127.0.0.1"), Interface("eth0", "10.0.0.1")],
        gpus=[],
        gpu_device=False,
        nccl="",
        launchers={},
        settings={"OMP_NUM_THREADS": "1"},
    )


NO_SHM = {"shm": Availability(False, "its C library was not built"), "gloo": Availability(True)}


def setting(name: str, value: str) -> dict[str, object]:
    """One more variable in the environment."""
    return {"settings": {"OMP_NUM_THREADS": "1", name: value}}


def backend(name: str) -> dict[str, object]:
    """The choice of a backend in the environment."""
    return setting("PACELINE_BACKEND", name)


# -- advice -----------------------------------------------------------------------------------


def test_a_healthy_machine_needs_no_advice() -> None:
    assert advise(healthy(), [WELL]) == []


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"torch": "2.9.1"}, "torch is 2.9.1; paceline is tested with 2.11"),
        ({"torch": "2.16.0"}, "torch is 2.16.0; paceline is tested with 2.11 to 2.15"),
        ({"engines": NO_SHM}, "pip install --force-reinstall"),
        ({"engines": NO_SHM, "compiler": ""}, "apt install gcc"),
        ({"settings": {}}, "OMP_NUM_THREADS is not set"),
        ({"settings": {"OMP_NUM_THREADS": "64"}}, "OMP_NUM_THREADS is 64, and there are 8 cores"),
        ({"memory": Memory(GIB, GIB, 64 << 20, 0, True)}, "/dev/shm has 64 MiB"),
        ({"memory": Memory(GIB, GIB, GIB, GIB, False)}, "memfd_create does not work"),
        ({"cores": Cores(8, 8, 2.5, 3)}, "2.5 cores of CPU time, of 8"),
        ({"load": 30.0}, "The machine is busy: 30.0"),
        ({"host": Host("here", "", False)}, "The name here has no address"),
        ({"host": Host("here", "10.9.9.9", False)}, "10.9.9.9, which is not an address of this"),
        ({"interfaces": []}, "No network interface is up"),
        (backend("smoke"), "PACELINE_BACKEND is smoke, which auto cannot use"),
        (backend("nccl"), "nccl, which cannot be used here: no NCCL. Unset it"),
        (backend("gloo"), "PACELINE_BACKEND is gloo, so ranks on one host do not use shm"),
        (setting("PACELINE_WARNAFTER", "5"), "did you mean PACELINE_WARN_AFTER?"),
        (setting("PACELINE_QUX", "5"), "PACELINE_QUX is set, and paceline reads no variable"),
        ({"gpu_device": True}, "an NVIDIA GPU that torch does not see"),
    ],
)
def test_each_trouble_is_named_with_what_to_do(change: dict[str, object], part: str) -> None:
    (advice,) = advise(replace(healthy(), **change), [WELL])  # type: ignore[arg-type]
    assert part in advice


def test_a_failed_try_comes_first_with_its_error() -> None:
    failed = Probe("gloo", "", False, "RuntimeError: no route to host")
    advice = advise(replace(healthy(), settings={}), [WELL, failed])
    assert advice[0] == "Two processes could not use gloo: RuntimeError: no route to host"
    assert len(advice) == 2


def test_gloo_that_works_over_loopback_alone_points_to_name_and_firewall() -> None:
    failed = Probe("gloo", "", False, "timed out")
    told = advise(healthy(), [WELL, failed], loopback=replace(WELL, asked="gloo"))
    assert "GLOO_SOCKET_IFNAME" in told[1]
    assert "lo, eth0" in told[1]
    told = advise(healthy(), [WELL, failed], loopback=failed)
    assert "not work over the loopback interface either" in told[1]


def test_auto_takes_gloo_with_the_reason_where_shm_cannot_be_used() -> None:
    assert pick(healthy())["cpu"].startswith("shm where all ranks share a host")
    without = replace(healthy(), engines=NO_SHM)
    assert pick(without) == {"cpu": "gloo, because shm cannot be used: its C library was not built"}
    assert "cuda" in pick(replace(healthy(), gpus=["H200"]))


def test_auto_takes_what_the_environment_says() -> None:
    facts = replace(healthy(), gpus=["H200"], **backend("gloo"))  # type: ignore[arg-type]
    said = "gloo, because PACELINE_BACKEND says so"
    assert pick(facts) == {"cpu": said, "cuda": said}
    facts = replace(facts, **backend("nccl"))  # type: ignore[arg-type]
    assert pick(facts) == pick(replace(healthy(), gpus=["H200"]))
    assert pick(replace(healthy(), **backend("smoke")))["cpu"].startswith("nothing: ")  # type: ignore[arg-type]
    assert pick(replace(healthy(), **backend("auto"))) == pick(healthy())  # type: ignore[arg-type]


def test_without_any_network_gloo_is_not_blamed_on_a_firewall() -> None:
    failed = Probe("gloo", "", False, "no interface")
    told = advise(replace(healthy(), interfaces=[]), [WELL, failed], loopback=failed)
    assert [text.split(",")[0] for text in told[1:]] == ["No network interface is up"]


# -- facts ------------------------------------------------------------------------------------


def test_the_smallest_quota_on_the_way_up_counts(tmp_path: Path) -> None:
    inner = tmp_path / "job" / "task"
    inner.mkdir(parents=True)
    (tmp_path / "job" / "cpu.max").write_text("150000 100000\n")
    (inner / "cpu.max").write_text("max 100000\n")
    own = tmp_path / "own"
    own.write_text("0::/job/task\n")
    assert cpu_quota(tmp_path, own) == 1.5


def test_a_quota_of_the_first_version_of_control_groups_is_read(tmp_path: Path) -> None:
    group = tmp_path / "cpu,cpuacct" / "docker"
    group.mkdir(parents=True)
    (group / "cpu.cfs_quota_us").write_text("200000\n")
    (group / "cpu.cfs_period_us").write_text("100000\n")
    own = tmp_path / "own"
    own.write_text("5:memory:/docker\n4:cpu,cpuacct:/docker\n")
    assert cpu_quota(tmp_path, own) == 2.0


def test_without_control_groups_there_is_no_quota(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path, tmp_path / "nothing") == math.inf


def test_a_launcher_is_known_by_its_variables() -> None:
    assert launchers_in({"HOME": "/root"}) == {}
    found = launchers_in({"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "OMPI_COMM_WORLD_RANK": "1"})
    assert found["SLURM"] == {"SLURM_NTASKS": "8", "SLURM_PROCID": "3"}
    assert "OpenMPI" in found


def test_settings_are_those_that_matter_and_all_of_ours() -> None:
    found = settings_in({"PACELINE_X": "1", "OMP_NUM_THREADS": "2", "HOME": "/root"})
    assert found == {"OMP_NUM_THREADS": "2", "PACELINE_X": "1"}


def test_the_loopback_interface_is_found_with_its_address() -> None:
    assert Interface("lo", "127.0.0.1") in interfaces()


def test_memory_and_cores_of_this_machine_are_sensible() -> None:
    memory, facts = read_memory(), gather()
    assert 0 < memory.available <= memory.total
    assert 1 <= facts.cores.usable <= facts.cores.allowed <= facts.cores.installed
    assert facts.engines == capabilities()
    if shutil.which("lscpu"):
        assert facts.cpu


# -- the tries --------------------------------------------------------------------------------


def test_an_error_is_told_by_the_last_line_of_its_traceback() -> None:
    traceback = 'Traceback (most recent call last):\n  File "x", line 1\nValueError: so\n'
    assert last_line(traceback) == "ValueError: so"
    assert last_line("hung: it was still running after 40 s.") == (
        "hung: it was still running after 40 s."
    )
    stack = 'hung: after 4 s. Its stack:\nCurrent thread 0x1 (most recent call first):\n  File "x"'
    assert last_line(stack).startswith("hung: after 4 s")


def test_a_try_that_cannot_work_says_why() -> None:
    found = probe("no such thing")
    assert not found.ok
    assert found.error.startswith("UnknownBackendError: ")
    assert "no such thing" in found.error


def test_a_failed_try_makes_the_command_end_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = Probe("gloo", "", False, "RuntimeError: no route")
    monkeypatch.setattr(command, "_try", lambda: ([WELL, failed], failed))
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "gloo: FAILED: RuntimeError: no route" in said
    assert "auto (shm): 2 processes, all-reduce of 4 KiB in 11 us" in said


@needs_shm
def test_the_command_tries_both_engines_and_tells_it_all_as_json(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("paceline.cli.doctor.probe.PATIENCE", 120.0)  # on a busy machine
    monkeypatch.setattr("paceline.cli.doctor.probe.DEADLINE", 240.0)
    code = main(["doctor", "--json"])
    said = capfd.readouterr()
    assert code == 0, said.out + said.err
    told = json.loads(said.out)
    assert [(test["asked"], test["backend"]) for test in told["tests"]] == [
        ("auto", "shm"),
        ("gloo", "gloo"),
    ]
    assert all(test["ok"] and test["gigabytes_per_second"] > 0 for test in told["tests"])
    assert told["ok"] is True
    assert told["facts"]["cores"]["usable"] == told["usable_cores"] >= 1
