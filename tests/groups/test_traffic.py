"""A group counts what its rank puts on the wire."""

import pytest
import torch

from paceline.groups import Group
from paceline.groups.traffic import share
from paceline.testing import run_ranks


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("all_reduce", 1.5),
        ("reduce_scatter_single", 0.75),
        ("all_gather_single", 3.0),
        ("all_to_all_single", 0.75),
        ("send", 1.0),
        ("recv", 0.0),
        ("barrier", 0.0),
    ],
)
def test_each_kind_of_call_sends_its_share_in_a_group_of_four(kind: str, expected: float) -> None:
    assert share(kind, 4) == expected


def test_a_group_of_one_sends_nothing() -> None:
    assert share("all_reduce", 1) == share("all_gather", 1) == 0


def test_a_groups_calls_and_bytes_are_counted_until_they_are_reset() -> None:
    def one_rank(group: Group) -> tuple[int, float, dict[str, float], float]:
        group.all_reduce(torch.zeros(100))
        group.all_gather_single(torch.empty(20), torch.zeros(10))
        group.start_all_reduce(torch.zeros(100)).wait()
        traffic = group.traffic
        seen = traffic.calls, traffic.bytes_sent, traffic.by_kind
        traffic.reset()
        return *seen, traffic.bytes_sent

    for calls, sent, by_kind, after in run_ranks(2, one_rank):
        assert calls == 3
        assert by_kind == {"all_reduce": 800.0, "all_gather_single": 40.0}
        assert sent == 840.0
        assert after == 0.0
