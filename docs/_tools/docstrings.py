"""Our docstrings, which speak reStructuredText, as the Markdown that mkdocstrings wants.

``:class:`Group``` becomes a link where the reference has such a name and code where it has not;
a ``::`` before an indented block becomes a colon or goes.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import griffe

REFERENCE = Path(__file__).parents[1] / "reference"

_ROLE = re.compile(r":(?:class|meth|func|attr|mod|exc|data|obj):`(?P<tilde>~?)(?P<name>[^`]+)`")
_LITERAL = re.compile(r"``([^`]+)``")
_OPENING = re.compile(r"(?P<lead>[ \t]*[^\n]*?)[ ]?::[ \t]*\n(?=\s*\n)")


@cache
def referenced() -> frozenset[str]:
    """All identifiers that the reference has an entry of their own for."""
    entries = (
        line[4:].strip()
        for page in sorted(REFERENCE.glob("*.md"))
        for line in page.read_text(encoding="utf-8").splitlines()
        if line.startswith("::: ")
    )
    return frozenset(entries)


def markdown(text: str, near: str = "") -> str:
    """``text`` as Markdown; short names are looked for beside ``near``, a dotted path."""
    text = _ROLE.sub(lambda match: _link(match["name"], bool(match["tilde"]), near), text)
    text = _LITERAL.sub(r"`\1`", text)
    return _OPENING.sub(_introduce, text)


def _introduce(match: re.Match[str]) -> str:
    lead = match["lead"].rstrip()
    if not lead or lead.endswith((".", ")", "…")):
        return lead + "\n"
    return lead + ":\n"


def _link(name: str, short: bool, near: str) -> str:
    shown = name.rsplit(".", 1)[-1] if short else name
    scopes = near.split(".")
    around = [".".join([*scopes[:n], name]) for n in range(len(scopes), -1, -1)]
    everywhere = [entry for entry in sorted(referenced()) if entry.endswith("." + name)]
    target = next((path for path in [*around, *everywhere] if path in referenced()), None)
    return f"[`{shown}`][{target}]" if target else f"`{shown}`"


class Docstrings(griffe.Extension):
    """Rewrites every docstring once it is loaded."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """A class, function, module or attribute was found."""
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value, obj.path)
