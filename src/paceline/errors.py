"""Every error paceline raises.

::

    PacelineError
    ├── BackendTakenError          a backend name registered twice              (ValueError)
    ├── UnknownBackendError        a backend name nobody registered             (ValueError)
    ├── UnexpectedOptionError      an option its backend does not read          (TypeError)
    ├── UnknownOptionError         the same, where torch raises KeyError        (KeyError)
    ├── EngineUnavailableError     a backend that cannot work here              (RuntimeError)
    ├── RendezvousError            the ranks could not find each other          (RuntimeError)
    ├── CollectiveArgumentError    a bad argument, noticed before sending       (ValueError)
    │   └── CollectiveTypeError    …of a wrong type                             (TypeError)
    ├── MismatchError              ranks called different things                (RuntimeError)
    ├── UnsupportedError           something this engine does not do            (RuntimeError)
    ├── GroupError                 the group cannot go on                       (RuntimeError)
    │   ├── PeerDiedError          a rank's process is gone
    │   │   └── PeerDiedUnjoinedError  …and it had not joined
    │   ├── PeerLeftError          a rank shut its group down, or aborted it
    │   │   └── PeerLeftUnjoinedError  …and it had not joined
    │   ├── CollectiveTimeoutError a rank did not come in time                  (TimeoutError)
    │   │   └── MonitoredBarrierError  …to a monitored barrier
    │   └── GroupClosedError       this rank shut the group down, or aborted it
    ├── WaitTimeoutError           a work was not done when wait() gave up      (TimeoutError)
    ├── CodecError                 an object it cannot carry, or bad bytes      (TypeError)
    ├── ModuleArgumentError        a bad argument of DistributedDataParallel    (ValueError)
    │   ├── ModuleStateError       …a module that it cannot wrap                (RuntimeError)
    │   └── ModuleTypeError        …of a wrong type                             (TypeError)
    ├── ModelMismatchError         ranks have different models                  (RuntimeError)
    ├── PeerError                  another rank failed and said why             (RuntimeError)
    ├── CommHookError              a communication hook returned nonsense       (RuntimeError)
    ├── UnfinishedReductionError   a pass left parameters out (strict)          (RuntimeError)
    │   └── GraphChangedError      a static graph that changed
    ├── LateGradientError          a gradient after its bucket had left         (RuntimeError)
    ├── UnweighableError           a weighed pass that cannot be told apart     (RuntimeError)
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
    ├── BucketPhaseError           a bug of ours in the life of a bucket        (RuntimeError)
    └── RanksFailedError           ranks started by paceline.testing failed     (RuntimeError)

In brackets the builtin that ``except`` lines of old scripts look for; some inherit a second one.
The fields hold the facts, so that code need not read prose, and they survive pickling.
"""

from __future__ import annotations

import copyreg
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = [
    "BackendTakenError",
    "BucketPhaseError",
    "CodecError",
    "CollectiveArgumentError",
    "CollectiveTimeoutError",
    "CollectiveTypeError",
    "CommHookError",
    "EarlyTerminationError",
    "EngineUnavailableError",
    "GraphChangedError",
    "GroupClosedError",
    "GroupError",
    "InputsExhaustedError",
    "JoinArgumentError",
    "LateGradientError",
    "MismatchError",
    "ModelMismatchError",
    "ModuleArgumentError",
    "ModuleStateError",
    "ModuleTypeError",
    "MonitoredBarrierError",
    "NestedJoinError",
    "NotJoinableError",
    "PacelineError",
    "PeerDiedError",
    "PeerDiedUnjoinedError",
    "PeerError",
    "PeerExhaustedError",
    "PeerFailedError",
    "PeerLeftError",
    "PeerLeftUnjoinedError",
    "RanksFailedError",
    "RendezvousError",
    "SamplerStateError",
    "ShardArgumentError",
    "ShardMismatchError",
    "UnexpectedOptionError",
    "UnfinishedReductionError",
    "UnknownBackendError",
    "UnknownOptionError",
    "UnsupportedError",
    "UnweighableError",
    "WaitTimeoutError",
]


def _ranks(ranks: Sequence[int]) -> str:
    numbers = ", ".join(map(str, ranks))
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"


class PacelineError(Exception):
    """Base of all our errors. Subclasses are dataclasses: fields hold facts, __str__ tells them."""

    def __reduce__(self) -> tuple[object, ...]:
        return copyreg.__newobj__, (type(self),), vars(self)  # type: ignore[attr-defined]


@dataclass(eq=False)
class BackendTakenError(PacelineError, ValueError):
    """A backend name was registered twice."""

    name: str

    def __str__(self) -> str:
        return f"Backend {self.name} already registered. Choose another name for yours."


@dataclass(eq=False)
class UnknownBackendError(PacelineError, ValueError):
    """A backend was asked for that nobody registered."""

    name: str
    known: Sequence[str]

    def __str__(self) -> str:
        return (
            f"Backend {self.name} not registered. Known here: {', '.join(self.known)}. "
            "Offer one with paceline.register_backend, or install the package that has it "
            "(entry-point group 'paceline.backends')."
        )


@dataclass(eq=False)
class UnexpectedOptionError(PacelineError, TypeError, AssertionError):
    """A backend was given an option it does not read."""

    backend: str
    options: Sequence[str]
    known: Sequence[str] = ()

    def __str__(self) -> str:
        known = f"It reads {', '.join(self.known)}." if self.known else "It reads none."
        return (
            f"{self.backend.capitalize()} backend received unexpected kwargs "
            f"{', '.join(self.options)}. {known}"
        )


@dataclass(eq=False)
class UnknownOptionError(PacelineError, KeyError):
    """The NCCL backend was given an option that its Options object lacks."""

    backend: str
    option: str

    def __str__(self) -> str:
        return (
            f"Unknown option {self.option} for {self.backend}. "
            "Its options are the attributes of torch.distributed.ProcessGroupNCCL.Options."
        )


@dataclass(eq=False)
class EngineUnavailableError(PacelineError, RuntimeError):
    """A backend was asked for that cannot work on this machine or with these ranks."""

    backend: str
    reason: str
    rank: int | None = None

    def __str__(self) -> str:
        where = "" if self.rank is None else f"rank {self.rank}: "
        return (
            f"{where}the {self.backend} backend cannot be used here: {self.reason}. "
            "backend='auto' picks one that can; paceline.groups.capabilities() lists them."
        )


@dataclass(eq=False)
class RendezvousError(PacelineError, RuntimeError, ValueError):
    """The ranks of a group could not find each other."""

    reason: str
    remedy: str
    rank: int | None = None

    def __str__(self) -> str:
        where = "" if self.rank is None else f"rank {self.rank}: "
        return f"{where}{self.reason}. {self.remedy}"


@dataclass(eq=False)
class CollectiveArgumentError(PacelineError, ValueError, RuntimeError):
    """A collective was called with an argument it cannot take; nothing was sent."""

    rank: int
    operation: str
    argument: str
    expected: str
    found: str

    def __str__(self) -> str:
        return (
            f"rank {self.rank}: {self.operation}: {self.argument}: expected {self.expected}, "
            f"got {self.found}. Nothing was sent; the other ranks wait until this rank calls again."
        )


class CollectiveTypeError(CollectiveArgumentError, TypeError):
    """An argument of a collective has a type it cannot have; nothing was sent."""


@dataclass(eq=False)
class MismatchError(PacelineError, RuntimeError):
    """Two ranks called different operations, or the same one with different sizes or types.

    Every rank of the group raises it and nothing was reduced or received. The group stays usable.
    """

    rank: int
    sequence: int
    rank_a: int
    call_a: str
    rank_b: int
    call_b: str

    def __str__(self) -> str:
        return (
            f"rank {self.rank}: operation {self.sequence} of the group differs between ranks: "
            f"rank {self.rank_a} called {self.call_a}, rank {self.rank_b} called {self.call_b}. "
            "Every rank must make the same calls in the same order with matching sizes and dtypes."
        )


@dataclass(eq=False)
class UnsupportedError(PacelineError, NotImplementedError):
    """An engine was asked for something it does not do."""

    backend: str
    what: str
    remedy: str
    rank: int | None = None

    def __str__(self) -> str:
        where = "" if self.rank is None else f"rank {self.rank}: "
        return f"{where}the {self.backend} backend does not support {self.what}. {self.remedy}"


@dataclass(eq=False)
class GroupError(PacelineError, RuntimeError):
    """The group cannot go on: what it was doing on this rank, and whose fault it was."""

    rank: int
    operation: str
    sequence: int
    ranks: Sequence[int]

    def _here(self) -> str:
        return f"rank {self.rank}: {self.operation} (operation {self.sequence} of the group)"


@dataclass(eq=False)
class PeerDiedError(GroupError):
    """A rank's process is gone while this rank waited for it."""

    reporter: int = -1

    def __str__(self) -> str:
        by = "" if self.reporter in (-1, self.rank) else f" (noticed by rank {self.reporter})"
        return (
            f"{self._here()} failed: {_ranks(self.ranks)} died{by}. "
            "The group is over on all ranks; look at the output of the dead process, "
            "and make a new group of the survivors with Group.reconfigure."
        )


@dataclass(eq=False)
class PeerLeftError(GroupError):
    """A rank shut the group down, or aborted it, while this rank still needed it."""

    aborted: bool = False

    def __str__(self) -> str:
        did = "aborted the group" if self.aborted else "had already left the group"
        return (
            f"{self._here()} failed: {_ranks(self.ranks)} {did}. "
            "The group is over; ranks that still have work must not outlast the others."
        )


@dataclass(eq=False)
class CollectiveTimeoutError(GroupError, TimeoutError):
    """A rank did not arrive within the call's timeout."""

    seconds: float = 0.0
    reporter: int = -1
    behind: Sequence[str] = field(default_factory=tuple)

    def __str__(self) -> str:
        if self.reporter not in (-1, self.rank):
            what = f"rank {self.reporter} gave up waiting for {_ranks(self.ranks)}"
        else:
            what = f"timed out after {self.seconds:g} s waiting for {_ranks(self.ranks)}"
        seen = f" Last seen: {'; '.join(self.behind)}." if self.behind else ""
        after = (
            "The group goes on." if self.operation == "recv" else "The group is over on all ranks."
        )
        return (
            f"{self._here()}: {what}.{seen} {after} "
            "If the rank is only slow, give the call or the group a longer timeout."
        )


class MonitoredBarrierError(CollectiveTimeoutError):
    """Ranks did not come to a monitored barrier in time."""

    def __str__(self) -> str:
        who = _ranks(self.ranks).capitalize()
        return (
            f"rank {self.rank}: {who} failed to pass monitoredBarrier "
            f"in {self.seconds * 1000:g} ms. "
            "The ranks that came can go on; look at where the missing ones are."
        )


@dataclass(eq=False)
class GroupClosedError(GroupError):
    """The group was shut down or aborted on this rank."""

    aborted: bool = False

    def __str__(self) -> str:
        did = "aborted" if self.aborted else "shut down"
        return f"{self._here()} failed: this group was {did} on this rank. Make a new group."


@dataclass(eq=False)
class WaitTimeoutError(PacelineError, TimeoutError, RuntimeError):
    """``Work.wait(timeout)`` gave up; the work itself goes on and can be waited for again."""

    seconds: float

    def __str__(self) -> str:
        return (
            f"Wait timeout: not done after {self.seconds:g} s. The collective goes on, and its "
            "tensors belong to it; wait again, or abort the group."
        )


@dataclass(eq=False)
class CodecError(PacelineError, TypeError, ValueError):
    """An object that the codec does not carry, or bytes that are not of its making."""

    what: str
    remedy: str = (
        "It carries None, numbers, strings, bytes, lists, tuples, dicts, sets and tensors; "
        "turn the object into those, or use torch.distributed's object collectives, which pickle."
    )

    def __str__(self) -> str:
        return f"{self.what}. {self.remedy}"


@dataclass(eq=False)
class RanksFailedError(PacelineError, RuntimeError):
    """Ranks that paceline.testing started failed; the first to fail comes first."""

    failures: Sequence[tuple[int, str]]
    size: int

    def __str__(self) -> str:
        parts = [f"rank {rank} of {self.size}:\n{text.rstrip()}" for rank, text in self.failures]
        return "\n\n".join(parts)


@dataclass(eq=False)
class ModuleArgumentError(PacelineError, ValueError):
    """DistributedDataParallel was given something it cannot work with."""

    problem: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.problem} {self.remedy}".strip()


class ModuleStateError(ModuleArgumentError, RuntimeError):
    """DistributedDataParallel was asked for something its module, or its state, does not allow."""


class ModuleTypeError(ModuleArgumentError, TypeError):
    """DistributedDataParallel was given an object of a wrong type."""


@dataclass(eq=False)
class ModelMismatchError(PacelineError, RuntimeError):
    """The ranks of a group have different models."""

    rank: int
    other: int
    differences: Sequence[str]  # what rank 0 has and what ``other`` has, first difference first

    def __str__(self) -> str:
        return (
            f"rank {self.rank}: DDP expects same model across all ranks, but rank {self.other} "
            f"differs from rank 0: {_some(self.differences, '; ')}. Every rank raises this. "
            "Build the model in the same way everywhere: parameters are matched by their order."
        )


@dataclass(eq=False)
class PeerError(PacelineError, RuntimeError):
    """Another rank failed while this one worked with it, and said why."""

    rank: int
    messages: Mapping[int, str]  # what the ranks that failed said
    when: str = "in this pass"

    def __str__(self) -> str:
        said = "\n".join(f"rank {rank} said: {text}" for rank, text in self.messages.items())
        who = _ranks(list(self.messages)) if self.messages else "another rank"
        return (
            f"rank {self.rank}: {who} failed {self.when}, so there is no average. The gradients "
            f"of this pass were dropped; the group can go on if all ranks do.\n{said}"
        ).strip()


@dataclass(eq=False)
class CommHookError(PacelineError, RuntimeError):
    """A communication hook did not return what it must."""

    got: str
    expected: str = "a torch.futures.Future"

    def __str__(self) -> str:
        if self.expected != "a torch.futures.Future":
            return (
                f"communication hook: expected its future to hold {self.expected}, got {self.got}"
            )
        return f"callback must return a torch.futures.Future object, but got {self.got}"


@dataclass(eq=False)
class UnfinishedReductionError(PacelineError, RuntimeError):
    """A pass ended without gradients for some parameters, where torch would not have it."""

    rank: int
    indices: Sequence[int]
    names: Sequence[str]  # empty unless the debug level asks for names

    def __str__(self) -> str:
        return (
            "Expected to have finished reduction in the prior iteration before starting a new one. "
            "This error indicates that your module has parameters that were not used in producing "
            "loss. You can enable unused parameter detection by passing the keyword argument "
            "`find_unused_parameters=True` to `torch.nn.parallel.DistributedDataParallel`, and by "
            "making sure all `forward` function outputs participate in calculating loss.\n"
            + self._which()
        )

    def _which(self) -> str:
        indices = " ".join(map(str, self.indices))
        text = f"Parameter indices which did not receive grad for rank {self.rank}: {indices}"
        if self.names:
            names = ", ".join(self.names)
            return f"Parameters which did not receive grad for rank {self.rank}: {names}\n{text}"
        return (
            f"{text}\n In addition, you can set the environment variable TORCH_DISTRIBUTED_DEBUG "
            "to either INFO or DETAIL to print out information about which particular parameters "
            "did not receive gradient on this rank as part of this error"
        )


@dataclass(eq=False)
class GraphChangedError(UnfinishedReductionError):
    """A graph that was promised to be static has changed."""

    prior: bool = False  # told when the next pass begins

    def __str__(self) -> str:
        if self.prior:
            return (
                "Expected to have finished reduction in the prior iteration before starting a new "
                "one. This error indicates that your training graph has changed in this iteration, "
                "e.g., one parameter is used in first iteration, but then got unused in the second "
                "iteration. this is not compatible with static_graph set to True.\n" + self._which()
            )
        return (
            "Your training graph has changed in this iteration, e.g., one parameter is unused in "
            "first iteration, but then got used in the second iteration. this is not compatible "
            f"with static_graph set to True. Rank {self.rank}: {_some(self.names)}. "
            "Leave static_graph out: changing graphs need no flag."
        )


@dataclass(eq=False)
class LateGradientError(PacelineError, RuntimeError):
    """A gradient came after its bucket had left, where ranks cannot stop to exchange it."""

    rank: int
    names: Sequence[str]

    def __str__(self) -> str:
        return (
            "Expected to mark a variable ready only once. "
            f"Rank {self.rank}: {_some(self.names)} got another gradient after the bucket had "
            "been sent. Use torch.utils.checkpoint with use_reentrant=False."
        )


@dataclass(eq=False)
class UnweighableError(PacelineError, RuntimeError):
    """A weighed backward pass came to a parameter before it came to an output of the model."""

    rank: int

    def __str__(self) -> str:
        return (
            f"rank {self.rank}: this backward pass has a weight, and its loss does not come from "
            "what the model's forward returned, so its gradients cannot be told from those that "
            "were there before. Return from forward what the loss is made of."
        )


@dataclass(eq=False)
class BucketPhaseError(PacelineError, RuntimeError):
    """A bucket was used out of turn; only a bug of paceline's can do that."""

    bucket: int
    needed: str
    found: str

    def __str__(self) -> str:
        return f"bucket {self.bucket} is {self.found}, and must be {self.needed}"


@dataclass(eq=False)
class SamplerStateError(PacelineError, ValueError):
    """A sampler was given a state that belongs to another row of samples."""

    field: str
    saved: object
    here: object

    def __str__(self) -> str:
        return (
            f"the sampler's state was saved with {self.field}={self.saved!r}, and this one has "
            f"{self.here!r}: a position in one row of samples means nothing in another. "
            "Make the sampler as it was when the state was saved, or start the epoch afresh."
        )


@dataclass(eq=False)
class ShardMismatchError(PacelineError, ValueError):
    """Two ranks' shards do not fit together; every rank raises it."""

    rank: int
    rank_a: int
    shard_a: str
    rank_b: int
    shard_b: str

    def __str__(self) -> str:
        return (
            f"rank {self.rank}: rank {self.rank_a} called {self.shard_a}, and rank {self.rank_b} "
            f"{self.shard_b}. Nothing was reduced, and every rank raises this. Shards may differ "
            "in the number of rows only; an empty one is torch.empty(0, ...) with the dtype and "
            "the other dimensions of the rest."
        )


@dataclass(eq=False)
class ShardArgumentError(PacelineError, ValueError, TypeError):
    """A rank gave something that is no shard; every rank raises it."""

    rank: int
    operation: str
    culprit: int
    problem: str

    def __str__(self) -> str:
        return (
            f"rank {self.rank}: {self.operation}: rank {self.culprit} gave {self.problem}. "
            "Nothing was reduced, and every rank raises this."
        )


@dataclass(eq=False)
class JoinArgumentError(PacelineError, ValueError):
    """A Join context was made of things that do not go together."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}. {self.remedy}"


@dataclass(eq=False)
class NotJoinableError(PacelineError, TypeError, AssertionError):
    """An object told the Join context of a step without having called Joinable's constructor."""

    kind: str

    def __str__(self) -> str:
        return (
            f"Check that the {self.kind} constructor calls the ``Joinable`` constructor: "
            "the object does not know which Join context it is in. Nothing was sent."
        )


@dataclass(eq=False)
class NestedJoinError(PacelineError, RuntimeError):
    """A Join context was entered inside another one on the same group or the same objects."""

    rank: int
    shared: str

    def __str__(self) -> str:
        return (
            f"rank {self.rank}: this Join context is inside another one with the same "
            f"{self.shared}. A rank that runs out in the outer one could not stand in for what the "
            "others do in the inner one. Give all joinables to one Join, or end the outer one."
        )


class EarlyTerminationError(PacelineError, RuntimeError):
    """A rank ran out of inputs, and the Join context was told to raise everywhere then."""


@dataclass(eq=False)
class InputsExhaustedError(EarlyTerminationError):
    """This rank ran out of inputs before others did."""

    rank: int
    step: int

    def __str__(self) -> str:
        return (
            f"Rank {self.rank} exhausted all inputs. The ranks that have more raise as well, "
            "since throw_on_early_termination=True."
        )


@dataclass(eq=False)
class PeerExhaustedError(EarlyTerminationError):
    """Another rank ran out of inputs."""

    rank: int
    step: int

    def __str__(self) -> str:
        return (
            "Detected at least one rank that exhausted inputs. Throwing across all ranks. "
            f"Rank {self.rank} was about to begin step {self.step}; it would go on without "
            "throw_on_early_termination=True."
        )


@dataclass(eq=False)
class PeerFailedError(PacelineError, RuntimeError):
    """Another rank raised an exception inside the Join context."""

    rank: int
    peers: Sequence[int]
    step: int
    message: str

    def __str__(self) -> str:
        several = f" (and so did rank {', '.join(map(str, self.peers[1:]))})"
        others = several if len(self.peers) > 1 else ""
        return (
            f"rank {self.rank}: rank {self.peers[0]} failed inside the Join context"
            f"{_at(self.step)}{others}: {self.message}. This rank has left the context too, with "
            "the step unfinished; that rank's own traceback says more."
        )


@dataclass(eq=False)
class PeerDiedUnjoinedError(PeerDiedError):
    """A rank's process is gone, and it had not joined."""

    step: int = 0

    def __str__(self) -> str:
        return f"{super().__str__()} {_unjoined(self.step)}"


@dataclass(eq=False)
class PeerLeftUnjoinedError(PeerLeftError):
    """A rank left the group, and it had not joined."""

    step: int = 0

    def __str__(self) -> str:
        return f"{super().__str__()} {_unjoined(self.step)}"


def _at(step: int) -> str:
    """Tell the step, counted from one; joinables of torch's count none."""
    return f" in step {step}" if step else ""


def _unjoined(step: int) -> str:
    return f"It had not joined: the others were inside a Join context{_at(step)}."


def _some(names: Sequence[str], separator: str = ", ") -> str:
    more = f"{separator}… ({len(names)} in all)" if len(names) > 5 else ""
    return separator.join(list(names)[:5]) + more


# -- averaging of parameters: averagers, LocalSGD, DiLoCo


@dataclass(eq=False)
class AveragingArgumentError(PacelineError, ValueError):
    """An averager, LocalSGD or DiLoCo was given something it cannot work with."""

    problem: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.problem} {self.remedy}".strip()


class AveragingTypeError(AveragingArgumentError, TypeError):
    """The same, of a wrong type."""


class UnsupportedParametersError(AveragingArgumentError, NotImplementedError):
    """The same, where torch raises NotImplementedError."""


@dataclass(eq=False)
class RoundsMismatchError(PacelineError, RuntimeError):
    """Ranks made a LocalSGD or DiLoCo that do not go together."""

    rank: int
    peer: int
    fact: str
    own: object
    others: object

    def __str__(self) -> str:
        return (
            f"rank {self.rank}: {self.fact} is {self.own} here and {self.others} on rank "
            f"{self.peer}. The ranks would exchange different things at different steps, so every "
            "rank refuses. Make it with the same model and the same arguments on all of them."
        )


@dataclass(eq=False)
class RoundsStateError(PacelineError, ValueError):
    """A state dict that this LocalSGD or DiLoCo cannot go on from."""

    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.problem} Nothing was loaded. {self.remedy}"


# -- gradients in shards ------------------------------------------------------------------------


@dataclass(eq=False)
class ShardingError(PacelineError, ValueError):
    """A model whose gradients cannot be cut into shards."""

    rank: int
    parameters: Sequence[str]

    def __str__(self) -> str:
        return (
            f"rank {self.rank}: gradients of {_some(self.parameters)} cannot be cut into shards: "
            "they are sparse, or parts of DTensors, or averaged by delay_all_reduce_named_params. "
            "No rank has changed anything. Leave out ddp=, so that gradients are averaged whole."
        )


# -- sharded optimizers ---------------------------------------------------------------------------


@dataclass(eq=False)
class OptimizerArgumentError(PacelineError, ValueError):
    """A sharded optimizer, or what goes with it, was given something it cannot work with."""

    problem: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.problem} {self.remedy}".strip()


class OptimizerTypeError(OptimizerArgumentError, TypeError):
    """A sharded optimizer was given an object of a wrong type."""


class OptimizerStateError(OptimizerArgumentError, RuntimeError):
    """A sharded optimizer was asked for something it cannot do now."""


# -- codecs ---------------------------------------------------------------------------------------


@dataclass(eq=False)
class CodecSettingError(PacelineError, ValueError):
    """A codec, or a hook that uses one, was given something it cannot work with."""

    found: str
    expected: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.found}: needs that {self.expected}. {self.remedy}".strip()


@dataclass(eq=False)
class CodecMismatchError(PacelineError, RuntimeError):
    """Ranks want to encode gradients in different ways."""

    rank: int
    wanted: Sequence[str]  # by each rank

    def __str__(self) -> str:
        said = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(self.wanted))
        return (
            f"rank {self.rank}: ranks do not agree on how gradients are encoded ({said}). "
            "Every rank raises this, and the codec in use stays. Give all ranks the same codec and "
            "settings, and change them on all ranks at the same step."
        )


@dataclass(eq=False)
class CodecStateError(PacelineError, RuntimeError, ValueError):
    """A codec hook cannot do this now, or cannot go on from this state."""

    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.problem} {self.remedy}"


# -- communication hooks -------------------------------------------------------------------------


@dataclass(eq=False)
class HookStateError(PacelineError, ValueError):
    """A communication hook was given settings or a state that it cannot work with."""

    problem: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.problem} {self.remedy}".strip()


# -- compiled -------------------------------------------------------------------------------------


@dataclass(eq=False)
class HookRefusedError(PacelineError, RuntimeError):
    """A traced backward pass would not call these hooks."""

    hooks: Sequence[str]

    def __str__(self) -> str:
        return (
            f"{len(self.hooks)} hooks would be lost in compiled code: {'; '.join(self.hooks)}. "
            "Nothing was compiled. Remove them, or run this model in eager mode; full backward "
            "hooks of modules can be kept with paceline.compiled.keep_hooks."
        )


@dataclass(eq=False)
class HookResultError(PacelineError, RuntimeError):
    """A module's backward hook returned another number of gradients than it was given."""

    module: str
    hook: str
    given: int
    returned: int

    def __str__(self) -> str:
        return (
            f"a {self.hook} of {self.module} was given {self.given} gradients and returned "
            f"{self.returned}. The other ranks now wait for this one. Return one for each, or None."
        )


@dataclass(eq=False)
class NotPlannedError(PacelineError, RuntimeError):
    """A step's schedule cannot be read."""

    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.problem} {self.remedy}"
