"""Peers: how the recorders of a group's ranks find each other, ask, and say farewell.

Each rank leaves its address in the group's store when the group is made: no collective, and nobody
waits. Ranks that are threads of this process are found in the table of boards. A process that ends
in good order tells its peers how far it had come, since nobody can ask it any more.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from itertools import count
from typing import Any

import msgspec

from ..errors import StrangerError
from . import channel, events
from .account import Account, Silence, Told, account_of, told
from .listener import Listener
from .order import Log, log_from, log_of
from .places import Address, UnreachableError, is_far, machine, network
from .threads import in_thread

ASKED_AT_MOST = 128  # ranks that one rank asks
LEFT_TOLD = 16  # peers that a rank tells what it is about to call, and that it leaves
AHEAD_TOLD = 2  # of these, on other hosts: what it is about to call; each is a handshake of TLS
LEAVING = 1.0  # seconds to find out who they are, if that is not known by then
READING = 1.0  # seconds, at most, until letters that have come are read
ARRIVING = 0.5  # seconds that a letter from another host may be behind the end of its writer
KINDS = 64  # of calls that are announced, and kept


class Question(msgspec.Struct, frozen=True):
    """What is asked of a process."""

    board: int
    time: bool = False  # only the time is asked
    after: int = -1  # what was called after this number is asked


class Letter(msgspec.Struct, frozen=True):
    """What a rank says because it may not be there when it is asked.

    A process numbers its letters, so that one that was overheard is not heard again.
    """

    board: int
    rank: int
    process: str
    number: int
    call: Told | None = None  # that it is about to make
    farewell: Account | None = None


# Made by the thread that imports: msgspec looks at a class when it is first read, and two threads
# that have it do so at once crash the process.
_QUESTIONS, _LETTERS = msgspec.msgpack.Decoder(Question), msgspec.msgpack.Decoder(Letter)
_ACCOUNTS, _LOGS = msgspec.msgpack.Decoder(Account), msgspec.msgpack.Decoder(Log)
_ADDRESSES = msgspec.msgpack.Decoder(Address)


class Peers:
    """The other ranks of all groups of this process."""

    patience = 2.0  # seconds that ranks have to say what they are asked together; one talk has half

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all peers."""
        self.process = secrets.token_hex(16)
        self._lock = threading.Lock()
        self._news = threading.Event()  # a letter has come
        self._listener: Listener | None = None
        self._known: dict[int, dict[int, Address]] = {}  # by board, then by rank
        self._turns: dict[int, int] = {}
        self._stores: dict[int, Any] = {}  # of groups whose ranks are not all known yet
        self._lookups: dict[int, Future[None]] = {}  # under way, or the last one, by board
        self.farewells: dict[int, dict[int, Account]] = {}  # the same
        self._heard: dict[int, dict[int, list[Told]]] = {}  # the same
        self._announced: dict[int, set[object]] = {}  # kinds of calls, by board
        self._numbers = count(1)  # of letters that are told
        self._latest: dict[int, dict[str, int]] = {}  # numbers of letters, by board and process

    # -- addresses ----------------------------------------------------------------------------

    def publish(self, board: events.Board) -> None:
        """Leave the address of ``board`` in the store of its group, if it has one."""
        store = board.store()
        if store is None:
            return
        with contextlib.suppress(Exception):  # a group is made, whatever its store can do
            turn = store.add(f"recorder/turn/{board.rank}", 1)
            self._turns[board.number] = turn
            self._stores[board.number] = store  # the group may be gone before all are known
            own = msgspec.msgpack.encode(self._own(board, store))
            store.set(f"recorder/{turn}/{board.rank}", own)

    def _own(self, board: events.Board, store: Any) -> Address:
        if board.one_process:
            return Address(self.process, "", 0, b"", machine(), network(), board.number)
        with self._lock:
            listener = self._listener or Listener(self._answer, self._hear, meeting_host(store))
            self._listener = listener
        return listener.address(self.process, board.number)

    def known(self, board: events.Board, seconds: float = 0.0) -> Mapping[int, Address]:
        """Addresses of the group's other ranks, as far as they are known.

        With ``seconds``, what is missing is looked up, for at most so long: a store may be busy
        with somebody who waits in it, and this rank must not.
        """
        end, own = time.monotonic() + seconds, False
        while seconds and not own and not self.complete(board):
            lookup = self._lookups.get(board.number)
            own = lookup is None or lookup.done()
            if lookup is None or own:
                lookup = self._lookups[board.number] = in_thread(self.look_up, board)
            try:  # one that was under way may have looked before the others were there
                lookup.result(max(0.0, end - time.monotonic()))
            except Exception:
                break
        return dict(self._known.get(board.number, {}))

    def look_up(self, board: events.Board) -> None:
        """Read the addresses that the other ranks have left by now."""
        store, turn = self._stores.get(board.number), self._turns.get(board.number)
        if store is None or turn is None:
            return
        known = self._known.setdefault(board.number, {})
        order = _nearest_first(board, range(board.size))
        wanted = {0, *order[:ASKED_AT_MOST]} - {board.rank}
        for rank in wanted - known.keys():
            with contextlib.suppress(RuntimeError, OSError, msgspec.DecodeError):
                key = f"recorder/{turn}/{rank}"
                if store.check([key]):
                    known[rank] = _ADDRESSES.decode(store.get(key))
        if known.keys() >= wanted:
            self._stores.pop(board.number, None)

    def complete(self, board: events.Board) -> bool:
        """Whether there is nothing more to find out about the addresses of a group."""
        return board.number not in self._stores

    def forget_old(self) -> None:
        """Let go of boards that are no more."""
        tables: list[dict[int, Any]] = [self._known, self._turns, self._stores, self._lookups]
        for table in (*tables, self.farewells, self._heard, self._announced, self._latest):
            for number in set(table) - events.boards.keys():
                table.pop(number, None)

    # -- letters ------------------------------------------------------------------------------

    def announce(self, entry: events.Entry) -> None:
        """Before the first call of its kind: tell the others, who may not be able to ask later.

        An engine that does not check what ranks call may end the process when sizes differ (gloo
        does), and then the others know why.
        """
        board = entry.board
        kinds = self._announced.setdefault(board.number, set())
        kind = (entry.kind, entry.shape, entry.dtype, entry.reduction, entry.root)
        if kind in kinds or len(kinds) >= KINDS or not entry.sequence:
            return
        kinds.add(kind)
        call = told(entry)
        for address in self._some(board, 0.0, AHEAD_TOLD):
            self._tell(address, board, call=call)

    def _tell(self, address: Address, board: events.Board, **said: Any) -> None:
        own = (board.rank, self.process, next(self._numbers))
        with contextlib.suppress(OSError):
            channel.tell(address, msgspec.msgpack.encode(Letter(address.board, *own, **said)))

    def _some(self, board: events.Board, seconds: float, far: int = LEFT_TOLD) -> list[Address]:
        """The nearest ranks that are other processes; ``far`` of them by TLS."""
        known = self.known(board, seconds)
        order = _nearest_first(board, known)
        others = [known[rank] for rank in order if known[rank].process != self.process]
        led = [one for one in others if is_far(one)]
        return [one for one in others if one not in led[far:]][:LEFT_TOLD]

    def _hear(self, message: bytes) -> None:
        letter = _LETTERS.decode(message)
        if letter.board not in events.boards or self._is_old(letter):
            return
        if letter.farewell is not None:
            self.farewells.setdefault(letter.board, {})[letter.rank] = letter.farewell
        if letter.call is not None:
            calls = self._heard.setdefault(letter.board, {}).setdefault(letter.rank, [])
            calls.append(letter.call)
            del calls[:-KINDS]
        self._news.set()

    def _is_old(self, letter: Letter) -> bool:
        """Whether a later letter of its process has come before."""
        latest = self._latest.setdefault(letter.board, {})
        if letter.number <= latest.get(letter.process, 0):
            return True
        latest[letter.process] = letter.number
        return False

    def take_leave(self, board: events.Board, ended: str = "") -> None:
        """Tell the peers that this rank comes no more, and how far it had come."""
        if not board.made or board.one_process:
            return
        said = account_of(board, ended)
        if len(msgspec.msgpack.encode(said)) > channel.LETTER // 2:  # names may be long
            said = msgspec.structs.replace(said, calls=said.calls[-4:])
        for address in self._some(board, LEAVING):
            self._tell(address, board, farewell=said)

    # -- answers ------------------------------------------------------------------------------

    def _answer(self, message: bytes) -> bytes:
        question = _QUESTIONS.decode(message)
        if question.time:
            return msgspec.msgpack.encode(time.time())
        board = events.boards.get(question.board)
        if board is None:
            return b""
        if question.after >= 0:
            return msgspec.msgpack.encode(log_of(board, question.after))
        return msgspec.msgpack.encode(account_of(board))

    def ask(self, address: Address) -> Account | Silence:
        """The answer of that rank."""
        if address.process == self.process:
            board = events.boards.get(address.board)
            return Silence.ENDED if board is None else account_of(board)
        question = msgspec.msgpack.encode(Question(address.board))
        try:
            answer = self._ask_again_if_cut_off(address, question)
            return _ACCOUNTS.decode(answer) if answer else Silence.ENDED
        except (UnreachableError, StrangerError):
            return Silence.UNKNOWN
        except ConnectionError:
            return Silence.ENDED
        except (OSError, msgspec.DecodeError) as error:
            out = getattr(error, "errno", 0) in (errno.EMFILE, errno.ENFILE)  # of descriptors, here
            return Silence.UNKNOWN if out else Silence.MUTE

    def _ask_again_if_cut_off(self, address: Address, question: bytes) -> bytes:
        """The answer; a process that is there after all hung up because many asked at once."""
        try:
            return channel.ask(address, question, self.patience / 2)
        except (ConnectionRefusedError, StrangerError):
            raise
        except ConnectionError:
            return channel.ask(address, question, self.patience / 2)

    def log(self, board: events.Board, rank: int, after: int, patience: float) -> Log | None:
        """What a rank has called after that number; None when it cannot be asked."""
        address = self.known(board, patience).get(rank)
        if address is None:
            return None
        if address.process == self.process:
            other = events.boards.get(address.board)
            return None if other is None else log_of(other, after)
        question = msgspec.msgpack.encode(Question(address.board, after=after))
        try:
            answer = channel.ask(address, question, patience)
            return _LOGS.decode(answer) if answer else None
        except ConnectionError:
            self._read_letters(board, [address], [rank])
            farewell = self.farewells.get(board.number, {}).get(rank)
            return None if farewell is None else log_from(farewell.calls)
        except (OSError, msgspec.DecodeError):
            return None

    def clock(self, address: Address) -> float:
        """Seconds that the clock over there is ahead of ours; best of a few tries."""
        question, tries = msgspec.msgpack.encode(Question(0, time=True)), []
        for _ in range(5):
            before = time.time()
            answer = channel.ask(address, question, self.patience / 2)
            after = time.time()
            theirs = msgspec.msgpack.decode(answer, type=float)
            tries.append((after - before, theirs - (before + after) / 2))
        return min(tries)[1]

    def hear(self, board: events.Board, ranks: Iterable[int]) -> dict[int, Account | Silence]:
        """What these ranks say, all asked at once; of one that has ended, its farewell."""
        addresses = self.known(board, self.patience / 2)
        wanted = [r for r in ranks if r != board.rank][:ASKED_AT_MOST]
        said: dict[int, Account | Silence] = dict.fromkeys(wanted, Silence.UNKNOWN)
        asked = {r: in_thread(self.ask, addresses[r]) for r in wanted if r in addresses}
        until = time.monotonic() + self.patience
        for rank, answer in asked.items():
            said[rank] = Silence.MUTE
            with contextlib.suppress(Exception):
                said[rank] = answer.result(max(0.0, until - time.monotonic()))
        ended = [rank for rank, what in said.items() if what is Silence.ENDED]
        if ended:
            self._read_letters(board, [addresses[rank] for rank in ended], ended)
        return {rank: self._with_farewell(board, rank, what) for rank, what in said.items()}

    def _with_farewell(
        self, board: events.Board, rank: int, said: Account | Silence
    ) -> Account | Silence:
        if isinstance(said, Account):
            return said
        if farewell := self.farewells.get(board.number, {}).get(rank):
            return farewell
        heard = self._heard.get(board.number, {}).get(rank)
        if heard and said is Silence.ENDED:
            made = heard[-1].sequence
            return Account(rank, 0, "", made, heard, [], ended="its process is gone", heard=True)
        return said

    def _read_letters(
        self, board: events.Board, addresses: Iterable[Address], ranks: Iterable[int]
    ) -> None:
        """Wait until the last words of ranks that have ended are read.

        A rank's letters are sent before its socket is given back, and on one host they have come
        when they are sent; from another host they may take a moment longer.
        """
        if self._listener is not None:
            self._listener.read_all(READING)
        if not any(is_far(one) or one.machine != machine() for one in addresses):
            return
        until = time.monotonic() + ARRIVING
        while True:
            self._news.clear()
            if self.farewells.get(board.number, {}).keys() >= set(ranks):
                return
            if not self._news.wait(max(0.0, until - time.monotonic())):
                return

    # -- the end ------------------------------------------------------------------------------

    def part(self) -> None:
        """The process ends: take leave in all groups that have not ended before."""
        ended = _how_it_ends()
        for board in list(events.boards.values()):
            if not board.closed:
                self.take_leave(board, ended)
        self.rest()

    def rest(self) -> None:
        """Give the socket back; whoever is refused from now on has been told why."""
        with self._lock:
            listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()

    def drop(self) -> None:
        """In a forked child: let go of the parent's socket, which stays the parent's."""
        if self._listener is not None:
            self._listener.drop()
        self.reset()


def _nearest_first(board: events.Board, ranks: Iterable[int]) -> list[int]:
    """The rank before this one, which compares its calls with this one's; then those after."""
    return sorted(ranks, key=lambda rank: (rank - board.rank + 1) % board.size)


def meeting_host(store: Any) -> str:
    """The host that a TCPStore is on; empty for stores that are on none."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return str(getattr(store, "host", ""))


def _how_it_ends() -> str:
    """In words; an exception that ended the program is named with its line."""
    error = getattr(sys, "last_value", None)
    if error is None:
        return "its process has ended"
    trace, line = getattr(sys, "last_traceback", None), ""
    while trace is not None:
        if events.whose(trace.tb_frame.f_code.co_filename) == events.USER:
            line = f" at {events.shown(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return f"its process has ended with {type(error).__name__}{line}: {error}"


peers = Peers()
