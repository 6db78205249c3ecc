"""What to change, given what is here and how the tries went. Pure: facts in, sentences out."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

from ..._torch.versions import NEWEST, OLDEST, is_tested, shown
from .facts import BETWEEN_US, OWN, MachineFacts
from .probe import Probe

GIB = 1 << 30
ENGINES = ("gloo", "hybrid", "nccl", "shm")  # what auto can take
LITTLE = GIB  # of /dev/shm; containers have 64 MiB unless told otherwise


def advise(
    facts: MachineFacts, probes: Sequence[Probe], loopback: Probe | None = None
) -> list[str]:
    """Sentences, the gravest first; ``loopback`` is gloo tried again within the machine."""
    parts = (_on_probes(facts, probes, loopback), _on_software(facts), _on_machine(facts))
    return [text for part in parts for text in part]


def pick(facts: MachineFacts) -> dict[str, str]:
    """What ``auto`` takes for tensors of each device, and why."""
    picks = {"cpu": _pick_for_cpu(facts)}
    if facts.gpus:
        told = "gloo, because PACELINE_BACKEND says so"
        picks["cuda"] = told if _asked(facts) == "gloo" else "nccl, which is part of torch"
    return picks


def _pick_for_cpu(facts: MachineFacts) -> str:
    shm, asked = facts.engines["shm"], _asked(facts)
    if asked and asked not in ENGINES:
        return f"nothing: PACELINE_BACKEND is {asked}, which is not a backend"
    if asked and asked != "nccl":  # which moves no CPU tensors, so that auto picks as usual
        return f"{asked}, because PACELINE_BACKEND says so"
    if not shm.available:
        return f"gloo, because shm cannot be used: {shm.reason}"
    return (
        "shm where all ranks share a host, hybrid (shm within hosts, gloo between them) "
        "where some do, gloo otherwise"
    )


def _asked(facts: MachineFacts) -> str:
    """The backend that the environment settles for all ranks; empty if it leaves that open."""
    asked = facts.settings.get("PACELINE_BACKEND", "auto")
    return "" if asked == "auto" else asked


def _on_probes(
    facts: MachineFacts, probes: Sequence[Probe], loopback: Probe | None
) -> Iterator[str]:
    for probe in probes:
        if not probe.ok:
            yield f"Two processes could not use {probe.asked}: {probe.error}"
    if loopback is None or not _has_network(facts):
        return
    if loopback.ok:
        names = ", ".join(i.name for i in facts.interfaces if i.address) or "none"
        yield (
            "gloo works within this machine (GLOO_SOCKET_IFNAME=lo) but not over the address of "
            f"its name. A firewall between ranks or a wrong entry in /etc/hosts does that. Set "
            f"GLOO_SOCKET_IFNAME to the interface that reaches the other ranks (here: {names})."
        )
    else:
        yield (
            "gloo does not work over the loopback interface either: look for a firewall on lo, or "
            "a sandbox that forbids sockets."
        )


def _has_network(facts: MachineFacts) -> bool:
    return any(interface.address for interface in facts.interfaces)


def _on_software(facts: MachineFacts) -> Iterator[str]:
    if asked := _asked(facts):
        yield from _on_backend(facts, asked)
    yield from _on_names(facts)
    if not is_tested(facts.torch):
        yield f"torch is {facts.torch}; paceline is tested with {shown(OLDEST)} to {shown(NEWEST)}."
    if not facts.engines["shm"].available:
        first = "" if facts.compiler else "install a C compiler (Debian: apt install gcc), then "
        yield (
            f"shm is not there: {facts.engines['shm'].reason}. To have it, {first}install paceline "
            "again with: pip install --force-reinstall --no-deps --no-cache-dir paceline (in a "
            "checkout: pip install -e .). Until then ranks on one host talk over gloo, which is "
            "several times slower."
        )
    if facts.gpu_device and not facts.gpus:
        yield (
            "There is an NVIDIA GPU that torch does not see: install a build of torch with CUDA, "
            "and look at CUDA_VISIBLE_DEVICES and at the driver (nvidia-smi)."
        )
    yield from _on_threads(facts)


def _on_names(facts: MachineFacts) -> Iterator[str]:
    """On misspelled PACELINE_ variables, which nothing else would notice."""
    for name in facts.settings:
        if name.startswith("PACELINE_") and name not in (*OWN, *BETWEEN_US):
            near = difflib.get_close_matches(name, OWN, 1)
            meant = f"did you mean {near[0]}?" if near else f"there is {', '.join(OWN)}."
            yield f"{name} is set, and paceline reads no variable of that name: {meant}"


def _on_backend(facts: MachineFacts, asked: str) -> Iterator[str]:
    """On a choice made in the environment, which is easily forgotten there."""
    known = [name for name in ENGINES if name in facts.engines]
    if asked not in known:
        yield (
            f"PACELINE_BACKEND is {asked}, which auto cannot use: set it to one "
            f"of {', '.join(known)}, or unset it."
        )
    elif not facts.engines[asked].available:
        yield (
            f"PACELINE_BACKEND is {asked}, which cannot be used here: "
            f"{facts.engines[asked].reason}. Unset it, and auto takes what can."
        )
    elif asked == "gloo" and facts.engines["shm"].available:
        yield (
            "PACELINE_BACKEND is gloo, so ranks on one host do not use shm, which is several times "
            "faster. Unless you want that, unset it."
        )


def _on_threads(facts: MachineFacts) -> Iterator[str]:
    cores, threads = facts.cores.usable, facts.settings.get("OMP_NUM_THREADS", "")
    if not threads and cores > 1:
        yield (
            f"OMP_NUM_THREADS is not set, so every process computes with up to {cores} threads. "
            f"`paceline run` sets it; elsewhere set it to {cores} divided by the number of ranks."
        )
    elif threads.isdigit() and int(threads) > cores:
        yield f"OMP_NUM_THREADS is {threads}, and there are {cores} cores: set it to less."


def _on_machine(facts: MachineFacts) -> Iterator[str]:
    cores, memory, host = facts.cores, facts.memory, facts.host
    if not _has_network(facts):
        yield (
            "No network interface is up, not even loopback, and gloo needs one: "
            "ip link set lo up (in a sandbox: allow it)."
        )
    if not memory.memfd:
        yield "memfd_create does not work here (an old kernel or a sandbox), and shm needs it."
    if memory.dev_shm < LITTLE:
        yield (
            f"/dev/shm has {show_bytes(memory.dev_shm)}. paceline does not use it, but workers of "
            "a DataLoader do. In Docker: docker run --shm-size=8g; else: mount -o "
            "remount,size=8G /dev/shm."
        )
    if cores.quota < cores.allowed:
        yield (
            f"The control group gives this process {cores.quota:g} cores of CPU time, of "
            f"{cores.allowed} that it sees. Start {cores.usable} ranks, or raise the quota."
        )
    if facts.load > 1.5 * cores.allowed:
        yield (
            f"The machine is busy: {facts.load:.1f} processes wanted its {cores.allowed} cores in "
            "the last minute. The speeds above mean little."
        )
    if not host.address:
        yield (
            f"The name {host.name} has no address, so ranks on other hosts may not find this "
            "one. Add it to /etc/hosts, or set MASTER_ADDR and GLOO_SOCKET_IFNAME by hand."
        )
    elif not host.own:
        yield (
            f"The name {host.name} is {host.address}, which is not an address of this host. "
            "Correct /etc/hosts, or set GLOO_SOCKET_IFNAME."
        )


def show_bytes(count: float) -> str:
    """In GiB, or in MiB if that is less than one."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.0f} MiB"
