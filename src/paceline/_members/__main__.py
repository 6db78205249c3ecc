"""Start a keeper: ``python -m paceline._members PATH``, as the launcher does. Without torch."""

from __future__ import annotations

import argparse
import signal
import sys

import msgspec

from .._etcd import Etcd, parse_store
from ..errors import TermOverError
from .council import Rules
from .keeper import Keeper
from .terms import RESIGNED, ChosenTerm, KeeperTerms, TermRight


def main(arguments: list[str]) -> int:
    """Serve at a path until the job is over, or until this process may not decide any more."""
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if options.standby and not sys.stdin.buffer.read(1):
        return 0  # who would have given the word is gone
    most = options.most or max(options.first, options.least)
    rules = Rules(
        options.least,
        most,
        options.first,
        too_few=options.too_few,
        return_within=options.return_within,
        hosts=options.hosts,
        unseen=options.unseen,
    )
    try:
        _serve(options, rules)
    except TermOverError as error:
        print(error, file=sys.stderr)
        return RESIGNED
    return 0


def _serve(options: argparse.Namespace, rules: Rules) -> None:
    right = _right(options.store, options.term) if options.store else None
    keeper = Keeper(options.path, rules, options.heartbeat, right)
    try:
        keeper.run()
    finally:
        keeper.close()
        if right is not None:
            right.close()


def _right(store: str, term: str) -> TermRight:
    """The right to decide that this host's agent was given in the store."""
    chosen = msgspec.json.decode(term, type=ChosenTerm)
    patience = max(0.5, chosen.seconds / 4)
    return TermRight(KeeperTerms(Etcd(parse_store(store), patience), chosen.prefix), chosen)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m paceline._members")
    parser.add_argument("path")
    parser.add_argument("--first", type=int, default=1, help="members that begin the job")
    parser.add_argument("--least", type=int, default=1, help="members that it goes on with")
    parser.add_argument("--most", type=int, default=0, help="members at a time, if agents are mute")
    parser.add_argument("--too-few", type=float, default=600.0, help="seconds to wait for more")
    parser.add_argument("--heartbeat", type=float, default=60.0, help="seconds of silence allowed")
    parser.add_argument("--return-within", type=float, default=10.0, help="…after a keeper's loss")
    parser.add_argument("--hosts", type=int, default=0, help="at a time; 0: any number")
    parser.add_argument("--unseen", type=float, default=0.0, help="seconds that hosts live unseen")
    parser.add_argument("--store", default="", help="etcd, where the right to decide comes from")
    parser.add_argument("--term", default="", help="…and that right, as the agent got it")
    parser.add_argument("--standby", action="store_true", help="wait for a byte from stdin first")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
