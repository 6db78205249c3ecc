"""The page in a real browser: it draws, tells what it shows, obeys, and asks for nothing."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.recorder.report import write_report
from tests.recorder.report.browser import CHROMIUM, Browser, Page
from tests.recorder.report.runs import made_up_run, write_run

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs Chromium (apt-get install chromium)")

NOTE = "rank 2 has not called all_reduce #44; it is at data.py:12."


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as started:
        yield started


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    logs = made_up_run(4, 60, slow=2, notes=[NOTE])
    return write_report(write_run(tmp_path_factory.mktemp("slow"), logs))


def colours(png: bytes) -> set[bytes]:
    """The colours in a picture, read without an imaging library."""
    width, height, depth, kind = struct.unpack(">IIBB", png[16:26])
    assert depth == 8
    step = {2: 3, 6: 4}[kind]
    packed, at = b"", 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        if png[at + 4 : at + 8] == b"IDAT":
            packed += png[at + 8 : at + 8 + length]
        at += length + 12
    raw, row = zlib.decompress(packed), width * step
    found: set[bytes] = set()
    before = bytearray(row)
    for y in range(height):
        line = _unfiltered(
            raw[y * (row + 1)], bytearray(raw[y * (row + 1) + 1 :][:row]), before, step
        )
        found.update(bytes(line[x : x + 3]) for x in range(0, row, step))
        before = line
    return found


def _unfiltered(kind: int, line: bytearray, above: bytearray, step: int) -> bytearray:
    for x in range(len(line)) if kind else ():
        left = line[x - step] if x >= step else 0
        corner = above[x - step] if x >= step else 0
        guesses = (0, left, above[x], (left + above[x]) // 2, _paeth(left, above[x], corner))
        line[x] = (line[x] + guesses[kind]) & 255
    return line


def _paeth(left: int, up: int, corner: int) -> int:
    guess = left + up - corner
    return min((left, up, corner), key=lambda value: abs(guess - value))


def drawn(page: Page) -> int:
    return int(page.run("document.body.dataset.drawn"))


def healthy(page: Page) -> None:
    assert page.run("document.body.dataset.ready") == "yes"
    assert page.complaints() == []
    assert page.requests() == []


def test_the_page_draws_and_says_what_it_shows(browser: Browser, slow: Path) -> None:
    with browser.page(slow) as page:
        healthy(page)
        assert drawn(page) > 20
        text = page.text()
        for expected in (
            "Rank 2 made the others wait: it launched last in 60 of 60 steps",
            NOTE,
            "node0 (4002)",
            "all_reduce",
            "train.py:41",
        ):
            assert expected in text


@pytest.mark.parametrize("dark", [False, True])
def test_the_picture_has_the_timelines_colours_in_light_and_dark(
    browser: Browser, slow: Path, dark: bool
) -> None:
    with browser.page(slow, 1000, 700, dark=dark) as page:
        page.middle("#timeline")
        found = colours(page.screenshot(clip=page.box("#timeline", 320, 120)))
        for name in ("ground", "forward", "backward", "flight"):
            value = page.run(
                f"getComputedStyle(document.documentElement).getPropertyValue('--{name}')"
            )
            assert bytes.fromhex(value.strip()[1:]) in found, name
        ground = {False: b"\xff\xff\xff", True: b"\x15\x18\x1d"}
        assert (ground[dark] in found, ground[not dark] in found) == (True, False)


def test_at_1000_pixels_nothing_is_wider_than_the_window(browser: Browser, slow: Path) -> None:
    with browser.page(slow, 1000, 800) as page:
        assert page.run("document.documentElement.scrollWidth") <= 1000
        wide = (
            "[...document.querySelectorAll('.wide')].every((e) => e.scrollWidth <= e.clientWidth)"
        )
        assert page.run(wide)


def test_the_mouse_over_a_bucket_tells_its_numbers(browser: Browser, slow: Path) -> None:
    with browser.page(slow) as page:
        left, top = page.run(
            "(() => { const e = document.getElementById('timeline'); e.scrollIntoView();"
            " const b = e.getBoundingClientRect(); return [b.left, b.top]; })()"
        )
        told = set()
        for x in range(100, 900, 40):
            for y in (48, 66, 80, 94):
                page.mouse("mouseMoved", left + x, top + y)
                if not page.run("document.getElementById('tip').hidden"):
                    told.add(page.text("#tip"))
        said = "\n".join(told)
        for expected in (
            "forward",
            "backward",
            "bucket 3 · 2.62 MB",
            "rank 2 launched it last",
            "waited for",
        ):
            assert expected in said
        page.mouse("mouseMoved", 5, 5)
        page.wait_for("document.getElementById('tip').hidden")
        healthy(page)


def test_the_wheel_zooms_and_dragging_moves(browser: Browser, slow: Path) -> None:
    with browser.page(slow) as page:
        x, y = page.middle("#timeline")
        before = page.screenshot()
        page.mouse("mouseWheel", x, y, deltaX=0, deltaY=-100, modifiers=2)
        zoomed = page.screenshot()
        page.mouse("mousePressed", x, y, button="left", buttons=1, clickCount=1)
        page.mouse("mouseMoved", x - 200, y, button="left", buttons=1)
        page.mouse("mouseReleased", x - 200, y, button="left", clickCount=1)
        moved = page.screenshot()
        assert len({before, zoomed, moved}) == 3
        healthy(page)


def test_the_keys_walk_through_ranks_steps_and_buckets(browser: Browser, slow: Path) -> None:
    with browser.page(slow) as page:
        page.run("document.getElementById('timeline').focus()")
        page.press("ArrowDown")
        assert page.text("#told").startswith("rank 1 · on node0")
        page.press("n", "n")
        first = page.text("#told")
        page.press("n", "n")
        second = page.text("#told")
        step = [int(text.split("step ")[1].split()[0]) for text in (first, second)]
        assert step[1] == step[0] + 1
        page.press(".", ".")
        assert "bucket" in page.text("#told")
        near = drawn(page)
        page.press("0", "0")
        assert not page.run("document.getElementById('mode').hidden") or drawn(page) > near
        for key in ("ArrowLeft", "ArrowRight", "ArrowUp", "+", "-", "p", ","):
            page.press(key, key if len(key) == 1 else "")
        healthy(page)


def test_a_step_chosen_in_the_chart_is_shown_in_the_timeline(browser: Browser, slow: Path) -> None:
    with browser.page(slow) as page:
        page.run("document.getElementById('chart').focus()")
        for _ in range(3):
            page.press("ArrowRight")
        assert page.text("#point").startswith("step 2 · rank 0:")
        assert "rank 2 launched last" in page.text("#point")
        page.press("Enter")
        assert page.text("#told") == "step 2"
        for value in ("step", "work", "waited"):
            page.click(f"#measure [value={value}]")
        healthy(page)


def test_a_table_is_sorted_by_the_column_that_is_clicked(browser: Browser, slow: Path) -> None:
    with browser.page(slow) as page:
        first = "document.querySelector('#ranks ~ .wide tbody tr').cells[0].innerText"
        assert page.run(first) == "0"
        page.run("document.querySelectorAll('#ranks ~ .wide th button')[7].click()")
        assert page.run(first) == "2"  # it cost the others most
        assert (
            page.run("document.querySelectorAll('#ranks ~ .wide th')[7].getAttribute('aria-sort')")
            == "descending"
        )


def test_the_page_prints_with_its_headings(browser: Browser, slow: Path) -> None:
    with browser.page(slow, dark=True) as page:
        page.ask("Emulation.setEmulatedMedia", media="print")
        assert "Cost the others" in page.text("#ranks ~ .wide")
        assert page.pdf().startswith(b"%PDF")
        assert page.run("document.documentElement.classList.contains('paper')") is False  # and back
        healthy(page)


@pytest.mark.parametrize(("ranks", "steps"), [(1, 1), (1, 40), (2, 2), (12, 120)])
def test_runs_of_any_shape_draw(browser: Browser, tmp_path: Path, ranks: int, steps: int) -> None:
    path = write_report(write_run(tmp_path, made_up_run(ranks, steps, hosts=min(2, ranks))))
    with browser.page(path) as page:
        for button in ("typical", "slowest", "whole", "closer", "farther", "compact"):
            page.run(f"document.getElementById('{button}').click()")
        assert drawn(page) > 0
        healthy(page)


def test_a_log_without_steps_draws_too(browser: Browser, tmp_path: Path) -> None:
    path = write_report(write_run(tmp_path, made_up_run(2, 0)))
    with browser.page(path) as page:
        page.run("document.getElementById('slowest').click()")
        page.run("document.getElementById('timeline').focus()")
        for key in ("n", ".", "ArrowDown", "0"):
            page.press(key, key if len(key) == 1 else "")
        assert "No step was recorded" in page.text()
        healthy(page)


@pytest.mark.slow
def test_64_ranks_and_a_full_recorder_draw_in_time(browser: Browser, tmp_path: Path) -> None:
    logs = made_up_run(64, 510, slow=17, hosts=8, buckets=(1_000_000,) * 8)
    path = write_report(write_run(tmp_path, logs))
    with browser.page(path) as page:
        page.run("document.getElementById('whole').click()")
        assert 0 < drawn(page) < 60_000  # what cannot be seen is not drawn
        assert "Rank 17 made the others wait" in page.text()
        healthy(page)
