"""Start a keeper: ``python -m paceline._members PATH``, as the launcher does. Without torch."""

from __future__ import annotations

import argparse
import signal
import sys

from .council import Rules
from .keeper import Keeper


def main(arguments: list[str]) -> int:
    """Serve at a path until the job is over."""
    parser = argparse.ArgumentParser("python -m paceline._members")
    parser.add_argument("path")
    parser.add_argument("--first", type=int, default=1, help="members that begin the job")
    parser.add_argument("--least", type=int, default=1, help="members that it goes on with")
    parser.add_argument("--most", type=int, default=0, help="members at a time, if agents are mute")
    parser.add_argument("--too-few", type=float, default=600.0, help="seconds to wait for more")
    parser.add_argument("--heartbeat", type=float, default=60.0, help="seconds of silence allowed")
    parser.add_argument("--standby", action="store_true", help="wait for a byte from stdin first")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if options.standby and not sys.stdin.buffer.read(1):
        return 0  # who would have given the word is gone
    most = options.most or max(options.first, options.least)
    rules = Rules(options.least, most, options.first, too_few=options.too_few)
    keeper = Keeper(options.path, rules, options.heartbeat)
    keeper.run()
    keeper.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
