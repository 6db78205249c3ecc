"""What an example of an elastic job prints."""

import re


def assert_two_equal_digests(said: list[str]) -> None:
    """One of a run without faults, and one of a run whose members were killed."""
    found = [match[1] for line in said if (match := re.search(r"digest (\w{16}) after 12", line))]
    assert len(found) == 2, said
    assert found[0] == found[1]
