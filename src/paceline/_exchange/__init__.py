"""How tensors are averaged over ranks: plainly, weighted, or encoded; under hooks and optim."""

from .codecs import (
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
from .coded import Coded, FlatCodec, check_codec
from .feedback import Held
from .flat import (
    copy_all,
    is_dense,
    is_plain,
    memory_like,
    memory_of,
    move_into,
    shaped_like,
    strides_of,
)
from .flat_buffer import FlatBuffer, cut_evenly, numbers, pack
from .journey import Journey
from .lane import JobLane
from .low_rank import (
    LowRankPlan,
    MatrixBatch,
    Seeds,
    orthonormal,
    plan_low_rank,
    random_columns,
    widened,
)
from .mean import done, gather_later, mean_later, mean_now, one_tensor, sum_later
from .routes import FactorRoute, GatherRoute, Route, TwoStageRoute
from .row_layout import ParamSpan, RowLayout
from .two_stages import CodedInTwoStages
from .weighted_mean import Exchange, Largest, Plain, Standing
from .wire import Meter, MeteredGroup

__all__ = [
    "Bf16",
    "Chain",
    "Codec",
    "Coded",
    "CodedInTwoStages",
    "Encoded",
    "Exchange",
    "FactorRoute",
    "FlatBuffer",
    "FlatCodec",
    "Fp8",
    "Fp16",
    "Fp32",
    "GatherRoute",
    "Held",
    "Int8",
    "JobLane",
    "Journey",
    "Largest",
    "LowRankPlan",
    "MatrixBatch",
    "Meter",
    "MeteredGroup",
    "ParamSpan",
    "Plain",
    "PowerSGD",
    "Route",
    "RowCodec",
    "RowLayout",
    "Seeds",
    "Sign",
    "Standing",
    "TopK",
    "TwoStageRoute",
    "check_codec",
    "copy_all",
    "cut_evenly",
    "done",
    "gather_later",
    "is_dense",
    "is_plain",
    "mean_later",
    "mean_now",
    "memory_like",
    "memory_of",
    "move_into",
    "numbers",
    "one_tensor",
    "orthonormal",
    "pack",
    "plan_low_rank",
    "random_columns",
    "shaped_like",
    "strides_of",
    "sum_later",
    "widened",
]
