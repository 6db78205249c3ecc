"""The folder of ``--record``: refused if nothing could come into it, emptied of an earlier run."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ...errors import LaunchError
from .. import say

_LOGS = "rank-*.json"  # as recorder/run.py names them


def check_record(folder: str) -> None:
    """Refuse a place for records that cannot be written, before an hour of training."""
    if not folder:
        return
    if os.environ.get("PACELINE_RECORDER") == "0":
        raise LaunchError(
            f"nothing would be recorded into {folder}: PACELINE_RECORDER=0 turns the recorder off",
            "Unset it, or leave --record out.",
        )
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise LaunchError(
            f"cannot record into {folder} ({error.strerror})", "Give a folder that can be written."
        ) from None


def clear_record(folder: str) -> None:
    """Remove the logs of an earlier run: with more ranks than this one, some would stay."""
    old = sorted(Path(folder).glob(_LOGS)) if folder else []
    for path in old:
        path.unlink(missing_ok=True)
    if old:
        say.note(f"{folder} held a run of {len(old)} ranks, which this one replaces")


def tell_if_empty(folder: str) -> None:
    """Say so where a run has left no log."""
    if folder and not any(Path(folder).glob(_LOGS)):
        say.note(
            f"nothing was recorded into {folder}: no rank made a group of paceline's; "
            "--drop-in gives torch's names ours"
        )
