"""What ``_get_ddp_logging_data`` tells: settings, sizes, times, errors and the environment."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .._reducer import Pass, ReducerSummary, local
from ..policies import Reduction

if TYPE_CHECKING:
    from .replica import Replica

_FIRST = 10  # passes whose times are always kept


@dataclass
class Times:
    """Times of passes in nanoseconds, for the first passes and then for every n-th one."""

    sample_rate: int = 100
    forward_start: int = 0
    count: int = 0
    kept: dict[str, int] = field(default_factory=lambda: {"iteration": 0})
    totals: dict[str, int] = field(default_factory=dict)
    samples: int = 0

    def note(self, done: Pass) -> None:
        """Take the times of a pass that has ended."""
        before, self.count = self.count, self.count + 1
        if before >= _FIRST and before % self.sample_rate:
            return
        launch = done.first_launch or done.ended
        now = {
            "forward_compute_time": max(done.began - self.forward_start, 1),
            "backward_compute_time": max(done.ended - done.began, 1),
            "backward_comm_time": max(done.finished - launch, 1),
            "backward_compute_comm_overlap_time": max(done.ended - launch, 1),
        }
        self.samples += 1
        for name, value in now.items():
            self.totals[name] = self.totals.get(name, 0) + value
        self.kept = {
            "iteration": before,
            **now,
            **{f"avg_{name}": self.totals[name] // self.samples for name in now},
            "forward_compute_time_start": self.forward_start,
            "backward_compute_time_start": done.began,
            "backward_comm_time_start": launch,
            "backward_compute_time_end": done.ended,
            "backward_comm_time_end": done.finished,
        }


def logging_data(replica: Replica, wrapper: Any, *, error: str, comm_hook: str) -> dict[str, Any]:
    """Everything by torch's keys; sizes and lists as torch writes them.

    ``comm_hook`` is the name of the communication hook; empty: there is none.
    """
    summary = replica.reducer.summary()
    data: dict[str, Any] = {
        **_identity(replica, wrapper),
        **_settings(replica, wrapper),
        **({"comm_hook": comm_hook} if comm_hook else {}),
        **_sizes(summary, replica.reducer.policy),
        **replica.times.kept,
        **environment(replica.group.backend),
        "has_error": int(bool(error)),
        # Lightning advises static_graph=True where this is 1, and here nothing is gained by it.
        "can_set_static_graph": int(summary.steady and replica.reducer.policy.strict),
        "prev_iteration_grad_ready_order_indices": _joined(summary.arrival),
    }
    if error:
        data["error"] = error
    return data


def _backend_name(replica: Replica, wrapper: Any) -> str:
    """The name under which the user asked for the backend; another's may be a known one inside."""
    with contextlib.suppress(Exception):  # a group written in Python may raise anything
        name = wrapper.process_group.name()
        if isinstance(name, str) and name not in ("", "undefined"):
            return name
    return replica.group.backend


def _identity(replica: Replica, wrapper: Any) -> dict[str, Any]:
    dtypes = sorted({_type_name(local(p).dtype) for p in replica.reducer.params})
    return {
        "world_size": replica.group.size(),
        "rank": replica.group.rank(),
        "module_name": type(wrapper.module).__name__,
        "device_ids": _joined(wrapper.device_ids or []),
        "output_device": -1 if wrapper.output_device is None else wrapper.output_device,
        "backend_name": _backend_name(replica, wrapper),
        "dtypes": ", ".join(dtypes),
        "is_multi_device_module": int(wrapper.is_multi_device_module),
    }


def _settings(replica: Replica, wrapper: Any) -> dict[str, Any]:
    modules = wrapper.module.modules()
    return {
        "broadcast_buffers": int(replica.buffers.in_forward),
        "forward_sync_buffers": int(replica.buffers.in_forward),
        "bucket_cap_bytes": replica.reducer.policy.caps.bucket_bytes_cap,
        "find_unused_parameters": int(replica.reducer.policy.find_unused),
        "gradient_as_bucket_view": int(bool(wrapper.gradient_as_bucket_view)),
        "static_graph": int(replica.reducer.policy.static_graph),
        "has_sync_bn": int(any(isinstance(m, nn.SyncBatchNorm) for m in modules)),
        "join_uneven_inputs": int(replica.joined_once),
    }


def _sizes(summary: ReducerSummary, policy: Reduction) -> dict[str, Any]:
    data: dict[str, Any] = {
        "total_parameter_size_bytes": sum(summary.sizes),
        "num_parameter_tensors": len(summary.sizes),
        "unused_parameter_size": sum(summary.sizes[index] for index in summary.unused),
        "num_buckets_reduced": len(summary.plan),
        "bucket_sizes": _joined(summary.first_bucket_sizes),
        "initial_bucket_size_limits": _joined(summary.first_caps),
        "has_rebuilt_buckets": int(summary.rebuilt),
    }
    if summary.rebuilt:
        data["rebuilt_bucket_sizes"] = _joined(summary.bucket_sizes)
        data["rebuilt_bucket_size_limits"] = _joined(policy.caps.rebuilt)
        rows = [" ".join(map(str, row)) for row in summary.plan]
        data["rebuilt_per_bucket_param_indices"] = ", ".join(rows)
    return data


def _joined(values: Any) -> str:
    return ", ".join(map(str, values))


def _type_name(dtype: torch.dtype) -> str:
    names = {"float32": "float", "float64": "double", "float16": "c10::Half"}
    plain = str(dtype).removeprefix("torch.")
    return names.get(plain, "c10::BFloat16" if plain == "bfloat16" else plain)


_ENGINES = {
    "gloo": {
        "gloo_socket_ifname": "GLOO_SOCKET_IFNAME",
        "gloo_device_transport": "GLOO_DEVICE_TRANSPORT",
    },
    "nccl": {
        "nccl_socket_ifname": "NCCL_SOCKET_IFNAME",
        "nccl_blocking_wait": "TORCH_NCCL_BLOCKING_WAIT",
        "nccl_async_error_handling": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "nccl_debug": "NCCL_DEBUG",
        "nccl_nthreads": "NCCL_NTHREADS",
        "nccl_ib_timeout": "NCCL_IB_TIMEOUT",
    },
}

_FIXED = {"gloo": {"gloo_num_threads": 2}}  # what torch gives gloo for each device


def environment(backend: str) -> Mapping[str, Any]:
    """The environment variables that affect communication."""
    wanted = {
        "master_port": "MASTER_PORT",
        "master_addr": "MASTER_ADDR",
        "torch_distributed_debug": "TORCH_DISTRIBUTED_DEBUG",
        "cuda_visible_devices": "CUDA_VISIBLE_DEVICES",
        **_ENGINES.get(backend, {}),
    }
    found: dict[str, Any] = {key: os.environ.get(name, "N/A") for key, name in wanted.items()}
    return {**found, **_FIXED.get(backend, {})}


_RELEVANT = """
RANK LOCAL_RANK WORLD_SIZE MASTER_PORT MASTER_ADDR CUDA_VISIBLE_DEVICES GLOO_SOCKET_IFNAME
GLOO_DEVICE_TRANSPORT NCCL_SOCKET_IFNAME TORCH_NCCL_BLOCKING_WAIT NCCL_DEBUG NCCL_DEBUG_SUBSYS
NCCL_IB_DISABLE NCCL_P2P_DISABLE NCCL_P2P_LEVEL NCCL_SHM_DISABLE NCCL_SOCKET_NTHREADS
NCCL_NSOCKS_PERTHREAD NCCL_BUFFSIZE NCCL_NTHREADS NCCL_RINGS NCCL_MAX_NCHANNELS NCCL_MIN_NCHANNELS
NCCL_CHECKS_DISABLE NCCL_CHECK_POINTERS NCCL_LAUNCH_MODE NCCL_IB_HCA NCCL_IB_TIMEOUT
NCCL_IB_RETRY_CNT NCCL_IB_GID_INDEX NCCL_IB_SL NCCL_IB_TC NCCL_IB_AR_THRESHOLD NCCL_IB_CUDA_SUPPORT
NCCL_NET_GDR_LEVEL NCCL_NET_GDR_READ NCCL_SINGLE_RING_THRESHOLD NCCL_LL_THRESHOLD
NCCL_TREE_THRESHOLD NCCL_ALGO NCCL_PROTO NCCL_IGNORE_CPU_AFFINITY NCCL_DEBUG_FILE
NCCL_COLLNET_ENABLE NCCL_TOPO_FILE NCCL_TOPO_DUMP_FILE TORCH_NCCL_ASYNC_ERROR_HANDLING
"""


def dump_environment() -> None:
    """Print the environment variables that matter when ranks do not find each other."""
    print("\n".join(f"env:{name}={os.environ.get(name, 'N/A')}" for name in _RELEVANT.split()))
