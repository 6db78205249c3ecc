"""Saves of a job's state: whole, or not there.

A save is a folder ``step-00000100`` with two files: ``tensors.safetensors``, and ``state.msgpack``
with the plain data and the digest of every tensor, behind a digest of its own. It is written under
another name, made durable, and then renamed, so a folder of that name has all of it, unless disk
or memory damaged it later: that, the digests find. A save and the one before it are kept.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import threading
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .._transport import decode, encode
from ..errors import DamagedSaveError
from .digests import digest
from .state import JobState

log = logging.getLogger(__name__)

TENSORS, STATE = "tensors.safetensors", "state.msgpack"
_FORMAT = 1
_NAME, _DRAFT = re.compile(r"step-(\d{8,})"), ".draft-"
_DRAFT_STEPS = re.compile(r"\.draft-(\d+)-")
_KEPT = 2


class Saves:
    """The saves in one folder."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._thread: threading.Thread | None = None
        self._failed = ""

    # -- writing --------------------------------------------------------------------------------

    def begin(self, state: JobState) -> None:
        """Write ``state``, which nobody changes meanwhile, on another thread."""
        self.wait()
        self._thread = threading.Thread(target=self._try, args=(state,), name="paceline-save")
        self._thread.start()

    def wait(self) -> None:
        """Return when the last save is written, or has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _try(self, state: JobState) -> None:
        try:
            self.write(state)
        except Exception as error:  # a full disk must not end the training
            log.error(
                "the state after %d steps was not saved: %s: %s. Training continues; the last save "
                "is %s",
                state.steps,
                type(error).__name__,
                error,
                next((path.name for path in self._paths()), "none"),
            )

    def write(self, state: JobState) -> Path:
        """Write ``state`` and return its folder; raises if it could not."""
        self.folder.mkdir(parents=True, exist_ok=True)
        final = self.folder / f"step-{state.steps:08d}"
        draft = self.folder / f"{_DRAFT}{state.steps}-{secrets.token_hex(4)}"
        draft.mkdir()
        try:
            _write_files(draft, state)
            if final.exists():  # of a run that was here before, and might be damaged
                final.rename(self._old_draft())
            draft.rename(final)
            _make_durable(self.folder)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        self._remove_old(state.steps)
        return final

    def _remove_old(self, steps: int) -> None:
        """Remove what lies before the save of ``steps`` and the one before it.

        What has more steps stays. It may be damaged, which is why this run began before it; or this
        rank has left, and the others go on and save in the same folder.
        """
        before = [path for path in self._paths() if _steps_of(path) < steps]
        for path in before[_KEPT - 1 :]:
            shutil.rmtree(path, ignore_errors=True)
        for path in self.folder.glob(f"{_DRAFT}*"):  # of ranks that were killed
            match = _DRAFT_STEPS.match(path.name)
            if match is not None and int(match[1]) >= steps:  # it may be written just now
                continue
            away = self._old_draft()
            with suppress(OSError):  # else one that is still written could become a save in part
                path.rename(away)
            shutil.rmtree(away, ignore_errors=True)

    def _old_draft(self) -> Path:
        """A name for what is to be removed."""
        return self.folder / f"{_DRAFT}old-{secrets.token_hex(4)}"

    # -- reading --------------------------------------------------------------------------------

    def _paths(self) -> list[Path]:
        """All saves, newest first."""
        found = self.folder.iterdir() if self.folder.is_dir() else ()
        named = [path for path in found if _NAME.fullmatch(path.name)]
        return sorted(named, key=_steps_of, reverse=True)

    def newest(self) -> JobState | None:
        """The newest save that is whole; None where there is no save at all.

        What is wrong with newer ones is logged. Raises if there are saves, and none is whole.
        """
        wrong = {}
        for path in self._paths():
            try:
                state = read(path)
            except Exception as error:
                if not path.is_dir():  # somebody has removed it meanwhile
                    continue
                wrong[path.name] = f"{type(error).__name__}: {error}"
                log.warning("%s is incomplete and was skipped: %s", path, wrong[path.name])
                continue
            return state
        if wrong:
            raise DamagedSaveError(str(self.folder), wrong)
        return None


def _steps_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _write_files(folder: Path, state: JobState) -> None:
    tensors = {name: t.detach().cpu().contiguous() for name, t in state.tensors.items()}
    data = encode(_description(state, tensors))
    save_file(_apart(tensors), folder / TENSORS)
    (folder / STATE).write_bytes(blake2b(data, digest_size=32).digest() + data)
    for name in (TENSORS, STATE):
        _make_durable(folder / name)
    _make_durable(folder)


def _description(state: JobState, tensors: dict[str, Tensor]) -> dict[str, Any]:
    rows = {name: [t.dtype, list(t.shape), digest(t)] for name, t in tensors.items()}
    return {"format": _FORMAT, "steps": state.steps, "plain": state.plain, "tensors": rows}


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """No two of them in the same memory, which the format refuses."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in tensors.items():
        home = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if home in seen else tensor
        seen.add(home)
    return apart


def read(folder: Path) -> JobState:
    """The state in a save; raises if any bit of it is not what was written."""
    data = (folder / STATE).read_bytes()
    told, data = data[:32], data[32:]
    if blake2b(data, digest_size=32).digest() != told:
        raise ValueError(f"{STATE} was truncated or changed")
    said: Any = decode(data)
    if said["format"] != _FORMAT:
        raise ValueError(f"it was written in format {said['format']}, and this version reads 1")
    tensors = load_file(folder / TENSORS)
    bad = list(_damaged(said["tensors"], tensors))
    if bad:
        raise ValueError(f"{TENSORS} is not what was written: {', '.join(bad[:5])}")
    known = {name: row[2] for name, row in said["tensors"].items()}
    return JobState(said["steps"], said["plain"], {n: tensors[n] for n in known}, known)


def _damaged(rows: dict[str, Any], tensors: dict[str, Tensor]) -> Iterator[str]:
    for name, (dtype, shape, number) in rows.items():
        found = tensors.get(name)
        if found is None:
            yield f"{name} is missing"
        elif (found.dtype, list(found.shape)) != (dtype, shape) or digest(found) != number:
            yield f"{name} was changed"


def _make_durable(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def pinned(state: JobState) -> JobState:
    """A copy on the CPU that training does not change."""
    copies = {name: t.to("cpu", copy=True, non_blocking=False) for name, t in state.tensors.items()}
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return JobState(state.steps, state.plain, copies)
