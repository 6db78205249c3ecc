"""``paceline doctor``: what is here, what will be picked and why, whether it works, what to change.

The command alone; the facts are in ``facts.py``, the tries in ``probe.py``, what
follows from both in ``advice.py``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..._shown import shown_lines

if TYPE_CHECKING:
    from .facts import MachineFacts
    from .probe import Probe

WIDTH = 12  # of the names on the left


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
    test: Annotated[bool, typer.Option(help="Run an all-reduce on two processes.")] = True,
) -> None:
    """Show what this machine has, which backend will be picked and why, and what to change.

    Then two processes run an all-reduce over that backend and over gloo. The exit code is 1 if it
    fails.
    """
    from .advice import advise, pick
    from .facts import gather

    facts = gather()
    if not json:
        _print("\n".join(fact_lines(facts)))
        _print("\n".join(pick_lines(pick(facts))))
    probes, loopback = _try() if test else ([], None)
    advice = advise(facts, probes, loopback)
    if json:
        _print(as_json(facts, probes, advice))
    else:
        _print("\n".join([*probe_lines(probes), *advice_lines(advice)]))
    if not all(probe.ok for probe in probes):
        raise typer.Exit(1)


def _try() -> tuple[list[Probe], Probe | None]:
    """The engine that ``auto`` takes, and gloo; gloo once more within the machine if it failed."""
    from .probe import LOOPBACK, probe

    probes = [probe("auto"), probe("gloo")]
    return probes, None if probes[1].ok else probe("gloo", LOOPBACK)


def fact_lines(facts: MachineFacts) -> Iterator[str]:
    """What is here, one thing a line."""
    from .advice import show_bytes

    cores, memory, host = facts.cores, facts.memory, facts.host
    quota = "" if math.isinf(cores.quota) else f", quota {cores.quota:g}"
    yield _row("paceline", f"{facts.paceline}, torch {facts.torch}, Python {facts.python}")
    yield _row("system", ", ".join(filter(None, (facts.system, facts.cpu))))
    yield _row(
        "cores",
        f"{cores.usable} usable: {cores.installed} installed, "
        f"{cores.allowed} allowed{quota}; load {facts.load:.1f}",
    )
    yield _row(
        "memory",
        f"{show_bytes(memory.total)}, {show_bytes(memory.available)} free; "
        f"/dev/shm {show_bytes(memory.dev_shm)}; memfd {'works' if memory.memfd else 'fails'}",
    )
    yield _row("compiler", facts.compiler or "none")
    yield _row("engines", ", ".join(name for name, one in facts.engines.items() if one.available))
    for name, engine in facts.engines.items():
        if engine.reason:
            yield _row("", f"{name}: {engine.reason}")
    within = " (this machine only)" if host.address.startswith("127.") else ""
    yield _row("host", f"{host.name} leads to {host.address or 'no address'}{within}")
    for interface in facts.interfaces:
        yield _row("network", f"{interface.name} {interface.address or '(no IPv4 address)'}")
    if not facts.interfaces:
        yield _row("network", "none that is up")
    yield _row("GPU", "; ".join(facts.gpus) or "none that torch sees")
    yield _row("NCCL", nccl_text(facts))
    if facts.gpus:
        yield _row("sharing", f"several ranks on one GPU: {facts.sharing}")
    for name, values in facts.launchers.items():
        yield _row("launched by", f"{name}: {_settings(values)}")
    yield _row("set", _settings(facts.settings) or "none of the variables that matter")


def nccl_text(facts: MachineFacts) -> str:
    """The version that ranks load; where another was preloaded, also the one of torch."""
    loaded = facts.sharing.nccl or facts.nccl
    built = f" (torch was built with {facts.nccl})" if facts.nccl not in ("", loaded) else ""
    return f"{loaded}{built}" if loaded else "none"


def pick_lines(picks: Mapping[str, str]) -> Iterator[str]:
    """What ``auto`` will take, and why."""
    for device, why in picks.items():
        yield _row("auto picks", f"{device}: {why}")


def probe_lines(probes: Sequence[Probe]) -> Iterator[str]:
    """How the tries went."""
    for probe in probes:
        name = probe.asked if probe.asked == probe.backend else f"{probe.asked} ({probe.backend})"
        if probe.ok:
            yield _row(
                "test",
                f"{name}: 2 processes, all-reduce of 4 KiB in "
                f"{probe.microseconds:.0f} us, of 16 MiB at "
                f"{probe.gigabytes_per_second:.2f} GB/s",
            )
        else:
            yield _row("test", f"{probe.asked}: FAILED: {probe.error}")


def advice_lines(advice: Sequence[str]) -> Iterator[str]:
    """What to change."""
    yield ""
    if not advice:
        yield "Nothing to change."
    for text in advice:
        yield f"- {text}"


def as_json(facts: MachineFacts, probes: Sequence[Probe], advice: Sequence[str]) -> str:
    """All of it as one JSON object."""
    import msgspec

    from .advice import pick

    found: dict[str, Any] = {
        "facts": facts,
        "usable_cores": facts.cores.usable,
        "auto": pick(facts),
        "tests": list(probes),
        "ok": all(probe.ok for probe in probes),
        "advice": list(advice),
    }
    return msgspec.json.format(msgspec.json.encode(found)).decode()


def _row(name: str, text: str) -> str:
    return f"{name:{WIDTH}} {text}"


def _settings(values: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


def _print(text: str) -> None:
    print(shown_lines(text), file=sys.stdout, flush=True)
