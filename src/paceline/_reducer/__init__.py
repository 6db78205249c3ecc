"""Gradients in, averages out. ``reducer.py`` begins with how a backward pass goes."""

from .bucket import Bucket, GradBucket
from .plan import Assignment, Spec, assign
from .reducer import Pass, Reducer
from .tensors import local
from .weights import Ledger

__all__ = [
    "Assignment",
    "Bucket",
    "GradBucket",
    "Ledger",
    "Pass",
    "Reducer",
    "Spec",
    "assign",
    "local",
]
