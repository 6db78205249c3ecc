"""The public names: a change here is a change users see, and belongs in the changelog."""

import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator

import pytest

EXPORTS = {
    "paceline": [
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
    ],
    "paceline.compiled": [
        "Planned",
        "Schedule",
        "Settings",
        "Step",
        "UNAVAILABLE",
        "explain",
        "gradient_hook",
        "hooks_of",
        "keep_hooks",
        "on_gradient",
        "refuse_hooks",
        "train_step",
    ],
    "paceline.data": [
        "DistributedSampler",
        "Shard",
        "ShardedLoader",
        "ShardedStep",
        "keyed_random",
        "share_out",
    ],
    "paceline.ddp": [
        "DistributedDataParallel",
        "Replica",
        "Replicate",
        "ReplicateState",
        "Replicated",
        "SyncBatchNorm",
        "_BufferCommHookLocation",
        "_MixedPrecision",
        "dump_environment",
        "forward_in_graph",
        "is_strict",
        "replicate",
        "set_strict",
        "wrapper_numbered",
    ],
    "paceline.elastic": ["Job", "JobStep", "group", "job"],
    "paceline.hooks": [
        "Bf16",
        "Chain",
        "Codec",
        "CodecHook",
        "DDPCommHookType",
        "Encoded",
        "Fp16",
        "Fp32",
        "Fp8",
        "Int8",
        "OverlappedOptimizer",
        "PostLocalSGDState",
        "PowerSGD",
        "PowerSGDState",
        "RowCodec",
        "Sign",
        "TopK",
        "_AllreduceUpcastHookState",
        "_OptimizerHookState",
        "_as_overlapped_optim",
        "_hook_then_optimizer",
        "_reducer_allreduce_and_upcast_hook",
        "allreduce_hook",
        "batched_powerSGD_hook",
        "bf16_compress_hook",
        "bf16_compress_wrapper",
        "fp16_compress_hook",
        "fp16_compress_wrapper",
        "hook_with_zero_step",
        "hook_with_zero_step_interleaved",
        "noop_hook",
        "post_localSGD_hook",
        "powerSGD_hook",
        "quantization_perchannel_hook",
        "quantization_pertensor_hook",
        "register_ddp_comm_hook",
        "register_overlapped",
    ],
    "paceline.join": ["Join", "JoinConfig", "JoinHook", "Joinable"],
    "paceline.metrics": ["gather", "mean", "sum", "weighted_mean"],
    "paceline.groups": [
        "Availability",
        "Call",
        "Capabilities",
        "Engine",
        "EngineBackend",
        "FINISHED",
        "Group",
        "GroupOptions",
        "ProcessGroup",
        "ProcessGroupFactory",
        "ReduceOp",
        "Store",
        "Traffic",
        "Work",
        "capabilities",
        "current_process_group",
        "group_or_default",
        "group_to_call",
        "new_group",
        "process_group",
        "register_backend",
        "store_of",
    ],
    "paceline.optim": [
        "DiLoCo",
        "GradScaler",
        "Gradients",
        "HierarchicalModelAverager",
        "InBackward",
        "LocalSGD",
        "ModelAverager",
        "PeriodicModelAverager",
        "PostLocalSGDOptimizer",
        "ZeroRedundancyOptimizer",
        "average_parameters",
        "average_parameters_or_parameter_groups",
        "clip_grad_norm_",
        "get_params_to_average",
    ],
    "paceline.recorder": [
        "MetricsServer",
        "RankLog",
        "Summary",
        "Totals",
        "configure",
        "events",
        "finish_explaining",
        "rank_log",
        "read_report",
        "read_run",
        "save",
        "save_all",
        "serve_metrics",
        "summary",
        "to_tensorboard",
        "totals",
        "write_report",
    ],
    "paceline.testing": [
        "Cue",
        "Meeting",
        "fail_on_cue",
        "hold_on_cue",
        "run_ranks",
        "spawn_ranks",
    ],
}

# Extras and tools: whoever imports the package must not pay for them, or need them.
NOT_IMPORTED = (
    "hypothesis",
    "mpi4py",
    "pandas",
    "paceline.testing",
    "prometheus_client",
    "pytest",
    "rich",
    "scipy",
    "sklearn",
    "tensorboard",
    "typer",
    "wandb",
)


@pytest.mark.parametrize("module", EXPORTS)
def test_the_public_names_are_these(module: str) -> None:
    assert sorted(importlib.import_module(module).__all__) == EXPORTS[module]


@pytest.mark.parametrize("module", EXPORTS)
def test_every_public_name_can_be_had_and_has_a_docstring(module: str) -> None:
    home = importlib.import_module(module)
    assert home.__doc__
    assert [name for name in EXPORTS[module] for name in _undocumented(home, name)] == []


def test_importing_the_package_imports_no_extras() -> None:
    script = f"import sys, paceline; print([m for m in {NOT_IMPORTED} if m in sys.modules])"
    child = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False
    )
    assert (child.stdout.strip(), child.stderr) == ("[]", "")


def _undocumented(home: object, name: str) -> Iterator[str]:
    """Yield ``name``, and ``name.method`` for its public methods, where they are ours and bare."""
    thing = getattr(home, name)
    if not _is_ours(thing):
        return
    doc = thing.__doc__ or ""
    if not doc or doc.startswith(f"{name}("):  # dataclasses write the signature themselves
        yield name
    if inspect.isclass(thing):
        methods = (m for m, value in vars(thing).items() if callable(value) or _wraps(value))
        public = (m for m in methods if not m.startswith("_"))
        yield from (f"{name}.{m}" for m in public if not inspect.getdoc(getattr(thing, m)))


def _is_ours(thing: object) -> bool:
    """Tell our classes, functions and modules from torch's, and from plain values."""
    where = getattr(thing, "__module__", None) or getattr(thing, "__name__", "")
    return where.split(".")[0] == "paceline"


def _wraps(value: object) -> bool:
    return isinstance(value, property | classmethod | staticmethod)
