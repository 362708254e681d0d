"""A real browser, told what to do over a pipe (the Chrome DevTools Protocol), that can reach this machine alone."""

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    *("--proxy-server=127.0.0.1:9", "--proxy-bypass-list=127.0.0.1", "--remote-debugging-pipe"),
)


class Browser:
    """One page. `console` are errors that it told, `requests` the addresses that it asked for."""

    def __init__(self, profile: Path, size: str = "1300,1000"):
        assert CHROMIUM is not None
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        # it reads its orders from descriptor 3 and answers on 4; those numbers may be taken here
        script = f'exec "$0" "$@" 3<&{to_read} 4>&{to_write}'
        self._process = subprocess.Popen(
            [
                "bash",
                "-c",
                script,
                CHROMIUM,
                *FLAGS,
                f"--user-data-dir={profile}",
                f"--window-size={size}",
                "about:blank",
            ],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._buffer, self._count, self._session = b"", 0, ""
        self.console: list[str] = []
        self.requests: list[str] = []
        target = next(each for each in self.tell("Target.getTargets")["targetInfos"] if each["type"] == "page")
        attached = self.tell("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.tell(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def tell(self, method: str, **parameters: Any) -> dict[str, Any]:
        """An order, and what came of it."""
        self._count += 1
        order = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            order["sessionId"] = self._session
        os.write(self._write, json.dumps(order).encode() + b"\0")
        while True:
            message = self._next()
            if message.get("id") == self._count:
                assert "error" not in message, message
                return message["result"]

    def open(self, address: str) -> None:
        """Goes there, and waits until the page that was there is gone and the new one loaded."""
        self.value("window.isOld = true")
        self.tell("Page.navigate", url=address)
        self.until("!window.isOld && document.readyState == 'complete'")

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page, which may be a promise."""
        result = self.tell("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, expression: str, seconds: float = 60.0) -> Any:
        """The value once it is true to JavaScript; how long that takes is no finding. An error counts as false: a page
        that is still coming lacks what is asked of it."""
        end = time.monotonic() + seconds
        safe = f"(() => {{ try {{ return {expression} }} catch {{ return false }} }})()"
        while not (found := self.value(safe)):
            assert time.monotonic() < end, f"{expression} stays {found}; console: {self.console}"
            time.sleep(0.05)
        return found

    def press(self, key: str, code: int, **more: Any) -> None:
        for kind in ("keyDown", "keyUp"):
            self.tell("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **more)

    def type(self, text: str) -> None:
        self.tell("Input.insertText", text=text)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], 120)
            assert ready, "the browser says nothing any more"
            got = os.read(self._read, 1 << 16)
            assert got, "the browser has ended"
            self._buffer += got
        message, self._buffer = self._buffer.split(b"\0", 1)
        told = json.loads(message)
        self._note(told.get("method", ""), told.get("params", {}))
        return told

    def _note(self, method: str, about: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.console.append(json.dumps(about["exceptionDetails"])[:500])
        elif method == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
            self.console.append(json.dumps(about["args"])[:500])
        elif method == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.console.append(about["entry"]["text"])
