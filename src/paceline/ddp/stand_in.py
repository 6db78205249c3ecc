"""Our wrapper in the place of torch's: what ``isinstance`` says of a wrapper that torch made.

After ``paceline.install()`` a script that asks ``isinstance(model, DistributedDataParallel)`` asks
about our class. Models wrapped by torch's class are then still about: wrapped before, or through a
subclass, a partial or anything else that kept torch's class. They are what the script means.
"""

from __future__ import annotations

import gc
from abc import ABCMeta
from typing import Any

from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

_stand_ins: set[type] = set()  # classes that stand in torch's place now


class StandsForTorchs(ABCMeta):
    """The class of a wrapper; torch's wrappers count as instances while it stands for torch's."""

    def __instancecheck__(cls, instance: Any) -> bool:
        if super().__instancecheck__(instance):
            return True
        return cls in _stand_ins and isinstance(instance, TorchDDP)


def stand_for_torchs(kind: type, standing: bool) -> None:
    """Say whether ``kind`` stands in the place of torch's wrapper; its subclasses do not."""
    if standing:
        _stand_ins.add(kind)
    else:
        _stand_ins.discard(kind)


def made_by_torch() -> list[str]:
    """The models that torch's own class has wrapped in this process, by their classes."""
    kinds = _subclasses(TorchDDP)
    found = [thing for thing in gc.get_objects() if type(thing) in kinds]
    return sorted(type(vars(thing)["_modules"]["module"]).__name__ for thing in found)


def derived_from_torch() -> list[str]:
    """The classes that were derived from torch's own wrapper, and so stay torch's."""
    kinds = _subclasses(TorchDDP) - {TorchDDP}
    own = [k for k in kinds if k.__module__.split(".")[0] not in ("torch", "paceline")]
    return sorted(f"{kind.__module__}.{kind.__qualname__}" for kind in own)


def _subclasses(kind: type) -> set[type]:
    """``kind`` and what is derived from it, without our wrapper and what is derived from that."""
    found = {kind}
    children: list[type] = type.__subclasses__(kind)
    for child in children:
        if not child.__module__.startswith("paceline."):
            found |= _subclasses(child)
    return found
