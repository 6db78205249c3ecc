"""``paceline doctor``: what is here, what will be picked, whether it works, what to change."""

from .command import doctor

__all__ = ["doctor"]
