"""One word, one meaning: a class's name says which class it is, wherever one meets it."""

import ast
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "paceline"

# Names that somebody else chose, and what asks for them.
SHARED = {
    "PacelineStrategy": "Lightning's Fabric and its Trainer each have one, in a module of its own",
}


def places_of_names(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """Where classes of each name are, nested and private ones included."""
    found = defaultdict(list)
    for path, text in sorted(sources.items()):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                found[node.name.lstrip("_")].append(f"{path}:{node.lineno}")
    return found


def the_package() -> dict[str, str]:
    return {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}


def test_no_two_classes_have_one_name() -> None:
    found = places_of_names(the_package())
    assert {n: p for n, p in found.items() if len(p) > 1 and n not in SHARED} == {}


def test_names_that_are_shared_on_purpose_still_are() -> None:
    found = places_of_names(the_package())
    assert [name for name in SHARED if len(found[name]) < 2] == []


def test_nested_and_private_classes_are_seen() -> None:
    found = places_of_names(
        {"a.py": "class Outer:\n    class _Word: ...\n", "b.py": "class Word: ..."}
    )
    assert found["Word"] == ["a.py:2", "b.py:1"]
