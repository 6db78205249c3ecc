"""How output is cut into lines and shown: pure, with a stand-in for the terminal."""

import errno
import io
import os
import sys
import threading

from paceline.cli.run.lines import IDLE, Piece, RankLines
from paceline.cli.run.screen import Bar, OutputReader, Screen
from tests.waiting import PATIENCE, until


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def over(text: str) -> Piece:
    return Piece(text, over=True)


def bar(text: str) -> Piece:
    return Piece(text, over=False)


def test_lines_come_whole_however_they_were_written() -> None:
    lines = RankLines()
    assert list(lines.feed(b"on", 0)) == []
    assert list(lines.feed(b"e\ntwo\r\n\nthr", 0)) == [over("one"), over("two"), over("")]
    assert list(lines.rest()) == [over("thr")]
    assert list(lines.rest()) == []


def test_a_letter_cut_in_the_middle_is_put_together() -> None:
    lines = RankLines()
    data = "naïve\n".encode()
    assert list(lines.feed(data[:3], 0)) == []
    assert list(lines.feed(data[3:], 0)) == [over("naïve")]
    assert list(lines.feed(b"\xff\n", 0)) == [over("\ufffd")]


def test_a_progress_bar_is_text_to_be_overwritten_and_ends_as_a_line() -> None:
    lines = RankLines()
    assert list(lines.feed(b"\r 10%", 0)) == []
    assert list(lines.feed(b"\r 20%", 0)) == [bar(" 10%")]
    assert list(lines.feed(b"\r100%\n", 0)) == [bar(" 20%"), over("100%")]


def test_text_without_an_end_is_shown_after_a_while_once() -> None:
    lines = RankLines()
    assert list(lines.feed(b"(Pdb) ", 10.0)) == []
    assert list(lines.idle(10.0 + IDLE / 2)) == []
    assert list(lines.idle(10.0 + 1.5 * IDLE)) == [bar("(Pdb) ")]
    assert list(lines.idle(10.0 + 2 * IDLE)) == []
    assert list(lines.feed(b"n\n", 11.0)) == [over("(Pdb) n")]


def test_text_without_any_end_is_not_hoarded() -> None:
    lines = RankLines()
    assert sum(len(piece.text) for piece in lines.feed(b"x" * 3_000_000, 0)) == 3_000_000


def test_lines_carry_their_rank_plainly_in_a_file() -> None:
    screen = Screen(io.StringIO())
    screen.show(0, over("hello"))
    screen.show(11, over("there"))
    assert screen.stream.getvalue() == "[0] hello\n[11] there\n"


def test_letters_that_a_locale_does_not_know_are_spelled_out() -> None:
    data = io.BytesIO()
    screen = Screen(io.TextIOWrapper(data, encoding="ascii"))
    screen.show(0, over("café"))
    screen.stream.flush()
    assert data.getvalue() == b"[0] caf\\xe9\n"


def test_output_that_cannot_be_written_is_told_once_and_stops_no_rank(
    tmp_path, monkeypatch, capsys
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        reader = OutputReader()
        reader.add(str(pipe), rank=0, number=1)
        with pipe.open("w") as rank:
            for _ in range(10_000):  # more than a pipe holds: it is read to the end
                rank.write("a line of a rank\n")
        reader.close()
    said = "paceline: what the ranks write is not shown any more (No space left on device)\n"
    assert capsys.readouterr().err == said


class FullStream(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_ranks_write_on_though_not_even_that_can_be_told(tmp_path, monkeypatch) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr(sys, "stderr", FullStream())
        reader = OutputReader()
        reader.add(str(pipe), rank=0, number=1)
        more_than_it_holds = "a line of a rank\n" * 10_000
        rank = threading.Thread(target=pipe.write_text, args=(more_than_it_holds,), daemon=True)
        rank.start()
        rank.join(PATIENCE)
        assert not rank.is_alive()
        reader.close()


def test_in_a_file_a_line_whose_writer_stalls_is_there_once(tmp_path, monkeypatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setattr("paceline.cli.run.lines.IDLE", 0.0)
    reader, pipes = OutputReader(), [tmp_path / "0", tmp_path / "1"]
    for rank, pipe in enumerate(pipes):
        os.mkfifo(pipe)
        reader.add(str(pipe), rank, number=1)
    with pipes[0].open("w") as slow, pipes[1].open("w") as other:
        print("half", end="", file=slow, flush=True)
        for turn in range(3):  # each is shown once the reader has looked at both
            print("turn", turn, file=other, flush=True)
            while f"turn {turn}" not in shown.getvalue():
                pass
        print(" a line", file=slow, flush=True)
    reader.close()
    said = shown.getvalue().splitlines()
    assert sorted(said) == ["[0] half a line", *(f"[1] turn {turn}" for turn in range(3))]


class HeldStream(io.StringIO):
    """Takes a first line only when it is let go; what comes later stays in the pipes till then."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.let_go = threading.Event(), threading.Event()

    def write(self, text: str) -> int:
        self.reached.set()
        assert self.let_go.wait(PATIENCE)
        return super().write(text)


def test_last_lines_of_a_rank_are_shown_though_others_are_to_be_shown_meanwhile(
    monkeypatch,
) -> None:
    screen = HeldStream()
    monkeypatch.setattr(sys, "stdout", screen)
    reader = OutputReader()
    ranks = [_writer(reader, rank, 1) for rank in (0, 1, 2)]
    reader.show({0})
    assert until(lambda: reader.shown is not None)
    os.write(ranks[0], b"held\n")
    assert screen.reached.wait(PATIENCE)
    os.write(ranks[0], b"last\nwords")
    os.close(ranks[0])
    reader.show({1})
    reader.show({2})
    os.write(ranks[2], b"first\n")
    screen.let_go.set()
    reader.close()
    assert screen.getvalue().splitlines() == ["[0] held", "[0] last", "[0] words", "[2] first"]
    for rank in ranks[1:]:
        os.close(rank)


def test_once_ranks_are_asked_for_none_is_not_all(monkeypatch) -> None:
    shown, errors = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setattr(sys, "stderr", errors)
    reader = OutputReader()
    out, err = _writer(reader, 0, 1), _writer(reader, 0, 2)
    os.write(out, b"before\n")
    reader.show(())
    assert until(lambda: reader.shown is not None)
    os.write(out, b"hidden\n")
    os.write(err, b"an error\n")
    os.close(out)
    os.close(err)
    reader.close()
    assert shown.getvalue() == "[0] before\n"
    assert errors.getvalue() == "[0] an error\n"


def _writer(reader: OutputReader, rank: int, number: int) -> int:
    """Return what a rank writes to; ``reader`` has the other end."""
    pipe, writes = os.pipe()
    reader.read(pipe, rank, number)
    return writes


def test_on_a_terminal_each_rank_has_a_colour(monkeypatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen(Terminal())
    screen.show(0, over("a"))
    screen.show(1, over("a"))
    first, second = screen.stream.getvalue().splitlines()
    assert first.startswith("\x1b[")
    assert first.replace("0]", "1]") != second


def test_on_a_terminal_a_bar_stays_below_the_lines_of_others(monkeypatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    shared = Bar()
    terminal = Terminal()
    out, err = Screen(terminal, shared), Screen(terminal, shared)
    err.show(0, bar("10%"))
    out.show(1, over("a line"))
    assert terminal.getvalue() == "[0] 10%\r\x1b[K[1] a line\n[0] 10%"
    err.show(0, over("100%"))
    out.show(1, over("more"))
    assert terminal.getvalue().endswith("\r\x1b[K[0] 100%\n[1] more\n")


def test_in_a_file_a_bar_becomes_a_line_now_and_then() -> None:
    now = 0.0
    screen = Screen(io.StringIO(), clock=lambda: now)
    for tick in range(100):
        now = tick / 10
        screen.show(0, bar(f"{tick}%"))
    screen.show(0, over("100%"))
    assert screen.stream.getvalue() == "[0] 0%\n[0] 50%\n[0] 100%\n"
