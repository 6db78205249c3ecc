"""The ways of an encoded bucket to its mean over ranks; ``route.py`` says what they share."""

from .factored import FactorRoute
from .route import Route, RouteSetting
from .rows import GatherRoute, RowPacker, TwoStageRoute, row_route

__all__ = [
    "FactorRoute",
    "GatherRoute",
    "Route",
    "RouteSetting",
    "RowPacker",
    "TwoStageRoute",
    "row_route",
]
