"""Errors of groups, their backends and the transport."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .base import ExplainedError, PacelineError, ranks_named


@dataclass(eq=False)
class BackendTakenError(PacelineError, ValueError):
    """A backend name was registered twice."""

    name: str

    def __str__(self) -> str:
        return f"Backend {self.name} already registered. Choose another name for yours."


@dataclass(eq=False)
class UnknownBackendError(PacelineError, ValueError):
    """No backend is registered under this name."""

    name: str
    known: Sequence[str]
    variable: str = ""  # of the environment, that has the name

    def __str__(self) -> str:
        if self.variable:
            return (
                f"{self.variable} is {self.name!r}, which is not one of the backends that it can "
                f"select. Set it to one of {', '.join(self.known)}, or unset it."
            )
        return (
            f"Backend {self.name} not registered. Registered backends: {', '.join(self.known)}. "
            "Register it with paceline.register_backend, or install the package that provides it "
            "(entry-point group 'paceline.backends')."
        )


@dataclass(eq=False)
class UnexpectedOptionError(PacelineError, TypeError, AssertionError):
    """A backend was given an unknown option."""

    backend: str
    options: Sequence[str]
    known: Sequence[str] = ()

    def __str__(self) -> str:
        known = f"It accepts {', '.join(self.known)}." if self.known else "It accepts none."
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
    """A backend cannot work on this host or with these ranks."""

    backend: str
    reason: str
    rank: int | None = None

    def __str__(self) -> str:
        where = "" if self.rank is None else f"rank {self.rank}: "
        return (
            f"{where}the {self.backend} backend cannot be used here: {self.reason}. Use "
            "backend='auto', or another one; paceline.groups.capabilities() lists them."
        )


@dataclass(eq=False)
class RankUnableError(EngineUnavailableError):
    """A backend cannot work on one of the ranks. Every rank raises it."""

    culprit: int = -1

    def __str__(self) -> str:
        where = "" if self.rank is None else f"rank {self.rank}: "
        return (
            f"{where}the {self.backend} backend cannot be used, because it does not work on rank "
            f"{self.culprit}: {self.reason}. No rank has opened the group. "
            "Raise the limit there, or use backend='auto', which picks another backend."
        )


@dataclass(eq=False)
class OptionValueError(PacelineError, ValueError):
    """An option of a backend has an invalid value."""

    backend: str
    option: str
    found: str
    expected: str
    rank: int | None = None

    def __str__(self) -> str:
        where = "" if self.rank is None else f"rank {self.rank}: "
        return (
            f"{where}the {self.backend} backend: {self.option}: expected {self.expected}, "
            f"got {self.found}. No rank has opened the group."
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
class DisagreementError(RendezvousError):
    """The ranks of a group differ in something that must be the same. Every rank raises it."""

    what: str = ""
    values: Mapping[int, str] = field(default_factory=dict)  # by rank

    def __str__(self) -> str:
        told: dict[str, list[int]] = {}
        for rank, value in self.values.items():
            told.setdefault(value, []).append(rank)
        sides = "; ".join(f"{value} on {ranks_named(ranks)}" for value, ranks in told.items())
        return f"{super().__str__()} Found for {self.what}: {sides}."


@dataclass(eq=False)
class CollectiveArgumentError(PacelineError, ValueError, RuntimeError):
    """A collective was called with an invalid argument; nothing was sent."""

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
    """An argument of a collective has the wrong type; nothing was sent."""


_OWN_CALLS = (
    " A wrapped model communicates in its forward and backward passes: run these the same number "
    "of times on every rank, and use the inner module (ddp.module) where ranks differ."
)


@dataclass(eq=False)
class MismatchError(ExplainedError, RuntimeError):
    """Two ranks called different operations, or the same one with different sizes or types.

    Every rank of the group raises it and nothing was reduced or received. The group stays usable.
    """

    rank: int
    sequence: int
    rank_a: int
    call_a: str
    rank_b: int
    call_b: str
    line_a: str = ""  # of the user's code, if the recorder knows it
    line_b: str = ""
    verdict: str = ""  # the recorder's
    purpose_a: str = ""  # why the library made the call, if the user did not
    purpose_b: str = ""

    def __str__(self) -> str:
        told = self._is_told_here()
        at_a = f" at {self.line_a}" if self.line_a else ""
        at_b = f" at {self.line_b}" if self.line_b else ""
        for_a = f" ({self.purpose_a})" if self.purpose_a else ""
        for_b = f" ({self.purpose_b})" if self.purpose_b else ""
        return (
            f"rank {self.rank}: operation {self.sequence} of the group differs between ranks: "
            f"rank {self.rank_a} called {self.call_a}{for_a}{at_a}, "
            f"rank {self.rank_b} called {self.call_b}{for_b}{at_b}. "
            "Every rank must make the same calls in the same order with matching sizes and dtypes."
            f"{_OWN_CALLS if self.purpose_a or self.purpose_b else ''}"
            f"{' ' + self.verdict if self.verdict and told else ''}"
        )


@dataclass(eq=False)
class UnsupportedError(PacelineError, NotImplementedError):
    """An engine does not support an operation."""

    backend: str
    what: str
    remedy: str
    rank: int | None = None

    def __str__(self) -> str:
        where = "" if self.rank is None else f"rank {self.rank}: "
        return f"{where}the {self.backend} backend does not support {self.what}. {self.remedy}"


@dataclass(eq=False)
class NotANumberError(PacelineError, RuntimeError):
    """The input of a collective has a NaN, and ``TORCH_DIST_NAN_CHECK=1`` is set."""

    rank: int
    operation: str
    found: int
    numel: int

    def __str__(self) -> str:
        return (
            f"rank {self.rank}: {self.operation}: NaN found in input tensor, in {self.found} of "
            f"{self.numel} elements. This rank has not started the call, and the others wait for "
            "it until they time out. Find where the NaN comes from, or unset TORCH_DIST_NAN_CHECK."
        )


@dataclass(eq=False)
class GroupError(ExplainedError, RuntimeError):
    """A call of a group failed; usually the group cannot be used any more."""

    rank: int
    operation: str
    sequence: int
    ranks: Sequence[int]
    verdict: str = field(default="", kw_only=True)  # the recorder's: who, at which line

    def _here(self) -> str:
        return f"rank {self.rank}: {self.operation} (operation {self.sequence} of the group)"

    def _explained(self) -> str:
        return f"\npaceline: {self.verdict}" if self._is_told_here() and self.verdict else ""


@dataclass(eq=False)
class PeerDiedError(GroupError):
    """The process of a rank died while this rank waited for it."""

    reporter: int = -1

    def __str__(self) -> str:
        by = "" if self.reporter in (-1, self.rank) else f" (noticed by rank {self.reporter})"
        return (
            f"{self._here()} failed: {ranks_named(self.ranks)} died{by}. "
            "The group has ended on all ranks. See the output of the process that died; "
            "the other ranks can continue with Group.reconfigure or a new group."
            f"{self._explained()}"
        )


@dataclass(eq=False)
class PeerLeftError(GroupError):
    """A rank shut the group down, or aborted it, while this rank still needed it."""

    aborted: bool = False

    def __str__(self) -> str:
        did = "aborted the group" if self.aborted else "had already left the group"
        return (
            f"{self._here()} failed: {ranks_named(self.ranks)} {did}. "
            "The group has ended on all ranks. If no rank raised an error, this rank makes more "
            f"calls than the others.{self._explained()}"
        )


@dataclass(eq=False)
class CollectiveTimeoutError(GroupError, TimeoutError):
    """A rank did not make the call within its timeout."""

    seconds: float = 0.0
    reporter: int = -1
    behind: Sequence[str] = field(default_factory=tuple)

    def __str__(self) -> str:
        if self.reporter not in (-1, self.rank):
            what = f"rank {self.reporter} gave up waiting for {ranks_named(self.ranks)}"
        else:
            what = f"timed out after {self.seconds:g} s waiting for {ranks_named(self.ranks)}"
        seen = f" Last seen: {'; '.join(self.behind)}." if self.behind else ""
        after = (
            "The group stays usable."
            if self.operation == "recv"
            else "The group has ended on all ranks."
        )
        return (
            f"{self._here()}: {what}.{seen} {after} "
            "If the rank is only slow, use a longer timeout for the call or the group."
            f"{self._explained()}"
        )


class MonitoredBarrierError(CollectiveTimeoutError):
    """Ranks did not come to a monitored barrier in time."""

    def __str__(self) -> str:
        who = ranks_named(self.ranks).capitalize()
        return (
            f"rank {self.rank}: {who} failed to pass monitoredBarrier "
            f"in {self.seconds * 1000:g} ms. "
            "The other ranks can continue; check where the missing ones are."
        )


@dataclass(eq=False)
class GroupClosedError(GroupError):
    """The group was shut down or aborted on this rank."""

    aborted: bool = False

    def __str__(self) -> str:
        did = "aborted" if self.aborted else "shut down"
        return f"{self._here()} failed: this group was {did} on this rank. Create a new group."


class ForkedError(GroupClosedError):
    """A forked child used a group of its parent."""

    def __str__(self) -> str:
        return (
            f"{self._here()} failed: this process was forked from rank {self.rank} and is not a "
            "rank of the group; the ranks are not affected. Make the call in the parent, "
            "or create another group in the child with new_group."
        )


@dataclass(eq=False)
class GarbledMemoryError(GroupError):
    """The shared memory of a rank has invalid contents."""

    reporter: int = -1

    def __str__(self) -> str:
        by = "" if self.reporter in (-1, self.rank) else f" (noticed by rank {self.reporter})"
        return (
            f"{self._here()} failed: the shared memory of {ranks_named(self.ranks)} is garbled"
            f"{by}: it has impossible sizes or offsets. The group has ended on all ranks. "
            "Look for code that writes out of bounds, on that rank first, and start again."
            f"{self._explained()}"
        )


class MessageMemoryError(GroupError, MemoryError):
    """This rank has no memory for a message that arrived before its ``recv``."""

    def __str__(self) -> str:
        return (
            f"{self._here()} failed: no memory for a message that arrived before its recv. "
            "The group has ended on all ranks. Receive messages in the order in which they are "
            "sent."
        )


@dataclass(eq=False)
class AllocationSizeError(PacelineError, ValueError, TypeError):
    """``Group.allocate`` was asked for something that is no number of elements."""

    rank: int
    found: str

    def __str__(self) -> str:
        return (
            f"rank {self.rank}: allocate: numel: expected a number of elements, 0 or more, got "
            f"{self.found}. For a shape, allocate its product and view the tensor as the shape."
        )


@dataclass(eq=False)
class WaitTimeoutError(PacelineError, TimeoutError, RuntimeError):
    """``Work.wait(timeout)`` timed out; the work continues and can be waited for again."""

    seconds: float

    def __str__(self) -> str:
        return (
            f"Wait timeout: not done after {self.seconds:g} s. The collective continues and still "
            "uses its tensors; wait again, or abort the group."
        )


@dataclass(eq=False)
class CodecError(PacelineError, TypeError, ValueError):
    """An object that cannot be sent, or bytes that are not an encoded object."""

    what: str
    remedy: str = (
        "Send None, numbers, strings, bytes, lists, tuples, dicts, sets and tensors; "
        "convert the object, or use torch.distributed's object collectives, which pickle."
    )

    def __str__(self) -> str:
        return f"{self.what}. {self.remedy}"


@dataclass(eq=False)
class RanksFailedError(PacelineError, RuntimeError):
    """Ranks started by paceline.testing failed, in the order of failure."""

    failures: Sequence[tuple[int, str]]
    size: int

    def __str__(self) -> str:
        parts = [f"rank {rank} of {self.size}:\n{text.rstrip()}" for rank, text in self.failures]
        return "\n\n".join(parts)
