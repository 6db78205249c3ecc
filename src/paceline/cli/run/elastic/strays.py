"""Processes that become this one's children when their own parents end.

A member that is forked from another process has to become the launcher's child. The kernel gives
it to the launcher if that asks for such children; then it also gets what members that were killed
have left behind, and has to take note of their end, or they stay as zombies.
"""

from __future__ import annotations

import ctypes
import os

_PR_SET_CHILD_SUBREAPER = 36


class Strays:
    """What ended members have left, by process group."""

    def __init__(self) -> None:
        self._groups: set[int] = set()
        self._adopts = False

    def adopt(self) -> None:
        """Be the parent of all descendants whose own parent ends."""
        if not self._adopts:
            self._adopts = True
            _set_subreaper(1)

    def left_by(self, member: int) -> None:
        """Look after what a member has left that has ended; ``member`` is its process."""
        if self._adopts:
            self._groups.add(member)

    def look(self) -> None:
        """Take note of those that have ended."""
        self._groups = {group for group in self._groups if _has_children(group)}

    def close(self) -> None:
        """Stop adopting processes."""
        self.look()
        if self._adopts:
            self._adopts = False
            _set_subreaper(0)


def _has_children(group: int) -> bool:
    """Whether children of ours are left in a process group; those that have ended are not."""
    try:
        while os.waitid(os.P_PGID, group, os.WEXITED | os.WNOHANG) is not None:
            pass
    except ChildProcessError:
        return False
    return True


def _set_subreaper(on: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(on), 0, 0, 0)
