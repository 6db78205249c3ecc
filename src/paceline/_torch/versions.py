"""Which versions of torch paceline works with, and what happens with others.

Older than :data:`OLDEST`: an error at import. Newer than :data:`NEWEST`: one warning, in the first
rank alone, when a job makes its first group; and where paceline does not even import, an error that
names the version before the name that torch no longer has.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Generator

import torch

from ..errors import UnsupportedTorchError

OLDEST, NEWEST = (2, 11), (2, 15)  # as in pyproject.toml
_told = False


def release_of(text: str) -> tuple[int, ...]:
    """Major and minor number.

    >>> release_of("2.13.0+cpu")
    (2, 13)
    """
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


def is_tested(text: str) -> bool:
    """Whether paceline has been tested with this version."""
    return OLDEST <= release_of(text) <= NEWEST


def shown(version: tuple[int, ...]) -> str:
    """A version as people write it."""
    return ".".join(map(str, version))


def refuse_older() -> None:
    """Raise unless torch is at least as new as paceline needs it."""
    if release_of(torch.__version__) < OLDEST:
        raise UnsupportedTorchError(str(torch.__version__), shown(OLDEST), shown(NEWEST))


@contextlib.contextmanager
def blaming_untested() -> Generator[None, None, None]:
    """Add to an import error that this torch is newer than the versions tested."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        if release_of(torch.__version__) <= NEWEST:
            raise
        cause = f"{type(error).__name__}: {error}"
        found = str(torch.__version__)
        raise UnsupportedTorchError(found, shown(OLDEST), shown(NEWEST), cause) from error


IS_NEWER = release_of(torch.__version__) > NEWEST
"""Whether this torch is newer than any that paceline has been tested with."""


def warn_of_newer(rank: int) -> None:
    """Warn of an untested torch, once; ``rank`` is this process's in the job, and 0 warns."""
    global _told
    if rank or _told:
        return
    _told = True
    tested = f"{shown(OLDEST)} to {shown(NEWEST)}"
    warnings.warn(
        f"paceline was tested with torch {tested}, and this is {torch.__version__}: it may "
        "fail, or not support new features. Look for a newer paceline.",
        stacklevel=2,
    )
