"""A storm on real agents: training whose bits are known, pages with an oracle, ranks that hold locks; a fault every
ten seconds; at the end nothing is lost, nothing ran twice, nothing is left behind.

    covey-chaos storm --hosts 6 --seconds 1800 --seed 1
"""

import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from chaos.rack import pages as pages_of_rack
from chaos.rack import rank as locked_rank
from chaos.rack.agents import AgentRack, wait
from chaos.rack.faults import Storm
from chaos.rack.hosts import Host, Laboratory
from cli.client import NOT_FOUND, AgentctlError
from cli.rack.example import example

WORKERS, STEPS, STEP_S = 4, 1500, 0.02
JOBS_AT_ONCE = 2
VOLUME_MIB = 32
DISK = "256m"
"""Size of each host's disk: small, so that a full disk is noticed."""
SMALL_DISKS = """\
[jobs]
disk_free_min = "32 MiB"
"""
OVER_S = 400.0
"""Seconds after the last fault within which every job is over: a lost host is waited for, and a job begins again."""
LEFT_S = 60.0
"""Seconds after that within which nothing of any job is left."""
RANK_ENV = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
_SHA256 = re.compile(r"parameters sha256=([0-9a-f]{64})")
UNKNOWN_MAX = 20
"""Most looks in a row, half a second apart, that do not find a job: a copy of the log may be behind by what its agent
says."""


class Watched:
    """What users do during the storm, and what they saw."""

    def __init__(self, rack: AgentRack, borrower: Host, say: Callable[[str], None]) -> None:
        self.rack, self.borrower, self._say = rack, borrower, say
        self.locks = rack.lab.folder / "locks"
        self.locks.mkdir()
        self.jobs: dict[str, dict[str, Any]] = {}
        """Every job that was submitted, as last seen."""
        self._unknown: dict[str, int] = {}
        """Job -> how many looks in a row did not find it."""
        self.wrong: list[str] = []
        self.expected = ""
        self._pager: subprocess.Popen[bytes] | None = None
        self._oracle = rack.lab.folder / "oracle"

    def env(self) -> dict[str, str]:
        """Environment of ranks, and of the run that they are compared with: the same bits need the same kernels."""
        kept = {name: os.environ[name] for name in ("OPENBLAS_CORETYPE", "LD_LIBRARY_PATH") if name in os.environ}
        return {**RANK_ENV, **kept, "PATH": self.borrower.environment()["PATH"]}

    def compute_expected(self) -> None:
        command = [sys.executable, str(example()), f"--steps={STEPS}", f"--sequential={WORKERS}"]
        done = subprocess.run(command, env=self.env(), capture_output=True, text=True, check=True)
        found = _SHA256.search(done.stdout)
        assert found, done.stdout
        self.expected = found[1]

    # ---- jobs ----

    def submit(self) -> None:
        """Submit one more job, if fewer than wanted run; a rack without a leader is asked again next time."""
        waiting = sum(not job["over"] for job in self.jobs.values())
        if waiting >= JOBS_AT_ONCE:
            return
        out = self.rack.lab.folder / "out"
        out.mkdir(exist_ok=True)
        script = [sys.executable, locked_rank.__file__, str(self.locks), str(example())]
        body = {
            "name": "digits",
            "key": f"storm-{len(self.jobs)}-{time.monotonic_ns()}",
            "workers": WORKERS,
            "gpus_per_worker": 1,
            "argv": [*script, f"--steps={STEPS}", f"--step-seconds={STEP_S}", f"--out={out}/{len(self.jobs)}.npy"],
            "cwd": str(out),
            "env": {**self.env(), "COVEY_SHARED_TENSORS": str(len(self.jobs) % 2)},
        }
        try:
            view = self.rack.agent().post("jobs", body=body).data
        except AgentctlError as error:
            self._say(f"submit: {error}")
            return
        self.jobs[view["id"]] = dict(view)

    def look(self) -> None:
        for job in [job for job, view in self.jobs.items() if not view["over"]]:
            try:
                view = dict(self.rack.agent().get("jobs", job).data)
            except AgentctlError as error:
                if error.code == NOT_FOUND:
                    self._unknown[job] = self._unknown.get(job, 0) + 1
                    if self._unknown[job] >= UNKNOWN_MAX:
                        self.wrong.append(f"{job} was accepted and is unknown now")
                        del self.jobs[job]
                continue
            self._unknown.pop(job, None)
            self.jobs[job] = view
            if view["over"]:
                self._judge(job, view)

    def _judge(self, job: str, view: dict[str, Any]) -> None:
        if view["state"] != "done":
            self.wrong.append(f"{job} {view['state']} after attempt {view['tally']['attempt']}: {view['reason']}")
            return
        found = ""
        for host in self.rack.hosts:
            log = self.rack.lab.state(host) / "jobs" / job / "rank0.log"
            if log.exists() and (match := _SHA256.findall(log.read_text(errors="replace"))):
                found = match[-1]
        if found != self.expected:
            self.wrong.append(f"{job} is done with parameters {found[:12] or 'unknown'}, not {self.expected[:12]}")
        self._say(f"{job} done, attempt {view['tally']['attempt']}, {found[:12]}")

    # ---- pages ----

    def keep_paging(self) -> None:
        """Start the user of remote memory (again) where it does not run."""
        if self._pager is not None and self._pager.poll() is None:
            return
        words = [sys.executable, pages_of_rack.__file__, "/run/covey/jobs.sock", "pages", str(VOLUME_MIB)]
        log = (self.rack.lab.folder / "pages.log").open("ab")
        self._pager = subprocess.Popen(
            [*self.borrower.enter(), *words, str(self._oracle)],
            env={**self.borrower.environment(), **RANK_ENV},
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
        )
        log.close()

    def end_paging(self) -> str:
        """End the user of remote memory, which reads every page; returns its last line."""
        if self._pager is None:
            return "no pages"
        assert self._pager.stdin is not None
        self._pager.stdin.close()
        self._pager.wait(180.0)
        lines = (self.rack.lab.folder / "pages.log").read_text(errors="replace").splitlines()
        last = lines[-1] if lines else "nothing was said"
        if not last.startswith("ended:"):
            self.wrong.append(f"the user of remote memory ended early: {last}")
        wrong = self._oracle.with_name(self._oracle.name + ".wrong")
        if wrong.exists():
            self.wrong += wrong.read_text().splitlines()[:10]
        return last

    def twice(self) -> list[str]:
        found = self.locks / "violations"
        return found.read_text().splitlines() if found.exists() else []


def left_behind(rack: AgentRack) -> list[str]:
    """Processes of jobs that are left on any host."""
    return [
        f"{host.name}: {command[:100]}"
        for host in rack.hosts
        for command in host.processes().values()
        if locked_rank.__file__ in command or " supervisor" in command
    ]


def play(
    hosts: int, seconds: float, seed: int, every_s: float, say: Callable[[str], None], kinds: Sequence[str] = ()
) -> int:
    """Play a storm; returns 0 when nothing was lost, run twice or left, else 1 with a line for each thing that was."""
    rng = random.Random(seed)
    began_s = time.monotonic()

    def tell(text: str) -> None:
        say(f"{time.monotonic() - began_s:7.1f} s  {text}")

    with Laboratory(hosts, disk=DISK) as lab:
        rack = AgentRack(lab, more_toml=SMALL_DISKS)
        rack.start()
        borrower = rack.hosts[-1]
        users, storm = Watched(rack, borrower, tell), Storm(rack, rng, borrower, kinds)
        users.compute_expected()
        rack.wait_up()
        tell(f"{hosts} agents up, each with an address of its own")
        try:
            _play(rack, users, storm, seconds, every_s, tell)
        except AssertionError as error:
            users.wrong.append(str(error))
        return _verdict(rack, users, storm, seed, tell)


def _play(
    rack: AgentRack, users: Watched, storm: Storm, seconds: float, every_s: float, tell: Callable[[str], None]
) -> None:
    end_s = time.monotonic() + seconds
    next_s = time.monotonic() + every_s
    while time.monotonic() < end_s:
        users.keep_paging()
        users.submit()
        users.look()
        for what in storm.pass_time():
            tell(f"over: {what}")
        if time.monotonic() >= next_s:
            next_s += every_s
            tell(f"fault: {storm.strike()}")
        if users.wrong or users.twice():
            break
        time.sleep(0.5)
    storm.heal()
    rack.start()
    tell("the storm is over")
    rack.wait_up()
    wait(lambda: _all_over(users), lambda: f"jobs are not over: {_states(users)}", OVER_S, 1.0)
    tell(users.end_paging())
    wait(lambda: not left_behind(rack), lambda: f"left behind: {left_behind(rack)[:5]}", LEFT_S, 1.0)


def _all_over(users: Watched) -> bool:
    users.keep_paging()
    users.look()
    return all(view["over"] for view in users.jobs.values())


def _states(users: Watched) -> str:
    return ", ".join(
        f"{job} {view['state']} ({view['reason']})" for job, view in users.jobs.items() if not view["over"]
    )


def _verdict(rack: AgentRack, users: Watched, storm: Storm, seed: int, tell: Callable[[str], None]) -> int:
    done = [view for view in users.jobs.values() if view["state"] == "done"]
    attempts = sum(view["tally"]["attempt"] for view in done)
    counts = ", ".join(f"{kind} {count}" for kind, count in sorted(storm.counts.items()))
    tell(f"{sum(storm.counts.values())} faults: {counts}")
    tell(f"{len(done)} jobs done in {attempts} attempts, all with the bits {users.expected[:12]}")
    broken = users.wrong + users.twice()
    for line in broken:
        tell(f"BROKEN: {line}")
    if broken:
        kept = Path("storm-logs")
        kept.mkdir(exist_ok=True)
        for host in rack.hosts:
            log = host.folder / "agentd.log"
            if log.exists():
                (kept / f"{host.name}.log").write_bytes(log.read_bytes())
        tell(f"logs of all agents: {kept.absolute()}; repeat with: covey-chaos storm --seed {seed}")
    else:
        tell("nothing lost, nothing twice, nothing left")
    return 1 if broken else 0
