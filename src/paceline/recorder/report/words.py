"""Pure: facts as numbers with units and as sentences."""

from __future__ import annotations

from .facts import RunFacts

NOTICEABLE = 0.01  # of the time; less is not worth a reader's attention


def seconds(value: float) -> str:
    """``1.25 s``, ``3.4 ms``, ``12 µs``; minutes above 100 s."""
    if value >= 100:
        return f"{int(value // 60)} min {int(value % 60):02d} s"
    if value >= 1:
        return f"{three(value)} s"
    if value >= 1e-3:
        return f"{three(value * 1e3)} ms"
    return f"{three(value * 1e6)} µs" if value > 0 else "0 s"


def size(nbytes: float) -> str:
    """``512 B``, ``4.2 MB``, in powers of ten."""
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= factor:
            return f"{three(nbytes / factor)} {unit}"
    return f"{nbytes:.0f} B"


def whole_size(nbytes: int) -> str:
    """``3 kB``, for the bounds of bands, which are whole."""
    number, unit = size(nbytes).split()
    return f"{float(number):g} {unit}"


def three(value: float) -> str:
    """Three digits, and no more after the point than that leaves."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def percent(share: float) -> str:
    """``12%``; one digit after the point where that is most of it."""
    return f"{share * 100:.0f}%" if share >= 0.1 or share == 0 else f"{share * 100:.1f}%"


def sentences(facts: RunFacts) -> tuple[str, ...]:
    """What stands out, most important first."""
    if not facts.steps:
        return ("No step was recorded: no model wrapped by paceline ran a forward pass.",)
    said = (waiting_sentence(facts), slow_sentence(facts), bucket_sentence(facts))
    return tuple(text for text in said if text)


def waiting_sentence(facts: RunFacts) -> str:
    """How much of the time went into waiting, and for what."""
    if len(facts.ranks) == 1 and facts.world_size == 1:
        return "One rank ran alone, so there was nobody to wait for."
    if facts.wait_share < NOTICEABLE:
        return f"Ranks hardly waited: {percent(facts.wait_share)} of their time."
    data = max(0.0, facts.wait_share - facts.late_share)
    return (
        f"Ranks spent {percent(facts.wait_share)} of their time waiting: "
        f"{percent(facts.late_share)} for ranks that came late, {percent(data)} for the data."
    )


def slow_rank(facts: RunFacts) -> int:
    """The rank that made the others wait; -1 if none stands out.

    With lateness shared evenly each of n ranks would cost 1/n. It stands out when it costs that and
    two fifths of the rest, and the others lose time worth noticing.
    """
    total = sum(facts.blame.cost.values())
    if len(facts.ranks) < 2 or total <= 0 or total < NOTICEABLE * facts.charged_seconds:
        return -1
    worst = max(facts.ranks, key=lambda rank: rank.cost)
    fair = 1 / len(facts.ranks)
    return worst.rank if worst.cost / total >= fair + 0.4 * (1 - fair) else -1


def slow_sentence(facts: RunFacts) -> str:
    """Who made the others wait."""
    steps = len(facts.blame.steps)
    if len(facts.ranks) < 2 or not steps or facts.charged_seconds <= 0:
        return ""
    worst = max(facts.ranks, key=lambda rank: rank.cost)
    total = sum(facts.blame.cost.values())
    often = f"it launched last in {worst.last_in} of {steps} steps"
    if slow_rank(facts) >= 0:
        others = facts.charged_seconds - worst.charged_seconds
        others = max(others, worst.cost)  # the last step has no known end
        return (
            f"Rank {worst.rank} made the others wait: {often}, and they lost "
            f"{seconds(worst.cost)} to it, {percent(worst.cost / others)} of their time"
            f"{_why(facts, worst.rank)}."
        )
    if total < NOTICEABLE * facts.charged_seconds:
        return "No rank made the others wait for long."
    return (
        f"Ranks came late by turns: rank {worst.rank} cost most, {percent(worst.cost / total)} "
        f"of {seconds(total)} in all ({often})."
    )


def _why(facts: RunFacts, rank: int) -> str:
    """A slow rank's own work against that of the others."""
    own = next(one.median_work for one in facts.ranks if one.rank == rank)
    others = sorted(one.median_work for one in facts.ranks if one.rank != rank)
    usual = others[len(others) // 2]
    if not usual or own < 1.05 * usual:
        return ""
    return f". Its own work takes {seconds(own)} a step, that of the others {seconds(usual)}"


def bucket_sentence(facts: RunFacts) -> str:
    """Which bucket most of the waiting was for, where there are several to choose from."""
    by_bucket = facts.blame.by_bucket
    total = sum(by_bucket.values())
    noticed = facts.wait_share >= NOTICEABLE and facts.world_size > 1
    if not noticed or len(by_bucket) < 2 or total <= 0:
        return ""
    worst = max(by_bucket, key=lambda bucket: by_bucket[bucket])
    if by_bucket[worst] < 0.6 * total:
        return ""
    return (
        f"Most of the waiting, {percent(by_bucket[worst] / total)}, is for bucket {worst} "
        f"of {len(by_bucket)}."
    )
