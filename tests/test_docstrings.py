"""Docstrings stand alone: on a reference page there is no line above for them to lean on."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "paceline"
LEANING = ("the same", "likewise", "ditto", "see above", "as above")


def leaning(text: str) -> list[str]:
    """Names whose docstrings begin with something that was said before."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            doc = ast.get_docstring(node) or ""
            if doc.lower().startswith(LEANING):
                found.append(getattr(node, "name", "the module"))
    return found


def test_no_docstring_begins_with_what_another_says() -> None:
    files = {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}
    assert {path: names for path, text in files.items() if (names := leaning(text))} == {}


def test_one_that_does_is_found() -> None:
    text = 'class A:\n    """Whole."""\n\n    def b(self):\n        """The same, later."""\n'
    assert leaning(text) == ["b"]
