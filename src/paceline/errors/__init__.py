"""Every error paceline raises.

::

    PacelineError
    ├── BackendTakenError          a backend name registered twice              (ValueError)
    ├── UnknownBackendError        no backend of this name                      (ValueError)
    ├── UnexpectedOptionError      an option that a backend does not accept     (TypeError)
    ├── UnknownOptionError         the same, where torch raises KeyError        (KeyError)
    ├── EngineUnavailableError     a backend that cannot work here              (RuntimeError)
    │   └── RankUnableError        …on one of the ranks; all raise it
    ├── OptionValueError           an option with an invalid value              (ValueError)
    ├── RendezvousError            the ranks could not find each other          (RuntimeError)
    │   └── DisagreementError      …or have different settings
    ├── CollectiveArgumentError    a bad argument, noticed before sending       (ValueError)
    │   └── CollectiveTypeError    …of the wrong type                           (TypeError)
    ├── UnsupportedError           not supported by this engine                 (RuntimeError)
    ├── ExplainedError             an error whose cause the recorder looks up
    │   ├── MismatchError          ranks called different collectives           (RuntimeError)
    │   └── GroupError             a call of a group failed                     (RuntimeError)
    │       ├── PeerDiedError          the process of a rank died
    │       │   └── PeerDiedUnjoinedError  …and it had not joined
    │       ├── PeerLeftError          a rank shut its group down, or aborted it
    │       │   └── PeerLeftUnjoinedError  …and it had not joined
    │       ├── CollectiveTimeoutError a rank did not come in time              (TimeoutError)
    │       │   └── MonitoredBarrierError  …to a monitored barrier
    │       └── GroupClosedError       this rank shut the group down, or aborted it
    │           └── ForkedError        a forked child used a group of its parent
    ├── NotANumberError            a NaN in the input of a collective           (RuntimeError)
    ├── WaitTimeoutError           Work.wait(timeout) timed out                 (TimeoutError)
    ├── CodecError                 an object that cannot be sent, or bad bytes  (TypeError)
    ├── ModuleArgumentError        a bad argument of DistributedDataParallel    (ValueError)
    │   ├── ModuleStateError       …a module that it cannot wrap                (RuntimeError)
    │   └── ModuleTypeError        …of the wrong type                           (TypeError)
    ├── ModelMismatchError         ranks have different models                  (RuntimeError)
    ├── WrapperMismatchError       ranks wrap them with different arguments     (RuntimeError)
    ├── ReplicatedTwiceError       a module is already replicated               (AssertionError)
    ├── PeerError                  another rank failed in this pass             (RuntimeError)
    ├── CommHookError              a communication hook returned a wrong value  (RuntimeError)
    ├── UnfinishedReductionError   a pass left parameters out (strict)          (RuntimeError)
    │   └── GraphChangedError      a static graph that changed
    ├── LateGradientError          a gradient after its bucket was sent         (RuntimeError)
    ├── ThawedParameterError       a parameter unfrozen inside a forward        (RuntimeError)
    ├── UnfinalizedError           a step before finalize_backward()            (RuntimeError)
    ├── UnweighableError           a weighted loss that is not from an output   (RuntimeError)
    ├── MixedPassesError           passes with and without a weight, on others  (RuntimeError)
    ├── JoinArgumentError          joinables that cannot be combined            (ValueError)
    ├── NotJoinableError           a Joinable without its constructor           (TypeError)
    ├── NestedJoinError            a Join inside another on the same group      (RuntimeError)
    ├── EarlyTerminationError      a rank has run out of inputs; all raise      (RuntimeError)
    │   ├── InputsExhaustedError       …this one
    │   └── PeerExhaustedError         …another one
    ├── PeerFailedError            another rank raised inside Join              (RuntimeError)
    ├── SamplerStateError          the state of another sampler                 (ValueError)
    ├── ShardMismatchError         tensors of a metric that cannot be combined  (ValueError)
    ├── ShardArgumentError         an invalid value for a metric                (ValueError)
    ├── ShardNumberError           invalid numbers of a shard                   (ValueError)
    ├── LoaderArgumentError        a bad argument of ShardedLoader              (ValueError)
    ├── LoaderStateError           …the state of another loader                 (ValueError)
    ├── DatasetChangedError        …a dataset that changed during an epoch      (RuntimeError)
    ├── WorkerLostError            …a worker process that died                  (RuntimeError)
    ├── ShareError                 shards cannot be divided among these ranks   (ValueError)
    ├── HookStateError             invalid settings or state of a hook          (ValueError)
    ├── CodecSettingError          an invalid setting of a codec                (ValueError)
    ├── CodecMismatchError         ranks use different codecs                   (RuntimeError)
    ├── CodecStateError            an invalid state of a codec hook             (RuntimeError)
    ├── ShardAccountError          a shard was computed twice or not at all     (RuntimeError)
    ├── StepMismatchError          ranks differ in what a step depends on       (RuntimeError)
    ├── NonFiniteGradientError     a rank has a NaN in its gradients            (FloatingPointError)
    ├── ScatterError               gradients cannot be divided among ranks      (ValueError)
    ├── OptimizerArgumentError     a bad argument of an optimizer               (ValueError)
    │   ├── OptimizerTypeError     …of the wrong type                           (TypeError)
    │   └── OptimizerStateError    …or one that it cannot use now               (RuntimeError)
    ├── AveragingArgumentError     a bad argument of LocalSGD, DiLoCo, …        (ValueError)
    │   ├── AveragingTypeError     …of the wrong type                           (TypeError)
    │   └── UnsupportedParametersError  …where torch raises NotImplementedError
    ├── RoundsMismatchError        ranks have different LocalSGD or DiLoCo      (RuntimeError)
    ├── RoundsStateError           a state dict of another LocalSGD or DiLoCo   (ValueError)
    ├── HookRefusedError           a module's hook that a graph cannot call     (RuntimeError)
    ├── HookResultError            …or that returned a wrong number of values   (RuntimeError)
    ├── NotCapturedError           a step that cannot be one CUDA graph         (RuntimeError)
    ├── NotPlannedError            a schedule that cannot be read               (RuntimeError)
    ├── MembershipError            a process cannot be a member of its job      (RuntimeError)
    │   ├── JobEndedError          …because the job has ended
    │   ├── MeetingTimeoutError    …because members did not come in time        (TimeoutError)
    │   └── KeeperLostError        …because it cannot reach the keeper          (ConnectionError)
    ├── KeeperTakenError           another keeper already runs                  (RuntimeError)
    ├── LaunchError                ranks could not be started as requested      (RuntimeError)
    │   ├── LaunchCountError       …another number than requested
    │   ├── PortTakenError         …because the port is in use
    │   ├── KeyFileError           …because the key file cannot be used
    │   ├── StoreUrlError          …because --store is not a usable etcd
    │   ├── StoreUnreachableError  …because this host could not reach the store
    │   └── HostLeftBehindError    …because the job ended while this host was cut off
    ├── StrangerError              a connection that is not of this job         (ConnectionError)
    ├── StoreLostError             the store of several hosts does not answer   (ConnectionError)
    ├── StoreAnswerError           …or gives an invalid answer                  (ConnectionError)
    ├── TermOverError              a keeper that may no longer decide           (RuntimeError)
    ├── RecorderArgumentError      an invalid setting of the recorder           (ValueError)
    ├── JobArgumentError           a bad argument of an elastic job             (ValueError)
    ├── JobStateError              …whose state does not match this rank        (RuntimeError)
    ├── StartMismatchError         …whose ranks have different arguments        (RuntimeError)
    ├── StateCopyError             …whose state arrived with wrong bits         (RuntimeError)
    ├── ReplicasDifferError        …whose ranks differ, without a majority      (RuntimeError)
    ├── DamagedSaveError           …whose saves are all damaged                 (RuntimeError)
    ├── RunMissingError            no recorded run at this path                 (FileNotFoundError)
    ├── DamagedLogError            the log of a rank cannot be read             (ValueError)
    ├── LogVersionError            …or was written by another version           (ValueError)
    ├── IntegrationMissingError    a library that is not installed              (ImportError)
    ├── UnsupportedTorchError      torch is too old, or too new to import       (ImportError)
    ├── BucketPhaseError           a bug in paceline, in a bucket               (RuntimeError)
    ├── PassStateError             a bug in paceline, in a pass                 (RuntimeError)
    └── RanksFailedError           ranks started by paceline.testing failed     (RuntimeError)

In parentheses: the builtin exception that the error also inherits, as torch raises it; some inherit
a second one. Fields hold the facts, so that code need not parse the message. Errors can be pickled.
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
    MixedPassesError,
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
    AllocationSizeError,
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
    "AllocationSizeError",
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
    "MixedPassesError",
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
