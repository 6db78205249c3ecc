"""Ranks train alone for some steps, then exchange; ``rounds.py`` says how."""

from .diloco import DiLoCo
from .local_sgd import LocalSGD

__all__ = ["DiLoCo", "LocalSGD"]
