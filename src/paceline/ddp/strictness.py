"""Whether wrappers refuse what torch refuses, where ours could go on."""

from __future__ import annotations

_strict = [False]


def is_strict() -> bool:
    """Return whether new wrappers raise where torch's would."""
    return _strict[0]


def set_strict(value: bool) -> None:
    """Set whether new wrappers raise where torch's would."""
    _strict[0] = value
