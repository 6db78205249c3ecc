"""Drives headless Chromium over a pair of pipes, with nothing but the standard library.

One browser for many pages: starting it takes seconds, a page takes a fraction of one.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
DEADLINE = 300.0  # seconds for any one answer; a busy machine is slow


class Browser:
    """A running Chromium; use it as a context."""

    def __init__(self, folder: Path) -> None:
        down_read, self._down = _pipe()
        self._up, up_write = _pipe()
        command = f'exec "$0" "$@" 3<&{down_read} 4>&{up_write}'  # where it looks for them
        switches = (
            "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--hide-scrollbars", "--no-first-run", "--disable-background-networking",
            "--disable-component-update", "--disable-extensions", "--disable-sync",
            "--force-device-scale-factor=1", "--remote-debugging-pipe",
            f"--user-data-dir={folder}", "about:blank",
        )  # fmt: skip
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", command, CHROMIUM, *switches],
            pass_fds=(down_read, up_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(down_read)
        os.close(up_write)
        self._number = 0
        self._rest = b""

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._down)
        os.close(self._up)

    def ask(
        self, method: str, session: str = "", heard: list[Any] | None = None, **params: Any
    ) -> Any:
        """Call a method of the DevTools protocol; events on the way go to ``heard``."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._down, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            if heard is not None and "method" in answer:
                heard.append(answer)

    def _read(self) -> Any:
        until = time.monotonic() + DEADLINE
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._up], [], [], max(0.0, until - time.monotonic()))
            assert ready, "the browser does not answer"
            found = os.read(self._up, 1 << 20)
            assert found, "the browser has ended"
            self._rest += found
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    @contextmanager
    def page(
        self, path: Path, width: int = 1000, height: int = 900, *, dark: bool = False
    ) -> Iterator[Page]:
        """Open a file and wait until its script has run."""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        page.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.ask("Emulation.setEmulatedMedia", features=[scheme])
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.ask(f"{domain}.enable")
        page.ask("Page.navigate", url=path.resolve().as_uri())
        page.wait_for("document.readyState === 'complete'")
        yield page
        self.ask("Target.closeTarget", targetId=target)


def _pipe() -> tuple[int, int]:
    """A pipe whose numbers are out of the way of 3 and 4."""
    low = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 32) for end in low)
    for end in low:
        os.close(end)
    return high[0], high[1]


class Page:
    """One page, what it complained about, and what it asked the network for."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self._heard: list[Any] = []

    def ask(self, method: str, **params: Any) -> Any:
        return self._browser.ask(method, self._session, self._heard, **params)

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.ask(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Ask again and again, each time after a frame, until it holds."""
        until = time.monotonic() + DEADLINE
        while not self.run(condition):
            assert time.monotonic() < until, condition
            self.run("new Promise((done) => setTimeout(done, 20))")

    def press(self, key: str, text: str = "") -> None:
        for kind in ("keyDown", "keyUp"):
            self.ask(
                "Input.dispatchKeyEvent", type=kind, key=key, text=text if kind == "keyDown" else ""
            )

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, selector: str) -> None:
        x, y = self.middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", buttons=1, clickCount=1)

    def middle(self, selector: str) -> tuple[float, float]:
        box = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); "
            "e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect(); "
            "return [b.left + b.width / 2, b.top + b.height / 2]; })()"
        )
        return float(box[0]), float(box[1])

    def text(self, selector: str = "body") -> str:
        return str(self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    def complaints(self) -> list[str]:
        """Errors and warnings on the console, and exceptions."""
        kinds = {"Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"}
        return [json.dumps(e["params"]) for e in self._heard if e["method"] in kinds]

    def requests(self) -> list[str]:
        """Everything it asked for besides itself."""
        asked = [e for e in self._heard if e["method"] == "Network.requestWillBeSent"]
        return [e["params"]["request"]["url"] for e in asked if e["params"]["type"] != "Document"]

    def screenshot(self, whole: bool = False, clip: dict[str, float] | None = None) -> bytes:
        area = {"clip": clip} if clip else {}
        found = self.ask(
            "Page.captureScreenshot", format="png", captureBeyondViewport=whole, **area
        )
        return base64.b64decode(found["data"])

    def box(self, selector: str, width: float, height: float) -> dict[str, float]:
        """The upper left part of an element, for a picture of it."""
        x, y = self.run(
            f"(() => {{ const b = document.querySelector({json.dumps(selector)})"
            ".getBoundingClientRect(); return [b.left + scrollX, b.top + scrollY]; })()"
        )
        return {"x": x, "y": y, "width": width, "height": height, "scale": 1}

    def pdf(self) -> bytes:
        found = self.ask("Page.printToPDF", printBackground=True)
        return base64.b64decode(found["data"])
