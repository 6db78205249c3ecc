"""Errors of wrapped models and of the reducer beneath."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .base import PacelineError, ranks_named, some_of


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
class ReplicatedTwiceError(PacelineError, AssertionError, ValueError):
    """``replicate`` was called on a module that is replicated already."""

    module: str  # its class

    def __str__(self) -> str:
        return (
            "Each distinct composable distributed API can only be applied to a module once. "
            f"replicate has already been applied to this {self.module}; it stays replicated as it "
            "is. Other ranks that were told the same raise this too."
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
            "Build the model in the same way everywhere: parameters are matched by their order."
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
            "Give the same on every rank."
        )


@dataclass(eq=False)
class ShardAccountError(PacelineError, RuntimeError):
    """The ranks have not computed each shard of a step exactly once."""

    rank: int
    shards: int
    missing: Sequence[int]  # nobody computed them
    twice: Mapping[int, Sequence[int]]  # by shard: the ranks that computed it

    def __str__(self) -> str:
        found = [f"shard {shard} by nobody" for shard in self.missing]
        found += [f"shard {shard} by {ranks_named(r)}" for shard, r in self.twice.items()]
        return (
            f"rank {self.rank}: each of the {self.shards} shards of a step is computed once, by "
            f"one rank; in this one: {some_of(found)}. There is no average, and every rank raises "
            "this; the step's gradients were dropped. Share shards out by the same rule on every "
            "rank: paceline.data.share_out, or ShardedLoader."
        )


@dataclass(eq=False)
class StepMismatchError(PacelineError, RuntimeError):
    """The ranks differ in something that a step's result depends on."""

    rank: int
    what: str
    said: Mapping[int, str]  # by rank

    def __str__(self) -> str:
        found = [f"rank {rank} has {value}" for rank, value in self.said.items()]
        remedy = {
            "step": "Ranks do the same steps of the same data; resume all of them from one place.",
            "number of threads": "Give every rank as many: torch.set_num_threads, OMP_NUM_THREADS.",
            "optimizer settings": "Change the learning rate and the like on every rank alike.",
            "number of backward passes": "Call backward equally often in every shard.",
        }.get(self.what, "Freeze and thaw the same parameters on every rank.")
        differs = "differ" if self.what.endswith("parameters") else "differs"
        return (
            f"rank {self.rank}: {self.what} {differs} between "
            f"ranks: {some_of(found, '; ')}. Results would depend on who computed which shard. "
            f"There is no average, and every rank raises this. {remedy}"
        )


@dataclass(eq=False)
class NonFiniteGradientError(PacelineError, FloatingPointError):
    """A rank has an infinity or a NaN in what a step would average. Every rank raises it."""

    rank: int
    found: Mapping[int, Sequence[str]]  # names of parameters and buffers, by rank

    def __str__(self) -> str:
        who = [f"rank {rank} in {some_of(list(names))}" for rank, names in self.found.items()]
        return (
            f"rank {self.rank}: infinities or NaNs in gradients: {some_of(who, '; ')}. The step "
            "was not committed on any rank: weights are those of the step before. Look at the "
            'data and the loss of that rank; with a gradient scaler, pass nonfinite="allow".'
        )


@dataclass(eq=False)
class PeerError(PacelineError, RuntimeError):
    """Another rank failed while this one worked with it, and said why."""

    rank: int
    messages: Mapping[int, str]  # what the ranks that failed said
    when: str = "in this pass"

    def __str__(self) -> str:
        said = "\n".join(f"rank {rank} said: {text}" for rank, text in self.messages.items())
        who = ranks_named(list(self.messages)) if self.messages else "another rank"
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
            f"with static_graph set to True. Rank {self.rank}: {some_of(self.names)}. "
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
            f"Rank {self.rank}: {some_of(self.names)} got another gradient after the bucket had "
            "been sent. Use torch.utils.checkpoint with use_reentrant=False."
        )


@dataclass(eq=False)
class UnfinalizedError(PacelineError, RuntimeError):
    """Something came before the averages that a program waits for itself were there."""

    rank: int
    what: str  # that came too early
    names: Sequence[str] = ()  # of parameters whose averages it is about to use

    def __str__(self) -> str:
        early = f"rank {self.rank}: {self.what} came before finalize_backward()"
        if self.names:
            early += f", and would have used what is no average, for {some_of(self.names)}"
        return (
            f"{early}. Expected to have finalized the prior backward pass before starting a new "
            "one. Call finalize_backward() after backward() when "
            "require_manual_backward_finalization is true. Nothing was changed: the averages are "
            "still to be had, and the other ranks do not wait until their next pass."
        )


@dataclass(eq=False)
class UnweighableError(PacelineError, RuntimeError):
    """A weighted backward pass came to a parameter before it came to an output of the model."""

    rank: int

    def __str__(self) -> str:
        return (
            f"rank {self.rank}: this backward pass has a weight, and its loss does not come from "
            "what the model's forward returned, so its gradients cannot be told from those that "
            "were there before. Return from forward what the loss is made of."
        )


@dataclass(eq=False)
class ThawedParameterError(PacelineError, RuntimeError):
    """A parameter was thawed inside a forward that began without it."""

    rank: int
    parameter: str

    def __str__(self) -> str:
        return (
            f"rank {self.rank}: a gradient came to {self.parameter}, which was frozen when the "
            "forward began and is trained now, so no bucket has a place for it. It was not "
            "averaged, and the other ranks raise the same or wait for this one. Thaw it before "
            "the forward, or call ddp.reducer.prepare_for_backward([]) after thawing it."
        )


@dataclass(eq=False)
class ScatterError(PacelineError, ValueError):
    """A model whose gradients cannot be cut into stretches."""

    rank: int
    parameters: Sequence[str]

    def __str__(self) -> str:
        return (
            f"rank {self.rank}: gradients of {some_of(self.parameters)} cannot be cut into "
            "stretches: they are sparse, or parts of DTensors, or averaged by "
            "delay_all_reduce_named_params. No rank has changed anything. Leave out ddp=, so "
            "that gradients are averaged whole."
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
class PassStateError(PacelineError, RuntimeError):
    """A pass was moved to a state that cannot follow; only a bug of paceline's can do that."""

    needed: str
    found: str

    def __str__(self) -> str:
        return f"a pass is {self.found}, and {self.needed} cannot follow"
