"""What the last pass said and nobody has read yet: asked for where somebody relies on that pass.

On a device headers are read a pass later, so that ranks do not stop (``_reducer/header.py``). After
the last pass there is no later one. So a state dict, of the wrapper or of its module, the end of
the group and optimizers ask first, and raise what another rank said. The end of the group asks also
for a wrapper that is no more.

An optimizer must not step with what is no average, nor on some ranks only. So before one steps, the
header is awaited: the device has by then got as far as the averages that the step is about to read.
"""

from __future__ import annotations

import atexit
import logging
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from .._reducer import look_before_steps, steps
from ..errors import PeerError

if TYPE_CHECKING:
    from .replica import Replica

log = logging.getLogger(__name__)
_replicas: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Replica]] = weakref.WeakKeyDictionary()
# What hears for a replica that is no more; the list is the end of the group's, too.
_heirs: weakref.WeakKeyDictionary[Replica, list[Callable[[], None]]] = weakref.WeakKeyDictionary()


def watch(replica: Replica) -> None:
    """Have the module's state dicts, and the end of its group, ask the replica first."""
    if not replica.reducer.reads_late:
        return
    module = getattr(replica.module, "stands_for", replica.module)  # of one that is replicated
    if module not in _replicas:
        module.register_state_dict_pre_hook(ask_first)
    held = weakref.ref(replica)
    _replicas[module] = held
    heirs = _heirs[replica] = [replica.reducer.unheard]

    def ask() -> None:
        living = held()
        for hear in heirs if living is None else (living.hear,):
            hear()

    replica.group.before_shutdown(ask)
    look_before_steps(replica, _ask_before_step)


def follow(replica: Replica) -> None:
    """The replica has another reducer."""
    if replica in _heirs:
        _heirs[replica][:] = [replica.reducer.unheard]


def _ask_before_step(replica: Replica, optimizer: Optimizer) -> None:
    reducers = (replica.reducer, *replica.companions)
    if all(reducer.mailbox.is_read for reducer in reducers) or _captures(replica):
        return
    its = steps(optimizer)
    if any(id(param) in its for param in replica.reducer.params):
        replica.hear()


def _captures(replica: Replica) -> bool:
    """Whether somebody captures what happens now, to be done later: nobody can wait for that."""
    on_gpu = replica.reducer.params[0].is_cuda
    return on_gpu and torch.cuda.is_current_stream_capturing()


def ask_first(module: nn.Module, _prefix: str, _keep_vars: bool) -> Any:
    """Hear of a failure in the last pass before its gradients' weights are saved."""
    held = _replicas.get(module)
    living = None if held is None else held()
    if living is not None:
        living.hear()


@atexit.register
def _ask_at_exit() -> None:
    """At exit it is too late to raise: print the failure."""
    for held in list(_replicas.values()):
        living = held()
        try:
            if living is not None:
                living.hear()
        except PeerError as error:
            log.error("%s", error)
        except Exception:
            log.debug("what the last pass said cannot be read any more", exc_info=True)
