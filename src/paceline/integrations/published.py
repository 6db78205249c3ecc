"""Which of the packages that Lightning is published as is meant."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from ..errors import IntegrationMissingError


def strategies_of(asking: str, *packages: str) -> Any:
    """The module ``strategies`` of the package that is imported, else of the first there is.

    ``lightning.pytorch`` and ``pytorch_lightning`` hold the same code twice, and the Trainer of one
    does not take a strategy of the other. Whoever installs ``lightning`` has both.
    """
    for name in sorted(packages, key=lambda package: package not in sys.modules):
        try:
            return importlib.import_module(f"{name}.strategies")
        except ModuleNotFoundError as error:
            missing = error
    raise IntegrationMissingError(asking, "lightning", "lightning") from missing
