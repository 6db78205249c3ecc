"""torch's elastic agent, with names for what a subclass may do otherwise.

``torch.distributed.run`` has no seam between watching ranks and ending them: whoever wants to do
one of them another way overrides private methods of the agent. These are the only ones.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.api import SubprocessContext


class OpenAgent(LocalElasticAgent):
    """Starts, watches and ends the ranks of one machine, by methods that may be overridden."""

    def start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the ranks; their process ids by local rank."""
        started: dict[int, Any] = super()._start_workers(worker_group)
        return started

    def restart_workers(self, worker_group: WorkerGroup) -> None:
        """End the ranks and start them again."""
        super()._restart_workers(worker_group)

    def monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """See how the ranks do; called ten times a second."""
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def exit_barrier(self) -> None:
        """Wait for the other machines; called when all ranks of this one have ended."""
        super()._exit_barrier()  # type: ignore[no-untyped-call]

    def shutdown(self, death_sig: signal.Signals | None) -> None:
        """End every rank; called however the run ends, with the signal if there was one."""
        super()._shutdown(death_sig or signal.SIGTERM)

    @property
    def restarts_left(self) -> int:
        """How often the ranks may still be started again."""
        return int(self._remaining_restarts)

    @property
    def exit_seconds(self) -> float:
        """How long machines wait for each other at the end."""
        return float(self._exit_barrier_timeout)

    @property
    def processes(self) -> Mapping[int, Any]:
        """What holds each process of the latest start, by local rank; empty before the first."""
        context = self._pcontext
        return context.subprocess_handlers if isinstance(context, SubprocessContext) else {}

    # The names that torch calls.

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        return self.start_workers(worker_group)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self.restart_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        return self.monitor_workers(worker_group)

    def _exit_barrier(self) -> None:
        self.exit_barrier()

    def _shutdown(self, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        self.shutdown(death_sig)


def pipes_of(process: Any) -> Iterator[Any]:
    """Our ends of what a rank writes to: torch closes them only for ranks that it ended itself."""
    for pipe in (process._stdout, process._stderr):
        if pipe is not None:
            yield pipe


def log_folder(specs: LogsSpecs) -> str:
    """The folder that was given to ``specs``."""
    return str(specs._root_log_dir)
