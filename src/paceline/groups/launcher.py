"""What a rank tells the launcher that started it: that it goes on without ranks that were lost.

A launcher ends all ranks when one has failed, except those that say so. ``paceline run`` names a
folder in ``PACELINE_NOTES``; each rank's note there is ``survivor-RANK.json``, whole or not there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

NOTES = "PACELINE_NOTES"


@contextmanager
def going_on(rank: int, before: Sequence[int], after: Sequence[int]) -> Iterator[None]:
    """Tell the launcher that ``rank`` leaves the ranks behind that are not in ``after``.

    All are ranks of the job. While the body runs it has not succeeded yet, and if it fails, the
    note is what it was before.
    """
    path = _path(rank)
    if path is None:
        yield
        return
    old = _read(path)
    lost = sorted({*old.get("without", []), *before} - {*after, rank})
    _write(path, {"rank": rank, "without": lost, "members": [*after], "done": False})
    try:
        yield
    except BaseException:
        _write(path, old) if old else path.unlink(missing_ok=True)
        raise
    _write(path, {"rank": rank, "without": lost, "members": [*after], "done": True})


def tell_left(rank: int) -> None:
    """Tell the launcher that ``rank`` has left its group and goes on alone."""
    path = _path(rank)
    if path is not None:
        _write(path, {"rank": rank, "without": [], "members": [], "done": True})


def _path(rank: int) -> Path | None:
    """Where the note goes; None where nobody reads it, or the ranks are not the launcher's."""
    folder = os.environ.get(NOTES, "")
    ours = folder and os.environ.get("RANK") == str(rank)
    return Path(folder) / f"survivor-{rank}.json" if ours else None


def _read(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        return dict(json.loads(path.read_text()))
    return {}


def _write(path: Path, note: object) -> None:
    with suppress(OSError):  # the launcher may be gone; training goes on
        draft = path.with_suffix(".part")
        draft.write_text(json.dumps(note))
        draft.replace(path)
