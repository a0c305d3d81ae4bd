"""The page in a real browser, on racks that do not exist: every view, by keyboard, on a phone, printed, cut off."""

from collections.abc import Callable
from importlib.resources import files
from typing import Any

import pytest

VIEWS = ("", "hosts", "gpus", "jobs", "tenants", "memory", "tensors", "gossip", "events")
TITLES = ("Overview", "Hosts", "GPUs", "Jobs and queue", "Tenants", "Memory", "Tensors", "Gossip and log", "Events")
MORE = ("jobs?q=state:queued", "jobs?all=1", "?gpu=free", "job/j1", "host/gpu1", "events?subject=j1", "host/nobody")
LONG = ("", "hosts", "gpus", "jobs", "gossip", "memory")
"""The views that have more to show where the rack is large."""
SIZES = ((1440, 900), (820, 1100), (390, 844))
TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
AXE = """async (tags) => (await axe.run({ runOnly: tags })).violations.map(
  (each) => `${each.id}: ${each.nodes.length} x ${each.nodes[0].html.slice(0, 200)}`)"""
WIDER = """() => {
  const main = document.getElementById("main");
  return document.documentElement.scrollWidth > innerWidth || main.scrollWidth > main.clientWidth;
}"""

pytestmark = [pytest.mark.page, pytest.mark.cpu_seconds(0), pytest.mark.xdist_group("page")]
Opens = Callable[..., Any]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("hosts", ["small", "large"])
def test_no_view_breaks_a_rule_of_wcag_or_is_wider_than_its_window(
    hosts: str, scheme: str, visit: Opens, request: pytest.FixtureRequest
) -> None:
    address = request.getfixturevalue(hosts).address
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="make page-test installs it")
    script = (files(axe.__package__) / "axe.min.js").read_text()
    found: list[str] = []
    for size in SIZES:
        tab = visit(address, size, scheme)
        for view in (*VIEWS, *MORE) if hosts == "small" else LONG:
            tab.go(view)
            if view == VIEWS[0]:
                tab.wait("document.querySelector('.card')")
                tab.page.evaluate(script)
            tab.page.wait_for_timeout(400)
            found += [f"{size[0]} px, {view or 'overview'}: {each}" for each in tab.page.evaluate(AXE, TAGS)]
            found += [f"{size[0]} px, {view or 'overview'}: wider than its window"] if tab.page.evaluate(WIDER) else []
        assert tab.said == [], "the policy holds, and nothing failed"
        tab.context.close()
    assert found == []


def test_every_view_is_reached_and_left_by_keyboard(small: Any, visit: Opens) -> None:
    tab = visit(small.address)
    tab.go("")
    for number, title in enumerate(TITLES, 1):
        tab.page.keyboard.press(str(number))
        tab.wait(f"document.querySelector('main h1')?.textContent === '{title}'")
    tab.page.keyboard.press("4")
    tab.wait("document.querySelectorAll('.virtual > .row').length > 3")
    tab.page.keyboard.press("/")
    tab.page.keyboard.type("state:queued")
    tab.wait("[...document.querySelectorAll('.virtual > .row .chip')].every((chip) => chip.textContent === 'queued')")
    assert "q=state%3Aqueued" in tab.page.url, "the address has what is shown"
    tab.page.keyboard.press("Enter")
    for key in ("j", "j", "k"):
        tab.page.keyboard.press(key)
    chosen = tab.page.get_attribute(".row[aria-selected=true]", "data-key")
    tab.page.keyboard.press("Enter")
    tab.wait(f"document.querySelector('main h1')?.textContent === 'Job {chosen}'")
    tab.page.keyboard.press("Escape")
    tab.wait("document.querySelector('main h1')?.textContent === 'Jobs and queue'")
    tab.page.keyboard.press("?")
    tab.wait("document.getElementById('dialog').open")
    tab.page.keyboard.press("Tab")
    tab.page.keyboard.press("Escape")
    tab.wait("!document.getElementById('dialog').open")
    tab.page.keyboard.press("1")
    tab.wait("document.querySelectorAll('.card').length === 4")
    tab.page.keyboard.press("j")
    assert tab.page.evaluate("document.activeElement.dataset.key") == "gpu1"
    tab.page.keyboard.press("Enter")
    tab.wait("document.querySelector('main h1')?.textContent === 'Host gpu1'")
    assert tab.said == []


def test_only_rows_that_are_seen_are_in_the_document_and_the_last_is_reached(large: Any, visit: Opens) -> None:
    tab = visit(large.address)
    tab.go("gpus")
    tab.wait("document.querySelector('main .counted').textContent === '8,000'")
    assert tab.page.evaluate("document.querySelectorAll('*').length") < 1500
    tab.page.focus(".grid")
    tab.page.keyboard.press("End")
    tab.wait("document.querySelector('.row[aria-selected=true]')?.dataset.key === 'gpu1000/7'")
    assert tab.page.get_attribute(".row[aria-selected=true]", "aria-rowindex") == "8001"
    tab.page.keyboard.press("Home")
    tab.wait("document.querySelector('.row[aria-selected=true]')?.dataset.key === 'gpu1/0'")
    tab.go("")
    tab.wait("document.querySelectorAll('.card').length > 20")
    assert tab.page.evaluate("document.querySelectorAll('*').length") < 4000


def test_a_change_is_shown_in_the_same_element_at_once(small: Any, visit: Opens) -> None:
    tab = visit(small.address)
    tab.go("gpus")
    tab.wait("document.querySelectorAll('.virtual > .row').length > 20")
    tab.page.evaluate("""() => {
      window.before = document.querySelector('.virtual').textContent;
      window.rows = [...document.querySelectorAll('.virtual > .row')];
    }""")
    tab.wait("document.querySelector('.virtual').textContent !== before")
    assert tab.page.evaluate("rows.every((row) => row.isConnected)")


def test_a_page_that_is_cut_off_says_since_when_and_comes_back(small: Any, visit: Opens) -> None:
    tab = visit(small.address)
    tab.go("")
    tab.wait("document.querySelector('.card')")
    small.stop()
    tab.wait("document.getElementById('trouble')?.textContent.includes('out of date since')")
    assert tab.page.locator(".card").count() == 4, "what was known stays"
    small.start()
    tab.wait("document.getElementById('link').textContent === 'live'", 40)
    assert tab.page.locator("#trouble").count() == 0


def test_a_hidden_tab_hears_nothing_and_resumes_where_it_was(small: Any, visit: Opens) -> None:
    tab = visit(small.address)
    tab.go("")
    hide = """hidden => {
      Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });
      document.dispatchEvent(new Event('visibilitychange'));
    }"""
    tab.page.evaluate(hide, True)
    tab.wait("document.getElementById('link').textContent === 'paused'")
    with tab.page.expect_request(lambda request: "/v1/events" in request.url) as again:
        tab.page.evaluate(hide, False)
    assert again.value.headers["last-event-id"].startswith("1.")
    tab.wait("document.getElementById('link').textContent === 'live'")


def test_all_rows_are_printed(large: Any, visit: Opens) -> None:
    tab = visit(large.address)
    tab.go("hosts")
    tab.wait("document.querySelectorAll('.virtual > .row').length > 10")
    tab.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert tab.page.locator(".virtual > .row").count() == 1000
    tab.page.evaluate("dispatchEvent(new Event('afterprint'))")
    tab.wait("document.querySelectorAll('.virtual > .row').length < 100")
    assert tab.page.pdf().startswith(b"%PDF")


def test_words_of_others_are_text_and_nothing_else(small: Any, visit: Opens) -> None:
    tab = visit(small.address)
    tab.go("events?q=%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E&subject=%3Cscript%3E")
    tab.go("host/%3Cimg%20src%3Dx%3E")
    tab.wait("document.querySelector('main h1')?.textContent === 'Host <img src=x>'")
    assert tab.page.locator("main img, main script").count() == 0
    tab.go("job/%")
    tab.wait("document.querySelector('main h1')?.textContent === 'Overview'")


def test_a_job_shows_its_story_its_curves_and_its_output(small: Any, visit: Opens) -> None:
    tab = visit(small.address)
    tab.go("job/j1")
    tab.wait("document.querySelectorAll('.chart canvas').length === 3")
    said = tab.page.get_attribute(".timeline svg", "aria-label")
    assert said.startswith("queued ") and "then healing" in said and "preempted at" in said
    assert "of each step waits for" in tab.page.text_content(".lead")
    tab.wait("document.querySelector('.log').textContent.includes('step 40 loss')")
    assert tab.page.locator(".command code").all_text_contents()[-1].startswith("agentctl cancel")
    tab.page.click("details summary")
    tab.wait("document.querySelector('details pre')?.textContent === 'API_KEY=(hidden)\\nA=<b>'")
