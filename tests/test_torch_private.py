"""What is private of torch is used in ``_torch/`` alone, where each name says what it is for.

A name is torch's and private when it begins with an underscore and

- is imported from torch, or is a part of the name of a module of torch's that is imported;
- is an attribute of a module or class of torch's (``torch._C``, ``nn.Module._apply``);
- is an attribute of anything, and nobody in the package defines it, or torch's own classes
  (``OWNERS``) have one of that name: then ``x._name`` is taken for theirs, unless ``x`` is ``self``
  or ``cls``, since ours may define what torch calls.

Strings given to ``getattr`` and the like count, too. Names that torch calls on *our* objects are no
use of anything private: to define them is what being torch's ProcessGroup or Module means.
"""

import ast
import builtins
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import torch
from torch import nn
from torch.distributed import ProcessGroup, Work
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.library import Library

FOLDER = "_torch/"
READERS = frozenset({"getattr", "setattr", "hasattr", "delattr", "attrgetter", "methodcaller"})
# By file and name, each with its reason.
ALLOWED: Mapping[tuple[str, str], str] = {
    ("join/protocol.py", "_join_config"): "torch's Joinable tells its state to Join there",
    ("hooks/optimizer_overlap.py", "_register_fused_optim"): "torch's door for such optimizers",
    ("ddp/mixed_precision.py", "_replace"): "of named tuples",
    ("ddp/mixed_precision.py", "_fields"): "of named tuples",
    ("compiled/module_hooks.py", "_fields"): "of named tuples",
    ("ddp/replicate.py", "_reconstructor"): "of copyreg",
    ("integrations/lightning.py", "_ddp_kwargs"): "of Lightning's strategy, whose subclass it is",
    ("integrations/lightning.py", "_determine_ddp_device_ids"): "of Lightning's strategy",
    ("integrations/lightning_trainer.py", "_ddp_kwargs"): "of Lightning's strategy",
}


def owners() -> list[object]:
    """Objects of torch's that the package has to do with; what they have in private is torch's."""
    parameter = nn.Parameter(torch.zeros(1))
    return [
        parameter,
        nn.BatchNorm1d(1),
        nn.LSTM(1, 1),
        torch.optim.SGD([parameter]),
        torch.amp.GradScaler("cpu"),
        torch.ops.aten.add.Tensor,
        ProcessGroup,
        Work,
        LocalElasticAgent,
        Library,
        torch.Generator,
        torch.fx.Graph,
        torch.autograd.Variable,
        torch.autograd.profiler.record_function,
    ]


@cache
def torchs() -> frozenset[str]:
    """Private names of what :func:`owners` lists."""
    return frozenset(name for owner in owners() for name in dir(owner) if _is_private(name))


def trespasses(sources: Mapping[str, str]) -> list[str]:
    """Say where ``sources``, by path below ``src/paceline``, use what is private of torch."""
    trees = {path: ast.parse(text, path) for path, text in sources.items()}
    ours = {name for tree in trees.values() for name in _defined(tree)}
    found = []
    for path, tree in sorted(trees.items()):
        if not path.startswith(FOLDER):
            uses = sorted({*_imports(tree), *_reads(tree, ours)})
            found += [
                f"{path}:{line}: {shown}"
                for line, shown, name in uses
                if (path, name) not in ALLOWED
            ]
    return found


def _imports(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _is_torchs(alias.name) and any(map(_is_private, alias.name.split("."))):
                    yield node.lineno, f"import {alias.name}", alias.name
        elif isinstance(node, ast.ImportFrom) and not node.level and _is_torchs(node.module or ""):
            for alias in node.names:
                if any(map(_is_private, [*(node.module or "").split("."), alias.name])):
                    yield node.lineno, f"from {node.module} import {alias.name}", alias.name


def _reads(tree: ast.AST, ours: set[str]) -> Iterator[tuple[int, str, str]]:
    known = dict(_names_of_torch(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            if _is_pythons(node):
                continue
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            foreign = node.attr in torchs() and not own
            if foreign or node.attr not in ours or _root(node) in known:
                yield node.lineno, ast.unparse(node), node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in READERS:
            strings = [a.value for a in node.args if isinstance(a, ast.Constant)]
            for name in filter(_is_private, strings):
                if name in torchs() or name not in ours:
                    yield node.lineno, ast.unparse(node), str(name)


def _is_pythons(node: ast.Attribute) -> bool:
    """Whether it is private of a module of Python's, such as ``sys._getframe``."""
    return isinstance(node.value, ast.Name) and node.value.id in sys.stdlib_module_names


def _names_of_torch(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Names in a file that mean a module, class or function of torch's."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _is_torchs(alias.name):
                    yield alias.asname or alias.name.split(".")[0], alias.name
        elif isinstance(node, ast.ImportFrom) and not node.level and _is_torchs(node.module or ""):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _defined(tree: ast.AST) -> Iterator[str]:
    """Private names that a file gives to its classes, functions, or to any object."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    for node in ast.walk(tree):
        if isinstance(node, kinds):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def _is_torchs(module: str) -> bool:
    return module.split(".")[0] in ("torch", "functorch")


def _is_private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__")


# The package.


def test_what_is_private_of_torch_is_used_in_one_folder_alone() -> None:
    assert trespasses(_package()) == []


def test_every_exception_is_still_needed() -> None:
    everything = {
        (path, name)
        for path in {path for path, _ in ALLOWED} & _package().keys()
        for name in _private_words(ast.parse(_package()[path]))
    }
    assert [key for key in ALLOWED if key not in everything] == []


def test_every_name_of_the_folder_says_what_it_is_for() -> None:
    silent = []
    for path, text in _package().items():
        if path.startswith(FOLDER) and path != f"{FOLDER}foreach.py":  # its own text says it of all
            silent += [f"{path}:{name}" for name in _undescribed(ast.parse(text))]
    assert silent == []


@cache
def _package() -> dict[str, str]:
    package = Path(__file__).parents[1] / "src" / "paceline"
    found = {p.relative_to(package).as_posix(): p.read_text("utf-8") for p in package.rglob("*.py")}
    assert found
    return found


def _private_words(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _undescribed(tree: ast.Module) -> Iterator[str]:
    """Public names without a docstring; one of a value stands below it."""
    for node, following in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            if not node.name.startswith("_") and ast.get_docstring(node) is None:
                yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [t.id for t in targets if isinstance(t, ast.Name)]
            says = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            # A constant of ours is no name of torch's.
            if not says and not isinstance(node.value, ast.Constant):
                yield from (n for n in names if not n.startswith("_") and n not in dir(builtins))


# The checker.


def test_imports_of_what_is_private_are_found() -> None:
    source = (
        "import torch._dynamo\n"
        "from torch._C import _distributed_c10d as c10d\n"
        "from torch._inductor.exc import InvalidCxxCompiler\n"
        "from torch.distributed.utils import _to_kwargs\n"
        "def later():\n"
        "    from torch.utils import _pytree\n"
    )
    assert trespasses({"ddp/a.py": source}) == [
        "ddp/a.py:1: import torch._dynamo",
        "ddp/a.py:2: from torch._C import _distributed_c10d",
        "ddp/a.py:3: from torch._inductor.exc import InvalidCxxCompiler",
        "ddp/a.py:4: from torch.distributed.utils import _to_kwargs",
        "ddp/a.py:6: from torch.utils import _pytree",
    ]


def test_private_attributes_of_torchs_modules_and_classes_are_found() -> None:
    source = (
        "import torch\nfrom torch.nn import parallel\n"
        "torch._foreach_add_([], 1)\n"
        "torch._C._current_graph_task_id()\n"
        "parallel.DistributedDataParallel._active_ddp_module = 1\n"
    )
    assert trespasses({"a.py": source}) == [
        "a.py:3: torch._foreach_add_",
        "a.py:4: torch._C",
        "a.py:4: torch._C._current_graph_task_id",
        "a.py:5: parallel.DistributedDataParallel._active_ddp_module",
    ]


def test_private_attributes_of_torchs_objects_are_found_by_their_names() -> None:
    source = (
        "grad._version\nmodule._forward_hooks\nwork._source_rank()\nprocess._stdout\n"
        "getattr(param, '_post_accumulate_grad_hooks', None)\nself.inner._get_backend(device)\n"
        "class Own:\n    def __init__(self):\n        self._version = 1\n        super()._apply\n"
    )
    assert [line.partition(" ")[2] for line in trespasses({"a.py": source})] == [
        "grad._version",
        "module._forward_hooks",
        "work._source_rank",
        "process._stdout",
        "getattr(param, '_post_accumulate_grad_hooks', None)",
        "self.inner._get_backend",
        "super()._apply",
    ]


def test_what_is_public_or_ours_or_pythons_passes() -> None:
    source = (
        "import sys, torch\nfrom torch.distributed import distributed_c10d\nfrom . import _shown\n"
        "sys._getframe()\ntorch.__version__\ndistributed_c10d.AllgatherOptions()\n"
        "class Own:\n    _parameters = {}\n    def use(self):\n        self._parameters\n"
        "        self._held = 1\ndef help(own):\n    return own._held\n"
    )
    assert trespasses({"a.py": source}) == []
    assert trespasses({"_torch/a.py": "import torch._C\ntensor._version\n"}) == []
