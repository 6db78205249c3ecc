"""The page that lists faults names tests that there are."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/howto/elastic-faults.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/\S+\.py)::(\w+)`", PAGE)))


def test_every_test_that_the_page_names_is_there() -> None:
    missing = [
        f"{path}::{name}"
        for path, name in NAMED
        if f"\ndef {name}(" not in (ROOT / path).read_text()
    ]
    assert len(NAMED) > 40
    assert missing == []
