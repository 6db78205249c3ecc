"""How the commands speak: errors in one red line, notes in one plain line, both on stderr.

What they tell may hold text from elsewhere, such as a rank's error or the name of a file; a
terminal obeys nothing in it. What ranks print themselves is theirs and is passed on as it is.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn, TextIO

import typer

from .._shown import shown_lines

RED = "31"


def fail(message: str, code: int = 2) -> NoReturn:
    """Print ``paceline: message`` in red on stderr and end the command with ``code``."""
    complain(message)
    raise typer.Exit(code)


def complain(message: str) -> None:
    """Print ``paceline: message`` in red on stderr and go on."""
    line = f"paceline: {shown_lines(message)}"
    print(paint(line, RED, sys.stderr), file=sys.stderr, flush=True)


def note(message: str) -> None:
    """Print ``paceline: message`` on stderr; what scripts write to stdout stays theirs."""
    print(f"paceline: {shown_lines(message)}", file=sys.stderr, flush=True)


def paint(text: str, colour: str, stream: TextIO) -> str:
    """``text`` in an ANSI ``colour``, where ``stream`` shows colours."""
    return f"\x1b[{colour}m{text}\x1b[0m" if shows_colours(stream) else text


def shows_colours(stream: TextIO) -> bool:
    """Whether ``stream`` is a terminal whose user has not asked for plain text."""
    return stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
