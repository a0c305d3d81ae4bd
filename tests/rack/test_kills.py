"""One real rack of four agents, one real job, one volume of remote memory; then `kill -9`.

Whoever is killed: the job ends with the same parameters to the bit, is listed once, and every byte written to remote
memory is read back.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from cli.client import Agent
from cli.rack.files import RackHost
from covey.core.units import MIB
from covey.remote import RemoteMemory
from tests.families import in_gate
from tests.rack.living_rack import ENV, EXAMPLES, LivingRack, living_rack, wait

pytestmark = [pytest.mark.rack, pytest.mark.xdist_group("rack")]

DIGITS = EXAMPLES / "digits.py"
STEPS, STEP_S = 900, 0.008
SCRIPT = f"--steps={STEPS}", "--optimizer=adam"
"""The script of the job, whose optimizer's moments are with the aggregator and one rank: without them it would end with
other parameters."""
VOLUME_BYTES, PAGE, RUN = 32 * MIB, 4096, 256


@pytest.fixture(scope="module")
def living() -> Iterator[LivingRack]:
    with living_rack() as found:
        yield found


@pytest.fixture(scope="module")
def expected() -> str:
    """The parameters that one sequential process ends with."""
    command = [sys.executable, str(DIGITS), *SCRIPT, "--sequential=4"]
    return sha256(subprocess.run(command, capture_output=True, text=True, check=True, env=ENV).stdout)


def sha256(output: str) -> str:
    found = re.search(r"parameters sha256=([0-9a-f]{64}) +accuracy=(0\.\d+)", output)
    assert found, output[-500:]
    assert float(found[2]) >= 0.93
    return found[1]


class Writer:
    """Writes pages at random, and knows what every page must hold."""

    def __init__(self, host: RackHost, volume: str) -> None:
        self.memory = RemoteMemory.open(volume, VOLUME_BYTES, str(host.run_dir / "jobs.sock"))
        self.volume = volume
        self.version = [0] * (VOLUME_BYTES // PAGE)
        self.error: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def write(self, page: int) -> None:
        self.memory.write(page * PAGE, self.content(page, self.version[page] + 1))
        self.version[page] += 1

    @staticmethod
    def content(page: int, version: int) -> bytes:
        return Random(f"{page}/{version}").randbytes(PAGE) if version else bytes(PAGE)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        rng = Random(1)
        try:
            while not self._stop.is_set():
                for _ in range(32):
                    self.write(rng.randrange(len(self.version)))
                time.sleep(0.02)
        except Exception as error:
            self.error = error

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive(), "a write hangs"
        if self.error:
            raise self.error

    def wrong_pages(self) -> list[int]:
        wrong = []
        for first in range(0, len(self.version), RUN):
            data = self.memory.read(first * PAGE, RUN * PAGE)
            for page in range(first, first + RUN):
                at = (page - first) * PAGE
                if data[at : at + PAGE] != self.content(page, self.version[page]):
                    wrong.append(page)
        return wrong


def victims(living: LivingRack, victim: str, job: dict[str, Any], borrower: str) -> list[tuple[str, int]]:
    """The processes that are killed: (host, pid)."""
    if victim == "leader":
        leader = living.agent().get("leader").data["leader"]
        return [(leader, living.agentd(leader))]
    if victim == "lender":
        slabs = living.agent().get("slabs").data
        lender = next(slab["lender"] for slab in slabs if slab["borrower"] == borrower and slab["lender"])
        return [(lender, living.agentd(lender)), (lender, living.program(lender, "slabd"))]
    if victim == "agent of an owner":
        sums = next(row["host"] for row in living.agent().get("tensors").data if row["job"] == job["id"])
        return [(sums, living.agentd(sums))]
    host = job["places"][-1]["host"]
    return [(host, living.agentd(host))]


@pytest.mark.parametrize("victim", in_gate(1, ["lender", "leader", "agent of an owner", "agent with workers"]))
def test_a_job_and_remote_memory_survive_kill_9_of_the(
    victim: str, living: LivingRack, expected: str, tmp_path: Path
) -> None:
    living.start()
    borrower = "gpu4"
    writer = Writer(living.host(borrower), f"v-{victim.split()[0]}")

    def slabs() -> list[dict[str, Any]]:
        return [slab for slab in living.agent().get("slabs").data if slab["volume"] == writer.volume]

    writer.start()
    wait("its slabs are mapped", lambda: slabs() and all(slab["state"] == "mapped" for slab in slabs()))
    job = living.submit(DIGITS, *SCRIPT, f"--step-seconds={STEP_S}", f"--out={tmp_path / 'out.npy'}")
    try:
        view = wait("the job runs", lambda: (job_now := living.job(job))["step"] and job_now)
        ranks = {rank["rank"]: rank["pid"] for rank in view["ranks"] if rank["pid"]}
        assert len(view["places"]) >= 2, "four workers on hosts with two GPUs each"
        killed = victims(living, victim, view, borrower)
        assert borrower not in {host for host, _ in killed}
        assert (living.job(job)["state"], len(ranks)) == ("running", 4), "killed in the middle of the job"
        for _host, pid in killed:
            os.kill(pid, signal.SIGKILL)
        time.sleep(1.0)
        for pid in ranks.values():
            os.kill(pid, 0)  # the workers of a killed agent live on
        living.start()
        ended = wait("the job has ended", lambda: living.job(job)["times"]["ended_wall_s"] and living.job(job), 90)
    finally:
        writer.stop()
    assert (ended["state"], ended["exit_code"], ended["tally"]["attempt"]) == ("done", 0, 1), ended["reason"]
    assert sha256(living.output(job)) == expected
    everywhere = [Agent([host.address], host.name).get("jobs", all=1).data for host in living.hosts]
    assert [[row["id"] for row in rows].count(job) for rows in everywhere] == [1, 1, 1, 1], (
        "listed once, by every agent"
    )
    assert writer.wrong_pages() == []
    writer.memory.remove()
