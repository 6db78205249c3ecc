"""Errors of wrapped models and of the reducer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .base import PacelineError, ranks_named, some_of


@dataclass(eq=False)
class ModuleArgumentError(PacelineError, ValueError):
    """DistributedDataParallel was given an invalid argument."""

    problem: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.problem} {self.remedy}".strip()


class ModuleStateError(ModuleArgumentError, RuntimeError):
    """The module, or the state of the wrapper, does not allow this."""


class ModuleTypeError(ModuleArgumentError, TypeError):
    """DistributedDataParallel was given an object of the wrong type."""


@dataclass(eq=False)
class ReplicatedTwiceError(PacelineError, AssertionError, ValueError):
    """``replicate`` was called on a module that is already replicated."""

    module: str  # its class

    def __str__(self) -> str:
        return (
            "Each distinct composable distributed API can only be applied to a module once. "
            f"replicate has already been applied to this {self.module}, which stays replicated as "
            "before. Other ranks that call it twice raise this too. Call it once."
        )


@dataclass(eq=False)
class ModelMismatchError(PacelineError, RuntimeError):
    """The ranks of a group have different models."""

    rank: int
    other: int
    differences: Sequence[str]  # what rank 0 has and what ``other`` has, first difference first

    def __str__(self) -> str:
        return (
            f"rank {self.rank}: DDP expects same model across all ranks, but rank {self.other} "
            f"differs from rank 0: {some_of(self.differences, '; ')}. Every rank raises this. "
            "Build the same model on every rank: parameters are matched by their order."
        )


@dataclass(eq=False)
class WrapperMismatchError(PacelineError, RuntimeError):
    """The ranks of a group wrap their models with different arguments."""

    rank: int
    other: int
    arguments: Mapping[str, str]  # by name: what rank 0 gave and what ``other`` gave

    def __str__(self) -> str:
        given = [f"{name} is {what}" for name, what in self.arguments.items()]
        return (
            f"rank {self.rank}: the arguments of DistributedDataParallel differ between ranks: "
            f"{some_of(given, '; ')}. They decide what is sent, and when. Every rank raises this. "
            "Pass the same arguments on every rank."
        )


@dataclass(eq=False)
class ShardAccountError(PacelineError, RuntimeError):
    """The ranks have not computed each shard of a step exactly once."""

    rank: int
    shards: int
    missing: Sequence[int]  # nobody computed them
    twice: Mapping[int, Sequence[int]]  # by shard: the ranks that computed it

    def __str__(self) -> str:
        found = [f"shard {shard} by no rank" for shard in self.missing]
        found += [f"shard {shard} by {ranks_named(r)}" for shard, r in self.twice.items()]
        return (
            f"rank {self.rank}: each of the {self.shards} shards of a step must be computed once, "
            f"by one rank, but this step computed {some_of(found)}. Every rank raises this, and "
            "the gradients of the step were dropped. Assign shards by the same rule on every "
            "rank: paceline.data.share_out, or ShardedLoader."
        )


@dataclass(eq=False)
class StepMismatchError(PacelineError, RuntimeError):
    """The ranks differ in something that the result of a step depends on."""

    rank: int
    what: str
    said: Mapping[int, str]  # by rank

    def __str__(self) -> str:
        found = [f"rank {rank} has {value}" for rank, value in self.said.items()]
        remedy = {
            "step": "Resume all ranks from the same checkpoint.",
            "number of threads": "Use the same number on every rank (OMP_NUM_THREADS).",
            "optimizer settings": "Change the learning rate and so on in the same way everywhere.",
            "number of backward passes": "Call backward the same number of times in every shard.",
        }.get(self.what, "Freeze and unfreeze the same parameters on every rank.")
        differs = "differ" if self.what.endswith("parameters") else "differs"
        return (
            f"rank {self.rank}: {self.what} {differs} between "
            f"ranks: {some_of(found, '; ')}. Results would depend on which rank computes which "
            f"shard, so every rank raises this, and gradients were not averaged. {remedy}"
        )


@dataclass(eq=False)
class NonFiniteGradientError(PacelineError, FloatingPointError):
    """A rank has an infinity or a NaN in its gradients or buffers. Every rank raises it."""

    rank: int
    found: Mapping[int, Sequence[str]]  # names of parameters and buffers, by rank

    def __str__(self) -> str:
        who = [f"rank {rank} in {some_of(list(names))}" for rank, names in self.found.items()]
        return (
            f"rank {self.rank}: infinities or NaNs in gradients: {some_of(who, '; ')}. The step "
            "was not committed on any rank: weights are those of the step before. Check the "
            'data and the loss of that rank; with a gradient scaler, pass nonfinite="allow".'
        )


@dataclass(eq=False)
class PeerError(PacelineError, RuntimeError):
    """Another rank failed in this pass; its message is included."""

    rank: int
    messages: Mapping[int, str]  # by rank that failed
    when: str = "in this pass"

    def __str__(self) -> str:
        said = "\n".join(f"rank {rank}: {text}" for rank, text in self.messages.items())
        who = ranks_named(list(self.messages)) if self.messages else "another rank"
        return (
            f"rank {self.rank}: {who} failed {self.when}, so gradients were not averaged. The "
            "gradients of this pass were dropped; the group stays usable if all ranks catch "
            f"this.\n{said}"
        ).strip()


@dataclass(eq=False)
class CommHookError(PacelineError, RuntimeError):
    """A communication hook returned something invalid."""

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
    """A pass ended without gradients for some parameters, which torch does not allow."""

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
    """The graph changed although ``static_graph=True``."""

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
            f"with static_graph set to True. Rank {self.rank}: {some_of(self.names)}. "
            "Leave static_graph out: changing graphs need no flag."
        )


@dataclass(eq=False)
class LateGradientError(PacelineError, RuntimeError):
    """A gradient arrived after its bucket was sent and can no longer be averaged."""

    rank: int
    names: Sequence[str]

    def __str__(self) -> str:
        return (
            "Expected to mark a variable ready only once. "
            f"Rank {self.rank}: {some_of(self.names)} got another gradient after the bucket had "
            "been sent. Use torch.utils.checkpoint with use_reentrant=False."
        )


@dataclass(eq=False)
class UnfinalizedError(PacelineError, RuntimeError):
    """Something was called before ``finalize_backward()``."""

    rank: int
    what: str  # that came too early
    names: Sequence[str] = ()  # of parameters whose averages it is about to use

    def __str__(self) -> str:
        early = f"rank {self.rank}: {self.what} came before finalize_backward()"
        if self.names:
            early += f" and would have used gradients that are not averaged: {some_of(self.names)}"
        return (
            f"{early}. Expected to have finalized the prior backward pass before starting a new "
            "one. Call finalize_backward() after backward() when "
            "require_manual_backward_finalization is true. Nothing was changed: it still gives "
            "the averages, and the other ranks wait only in their next pass."
        )


@dataclass(eq=False)
class UnweighableError(PacelineError, RuntimeError):
    """The loss of a weighted pass was not computed from an output of the model."""

    rank: int

    def __str__(self) -> str:
        return (
            f"rank {self.rank}: this backward pass has a weight, but its loss was not computed "
            "from the output of the model's forward, so its gradients cannot be told from older "
            "ones. The other ranks wait for this one. Return everything from forward that the "
            "loss is computed from."
        )


@dataclass(eq=False)
class MixedPassesError(PacelineError, RuntimeError):
    """A weighted pass follows passes without a weight that were added to older gradients."""

    rank: int

    def __str__(self) -> str:
        return (
            f"rank {self.rank}: ddp.samples() was called for the first time, after backward passes "
            "without it that were not averaged yet. They were added to gradients that .grad held "
            "before, and cannot be told from them any more, but older gradients count differently. "
            "Call ddp.samples() for every pass of the step, or clear gradients before the step "
            "with zero_grad(set_to_none=True)."
        )


@dataclass(eq=False)
class ThawedParameterError(PacelineError, RuntimeError):
    """A parameter was unfrozen inside a forward."""

    rank: int
    parameter: str

    def __str__(self) -> str:
        return (
            f"rank {self.rank}: {self.parameter} got a gradient, but it was frozen when the "
            "forward began, so no bucket has a slot for it. It was not averaged, and the other "
            "ranks raise the same error or wait for this one. Unfreeze it before the forward, or "
            "call ddp.reducer.prepare_for_backward([]) after unfreezing it."
        )


@dataclass(eq=False)
class ScatterError(PacelineError, ValueError):
    """Gradients of a model cannot be divided among ranks."""

    rank: int
    parameters: Sequence[str]

    def __str__(self) -> str:
        return (
            f"rank {self.rank}: gradients of {some_of(self.parameters)} cannot be divided among "
            "ranks: they are sparse, or parts of DTensors, or averaged by "
            "delay_all_reduce_named_params. Nothing was changed on any rank. Remove ddp=; then "
            "every rank gets all averages."
        )


@dataclass(eq=False)
class BucketPhaseError(PacelineError, RuntimeError):
    """A bucket was used in the wrong phase; this is a bug in paceline."""

    bucket: int
    needed: str
    found: str

    def __str__(self) -> str:
        return (
            f"bucket {self.bucket} is {self.found}, but must be {self.needed}. This is a bug in "
            "paceline; please report it with the script."
        )


@dataclass(eq=False)
class PassStateError(PacelineError, RuntimeError):
    """A pass was moved to an invalid state; this is a bug in paceline."""

    needed: str
    found: str

    def __str__(self) -> str:
        return (
            f"a pass is {self.found}, and {self.needed} cannot follow. This is a bug in paceline; "
            "please report it with the script."
        )
