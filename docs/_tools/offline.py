"""Fails a build whose pages would load anything from another host."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError

# What a browser fetches by itself: sources, stylesheets and the like, imports and url() in CSS.
_LOADS = re.compile(
    r"""<(?:script|img|iframe|source|video|audio|embed|object|use|image)\b[^>]*?"""
    r"""\s(?:src|data|href|srcset)\s*=\s*["']?(?P<tag>(?:https?:)?//[^"'\s>]+)"""
    r"""|<link\b(?=[^>]*\srel=["']?(?:stylesheet|preload|preconnect|dns-prefetch|icon|manifest))"""
    r"""[^>]*?\shref=["']?(?P<link>(?:https?:)?//[^"'\s>]+)"""
    r"""|@import\s+(?:url\()?["']?(?P<import>(?:https?:)?//[^"')\s]+)"""
    r"""|url\(\s*["']?(?P<css>(?:https?:)?//[^"')\s]+)""",
    re.IGNORECASE,
)


def external_loads(text: str) -> list[str]:
    """Addresses on other hosts that a page or stylesheet makes a browser fetch."""
    found = (match.group(match.lastgroup or 0) for match in _LOADS.finditer(text))
    return [address for address in found if "www.w3.org" not in address]


def on_post_build(config: MkDocsConfig) -> None:
    """Look through all that was built."""
    site = Path(config.site_dir)
    pages = [*site.rglob("*.html"), *site.rglob("*.css"), *site.rglob("*.svg")]
    wrong = [
        f"{page.relative_to(site)}: {address}"
        for page in pages
        for address in external_loads(page.read_text(encoding="utf-8"))
    ]
    if wrong:
        raise PluginError("pages load from other hosts:\n  " + "\n  ".join(wrong))
