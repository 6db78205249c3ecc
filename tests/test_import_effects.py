"""Importing paceline changes nothing in torch; using it changes what ``uninstall()`` takes back.

All of it happens in fresh interpreters, one for each script: this one has long been told of groups.
"""

import json
import os
import subprocess
import sys
from functools import cache
from typing import Any

import pytest
import torch

from paceline._torch import patches
from paceline.compiled import UNAVAILABLE

# What a process sees of torch: the attributes of its modules, classes and functions, and what is in
# its tables, each by identity. Values are kept, so that an id is not given away twice.
SNAPSHOT = """
import gc, sys, types, warnings
gc.disable()  # each collection would look at all that is kept
warnings.simplefilter("ignore")
KEPT = []

def contents(where, value):
    if isinstance(value, dict):
        for key, held in list(value.items()):
            yield f"{where}[{key!s:.60}]", held
    elif isinstance(value, (list, set, frozenset)):
        for held in list(value):
            yield f"{where} has {held!s:.60}", held if not isinstance(held, str) else None

def described(where, value):
    yield where, value
    if isinstance(value, types.FunctionType):
        for key, held in list(vars(value).items()):
            yield f"{where}:{key}", held
    elif isinstance(value, (dict, list, set, frozenset)) and "__" not in where:
        yield from contents(where, value)

def of_module(module):
    for name, value in list(vars(module).items()):
        where = f"{module.__name__}.{name}"
        yield from described(where, value)
        if isinstance(value, type) and value.__module__.split(".")[0] == "torch":
            for key, held in list(vars(value).items()):
                yield from described(f"{where}.{key}", held)

def snapshot():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "torch" and isinstance(module, types.ModuleType):
            for where, value in of_module(module):
                KEPT.append(value)
                found[where] = id(value)
    return found

def differences(before, after):
    return sorted(k for k in before.keys() | after.keys() if before.get(k) != after.get(k))
"""


@cache
def run(script: str) -> Any:
    """What a script leaves in ``result``."""
    whole = f"{SNAPSHOT}\n{script}\nimport json; print(json.dumps(result)); gc.freeze()"
    env = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # which names the backend sooner
    command = [sys.executable, "-c", whole]
    out = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)
    assert out.returncode == 0, out.stderr
    return json.loads(out.stdout.splitlines()[-1])


# -- importing ------------------------------------------------------------------------------------

IMPORTED = """
import paceline
result = [name for name in sys.modules if name.split(".")[0] == "torch"]
"""
# What torch imports by itself is imported beforehand, so that it is no difference.
IMPORTING = """
import importlib, torch
for name in {modules!r}:
    if name not in sys.modules:
        importlib.import_module(name)
before = snapshot()
import paceline
result = differences(before, snapshot())
"""


def test_importing_paceline_changes_nothing_in_torch_but_the_name_of_its_backend() -> None:
    changed = run(IMPORTING.format(modules=run(IMPORTED)))
    assert "torch.distributed.Backend.PACELINE" in changed
    assert [line for line in changed if ".Backend." not in line] == []
    assert [line for line in changed if "paceline" not in line.lower()] == []


def test_importing_paceline_does_not_import_the_compiler() -> None:
    heavy = ("torch._dynamo", "torch._inductor", "torch._functorch.aot_autograd")
    assert [name for name in run(IMPORTED) if name.startswith(heavy)] == []


# -- using ----------------------------------------------------------------------------------------

USE = """
import paceline, torch, torch._dynamo, torch.distributed as dist
from torch.distributed import HashStore, _functional_collectives

def fake(rank, size):
    return paceline.new_group("fake", store=HashStore(), rank=rank, world_size=size).register()

def through_torch(x, group):
    y = x * 2
    dist.all_reduce(y, group=group)
    dist.broadcast(y, 0, group=group)
    return y if group is group else x

def as_torch_traces_it(x, group):
    y = x * 2
    dist.all_reduce(y, group=group)
    return y

def through_the_group(x, group):
    y = x * 2
    group.all_reduce(y)
    return y * group.size() + group.rank()

def agree(function, group):
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    return torch.equal(compiled(torch.ones(2), group), function(torch.ones(2), group))
"""
UNINSTALLED = f"""{USE}
before = snapshot()
paceline.install()
first = fake(0, 1)
worked = [agree(through_torch, first)]
during = differences(before, snapshot())
paceline.uninstall()
after = differences(before, snapshot())
ours = [
    where for where, value in before.items()
    if (module := sys.modules.get(where.rpartition(".")[0])) is not None
    and str(getattr(vars(module).get(where.rpartition(".")[2]), "__module__", "")).startswith("pac")
]
torch.compiler.reset()
outlived = [agree(through_the_group, first)]
if torch.__version__ >= "2.12":  # Dynamo of 2.11 cannot ask `group or WORLD`, as torch does
    outlived.append(agree(as_torch_traces_it, first))
other = fake(2, 4)
paceline.uninstall()
torch.compiler.reset()
outlived += [agree(through_the_group, first), agree(through_the_group, other)]
again = []
for use in (lambda: fake(0, 1), paceline.install):
    paceline.uninstall()
    again.append(hasattr(dist.broadcast, "_torchdynamo_inline"))
    use()
    again.append(hasattr(dist.broadcast, "_torchdynamo_inline"))
    torch.compiler.reset()
    worked.append(agree(through_torch, first))
result = dict(
    during=during, after=after, ours=ours, worked=worked, outlived=outlived, again=again
)
"""
# The last part of where torch is changed for graphs that hold our groups.
CHANGED = (
    ":_torchdynamo_inline",
    ".traceable_collective_remaps",
    ".CollectiveFunctionRewriteVariable.call_function",
    *([".vt_identity_compare"] if torch.__version__ >= "2.13" else []),  # 2.11 and 2.12 have none
)

needs_types = pytest.mark.skipif(bool(UNAVAILABLE), reason=UNAVAILABLE)


@needs_types
def test_uninstall_takes_back_what_torch_was_changed_by_for_groups_in_graphs() -> None:
    told = run(UNINSTALLED)
    for name in CHANGED:
        assert [where for where in told["during"] if where.endswith(name)], name
        assert [where for where in told["after"] if where.endswith(name)] == []
    assert told["ours"] == []


@needs_types
def test_after_uninstall_the_next_group_or_install_puts_it_back() -> None:
    told = run(UNINSTALLED)
    assert told["again"] == [False, True, False, True]
    assert all(told["worked"])


@needs_types
def test_groups_that_outlive_uninstall_still_work_in_what_is_compiled_then() -> None:
    assert all(run(UNINSTALLED)["outlived"])


# -- how a change is taken back -------------------------------------------------------------------


class Owner:
    kept = 1


def test_a_change_is_taken_back_unless_somebody_else_has_built_upon_it() -> None:
    given_back = []
    patches.put(Owner, "kept", 2)
    patches.put(Owner, "new", 3)
    patches.after_take_back(lambda: given_back.append(Owner.kept))
    assert (Owner.kept, vars(Owner)["new"]) == (2, 3)
    patches.take_back()
    assert (Owner.kept, "new" in vars(Owner), given_back) == (1, False, [1])
    patches.put(Owner, "kept", 2)
    Owner.kept = 4
    patches.take_back()
    assert Owner.kept == 4
