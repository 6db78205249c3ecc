"""Errors of integrations with other libraries."""

from __future__ import annotations

from dataclasses import dataclass

from .base import PacelineError


@dataclass(eq=False)
class IntegrationMissingError(PacelineError, ImportError):
    """A library that an integration needs is not installed."""

    module: str
    library: str
    extra: str

    def __post_init__(self) -> None:
        self.name, self.path, self.msg = self.library, None, str(self)

    def __str__(self) -> str:
        return (
            f"{self.module} needs {self.library}, which is not installed. "
            f"Install it with: pip install 'paceline[{self.extra}]'"
        )
