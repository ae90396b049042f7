"""Opens a page in headless Chromium and tells what a person would see: a screenshot, complaints of the console, overflow.

Speaks the DevTools protocol over a pipe (JSON ended by a zero byte), so no driver and no library is needed.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
ARTEFACTS = Path(__file__).parents[1] / "build" / "screenshots"
"""Screenshots are kept here."""
TIMEOUT_S = 60


def find_chromium() -> str | None:
    """The browser's path: $POCKETDIT_CHROMIUM or what is on the PATH."""
    named = os.environ.get("POCKETDIT_CHROMIUM")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What was seen of a page."""

    screenshot: Path
    complaints: list[str]
    """Errors and warnings of the console, uncaught exceptions, broken policies."""
    requests: list[str]
    """Addresses the page asked for, besides its own."""
    overflow_px: int
    """How far the page is wider than the screen."""
    title: str


class Browser:
    """One headless Chromium; `with browser() as chromium: chromium.look(...)`."""

    def __init__(self, process: subprocess.Popen[bytes], to_browser: int, from_browser: int) -> None:
        self._process, self._to, self._from = process, to_browser, from_browser
        self._buffer, self._number = b"", 0
        self.events: list[dict[str, Any]] = []

    def look(
        self, page: Path, screenshot: str, *, width: int = 1200, dark: bool = False, media: str = "screen"
    ) -> Sight:
        """Opens a file as on a screen of `width` CSS pixels and keeps a screenshot of its whole length."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable", session)
        phone = width < 700
        self.call(
            "Emulation.setDeviceMetricsOverride",
            session,
            width=width,
            height=900,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", session, media=media, features=[scheme])
        self.events.clear()
        self.call("Page.navigate", session, url=page.resolve().as_uri())
        self.wait_for("Page.loadEventFired")
        self.evaluate(session, "document.fonts.ready.then(() => new Promise(requestAnimationFrame)).then(() => 1)")
        overflow = self.evaluate(session, "document.documentElement.scrollWidth - window.innerWidth")
        title = self.evaluate(session, "document.title")
        shot = self.call("Page.captureScreenshot", session, format="png", captureBeyondViewport=True)
        ARTEFACTS.mkdir(parents=True, exist_ok=True)
        path = ARTEFACTS / screenshot
        path.write_bytes(base64.b64decode(shot["data"]))
        complaints, requests = [], []
        for event in self.events:
            parameters = event["params"]
            if event["method"] == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
                complaints.append(parameters["entry"]["text"])
            if event["method"] in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
                complaints.append(json.dumps(parameters))
            if event["method"] == "Network.requestWillBeSent":
                requests.append(parameters["request"]["url"])
        own = page.resolve().as_uri()
        self.call("Target.closeTarget", targetId=target)
        return Sight(
            screenshot=path,
            complaints=complaints,
            requests=[url for url in requests if url != own and not url.startswith("data:")],
            overflow_px=max(0, int(overflow)),
            title=str(title),
        )

    def evaluate(self, session: str, expression: str) -> Any:
        """The value of a JavaScript expression, a promise awaited."""
        result = self.call("Runtime.evaluate", session, expression=expression, returnByValue=True, awaitPromise=True)
        return result["result"].get("value")

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """One command and its answer; events on the way are kept."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])
            self.events.append(answer)

    def wait_for(self, method: str) -> None:
        """Reads until that event has come."""
        while not any(event.get("method") == method for event in self.events):
            self.events.append(self._read())

    def _read(self) -> dict[str, Any]:
        end = time.monotonic() + TIMEOUT_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"Chromium said nothing for {TIMEOUT_S} s"
            chunk = os.read(self._from, 1 << 20)
            assert chunk, f"Chromium ended with status {self._process.wait()}"
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(line))


@contextmanager
def browser() -> Iterator[Browser]:
    """Starts Chromium and ends it."""
    path = find_chromium()
    assert path, "no Chromium"
    their_read, to_browser = os.pipe()
    from_browser, their_write = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [path, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        command += ["--remote-debugging-pipe", "--hide-scrollbars", f"--user-data-dir={profile}", "about:blank"]
        # Chromium reads commands from descriptor 3 and writes answers to 4; a shell puts ours there.
        shell = f'exec "$@" 3<&{their_read} 4>&{their_write}'
        process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *command],
            pass_fds=(their_read, their_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(their_read)
        os.close(their_write)
        try:
            yield Browser(process, to_browser, from_browser)
        finally:
            process.terminate()
            process.wait(timeout=TIMEOUT_S)
            os.close(to_browser)
            os.close(from_browser)
