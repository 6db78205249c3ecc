"""Why ranks failed, in one line for the terminal."""

from __future__ import annotations

from ..errors import RanksFailedError


def reason_of(error: RanksFailedError) -> str:
    """Why the first rank failed, in one line: its error, or the last words it left."""
    if error.__cause__ is None:
        return last_line(error.failures[0][1])
    text = " ".join(str(error.__cause__).split())
    return f"{type(error.__cause__).__name__}: {text}"


def last_line(traceback: str) -> str:
    """What went wrong, of a traceback or of a rank's last words."""
    lines = [line for line in traceback.strip().splitlines() if line.strip()]
    for line in reversed(lines):
        if not line[0].isspace() and not line.startswith(("File ", "Current thread", "Thread ")):
            return line.strip()
    return lines[0] if lines else "no reason given"
