"""A headless Chromium, driven over the DevTools protocol through a pair of pipes."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

OPTIONS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync --disable-dev-shm-usage --disable-extensions --hide-scrollbars --remote-debugging-pipe""".split()
SECONDS = 60.0


class Chromium:
    """One browser with one page. Uncaught errors and console messages of the page are collected in `complaints`, addresses it
    asked for in `requests`."""

    def __init__(self) -> None:
        program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        if program is None:
            raise RuntimeError("the tests marked 'browser' need the program chromium; on Debian: apt-get install chromium")
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        # Chromium reads commands from descriptor 3 and writes to 4; a shell puts the pipes there.
        command = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, "bash", program, *OPTIONS, f"--user-data-dir={self._profile.name}", "about:blank"],
            pass_fds=(to_browser, from_browser), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True)
        os.close(to_browser)
        os.close(from_browser)
        self._numbers = itertools.count(1)
        self._buffer = b""
        self._session: str | None = None
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command; its result. Raises RuntimeError when the browser refuses it."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._message()).get("id") != number:
            self._note(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, path: Path, *, width: int, height: int = 900, scheme: str = "light") -> None:
        """Open a file in a window of that size, with the system's theme light or dark."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._loaded = False
        self.complaints.clear()
        self.requests.clear()
        self.call("Page.navigate", url=path.absolute().as_uri())
        while not self._loaded:
            self._note(self._message())

    def evaluate(self, expression: str) -> Any:
        """The value of some JavaScript."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def press(self, key: str) -> None:
        """Press and release a key, such as "Tab", "ArrowRight" or "Enter"."""
        codes = {"Tab": 9, "Enter": 13, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        common = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        extra = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **extra)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def hover(self, selector: str, x: float, y: float) -> None:
        """Move the pointer to a place within an element, in pixels from its corner, after scrolling it into view."""
        box = self.evaluate(f"(() => {{const e = document.querySelector({json.dumps(selector)});"
                            " e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect(); return [b.x, b.y];})()")
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0] + x, y=box[1] + y)

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        """End the browser."""
        self._session = None
        try:
            self.call("Browser.close")
            self._process.wait(SECONDS)
        finally:
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()
            os.close(self._write)
            os.close(self._read)
            self._profile.cleanup()

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _message(self) -> dict[str, Any]:
        deadline = time.monotonic() + SECONDS
        while b"\0" not in self._buffer:
            if not select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError("Chromium does not answer")
            part = os.read(self._read, 1 << 20)
            if not part:
                raise RuntimeError(f"Chromium ended with status {self._process.wait()}")
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        method, told = event.get("method"), event.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(told["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(json.dumps(told["args"]))
        elif method == "Log.entryAdded":
            self.complaints.append(told["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
