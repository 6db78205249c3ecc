"""Several machines: their launchers meet, number themselves, and fail together."""

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from paceline.cli.run.meeting import MachineMeeting, _listen
from paceline.cli.run.plan import Launch
from paceline.errors import LaunchCountError, LaunchError, PortTakenError
from tests.cli.launches import start

PATIENCE = timedelta(seconds=30)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def machine(port: int, nodes: int = 2, rank: int | None = None) -> Launch:
    return Launch(1, nodes, nodes, rank, "127.0.0.1", port)


def together(*plans: Launch, timeout: timedelta = PATIENCE) -> list:
    """What each machine's first meeting comes to: a MachineMeeting, or the error it raised."""

    def meet(plan: Launch) -> MachineMeeting | Exception:
        try:
            meeting = MachineMeeting(plan, timeout)
            meeting.next_rendezvous()
        except LaunchError as error:
            return error
        return meeting

    with ThreadPoolExecutor(len(plans)) as pool:
        return list(pool.map(meet, plans))


def test_machines_are_numbered_as_they_come_and_one_of_them_keeps_the_store() -> None:
    port = free_port()
    meetings = together(*[machine(port, 3)] * 3)
    assert sorted(meeting.node_rank for meeting in meetings) == [0, 1, 2]
    assert sum(meeting.hosts for meeting in meetings) == 1
    assert {meeting.port for meeting in meetings} == {port}


def test_machines_with_numbers_keep_them_and_a_restart_has_an_empty_store() -> None:
    port = free_port()
    first, second = together(machine(port, rank=0), machine(port, rank=1))
    assert (first.node_rank, second.node_rank, first.hosts) == (0, 1, True)
    assert first.num_nodes_waiting() == second.num_nodes_waiting() == 0
    with ThreadPoolExecutor(2) as pool:
        ahead = pool.submit(first.next_rendezvous)
        behind = pool.submit(second.next_rendezvous)
        stores = [info.result().bootstrap_store_info for info in (ahead, behind)]
    assert stores[0].master_port == stores[1].master_port != port


def test_a_machine_that_starts_again_is_followed_by_the_others() -> None:
    port = free_port()
    first, second = together(machine(port, rank=0), machine(port, rank=1))
    with ThreadPoolExecutor(1) as pool:
        again = pool.submit(first.next_rendezvous)
        while not second.num_nodes_waiting():
            assert not again.done()
        second.next_rendezvous()
        again.result()


def test_machines_that_count_differently_are_told() -> None:
    port = free_port()
    found = together(machine(port, 2, 0), machine(port, 3, 1), timeout=timedelta(seconds=1.5))
    assert all(isinstance(error, LaunchCountError) for error in found)
    assert any("on another machine" in str(error) for error in found)


def test_two_machines_with_one_number_are_told() -> None:
    port = free_port()
    plans = [machine(port, 3, rank) for rank in (0, 1, 1)]
    found = together(*plans, timeout=timedelta(seconds=1.5))
    assert any("there is a machine 1 of 3 already" in str(error) for error in found)


def test_a_machine_that_waits_in_vain_says_how_many_came() -> None:
    (error,) = together(machine(free_port(), 2, 0), timeout=timedelta(seconds=0.5))
    assert isinstance(error, LaunchCountError)
    assert (error.asked, error.started) == (2, 1)
    (error,) = together(machine(free_port(), 2, 1), timeout=timedelta(seconds=0.5))
    assert "nobody answered at 127.0.0.1" in str(error)


def test_a_taken_port_and_a_foreign_address_are_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        (error,) = together(machine(taken.getsockname()[1], 2, 0))
    assert isinstance(error, PortTakenError)
    (error,) = together(Launch(1, 2, 2, 0, "192.0.2.1", free_port()))
    assert "cannot listen on 192.0.2.1" in str(error)


def test_a_port_of_another_program_is_told_soon_though_a_launcher_may_come_late(
    monkeypatch,
) -> None:
    monkeypatch.setattr("paceline.cli.run.meeting._ANSWER", timedelta(seconds=0.2))
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        with pytest.raises(PortTakenError, match="belongs to another program"):
            MachineMeeting(Launch(1, 2, 2, None, "127.0.0.1", port))


def test_the_first_failure_is_agreed_on_and_a_consequence_waits_for_its_cause() -> None:
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
        with _listen(address, 0, alone=False) as listener:
            assert listener.getsockname()[0] == address


def test_two_launchers_train_together_and_hear_of_each_others_failures(tmp_path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, signal, sys\n"
        "print(os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ['LOCAL_RANK'])\n"
        "if os.environ['RANK'] == '2': raise ValueError('on the second machine')\n"
        "signal.pause()"
    )
    port = free_port()
    words = ["run", "--nnodes", 2, "--nproc", 2, "--master-addr", "127.0.0.1"]
    words += ["--master-port", port, "--node-rank"]
    launched = [start(*words, number, script) for number in (0, 1)]
    (out0, err0), (out1, err1) = [each.communicate(timeout=120) for each in launched]
    assert sorted(out0.splitlines()) == ["[0] 0 4 0", "[1] 1 4 1"]
    assert sorted(out1.splitlines()) == ["[2] 2 4 0", "[3] 3 4 1"]
    said = "rank 2 of 4 failed first: ValueError: on the second machine (at train.py:3)"
    assert said in err0
    assert said in err1
    assert [each.returncode for each in launched] == [1, 1]
