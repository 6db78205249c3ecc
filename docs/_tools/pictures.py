"""Puts drawings into the page itself, where they follow its light and dark colours.

In the Markdown they are ordinary images with an alternative text, so they can also be read where
the files are shown without the site.
"""

from __future__ import annotations

import re
from html import escape, unescape
from pathlib import Path
from typing import Any

_IMAGE = re.compile(r'<img\b[^>]*?\salt="(?P<alt>[^"]*)"[^>]*?\ssrc="(?P<src>[^":]+\.svg)"[^>]*>')


def on_page_content(html: str, page: Any, config: Any, **kwargs: Any) -> str:
    """Replace every drawing of ours in a page."""
    here = Path(config.docs_dir, page.file.src_uri).parent

    def drawn(match: re.Match[str]) -> str:
        return inline((here / match["src"]).read_text(encoding="utf-8"), unescape(match["alt"]))

    return _IMAGE.sub(drawn, html)


def inline(svg: str, alt: str) -> str:
    """A drawing as part of a page, with its alternative text for those who do not see it."""
    body = svg[svg.index("<svg") :].replace(
        "<svg", f'<svg role="img" aria-label="{escape(alt)}"', 1
    )
    return f'<figure class="picture">{body}</figure>'
