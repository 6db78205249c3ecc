"""Puts a report's page together: the facts as text and tables, the events as data for its charts.

What can be said in words and tables is written here, so that it prints and reads without scripts;
the parts in ``assets/`` draw the rest. Everything lies in the one file, its policy forbids it to
load anything, and names from the run are escaped, since they come from other people's code.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

import msgspec

from .columns import columns
from .facts import RankFacts, RunFacts, SizeBand
from .late import Wait
from .read import Run
from .words import percent, seconds, sentences, size, slow_rank, three, whole_size

SCRIPTS = ("units", "store", "timeline", "telling", "hands", "steps", "main")


@dataclass(frozen=True)
class Cell:
    """One field of a table; ``value`` is what it is sorted by, where the text is not."""

    text: str  # already escaped
    kind: str = ""
    value: float | None = None


def page(run: Run, facts: RunFacts, trace_name: str) -> str:
    """The whole page."""
    script = "'use strict';\n" + "\n".join(_part(f"{name}.js") for name in SCRIPTS)
    return Template(_part("page.html")).substitute(
        title=escape(f"Run {run.name}"),
        meta=_meta(facts),
        tiles=_tiles(facts),
        said=_list("said", map(escape, sentences(facts))),
        notes=_notes(run),
        ranks=_ranks(facts),
        sizes=_sizes(facts.sizes),
        waits=_waits(facts),
        footer=_footer(trace_name),
        data=_data(run, facts),
        style=_part("page.css"),
        script=script,
        hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _part(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _data(run: Run, facts: RunFacts) -> str:
    found: dict[str, Any] = columns(run.logs, facts.began, facts.ended)
    found["last"] = [[step.number, step.rank] for step in facts.blame.steps]
    found["slow"] = slow_rank(facts)
    return msgspec.json.encode(found).decode().replace("<", "\\u003c")


def _meta(facts: RunFacts) -> str:
    began = f"{datetime.fromtimestamp(facts.began, tz=timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
    lasted = f"{seconds(facts.ended - facts.began)} recorded"
    hosts = facts.hosts[0] if len(facts.hosts) == 1 else f"{len(facts.hosts)} hosts"
    said = (
        *((began, lasted) if facts.ended else ("nothing recorded",)),
        f"on {hosts}",
        f"backend {', '.join(facts.backends)}",
        f"torch {', '.join(facts.torch)}",
        f"paceline {', '.join(facts.paceline)}",
    )
    return escape(" · ".join(said))


def _tiles(facts: RunFacts) -> str:
    data = max(0.0, facts.wait_share - facts.late_share)
    found = [
        ("Ranks", str(facts.world_size), _hosts(facts)),
        ("Steps", str(facts.steps), f"{facts.first_step} to {facts.last_step}"),
        ("Median step", seconds(facts.median_step), _per_second(facts)),
        ("Time waiting", percent(facts.wait_share), f"{percent(data)} for the data"),
        ("For late ranks", percent(facts.late_share), _last(facts)),
        ("Travel hidden", percent(facts.hidden_share), "behind computing"),
    ]
    return "\n".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(more)}</small></dd></div>"
        for name, value, more in found
    )


def _hosts(facts: RunFacts) -> str:
    read = "" if len(facts.ranks) == facts.world_size else f"{len(facts.ranks)} with a log, "
    return read + (f"{len(facts.hosts)} hosts" if len(facts.hosts) > 1 else "one host")


def _per_second(facts: RunFacts) -> str:
    return f"{three(1 / facts.median_step)} a second" if facts.median_step else "none complete"


def _last(facts: RunFacts) -> str:
    slow = slow_rank(facts)
    return f"rank {slow} above all" if slow >= 0 else "none stands out"


def _list(kind: str, items: Iterable[str]) -> str:
    return f'<ul class="{kind}">' + "".join(f"<li>{item}</li>" for item in items) + "</ul>"


def _notes(run: Run) -> str:
    """What the reading noticed, then what ranks noted; the same words of many ranks once."""
    said: dict[str, list[int]] = {}
    for log in run.logs:
        for note in dict.fromkeys(log.notes):
            said.setdefault(note, []).append(log.rank)
    items = [escape(note) for note in run.notes]
    items += [f"<b>{_who(ranks)}</b> {escape(note)}" for note, ranks in said.items()]
    if not items:
        return ""
    return (
        '<section aria-labelledby="notes"><h2 id="notes">Notes</h2>'
        + _list("notes", items)
        + ("</section>")
    )


def _who(ranks: Sequence[int]) -> str:
    if len(ranks) > 4:
        return f"{len(ranks)} ranks:"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}:"


def _table(caption: str, heads: Sequence[str], rows: Iterable[str]) -> str:
    """A table; a head that starts with ``#`` stands over numbers."""
    named = "".join(
        f'<th scope="col" class="n">{escape(h[1:])}</th>'
        if h.startswith("#")
        else f'<th scope="col">{escape(h)}</th>'
        for h in heads
    )
    return (
        f'<div class="wide"><table><caption>{escape(caption)}</caption><thead><tr>{named}</tr>'
        f"</thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _row(cells: Iterable[Cell], kind: str = "") -> str:
    return f"<tr{_class(kind)}>" + "".join(map(_cell, cells)) + "</tr>"


def _cell(cell: Cell) -> str:
    value = "" if cell.value is None else f' data-value="{cell.value:.9g}"'
    return f"<td{_class(cell.kind)}{value}>{cell.text}</td>"


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def _number(text: str, value: float) -> Cell:
    return Cell(escape(text), "n", value)


def _bar(parts: Sequence[tuple[float, str]], value: float) -> Cell:
    """A bar of several parts, each a share of the cell's width."""
    drawn = "".join(
        f'<i class="{kind}" style="width:{max(0.0, share) * 100:.2f}%"></i>'
        for share, kind in parts
        if share > 0
    )
    return Cell(drawn, "barred", value)


def _ranks(facts: RunFacts) -> str:
    steps, slow = len(facts.blame.steps), slow_rank(facts)
    most = max((rank.cost for rank in facts.ranks), default=0.0)
    heads = ("#Rank", "Host", "#Steps", "#Median step", "#Without waiting", "#Waiting",
             "#Launched last", "#Cost the others", "")  # fmt: skip
    caption = (
        "Launched last: the steps whose last bucket this rank was the last to launch. Cost the "
        "others: the seconds that all other ranks together stood waiting until it did."
    )
    rows = (_row(_rank(one, steps, most), "slow" * (one.rank == slow)) for one in facts.ranks)
    return _table(caption, heads, rows)


def _rank(one: RankFacts, steps: int, most: float) -> list[Cell]:
    share = one.last_in / steps if steps else 0.0
    return [
        _number(str(one.rank), one.rank),
        Cell(escape(f"{one.host} ({one.pid})")),
        _number(str(one.steps), one.steps),
        _number(seconds(one.median_step), one.median_step),
        _number(seconds(one.median_work), one.median_work),
        _number(percent(one.wait_share), one.wait_share),
        _number(percent(share), share),
        _number(seconds(one.cost), one.cost),
        _bar([(one.cost / most if most else 0.0, "late")], one.cost),
    ]


def _sizes(bands: Sequence[SizeBand]) -> str:
    if not bands:
        return '<p class="hint">No call on a group was recorded.</p>'
    most = max(band.nbytes for band in bands) or 1
    caption = (
        "Each call once, however many ranks took part. Time runs from the last rank's start to the "
        "last rank's end, so that waiting for a late rank is not in it; a call whose end was only "
        "noticed later looks slower than it was."
    )
    heads = ("Operation", "#Size", "#Calls", "#Bytes in all", "", "#Median time", "#Bytes a second")
    return _table(caption, heads, (_row(_size(band, most)) for band in bands))


def _size(band: SizeBand, most: int) -> list[Cell]:
    extent = f"{whole_size(band.low)} to {whole_size(band.high)}" if band.low else "nothing"
    return [
        Cell(escape(band.operation), "code"),
        _number(extent, band.low),
        _number(str(band.calls), band.calls),
        _number(size(band.nbytes), band.nbytes),
        _bar([(band.nbytes / most, "")], band.nbytes),
        _number(seconds(band.seconds) if band.seconds else "not seen", band.seconds),
        _number(f"{size(band.rate)}/s" if band.rate else "", band.rate),
    ]


def _waits(facts: RunFacts) -> str:
    if not facts.waits:
        return '<p class="hint">No rank had to wait.</p>'
    longest = facts.waits[0].seconds
    caption = (
        f"The {len(facts.waits)} longest, each as the rank saw it that waited longest. The orange "
        "part passed until the last rank had launched its last bucket, or had made the call; the "
        "grey part is the data's own time."
    )
    heads = ("#Waited", "", "Rank", "#Step", "For", "#Size", "Came last", "Line")
    return _table(caption, heads, (_row(_wait(one, longest)) for one in facts.waits))


def _wait(one: Wait, longest: float) -> list[Cell]:
    late = min(one.late_seconds, one.seconds)
    parts = [(late / longest, "late"), ((one.seconds - late) / longest, "rest")]
    last = "" if one.late_rank < 0 else f"rank {one.late_rank}"
    if late > 0:
        last += f", after {seconds(late)}"
    what = one.what if one.what.startswith("bucket") else f"{one.what} {one.shape}".strip()
    more = f", and {len(one.ranks) - 1} more" if len(one.ranks) > 1 else ""
    return [
        _number(seconds(one.seconds), one.seconds),
        _bar(parts, one.seconds),
        Cell(escape(str(one.rank) + more), "", one.rank),
        _number(str(one.step) if one.step >= 0 else "", one.step),
        Cell(escape(what)),
        _number(size(one.nbytes), one.nbytes),
        Cell(escape(last)),
        Cell(escape(one.line), "code"),
    ]


def _footer(trace_name: str) -> str:
    return (
        f"{escape(trace_name)} beside this page is the same run as a trace; open it at "
        "ui.perfetto.dev or chrome://tracing. Ranks' clocks are set to rank 0's. A recorder keeps "
        "the latest events only, so a long run's beginning is not here."
    )
