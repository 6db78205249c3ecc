"""The ranks that all tests of this folder share, and what they ran on."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from . import machine
from .crew import Crew

_used: list[str] = []

# Where products must have the same bits each time; ranks read it when they first use a GPU.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_report_header() -> str:
    return str(machine.here())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "crew" in metafunc.fixturenames:
        counts = machine.RANKS if torch.cuda.is_available() else machine.RANKS[:1]
        ids = [f"{count}-ranks" for count in counts]
        metafunc.parametrize("crew", counts, ids=ids, indirect=True, scope="package")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On the CPU one variant of each test tells that it is right; `make slow` runs the others."""
    seen: set[tuple[str, str]] = set()
    for item in items:
        if torch.cuda.is_available() or "crew" not in getattr(item, "fixturenames", ()):
            continue
        key = (str(item.path), item.originalname)  # type: ignore[attr-defined]
        if key in seen:
            item.add_marker(pytest.mark.slow)
        seen.add(key)


@pytest.fixture(scope="package")
def crew(request: pytest.FixtureRequest) -> Iterator[Crew]:
    """Ranks that run tests; they are started by the first, and again after one that fails."""
    crew = Crew(machine.here(), request.param)
    yield crew
    crew.close()
    _used.append(f"{crew.size} ranks over {crew.machine.backend}: started {crew.starts} x")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _used:
        terminalreporter.write_line(f"{machine.here()} ({'; '.join(_used)})")
