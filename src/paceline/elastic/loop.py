"""Job: a training loop that goes on when ranks are lost and when others join.

Nothing of a step is kept before it is committed: its averages are complete. When ranks are lost,
those that are left meet (``crew.py``), and then:

- whoever has not committed the step computes it again, with those that are left;
- whoever has not while another has (they differ by one step) gets the state of one that has, and
  so does a newcomer (``handing.py``). Inside a step it is kept until the loop's body is over.

At the first meeting nobody has a state: that of the newest save, or of rank 0, is given to all.

Every rank does the same collectives between two meetings. After a meeting all begin with the next
step: what is done every few steps (``check_every``) is left out then, since a rank that was
interrupted in it cannot know who had done it already.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Literal, NoReturn

import torch
from torch.optim import Optimizer
from typing_extensions import Self

from .._members import NOTHING, HowFar, Members, Roster
from ..data import Shard, ShardedLoader
from ..ddp import DistributedDataParallel, ShardReplica
from ..errors import JobArgumentError, JobStateError, MembershipError, StateCopyError
from .crew import Crew, is_loss
from .endings import EndOnSignal, LeaveNow
from .handing import hand_over
from .replicas import compare_replicas, compare_starts
from .saves import Saves, pinned
from .state import GRADIENT, MODEL, Belongings, JobState, Stateful
from .step import JobStep

log = logging.getLogger(__name__)

_DAYS = 30 * 86_400.0  # seconds that a newcomer waits to be let in
_TRIES = 3  # of one step, with the same members
_MEETINGS = 10  # of the same members, one after the other, behind which they cannot go on


class Job:
    """The training loop that :func:`job` returns."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizers: Iterable[Optimizer],
        loader: ShardedLoader,
        *,
        epochs: int,
        saves: Saves | None,
        save_every: int,
        check_every: int,
        nonfinite: Literal["raise", "allow"],
        members: Members | None,
        timeout: float,
    ) -> None:
        self._replica = _sharded(ddp, loader)
        self._group, self._loader, self._epochs = self._replica.group, loader, epochs
        self._saves, self._save_every, self._check_every = saves, save_every, check_every
        self._finite, self._timeout = nonfinite == "raise", timeout
        rules: dict[str, Any] = {"shards": ddp.shards, "epochs": epochs}
        rules.update(check_every=check_every, nonfinite=nonfinite)
        self._by_itself = not self._group.capabilities.one_process  # no other rank is a thread here
        belongings = (ddp.module, list(optimizers), loader, rules)
        self._belongings = Belongings(*belongings, {}, set(), self._by_itself)
        self._members = members
        self._crew: Crew | None = None
        self.steps = NOTHING
        """How many steps are committed; -1 before the first one begins."""
        self.left = ""
        """Why this rank left before the end, in words; empty if it did not."""
        self._step: JobStep | None = None  # while its shards are computed
        self._why: str | None = ""  # why ranks are to meet; empty: they have agreed to
        self._missed: JobState | None = None  # of a step that others have done
        self._checked = self._saved = NOTHING  # after how many steps
        self._failures: tuple[int, tuple[int, ...], int] = (NOTHING, (), 0)
        self._bad_copies = 0  # that arrived here, since ranks began to meet
        self._signal = EndOnSignal(self._dismiss)
        self._dismissed = ""
        self._over = False

    # -- around the loop ------------------------------------------------------------------------

    def register(self, name: str, thing: Stateful, *, in_shards: bool = True) -> None:
        """Add the state of ``thing`` (a scheduler, a scaler, a metric) to the state of the job.

        Call it before the loop, with the same names on all ranks. If a step has to be computed
        again, its state is restored, so it is copied at the beginning of every step.
        ``in_shards=False`` saves that copy, for objects that change only after the gradients have
        been averaged, such as schedulers.
        """
        if not isinstance(thing, Stateful):
            kind = type(thing).__name__
            raise JobArgumentError(f"register({name!r}): {kind} has no state_dict to load")
        if name in self._belongings.registered or self.steps != NOTHING:
            raise JobArgumentError(f"register({name!r}): twice, or after the loop has begun")
        self._belongings.registered[name] = thing
        if not in_shards:
            self._belongings.unwatched.add(name)

    def __enter__(self) -> Self:
        if self._members is not None:
            self._crew = Crew(self._group, self._members, self._renew)
        self._signal.listen()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._signal.close()
        if self._saves is not None:
            self._saves.wait()
        if self._crew is None:
            return
        if error is not None:
            self._group.abort()
        if not self.left and not isinstance(error, MembershipError):
            self._leave(error)
        self._crew.members.close()
        if error is None and self._over and not self.left and not self.finished and self._by_itself:
            # Whatever comes behind the job, such as a last save, is for those that have its end.
            log.info("the job has ended without this process, which exits")
            raise SystemExit(0)

    def _leave(self, error: BaseException | None) -> None:
        assert self._crew is not None
        if error is not None:  # outside of a step it is this member's own affair
            in_step = self._step is not None
            self._crew.members.leave(f"{type(error).__name__}: {error}", failed=in_step)
        elif self.finished:
            self._crew.members.leave("it has finished", finished=True)
        else:
            self._crew.members.leave("its loop was left")

    @property
    def finished(self) -> bool:
        """Whether all steps of all epochs are committed."""
        at_end = self._loader.epoch == self._epochs - 1 and self._loader.has_ended
        done = self._step is None and (at_end or self._loader.epoch >= self._epochs)
        return done and self.steps != NOTHING

    @property
    def epoch(self) -> int:
        """The epoch of the next step."""
        return self._loader.epoch

    def run(self, step_fn: Callable[[JobStep], object]) -> None:
        """Call ``step_fn`` with each step.

        If a rank is lost in a collective of ``step_fn``, it is called again with the same step.
        """
        for step in self:
            while True:
                try:
                    step_fn(step)
                    break
                except Exception as error:
                    if step.ended or self._crew is None or not is_loss(error):
                        raise
                    why = self._in_words(error)
                self._recover(step, why)

    def __iter__(self) -> Iterator[JobStep]:
        while self._prepare():
            step = JobStep(self, self._loader.next_step(), self.steps)
            self._belongings.remember()
            self._step = step
            yield step
            self._require_end(step)
            self._step = None

    def _require_end(self, step: JobStep) -> None:
        if not step.ended:
            raise JobStateError(
                f"step {step.number} was left before its last shard: loop over all of `step`"
            )

    # -- inside a step --------------------------------------------------------------------------

    def compute(
        self, batches: Iterator[tuple[Shard, Any]], count: int
    ) -> Iterator[tuple[Shard, Any]]:
        """Yield from the ``count`` batches as long as no member of the step is lost."""
        if self._tried(self._replica.begin_step):
            return
        for item in self._replica.taken_from(batches, count):
            if self._crew is not None and self._crew.lost:
                return
            yield item

    def end(self, step: JobStep) -> None:
        """Commit ``step``, or prepare to compute it again."""
        called: list[bool] = []
        why = self._tried(lambda: called.append(self._average()))
        if why:
            return self._recover(step, why)
        self.steps += 1
        step.committed = step.ended = True
        self._why = "" if called[0] else None
        if self._crew is not None:
            self._crew.members.tell(self.steps)
        self._replica.tell_averages()
        return None

    def _average(self) -> bool:
        same = {"optimizer settings": self._belongings.settings}
        if self._replica.passes:
            same["number of backward passes"] = self._replica.passes
        call = self._crew is not None and (self._crew.wants_meeting or bool(self._dismissed))
        return self._replica.end_step(call, same=same, finite=self._finite)

    def _recover(self, step: JobStep, why: str) -> None:
        """Meet those that are left, and have ``step`` done again or missed."""
        log.warning("rank %d: step %d is computed again: %s", self._group.rank(), step.number, why)
        self._replica.give_up()
        self._belongings.undo()
        self._loader.seek(step.epoch, step.place)
        self._count_failure(why)
        self._meet(why)
        self._loader.seek(step.epoch, step.place + 1)
        if self._missed is not None:
            step.ended = True
            for param in self._belongings.module.parameters():
                param.grad = torch.zeros_like(param) if param.requires_grad else None

    def _count_failure(self, why: str) -> None:
        """Raise if a step fails again and again, though nobody is lost."""
        assert self._crew is not None
        members = self._crew.roster.members if self._crew.roster is not None else ()
        steps, before, count = self._failures
        count = count + 1 if (steps, before) == (self.steps, members) else 1
        self._failures = self.steps, members, count
        if count > _TRIES:
            self._fail(f"step {self.steps} failed {count} times with the same members: {why}")

    # -- between two steps ----------------------------------------------------------------------

    def _prepare(self) -> bool:
        """Do what is due before the next step; False if there is none."""
        if self._missed is not None:
            missed, self._missed = self._missed, None
            self._load(missed)
        while not self._over:
            if self._crew is None and self.steps == NOTHING:
                self._begin_alone()
            elif self._crew is not None and self._crew.lost:
                self._part_or_meet(self._crew.lost)
            elif self.finished:
                self._why = self._tried(self._close) or None
                if self._why is None:
                    self._save(final=True)
                    return False
                self._meet(self._why)
            elif self._why is not None or (self._crew is None and self._dismissed):
                self._part_or_meet(self._why or "")
            elif self._is_due(self._check_every, self._checked):
                self._compare()
            else:
                self._save()
                return True
        return False

    def _part_or_meet(self, why: str) -> None:
        dismissed = self._dismissed or (self._crew.dismissed if self._crew is not None else "")
        if self._crew is not None and not dismissed:
            return self._meet(why)
        if not dismissed:
            self._why = None
            return None
        self.left, self._over = dismissed, True
        if self._crew is not None:
            self._crew.members.leave(dismissed)  # first: the others wait for it
        self._save(final=True)
        return None

    def _is_due(self, every: int, last: int) -> bool:
        return every > 0 and self.steps > 0 and self.steps % every == 0 and self.steps != last

    def _close(self) -> None:
        """Leave only when all ranks have done the last step."""
        self._group.all_reduce(torch.zeros(1, device=self._group.device))

    def _save(self, *, final: bool = False) -> None:
        """Save if it is due; one rank does so for all."""
        due = self._is_due(self._save_every, self._saved) or (final and self.steps != self._saved)
        if self._saves is None or not due or self._group.rank() != 0 or self.steps <= 0:
            return
        self._saves.begin(pinned(self._belongings.take(self.steps)))
        self._saved = self.steps
        if final:
            self._saves.wait()

    def _compare(self) -> None:
        self._checked = self.steps
        if self._group.size() > 1:
            why = self._tried(self._compare_replicas)
            if why:
                self._meet(why)

    def _compare_replicas(self) -> None:
        found = compare_replicas(self._group, self._belongings.take(self.steps))
        if found is not None:
            self._hand_over(found.root, wanted=self._group.rank() in found.others)

    # -- meetings -------------------------------------------------------------------------------

    def _meet(self, why: str) -> None:
        """Go on with the members that are there now; all of them have the same state then."""
        assert self._crew is not None
        self._bad_copies = 0
        members, in_vain = tuple[int, ...](), 0
        while True:
            self._why = None
            wait = _DAYS if self.steps == NOTHING else self._timeout
            try:
                with self._signal.at_once(self.steps == NOTHING):
                    roster = self._crew.gather(HowFar(self.steps, True, why), wait)
            except (LeaveNow, MembershipError) as error:
                return self._end_without(error)
            why = self._tried(partial(self._even_out, roster))
            if not why:
                self._checked = self.steps
                return None
            in_vain = in_vain + 1 if roster.members == members else 1
            members = roster.members
            if in_vain >= _MEETINGS:
                self._fail(f"the same members met {in_vain} times and could not go on: {why}")

    def _fail(self, text: str) -> NoReturn:
        """Leave with an error that is not this member's own."""
        assert self._crew is not None
        self._crew.members.leave(text, failed=True)
        raise MembershipError(self._crew.members.me, text)

    def _end_without(self, error: Exception) -> None:
        """There is no further roster with this member: right if it has nothing to do any more."""
        assert self._crew is not None
        if isinstance(error, LeaveNow):
            self.left = self._dismissed
            self._crew.members.leave(self.left)
        elif not self.finished and not getattr(error, "well", False):
            raise error
        self._over = True

    def _even_out(self, roster: Roster) -> None:
        """Give those that have fewer steps than others the state of one that has all."""
        self._missed = None
        if roster.source is None:
            return self._begin_together()
        behind = [r for r, one in enumerate(roster.how_far) if one.steps < roster.steps]
        if behind:
            self._hand_over(roster.source, wanted=self._group.rank() in behind)
        return None

    def _begin_together(self) -> None:
        """Nobody has a state: take the newest save, or that of rank 0."""
        saved = self._saves.newest() if self._saves is not None and self.steps == NOTHING else None
        root = compare_starts(
            self._group, self._belongings, NOTHING if saved is None else saved.steps
        )
        if self._group.rank() == root:
            self._begin(saved)
        self._hand_over(root, wanted=self._group.rank() != root)

    def _begin_alone(self) -> None:
        self._begin(self._saves.newest() if self._saves is not None else None)
        self._why = None

    def _begin(self, saved: JobState | None) -> None:
        if saved is None:
            self.steps = max(self.steps, 0)
        else:
            log.info("continuing after %d steps", saved.steps)
            self._load(saved, of_run=False)
            self._saved = saved.steps

    def _hand_over(self, root: int, *, wanted: bool) -> None:
        mine = self._belongings.take(self.steps) if self._group.rank() == root else None
        try:
            got = hand_over(self._group, root, mine, wanted=wanted)
        except StateCopyError as error:
            self._count_bad_copy(error)
            raise
        if got is not None and self._step is not None:
            self._missed = got
        elif got is not None:
            self._load(got)

    def _count_bad_copy(self, error: StateCopyError) -> None:
        """Leave if a state arrives here with other bits again and again; the others go on."""
        assert self._crew is not None
        self._bad_copies += bool(error.tensors)
        if self._bad_copies > _TRIES:
            me, text = self._crew.members.me, f"{type(error).__name__}: {error}"
            self._crew.members.leave(text)
            raise MembershipError(me, text) from error

    def _load(self, state: JobState, *, of_run: bool = True) -> None:
        self._belongings.put(state, of_run=of_run)
        self.steps = self._checked = state.steps
        _require_same(self._belongings.take(self.steps).digests, state.digests)

    # -- small things ---------------------------------------------------------------------------

    def _renew(self) -> None:
        """The group has other ranks: nothing that was made for the old ones is used again."""
        self._replica.move_to(self._group)

    def _dismiss(self, why: str) -> None:
        self._dismissed = self._dismissed or why

    def _tried(self, action: Callable[[], object]) -> str:
        """Do something with the others; why it failed, if that is because ranks were lost."""
        try:
            action()
        except Exception as error:
            if self._crew is None or not is_loss(error):
                raise
            return self._in_words(error)
        return ""

    def _in_words(self, error: BaseException) -> str:
        assert self._crew is not None
        return self._crew.lost or f"{type(error).__name__}: {error}"


def _sharded(ddp: DistributedDataParallel, loader: ShardedLoader) -> ShardReplica:
    replica = getattr(ddp, "replica", None)
    if not isinstance(replica, ShardReplica):
        raise JobArgumentError("the model is not wrapped with shards=, so no rank could take over "
                               "the part of a lost rank")  # fmt: skip
    group = getattr(loader, "group", None)
    if group is not replica.group and getattr(group, "process_group", None) is not replica.group:
        raise JobArgumentError("the loader has another group than the model; give it group=group")
    return replica


def _require_same(here: Mapping[str, int], there: Mapping[str, int]) -> None:
    """Raise unless what was loaded is, to the bit, what came."""
    parts = (MODEL, GRADIENT, "job.optimizers.")
    names = [n for n in {**here, **there} if n.startswith(parts) and here.get(n) != there.get(n)]
    if names:
        what = ", ".join(name.removeprefix("job.") for name in names[:5])
        raise JobStateError(f"{what}: load_state_dict has changed what was loaded")
