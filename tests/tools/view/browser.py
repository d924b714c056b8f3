"""A real Chromium without a window, driven by the DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.patience import PATIENCE_S

NAMES = ("chromium", "chromium-browser", "google-chrome")
KEYS = {"ArrowDown": 40, "ArrowUp": 38, "ArrowLeft": 37, "ArrowRight": 39, "End": 35, "Home": 36, "PageDown": 34}


def chromium() -> str:
    """The program; skips the test where there is none."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no {' or '.join(NAMES)} on this machine; on Debian: apt-get install chromium")
    return found


class Tab:
    """One page. Requests and errors of it are collected from the start."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._n_sent = 0
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.loaded = 0

    async def call(self, method: str, **parameters: Any) -> Any:
        """Send a command and wait for its result."""
        self._n_sent += 1
        await self._socket.send_json({"id": self._n_sent, "method": method, "params": parameters})
        while True:
            message = await self._next()
            if message.get("id") == self._n_sent:
                assert "error" not in message, message
                return message["result"]

    async def open(self, page: Path | str) -> None:
        """Load a file or an address and wait until its script has run."""
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self.call(f"{domain}.enable")
        before = self.loaded
        await self.call("Page.navigate", url=page if isinstance(page, str) else page.as_uri())
        while self.loaded == before:
            await self._next()

    async def value(self, expression: str) -> Any:
        """The value of an expression in the page; an AssertionError if it throws."""
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def press(self, key: str) -> None:
        """Press and release a key, as a keyboard does."""
        text = {"text": key} if len(key) == 1 else {"windowsVirtualKeyCode": KEYS[key]}
        await self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=key)
        await self.value("new Promise((done) => requestAnimationFrame(() => done()))")

    async def type(self, text: str) -> None:
        for letter in text:
            await self.press(letter)

    async def dark(self, on: bool) -> None:
        """What the system's colour scheme is."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if on else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def screenshot(self, file: Path) -> None:
        shot = await self.call("Page.captureScreenshot", format="png")
        file.write_bytes(base64.b64decode(shot["data"]))

    async def _next(self) -> Any:
        message = json.loads(await asyncio.wait_for(self._socket.receive_str(), PATIENCE_S))
        parameters = message.get("params", {})
        match message.get("method"):
            case "Page.loadEventFired":
                self.loaded += 1
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(str(parameters["exceptionDetails"]))
            case "Log.entryAdded":
                self.errors.append(parameters["entry"]["text"])
            case _:
                pass
        return message


@asynccontextmanager
async def tab(folder: Path, width: int = 1500, height: int = 1000) -> AsyncGenerator[Tab]:
    """A Chromium with one empty page; `folder` is for its profile."""
    process = await asyncio.create_subprocess_exec(
        chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--disable-background-networking", "--remote-debugging-port=0", f"--user-data-dir={folder}",
        f"--window-size={width},{height}", "about:blank",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not (port := _port(folder)):
                assert process.returncode is None, f"Chromium ended with {process.returncode}"
                await asyncio.sleep(0.05)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                target = next(one for one in await answer.json() if one["type"] == "page")
            async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                yield Tab(socket)
    finally:
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.wait(), PATIENCE_S)


def _port(folder: Path) -> int:
    """The port that Chromium chose; 0 until it has."""
    try:
        return int((folder / "DevToolsActivePort").read_text().split()[0])
    except (OSError, IndexError):
        return 0
