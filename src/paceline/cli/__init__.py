"""The command line: ``paceline run | demo | doctor | report | native | bench``.

Each command is one file or folder with one function of the same name, imported when it is asked
for.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code; ``arguments`` default to the process's own."""
    from .app import answer

    return answer(arguments)
