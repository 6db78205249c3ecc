"""HierarchicalModelAverager: small groups average often, larger ones seldom."""

from __future__ import annotations

import logging
import warnings
from collections import OrderedDict
from collections.abc import Mapping

import torch.distributed as dist
from torch.distributed import ProcessGroup

from .._exchange import part_of
from ..errors import AveragingArgumentError
from ..groups import Group
from .averagers import (
    NOT_NEEDED,
    WARMUP,
    ModelAverager,
    Params,
    average_parameters_or_parameter_groups,
)

log = logging.getLogger(__name__)


class HierarchicalModelAverager(ModelAverager):
    """Averages over groups of several sizes, each with its own period.

    ``period_group_size_dict`` maps periods, in increasing order, to the sizes of groups of
    consecutive ranks; the last size is that of the whole group. If several periods divide a step,
    the longest one is used. Steps count from 0; nothing is averaged before ``warmup_steps``.

    The constructor opens the smaller groups; :meth:`shutdown` closes them.
    """

    def __init__(
        self,
        period_group_size_dict: Mapping[int, int] | None = None,
        warmup_steps: int = 0,
        process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(process_group)
        sizes = dict(period_group_size_dict or {})
        _check(sizes, self.process_group.size())
        if warmup_steps < 0:
            raise AveragingArgumentError(WARMUP)
        self._periods = list(sizes)
        if self._periods[-1] == 1:
            start = "When the maximum period in arg ``period_group_size_dict`` is 1"
            warnings.warn(f"{start}, {NOT_NEEDED}", stacklevel=2)
        self.warmup_steps = warmup_steps
        self.period_process_group_dict: OrderedDict[int, ProcessGroup] = OrderedDict()
        for period, size in sizes.items():
            log.info("%s ranks at a time average parameters every %s steps", size, period)
            self.period_process_group_dict[period] = self._neighbours(size)

    def average_parameters(self, params: Params) -> None:
        """Count a step, and average over the group that is due, if any."""
        group = self._find_process_group() if self.step >= self.warmup_steps else None
        if group is not None:
            average_parameters_or_parameter_groups(params, group)
        self.step += 1

    def shutdown(self) -> None:
        """Close the groups that the constructor opened; every rank calls it."""
        while self.period_process_group_dict:
            _, group = self.period_process_group_dict.popitem()
            if group is self.process_group:
                continue
            if isinstance(group, Group):
                group.shutdown()
            else:
                dist.destroy_process_group(group)

    def _find_process_group(self) -> ProcessGroup | None:
        due = [period for period in self._periods if self.step % period == 0]
        return self.period_process_group_dict[due[-1]] if due else None

    def _neighbours(self, size: int) -> ProcessGroup:
        """This rank's group, when all ranks are split into groups of ``size``."""
        whole = self.process_group
        if size == whole.size():
            return whole
        starts = range(0, whole.size(), size)
        return part_of(whole, [range(start, start + size) for start in starts])


def _check(sizes: Mapping[int, int], whole: int) -> None:
    """Refuse a hierarchy that cannot be, before any group is made."""
    name = "arg ``period_group_size_dict``"
    if not sizes:
        raise AveragingArgumentError("Arg ``period_group_size_dict`` must not be empty.")
    if min(sizes) <= 0:
        raise AveragingArgumentError(f"The minimum period in {name} must be a positive value.")
    last = list(sizes.values())[-1]
    if last != whole:
        raise AveragingArgumentError(
            f"The last value in {name} {last} must be equal to the size of arg ``process_group`` "
            f"{whole}."
        )
    if list(sizes) != sorted(sizes):
        raise AveragingArgumentError(
            f"The periods in {name} must rise, but they are {list(sizes)}.",
            "A step that is a multiple of several periods belongs to the last of them.",
        )
    odd = [size for size in sizes.values() if size < 1 or whole % size]
    if odd:
        raise AveragingArgumentError(
            f"The sizes in {name} must divide the {whole} ranks evenly; {odd[0]} does not."
        )
