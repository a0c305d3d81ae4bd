"""`make docs`: the site is built, every link and anchor leads somewhere, and nothing is loaded from elsewhere."""

import base64
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import covey
from agent.config import ConfigError, parse
from covey.job.client import JobClient
from covey.job.tensors import TensorClient
from covey.remote import RemoteMemory
from plugins.base import Host
from plugins.registry import PLUGINS
from plugins.scheduler.machine.log.jobs import STATES
from tools.pages import MODULES

ROOT = Path(__file__).parents[2]
AROUND = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "bench/README.md")
"""Pages that are not in the site."""
LOADS = re.compile(r'<(?:script|img|iframe|source)\b[^>]*\bsrc="(?:https?:)?//|<link\b[^>]*\bhref="(?:https?:)?//')
LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "tools.pages", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return folder


pytestmark = pytest.mark.xdist_group("site")


def test_the_site_has_each_page_and_the_docstrings(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert [str(page) for page in sorted(pages) if not (site / page).is_file()] == []
    api = {module: (site / "api" / f"{module.replace('.', '/')}.html").read_text() for module in MODULES}
    assert all(f'id="{name}"' in api["covey"] for name in covey.__all__)
    for module, documented in (
        ("covey.job.client", JobClient.step),
        ("covey", RemoteMemory.discard),
        ("plugins.base", Host),
        ("covey.job.tensors", TensorClient.push_pull),
    ):
        first = str(documented.__doc__).partition(".")[0].partition("`")[0]
        assert len(first) > 10 and " ".join(first.split()) in " ".join(api[module].split()), documented


def test_tables_that_the_code_writes_are_in_the_site(site: Path) -> None:
    assert "covey_raft_elections_total" in (site / "reference/metrics.html").read_text()
    assert "host_lost_after_s" in (site / "reference/agent-toml.html").read_text()


def test_diagrams_are_pictures_in_the_page(site: Path) -> None:
    diagrams = (ROOT / "docs/design/STATES.md").read_text().count("```mermaid")
    page = (site / "design/STATES.html").read_text()
    pictures = [
        base64.b64decode(data).decode() for data in re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', page)
    ]
    assert len(pictures) == diagrams > 5 and "stateDiagram-v2\n" not in page
    assert all(picture.startswith("<svg") and "</svg>" in picture for picture in pictures)
    assert all(f">{state}<" in pictures[0] for state in STATES)


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    pages = [path for path in site.rglob("*.html") if "api" not in path.relative_to(site).parts]
    loading = [path.name for path in pages if LOADS.search(text := path.read_text()) or 'class="mermaid"' in text]
    assert len(pages) > 30 and loading == []
    assert LOADS.search('<script src="https://x"></script>') and not LOADS.search('<a href="https://x">')


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and mkdocs make them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken(page: Path) -> list[str]:
    """Links of a page to files and headings of this repository that lead nowhere."""
    found = []
    for link in LINK.findall(page.read_text()):
        if link.startswith(("http:", "https:", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        at = page.parent / path if path else page
        if not at.exists() or (anchor and anchor not in anchors(at)):
            found.append(link)
    return found


@pytest.mark.parametrize("name", AROUND)
def test_links_of_pages_beside_the_site_lead_somewhere(name: str) -> None:
    assert broken(ROOT / name) == []


def test_a_link_to_a_page_or_a_heading_that_is_gone_is_found(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# What it is, now\n")
    page = tmp_path / "page.md"
    page.write_text("[a](there.md#what-it-is-now) [b](there.md#gone) [c](gone.md) [d](https://example.org/x)")
    assert broken(page) == ["there.md#gone", "gone.md"]


def blocks(language: str) -> list[str]:
    """Code blocks of that language, from all pages that people read."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found = [re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL) for page in pages]
    return [block for each in found for block in each if "--8<--" not in block]


@pytest.mark.parametrize("block", blocks("toml"))
def test_settings_that_a_page_shows_are_settings(block: str) -> None:
    try:
        assert parse({"name": "gpu1", **tomllib.loads(block)}, "agent.toml", {}, tuple(PLUGINS)).name == "gpu1"
    except ConfigError as error:
        assert "is not available to this agent" in error.why, (
            f"{error.what}: {error.why}"
        )  # this machine has fewer than the page's


@pytest.mark.parametrize("block", blocks("python"))
def test_python_that_a_page_shows_can_be_compiled(block: str) -> None:
    assert compile(block, "page", "exec").co_code


def test_results_are_one_table_of_at_most_fifteen_rows_with_their_commands() -> None:
    page = (ROOT / "docs/results/index.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert len(re.findall(r"^\|---", page, re.MULTILINE)) == 1 and len(rows) - 2 <= 15
    assert [row for row in rows[2:] if "`make " not in row.rpartition("|")[0].rpartition("|")[2]] == [
        row for row in rows if "**not tried**" in row
    ]
