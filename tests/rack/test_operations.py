"""What README.md and docs/ tell people to type is typed, exactly so, on hosts that are set up by
docs/guides/install.md."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.rack.agents import AgentRack, wait
from chaos.rack.hosts import Laboratory, why_not

pytestmark = [
    pytest.mark.rack,
    pytest.mark.xdist_group("hosts"),
]
ROOT = Path(__file__).parents[2]
PAGES = (
    *("README.md", "docs/index.md", "docs/start/researcher.md", "docs/start/operator.md", "docs/start/plugin.md"),
    "docs/start/chaos.md",
    *(f"docs/guides/{name}.md" for name in ("install", "users", "security", "jobs", "habits", "gpus", "tensors")),
    *(f"docs/guides/{name}.md" for name in ("healing", "memory")),
    *(f"docs/guides/{name}.md" for name in ("failures", "upgrades", "guarantees", "simulate")),
)
"""The pages in the order in which a reader meets them, which is that in which their commands are typed."""
PROGRAMS = ("agentctl", "agentd", "covey-rack", "covey-chaos", "systemctl", "pip", "curl")
SHELL = ("sh", "bash", "console", "shell")
"""The languages of blocks that are typed."""
BOOTED = "tests/rack/test_systemd.py does, on hosts whose first process is systemd"
USERS = "tests/rack/test_other_users.py does, on such a host"
HOUR = "tests/rack/test_first_hour.py types the whole page, in its order"
NOT_TYPED = {
    "pip install ./covey .": "tests/tools/test_wheels.py installs what a checkout has",
    "pip install /opt/covey/share/covey/covey_job-*.whl": "tests/rack/test_deb.py finds that wheel in the package",
    "agentd --install-unit": "tests/tools/test_deb.py, on a host of its own",
    "agentctl tenant add ml --users ann": "tests/rack/test_users.py does, where these users are",
    "agentctl tenant add ml --users ann,bob": "likewise",
    "agentctl tenant set ml --add carol": "likewise",
    "agentctl top": "needs a terminal: tests/cli/test_top.py presses its keys",
    "agentctl login": "tests/rack/test_users.py does: root gets no certificate",
    "agentctl --agent https://gpu1:8470": "likewise",
    "systemctl reload covey": BOOTED,
    "systemctl enable --now covey-starter": USERS,
    "systemctl status covey": BOOTED,
    "systemctl edit covey": "opens an editor",
    "systemctl edit covey-starter": "likewise",
    "systemctl daemon-reload && systemctl enable --now covey-starter": USERS,
    "systemctl enable --now covey-swap": "would swap on this machine",
    "agentctl volume swap swap1 64G": "would swap on this machine; tests/guest/kernel_swap.py does",
    "agentctl volume swap swap2 64G --mirror 2": "likewise",
    "systemctl restart covey": BOOTED,
    "systemctl kill --signal=SIGINT covey": BOOTED,
    "agentctl rack join": "these hosts are members; tests/rack/test_systemd.py lets one join",
    "agentd --make-key": "likewise: this is how the key of this rack was made",
    "agentctl gpus --shared": "goes on until it is interrupted; tests/cli/test_shared.py does",
    "agentctl hosts -w": "goes on until it is interrupted; tests/cli/test_lists.py does",
    "agentctl page": "needs `bind` of [http]; tests/cli/test_reaching.py does",
    "covey-rack run --devices cpu": "makes a rack of this machine; tests/rack/test_cpu_devices.py does",
    "agentctl move j7 gpu2": "that job has ended, or is elsewhere, as it comes; tests/rack/test_healing.py moves ranks",
    "agentctl move j7 3 gpu5": "likewise",
    "agentctl scale j7 10": "that job has ended; tests/rack/test_healing.py scales one",
    "agentctl submit examples/files/sweep.sh": "tests/rack/test_habits.py does: these hosts have no checkout",
    "agentctl submit --name other examples/files/hello.toml": "likewise",
    "agentctl run --gpus 1 -- jupyter lab": "tests/rack/test_habits.py does, with a server that there is",
    "agentctl run --forward 8000 -- python serve.py": "likewise",
    "agentctl exec j7 -- nvidia-smi": "that job has ended; tests/rack/test_habits.py does",
    "agentctl shell": "likewise, in a terminal",
    "agentctl stacks j7": "likewise",
    "agentctl hold j9": "tests/rack/test_habits.py does, where it is known which job that is",
    "agentctl release j9": "likewise",
    "agentctl requeue j9": "likewise",
    "agentctl checkpoint j9": "likewise",
    "agentctl preempt --test j9": "likewise",
    "agentctl preempt --test j7": "likewise",
    "agentctl priority j9 --up": "likewise",
    "agentctl update j9 --time 4h": "likewise",
    "agentctl cancel j12": "likewise",
    "agentctl cancel j12[3-7]": "likewise",
    "agentctl submit --array 0-99%8 -- python train.py": "likewise, with a program that there is",
    "covey-chaos soak --story": "goes on until it is interrupted; tests/chaos plays stories",
    "covey-chaos sim --story NAME": "stands for any story",
    "agentctl submit --nodes 4 --gpus 1 --follow -- python train.py": HOUR,
    "agentctl submit --nodes 4 --gpus 1 -- python train.py": HOUR,
    "agentctl submit --nodes 4 --gpus 1 -- python heals.py": HOUR,
    "agentctl submit --workers 2..4 -- python stretches.py": HOUR,
    "agentctl submit --workers 4 -- python examples/healing.py": HOUR,
    "agentctl submit --workers 4 --follow -- python examples/healing.py": HOUR,
    "agentctl requeue j3": HOUR,
    "agentctl preempt --test j4": HOUR,
    "agentctl scale j5": HOUR,
    "agentctl logs j3 --follow": HOUR,
    "agentctl logs j4 --follow": HOUR,
    "agentctl logs j5 --follow": HOUR,
    "covey-rack start": HOUR,
    "covey-rack status || true": HOUR,
    "covey-chaos storm": HOUR,
    "covey-chaos sim --seed 7": HOUR,
    "covey-chaos sim --story leader_killed --seed 7": HOUR,
    "covey-chaos hash --seed 7": HOUR,
    "covey-chaos mutants --area jobs --only exported-functions-are-dropped": HOUR,
    "pip install ./covey": "tests/cli/test_pythons.py installs what a checkout has",
}
"""Why a command, or a beginning of commands, is not typed here."""
ELSEWHERE = {
    "python3 -m venv /opt/covey && export PATH=/opt/covey/bin:$PATH": "tests/tools/test_wheels.py makes environments",
    "cd /opt/covey/share/covey": BOOTED,
    "systemd-sysusers - < covey.sysusers.conf && systemd-tmpfiles --create - < covey.tmpfiles.conf": BOOTED,
    "cp covey.sysctl.conf /etc/sysctl.d/ && systemctl restart systemd-sysctl": BOOTED,
    "cp /opt/covey/share/covey/covey-starter.service /etc/systemd/system/": USERS,
    "cp covey.service /etc/systemd/system/ && systemctl daemon-reload": BOOTED,
    "apt install ./dist/covey_*.deb": "tests/rack/test_deb.py does, on such a host",
    "usermod -aG covey ann": USERS,
    "python train.py 100": HOUR,
    ". .venv/bin/activate": HOUR,
    "pkill -9 --newest --full 'python heals[.]py'": HOUR,
    "pkill -9 --newest --full 'python examples/healing[.]py'": HOUR,
    "kill -9 $(covey-rack status | grep $(agentctl leader | awk 'NR == 1 {print $2}') | awk '{print $3}')": HOUR,
}
"""What runs a line that begins with a program of the system."""

EXIT = {
    "agentctl hosts give-up gpu4": 4,  # it is alive, and nobody gives up a host that answers
    "agentctl hosts forget gpu4": 4,  # likewise
    "agentctl tensors --move train/1 gpu4": 3,  # no job of that name pushes tensors then
    "agentctl gpus forget UUID": 3,  # no GPU is called that
    "agentctl keys use ID": 4,  # no key is called that
    "agentctl keys remove ID": 4,  # likewise
    "agentctl why slab/demo/0": 3,  # `make run` has that volume
    "agentctl volume show swap1": 3,
    "agentctl volume unswap swap1": 3,
}
"""The exit codes of commands, where they are not 0."""


def commands(text: str) -> list[str]:
    """Every command of a page, once, in its order: lines of code blocks, and what is between backticks."""
    found: dict[str, None] = {}
    fenced = False
    for line in text.splitlines():
        if line.startswith("```"):
            fenced = not fenced
        spans = [line.strip()] if fenced or line.startswith("    ") else re.findall(r"`([^`]+)`", line)
        for span in spans:
            command = span.partition("  #")[0].strip().replace(".venv/bin/", "")
            if command.split(" ")[0] in PROGRAMS and " " in command:
                found[command] = None
    return list(found)


def typed_lines(text: str) -> list[str]:
    """The lines of blocks that say that they are a shell's, without comments."""
    blocks = re.findall(rf"^```(?:{'|'.join(SHELL)})\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]


def all_pages() -> list[str]:
    return list(dict.fromkeys(command for page in PAGES for command in commands((ROOT / page).read_text())))


def left_out(command: str) -> bool:
    return any(command == known or command.startswith((known + " #", known + " ")) for known in NOT_TYPED)


@pytest.fixture(scope="module")
def rack() -> Iterator[AgentRack]:
    if trouble := why_not():
        pytest.skip(f"no hosts can be made here: {trouble}")
    with Laboratory(4) as lab:
        rack = AgentRack(lab)
        rack.start()
        rack.wait_up()
        host = rack.hosts[0]
        for _ in range(7):
            submitted = host.shell("agentctl submit -- hostname")
            assert submitted.returncode == 0, submitted.stderr
        wait(
            lambda: rack.agent(host).get("jobs", "j7").data["state"] == "done",
            lambda: str(rack.agent(host).get("jobs", "j7").data),
            60.0,
        )
        yield rack


def test_the_pages_have_commands_and_what_is_not_typed_stands_there() -> None:
    known = all_pages()
    assert "agentctl hosts" in known
    gone = [line for line in NOT_TYPED if not any(f"{command} ".startswith(f"{line} ") for command in known)]
    assert gone == [], "stands on no page any more"


def test_every_page_with_a_block_for_a_shell_is_read() -> None:
    pages = [path for path in (ROOT / "docs").rglob("*.md") if typed_lines(path.read_text())]
    assert pages and [str(page) for page in pages if str(page.relative_to(ROOT)) not in PAGES] == []


@pytest.mark.parametrize("page", PAGES)
def test_a_line_for_a_shell_is_typed_here_or_checked_elsewhere(page: str) -> None:
    """A line for a program that is not known here is in `ELSEWHERE`, which names what runs it."""
    lines = [line for line in typed_lines((ROOT / page).read_text()) if line.split(" ")[0] not in PROGRAMS]
    unknown = [line for line in lines if not line.startswith((".venv/bin/", "make "))]
    assert [line for line in unknown if line not in ELSEWHERE] == []


def test_targets_of_make_that_pages_name_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"))]
    named = {name: page for page in pages for name in re.findall(r"`make ([a-z-]+)", page.read_text())}
    named |= {line.split()[1]: page for page in pages for line in typed_lines(page.read_text()) if "make " in line}
    assert len(named) > 20 and {name: str(page) for name, page in named.items() if name not in targets} == {}


@pytest.mark.parametrize("command", [one for one in all_pages() if not left_out(one)])
def test_a_command_of_a_page_does_what_it_says(command: str, rack: AgentRack) -> None:
    done = rack.hosts[0].shell(command, timeout_s=60.0)
    assert done.returncode == EXIT.get(command, 0), f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stdout + done.stderr


def test_the_readme_shows_the_columns_of_now(rack: AgentRack) -> None:
    shown = rack.hosts[0].shell("agentctl hosts").stdout.splitlines()[0].split()
    (written,) = [line.split() for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("HOST ")]
    assert written == shown
