"""Text from elsewhere, as it may be shown: a terminal obeys what it is sent."""

from __future__ import annotations

_MOST = 400


def shown(text: str, most: int = _MOST) -> str:
    r"""``text`` on one line, in which nothing moves a cursor, hides or turns other text around.

    Control characters, line ends, marks of writing direction and what has no glyph become escapes
    as in Python's strings; after ``most`` characters it is cut.

    >>> shown("a\x1b[31mred\nline")
    'a\\x1b[31mred\\nline'
    """
    kept = text if len(text) <= most else text[: most - 1] + "…"
    return kept if kept.isprintable() else "".join(map(_escaped, kept))


def shown_lines(text: str, most: int = 1_000_000) -> str:
    """``text`` for a terminal that obeys nothing in it; lines stay lines, and tabs stay too."""
    if len(text) > most:
        text = text[: most - 1] + "…"
    return "".join(c if c in "\n\t" else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    if character.isprintable():
        return character
    return character.encode("unicode_escape").decode()
