"""Every error paceline raises.

::

    PacelineError
    ├── BackendTakenError          a backend name registered twice              (ValueError)
    ├── UnknownBackendError        a backend name nobody registered             (ValueError)
    ├── UnexpectedOptionError      an option its backend does not read          (TypeError)
    ├── UnknownOptionError         the same, where torch raises KeyError        (KeyError)
    ├── EngineUnavailableError     a backend that cannot work here              (RuntimeError)
    │   └── RankUnableError        …on one of the ranks; all raise it
    ├── OptionValueError           an option with a value it cannot have        (ValueError)
    ├── RendezvousError            the ranks could not find each other          (RuntimeError)
    │   └── DisagreementError      …or were told different things
    ├── CollectiveArgumentError    a bad argument, noticed before sending       (ValueError)
    │   └── CollectiveTypeError    …of a wrong type                             (TypeError)
    ├── UnsupportedError           something this engine does not do            (RuntimeError)
    ├── ExplainedError             one whose cause the recorder looks into
    │   ├── MismatchError          ranks called different things                (RuntimeError)
    │   └── GroupError             the group cannot go on                       (RuntimeError)
    │       ├── PeerDiedError          a rank's process is gone
    │       │   └── PeerDiedUnjoinedError  …and it had not joined
    │       ├── PeerLeftError          a rank shut its group down, or aborted it
    │       │   └── PeerLeftUnjoinedError  …and it had not joined
    │       ├── CollectiveTimeoutError a rank did not come in time              (TimeoutError)
    │       │   └── MonitoredBarrierError  …to a monitored barrier
    │       └── GroupClosedError       this rank shut the group down, or aborted it
    │           └── ForkedError        a forked child used a group of its parent
    ├── NotANumberError            a NaN given to a collective (a check of torch's) (RuntimeError)
    ├── WaitTimeoutError           a work was not done when wait() gave up      (TimeoutError)
    ├── CodecError                 an object it cannot carry, or bad bytes      (TypeError)
    ├── ModuleArgumentError        a bad argument of DistributedDataParallel    (ValueError)
    │   ├── ModuleStateError       …a module that it cannot wrap                (RuntimeError)
    │   └── ModuleTypeError        …of a wrong type                             (TypeError)
    ├── ModelMismatchError         ranks have different models                  (RuntimeError)
    ├── WrapperMismatchError       ranks wrap them with different arguments     (RuntimeError)
    ├── ReplicatedTwiceError       a module is replicated already               (AssertionError)
    ├── PeerError                  another rank failed and said why             (RuntimeError)
    ├── CommHookError              a communication hook returned nonsense       (RuntimeError)
    ├── UnfinishedReductionError   a pass left parameters out (strict)          (RuntimeError)
    │   └── GraphChangedError      a static graph that changed
    ├── LateGradientError          a gradient after its bucket had left         (RuntimeError)
    ├── ThawedParameterError       thawed inside a forward that began without it (RuntimeError)
    ├── UnfinalizedError           a step before finalize_backward()            (RuntimeError)
    ├── UnweighableError           a weighted pass that cannot be told apart    (RuntimeError)
    ├── JoinArgumentError          a Join of things that do not go together     (ValueError)
    ├── NotJoinableError           a Joinable without its constructor           (TypeError)
    ├── NestedJoinError            a Join inside another on the same group      (RuntimeError)
    ├── EarlyTerminationError      a rank has run out, and all are to raise     (RuntimeError)
    │   ├── InputsExhaustedError       …this one
    │   └── PeerExhaustedError         …another one
    ├── PeerFailedError            another rank raised inside Join              (RuntimeError)
    ├── SamplerStateError          a sampler's state from other samples         (ValueError)
    ├── ShardMismatchError         ranks' shards do not fit together            (ValueError)
    ├── ShardArgumentError         a rank gave something that is no shard       (ValueError)
    ├── ShardNumberError           a shard of a batch that cannot be            (ValueError)
    ├── LoaderArgumentError        a ShardedLoader of things that cannot be     (ValueError)
    ├── LoaderStateError           …a state of other shards                     (ValueError)
    ├── DatasetChangedError        …a dataset with another length in an epoch   (RuntimeError)
    ├── WorkerLostError            …a worker process that died                  (RuntimeError)
    ├── ShareError                 shards among ranks that cannot be            (ValueError)
    ├── HookStateError             a hook whose state does not fit              (ValueError)
    ├── CodecSettingError          a codec that cannot be                       (ValueError)
    ├── CodecMismatchError         ranks want different codecs                  (RuntimeError)
    ├── CodecStateError            a codec's state that does not fit            (RuntimeError)
    ├── ShardAccountError          not each shard of a step was computed once   (RuntimeError)
    ├── StepMismatchError          ranks differ in what a step depends on       (RuntimeError)
    ├── NonFiniteGradientError     a rank has a NaN in what would be averaged   (FloatingPointError)
    ├── ScatterError              gradients that cannot be cut into stretches  (ValueError)
    ├── OptimizerArgumentError     a bad argument of an optimizer of ours       (ValueError)
    │   ├── OptimizerTypeError     …of a wrong type                             (TypeError)
    │   └── OptimizerStateError    …or one that it cannot use now               (RuntimeError)
    ├── AveragingArgumentError     a bad argument of something that averages    (ValueError)
    │   ├── AveragingTypeError     …of a wrong type                             (TypeError)
    │   └── UnsupportedParametersError  …where torch raises NotImplementedError
    ├── RoundsMismatchError        ranks' LocalSGD or DiLoCo do not go together (RuntimeError)
    ├── RoundsStateError           a state dict of another LocalSGD or DiLoCo   (ValueError)
    ├── HookRefusedError           a module's hook that a graph cannot honour   (RuntimeError)
    ├── HookResultError            …or that returned what it cannot use         (RuntimeError)
    ├── NotCapturedError           a step that cannot be one CUDA graph         (RuntimeError)
    ├── NotPlannedError            a schedule that cannot be foreseen           (RuntimeError)
    ├── MembershipError            a process that cannot be a member of its job (RuntimeError)
    │   ├── JobEndedError          …since the job is over for all
    │   ├── MeetingTimeoutError    …others did not come to decide who goes on   (TimeoutError)
    │   └── KeeperLostError        …it does not reach who keeps the list        (ConnectionError)
    ├── KeeperTakenError           a second keeper where there is one           (RuntimeError)
    ├── LaunchError                ranks cannot be started as asked             (RuntimeError)
    │   ├── LaunchCountError       …as many as were asked for
    │   ├── PortTakenError         …where their port is taken
    │   ├── KeyFileError           …where the key file of the job is no good
    │   ├── StoreUrlError          …where --store is no etcd that can be used
    │   ├── StoreUnreachableError  …or this host did not reach it in its time
    │   └── HostLeftBehindError    …or the job ended while this host was cut off
    ├── StrangerError              who answered is no part of the job           (ConnectionError)
    ├── StoreLostError             the store of several hosts does not answer   (ConnectionError)
    ├── StoreAnswerError           …or is none                                  (ConnectionError)
    ├── TermOverError              a keeper that may not decide any more        (RuntimeError)
    ├── RecorderArgumentError      a setting the recorder cannot take           (ValueError)
    ├── JobArgumentError           an elastic job of things that cannot be      (ValueError)
    ├── JobStateError              …whose state does not fit this rank          (RuntimeError)
    ├── StartMismatchError         …whose ranks were made differently           (RuntimeError)
    ├── StateCopyError             …whose state arrived with other bits         (RuntimeError)
    ├── ReplicasDifferError        …whose ranks differ, without a majority      (RuntimeError)
    ├── DamagedSaveError           …of whose saves none is whole                (RuntimeError)
    ├── RunMissingError            no recorded run at this path                 (FileNotFoundError)
    ├── DamagedLogError            a rank's log that cannot be read             (ValueError)
    ├── LogVersionError            …or that another version wrote               (ValueError)
    ├── IntegrationMissingError    a library that is not installed              (ImportError)
    ├── UnsupportedTorchError      a torch that is too old, or far too new      (ImportError)
    ├── BucketPhaseError           a bug of ours in the life of a bucket        (RuntimeError)
    ├── PassStateError             a bug of ours in the life of a pass          (RuntimeError)
    └── RanksFailedError           ranks started by paceline.testing failed     (RuntimeError)

In brackets the builtin that ``except`` lines of old scripts look for; some inherit a second one.
The fields hold the facts, so that code need not read prose, and they survive pickling.
"""

from .base import ExplainedError, PacelineError
from .cli import LaunchCountError, LaunchError, PortTakenError
from .compiled import HookRefusedError, HookResultError, NotCapturedError, NotPlannedError
from .data import (
    DatasetChangedError,
    LoaderArgumentError,
    LoaderStateError,
    SamplerStateError,
    ShardArgumentError,
    ShardMismatchError,
    ShardNumberError,
    ShareError,
    WorkerLostError,
)
from .ddp import (
    BucketPhaseError,
    CommHookError,
    GraphChangedError,
    LateGradientError,
    ModelMismatchError,
    ModuleArgumentError,
    ModuleStateError,
    ModuleTypeError,
    NonFiniteGradientError,
    PassStateError,
    PeerError,
    ReplicatedTwiceError,
    ScatterError,
    ShardAccountError,
    StepMismatchError,
    ThawedParameterError,
    UnfinalizedError,
    UnfinishedReductionError,
    UnweighableError,
    WrapperMismatchError,
)
from .doors import KeyFileError, StrangerError
from .elastic import (
    JobEndedError,
    KeeperLostError,
    KeeperTakenError,
    MeetingTimeoutError,
    MembershipError,
)
from .groups import (
    BackendTakenError,
    CodecError,
    CollectiveArgumentError,
    CollectiveTimeoutError,
    CollectiveTypeError,
    DisagreementError,
    EngineUnavailableError,
    ForkedError,
    GarbledMemoryError,
    GroupClosedError,
    GroupError,
    MessageMemoryError,
    MismatchError,
    MonitoredBarrierError,
    NotANumberError,
    OptionValueError,
    PeerDiedError,
    PeerLeftError,
    RanksFailedError,
    RankUnableError,
    RendezvousError,
    UnexpectedOptionError,
    UnknownBackendError,
    UnknownOptionError,
    UnsupportedError,
    WaitTimeoutError,
)
from .hooks import CodecMismatchError, CodecSettingError, CodecStateError, HookStateError
from .integrations import IntegrationMissingError
from .job import (
    DamagedSaveError,
    JobArgumentError,
    JobStateError,
    ReplicasDifferError,
    StartMismatchError,
    StateCopyError,
)
from .join import (
    EarlyTerminationError,
    InputsExhaustedError,
    JoinArgumentError,
    NestedJoinError,
    NotJoinableError,
    PeerDiedUnjoinedError,
    PeerExhaustedError,
    PeerFailedError,
    PeerLeftUnjoinedError,
)
from .optim import (
    AveragingArgumentError,
    AveragingTypeError,
    OptimizerArgumentError,
    OptimizerStateError,
    OptimizerTypeError,
    RoundsMismatchError,
    RoundsStateError,
    UnsupportedParametersError,
)
from .recorder import RecorderArgumentError
from .report import DamagedLogError, LogVersionError, RunMissingError
from .stores import (
    HostLeftBehindError,
    StoreAnswerError,
    StoreLostError,
    StoreUnreachableError,
    StoreUrlError,
    TermOverError,
)
from .versions import UnsupportedTorchError

__all__ = [
    "AveragingArgumentError",
    "AveragingTypeError",
    "BackendTakenError",
    "BucketPhaseError",
    "CodecError",
    "CodecMismatchError",
    "CodecSettingError",
    "CodecStateError",
    "CollectiveArgumentError",
    "CollectiveTimeoutError",
    "CollectiveTypeError",
    "CommHookError",
    "DamagedLogError",
    "DamagedSaveError",
    "DatasetChangedError",
    "DisagreementError",
    "EarlyTerminationError",
    "EngineUnavailableError",
    "ExplainedError",
    "ForkedError",
    "GarbledMemoryError",
    "GraphChangedError",
    "GroupClosedError",
    "GroupError",
    "HookRefusedError",
    "HookResultError",
    "HookStateError",
    "HostLeftBehindError",
    "InputsExhaustedError",
    "IntegrationMissingError",
    "JobArgumentError",
    "JobEndedError",
    "JobStateError",
    "JoinArgumentError",
    "KeeperLostError",
    "KeeperTakenError",
    "KeyFileError",
    "LateGradientError",
    "LaunchCountError",
    "LaunchError",
    "LoaderArgumentError",
    "LoaderStateError",
    "LogVersionError",
    "MeetingTimeoutError",
    "MembershipError",
    "MessageMemoryError",
    "MismatchError",
    "ModelMismatchError",
    "ModuleArgumentError",
    "ModuleStateError",
    "ModuleTypeError",
    "MonitoredBarrierError",
    "NestedJoinError",
    "NonFiniteGradientError",
    "NotANumberError",
    "NotCapturedError",
    "NotJoinableError",
    "NotPlannedError",
    "OptimizerArgumentError",
    "OptimizerStateError",
    "OptimizerTypeError",
    "OptionValueError",
    "PacelineError",
    "PassStateError",
    "PeerDiedError",
    "PeerDiedUnjoinedError",
    "PeerError",
    "PeerExhaustedError",
    "PeerFailedError",
    "PeerLeftError",
    "PeerLeftUnjoinedError",
    "PortTakenError",
    "RankUnableError",
    "RanksFailedError",
    "RecorderArgumentError",
    "RendezvousError",
    "ReplicasDifferError",
    "ReplicatedTwiceError",
    "RoundsMismatchError",
    "RoundsStateError",
    "RunMissingError",
    "SamplerStateError",
    "ScatterError",
    "ShardAccountError",
    "ShardArgumentError",
    "ShardMismatchError",
    "ShardNumberError",
    "ShareError",
    "StartMismatchError",
    "StateCopyError",
    "StepMismatchError",
    "StoreAnswerError",
    "StoreLostError",
    "StoreUnreachableError",
    "StoreUrlError",
    "StrangerError",
    "TermOverError",
    "ThawedParameterError",
    "UnexpectedOptionError",
    "UnfinalizedError",
    "UnfinishedReductionError",
    "UnknownBackendError",
    "UnknownOptionError",
    "UnsupportedError",
    "UnsupportedParametersError",
    "UnsupportedTorchError",
    "UnweighableError",
    "WaitTimeoutError",
    "WorkerLostError",
    "WrapperMismatchError",
]
