"""A headless Chromium that shows pages, for pictures of the documentation and for tests of pages.

with Browser() as browser:
    tab = browser.open(page.as_uri(), width=1280, dark=True)
    tab.run("document.title")
    tab.picture(Path("page.png"))

It uses the protocol of Chromium's developer tools (https://chromedevtools.github.io/devtools-protocol) over two
pipes, so that it opens no port.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ds.errors import ConfigError

NAMES = ("chromium", "chromium-browser", "google-chrome")
# It hangs: slow machines take long.
SECONDS = 120.0
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--hide-scrollbars",
    "--no-first-run",
    "--remote-debugging-pipe",
)


def program() -> str | None:
    """Return the path of Chromium; None where it is not installed."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@dataclass
class Tab:
    """One page. errors: what its scripts and its loading reported."""

    browser: "Browser"
    session: str
    errors: list[str] = field(default_factory=list)
    is_loaded: bool = False

    def call(self, method: str, **values: Any) -> dict[str, Any]:
        """Send one command of the protocol, and return its result."""
        return self.browser.call(method, values, self.session)

    def run(self, script: str) -> Any:
        """Return the value of JavaScript, of which a promise is waited for. Raises RuntimeError where it fails."""
        done = self.call(
            "Runtime.evaluate",
            expression=script,
            awaitPromise=True,
            returnByValue=True,
        )
        if "exceptionDetails" in done:
            raise RuntimeError(f"{script}: {done['exceptionDetails']}")
        return done["result"].get("value")

    def wait_until(self, script: str) -> None:
        """Wait until the value of JavaScript is true. Raises TimeoutError."""
        end = time.monotonic() + SECONDS
        while not self.run(script):
            if time.monotonic() > end:
                raise TimeoutError(f"not true after {SECONDS:.0f} s: {script}")
            time.sleep(0.05)

    def picture(self, path: Path, whole: bool = False) -> None:
        """Write what is visible, or the whole page, as PNG."""
        taken = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(taken["data"]))

    def note(self, event: dict[str, Any]) -> None:
        """Keep what an event reports."""
        values = event["params"]
        match event["method"]:
            case "Page.loadEventFired":
                self.is_loaded = True
            case "Runtime.exceptionThrown":
                self.errors.append(values["exceptionDetails"]["text"])
            case "Runtime.consoleAPICalled" if values["type"] in ("error", "warning"):
                said = [str(each.get("value")) for each in values["args"]]
                self.errors.append(" ".join(said))
            case "Log.entryAdded" if values["entry"]["level"] == "error":
                entry = values["entry"]
                self.errors.append(f"{entry['text']} {entry.get('url', '')}")

    def close(self) -> None:
        """Close the tab."""
        self.call("Page.close")
        self.browser.tabs.pop(self.session)


class Browser:
    """A process of Chromium with a folder of its own. Raises ConfigError where Chromium is missing."""

    def __init__(self):
        chromium = program()
        if chromium is None:
            raise ConfigError(
                f"none of {', '.join(NAMES)} is installed, which makes pictures of pages. On Debian: "
                "apt-get install chromium"
            )
        self.tabs: dict[str, Tab] = {}
        self._number = 0
        self._answers: dict[int, dict[str, Any]] = {}
        self._rest = b""
        with ExitStack() as stack:
            self._start(chromium, stack)
            self._stack = stack.pop_all()

    def _start(self, chromium: str, stack: ExitStack) -> None:
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        )
        # Chromium reads commands from descriptor 3, and writes answers to 4.
        to_read, self._commands = os.pipe()
        self._events, to_write = os.pipe()
        for descriptor in (self._commands, self._events):
            stack.callback(os.close, descriptor)
        shell = f'exec "$@" 3<&{to_read} 4>&{to_write}'
        words = [chromium, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *words],
            pass_fds=(to_read, to_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for descriptor in (to_read, to_write):
            os.close(descriptor)
        stack.callback(self._process.wait)
        stack.callback(self._process.kill)

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def open(
        self, address: str, width: int = 1280, height: int = 900, dark: bool = False
    ) -> Tab:
        """Show a page in a new tab, in a window of this many pixels, and return it when it is loaded."""
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        attached = self.call(
            "Target.attachToTarget", {"targetId": target, "flatten": True}
        )
        tab = Tab(self, attached["sessionId"])
        self.tabs[tab.session] = tab
        for part in ("Page", "Runtime", "Log"):
            tab.call(f"{part}.enable")
        tab.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {True: "dark", False: "light"}[dark]
        feature = {"name": "prefers-color-scheme", "value": scheme}
        tab.call("Emulation.setEmulatedMedia", features=[feature])
        tab.is_loaded = False
        tab.call("Page.navigate", url=address)
        while not tab.is_loaded:
            self._receive()
        return tab

    def call(
        self, method: str, values: dict[str, Any], session: str = ""
    ) -> dict[str, Any]:
        """Send one command, and return its result. Raises RuntimeError where Chromium refuses it."""
        self._number += 1
        number = self._number
        command: dict[str, Any] = {"id": number, "method": method, "params": values}
        if session:
            command["sessionId"] = session
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while number not in self._answers:
            self._receive()
        answer = self._answers.pop(number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def _receive(self) -> None:
        """Wait for messages, which end with a zero byte, and give them to whom they are for."""
        ready, _, _ = select.select([self._events], [], [], SECONDS)
        if not ready:
            raise TimeoutError(f"Chromium has not answered within {SECONDS:.0f} s")
        data = os.read(self._events, 1 << 20)
        if not data:
            raise RuntimeError(f"Chromium ended with code {self._process.wait()}")
        *messages, self._rest = (self._rest + data).split(b"\0")
        for message in map(json.loads, messages):
            if "id" in message:
                self._answers[message["id"]] = message
            elif message.get("sessionId") in self.tabs:
                self.tabs[message["sessionId"]].note(message)
