"""``paceline demo``: trains a small model on all cores, and shows how that goes."""

from .command import demo

__all__ = ["demo"]
