"""From options and environment to a plan: pure, in microseconds."""

import doctest
import resource
from dataclasses import dataclass

import pytest

from paceline.cli.machine import allow_open_files, cpu_quota, threads_per_rank
from paceline.cli.run import plan, schedulers
from paceline.cli.run.elastic import Elastic
from paceline.cli.run.plan import Asked, Become, Launch, make_plan, port_of
from paceline.cli.run.schedulers import expand_counts, expand_hosts, find_task
from paceline.cli.run.start import check_store
from paceline.errors import LaunchCountError, LaunchError


@dataclass(frozen=True)
class Box:
    cores: int
    gpus: int


CORES, GPUS = Box(8, 0), Box(64, 4)


def srun(rank: int, tasks: int, nodes: int, per_node: str, **more: str) -> dict[str, str]:
    """What srun sets for one task; tasks are dealt out machine by machine."""
    counts = expand_counts(per_node)
    node = next(i for i in range(nodes) if rank < sum(counts[: i + 1]))
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank - sum(counts[:node])),
        "SLURM_NODEID": str(node),
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_TASKS_PER_NODE": per_node,
        "SLURM_STEP_NODELIST": "node[08-10]",
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        **more,
    }


def openmpi(rank: int, size: int, local: int) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % local),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local),
        "PMIX_NAMESPACE": "725024769",
    }


def test_the_examples_in_the_docstrings_are_true() -> None:
    for module in (plan, schedulers):
        assert doctest.testmod(module).failed == 0


# By hand.


def test_auto_takes_one_rank_for_each_gpu_or_else_for_each_core_and_says_which() -> None:
    plan = make_plan(Asked(), {}, GPUS)
    assert isinstance(plan, Launch)
    assert (plan.nproc, plan.why) == (4, "one for each GPU")
    plan = make_plan(Asked("auto"), {}, CORES)
    assert isinstance(plan, Launch)
    assert plan.nproc == 8
    assert "core" in plan.why


def test_one_machine_meets_on_loopback_on_a_free_port() -> None:
    plan = make_plan(Asked("2"), {}, CORES)
    assert plan == Launch(2, 1, 1, 0, "127.0.0.1", 0)


def test_torchruns_words_for_a_number_of_ranks_are_known() -> None:
    assert [make_plan(Asked(word), {}, GPUS).nproc for word in ("cpu", "gpu")] == [64, 4]
    with pytest.raises(LaunchError, match="torch sees no GPU"):
        make_plan(Asked("gpu"), {}, CORES)


@pytest.mark.parametrize("nproc", ["0", "-1", "two", "1.5", "", "²", "10000"])
def test_a_number_of_ranks_that_cannot_be_is_refused(nproc: str) -> None:
    with pytest.raises(LaunchError, match="--nproc"):
        make_plan(Asked(nproc), {}, CORES)


def test_several_machines_need_a_place_to_meet() -> None:
    with pytest.raises(LaunchError, match="rdzv-endpoint"):
        make_plan(Asked("2", "2"), {}, CORES)
    plan = make_plan(Asked("2", "2", rdzv_endpoint="head:2000", key="none"), {}, CORES)
    assert isinstance(plan, Launch)
    assert (plan.address, plan.port, plan.node_rank, plan.elastic) == ("head", 2000, None, False)
    plan = make_plan(Asked("2", "2", 1, "head", 2000, key="job.key"), {}, CORES)
    assert isinstance(plan, Launch)
    assert (plan.address, plan.port, plan.node_rank) == ("head", 2000, 1)


def test_machines_with_a_store_need_no_other_place_to_meet() -> None:
    asked = Asked("1", "2:4", key="k", store="etcd://s:1", listen="10.0.0.1", rdzv_id="x")
    found = make_plan(asked, {}, CORES)
    assert found == Launch(1, 2, 4, None, "10.0.0.1", 0, "x", key="k", store="etcd://s:1")
    task = srun(1, 2, 2, "1(x2)")
    scheduled = make_plan(Asked("1", key="k", store="etcd://s:1"), task, CORES)
    assert isinstance(scheduled, Launch)
    assert (scheduled.store, scheduled.address, scheduled.port) == ("etcd://s:1", "", 0)


@pytest.mark.parametrize("listen", [":1", "a:b", "a:99999", "a:"])
def test_an_address_of_this_machine_that_cannot_be_is_refused(listen: str) -> None:
    with pytest.raises(LaunchError):
        make_plan(Asked("1", "2", key="k", store="etcd://s", listen=listen), {}, CORES)


@pytest.mark.parametrize(
    ("asked", "elastic", "why"),
    [
        (Asked(store="etcd://s"), None, "--elastic"),
        (Asked(listen="a:1"), Elastic(), "--listen goes with --store"),
        (Asked(store="file:///x"), Elastic(), "etcd://"),
    ],
)
def test_a_store_that_nobody_would_ask_is_refused(asked, elastic, why) -> None:
    with pytest.raises(LaunchError, match=why):
        check_store(asked, elastic)


def test_several_machines_need_a_key_or_the_word_that_they_do_without() -> None:
    here = {"rdzv_endpoint": "head:2000"}
    with pytest.raises(LaunchError, match="--new-key"):
        make_plan(Asked("2", "2", **here), {}, CORES)
    with pytest.raises(LaunchError, match="--key none"):
        make_plan(Asked(), srun(1, 3, 3, "1(x3)"), GPUS)
    plans = [make_plan(Asked("2", "2", key=key, **here), {}, CORES) for key in ("none", "a/file")]
    assert [plan.key for plan in plans] == ["", "a/file"]


def test_a_range_of_machines_is_elastic() -> None:
    plan = make_plan(Asked("2", "1:4", rdzv_endpoint="[::1]:2000", key="none"), {}, CORES)
    assert isinstance(plan, Launch)
    assert (plan.min_nodes, plan.max_nodes, plan.elastic, plan.address) == (1, 4, True, "::1")


@pytest.mark.parametrize("nodes", ["0", "2:1", "x", "1:x", "-1", "²"])
def test_a_number_of_machines_that_cannot_be_is_refused(nodes: str) -> None:
    with pytest.raises(LaunchError, match="--nnodes"):
        make_plan(Asked("2", nodes, rdzv_endpoint="head:2000"), {}, CORES)


def test_a_machine_beyond_the_count_is_refused() -> None:
    with pytest.raises(LaunchCountError, match="--node-rank is 2"):
        make_plan(Asked("2", "2", 2, "head", 2000), {}, CORES)


def test_a_port_that_cannot_be_is_refused() -> None:
    with pytest.raises(LaunchError, match="70000 is no port"):
        make_plan(Asked("2", master_port=70_000), {}, CORES)


def test_a_launch_inside_a_rank_is_refused() -> None:
    for inside in (
        {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "4"},
        {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4"},
    ):
        with pytest.raises(LaunchCountError, match="rank 1 of 4 already") as refused:
            make_plan(Asked("2"), inside, CORES)
        assert refused.value.started == 4


# Under srun and mpirun.


def test_srun_with_a_task_for_each_rank_makes_the_process_that_rank() -> None:
    plan = make_plan(Asked(), srun(4, 5, 3, "2(x2),1"), CORES)
    assert plan == Become(4, 0, 5, 1, 2, 3, "node08", port_of("slurm 4711.0"))
    assert plan.environment() == {
        "RANK": "4",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "5",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "2",
        "GROUP_WORLD_SIZE": "3",
        "MASTER_ADDR": "node08",
        "MASTER_PORT": str(port_of("slurm 4711.0")),
    }


def test_all_tasks_of_a_job_compute_the_same_port_and_jobs_different_ones() -> None:
    plans = [make_plan(Asked(), srun(rank, 4, 2, "2(x2)"), CORES) for rank in range(4)]
    assert len({(plan.address, plan.port) for plan in plans}) == 1
    ports = {port_of(f"slurm {job}.0") for job in range(100)}
    assert len(ports) > 90
    assert all(10_000 <= port < 30_000 for port in ports)


def test_srun_on_one_machine_meets_on_loopback() -> None:
    plan = make_plan(Asked(), srun(1, 2, 1, "2"), CORES)
    assert isinstance(plan, Become)
    assert plan.address == "127.0.0.1"


def test_srun_with_a_task_for_each_machine_starts_the_ranks_there() -> None:
    plan = make_plan(Asked(key="job.key"), srun(1, 3, 3, "1(x3)"), GPUS)
    assert isinstance(plan, Launch)
    assert (plan.nproc, plan.min_nodes, plan.max_nodes, plan.node_rank) == (4, 3, 3, 1)
    assert (plan.address, plan.run_id) == ("node08", "slurm 4711.0")


def test_counts_that_differ_from_what_srun_started_are_refused() -> None:
    with pytest.raises(LaunchCountError, match="--nproc is 3, but srun has started 2 here") as no:
        make_plan(Asked("3"), srun(0, 4, 2, "2(x2)"), CORES)
    assert (no.value.asked, no.value.started) == (3, 2)
    with pytest.raises(LaunchCountError, match="--nnodes is 4, but srun has started 2"):
        make_plan(Asked(nnodes="4"), srun(0, 4, 2, "2(x2)"), CORES)
    with pytest.raises(LaunchCountError, match="which is not possible"):
        make_plan(Asked(), srun(0, 4, 2, "2(x2)") | {"SLURM_PROCID": "7"}, CORES)


def test_a_batch_script_on_many_machines_without_srun_is_refused() -> None:
    batch = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "4", "SLURM_PROCID": "0"}
    with pytest.raises(LaunchCountError, match="Put srun before it"):
        make_plan(Asked("2"), batch, CORES)
    assert isinstance(make_plan(Asked("2", "1"), batch, CORES), Launch)
    assert isinstance(make_plan(Asked("2"), batch | {"SLURM_JOB_NUM_NODES": "1"}, CORES), Launch)


def test_mpirun_makes_the_process_a_rank_on_one_machine() -> None:
    plan = make_plan(Asked(), openmpi(1, 2, 2), CORES)
    assert isinstance(plan, Become)
    assert (plan.rank, plan.local_rank, plan.world_size, plan.nodes) == (1, 1, 2, 1)
    assert plan.address == "127.0.0.1"


def test_mpirun_over_machines_needs_to_be_told_where_rank_0_is() -> None:
    with pytest.raises(LaunchError, match="--master-addr"):
        make_plan(Asked(), openmpi(3, 4, 2), CORES)
    plan = make_plan(Asked(master_addr="head"), openmpi(3, 4, 2), CORES)
    assert isinstance(plan, Become)
    assert (plan.node_rank, plan.local_rank, plan.address) == (1, 1, "head")


def test_mpirun_with_a_task_for_each_machine_starts_the_ranks_there_if_told_how_many() -> None:
    plan = make_plan(Asked("4", master_addr="head", key="none"), openmpi(1, 2, 1), CORES)
    assert isinstance(plan, Launch)
    assert (plan.nproc, plan.max_nodes, plan.node_rank) == (4, 2, 1)
    assert isinstance(make_plan(Asked(master_addr="head"), openmpi(1, 2, 1), CORES), Become)


def test_mpirun_inside_a_slurm_job_wins_and_mpich_is_known() -> None:
    task = find_task(srun(0, 2, 2, "1(x2)") | openmpi(3, 4, 4))
    assert task is not None
    assert (task.launcher, task.rank) == ("mpirun", 3)
    hydra = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"}
    task = find_task(hydra)
    assert task is not None
    assert (task.rank, task.size, task.local_rank, task.nodes) == (1, 2, 1, 1)


def test_slurms_lists_are_read() -> None:
    assert expand_hosts("a") == ["a"]
    assert expand_hosts("a,b[1-2]c,d") == ["a", "b1c", "b2c", "d"]
    assert expand_hosts("r[1-2]n[01-02]") == ["r1n01", "r1n02", "r2n01", "r2n02"]
    assert expand_hosts("") == []
    assert expand_counts("4,2(x2)") == [4, 2, 2]


# Threads.


def test_cores_are_shared_out_unless_the_user_has_settled_it() -> None:
    assert threads_per_rank(None, 2, 8, {}) == 4
    assert threads_per_rank(None, 16, 8, {}) == 1
    assert threads_per_rank(3, 2, 8, {"OMP_NUM_THREADS": "7"}) == 3
    assert threads_per_rank(None, 2, 8, {"OMP_NUM_THREADS": "7"}) is None


def test_a_launcher_takes_as_many_open_files_as_it_needs_or_says_that_they_are_too_few() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = min(256, before[0])
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, before[1]))
    try:
        allow_open_files(few - 1)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == few
        allow_open_files(few + 1)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == few + 1
        with pytest.raises(LaunchError, match="open files"):
            allow_open_files(before[1] + 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_containers_quota_counts(tmp_path) -> None:
    own = tmp_path / "pod" / "box"
    own.mkdir(parents=True)
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "pod" / "cpu.max").write_text("150000 100000\n")
    (own / "cpu.max").write_text("max 100000\n")
    membership = tmp_path / "cgroup"
    membership.write_text("0::/pod/box\n")
    assert cpu_quota(tmp_path, membership) == 1.5
    (own / "cpu.max").unlink()
    (own / "cpu.cfs_quota_us").write_text("50000")
    (own / "cpu.cfs_period_us").write_text("100000")
    assert cpu_quota(tmp_path, membership) == 0.5
    assert cpu_quota(tmp_path / "none", tmp_path / "none") == float("inf")


def test_ranks_to_show_that_there_are_none_of_are_refused() -> None:
    plan.check_shown({0, 1}, 2)
    plan.check_shown((), 2)
    with pytest.raises(
        LaunchError, match=r"--show asks for rank 2, 5, and there are 2\. Ranks are"
    ):
        plan.check_shown({1, 2, 5}, 2)
