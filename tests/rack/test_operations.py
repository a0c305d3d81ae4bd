"""What docs/operations.md tells people to type is typed, as it stands there, on hosts that are set up as it says."""

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
PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
PROGRAMS = ("agentctl", "agentd", "covey-rack", "covey-chaos", "systemctl", "pip", "curl")
BOOTED = "tests/rack/test_systemd.py does, on hosts whose first process is systemd"
NOT_TYPED = {
    "pip install covey-agent": "needs a package registry that has it",
    "systemctl status covey": BOOTED,
    "systemctl edit covey": "opens an editor",
    "systemctl stop covey": BOOTED,
    "systemctl enable --now covey-swap": "would swap on this machine",
    "agentctl memory attach swap1 --size 64G --swap": "would swap on this machine; tests/guest/kernel_swap.py does",
    "agentctl memory attach swap2 --size 64G --swap --mirror 2": "likewise",
    "systemctl restart covey": BOOTED,
    "systemctl kill --signal=SIGINT covey": BOOTED,
    "agentd --make-key /etc/covey/gossip.key": "this is how the key of this rack was made",
    "agentctl gpus --watch": "goes on until it is interrupted; tests/cli/test_shared.py does",
    "covey-rack run --devices cpu": "makes a rack of this machine; tests/rack/test_cpu_devices.py does",
    "agentctl move j7 gpu2": "that job has ended, or is elsewhere, as it comes; tests/rack/test_healing.py moves ranks",
    "agentctl move j7 3 gpu5": "likewise",
    "systemctl daemon-reload && systemctl enable --now covey": BOOTED,
}
"""Command, or its beginning -> why it is not typed here."""
EXIT = {
    "agentctl hosts give-up gpu4": 4,  # it is alive, and nobody gives up a host that answers
    "agentctl volumes give-up vol1": 3,  # a healthy rack has no volume that waits
    "agentctl tensors --move train/1 gpu4": 3,  # no job of that name pushes tensors then
    "agentctl gpus forget UUID": 3,  # no GPU is called that
    "agentctl memory detach swap1": 3,
}
"""Command -> its exit code, where that is not 0."""


def commands(text: str) -> list[str]:
    """Every command of a page, once, in its order: lines of code blocks, and what stands between backticks."""
    found: dict[str, None] = {}
    fenced = False
    for line in text.splitlines():
        if line.startswith("```"):
            fenced = not fenced
        spans = [line.strip()] if fenced or line.startswith("    ") else re.findall(r"`([^`]+)`", line)
        for span in spans:
            command = span.partition("  #")[0].strip()
            if command.split(" ")[0] in PROGRAMS and " " in command:
                found[command] = None
    return list(found)


def left_out(command: str) -> bool:
    return any(command == known or command.startswith(known + " #") for known in NOT_TYPED)


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


def test_the_page_has_commands_and_names_what_is_not_typed() -> None:
    known = commands(PAGE.read_text())
    assert "agentctl hosts" in known
    assert [line for line in NOT_TYPED if line not in known] == [], "stands on the page no more"


@pytest.mark.parametrize("command", [one for one in commands(PAGE.read_text()) if not left_out(one)])
def test_a_command_of_the_page_does_what_it_says(command: str, rack: AgentRack) -> None:
    done = rack.hosts[0].shell(command, timeout_s=60.0)
    assert done.returncode == EXIT.get(command, 0), f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stdout + done.stderr
