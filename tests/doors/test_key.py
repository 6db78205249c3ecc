"""The key file of a job on several hosts: who may read it, and what is refused."""

import os
import stat
import sys
from datetime import timedelta

import pytest

from paceline._doors import AGENT, JobKey
from paceline.errors import KeyFileError, LaunchError


def test_a_key_that_was_written_is_read_by_its_owner_alone(tmp_path) -> None:
    path = tmp_path / "job.key"
    made = JobKey.make()
    made.write(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert JobKey.read(path) == made


def test_a_key_file_is_never_overwritten(tmp_path) -> None:
    path = tmp_path / "job.key"
    path.write_text("mine")
    with pytest.raises(KeyFileError, match="no file yet") as caught:
        JobKey.make().write(path)
    assert caught.value.path == str(path)
    assert isinstance(caught.value, LaunchError)
    assert path.read_text() == "mine"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_key_that_others_may_have_read_is_refused(tmp_path, mode) -> None:
    path = tmp_path / "job.key"
    JobKey.make().write(path)
    path.chmod(mode)
    with pytest.raises(KeyFileError, match="other users may have read"):
        JobKey.read(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of another user")
def test_a_key_of_another_user_is_refused_even_where_it_can_be_read(tmp_path) -> None:
    path = tmp_path / "job.key"
    JobKey.make().write(path)
    os.chown(path, 65534, 65534)
    with pytest.raises(KeyFileError, match="owner 65534"):
        JobKey.read(path)


def test_what_is_no_key_or_a_part_of_one_is_refused(tmp_path) -> None:
    path = tmp_path / "job.key"
    whole = JobKey.make()
    texts = [b"", b"hello", whole.key, whole.authority, whole.authority + whole.key]
    texts.append((whole.key + whole.authority)[:-40])
    for text in texts:
        path.write_bytes(text)
        path.chmod(0o600)
        with pytest.raises(KeyFileError, match="is not a complete key file"):
            JobKey.read(path)
    path.unlink()
    with pytest.raises(KeyFileError, match="cannot read"):
        JobKey.read(path)
    with pytest.raises(KeyFileError):
        JobKey.read(tmp_path)


def test_a_key_whose_time_is_over_says_until_when_it_was_good(tmp_path) -> None:
    path = tmp_path / "job.key"
    JobKey.make(life=timedelta(seconds=-5)).write(path)
    with pytest.raises(KeyFileError, match="was good until"):
        JobKey.read(path)


def test_neither_a_key_nor_an_identity_shows_its_secret() -> None:
    key = JobKey.make()
    assert "PRIVATE" not in repr(key) + repr(key.identity(AGENT))
    assert key.key.decode() not in str(vars(KeyFileError("a", "b", "c")))


def test_an_identity_leaves_nothing_on_disk_and_no_descriptor() -> None:
    identity = JobKey.make().identity(AGENT)
    before = sorted(os.listdir("/proc/self/fd"))
    identity.calling(), identity.answering()
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_host_without_the_cryptography_package_is_told_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(LaunchError, match=r"pip install 'paceline\[hosts\]'"):
        JobKey.make()
    with pytest.raises(LaunchError, match=r"paceline\[hosts\]"):
        JobKey.read("job.key")
