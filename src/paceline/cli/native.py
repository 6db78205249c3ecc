"""``paceline native``: builds the optional C++ part for this torch and this Python."""

from __future__ import annotations

from typing import Annotated

import typer

from . import say


def native(
    remove: Annotated[bool, typer.Option("--remove", help="Remove it again.")] = False,
) -> None:
    """Build an optional C++ part, for models with hundreds of small parameters.

    It reads, copies and sets `.grad` of all parameters of a bucket in one call. Results are the
    same bits with and without it. It needs a C++ compiler and ninja, takes up to a minute, and is
    kept in ~/.cache/paceline for the installed torch and Python: build it again after an update.
    PACELINE_NATIVE=0 turns it off.
    """
    if remove:
        _remove()
    else:
        _build()


def _build() -> None:
    from .._torch import sweep_build

    try:
        path = sweep_build.build()
    except (RuntimeError, OSError, ImportError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        say.fail(
            f"the C++ part cannot be built: {reason}. Everything works without it. "
            "To build it, install a C++ compiler and ninja (pip install ninja)."
        )
    print(f"Built {path}; programs that start from now on use it.")


def _remove() -> None:
    from .._torch import sweep

    path = sweep.library()
    if path.exists():
        path.unlink()
        path.parent.rmdir()
        print(f"Removed {path}; programs that start from now on go without it.")
    else:
        print("Nothing is built for this torch and this Python.")
