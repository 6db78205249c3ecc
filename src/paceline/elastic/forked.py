"""Makes a member that was forked from a process with torch in it behave like any other.

torch reads ``OMP_NUM_THREADS`` when it is imported. A script may set it before that; in a member
that was forked the import has been before, and ranks with other numbers of threads than the rest
would be refused.
"""

from __future__ import annotations

import os

import torch

VARIABLE = "OMP_NUM_THREADS"
_at_fork: list[tuple[str, int]] = []  # the variable, and the number of threads


def note_fork() -> None:
    """This process was forked just now, and the script has not begun."""
    _at_fork[:] = [(os.environ.get(VARIABLE, ""), torch.get_num_threads())]


def heed_threads() -> None:
    """Have as many threads as an import of torch would have given, if the script has set that."""
    while _at_fork:
        before, threads = _at_fork.pop()
        wanted = os.environ.get(VARIABLE, "")
        if wanted != before and wanted.isdecimal() and torch.get_num_threads() == threads:
            torch.set_num_threads(max(1, int(wanted)))
