"""Several machines: their launchers meet, number themselves, and fail together."""

import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as dist

from _paceline_store import store_at
from paceline import testing
from paceline._doors import SIDE_DOOR, JobKey
from paceline.cli.run.machine_stores import listen_openly
from paceline.cli.run.meeting import MachineMeeting
from paceline.cli.run.plan import Launch
from paceline.errors import LaunchCountError, LaunchError, PortTakenError, StrangerError
from tests.cli.launches import paceline, start
from tests.waiting import until

PATIENCE = timedelta(seconds=120)


def free_port() -> int:
    return testing._free_port()  # one that nobody gets who asks for any before it is used


Machine = Callable[..., Launch]


@pytest.fixture(scope="module")
def key(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("key") / "job.key"
    JobKey.make().write(path)
    return str(path)


@pytest.fixture(params=["with a key", "without a key"])
def machine(request, monkeypatch) -> Iterator[Machine]:
    """A machine's plan; all meetings that come of such plans are left in the end."""
    path = request.getfixturevalue("key") if request.param == "with a key" else ""
    for variable in ("PACELINE_STORE", SIDE_DOOR):  # what ranks would be told
        monkeypatch.setenv(variable, "")

    def plan(port: int, nodes: int = 2, rank: int | None = None, least: int = 0) -> Launch:
        return Launch(1, least or nodes, nodes, rank, "127.0.0.1", port, key=path)

    yield plan
    for meeting in sorted(MET, key=lambda meeting: meeting.hosts):
        meeting.shutdown()
    MET.clear()


MET: list[MachineMeeting] = []


def together(
    *plans: Launch, timeout: timedelta = PATIENCE, last_call: timedelta = PATIENCE
) -> list:
    """What each machine's first meeting comes to: a MachineMeeting, or the error it raised."""

    def meet(plan: Launch) -> MachineMeeting | Exception:
        try:
            meeting = MachineMeeting(plan, timeout, last_call)
            MET.append(meeting)
            meeting.next_rendezvous()
        except (LaunchError, StrangerError) as error:
            return error
        return meeting

    with ThreadPoolExecutor(len(plans)) as pool:
        return list(pool.map(meet, plans))


def test_machines_are_numbered_as_they_come_and_one_of_them_keeps_the_store(machine) -> None:
    port = free_port()
    meetings = together(*[machine(port, 3)] * 3)
    assert sorted(meeting.node_rank for meeting in meetings) == [0, 1, 2]
    assert sum(meeting.hosts for meeting in meetings) == 1
    assert {meeting.port for meeting in meetings} == {port}


def test_machines_with_numbers_keep_them_and_a_restart_has_an_empty_store(machine) -> None:
    port = free_port()
    first, second = together(machine(port, rank=0), machine(port, rank=1))
    assert (first.node_rank, second.node_rank, first.hosts) == (0, 1, True)
    assert first.num_nodes_waiting() == second.num_nodes_waiting() == 0
    with ThreadPoolExecutor(2) as pool:
        ahead = pool.submit(first.next_rendezvous)
        behind = pool.submit(second.next_rendezvous)
        stores = [info.result().bootstrap_store_info for info in (ahead, behind)]
    assert stores[0].master_port == stores[1].master_port
    if os.environ["PACELINE_STORE"]:  # the port stays, and the number is the start's
        assert os.environ["PACELINE_STORE"].startswith("unix:2:")
        ranks = store_at(os.environ["PACELINE_STORE"], PATIENCE)
        assert ranks.num_keys() == 0
        with pytest.raises(dist.DistStoreError):  # a rank of the start before
            store_at(os.environ["PACELINE_STORE"].replace(":2:", ":1:"), PATIENCE).num_keys()
    else:
        assert stores[0].master_port != port


def test_a_machine_that_starts_again_is_followed_by_the_others(machine) -> None:
    port = free_port()
    first, second = together(machine(port, rank=0), machine(port, rank=1))
    with ThreadPoolExecutor(1) as pool:
        again = pool.submit(first.next_rendezvous)
        while not second.num_nodes_waiting():
            assert not again.done()
        second.next_rendezvous()
        again.result()


def test_machines_that_count_differently_are_told(machine) -> None:
    port = free_port()
    found = together(machine(port, 2, 0), machine(port, 3, 1), timeout=timedelta(seconds=6))
    assert all(isinstance(error, LaunchCountError) for error in found)
    assert any("on another host" in str(error) for error in found)


def test_two_machines_with_one_number_are_told(machine) -> None:
    port = free_port()
    plans = [machine(port, 3, rank) for rank in (0, 1, 1)]
    found = together(*plans, timeout=timedelta(seconds=8))
    assert any("there is a host with --node-rank 1 already" in str(error) for error in found)


def test_a_machine_that_waits_in_vain_says_how_many_came(machine) -> None:
    (error,) = together(machine(free_port(), 2, 0), timeout=timedelta(seconds=0.5))
    assert isinstance(error, LaunchCountError)
    assert (error.asked, error.started) == (2, 1)
    (error,) = together(machine(free_port(), 2, 1), timeout=timedelta(seconds=0.5))
    assert "nobody answered at 127.0.0.1" in str(error)


def test_a_taken_port_and_a_foreign_address_are_told(machine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        (error,) = together(machine(taken.getsockname()[1], 2, 0))
    assert isinstance(error, PortTakenError)
    (error,) = together(replace(machine(free_port(), 2, 0), address="192.0.2.1"))
    assert "cannot listen on 192.0.2.1" in str(error)


def test_a_port_of_another_program_is_told_soon_though_a_launcher_may_come_late(
    monkeypatch,
) -> None:
    monkeypatch.setattr("paceline.cli.run.machine_stores._ANSWER", timedelta(seconds=0.2))
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        with pytest.raises(PortTakenError, match="belongs to another program"):
            MachineMeeting(Launch(1, 2, 2, None, "127.0.0.1", port))


def test_the_first_failure_is_agreed_on_and_a_consequence_waits_for_its_cause(machine) -> None:
    port = free_port()
    first, second = together(machine(port, rank=0), machine(port, rank=1))
    assert second.failure() == ""
    with ThreadPoolExecutor(1) as pool:
        noticed = pool.submit(first.settle, "rank 0 noticed", final=False)
        assert second.settle("rank 1 raised", final=True) == "rank 1 raised"
        assert noticed.result() == "rank 1 raised; here, rank 0 noticed"
    assert first.failure() == "rank 1 raised"


def test_one_machine_listens_on_the_address_it_was_told() -> None:
    for address in ("127.0.0.1", "127.0.0.2"):
        with listen_openly(address, 0, alone=False) as listener:
            assert listener.getsockname()[0] == address


def test_a_program_that_is_no_launcher_is_told_where_there_is_a_key(key, monkeypatch) -> None:
    monkeypatch.setattr("paceline.cli.run.machine_stores._CALL", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        with pytest.raises(StrangerError, match="has not shown a certificate in time"):
            MachineMeeting(Launch(1, 2, 2, 1, "127.0.0.1", port, key=key))


def test_a_machine_with_another_key_is_told_and_the_others_go_on(machine, key, tmp_path) -> None:
    JobKey.make().write(tmp_path / "another.key")
    port = free_port()
    stranger = Launch(1, 2, 2, 1, "127.0.0.1", port, key=str(tmp_path / "another.key"))
    plans = [Launch(1, 2, 2, rank, "127.0.0.1", port, key=key) for rank in (0, 1)]
    first, second, refused = together(*plans, stranger)
    assert isinstance(refused, StrangerError)
    assert (first.node_rank, second.node_rank) == (0, 1)


def test_a_name_that_means_loopback_is_refused_where_there_is_a_key(key, monkeypatch) -> None:
    """Others could not come there, and every interface is more than was asked for."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 1))]
    monkeypatch.setattr("socket.getaddrinfo", lambda *words, **more: found)
    with pytest.raises(LaunchError, match=r"is 127\.0\.1\.1 on this host"):
        MachineMeeting(Launch(1, 2, 2, 0, "first-host", 1, key=key))


def test_a_round_begins_with_the_least_machines_and_calls_those_who_come_later(machine) -> None:
    port, call = free_port(), timedelta(seconds=0.2)
    plans = [machine(port, 3, rank, least=2) for rank in (0, 1)]
    first, second = together(*plans, last_call=call)
    assert (first.nodes, second.nodes) == (2, 2)
    assert sorted([first.node_rank, second.node_rank]) == [0, 1]
    with ThreadPoolExecutor(3) as pool:
        late = pool.submit(together, machine(port, 3, 2, least=2), last_call=call)
        assert until(first.num_nodes_waiting)
        first._last_call = PATIENCE  # it ends when all three are there
        again = [pool.submit(meeting.next_rendezvous) for meeting in (first, second)]
        infos = [info.result() for info in again]
        (third,) = late.result()
    assert [info.world_size for info in infos] == [3, 3]
    assert sorted([first.node_rank, second.node_rank, third.node_rank]) == [0, 1, 2]


def test_too_few_machines_are_told(machine) -> None:
    plan = machine(free_port(), 3, 0, least=2)
    (error,) = together(plan, timeout=timedelta(seconds=0.5))
    assert isinstance(error, LaunchCountError)
    assert (error.asked, error.started) == (2, 1)


@pytest.mark.parametrize("locked", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_two_launchers_train_together_and_hear_of_each_others_failures(
    tmp_path, key, locked
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, signal, sys\n"
        "print(os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ['LOCAL_RANK'])\n"
        "rank = int(os.environ['RANK'])\n"
        "pipe = sys.argv[1] + str(rank // 2)\n"  # opens when both ranks of a machine open it
        "if rank % 2: open(pipe, 'w').close(), signal.pause()\n"  # one of each machine trains
        "open(pipe).close()\n"
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo', rank=rank // 2, world_size=2)\n"
        "dist.all_reduce(torch.ones(1))\n"
        "dist.destroy_process_group()\n"  # torch may crash at exit if gloo's threads hold tensors
        "if rank == 2: raise ValueError('on the second machine')\n"
        "signal.pause()"
    )
    port = free_port()
    words = ["run", "--nnodes", 2, "--nproc", 2, "--master-addr", "127.0.0.1", "--key"]
    words += [key if locked else "none", "--master-port", port, "--node-rank"]
    pipes = tmp_path / "machine"
    for number in (0, 1):
        os.mkfifo(f"{pipes}{number}")
    launched = [start(*words, number, script, pipes) for number in (0, 1)]
    (out0, err0), (out1, err1) = [each.communicate(timeout=300) for each in launched]
    assert sorted(out0.splitlines()) == ["[0] 0 4 0", "[1] 1 4 1"]
    assert sorted(out1.splitlines()) == ["[2] 2 4 0", "[3] 3 4 1"]
    said = "rank 2 of 4 failed first: ValueError: on the second machine (at train.py:11)"
    assert said in err0
    assert said in err1
    assert [each.returncode for each in launched] == [1, 1], err1


def test_a_new_key_is_made_once_and_several_machines_need_one(capsys, tmp_path) -> None:
    path, script = tmp_path / "job.key", tmp_path / "train.py"
    script.write_text("")
    made = paceline(capsys, "run", "--new-key", path)
    assert made.code == 0
    assert path.stat().st_mode & 0o777 == 0o600
    assert JobKey.read(path)
    again = paceline(capsys, "run", "--new-key", path)
    assert again.code != 0
    assert "no file yet" in again.err
    words = ["run", "--nproc", 1, "--nnodes", 2, "--rdzv-endpoint", "127.0.0.1:1"]
    without = paceline(capsys, *words, script)
    assert without.code != 0
    assert "--new-key" in without.err
    path.chmod(0o644)
    read = paceline(capsys, *words, "--key", path, script)
    assert read.code != 0
    assert "other users may have read" in read.err
