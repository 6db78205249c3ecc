"""A launcher or a rank that gets no turn for a while, or a signal, between two of its lines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from types import SimpleNamespace
from typing import Any

import pytest

from paceline._doors import SIDE_DOOR
from paceline.cli.run import agent, launch, script, signals
from paceline.cli.run.survivors import Outlook
from paceline.cli.run.verdict import RankEnding


def test_a_signal_that_comes_while_handlers_are_set_ends_the_launcher_in_peace(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put, sent = signal.signal, list[int]()

    def put_and_send(number: int, handler: Any) -> Any:
        before = put(number, handler)
        if handler is launch._stop and not sent:
            sent.append(number)
            signal.raise_signal(number)
        return before

    for name in ("PYTHONUNBUFFERED", "TORCHELASTIC_SIGNALS_TO_HANDLE", SIDE_DOOR):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setattr(signals.signal, "signal", put_and_send)
    monkeypatch.setattr(launch, "allow_open_files", lambda number: None)
    before = {number: signal.getsignal(number) for number in signals.heeded()}
    plan = SimpleNamespace(nproc=1, max_nodes=2)
    code = launch.launch(plan, SimpleNamespace(environment=lambda n: {}), None)  # type: ignore[arg-type]
    assert code == 128 + sent[0]
    assert "stopped by" in capsys.readouterr().err
    assert {number: signal.getsignal(number) for number in before} == before


def test_what_a_survivor_wrote_in_time_counts_though_the_launcher_reads_the_clock_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, judged = [1.9], list[float]()

    def read(notes: object) -> dict[int, object]:
        clock[0] = 2.1  # it gets no turn; what is written now has not been read
        return {}

    def look(failed: object, running: object, survivors: object, now: float) -> Outlook:
        judged.append(now)
        return Outlook.GOOD

    monkeypatch.setattr(agent, "read_survivors", read)
    monkeypatch.setattr(agent, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    losses = SimpleNamespace(lost={}, look=look, left_behind=lambda running, survivors: [])
    attempt = SimpleNamespace(notes=None, losses=losses, failed=[1], running=[0])
    asked = SimpleNamespace(attempt=attempt, meeting=None)
    agent.Agent._look(asked)  # type: ignore[arg-type]
    assert judged == [1.9]


@pytest.mark.parametrize("ended", [True, False])
def test_a_stranger_with_the_number_of_a_rank_that_has_ended_is_left_alone(
    ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    process, killed = subprocess.Popen(command, start_new_session=True), list[int]()
    try:
        endings = {0: RankEnding(0, 0.0)} if ended else {}
        attempt = SimpleNamespace(pids={0: process.pid}, endings=endings)
        launcher = SimpleNamespace(attempt=attempt, _wait_for_ends=lambda ranks, seconds: None)
        with monkeypatch.context() as patch:
            patch.setattr(os, "kill", lambda pid, number: killed.append(pid))
            agent.Agent._kill(launcher, [0])  # type: ignore[arg-type]
        assert killed == ([] if ended else [process.pid])
    finally:
        process.kill()
        process.wait(300)


def test_a_rank_has_failed_when_it_did_and_not_when_that_was_written_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, reports = [1.0], list[tuple[object, ...]]()

    def format_slowly(*error: object) -> list[str]:
        clock[0] = 9.0
        return []

    monkeypatch.setattr(script, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(traceback, "format_exception", format_slowly)
    monkeypatch.setattr(script, "_write", lambda path, note: reports.append((note["when"],)))
    monkeypatch.setattr(script, "_notes", lambda: script.Path("nowhere"))
    monkeypatch.setattr(sys, "excepthook", lambda *error: None)
    monkeypatch.setenv("RANK", "0")
    for name in ("last_type", "last_value", "last_traceback"):
        monkeypatch.setattr(sys, name, None, raising=False)
    with pytest.raises(SystemExit):
        script._fail(ValueError("a bad batch"))
    assert reports == [(1.0,)]
