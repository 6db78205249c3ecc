"""Saves are whole or not there, and what a disk does to them is found."""

from __future__ import annotations

import errno
import logging
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.elastic import saves as written
from paceline.elastic.saves import STATE, TENSORS, Saves, read
from paceline.elastic.state import JobState
from paceline.errors import DamagedSaveError, JobStateError

from .runs import Ranks, require_equal, train
from .test_job import kill_at, survivors, undisturbed


def a_state(steps: int) -> JobState:
    tensors = {"model.weight": torch.full((64, 3), float(steps)), "model.count": torch.tensor(7)}
    return JobState(steps, ["value", {"steps": steps}], tensors)


def test_the_last_two_are_kept_and_the_newest_is_read(tmp_path: Path) -> None:
    saves = Saves(tmp_path)
    for steps in (10, 20, 30):
        saves.write(a_state(steps))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000020", "step-00000030"]
    newest = saves.newest()
    assert newest is not None
    assert newest.steps == 30
    assert torch.equal(newest.tensors["model.weight"], torch.full((64, 3), 30.0))
    assert load_file(tmp_path / "step-00000030" / TENSORS)["model.count"] == 7


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-100] ^= 4
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("name", [TENSORS, STATE])
@pytest.mark.parametrize("damage", [cut_short, flip_a_bit, empty, Path.unlink])
def test_a_damaged_save_is_left_out_and_the_one_before_is_read(
    name: str, damage: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saves = Saves(tmp_path)
    for steps in (10, 20):
        saves.write(a_state(steps))
    damage(tmp_path / "step-00000020" / name)  # type: ignore[operator]
    with caplog.at_level(logging.WARNING):
        newest = saves.newest()
    assert newest is not None
    assert newest.steps == 10
    assert "step-00000020 is incomplete and was skipped" in caplog.text


def test_where_no_save_is_whole_nothing_begins(tmp_path: Path) -> None:
    saves = Saves(tmp_path)
    flip_a_bit(saves.write(a_state(10)) / TENSORS)
    with pytest.raises(DamagedSaveError, match="step-00000010"):
        saves.newest()


def test_one_that_is_killed_while_it_writes_leaves_the_last_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = Saves(tmp_path)
    saves.write(a_state(10))
    for fails in ("save_file", "_make_durable"):
        with monkeypatch.context() as patch:
            patch.setattr(written, fails, _killed)
            patch.setattr(shutil, "rmtree", lambda *_, **__: None)  # as if nobody were there to
            with pytest.raises(KeyboardInterrupt):
                saves.write(a_state(20))
        newest = saves.newest()
        assert newest is not None
        assert newest.steps == 10
    for steps in (20, 30):
        saves.write(a_state(steps))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-00000020", "step-00000030"]


def _killed(*_: object) -> None:
    raise KeyboardInterrupt


def before_the_next_has_its_name(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]
) -> None:
    """Let ``act`` happen when the files of the next save are written, as a draft."""
    write_files = written._write_files

    def write_and_act(folder: Path, state: JobState) -> None:
        monkeypatch.setattr(written, "_write_files", write_files)
        write_files(folder, state)
        act()

    monkeypatch.setattr(written, "_write_files", write_and_act)


@pytest.mark.parametrize("steps", [4, 8])
def test_the_last_save_of_one_that_leaves_spares_what_another_is_writing(
    steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before_the_next_has_its_name(monkeypatch, lambda: Saves(tmp_path).write(a_state(steps)))
    Saves(tmp_path).write(a_state(8))
    assert read(tmp_path / "step-00000008").steps == 8


def test_where_later_saves_are_damaged_what_is_saved_from_an_earlier_one_on_is_kept(
    tmp_path: Path,
) -> None:
    saves = Saves(tmp_path)
    for steps in (200, 300):
        flip_a_bit(saves.write(a_state(steps)) / TENSORS)
    for steps in (100, 150, 160):  # the first one is put back from a backup
        saves.write(a_state(steps))
        newest = Saves(tmp_path).newest()
        assert newest is not None
        assert newest.steps == steps
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == [f"step-{steps:08d}" for steps in (150, 160, 200, 300)]


def test_a_draft_that_is_removed_while_it_is_written_does_not_become_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_more() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", lambda *_, **__: None)  # as if it were still at it
            Saves(tmp_path).write(a_state(8))

    before_the_next_has_its_name(monkeypatch, write_more)
    with pytest.raises(FileNotFoundError):
        Saves(tmp_path).write(a_state(4))
    assert not (tmp_path / "step-00000004").exists()
    Saves(tmp_path).write(a_state(10))
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == ["step-00000008", "step-00000010"]


def test_a_full_disk_is_told_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(written, "save_file", full)
    with caplog.at_level(logging.ERROR):
        outcome = train(None, save=tmp_path, save_every=2)
    require_equal(outcome, undisturbed())
    assert "No space left on device" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_state_of_the_same_steps_replaces_what_was_there(tmp_path: Path) -> None:
    saves = Saves(tmp_path)
    flip_a_bit(saves.write(a_state(10)) / TENSORS)
    saves.write(a_state(10))
    assert read(tmp_path / "step-00000010").steps == 10


def test_after_all_ranks_are_killed_the_next_start_goes_on_at_the_last_save(
    tmp_path: Path,
) -> None:
    ranks = Ranks(2)
    gone = threading.Barrier(2)

    def of(member: int) -> object:
        kill = kill_at(ranks, {member: (7, "shard")})(member)

        def moment(now: object, shards: int, place: str) -> None:
            if (now.number, place) == (7, "begin"):  # type: ignore[attr-defined]
                gone.wait()
            kill(now, shards, place)  # type: ignore[arg-type]

        return moment

    for _ in range(2):
        ranks.start(of, save=tmp_path, save_every=3)  # type: ignore[arg-type]
    assert survivors(ranks.wait()) == []
    again = Ranks(3)
    for number in range(3):
        again.start(save=tmp_path, save_every=3, seed=5 + number)
    ends = survivors(again.wait())
    assert len(ends) == 3
    for end in ends:
        assert end.committed == list(range(6, 10))
        require_equal(end, undisturbed())


def test_a_save_of_another_model_is_refused(tmp_path: Path) -> None:
    saves = Saves(tmp_path)
    train(None, save=tmp_path, epochs=1)
    state = saves.newest()
    assert state is not None
    tensors = {**state.tensors, "model.0.weight": torch.zeros(3)}
    saves.write(JobState(state.steps, state.plain, tensors))
    with pytest.raises(JobStateError, match=r"0.weight is \(8, 4\) float32 here and \(3,\)"):
        train(None, save=tmp_path)


def test_a_run_goes_on_for_more_epochs_than_it_was_started_with(tmp_path: Path) -> None:
    train(None, save=tmp_path, epochs=1)
    require_equal(train(None, save=tmp_path, epochs=2), undisturbed())
