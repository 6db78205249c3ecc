"""Gradients in, averages out. ``reducer.py`` begins with how a backward pass goes."""

from .account import Agreed, Done, settle
from .bucket import Bucket
from .grad_bucket import GradBucket
from .handed import Handed
from .listeners import listen
from .observers import Observers
from .passes import Pass
from .plan import Assignment, Spec, assign
from .reducer import Reducer
from .repeated import RepeatedExchange, is_usual, obstacle_to_replays
from .sent_terms import SentTerms
from .step_sums import StepSums
from .steps import look_before_steps, steps
from .stretches import ScatteredGradients, Stretch
from .sum_places import Summed
from .summary import ReducerSummary
from .tensors import local
from .weights import Ledger

__all__ = [
    "Agreed",
    "Assignment",
    "Bucket",
    "Done",
    "GradBucket",
    "Handed",
    "Ledger",
    "Observers",
    "Pass",
    "Reducer",
    "ReducerSummary",
    "RepeatedExchange",
    "ScatteredGradients",
    "SentTerms",
    "Spec",
    "StepSums",
    "Stretch",
    "Summed",
    "assign",
    "is_usual",
    "listen",
    "local",
    "look_before_steps",
    "obstacle_to_replays",
    "settle",
    "steps",
]
