"""A headless Chromium for the tests of the page. `make page-test` runs them; without it they are skipped."""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
Fake = Callable[..., str]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium, driven by Playwright."""
    if not os.environ.get("COVEY_PAGE"):
        pytest.skip("opens a browser: make page-test")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.skip("Playwright is not installed: make page-test installs it")
    found = [path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))]
    if not found:
        pytest.skip("no Chromium is installed: apt install chromium")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=found[0], args=["--no-sandbox"])
        yield opened
        opened.close()


class Visit:
    """One tab, and what its console said."""

    def __init__(self, browser: Any, address: str, size: tuple[int, int] = (1280, 900), scheme: str = "light") -> None:
        self.context = browser.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.page.set_default_timeout(20_000)
        self.said: list[str] = []
        self.page.on("console", lambda line: self.said.append(line.text) if line.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.address = address

    def go(self, view: str) -> None:
        """Show a view, `jobs` or `job/j1`, and wait until it is there."""
        if self.page.url == "about:blank":
            self.page.goto(f"{self.address}/#/{view}")
        else:
            self.page.evaluate("view => { location.hash = `#/${view}` }", view)
        self.page.wait_for_selector("#link.live")
        self.page.wait_for_selector("main h1")

    def title(self) -> str:
        return str(self.page.text_content("main h1"))

    def wait(self, holds: str, timeout_s: float = 20) -> None:
        """Wait until an expression of JavaScript holds. Playwright's own wait asks for eval, which the page forbids."""
        end_s = time.monotonic() + timeout_s
        while not self.page.evaluate(holds):
            assert time.monotonic() < end_s, f"waited {timeout_s:.0f} s in vain until {holds}; console: {self.said}"
            self.page.wait_for_timeout(50)


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Visit]]:
    """Opens a tab; it is closed at the end."""
    visits: list[Visit] = []

    def opened(address: str, *given: Any) -> Visit:
        visits.append(Visit(browser, address, *given))
        return visits[-1]

    yield opened
    for each in visits:
        each.context.close()


class FakeServer:
    """`fake_rack.py` as a process of its own."""

    def __init__(self, hosts: int, gpus: int, jobs: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        self._options = [f"--hosts={hosts}", f"--gpus={gpus}", f"--jobs={jobs}", f"--port={self.port}"]
        self.start()

    def start(self) -> None:
        program = [sys.executable, "-m", "tests.page.fake_rack", *self._options]
        self._process = subprocess.Popen(program, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(300):
            try:
                urllib.request.urlopen(f"{self.address}/states.json", timeout=1).close()
                return
            except OSError:
                time.sleep(0.1)
        raise AssertionError("the fake rack does not answer")

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


def _served(hosts: int, gpus: int, jobs: int) -> Iterator[FakeServer]:
    server = FakeServer(hosts, gpus, jobs)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def small(browser: Any) -> Iterator[FakeServer]:
    """A fake rack of 4 hosts. It asks for the browser, so that nothing is started where there is none."""
    yield from _served(4, 8, 14)


@pytest.fixture(scope="session")
def large(browser: Any) -> Iterator[FakeServer]:
    """A fake rack of 1,000 hosts, 8,000 GPUs and 2,000 jobs."""
    yield from _served(1000, 8, 2000)
