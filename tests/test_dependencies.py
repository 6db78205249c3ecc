"""What the package requires is what it imports."""

import ast
import re
import sys
from pathlib import Path

import tomllib

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def name_of(requirement: str) -> str:
    found = re.match(r"[\w-]+", requirement)
    assert found is not None
    return found[0].lower().replace("-", "_")


def imported(*, at_top: bool) -> set[str]:
    """Packages of others that ours imports; ``at_top``: as soon as a file of ours is."""
    found: set[str] = set()
    for path in (ROOT / "src").rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in tree.body if at_top else ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                found.add(node.module.split(".")[0])
    ours = {path.stem for path in (ROOT / "src").iterdir()}
    return found - sys.stdlib_module_names - ours


def test_everything_required_is_imported() -> None:
    required = {name_of(text) for text in PROJECT["dependencies"]}
    assert required - imported(at_top=False) == set()


def test_everything_imported_is_required_or_comes_with_an_extra() -> None:
    required = {name_of(text) for text in PROJECT["dependencies"]}
    optional = {
        name_of(text) for group in PROJECT["optional-dependencies"].values() for text in group
    }
    aliases = {"pytorch_lightning": "lightning", "lightning_fabric": "lightning"}
    aliases |= {"sklearn": "scikit_learn", "functorch": "torch"}
    whole = {aliases.get(name, name) for name in imported(at_top=False)}
    assert whole - required - optional == set()
    integrations = {"lightning"}  # a file of theirs is imported by those who have it
    assert {aliases.get(n, n) for n in imported(at_top=True)} - required - integrations == set()
