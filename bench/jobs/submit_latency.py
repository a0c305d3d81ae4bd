"""How long from `submit` to the first line of the script, with the starter and without, in turns.

    python bench/jobs/submit_latency.py [--jobs 60]

Three hosts boot systemd (`chaos/rack/booted.py`) and are installed by what docs/guides/install.md says; all of them
vote. The job of a user goes through the starter: a slice with limits, and a unit for its supervisor. The job of the
agent's own user does not: its agent starts the supervisor. Both are submitted on the first host by agentctl, whose
modules are loaded before; the time begins when it is called, and ends with what `date` printed as the job's first line.
Needs root.
"""

import argparse
import os
import re
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from chaos.rack.booted import BootedHost, why_not_booted
from chaos.rack.hosts import Laboratory
from tests.rack.installed import install, start, typed, written

HOSTS = 3
UP_S = 120.0
STARTER = "[Service]\nProtectHome=read-only\nPrivateTmp=no\n"
"""For the starter's unit: the Python of this tree may be in root's home, and this tree in /tmp."""
SUBMITS = """
import importlib, os, sys, time
import covey.core.carried, covey.core.units
from cli import main
for module in set(main.MODULES.values()):
    importlib.import_module(module)
import grp, pwd
ann, covey = pwd.getpwnam("ann"), grp.getgrnam("covey").gr_gid
words = "submit --follow --gpus 1 --cwd /tmp --no-env -- date +%s.%N".split()
for turn in range(2 * int(sys.argv[1])):
    how = ("with", "without")[(turn + turn // 2) % 2]
    time.sleep(0.3)
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(writes, 1)
        os.dup2(writes, 2)
        if how == "with":
            os.setgroups([covey])
            os.setresgid(ann.pw_gid, ann.pw_gid, ann.pw_gid)
            os.setresuid(ann.pw_uid, ann.pw_uid, ann.pw_uid)
        print("began", time.time(), flush=True)
        code = main.main(words)
        sys.stdout.flush()
        os._exit(code)
    os.close(writes)
    with os.fdopen(reads) as said:
        text = said.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print("turn", how, code, *text.split(), flush=True)
"""


def toml(hosts: int) -> str:
    names = ", ".join(f'"gpu{n}"' for n in range(1, hosts + 1))
    return f'[gossip]\nseeds = ["gpu1:7946"]\n[leader]\nvoters = [{names}]\n[gpus]\nsimulated = 2\n'


def prepared(hosts: list[BootedHost]) -> None:
    for host in hosts:
        typed(host, "useradd -m ann; mkdir -p /etc/systemd/system/covey-starter.service.d")
        written(host, "/etc/systemd/system/covey-starter.service.d/python.conf", STARTER)
    install(hosts, toml(len(hosts)))
    for host in hosts:
        typed(host, "usermod -aG covey ann; cp /opt/covey/share/covey/covey-starter.service /etc/systemd/system/")
        typed(host, "systemctl daemon-reload && systemctl enable --now covey-starter")
    start(hosts, UP_S)
    typed(hosts[0], "agentctl tenant add ml --users ann --quota 16")


def took_s(said: str) -> dict[str, list[float]]:
    """Seconds of each job, with the starter and without. SystemExit when one did not run."""
    found: dict[str, list[float]] = {"with": [], "without": []}
    for line in said.splitlines():
        turn = re.match(r"turn (\w+) (-?\d+) began ([0-9.]+) .*?(\d{9,}\.\d{9})\b", line)
        if turn is None or turn[2] != "0":
            sys.exit(f"a job did not run: {line}")
        found[turn[1]].append(float(turn[4]) - float(turn[3]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        "submit_latency.py", description="Submit to the first line, with a starter and not."
    )
    parser.add_argument("--jobs", type=int, default=60, help="of each kind (%(default)s)")
    options = parser.parse_args()
    if why := why_not_booted():
        sys.exit(f"not measured: {why}")
    with Laboratory(HOSTS, kind=BootedHost) as lab:
        hosts = [host for host in lab.hosts.values() if isinstance(host, BootedHost)]
        prepared(hosts)
        began_s, load = time.monotonic(), os.getloadavg()[0]
        done = hosts[0].run([sys.executable, "-c", SUBMITS, str(options.jobs)], 1800.0)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        took = took_s(done.stdout)
    print(f"load {load:.1f} before, {os.getloadavg()[0]:.1f} after {time.monotonic() - began_s:.0f} s; ", end="")
    print(f"{HOSTS} hosts, {os.cpu_count()} cores, {options.jobs} jobs each, in turns")
    print("| submit to first line, ms | p50 | p95 | longest |\n|---|---|---|---|")
    for how, seconds in took.items():
        at = sorted(1e3 * each for each in seconds)
        p95 = statistics.quantiles(at, n=20, method="inclusive")[-1]
        print(f"| {how} the starter | {statistics.median(at):.0f} | {p95:.0f} | {at[-1]:.0f} |")


if __name__ == "__main__":
    main()
