"""A headless Chromium that tests drive as a person would, over the pipes of its DevTools protocol.

with chromium() as browser:
    browser.open(url)
    browser.type("Hello")
    browser.press("Enter")
    browser.run("document.title")          # the value of JavaScript, promises included
"""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.harness.limits import HUNG

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless --no-sandbox --remote-debugging-pipe --disable-gpu --no-first-run --disable-dev-shm-usage "
    "--disable-background-networking --disable-component-update"
).split()
KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, "")}
SHIFT = 8


class Browser:
    """A page of a browser. reader, writer: files of the protocol, whose messages end with a zero byte."""

    def __init__(self, reader, writer):
        self._reader = reader
        self._writer = writer
        self._count = 0
        self._rest = b""
        self._session = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        asked = {"targetId": target, "flatten": True}
        self._session = self.call("Target.attachToTarget", **asked)["sessionId"]

    def call(self, method, **values):
        """The result of a command."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": values}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writer, json.dumps(message).encode() + b"\0")
        while True:
            found = self._message()
            if found.get("id") == self._count:
                assert "error" not in found, found
                return found["result"]

    def _message(self):
        while b"\0" not in self._rest:
            part = os.read(self._reader, 1 << 20)
            assert part, "the browser has ended"
            self._rest += part
        text, _, self._rest = self._rest.partition(b"\0")
        return json.loads(text)

    def open(self, url):
        self.call("Page.navigate", url=url)
        self.until(
            "document.readyState === 'complete' && location.href !== 'about:blank'"
        )

    def run(self, script):
        found = self.call(
            "Runtime.evaluate",
            expression=script,
            awaitPromise=True,
            returnByValue=True,
            userGesture=True,
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, script):
        """Wait for a condition of the page."""
        deadline = time.monotonic() + HUNG
        while not self.run(script):
            assert time.monotonic() < deadline, self.run("document.body.innerText")
            time.sleep(0.02)

    def type(self, text):
        self.call("Input.insertText", text=text)

    def press(self, key, shift=False):
        code, text = KEYS[key]
        common = {
            "key": key,
            "code": key,
            "windowsVirtualKeyCode": code,
            "modifiers": SHIFT * shift,
        }
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def click(self, words):
        """Click the last visible button with these words."""
        found = self.run(
            f"""(() => {{ const all = [...document.querySelectorAll("button, summary")]
              .filter(b => b.textContent === {json.dumps(words)} && b.offsetParent && !b.disabled);
              all.at(-1)?.click(); return all.length; }})()"""
        )
        assert found, self.run("document.body.innerText")

    def look(self, path, width, height, scheme):
        """Save a picture of the page. scheme: "light" or "dark"."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)
        shape = {"width": width, "height": height, "deviceScaleFactor": 1}
        self.call("Emulation.setDeviceMetricsOverride", mobile=width < 600, **shape)
        data = self.call("Page.captureScreenshot", format="png")["data"]
        Path(path).write_bytes(base64.b64decode(data))


@contextmanager
def chromium():
    """A `Browser`, to the end of the block. Skips the test where none is installed."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("no Chromium is installed")
    their_input, writer = os.pipe()
    reader, their_output = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        # The protocol is at the descriptors 3 and 4 of the browser.
        start = f'exec "$@" 3<&{their_input} 4>&{their_output}'
        words = [program, *FLAGS, f"--user-data-dir={folder}"]
        process = subprocess.Popen(
            ["bash", "-c", start, "bash", *words],
            pass_fds=(their_input, their_output),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(their_input)
        os.close(their_output)
        try:
            yield Browser(reader, writer)
        finally:
            process.kill()
            process.wait()
            os.close(reader)
            os.close(writer)
