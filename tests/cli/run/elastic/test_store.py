"""Elastic jobs whose hosts agree in an etcd: any of them may be lost, also the first."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline._doors import JobKey
from tests.cli.run.elastic.test_hosts import TRAIN, read_until, weights
from tests.etcd.server import etcd_server, no_etcd
from tests.groups.netns import Host, Star, no_star, star

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(no_etcd()), reason=no_etcd()),
    pytest.mark.skipif(bool(no_star()), reason=no_star()),
]
DEADLINE = 600.0  # seconds
STEPS = "1600"  # samples, in batches of 32
HEARTBEAT = 8  # so that a lease is 2 s
GOES_ON = "train on"


@dataclass
class StoreJob:
    """A folder with a script and a key, hosts on a switch, and an etcd on the last of them."""

    folder: Path
    star: Star
    running: ExitStack  # the etcd
    store: str = ""

    def start_store(self) -> None:
        """Start the etcd with the data that are in the folder, if there are any."""
        host = self.star.hosts[-1]
        inside = ["ip", "netns", "exec", host.namespace]
        server = etcd_server(self.folder, host.address, 2379, inside)
        self.store = self.running.enter_context(server)

    @property
    def hosts(self) -> tuple[Host, ...]:
        return self.star.hosts[:-1]

    @contextmanager
    def agent(self, host: Host, *options: object) -> Iterator[subprocess.Popen[str]]:
        """``paceline run`` on a host whose processes all die with the one that is given."""
        python = [sys.executable, "-m", "paceline", "run", "--elastic", "--nproc", "2"]
        store = ["--store", f"etcd://{self.store}", "--key", str(self.folder / "key")]
        words = [*python, *store, "--heartbeat", str(HEARTBEAT), *map(str, options)]
        command = f"{' '.join(words)} {self.folder / 'train.py'}"
        inside = f"hostname {host.namespace[-1]} && exec timeout -k 5 {DEADLINE:g} {command}"
        spaces = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        with subprocess.Popen(
            ["ip", "netns", "exec", host.namespace, *spaces, "sh", "-c", inside],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"GLOO_SOCKET_IFNAME": host.interface},
            start_new_session=True,
        ) as process:
            try:
                yield process
            finally:
                process.kill()  # and with it everything in its PID namespace


@pytest.fixture
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[StoreJob]:
    (tmp_path / "train.py").write_text(TRAIN.replace("480", STEPS))
    JobKey.make().write(tmp_path / "key")
    with star(getattr(request, "param", 2) + 1) as made, ExitStack() as running:
        made_job = StoreJob(tmp_path, made, running)
        made_job.start_store()
        yield made_job


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> set[str]:
    """The weights of one process that trains alone."""
    script = tmp_path_factory.mktemp("alone") / "train.py"
    script.write_text(TRAIN.replace("480", STEPS).replace("sleep(0.05)", "sleep(0)"))
    said = subprocess.run(
        [sys.executable, str(script)], check=True, capture_output=True, text=True, timeout=DEADLINE
    ).stdout
    return weights("".join(f"[0] {line}\n" for line in said.splitlines()))


def test_the_loss_of_the_first_host_does_not_end_the_job(job, undisturbed) -> None:
    with job.agent(job.hosts[0], "--nnodes", "1:2") as first:
        read_until(first, "this host keeps the roster (term 1)")
        with job.agent(job.hosts[1], "--nnodes", "1:2") as second:
            said = read_until(second, "fifth step")
            first.kill()
            said += second.communicate(timeout=DEADLINE)[0]
    assert second.returncode == 0, said
    assert "this host keeps the roster (term 2)" in said
    assert weights(said) == undisturbed


def test_a_first_host_that_is_cut_off_ends_and_the_other_goes_on(job, undisturbed) -> None:
    with (
        job.agent(job.hosts[0], "--nnodes", "1:2") as first,
        ExitStack() as stack,
    ):
        alone = read_until(first, "this host keeps the roster (term 1)")
        second = stack.enter_context(job.agent(job.hosts[1], "--nnodes", "1:2"))
        said = read_until(second, "fifth step")
        job.star.cut(job.hosts[0])
        said += second.communicate(timeout=DEADLINE)[0]
        alone += first.communicate(timeout=DEADLINE)[0]
    assert second.returncode == 0, said
    assert weights(said) == undisturbed
    assert first.returncode == 2, alone
    assert "the store was not reached" in alone
    assert not weights(alone)


def test_of_two_halves_that_both_reach_the_store_the_one_with_the_keeper_goes_on(
    job, undisturbed
) -> None:
    with job.agent(job.hosts[0], "--nnodes", "1:2") as first:
        said = read_until(first, "this host keeps the roster (term 1)")
        with job.agent(job.hosts[1], "--nnodes", "1:2") as second:
            other = read_until(second, "fifth step")
            job.star.part(*job.hosts)
            other += second.communicate(timeout=DEADLINE)[0]
            said += first.communicate(timeout=DEADLINE)[0]
    assert first.returncode == 0, said
    assert weights(said) == undisturbed
    assert second.returncode == 2, other
    assert "the process that keeps the roster has not answered" in other
    assert not weights(other)


def test_a_half_that_comes_back_finds_the_new_keeper(job, undisturbed) -> None:
    with job.agent(job.hosts[0], "--nnodes", "1:2") as first:
        before = read_until(first, "this host keeps the roster (term 1)")
        with job.agent(job.hosts[1], "--nnodes", "1:2") as second:
            said = read_until(second, "fifth step")
            job.star.cut(job.hosts[0])
            said += read_until(second, "this host keeps the roster (term 2)")
            job.star.heal(job.hosts[0])
            said += second.communicate(timeout=DEADLINE)[0]
            before += first.communicate(timeout=DEADLINE)[0]
    assert (first.returncode, second.returncode) == (0, 0), before + said
    assert "b keeps the roster (term 2)" in before
    assert weights(before + said) == undisturbed


def test_a_store_that_is_killed_and_started_again_knows_what_was_agreed(job, undisturbed) -> None:
    with job.agent(job.hosts[0], "--nnodes", "1:2") as first:
        read_until(first, "this host keeps the roster (term 1)")
        with job.agent(job.hosts[1], "--nnodes", "1:2") as second:
            said = read_until(second, "fifth step")
            job.running.close()
            job.start_store()
            first.kill()
            said += second.communicate(timeout=DEADLINE)[0]
    assert second.returncode == 0, said
    assert "this host keeps the roster (term 2)" in said
    assert weights(said) == undisturbed


def test_a_host_that_does_not_reach_the_store_is_not_started(job) -> None:
    job.star.cut(job.star.hosts[-1])
    with job.agent(job.hosts[0], "--nnodes", "1:2") as first:
        said = first.communicate(timeout=DEADLINE)[0]
    assert first.returncode == 2, said
    assert "the store was not reached" in said


@pytest.mark.parametrize("job", [3], indirect=True)
def test_a_host_beyond_the_most_waits_and_takes_the_place_of_one_that_is_lost(
    job, undisturbed
) -> None:
    with job.agent(job.hosts[0], "--nnodes", "1:2") as first:
        said = read_until(first, "this host keeps the roster (term 1)")
        with job.agent(job.hosts[1], "--nnodes", "1:2") as second:
            read_until(second, "fifth step")
            with job.agent(job.hosts[2], "--nnodes", "1:2") as third:
                other = read_until(third, "this one waits to take a lost one's place")
                second.kill()
                said += first.communicate(timeout=DEADLINE)[0]
                other += third.communicate(timeout=DEADLINE)[0]
    assert (first.returncode, third.returncode) == (0, 0), said + other
    assert weights(said) == undisturbed
