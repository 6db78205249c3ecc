"""How tensors are averaged over ranks: plainly, weighted, or encoded; under hooks and optim."""

from .codecs import (
    Bf16,
    Chain,
    Codec,
    Encoded,
    Encodes,
    Fp8,
    Fp16,
    Fp32,
    Int8,
    PowerSGD,
    RowCodec,
    Sign,
    TopK,
    as_codec,
    is_codec,
)
from .coded import (
    CodedMean,
)
from .feedback import (
    Held,
)
from .flat import (
    by_kind,
    copy_all,
    is_dense,
    is_plain,
    local_part,
    memory_like,
    memory_of,
    move_into,
    shaped_like,
    strides_of,
)
from .flat_buffer import (
    FlatBuffer,
    cut_evenly,
    group_for_buffers,
    local_values,
)
from .journey import (
    FutureJourney,
)
from .lane import (
    JobLane,
)
from .low_rank import (
    LowRankPlan,
    MatrixBatch,
    Seeds,
    orthonormal,
    plan_low_rank,
    random_columns,
    widened,
)
from .mean import (
    done,
    gather_later,
    mean_later,
    mean_now,
    one_tensor,
    sum_later,
)
from .routes import (
    Route,
    RouteSetting,
)
from .row_layout import (
    ParamSpan,
    RowLayout,
)
from .subgroups import part_of
from .weighted_mean import (
    BufferExchange,
    Largest,
    Standing,
    WeightedMean,
)
from .wire import (
    Meter,
    MeteredGroup,
)

__all__ = [
    "Bf16",
    "BufferExchange",
    "Chain",
    "Codec",
    "CodedMean",
    "Encoded",
    "Encodes",
    "FlatBuffer",
    "Fp8",
    "Fp16",
    "Fp32",
    "FutureJourney",
    "Held",
    "Int8",
    "JobLane",
    "Largest",
    "LowRankPlan",
    "MatrixBatch",
    "Meter",
    "MeteredGroup",
    "ParamSpan",
    "PowerSGD",
    "Route",
    "RouteSetting",
    "RowCodec",
    "RowLayout",
    "Seeds",
    "Sign",
    "Standing",
    "TopK",
    "WeightedMean",
    "as_codec",
    "by_kind",
    "copy_all",
    "cut_evenly",
    "done",
    "gather_later",
    "group_for_buffers",
    "is_codec",
    "is_dense",
    "is_plain",
    "local_part",
    "local_values",
    "mean_later",
    "mean_now",
    "memory_like",
    "memory_of",
    "move_into",
    "one_tensor",
    "orthonormal",
    "part_of",
    "plan_low_rank",
    "random_columns",
    "shaped_like",
    "strides_of",
    "sum_later",
    "widened",
]
