"""Tensors inside whatever a forward returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor


def tensors_in(value: object) -> Iterator[Tensor]:
    """Every tensor in nested lists, tuples, mappings, dataclasses and RRefs."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))
    elif _is_local_rref(value):
        yield from tensors_in(value.local_value())  # type: ignore[attr-defined]


def _is_local_rref(value: object) -> bool:
    if type(value).__module__.split(".")[0] != "torch" or not torch.distributed.rpc.is_available():
        return False
    return isinstance(value, torch.distributed.rpc.RRef) and value.is_owner()
