"""A real Chromium under the DevTools protocol: pages as users open them, with their policy, real keys and a real pointer."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import chromium

SECONDS_MOST = 60
START = "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
"""A program that puts two descriptors where Chromium expects them, and becomes it."""
KEYS = {
    "Enter": (13, "\r"),
    "Escape": (27, ""),
    "Tab": (9, ""),
    "ArrowRight": (39, ""),
    "ArrowLeft": (37, ""),
}


class Tab:
    """One open page, and all that it complained about or asked for."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        self._buffer, self._number, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """The answer to one command."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer)
                return answer["result"]
            self.events.append(answer)

    def open(self, page: Path) -> None:
        self.events.clear()
        self.ask("Page.navigate", url=page.as_uri())
        self.until("document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """The JSON-able value of ``expression``, awaited where it is a promise."""
        found = self.ask("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, expression: str) -> Any:
        """The value of ``expression`` once it is truthy."""
        end = time.monotonic() + SECONDS_MOST
        while time.monotonic() < end:
            value = self.value(expression)
            if value:
                return value
            time.sleep(0.05)
        raise AssertionError(f"never true: {expression}; {self.complaints()}")

    def press(self, key: str) -> None:
        code, text = KEYS.get(key, (ord(key[0].upper()), key))
        event = {"key": key, "windowsVirtualKeyCode": code, "text": text}
        self.ask("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **event)
        self.ask("Input.dispatchKeyEvent", type="keyUp", **event)

    def point(self, x: float, y: float, kind: str = "mouseMoved") -> None:
        button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
        self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)

    def picture(self, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"]))

    def printed(self) -> bytes:
        """The page as a PDF."""
        return base64.b64decode(self.ask("Page.printToPDF")["data"])

    def function(self, body: str) -> Any:
        """What the body of an asynchronous function returns."""
        return self.value(f"(async () => {{ {body} }})()")

    def resize(self, width: int, height: int = 900) -> None:
        """The window, to fewer pixels than Chromium opens it with."""
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def without_javascript(self) -> None:
        """Pages that are opened from now on run no script."""
        self.ask("Emulation.setScriptExecutionDisabled", value=True)

    def dark(self, yes: bool = True) -> None:
        """As the user's system has it."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if yes else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])

    def complaints(self) -> list[str]:
        """Errors, warnings and violations of the policy that the page caused."""
        self.value("1")
        found = []
        for event in self.events:
            method, params = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                found.append(json.dumps(params["exceptionDetails"]))
            elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                found.append(json.dumps(params["args"]))
            elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(params["entry"]["text"])
        return found

    def requests(self) -> list[str]:
        """What the page asked for, but for itself and what it holds."""
        urls = [
            e["params"]["request"]["url"]
            for e in self.events
            if e.get("method") == "Network.requestWillBeSent"
        ]
        return [url for url in urls if not url.startswith(("data:", "file:"))]

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + SECONDS_MOST
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            assert ready, "Chromium says nothing"
            piece = os.read(self._read, 1 << 20)
            assert piece, "Chromium has gone"
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


@contextmanager
def opened() -> Iterator[Tab]:
    """A browser without a network, for as long as the block lasts."""
    assert chromium.PROGRAM is not None
    (theirs_read, write), (read, theirs_write) = os.pipe(), os.pipe()
    # Out of the way of 3 and 4, where Chromium expects them.
    high = [fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (theirs_read, theirs_write)]
    with tempfile.TemporaryDirectory(prefix="ddpdoctor-chromium-", ignore_cleanup_errors=True) as profile:
        options = [
            *chromium.QUIET,
            f"--user-data-dir={profile}",
            "--remote-debugging-pipe",
            "--window-size=1100,900",
        ]
        command = [sys.executable, "-c", START, *map(str, high), chromium.PROGRAM, *options, "about:blank"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(command, pass_fds=high, **quiet)
        for end in (theirs_read, theirs_write, *high):
            os.close(end)
        try:
            yield Tab(read, write)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(read)
            os.close(write)
