"""Shows what the ranks write, line by line, each with its rank; a thread that reads their pipes.

On a terminal every rank has a colour, and a progress bar stays below the lines of the others. In a
file or a pipe a bar becomes a line now and then, and its last state.
"""

from __future__ import annotations

import itertools
import os
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TextIO

from .. import say
from .lines import IDLE, Piece, RankLines

_COLOURS = ("36", "33", "32", "35", "34", "96", "93", "92", "95", "94")
_BAR_EVERY = 5.0  # seconds between two lines of one bar where it cannot be overwritten
_CHUNK = 1 << 16
_DRAIN = 2.0  # seconds at the end for what is still in the pipes


@dataclass
class Bar:
    """What stands on the terminal without a line end, and whose it is."""

    rank: int = -1
    text: str = ""


@dataclass
class Screen:
    """One output stream of ours, shared by all ranks; streams of one terminal share ``bar``."""

    stream: TextIO
    bar: Bar = field(default_factory=Bar)
    clock: Callable[[], float] = time.monotonic
    _shown: dict[int, float] = field(default_factory=dict)  # when a rank's bar last became a line

    @property
    def overwrites(self) -> bool:
        """Whether what is shown can be taken back; elsewhere half a line would be there twice."""
        return self.stream.isatty()

    def show(self, rank: int, piece: Piece) -> None:
        """Show a piece; the bar of another rank moves below it."""
        text = f"{self._mark(rank)} {piece.text}"
        wipe = "\r\x1b[K" if self.bar.text else ""
        if piece.over and self.bar.rank == rank:
            self.bar.text = ""
        if piece.over:
            self._shown.pop(rank, None)
            self._write(f"{wipe}{text}\n{self.bar.text}")
        elif self.overwrites:
            self.bar.rank, self.bar.text = rank, text
            self._write(wipe + text)
        elif self._bar_is_due(rank):
            self._write(f"{text}\n")

    def _write(self, text: str) -> None:
        try:
            self.stream.write(text)
        except UnicodeEncodeError:  # a locale that does not know these letters
            known = self.stream.encoding
            self.stream.write(text.encode(known, "backslashreplace").decode(known))

    def end_bar(self) -> None:
        """Leave the last bar where it stands."""
        if self.bar.text:
            self.bar.text = ""
            self.stream.write("\n")

    def _bar_is_due(self, rank: int) -> bool:
        now = self.clock()
        due = now - self._shown.get(rank, -_BAR_EVERY) >= _BAR_EVERY
        if due:
            self._shown[rank] = now
        return due

    def _mark(self, rank: int) -> str:
        return say.paint(f"[{rank}]", _COLOURS[rank % len(_COLOURS)], self.stream)


@dataclass(eq=False)
class _Source:
    """One stream of one rank, and where it is shown."""

    rank: int
    number: int  # 1: stdout, 2: stderr
    screen: Screen
    ends: bool  # when its writers have; a named pipe of ours does not
    lines: RankLines = field(default_factory=RankLines)


class OutputReader:
    """Reads the ranks' pipes and shows what comes, until it is closed."""

    def __init__(self, show: Collection[int] = ()) -> None:
        self.shown: Collection[int] | None = show or None  # whose stdout is shown; None: all
        self._asked: deque[Collection[int]] = deque()  # …from now on, one after the other
        bar = Bar()
        self._screens = {1: Screen(sys.stdout, bar), 2: Screen(sys.stderr, bar)}
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        # A byte: other ranks are to be shown. Its end: ours.
        self._words, self._speaker = os.pipe()
        self._selector.register(self._words, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="paceline output", daemon=True)
        self._thread.start()

    def add(self, path: str, rank: int, number: int) -> None:
        """Read the named pipe ``path``, the rank's stdout (1) or stderr (2)."""
        # Opened for writing too: a pipe without writers, between restarts, is not at its end.
        self._register(os.open(path, os.O_RDWR), rank, number, ends=False)

    def read(self, pipe: int, rank: int, number: int) -> None:
        """Read ``pipe`` to its end, the rank's stdout (1) or stderr (2); it is closed then."""
        self._register(pipe, rank, number, ends=True)

    def show(self, ranks: Collection[int]) -> None:
        """Show the stdout of ``ranks`` from now on; what others wrote before is not lost."""
        self._asked.append(ranks)
        os.write(self._speaker, b"s")

    def _register(self, pipe: int, rank: int, number: int, ends: bool) -> None:
        os.set_blocking(pipe, False)
        source = _Source(rank, number, self._screens[number], ends)
        with self._lock:
            self._selector.register(pipe, selectors.EVENT_READ, source)

    def close(self) -> None:
        """Show what the ranks have written so far, and end."""
        os.close(self._speaker)
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            self._selector.unregister(key.fd)
            os.close(key.fd)
        self._selector.close()

    def _run(self) -> None:
        going = True
        while going:
            ready = [key for key, _ in self._selector.select(IDLE)]
            if any(key.data is None for key in ready):
                going = bool(os.read(self._words, _CHUNK))
                self._turn()  # after which what was ready may be closed
            else:
                for key in ready:
                    self._take(key)
            for key in self._sources():
                if key.data.screen.overwrites:
                    self._emit(key, key.data.lines.idle(time.monotonic()))
        self._drain()

    def _turn(self) -> None:
        """Show the ranks that were asked for, once what those before have written is shown."""
        asked = [self._asked.popleft() for _ in range(len(self._asked))]
        if not asked:
            return
        if self.shown is not None:
            self.shown = {*self.shown, *itertools.chain(*asked)}
        for key in self._sources():
            if self._take(key):  # all that a pipe holds; then its end, which ends a last line
                self._take(key)
        self.shown = asked[-1]

    def _drain(self) -> None:
        until = time.monotonic() + _DRAIN  # what a rank left running may write without end
        while sum(self._take(key) for key in self._sources()) and time.monotonic() < until:
            pass
        for key in self._sources():
            self._emit(key, key.data.lines.rest())
        for screen in self._screens.values():
            screen.end_bar()
            _flush(screen)

    def _sources(self) -> list[selectors.SelectorKey]:
        with self._lock:
            return [key for key in self._selector.get_map().values() if key.data is not None]

    def _take(self, key: selectors.SelectorKey) -> int:
        try:
            data = os.read(key.fd, _CHUNK)
        except BlockingIOError:
            return 0
        if not data:
            self._emit(key, key.data.lines.rest())
            self._forget(key)
            return 0
        self._emit(key, key.data.lines.feed(data, time.monotonic()))
        return len(data)

    def _forget(self, key: selectors.SelectorKey) -> None:
        with self._lock:
            if key.fd in self._selector.get_map():
                self._selector.unregister(key.fd)
                os.close(key.fd)

    def _hides(self, source: _Source) -> bool:
        return source.number == 1 and self.shown is not None and source.rank not in self.shown

    def _emit(self, key: selectors.SelectorKey, pieces: Iterator[Piece]) -> None:
        source: _Source = key.data
        try:
            for piece in pieces:
                if not self._hides(source):
                    source.screen.show(source.rank, piece)
            source.screen.stream.flush()
        except BrokenPipeError:
            # Nobody reads us any more, as in `| head`: the ranks shall learn it as we did. Not
            # those that outlive us: they read their own pipes when we are gone.
            if source.ends:
                _let_go(source.screen)
            else:
                self._forget(key)
        except OSError as error:  # such as a full disk: no reason for the ranks to stop
            _let_go(source.screen)
            with suppress(OSError):  # neither can this be
                say.complain(f"what the ranks write is not shown any more ({error.strerror})")


def _flush(screen: Screen) -> None:
    try:
        screen.stream.flush()
    except OSError:
        _let_go(screen)


def _let_go(screen: Screen) -> None:
    """Discard further output; Python would raise again when it closes the stream."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, screen.stream.fileno())
    os.close(nowhere)
