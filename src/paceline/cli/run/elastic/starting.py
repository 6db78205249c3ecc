"""How a member's process is started: anew, or forked from one that has torch imported."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from .process import Begun, MemberProcess
from .template import Template, TemplatePhase


@dataclass
class MemberStart:
    """What is needed to start a member, but for its number and place."""

    command: Sequence[str]  # arguments of the interpreter
    environment: Mapping[str, str]
    seats: Sequence[Mapping[str, str]] = ()
    template: Template | None = None  # that spares and later ones are forked from

    def prepare(self, now: float) -> bool:
        """Whether a spare, or one that takes the place of another, may be started now."""
        return self.template is None or self.template.prepare(now)

    def start(self, number: int, seat: int) -> MemberProcess:
        """Start a member's process."""
        own = {"PACELINE_MEMBER": str(number), "LOCAL_RANK": str(seat)}
        own |= self.seats[seat] if self.seats else {}
        return MemberProcess(number, seat, partial(self._begin, own))

    def _begin(self, own: Mapping[str, str], out: int, errors: int) -> Begun:
        if self.template is not None and self.template.phase is TemplatePhase.READY:
            with suppress(OSError):
                return self.template.fork(own, out, errors)
        return subprocess.Popen(
            [sys.executable, "-u", *self.command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=errors,
            env={**self.environment, **own},
            start_new_session=True,
        )

    def end(self) -> None:
        """Leave no process behind but members."""
        if self.template is not None:
            self.template.end()
