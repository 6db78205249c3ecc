"""Rounds: ranks train alone and exchange what they have learned every so many steps.

What :class:`LocalSGD` and :class:`DiLoCo` have in common. ``schedule.py`` decides *when*: which
fragment of the model begins its exchange after which step. ``pieces.py`` and ``exchange.py`` decide
*what* goes over the wire. Here is the optimizer around it, which steps the one inside and does what
is due.

**Weights.** In an exchange a rank counts by ``step(samples=...)``, summed over its steps since the
last exchange of the same fragment; a step counts 1 unless it says otherwise. So samples count alike
when each step is given its number of samples.

**Join.** A rank that has run out takes part in the exchanges that follow: in the first one with the
weight of the steps it still did, from then on with weight 0, and it takes the outcome like every
other rank. When all have run out, what is left is exchanged as by :meth:`Rounds.sync`, so all ranks
leave with the same model. Alone in a Join it costs no collective: whether anybody goes on is said
in the exchanges themselves, and a rank that fails is heard of there too.
"""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from ..._exchange import Standing, local_values
from ..._torch import foreach
from ...errors import AveragingArgumentError, PeerError, RoundsMismatchError, RoundsStateError
from ...groups import Group
from ...join import Join, Joinable, JoinHook
from ..wrapping import Closure, Wrapping
from .fragment import Fragment, FragmentPhase
from .schedule import RoundSchedule


class Rounds(Wrapping, Joinable):
    """An optimizer that steps on each rank alone, and synchronizes models between some steps.

    All ranks create it with the same arguments, and start from the parameters and buffers of rank
    0. All ranks call :meth:`step` equally often, except inside Join.

    A step that ``torch.amp.GradScaler`` skips because of infinite gradients still counts as a step,
    with weight 0, so that ranks stay in step if only some of them skip it.
    """

    _step_supports_amp_scaling = True  # GradScaler lets step() decide; ranks may differ

    def __init__(
        self,
        optim: Optimizer,
        schedule: RoundSchedule,
        fragments: Sequence[Fragment],
        process_group: ProcessGroup,
        group: Group,
    ) -> None:
        Wrapping.__init__(self, optim)
        Joinable.__init__(self)
        self.process_group = process_group
        self.schedule = schedule
        self.steps = 0  # so far, those stood in for included
        self._group = group
        self._fragments = tuple(fragments)
        self._failure = ""  # why this rank leaves a Join, for the others

    # -- training -----------------------------------------------------------------------------

    def step(self, closure: Closure = None, *, samples: float = 1.0) -> Any:
        """Step the inner optimizer, and synchronize if it is due.

        ``samples`` is the weight of this step, such as the number of samples in its batch.
        """
        _check_samples(samples)
        Join.notify_join_context(self)
        if self._overflowed():
            self._advance(0.0)
            return None
        loss = self.optim.step(closure)
        self._advance(float(samples))
        return loss

    def sync(self) -> None:
        """Synchronize now, before the round has ended; all ranks call it.

        The model is then the same on all ranks: use it before an evaluation, or at the end. It
        raises inside Join.
        """
        if self._join_config.enable:
            raise AveragingArgumentError(
                f"rank {self._group.rank()}: sync() inside Join. Ranks that have run out would not "
                "take part, and the others would wait for them.",
                "Call it after the context, which ends with a sync() of its own.",
            )
        self._sync()

    def _sync(self) -> None:
        for fragment in self._fragments:
            self._finish(fragment)
        for fragment in self._fragments:
            fragment.start(self.steps)
        for fragment in self._fragments:
            self._finish(fragment, now=True)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model to the inner optimizer."""
        given = param_group["params"]
        check_known([given] if isinstance(given, Tensor) else given, self._tensors(), type(self))
        self.optim.add_param_group(param_group)

    @abstractmethod
    def _take(self, fragment: Fragment, *, useful: bool, now: bool) -> None:
        """Use the outcome of an exchange; ``now``: and let nothing of this rank's remain."""

    def _advance(self, weight: float, *, active: bool = True, failed: bool = False) -> None:
        """A step is done; do what is due after it."""
        self.steps += 1
        for fragment in self._fragments:
            fragment.weight += weight
        starting, ending = self.schedule.starting(self.steps), self.schedule.ending(self.steps)
        if ending is not None and self.schedule.overlap:
            self._finish(self._fragments[ending])
        if starting is not None:
            self._fragments[starting].start(self.steps, active=active, failed=failed)
            if not self.schedule.overlap:
                self._finish(self._fragments[starting])
        if any(fragment.phase is FragmentPhase.IN_FLIGHT for fragment in self._fragments):
            self._group.progress()

    def _finish(self, fragment: Fragment, *, now: bool = False) -> None:
        if fragment.phase is not FragmentPhase.IN_FLIGHT:
            return
        standing = fragment.wait()
        fragment.phase = FragmentPhase.LOCAL
        if standing.failed:
            raise self._told()
        self._take(fragment, useful=standing.weight != 0, now=now)

    def _overflowed(self) -> bool:
        """Whether a GradScaler found this step's gradients infinite; unscales them if not."""
        found = getattr(self, "found_inf", None)
        if found is None:
            return False
        scale = getattr(self, "grad_scale", None)
        if scale is not None and not found.item():
            grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
            foreach.div_(grads, float(scale.item()))
        return bool(found.item())

    def _tensors(self) -> list[Tensor]:
        return [tensor for f in self._fragments for p in f.pieces for tensor in p.tensors]

    # -- beginning ----------------------------------------------------------------------------

    def _begin(self, facts: dict[str, object]) -> None:
        """See that the ranks agree, and give them all rank 0's model."""
        facts = {"the kind of optimizer": type(self).__name__, **vars(self.schedule), **facts}
        tensors = self._tensors()
        facts["the number of parameters and buffers"] = len(tensors)
        for number, tensor in enumerate(tensors):
            facts[f"the shape of parameter {number}"] = f"{list(tensor.shape)} of {tensor.dtype}"
        _agree(self._group, facts)
        for fragment in self._fragments:
            for piece in fragment.pieces:
                piece.broadcast()

    # -- joining ------------------------------------------------------------------------------

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook of a rank that has run out of inputs."""
        return RoundsJoinHook(self)

    def _stand_in(self, *, failed: bool = False) -> Standing:
        """Go on without inputs to the next exchange, and wait for it; how the ranks stood in it."""
        starting = None
        while starting is None:
            self._advance(0.0, active=False, failed=failed)
            starting = self.schedule.starting(self.steps)
        return self._fragments[starting].wait()

    def _leave(self, failure: str) -> None:
        """Tell the others in the next exchange that this rank fails."""
        self._failure = failure
        with suppress(PeerError):  # which the others raise now
            self._stand_in(failed=True)
            self._hear()

    def _hear(self) -> NoReturn:
        """A rank has failed, which all hear at the step where the outcome is due."""
        while True:
            self._advance(0.0, active=False)

    def _told(self) -> PeerError:
        """All ranks are here; ask who failed, and why."""
        said = self._group.all_gather_object(self._failure)
        self._failure = ""
        messages = {rank: str(text) for rank, text in enumerate(said) if text}
        return PeerError(self._group.rank(), messages, "inside Join")

    @property
    def join_device(self) -> torch.device:
        """The device of the first parameter."""
        return local_values(self._fragments[0].pieces[0].tensors[0]).device

    @property
    def join_process_group(self) -> ProcessGroup:
        """The group over which models are synchronized."""
        return self.process_group

    # -- checkpoints --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the inner optimizer, and under ``rounds`` that of the round.

        It waits for communication that is running, but does not apply its result early: training
        continues as if nothing had been saved. Save the parameters with the model. Between
        synchronizations parameters, weights, the inner state and the error feedback of a codec
        differ between ranks; the rest is the same on all ranks.
        """
        flying = [f for f in self._fragments if f.phase is FragmentPhase.IN_FLIGHT]
        rounds = {
            "kind": type(self).__name__,
            "steps": self.steps,
            "weights": [f.weight for f in self._fragments],
            "since": [f.since for f in self._fragments],
            "in_flight": {self._fragments.index(f): f.means() for f in flying},
            "exchanges": [[p.exchange.state_dict() for p in f.pieces] for f in self._fragments],
        }
        return {**self.optim.state_dict(), "rounds": {**rounds, **self._own_state()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict, saved with any number of ranks; load the model first.

        The state dict of a plain optimizer also works: a new round then starts from the model.
        """
        rounds = state_dict.get("rounds")
        if rounds is not None:
            self._check_state(rounds)
        self.optim.load_state_dict(state_dict)
        for fragment in self._fragments:
            fragment.wait()
            fragment.phase = FragmentPhase.LOCAL
        if rounds is None:
            warnings.warn(
                "The state dict has no rounds: it was saved by another optimizer. "
                "A round begins here.",
                stacklevel=2,
            )
            rounds = {"steps": 0}
        self.steps = rounds["steps"]
        self._load_fragments(rounds)
        self._load_own(rounds)

    def _own_state(self) -> dict[str, Any]:
        return {}

    def _load_own(self, rounds: dict[str, Any]) -> None:
        """Load what a subclass has added."""

    def _check_state(self, rounds: dict[str, Any]) -> None:
        kind = type(self).__name__
        if rounds["kind"] != kind:
            raise RoundsStateError(
                f"The state dict was saved by {rounds['kind']}, and this is {kind}.",
                "Remove its entry 'rounds' to begin a round from the current model.",
            )
        for number, means in rounds["in_flight"].items():
            pieces = self._fragments[number].pieces if number < len(self._fragments) else ()
            sizes = [len(mean) for mean in means or ()]
            if means is not None and sizes != [p.values.numel() for p in pieces]:
                raise RoundsStateError(
                    f"The state dict was saved while fragment {number} was being exchanged, and "
                    f"this {kind} divides the model in another way.",
                    "Use the same fragments and buffer sizes, or save right after sync().",
                )

    def _load_fragments(self, rounds: dict[str, Any]) -> None:
        same = len(rounds.get("weights", ())) == len(self._fragments)
        for number, fragment in enumerate(self._fragments):
            fragment.weight = rounds["weights"][number] if same else 0.0
            fragment.since = rounds["since"][number] if same else self.steps
            if same:
                for piece, state in zip(fragment.pieces, rounds["exchanges"][number], strict=False):
                    piece.exchange.load_state_dict(state)
        for number, means in rounds.get("in_flight", {}).items():
            fragment = self._fragments[number]
            fragment.phase = FragmentPhase.IN_FLIGHT
            for index, piece in enumerate(fragment.pieces):
                piece.arrive(None if means is None else means[index])


class RoundsJoinHook(JoinHook):
    """What a rank that has run out does for its :class:`Rounds`."""

    speaks_for_itself = True  # alone in a Join, it needs no announcements

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds

    def stand_in(self) -> bool:
        """Take part in the next exchange, whenever it comes; False when all have run out."""
        standing = self._rounds._stand_in()
        if standing.failed:
            self._rounds._hear()
        return standing.active > 0

    def fail(self, error: BaseException) -> None:
        """This rank leaves with an error: let the others know."""
        self._rounds._leave(f"{type(error).__name__} inside Join: {error}")

    def main_hook(self) -> None:
        """With other joinables, or in torch's Join: a step without inputs."""
        self._rounds._advance(0.0)

    def post_hook(self, is_last_joiner: bool) -> None:
        """All have run out: exchange what is left."""
        self._rounds._sync()


def check_known(given: Sequence[Tensor], known: Sequence[Tensor], owner: type[Wrapping]) -> None:
    """Refuse parameters that would be stepped and never exchanged."""
    ids = {id(tensor) for tensor in known}
    strange = [t for t in given if t.requires_grad and id(t) not in ids]
    if strange:
        raise AveragingArgumentError(
            f"{owner.__name__}: the optimizer steps {len(strange)} parameters, the first of shape "
            f"{list(strange[0].shape)}, that are not among those to be exchanged, so they would "
            "diverge between ranks.",
            "Give the model, or all parameters of the optimizer.",
        )


def _check_samples(count: float) -> None:
    if not (math.isfinite(count) and count >= 0):
        raise AveragingArgumentError(f"samples: expected a number, 0 or more, got {count}.")


def _agree(group: Group, facts: dict[str, object]) -> None:
    """Raise on every rank if any two were given different things."""
    for peer, theirs in enumerate(group.all_gather_object(facts)):
        assert isinstance(theirs, dict)
        for fact, own in facts.items():
            if theirs.get(fact) != own:
                raise RoundsMismatchError(group.rank(), peer, fact, own, theirs.get(fact))
