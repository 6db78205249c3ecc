"""Communication hooks: how a bucket of gradients is averaged. See ``ddp.register_comm_hook``.

``allreduce.py`` has the plain hook, and what all hooks share; codecs are in ``_exchange/codecs``.
"""

from .._exchange import (
    Bf16,
    Chain,
    Codec,
    Encoded,
    Fp8,
    Fp16,
    Fp32,
    Int8,
    PowerSGD,
    RowCodec,
    Sign,
    TopK,
)
from .allreduce import allreduce_hook
from .codec_hook import CodecHook
from .compress import (
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from .debugging import noop_hook
from .mixed_precision import _AllreduceUpcastHookState, _reducer_allreduce_and_upcast_hook
from .optimizer_overlap import (
    OverlappedOptimizer,
    _as_overlapped_optim,
    _hook_then_optimizer,
    _OptimizerHookState,
    register_overlapped,
)
from .post_local_sgd import PostLocalSGDState, post_localSGD_hook
from .powersgd import batched_powerSGD_hook, powerSGD_hook
from .powersgd_state import PowerSGDState
from .quantization import quantization_perchannel_hook, quantization_pertensor_hook
from .register import DDPCommHookType, register_ddp_comm_hook
from .zero_step import hook_with_zero_step, hook_with_zero_step_interleaved

__all__ = [
    "Bf16",
    "Chain",
    "Codec",
    "CodecHook",
    "DDPCommHookType",
    "Encoded",
    "Fp8",
    "Fp16",
    "Fp32",
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
]
