"""A rack of two releases: hosts are upgraded one by one under load, and one goes back, as far as it may.

The release after this one does not exist yet: `next_release` makes a tree that says more than this one.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.rack import pages
from chaos.rack.agents import AgentRack, wait
from chaos.rack.hosts import Host, Laboratory, why_not
from covey.core.version import VERSION, text_of
from tests.rack import next_release
from tests.rack.next_release import NEXT, NEXT_VERSION, ROOT

pytestmark = [
    pytest.mark.rack,
    pytest.mark.long,
    pytest.mark.xdist_group("hosts"),
    pytest.mark.skipif(bool(why_not()), reason=f"no hosts can be made here: {why_not()}"),
]
STEPS = 60_000
"""More steps than the job has time for: it is told to stop."""


class TwoReleases:
    """Three hosts, and which release each runs."""

    def __init__(self, rack: AgentRack, tree: Path) -> None:
        self.rack, self.tree = rack, tree

    def swap(self, host: Host, newer: bool) -> None:
        """Restart a host's agent as the other release, and wait until all see it."""
        if self.rack.agent_pid(host) is not None:
            self.rack.stop(host)
            wait(lambda: self.rack.agent_pid(host) is None, lambda: f"{host.name} does not stop", 30.0)
        self.begin(host, newer)
        self.rack.wait_up()
        wanted = NEXT_VERSION if newer else VERSION
        said = host.shell("agentctl version").stdout
        assert re.search(rf"^agentd {re.escape(wanted)}: .*{host.name}", said, re.M), said

    def begin(self, host: Host, newer: bool) -> None:
        host.environ.pop("PYTHONPATH", None)
        if newer:
            host.environ["PYTHONPATH"] = str(self.tree)
        self.rack.start([host])

    def typed(self, host: Host, line: str, code: int = 0) -> str:
        done = host.shell(line)
        assert done.returncode == code, f"{host.name}: {line}: {done.returncode}\n{done.stdout}{done.stderr}"
        return f"{done.stdout}{done.stderr}"


class Pages:
    """A program on a host that reads and writes remote memory, and knows what every page must hold."""

    def __init__(self, host: Host) -> None:
        self._log = host.folder / "pages.log"
        words = [sys.executable, pages.__file__, "/run/covey/jobs.sock", "kept", "4", str(host.folder / "oracle")]
        with self._log.open("wb") as out:
            self._process = subprocess.Popen(
                [*host.enter(), *words], env=host.environment(), stdin=subprocess.PIPE, stdout=out, stderr=out
            )

    def said(self) -> str:
        return self._log.read_text()

    def end(self) -> None:
        self._process.communicate(b"", 60.0)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[TwoReleases]:
    next_release.make(tmp_path / "next")
    with Laboratory(3) as lab:
        rack = AgentRack(lab, gpus=2, voters=3, more_toml='[memory]\nslab = "1 MiB"\n')
        rack.start()
        rack.wait_up()
        yield TwoReleases(rack, tmp_path / "next")


def test_hosts_of_two_releases_are_one_rack_under_load(two: TwoReleases) -> None:
    rack, (first, second, third) = two.rack, two.rack.hosts
    job = two.typed(first, f"agentctl submit --nodes 3 -- python {ROOT}/examples/healing.py --steps {STEPS}").split()[0]
    wait(lambda: "running" in two.typed(first, f"agentctl job {job}"), lambda: "it does not run", 60.0)
    user = Pages(third)
    try:
        wait(lambda: "open" in user.said(), user.said, 60.0)
        leader = rack.agent().get("leader").data["leader"]
        others = [host for host in rack.hosts if host.name != leader]
        for host in [*others, *(host for host in rack.hosts if host.name == leader)]:
            two.swap(host, newer=True)
            two.typed(host, "agentctl quota red 5")  # both know that
            if host in others:
                said = two.typed(host, "agentctl quota red 7", code=4)
                assert f"QuotaSet.lucky came with Covey {text_of(NEXT)}" in said and "upgrade these hosts first" in said
        two.swap(second, newer=False)
        assert two.typed(second, "agentctl quota").count("red") == 1
        more = two.typed(second, "agentctl submit --workers 2 -- true").split()[0]
        two.typed(first, f"agentctl wait {more}")
        two.swap(second, newer=True)
        shown = two.typed(first, f"agentctl job {job} --json")
        assert '"state": "running"' in shown and '"attempt": 1,' in shown, two.typed(
            first, f"agentctl why {job}; agentctl why host/{second.name}; agentctl why host/{third.name}"
        )
        two.typed(first, "agentctl quota red 7")
        # whoever goes back now would miss something: it says so, and ends; as what it was, it goes on where it was
        rack.stop(second)
        wait(lambda: rack.agent_pid(second) is None, lambda: "it does not stop", 30.0)
        log = second.folder / "agentd.log"
        before = len(log.read_text())
        two.begin(second, newer=False)
        wait(lambda: "next: install that version" in log.read_text()[before:], lambda: rack.logs([second]), 60.0)
        wait(lambda: rack.agent_pid(second) is None, lambda: "it goes on", 30.0)
        assert f"QuotaSet is a command of Covey {text_of(NEXT)}" in log.read_text()[before:]
        two.swap(second, newer=True)
        assert "red" in two.typed(second, "agentctl quota")
    finally:
        user.end()
    assert re.search(r"ended: \d+ operations, 0 failed, 0 wrong", user.said()), user.said()
