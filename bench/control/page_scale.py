"""What the agent's page costs a browser at 1,000 hosts, 8,000 GPUs and 2,000 jobs: first paint, elements, frames while
it scrolls, bytes at rest, heap. Headless Chromium on this machine, rows from `tests/page/fake_rack.py`.

    python bench/control/page_scale.py --hosts 1000 --minutes 5
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, CDPSession, Page, sync_playwright

ROOT = Path(__file__).parents[2]
SCROLL = """async (seconds) => {
  const main = document.getElementById("main"), gaps = [], began = performance.now();
  let last = began, down = 1;
  await new Promise((done) => {
    const frame = (now) => {
      gaps.push(now - last);
      last = now;
      if (main.scrollTop + main.clientHeight >= main.scrollHeight - 2) down = -1;
      if (main.scrollTop <= 0) down = 1;
      main.scrollTop += 90 * down;
      if (now - began > seconds * 1000) done();
      else requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  });
  gaps.sort((a, b) => a - b);
  return { frames: gaps.length / ((last - began) / 1000), p99_ms: gaps[Math.floor(gaps.length * 0.99)] };
}"""
PAINTED = """() => new Promise((done) => {
  const look = () => document.querySelector(".card, .virtual > .row")
    ? requestAnimationFrame(() => setTimeout(() => done(performance.now()), 0)) : requestAnimationFrame(look);
  look();
})"""
VIEWS = ("", "hosts", "gpus", "jobs")


def chromium() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        sys.exit("page_scale: no Chromium is installed; next: apt install chromium")
    return found


def heap_mib(session: CDPSession) -> float:
    """The page's JavaScript heap after a collection, MiB."""
    session.send("HeapProfiler.collectGarbage")
    return float(session.send("Runtime.getHeapUsage")["usedSize"]) / (1 << 20)


def opened(browser: Browser, address: str) -> tuple[Page, CDPSession]:
    page = browser.new_context(viewport={"width": 1440, "height": 900}).new_page()
    return page, page.context.new_cdp_session(page)


def measure(browser: Browser, address: str, minutes: float) -> None:
    for view in VIEWS:
        paints: list[float] = []
        for _ in range(5):
            page, session = opened(browser, address)
            page.goto(f"{address}/#/{view}", wait_until="commit")
            paints.append(page.evaluate(PAINTED))
            page.wait_for_timeout(1500)
            elements = page.evaluate("document.querySelectorAll('*').length")
            scrolled: dict[str, Any] = page.evaluate(SCROLL, 4) if len(paints) == 5 else {}
            first_ms = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime")
            page.context.close()
        paints.sort()
        print(
            f"{view or 'overview':9} rows painted after {paints[2]:.0f} ms (first paint {first_ms:.0f} ms), "
            f"{elements} elements, {scrolled['frames']:.0f} frames a second while scrolling "
            f"(99 of 100 within {scrolled['p99_ms']:.0f} ms)",
            flush=True,
        )
    page, session = opened(browser, address)
    session.send("Network.enable")
    taken = [0]
    session.on("Network.dataReceived", lambda said: taken.__setitem__(0, taken[0] + said["dataLength"]))
    page.goto(address)
    page.evaluate(PAINTED)
    page.wait_for_timeout(3000)
    whole, taken[0], began_s = taken[0], 0, time.monotonic()
    print(f"heap {heap_mib(session):.0f} MiB, {whole / 1024:.0f} KiB were sent", flush=True)
    while time.monotonic() - began_s < minutes * 60:
        page.wait_for_timeout(20_000)
    at_rest = taken[0] / 1024 / (time.monotonic() - began_s)
    changes = "40 GPUs and 20 jobs a second change"
    print(f"heap {heap_mib(session):.0f} MiB after {minutes:g} min, {at_rest:.1f} KiB/s ({changes})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--port", type=int, default=8479)
    given = parser.parse_args()
    address = f"http://127.0.0.1:{given.port}"
    program = [sys.executable, "-m", "tests.page.fake_rack", "--port", str(given.port)]
    program += ["--hosts", str(given.hosts), "--jobs", str(given.jobs)]
    server = subprocess.Popen(program, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL)
    try:
        for _ in range(100):
            try:
                urllib.request.urlopen(f"{address}/states.json", timeout=1).close()
                break
            except OSError:
                time.sleep(0.3)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
            measure(browser, address, given.minutes)
            browser.close()
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
