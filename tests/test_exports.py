"""The public names: a change here is a change users see, and belongs in the changelog."""

import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator

import pytest

EXPORTS = {
    "paceline": [
        "DistributedDataParallel",
        "Group",
        "Join",
        "JoinHook",
        "Joinable",
        "ProcessGroup",
        "ProcessGroupFactory",
        "ReduceOp",
        "Store",
        "SyncBatchNorm",
        "Work",
        "__version__",
        "current_process_group",
        "data",
        "ddp",
        "errors",
        "groups",
        "install",
        "join",
        "metrics",
        "new_group",
        "parallelize",
        "process_group",
        "register_backend",
        "replica_of",
        "uninstall",
    ],
    "paceline.data": ["DistributedSampler"],
    "paceline.ddp": [
        "DistributedDataParallel",
        "Replica",
        "SyncBatchNorm",
        "_BufferCommHookLocation",
        "_MixedPrecision",
        "dump_environment",
        "is_strict",
        "parallelize",
        "replica_of",
        "set_strict",
    ],
    "paceline.join": ["Join", "JoinConfig", "JoinHook", "Joinable"],
    "paceline.metrics": ["gather", "mean", "sum", "weighted_mean"],
    "paceline.groups": [
        "Availability",
        "Call",
        "Capabilities",
        "Engine",
        "FINISHED",
        "Group",
        "ProcessGroup",
        "ProcessGroupFactory",
        "ReduceOp",
        "Store",
        "Traffic",
        "Work",
        "capabilities",
        "current_process_group",
        "new_group",
        "process_group",
        "register_backend",
    ],
    "paceline.testing": [
        "Cue",
        "Meeting",
        "fail_on_cue",
        "hold_on_cue",
        "run_ranks",
        "spawn_ranks",
    ],
}

# Extras and tools: whoever imports the package must not pay for them, or need them.
NOT_IMPORTED = (
    "hypothesis",
    "mpi4py",
    "pandas",
    "paceline.testing",
    "prometheus_client",
    "pytest",
    "rich",
    "scipy",
    "sklearn",
    "tensorboard",
    "typer",
    "wandb",
)


@pytest.mark.parametrize("module", EXPORTS)
def test_the_public_names_are_these(module: str) -> None:
    assert sorted(importlib.import_module(module).__all__) == EXPORTS[module]


@pytest.mark.parametrize("module", EXPORTS)
def test_every_public_name_can_be_had_and_has_a_docstring(module: str) -> None:
    home = importlib.import_module(module)
    assert home.__doc__
    assert [name for name in EXPORTS[module] for name in _undocumented(home, name)] == []


def test_importing_the_package_imports_no_extras() -> None:
    script = f"import sys, paceline; print([m for m in {NOT_IMPORTED} if m in sys.modules])"
    child = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert (child.stdout.strip(), child.stderr) == ("[]", "")


def _undocumented(home: object, name: str) -> Iterator[str]:
    """Yield ``name``, and ``name.method`` for its public methods, where they are ours and bare."""
    thing = getattr(home, name)
    if not _is_ours(thing):
        return
    doc = thing.__doc__ or ""
    if not doc or doc.startswith(f"{name}("):  # dataclasses write the signature themselves
        yield name
    if inspect.isclass(thing):
        methods = (m for m, value in vars(thing).items() if callable(value) or _wraps(value))
        public = (m for m in methods if not m.startswith("_"))
        yield from (f"{name}.{m}" for m in public if not inspect.getdoc(getattr(thing, m)))


def _is_ours(thing: object) -> bool:
    """Tell our classes, functions and modules from torch's, and from plain values."""
    where = getattr(thing, "__module__", None) or getattr(thing, "__name__", "")
    return where.split(".")[0] == "paceline"


def _wraps(value: object) -> bool:
    return isinstance(value, property | classmethod | staticmethod)
