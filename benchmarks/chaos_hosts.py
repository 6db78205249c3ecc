"""Is a job on several hosts still one job when a host is lost, or the network is cut in two?

    python benchmarks/chaos_hosts.py                    every case
    python benchmarks/chaos_hosts.py -k later           some, chosen as pytest does

Hosts are network namespaces on a switch, with two ranks each, and an etcd on a host of its own. The
cases are tests (``tests/cli/run/elastic``), which compare the weights at the end with those of one
process, bit by bit; here each is a row. Where there can be no namespaces, or no etcd, the row says
so. Exits with 1 if anything did not hold.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1] / "tests" / "cli" / "run" / "elastic"
FILES = ("test_hosts.py", "test_store.py")


class Rows:
    """Prints a row for each case, as it ends."""

    def __init__(self) -> None:
        self.held = True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        name = report.nodeid.rpartition("::")[2].removeprefix("test_").replace("_", " ")
        self.held &= not report.failed
        if report.skipped and isinstance(report.longrepr, tuple):
            print(f"| {name} | — | {report.longrepr[2]} |", flush=True)
            return
        held = "**no**" if report.failed else "yes"
        print(f"| {name} | {report.duration:.0f} s | {held} |", flush=True)
        if report.failed:
            print(report.longreprtext[-4000:], file=sys.stderr)


def main() -> int:
    print("| several hosts | whole run | held |\n|---|---|---|", flush=True)
    rows = Rows()
    files = [str(TESTS / name) for name in FILES]
    quiet = ["-p", "no:terminal", "-p", "no:cacheprovider", "-m", "slow"]
    quiet += ["-o", "addopts="]  # some are options of the terminal's
    code = pytest.main(
        [*quiet, *sys.argv[1:], f"--rootdir={TESTS.parents[3]}", *files], plugins=[rows]
    )
    return 0 if rows.held and code == pytest.ExitCode.OK else 1


if __name__ == "__main__":
    sys.exit(main())
