"""No file uses what another file of ours calls private: neither an attribute nor a name to import.

``thing._name`` belongs to the class that has it, and to the file of that class. Who else needs what
is behind it is offered a door: a name without an underscore, with a docstring. The check knows no
types, so it goes by names: a private attribute that some file of ours defines may be used by such
files alone. Names that nobody here defines are torch's or Python's, and another test's matter.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

# torch's own names: ours have them because torch, or code written for it, reads or writes them.
TORCHS = frozenset(
    {
        "_AllreduceUpcastHookState",
        "_BufferCommHook",
        "_BufferCommHookLocation",
        "_MixedPrecision",
        "_OptimizerHookState",
        "_OverlapInfo",
        "_OverlapStatus",
        "_as_overlapped_optim",
        "_hook_then_optimizer",
        "_reducer_allreduce_and_upcast_hook",
        "_register_fused_optim",
    }
)
READERS = frozenset({"getattr", "setattr", "hasattr", "delattr"})


def trespasses(sources: Mapping[str, str], allowed: frozenset[str] = TORCHS) -> list[str]:
    """Say where ``sources``, by path below ``src/paceline``, use a private name of another file."""
    return [text for name, text in _trespasses(sources) if name not in allowed]


def _trespasses(sources: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    trees = {path: ast.parse(text, path) for path, text in sources.items()}
    owners: dict[str, set[str]] = {}
    for path, tree in trees.items():
        for name in _defined(tree):
            owners.setdefault(name, set()).add(path)
    # A private name of a file or folder may be used by others.
    modules = {part for path in sources for part in Path(path).with_suffix("").parts}
    for path, tree in sorted(trees.items()):
        if path.startswith("_torch/"):
            continue
        for line, shown, name in sorted(_used(tree)):
            others = owners.get(name, set())
            if others and path not in others:
                yield name, f"{path}:{line}: {shown} is private to {', '.join(sorted(others))}"
        for line, name in _imported(tree):
            if name not in modules:
                yield name, f"{path}:{line}: {name} is private to the file it is imported from"


def _imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Private names that are imported from files of ours."""
    for node in ast.walk(tree):
        ours = isinstance(node, ast.ImportFrom) and (
            node.level or (node.module or "").split(".")[0] == "paceline"
        )
        if isinstance(node, ast.ImportFrom) and ours:
            yield from ((node.lineno, a.name) for a in node.names if _is_private(a.name))


def _is_private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__")


def _is_own(value: ast.expr) -> bool:
    """Whether it is ``self``, ``cls`` or ``super()``."""
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id == "super"
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def _defined(tree: ast.AST) -> Iterator[str]:
    """Private names of methods and fields of a file's classes, and what it gives to ``self``."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ClassDef):
            names = [*_fields(node), *_methods(node)]
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names = [node.attr] if _is_own(node.value) else []
        yield from filter(_is_private, names)


def _methods(node: ast.ClassDef) -> Iterator[str]:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    yield from (inner.name for inner in node.body if isinstance(inner, kinds))


def _fields(node: ast.ClassDef) -> Iterator[str]:
    for inner in node.body:
        targets = inner.targets if isinstance(inner, ast.Assign) else [getattr(inner, "target", 0)]
        for target in targets:
            if isinstance(target, ast.Name):
                yield target.id
                if target.id == "__slots__":
                    yield from (n.value for n in ast.walk(inner) if isinstance(n, ast.Constant))


def _used(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Private attributes of others: line, what is written there, name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if _is_private(node.attr) and not _is_own(node.value):
                yield node.lineno, ast.unparse(node), node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id not in READERS or len(node.args) < 2 or _is_own(node.args[0]):
                continue
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            if _is_private(name):
                yield node.lineno, ast.unparse(node), str(name)


# The package.


@pytest.fixture(scope="module")
def used() -> list[tuple[str, str]]:
    """What the package uses of another file's private names: the name, and where."""
    root = Path(__file__).parents[1] / "src" / "paceline"
    sources = {
        path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
        for path in root.rglob("*.py")
    }
    assert sources
    return list(_trespasses(sources))


def test_no_file_uses_a_private_attribute_of_another_one(used: list[tuple[str, str]]) -> None:
    assert [text for name, text in used if name not in TORCHS] == []


def test_each_of_torchs_names_is_listed_because_somebody_uses_it(
    used: list[tuple[str, str]],
) -> None:
    assert TORCHS - {name for name, _ in used} == frozenset()


# The checker.

OWNER = """
class Owner:
    _limit: int = 3
    __slots__ = ("_kept",)
    def __init__(self):
        self._held = 1
    def _act(self): ...
"""


def test_reading_setting_and_calling_a_private_attribute_of_another_file_are_found() -> None:
    user = "owner._held\nowner._limit = 4\nowner._act()\nowner._kept\n"
    assert trespasses({"a/owner.py": OWNER, "a/user.py": user}) == [
        "a/user.py:1: owner._held is private to a/owner.py",
        "a/user.py:2: owner._limit is private to a/owner.py",
        "a/user.py:3: owner._act is private to a/owner.py",
        "a/user.py:4: owner._kept is private to a/owner.py",
    ]


def test_a_name_in_a_string_counts_too() -> None:
    user = "getattr(owner, '_held', None)\nsetattr(owner, '_held', 2)\n"
    assert trespasses({"owner.py": OWNER, "user.py": user}) == [
        "user.py:1: getattr(owner, '_held', None) is private to owner.py",
        "user.py:2: setattr(owner, '_held', 2) is private to owner.py",
    ]


def test_a_long_way_to_a_private_attribute_is_found() -> None:
    user = "class User:\n    def use(self):\n        return self.owners[0].first._held\n"
    assert trespasses({"owner.py": OWNER, "user.py": user}) == [
        "user.py:3: self.owners[0].first._held is private to owner.py"
    ]


def test_an_import_of_a_private_name_is_found_and_that_of_a_private_folder_is_not() -> None:
    user = "from .owner import Owner, _help\nfrom .. import _transport\nfrom torch import _C\n"
    assert trespasses({"a/user.py": user, "_transport/__init__.py": ""}) == [
        "a/user.py:1: _help is private to the file it is imported from"
    ]


def test_what_is_ones_own_or_ones_parents_passes() -> None:
    user = "class User(Owner):\n    def use(self):\n        self._held\n        super()._act()\n"
    assert trespasses({"owner.py": OWNER, "user.py": user}) == []
    assert trespasses({"owner.py": OWNER + "\ndef help(owner):\n    return owner._held\n"}) == []


def test_names_that_nobody_here_defines_are_no_matter_of_this_check() -> None:
    user = "import torch\ntorch._foreach_add_([], 1)\ntensor._version\nmodule._join_config\n"
    assert trespasses({"owner.py": OWNER, "user.py": user, "_torch/x.py": "owner._held"}) == []
