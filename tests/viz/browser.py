"""Headless Chromium, spoken to through a pipe: pages are loaded, asked and photographed as a person would see them.

The DevTools protocol, one JSON message after another, each ended by a zero byte: the browser reads file descriptor 3
and writes 4 (`--remote-debugging-pipe`). Nothing listens on a port.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--mute-audio",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--disable-background-networking",
    "--remote-debugging-pipe",
)  # fmt: skip


def browser_path() -> str | None:
    """An installed Chromium or Chrome; `CHROME` in the environment names another."""
    named = os.environ.get("CHROME")
    return named or next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """A browser; `with Browser(folder) as browser: page = browser.open(path)`."""

    def __init__(self, folder: Path) -> None:
        path = browser_path()
        assert path is not None
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        # The shell moves the pipe's ends to 3 and 4, whatever numbers they have here.
        script = f'exec "$0" "$@" 3<&{to_read} 4>&{to_write}'
        command = ["bash", "-c", script, path, *_FLAGS, f"--user-data-dir={folder}", "about:blank"]
        self._log = (folder.parent / "browser.log").open("wb")
        self._process = subprocess.Popen(
            command, stdout=self._log, stderr=self._log, pass_fds=(to_read, to_write), start_new_session=True
        )
        os.close(to_read)
        os.close(to_write)
        self._number = 0
        self._rest = b""
        self._events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.say("Browser.close")
        except (OSError, TimeoutError, RuntimeError):
            self._process.kill()
        self._process.wait(20)
        os.close(self._write)
        os.close(self._read)
        self._log.close()

    def say(self, method: str, session: str | None = None, **about: Any) -> dict[str, Any]:
        """Call a method of the protocol and wait for its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": about}
        if session:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self._number:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']}")
                return found["result"]
            if "method" in found:
                self._events.append(found)

    def wait_for(self, method: str) -> None:
        """Until an event of this name has come."""
        while not any(event["method"] == method for event in self._events):
            self._events.append(self._next())

    def forget(self) -> None:
        """Drop the events that came so far."""
        self._events.clear()

    def events(self, method: str) -> list[dict[str, Any]]:
        """What events of this name said."""
        return [event["params"] for event in self._events if event["method"] == method]

    def _next(self, seconds: float = 60) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError("the browser does not answer")
            part = os.read(self._read, 1 << 20)
            if not part:
                raise RuntimeError(f"the browser ended; see {self._log.name}")
            self._rest += part
        text, _, self._rest = self._rest.partition(b"\0")
        return json.loads(text)

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> Page:
        """A page of a file, loaded, in a window of this size."""
        target = self.say("Target.createTarget", url="about:blank")["targetId"]
        session = self.say("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, target, session)
        for method in ("Page.enable", "Runtime.enable", "Network.enable", "Log.enable"):
            page.say(method)
        page.size(width, height)
        page.colours("dark" if dark else "light")
        self.forget()
        page.say("Page.navigate", url=path.absolute().as_uri())
        self.wait_for("Page.loadEventFired")
        return page


class Page:
    """An open page."""

    def __init__(self, browser: Browser, target: str, session: str) -> None:
        self._browser, self._target, self._session = browser, target, session

    def say(self, method: str, **about: Any) -> dict[str, Any]:
        return self._browser.say(method, self._session, **about)

    def size(self, width: int, height: int, *, scale: float = 1) -> None:
        self.say(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )

    def colours(self, scheme: str) -> None:
        """Prefer "light" or "dark"."""
        self.say("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        found = self.say("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']['exception'].get('description')}")
        return found["result"].get("value")

    def text(self, selector: str) -> str:
        return self.ask(f"document.querySelector({json.dumps(selector)}).textContent")

    def texts(self, selector: str) -> list[str]:
        return self.ask(f"[...document.querySelectorAll({json.dumps(selector)})].map((n) => n.textContent)")

    def count(self, selector: str) -> int:
        return self.ask(f"document.querySelectorAll({json.dumps(selector)}).length")

    def click(self, selector: str) -> None:
        self.ask(f"document.querySelector({json.dumps(selector)}).click()")

    def type(self, selector: str, text: str) -> None:
        self.ask(
            f"(() => {{ const n = document.querySelector({json.dumps(selector)}); n.value = {json.dumps(text)};"
            " n.dispatchEvent(new Event('input', {bubbles: true})); })()"
        )

    def settle(self) -> None:
        """Until the page has drawn twice."""
        self.ask("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def troubles(self) -> list[str]:
        """Uncaught errors, and what was logged as an error or refused by the page's policy."""
        thrown = [str(e["exceptionDetails"]) for e in self._browser.events("Runtime.exceptionThrown")]
        logged = [e["entry"]["text"] for e in self._browser.events("Log.entryAdded") if e["entry"]["level"] == "error"]
        return thrown + logged

    def fetched(self) -> list[str]:
        """Addresses that the page asked for."""
        return [e["request"]["url"] for e in self._browser.events("Network.requestWillBeSent")]

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """Write a PNG."""
        data = self.say("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        self._browser.say("Target.closeTarget", targetId=self._target)
