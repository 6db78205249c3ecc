"""What the benchmarks print: rows of a table, numbers of three digits, the machine they ran on."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess

import torch


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def digits(number: float) -> str:
    """Three of them, and never an exponent."""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def describe_machine() -> str:
    cores = len(os.sched_getaffinity(0))
    return (
        f"Machine: {cpu_name()}, {cores} cores, {platform.machine()}, Linux {platform.release()}, "
        f"torch {torch.__version__}, Python {platform.python_version()}, {datetime.date.today()}."
    )


def cpu_name() -> str:
    """As lscpu knows it; ARM's /proc/cpuinfo has numbers only."""
    try:
        told = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return platform.processor() or "unknown processor"
    facts = dict(line.split(":", 1) for line in told.splitlines() if ":" in line)
    return f"{facts.get('Vendor ID', '').strip()} {facts.get('Model name', '').strip()}".strip()


class Log:
    """Prints line by line what the file gets in the end."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, text: str = "") -> None:
        self.lines.append(text)
        print(text, flush=True)


def show_mib(size: float) -> str:
    return f"{size / (1 << 20):.1f} MiB"
