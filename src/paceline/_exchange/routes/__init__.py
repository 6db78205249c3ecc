"""How an encoded bucket is averaged over ranks; ``route.py`` has what all routes share."""

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
