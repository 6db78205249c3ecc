"""State dicts as plain data and a row of tensors, which travel and are saved apart.

Plain data goes through our codec, which runs nothing when it is read (``_transport/codec.py``).
A dict that is more than a dict (a Counter, as MultiStepLR has one) comes back as what it was.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

_DICTS: dict[str, Callable[[Any], Any]] = {"dict": dict, "Counter": Counter, "Ordered": OrderedDict}
_KINDS: dict[type, str] = {dict: "dict", Counter: "Counter", OrderedDict: "Ordered"}


def pack(value: Any, tensors: dict[str, Tensor], path: str) -> Any:
    """``value`` as plain data; its tensors go into ``tensors``, under names that begin so."""
    if isinstance(value, Tensor):
        tensors[path] = value.detach()
        return ["tensor", path]
    kind = type(value)
    if kind in _KINDS:
        rows = [[key, pack(item, tensors, f"{path}.{key}")] for key, item in value.items()]
        return [_KINDS[kind], rows]
    if kind in (list, tuple):
        items = [pack(item, tensors, f"{path}.{at}") for at, item in enumerate(value)]
        return [kind.__name__, items]
    return ["value", value]


def unpack(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What :func:`pack` was given."""
    kind, held = packed
    if kind == "tensor":
        return tensors[held]
    if kind == "value":
        return held
    if kind in _DICTS:
        return _DICTS[kind]({key: unpack(item, tensors) for key, item in held})
    items = [unpack(item, tensors) for item in held]
    return tuple(items) if kind == "tuple" else items


def copied(value: Any) -> Any:
    """``value`` with tensors and containers of its own."""
    tensors: dict[str, Tensor] = {}
    packed = pack(value, tensors, "")
    return unpack(packed, {name: tensor.clone() for name, tensor in tensors.items()})
