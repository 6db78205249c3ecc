"""Paceline: data-parallel training for PyTorch.

::

    errors/        every error
    policies.py    settings
    install.py     replaces torch's names with Paceline's, and undoes it
    ddp/           DistributedDataParallel and replicate
    elastic/       training that continues when ranks are lost or join
    compiled/      what torch.compile traces
    hooks/         how a bucket is averaged: torch's hooks, and codecs that save bytes
    optim/         ZeRO, steps in backward, local SGD, DiLoCo, clipping
    _exchange/     how tensors are averaged, under hooks and optim: routes, codecs
    join/          ranks with unequal amounts of data
    data/          samplers, shards of a global batch, random numbers of a shard
    metrics.py     reductions over uneven shards
    _reducer/      gradients in, averages out; reducer.py says how a backward pass goes
    groups/        process groups as objects; documented in groups/group.py
    _transport/    moves bytes: shared memory, how ranks meet, objects without pickle
    _torch/        all private names of torch that are used
    recorder/      what every rank did recently; verdicts on hangs, reports
    integrations/  for Lightning
    cli/           the command paceline: run, demo, doctor, report, bench
    testing.py     ranks as threads and as processes, for your own tests
"""

import importlib
import sys
from typing import Any


def _is_command_line() -> bool:
    """Whether this process is ``paceline …`` or ``python -m paceline …`` itself.

    The command line answers ``--help`` without waiting for torch: there the names below are
    imported when somebody asks for one, by ``__getattr__``.
    """
    if sys.argv[:1] == ["-m"]:  # python is looking for the module that it was told to run
        module = sys.orig_argv[sys.orig_argv.index("-m") + 1 :][:1]
        return module in (["paceline"], ["paceline._members"])
    return sys.argv[0].rpartition("/")[2] == "paceline" if sys.argv else False


if not _is_command_line():
    from ._torch.versions import blaming_untested

    with blaming_untested():
        from . import (
            compiled,
            data,
            ddp,
            elastic,
            errors,
            groups,
            hooks,
            join,
            metrics,
            optim,
            recorder,
        )
        from .ddp import DistributedDataParallel, SyncBatchNorm, replicate
        from .groups import (
            Group,
            ProcessGroup,
            ProcessGroupFactory,
            ReduceOp,
            Store,
            Work,
            current_process_group,
            new_group,
            process_group,
            register_backend,
        )
        from .install import install, uninstall
        from .join import Join, Joinable, JoinHook

__version__ = "0.3.0.dev0"

__all__ = [
    "DistributedDataParallel",
    "Group",
    "Join",
    "JoinHook",
    "Joinable",
    "ProcessGroup",
    "ProcessGroupFactory",
    "ReduceOp",
    "Store",
    "SyncBatchNorm",
    "Work",
    "__version__",
    "compiled",
    "current_process_group",
    "data",
    "ddp",
    "elastic",
    "errors",
    "groups",
    "hooks",
    "install",
    "join",
    "metrics",
    "new_group",
    "optim",
    "process_group",
    "recorder",
    "register_backend",
    "replicate",
    "uninstall",
]


def __getattr__(name: str) -> Any:
    """Names that PyTorch's own tests look for in the place of torch's private ones."""
    if name in __all__:
        return _import_late(name)
    from . import policies

    private = {
        "_BucketCapacityConfig": policies.BucketCaps,
        "_MixedPrecision": ddp._MixedPrecision,
        "HierarchicalModelAverager": optim.HierarchicalModelAverager,
        "PeriodicModelAverager": optim.PeriodicModelAverager,
        "_DEFAULT_BUCKET_CAP_MB": policies.DEFAULT_CAP_MIB,
        "_MB_TO_BYTES": policies.MIB,
        "_dump_DDP_relevant_env_vars": ddp.dump_environment,
        "__peer_setup__": lambda: ddp.set_strict(True),
    }
    if name in private:
        return private[name]
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")


def _import_late(name: str) -> Any:
    """A public name in the command line's own process, imported now."""
    for home in ("groups", "ddp", "join"):
        module = importlib.import_module(f".{home}", __name__)
        if name in module.__all__:
            return getattr(module, name)
    if name in ("install", "uninstall"):
        from .install import install, uninstall

        globals().update(install=install, uninstall=uninstall)  # the first is a module's name too
        return globals()[name]
    return importlib.import_module(f".{name}", __name__)
