"""For all tests: long files come first, and what cannot work here is skipped.

Files are shared out among workers whole, so a long one must not be the last. Where the C library
was not built, tests that need it are skipped, and say why.
"""

from __future__ import annotations

import gc
import signal
from collections.abc import Generator, Iterator

import pytest
import torch
import torch._dynamo  # the first forward of a wrapper would, within a test's deadline
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from paceline.testing import run_ranks, spawn_ranks

from .marks import SHM
from .pinned import pin_all_ranks

LONG = (
    "test_examples.py",
    "test_table.py",
    "test_demo.py",
    "test_step_processes.py",
    "test_exact.py",
    "test_zero_state.py",
    "test_verdicts.py",
    "test_run.py",
)
# On a busy machine an example, or making one up, takes as long as it takes. The same examples every
# time: what passed once passes again. `make search` tries others.
PATIENT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("same", derandomize=True, **PATIENT)
settings.register_profile("search", **PATIENT)
settings.load_profile("same")
TOLD = tuple(f"the {name} backend cannot be used here" for name in ("shm", "hybrid"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pinned", action="store_true", help="run ranks on unequal cores")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a job that a shell runs behind it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for start in (run_ranks, spawn_ranks):
        start.__kwdefaults__["deadline"] = 600.0  # it is for what hangs: a busy machine is slow
    torch.set_num_threads(1)  # two workers on two cores; and ranks that are threads have as many
    if config.getoption("--hypothesis-profile") != "search":
        _draw_from_no_modules()
    if config.getoption("--pinned"):
        pin_all_ranks()


def _draw_from_no_modules() -> None:
    """Hypothesis also draws constants of modules that are imported, which depends on the order."""
    if hasattr(providers, "_get_local_constants"):
        providers._get_local_constants = providers.Constants


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


def pytest_collection_finish() -> None:
    """What was imported and collected stays; else each collection in a test looks at all of it."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, None, None]:
    torch.manual_seed(0)  # what a test draws without choosing is the same every time, too
    return (yield from _skipping_where_shm_is_missing())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    return (yield from _skipping_where_shm_is_missing())


def _skipping_where_shm_is_missing() -> Generator[None, None, None]:
    try:
        return (yield)
    except Exception as error:
        if not SHM.available and any(told in text for told in TOLD for text in _texts(error)):
            pytest.skip(SHM.reason)
        raise


def _texts(error: BaseException | None) -> Iterator[str]:
    while error is not None:
        yield str(error)
        error = error.__cause__ or error.__context__
