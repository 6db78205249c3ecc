"""Verdict: whom the ranks wait for and why, from what each of them tells. Pure.

The rules, the most telling first. Two ranks made different calls under the same number. A rank's
process has ended, or it has left the group. A rank has not made the call: then it is in other code,
whose line it tells, and if its models ran fewer backward passes than ours, it skipped one. A rank
is silent. A rank has started the call and does something else. A rank is gone after its part in the
call failed as ours did. Else nobody is to blame. Ranks that the engine named are looked at first.

Accounts count ranks as the group does. Words count them as the whole job does, which is what stands
before each line of output; where the two differ, both are said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from .account import Account, Silence, Told, Went

Said = Mapping[int, Account | Silence]
_TOLD = 3  # ranks beside the first whose whereabouts are told

# What ranks may give different amounts of.
_UNEVEN = frozenset(
    {"all_gather", "gather", "scatter", "reduce_scatter", "all_to_all", "all_to_all_single"}
)


class Trouble(Enum):
    """What is wrong."""

    DIFFERS = auto()  # two ranks made different calls
    ENDED = auto()  # a rank's process is gone
    LEFT = auto()  # a rank has shut the group down
    SKIPPED = auto()  # a rank left a backward pass out
    BUSY = auto()  # a rank does what takes long, such as compiling
    ELSEWHERE = auto()  # a rank is in other code
    SILENT = auto()  # a rank does not answer
    NOBODY = auto()  # all have made the call


@dataclass(frozen=True)
class Verdict:
    """Who, what, and a paragraph that says so."""

    kind: Trouble
    rank: int  # whose doing it is; -1: nobody's
    text: str


@dataclass(frozen=True)
class Case:
    """A call that takes too long on this rank."""

    mine: Account
    call: Told
    group: str
    waited: float  # seconds
    over: bool = False  # it has failed by now
    members: Sequence[int] = ()  # the group's ranks as the job counts; empty: the same
    suspects: Sequence[int] = ()  # ranks that the engine named; empty: it named none

    def name(self, rank: int) -> str:
        """A rank of the group, as it is called in a sentence."""
        return rank_name(self.members, rank)


def rank_name(members: Sequence[int], rank: int) -> str:
    """``rank 3 (1 in the group)``, or ``rank 3`` where group and job count alike."""
    known = 0 <= rank < len(members)
    if not known or members[rank] == rank:
        return f"rank {rank}"
    return f"rank {members[rank]} ({rank} in the group)"


def judge(case: Case, said: Said) -> Verdict:
    """Whom this rank waits for."""
    named = {rank: what for rank, what in said.items() if rank in case.suspects}
    found = _differing(case, said) or _blame(case, named) or _blame(case, said)
    if found is not None:
        kind, rank, why = found
        parts = (_opening(case), why, _waiting(case, said, rank), _then(kind, case.over))
        return Verdict(kind, rank, " ".join(part for part in parts if part))
    why = "All ranks have made this call, and none has finished it: the network is slow or broken."
    return Verdict(Trouble.NOBODY, -1, f"{_opening(case)} {why}")


Finding = tuple[Trouble, int, str]


def _blame(case: Case, said: Said) -> Finding | None:
    """The first rule that finds somebody among these ranks."""
    for rule in (_gone, _behind, _silent, _device_behind, _busy, _failed_too):
        if (found := rule(case, said)) is not None:
            return found
    return None


# -- the rules --------------------------------------------------------------------------------


def _differing(case: Case, said: Said) -> Finding | None:
    found = []
    for rank, account in _accounts(said):
        for mine in case.mine.calls:
            theirs = account.call(mine.sequence)
            if theirs is not None and not same(mine, theirs):
                found.append((mine.sequence, rank, mine, theirs))
                break
    if not found:
        return None
    number, rank, mine, theirs = min(found, key=lambda item: item[:2])
    why = (
        f"Call {number} of the group is not the same on all ranks: {case.name(case.mine.rank)} "
        f"called {words(mine)} at {place(mine.line)}, {case.name(rank)} called {words(theirs)} "
        f"at {place(theirs.line)}."
    )
    other = dict(_accounts(said))[rank]
    return skip_between(case.mine, other, why, case.members) or (Trouble.DIFFERS, rank, why)


def skip_between(
    one: Account, other: Account, why: str, members: Sequence[int] = ()
) -> Finding | None:
    """Whether one of two ranks, which do something else by now, skipped a backward pass."""
    return _skip(one, other, why, members, last=True) or _skip(other, one, why, members, last=True)


def _skip(
    ran: Account, skipped: Account, why: str, members: Sequence[int], *, last: bool
) -> Finding | None:
    """Whether ``skipped`` left a backward pass out that ``ran`` made."""
    step = first_skipped(ran.steps, skipped.steps, last=last)
    if step is None:
        return None
    text = (
        f"{why} {_sentence(rank_name(members, skipped.rank))} skipped a backward pass: the forward "
        f"of step {step.number} at {place(step.line)} was followed by none there, and by one on "
        f"{rank_name(members, ran.rank)}."
    )
    return Trouble.SKIPPED, skipped.rank, text


def _gone(case: Case, said: Said) -> Finding | None:
    for _, account in _accounts(said):
        if _comes_no_more(account, case.call) and not _failed_in(account, case.call):
            return _departed(case, account)
    ended = [rank for rank, what in sorted(said.items()) if what is Silence.ENDED]
    if ended:
        who = _sentence(case.name(ended[0]))
        return Trouble.ENDED, ended[0], f"{who} will not come: its process is gone."
    return None


def _failed_too(case: Case, said: Said) -> Finding | None:
    """A rank that is gone since its part in the call failed: others may be to blame for that."""
    for _, account in _accounts(said):
        if _comes_no_more(account, case.call):
            return _departed(case, account)
    return None


def _departed(case: Case, account: Account) -> Finding:
    kind, rank = Trouble.ENDED if account.ended else Trouble.LEFT, account.rank
    how = account.ended or f"it has left the group, at {account.closed}"
    why = f"{_sentence(case.name(rank))} will not come: {how}{_last_call(account)}."
    return skip_between(case.mine, account, why, case.members) or (kind, rank, why)


def _failed_in(account: Account, call: Told) -> bool:
    theirs = account.call(call.sequence)
    return theirs is not None and bool(theirs.error)


def _comes_no_more(account: Account, call: Told) -> bool:
    """Whether a rank has gone without having done its part in ``call``."""
    theirs = account.call(call.sequence)
    if account.ended:
        return theirs is None or theirs.running or bool(theirs.error)
    return bool(account.closed) and account.made < call.sequence


def _last_call(account: Account) -> str:
    collectives = [call for call in account.calls if call.sequence]
    if not collectives:
        return ", without having made a call"
    last = collectives[-1]
    which = "the last new call it told of" if account.heard else "the last call it made"
    failed = f", which failed with {last.error}" if last.error else ""
    return f"; {which} is number {last.sequence}, {words(last)}, at {place(last.line)}{failed}"


def _behind(case: Case, said: Said) -> Finding | None:
    """The rank that has made the fewest calls; of a message, the rank it is to come from.

    One that waits for others in another group comes after those that wait for nobody.
    """
    if case.call.sequence == 0:
        late = [a for r, a in _accounts(said) if r == case.call.root and not a.inside]
    else:
        late = [a for _, a in _accounts(said) if a.made < case.call.sequence]
    if not late:
        return None
    first, *others = sorted(late, key=lambda a: (bool(a.elsewhere), a.made, a.rank))
    where = _absence(case, first)
    if case.call.sequence and first.made:
        where += f" It has made {first.made} of {case.call.sequence} calls."
    where += _missing_too(case, others)
    if first.doing:
        return Trouble.BUSY, first.rank, where
    skipped = _skip(case.mine, first, where, case.members, last=False)
    return skipped or (Trouble.ELSEWHERE, first.rank, where)


def _device_behind(case: Case, said: Said) -> Finding | None:
    """A rank that has made the call, while its device does what came before."""
    number = case.call.sequence
    behind = [a for _, a in _accounts(said) if number and a.not_reached == number]
    if not behind or case.mine.not_reached == number:
        return None
    first = behind[0]
    where = "" if (call := first.call(number)) is None else f" at {place(call.line)}"
    why = (
        f"{_sentence(case.name(first.rank))} has made this call too{where}, but its device is "
        "still busy with what came before it: a kernel takes very long, or does not end."
    )
    return Trouble.BUSY, first.rank, why


def _absence(case: Case, account: Account, too: str = "") -> str:
    """That a rank is not there, why if it says so, and where it is."""
    what = account.doing or f"is missing{too}"
    return f"{_sentence(case.name(account.rank))} {what}: {_whereabouts(account)}."


def _missing_too(case: Case, others: Sequence[Account]) -> str:
    """Where the next few are, and how many more there are."""
    text = ""
    for account in others[:_TOLD]:
        text += f" {_absence(case, account, ' too')}"
    more = len(others) - _TOLD
    return f"{text} So {'are' if more > 1 else 'is'} {more} more." if more > 0 else text


def _whereabouts(account: Account) -> str:
    if account.user is None:
        inner = account.deepest
        return f"it is not in your code, but at {inner.line}" if inner else "its thread has ended"
    text = f"it is at {account.user.line} in {account.user.function}"
    text += f" ({account.user.text})" if account.user.text else ""
    if account.elsewhere:
        return f"{text}, waiting in {account.elsewhere}"
    return text


def _silent(case: Case, said: Said) -> Finding | None:
    for rank, what in sorted(said.items()):
        if what is Silence.MUTE:
            why = (
                f"{_sentence(case.name(rank))} does not answer: its process is stopped, or in a "
                "call that holds the GIL, or its host cannot be reached."
            )
            return Trouble.SILENT, rank, why
    for rank, what in sorted(said.items()):
        if what is Silence.UNKNOWN:
            why = (
                f"Nothing is known of {case.name(rank)}: it records nothing, or has not made this "
                "group."
            )
            return Trouble.SILENT, rank, why
    return None


def _busy(case: Case, said: Said) -> Finding | None:
    for rank, account in _accounts(said):
        theirs = account.call(case.call.sequence)
        if theirs is not None and theirs.running and not (account.inside or theirs.on_device):
            why = (
                f"{_sentence(case.name(rank))} has started the call and not waited for it: "
                f"{_whereabouts(account)}."
            )
            return Trouble.ELSEWHERE, rank, why
    return None


def _accounts(said: Said) -> Iterator[tuple[int, Account]]:
    return ((r, what) for r, what in sorted(said.items()) if isinstance(what, Account))


def same(mine: Told, theirs: Told) -> bool:
    """Whether two calls fit together."""
    return pattern(mine) == pattern(theirs)


def pattern(call: Told) -> tuple[str, str, int, str, int]:
    """What calls that fit together have in common."""
    count = 0 if call.operation in _UNEVEN else call.count
    return call.operation, call.reduction, call.root, call.dtype, count


def first_skipped(mine: Sequence[Went], theirs: Sequence[Went], *, last: bool) -> Went | None:
    """The first step that has a backward pass here and none there.

    Without ``last``, the latest step there does not count: its backward may be still to come. A
    forward from another line is another thing, such as an evaluation on one rank alone.
    """
    here = {(step.model, step.number, step.line) for step in mine if step.backward}
    latest = {step.model: step.number for step in theirs}
    for step in theirs:
        due = last or step.number < latest[step.model]
        if due and not step.backward and (step.model, step.number, step.line) in here:
            return step
    return None


# -- words ------------------------------------------------------------------------------------


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def words(call: Told) -> str:
    """A call in words."""
    of = f" of {call.shape}" if call.shape else ""
    how = f" {call.reduction.upper()}" if call.reduction else ""
    if call.operation in ("broadcast", "reduce", "gather", "scatter"):
        how += f" root {call.root}"
    said = f"{call.operation}{how}{of}"
    return f"{call.purpose} ({said})" if call.purpose else said


def place(line: str) -> str:
    """A line, or that there is none."""
    return line or "no line of yours"


def _opening(case: Case) -> str:
    call, mine = case.call, case.mine
    bucket = ""
    if call.bucket >= 0:
        more = f", … {call.more} more" if call.more else ""
        names = f": {', '.join(call.names)}{more}" if call.names else ""
        bucket = f", bucket {call.bucket}{names}"
    number = f"call {call.sequence} of the group {case.group}{bucket}"
    if not call.sequence:
        other = f"{case.name(call.root)}, " if call.root >= 0 else ""
        number = f"{other}group {case.group}"
    waited = "waited" if case.over else "has waited"
    return (
        f"{case.name(mine.rank)} {waited} {case.waited:.3g} s in {words(call)} ({number}), "
        f"called at {place(call.line)}."
    )


def _waiting(case: Case, said: Said, culprit: int) -> str:
    """Who else waits."""
    number = case.call.sequence
    others = []
    for rank, account in _accounts(said):
        theirs = account.call(number)
        if rank != culprit and theirs is not None and theirs.running:
            others.append(case.members[rank] if rank < len(case.members) else rank)
    if not others:
        return ""
    ranks = ", ".join(map(str, others))
    return f"{'Rank' if len(others) == 1 else 'Ranks'} {ranks} wait{'s' * (len(others) == 1)} too."


def _then(kind: Trouble, over: bool) -> str:
    if over and kind in (Trouble.ELSEWHERE, Trouble.BUSY):
        return ""
    return {
        Trouble.DIFFERS: "Every rank must make the same calls in the same order with equal sizes.",
        Trouble.ENDED: "Look at the output of that process; the others cannot continue without it.",
        Trouble.LEFT: "A rank that leaves must not be waited for: give all ranks the same number "
        "of steps, or train inside paceline.Join.",
        Trouble.SKIPPED: "Run backward on every rank in every step, or train inside paceline.Join.",
        Trouble.BUSY: "All ranks continue when it is done.",
        Trouble.ELSEWHERE: "If it is only slow, all ranks continue when it arrives.",
        Trouble.SILENT: "Check whether that process is alive.",
        Trouble.NOBODY: "",
    }[kind]
