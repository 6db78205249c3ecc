"""Members that were forked after torch was imported."""

import pytest
import torch

from paceline.elastic.forked import VARIABLE, heed_threads, note_fork


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


def test_a_number_of_threads_that_a_script_sets_after_the_fork_is_heeded_once(
    threads, monkeypatch
) -> None:
    monkeypatch.setenv(VARIABLE, "5")
    note_fork()
    monkeypatch.setenv(VARIABLE, str(threads + 1))
    heed_threads()
    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)
    heed_threads()
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("value", ["5", "", "many", "2,1"])
def test_threads_stay_where_the_script_says_nothing_of_use(threads, monkeypatch, value) -> None:
    monkeypatch.setenv(VARIABLE, "5")
    note_fork()
    monkeypatch.setenv(VARIABLE, value)
    heed_threads()
    assert torch.get_num_threads() == threads


def test_a_number_that_the_script_gave_torch_itself_stays(threads, monkeypatch) -> None:
    monkeypatch.setenv(VARIABLE, "5")
    note_fork()
    monkeypatch.setenv(VARIABLE, "7")
    torch.set_num_threads(threads + 1)
    heed_threads()
    assert torch.get_num_threads() == threads + 1
