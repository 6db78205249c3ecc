"""ZeRO stage 1: every rank keeps the optimizer state of its part; ``optimizer.py`` is the class."""

from .optimizer import ZeroRedundancyOptimizer

__all__ = ["ZeroRedundancyOptimizer"]
