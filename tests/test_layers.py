"""Imports point one way, and other folders use only a folder's door.

A *layer* is a folder or a top-level module of ``src/paceline``. ``LAYERS`` says what each may
import of ours; standard library and third-party imports are free, except where ``STDLIB_ONLY``
says otherwise. Imports inside functions and under ``TYPE_CHECKING`` count like any other.
"""

import ast
import sys
from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path
from types import MappingProxyType

ROOT = "__init__"  # paceline itself: the public names

# Any layer may import these; they import nothing of ours, or what STDLIB_ONLY has.
GROUND = frozenset({"errors", "_shown", "_torch", "recorder.events"})
STDLIB_ONLY = frozenset({"errors", "_shown"})
FILES_ARE_DOORS = frozenset({"_torch"})  # a file is an area of torch; nobody needs all of them

# What the user sees.
PUBLIC = frozenset(
    {"compiled", "data", "ddp", "elastic", "groups", "hooks", "install", "join"}
    | {"integrations", "metrics", "optim", "policies", "recorder", "testing"}
)

# Top to bottom, as a gradient travels. GROUND need not be repeated in a row.
LAYERS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "__main__": frozenset({"cli"}),
        "cli": PUBLIC
        | {ROOT, "_doors", "_etcd", "_members"},  # of _members: what agents say to the keeper
        ROOT: PUBLIC - {"integrations"},  # they import what not everybody has
        "integrations": PUBLIC - {"integrations"} | {ROOT},
        "install": frozenset({"compiled", "ddp", "groups", "hooks", "join", "optim", "policies"}),
        "compiled": frozenset({"_reducer", "data", "ddp", "groups", "policies"}),
        # Of _transport it has objects without pickle.
        "elastic": frozenset({"_members", "_transport", "data", "ddp", "groups"}),
        "ddp": frozenset({"_reducer", "data", "groups", "hooks", "join", "policies"}),
        "hooks": frozenset({"_exchange", "_reducer", "groups", "policies"}),  # of _reducer: Bucket
        # Its hook is given; of _transport it has loops over floats that torch lacks.
        "_reducer": frozenset({"_exchange", "_transport", "groups", "policies"}),
        "optim": frozenset({"_exchange", "groups", "join", "policies"}),
        "_exchange": frozenset({"groups", "policies"}),
        "join": frozenset({"groups", "policies"}),  # ddp and optim are Joinable, so they import it
        "data": frozenset({"groups", "policies"}),
        "metrics": frozenset({"groups", "policies"}),
        "testing": frozenset({"_transport", "groups", "recorder"}),
        "groups": frozenset({"_transport"}),
        "_members": frozenset({"_doors", "_etcd"}),
        "_doors": frozenset(),
        "_etcd": frozenset(),
        "_transport": frozenset(),
        "policies": frozenset(),
        # Not groups: whoever writes an event runs recorder/__init__.py first.
        "recorder": frozenset({"_doors"}),
        "recorder.events": frozenset(),
        "_torch": frozenset({"errors"}),  # versions.py: a torch that is too old
        "errors": frozenset(),
        "_shown": frozenset(),
    }
)


def violations(sources: Mapping[str, str]) -> list[str]:
    """Say which imports in ``sources`` break the table, one sentence each.

    ``sources`` maps a path below ``src/paceline``, such as ``groups/group.py``, to its text.
    """
    modules = {_module(path) for path in sources}
    doors = {_module(p): _exports(text) for p, text in sources.items() if _is_door(p)}
    found = []
    for path, text in sorted(sources.items()):
        layer = _layer(_module(path))
        if layer not in LAYERS:
            found.append(
                f"{path}: {layer!r} is a new layer; add it to LAYERS in tests/test_layers.py "
                "with what it may import"
            )
            continue
        for line, package, name in _imports(path, text):
            target = _target(package, name, modules, doors)
            complaint = _complaint(layer, target)
            if complaint:
                found.append(f"{path}:{line}: {complaint}")
    return found


def _complaint(layer: str, target: tuple[str, ...]) -> str:
    """Say what is wrong when ``layer`` imports the module ``target``; empty if nothing is."""
    if target[0] != "paceline":
        if layer in STDLIB_ONLY and target[0] not in sys.stdlib_module_names:
            return f"{layer} imports the standard library only, not {target[0]}"
        return ""
    goal = _layer(target)
    if goal == layer:
        return ""
    allowed = LAYERS[layer] if layer in GROUND else LAYERS[layer] | GROUND
    if goal not in allowed:
        shown = "paceline itself" if goal == ROOT else goal
        return f"{layer} may not import {shown}"
    door = goal.split(".")
    if len(target) > 1 + len(door) and goal not in FILES_ARE_DOORS:
        return f"use the door, paceline.{goal}, not {'.'.join(target)}"
    return ""


def _imports(path: str, text: str) -> Iterator[tuple[int, tuple[str, ...], str]]:
    """Yield line, absolute package and imported name (empty for ``import package``)."""
    here = _module(path) if _is_door(path) else _module(path)[:-1]
    for node in ast.walk(ast.parse(text, path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, tuple(alias.name.split(".")), ""
        elif isinstance(node, ast.ImportFrom):
            above = here[: len(here) + 1 - node.level] if node.level else ()
            package = above + tuple((node.module or "").split(".") if node.module else ())
            for alias in node.names:
                yield node.lineno, package, alias.name


def _target(
    package: tuple[str, ...],
    name: str,
    modules: set[tuple[str, ...]],
    doors: Mapping[tuple[str, ...], frozenset[str]],
) -> tuple[str, ...]:
    """Name the module an import reaches: ``name`` may be a module or a name in ``package``."""
    inner = (*package, name)
    if ".".join(inner[1:]) in LAYERS:
        return inner
    if inner in modules and name not in doors.get(package, frozenset()):
        return inner
    return package


def _module(path: str) -> tuple[str, ...]:
    parts = ("paceline", *Path(path).with_suffix("").parts)
    return parts[:-1] if _is_door(path) else parts


def _layer(module: tuple[str, ...]) -> str:
    pair = ".".join(module[1:3])
    return pair if pair in LAYERS else module[1] if len(module) > 1 else ROOT


def _is_door(path: str) -> bool:
    return Path(path).name == "__init__.py"


def _exports(text: str) -> frozenset[str]:
    """Read ``__all__`` where it is a plain list of names."""
    for node in ast.parse(text).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(t, ast.Name) and t.id == "__all__" for t in targets):
            strings = (n.value for n in ast.walk(node) if isinstance(n, ast.Constant))
            return frozenset(s for s in strings if isinstance(s, str))
    return frozenset()


# The package.


def test_the_package_keeps_to_the_table() -> None:
    package = Path(__file__).parents[1] / "src" / "paceline"
    sources = {
        path.relative_to(package).as_posix(): path.read_text(encoding="utf-8")
        for path in package.rglob("*.py")
    }
    assert sources
    assert violations(sources) == []


def test_the_table_has_no_cycle_and_names_only_its_own_rows() -> None:
    TopologicalSorter(LAYERS).prepare()
    assert frozenset().union(*LAYERS.values()) <= LAYERS.keys()
    assert LAYERS.keys() >= GROUND
    assert all(LAYERS[layer] <= STDLIB_ONLY for layer in GROUND)


# The checker.


def test_imports_that_point_down_pass() -> None:
    good = {
        "__init__.py": "from paceline import errors, groups\nfrom .ddp import Wrapper\n",
        "ddp/wrapper.py": "import torch\nfrom paceline.groups import Group\nimport paceline.join\n",
        "groups/__init__.py": "from paceline.groups.group import Group\n__all__ = ['Group']\n",
        "groups/group.py": "from ..errors import E\nfrom .. import _transport\n",
        "groups/factory.py": "from . import group\nfrom paceline.groups.group import Work\n",
        "errors.py": "from __future__ import annotations\nimport os.path\n",
        "testing.py": "from paceline._transport import meet\n",
    }
    assert violations(good) == []


def test_an_absolute_import_that_points_up_is_found() -> None:
    assert violations({"groups/group.py": "import os\nfrom paceline.ddp import X\n"}) == [
        "groups/group.py:2: groups may not import ddp"
    ]
    assert violations({"_reducer/reducer.py": "import paceline.hooks as h\n"}) == [
        "_reducer/reducer.py:1: _reducer may not import hooks"
    ]
    assert violations({"_transport/shm.py": "from paceline import groups\n"}) == [
        "_transport/shm.py:1: _transport may not import groups"
    ]


def test_a_relative_import_that_points_up_is_found() -> None:
    bad = {
        "groups/__init__.py": "from ..ddp import X\n",
        "groups/group.py": "from .. import ddp\n",
        "_exchange/codecs/fp8.py": "from ...ddp import X\n",
    }
    assert violations(bad) == [
        "_exchange/codecs/fp8.py:1: _exchange may not import ddp",
        "groups/__init__.py:1: groups may not import ddp",
        "groups/group.py:1: groups may not import ddp",
    ]


def test_imports_inside_functions_and_for_types_count() -> None:
    inside = "def f():\n    from paceline.ddp import X\n"
    for_types = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..ddp import X\n"
    bad = {"groups/a.py": inside, "groups/b.py": for_types}
    assert violations(bad) == [
        "groups/a.py:2: groups may not import ddp",
        "groups/b.py:3: groups may not import ddp",
    ]


def test_only_the_top_may_import_the_package_itself() -> None:
    source = "from paceline import Group\n"
    assert violations({"cli/run.py": source}) == []
    assert violations(
        {"ddp/wrapper.py": source, "optim/zero/optimizer.py": "import paceline\n"}
    ) == [
        "ddp/wrapper.py:1: ddp may not import paceline itself",
        "optim/zero/optimizer.py:1: optim may not import paceline itself",
    ]


def test_reaching_past_a_door_is_found() -> None:
    bad = {
        "ddp/a.py": "from paceline.groups.group import Group\n",
        "ddp/b.py": "import paceline.groups.group\n",
        "ddp/c.py": "from paceline.groups import group\n",
        "ddp/d.py": "from ..groups.group import Group\n",
        "groups/__init__.py": "",
        "groups/group.py": "",
    }
    assert violations(bad) == [
        f"ddp/{name}.py:1: use the door, paceline.groups, not paceline.groups.group"
        for name in "abcd"
    ]


def test_a_name_the_door_exports_may_be_called_like_a_file() -> None:
    sources = {
        "ddp/wrapper.py": "from paceline.hooks import average\n",
        "hooks/__init__.py": "from .average import average\n__all__ = ['average']\n",
        "hooks/average.py": "",
    }
    assert violations(sources) == []


def test_a_layer_that_is_not_in_the_table_is_told_where_to_go() -> None:
    expected = "is a new layer; add it to LAYERS in tests/test_layers.py with what it may import"
    assert violations({"helpers.py": "", "shiny/thing.py": ""}) == [
        f"helpers.py: 'helpers' {expected}",
        f"shiny/thing.py: 'shiny' {expected}",
    ]


def test_errors_import_the_standard_library_only() -> None:
    bad = {"errors.py": "import torch\nfrom paceline.recorder import events\n"}
    assert violations(bad) == [
        "errors.py:1: errors imports the standard library only, not torch",
        "errors.py:2: errors may not import recorder.events",
    ]


def test_every_layer_may_use_each_file_of_private_torch_and_these_import_nothing_of_ours() -> None:
    good = {
        "_torch/autograd.py": "import torch\n",
        "_torch/dynamo.py": "from .autograd import x\n",
        "groups/group.py": "from .._torch.autograd import x\nfrom .._torch import dynamo\n",
    }
    assert violations(good) == []
    assert violations({"_torch/autograd.py": "from ..groups import Group\n"}) == [
        "_torch/autograd.py:1: _torch may not import groups"
    ]


def test_every_layer_may_write_events_and_events_import_nothing_of_ours() -> None:
    good = {
        "_transport/shm.py": "from paceline.recorder.events import note\n",
        "groups/group.py": "from ..recorder import events\n",
        "recorder/verdict.py": "from .events import Event\n",
        "recorder/events.py": "import time\n",
    }
    assert violations(good) == []
    bad = {
        "_transport/shm.py": "from paceline.recorder import verdict\n",
        "recorder/events.py": "from .verdict import V\nfrom ..errors import E\n",
        "recorder/verdict.py": "",
    }
    assert violations(bad) == [
        "_transport/shm.py:1: _transport may not import recorder",
        "recorder/events.py:1: recorder.events may not import recorder",
        "recorder/events.py:2: recorder.events may not import errors",
    ]
