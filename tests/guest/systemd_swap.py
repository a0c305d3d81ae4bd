"""In the User-Mode Linux of `make swap`: a host whose first process is systemd swaps, by its units and what
docs/guides/memory.md says, under a limit of memory that systemd sets.

    python tests/guest/systemd_swap.py disk|mirror [--idle-minutes 3]

`disk`: two hosts, and what units do. `mirror`: four, slabs of the default size, no disk behind the swap; idle first,
then a lender loses its power, cables are drawn, and lenders are upgraded. One line is printed for each thing that
holds; what does not hold is named, and the exit status is 1.
"""

import argparse
import json
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from chaos.rack.agents import wait
from chaos.rack.booted import SHARE, BootedHost
from chaos.rack.hosts import Laboratory
from tests.rack.installed import PAGE, TOML, alive, install, start, typed, written

MIB = 1 << 20
HELD, LIMIT = 120 * MIB, 48 * MIB
SWAPPED_MIN = 50 * MIB
LABORATORY = """\
[Service]
NetworkNamespacePath=/run/machine-net
ProtectHome=no
"""
"""Drop-in for `covey-swap.service` of these hosts: NBD's netlink is in the machine's own network alone, and Python may
be in a home directory."""
DEFAULT_SLABS = TOML.replace('slab = "4 MiB"', 'headroom = "128 MiB"')
"""The file of every agent with slabs of the default size; all hosts here have one memory."""
HOSTS = {"disk": (2, TOML), "mirror": (4, DEFAULT_SLABS)}
SLOW_S = 120.0
"""Seconds that a whole rack in the guest may take to be up."""
ALONE_S, CUT_S = 60.0, 20.0
JOB = f"""
import pathlib, time
pages, go = {HELD} // 4096, pathlib.Path("/run/job")
memory = bytearray({HELD})
for turn in range(1000):
    for number in range(pages):
        memory[number * 4096:number * 4096 + 16] = b"%08d/%06d." % (number, turn)
    for number in range(pages):
        assert memory[number * 4096:number * 4096 + 16] == b"%08d/%06d." % (number, turn), number
    go.write_text(str(turn))
    while not pathlib.Path(f"/run/go{{turn}}").exists():
        time.sleep(0.1)
    for number in range(pages):
        assert memory[number * 4096:number * 4096 + 16] == b"%08d/%06d." % (number, turn), ("kept", number)
"""
"""Script of the job. Each round: every page is as the round before left it, then written anew and verified."""
BEGAN_S = time.monotonic()


def say(line: str) -> None:
    print(f"systemd: {time.monotonic() - BEGAN_S:6.1f} s  {line}", flush=True)


def swapped() -> int:
    return sum(int(line.split()[3]) << 10 for line in Path("/proc/swaps").read_text().splitlines()[1:])


def areas() -> int:
    return len(Path("/proc/swaps").read_text().splitlines()) - 1


def installed(hosts: Sequence[BootedHost], toml: str) -> None:
    """Install all hosts, the first with the swap helper: step 1 of the page, except for the editor and the
    laboratory's own lines."""
    first = hosts[0]
    install(hosts, toml)
    step = PAGE.read_text().partition("1. On that host: `covey-swap.service`")[2].partition("\n")[0]
    settings = re.findall(r"`(\w+=\w+)`", step)
    assert len(settings) == 2, step
    for unit, lines in (("covey", ["[Service]", *settings]), ("covey-swap", LABORATORY.splitlines())):
        typed(first, f"mkdir -p /etc/systemd/system/{unit}.service.d")
        written(first, f"/etc/systemd/system/{unit}.service.d/override.conf", "\n".join(lines) + "\n")
    typed(first, f"cp {SHARE}/covey-swap.service /etc/systemd/system/")
    start(hosts, SLOW_S)
    for command in re.findall(r"`(systemctl (?:enable|restart)[^`]*)`", step):
        typed(first, command, SLOW_S)
    for host in hosts:
        alive(host, len(hosts), SLOW_S)


class Swapping:
    """A job on the first host that swaps: every page of it is written anew and verified in each round."""

    def __init__(self, host: BootedHost) -> None:
        self.host, self.turn = host, 0
        written(host, "/run/job.py", JOB)
        python = shlex.quote(sys.executable)
        typed(host, f"systemd-run -q --unit=job -p MemoryMax={LIMIT} -p MemorySwapMax=infinity {python} /run/job.py")
        self.done()
        assert swapped() > SWAPPED_MIN, f"only {swapped() >> 20} MiB are swapped: nothing was tried"
        say(f"{HELD >> 20} MiB written and verified under {LIMIT >> 20}, {swapped() >> 20} MiB swapped")

    def done(self) -> None:
        def there() -> bool:
            return self.host.shell("cat /run/job").stdout.strip() == str(self.turn)

        wait(there, lambda: typed(self.host, "systemctl status job --no-pager; agentctl memory"), 300.0)

    def go(self) -> None:
        typed(self.host, f"touch /run/go{self.turn}")
        self.turn += 1

    def through(self, harm: str, does: Callable[[], object]) -> None:
        began_s = time.monotonic()
        self.go()
        time.sleep(0.3)
        does()
        self.done()
        say(f"{harm}: {time.monotonic() - began_s:.0f} s, every page verified")

    def detached(self, volume: str) -> None:
        typed(
            self.host,
            f"systemctl set-property --runtime job MemoryMax=infinity; agentctl volume unswap {volume}",
            120.0,
        )
        assert areas() == 0, "the swap is still on"
        self.go()
        self.done()
        say("detached, every page verified")


def attached(host: BootedHost, words: str) -> None:
    """`agentctl volume swap`, again while lenders start their slab processes."""
    until_s = time.monotonic() + SLOW_S
    while "is not ready" in (said := host.shell(f"agentctl volume swap {words}", SLOW_S)).stderr:
        assert time.monotonic() < until_s, said.stderr
    assert said.returncode == 0, f"{said.stdout}{said.stderr}{host.journal()}"
    assert areas() == 1, said.stdout
    say(said.stdout.strip())


UNITS = (
    "systemctl restart covey",
    "systemctl stop covey; sleep 1; systemctl start covey",
    "systemctl kill --kill-who=main --signal=KILL covey",
    "systemctl kill --signal=KILL covey-swap; pkill -KILL -f 'agent.program vold'",
    "systemctl restart covey-swap",
)


def by_units(job: Swapping, hosts: Sequence[BootedHost]) -> None:
    for harm in UNITS:
        job.through(harm, partial(typed, job.host, harm, SLOW_S))
        alive(job.host, len(hosts), SLOW_S)


# ---- without a disk --------------------------------------------------------------------------------------------------


def row(host: BootedHost) -> dict[str, object]:
    return next(
        each for each in json.loads(typed(host, "agentctl volume ls --json"))["data"] if each["volume"] == "swap1"
    )


def places(host: BootedHost) -> list[str]:
    """Lenders of the volume's members, in the order of slabs."""
    slabs = json.loads(typed(host, "agentctl slabs --json"))["data"]
    return [str(slab["lender"]) for slab in slabs if slab["volume"] == "swap1" and slab["state"] == "mapped"]


def whole(host: BootedHost) -> None:
    """Wait until every slab has both members again."""

    def formed() -> bool:
        return row(host)["slabs_whole"] == row(host)["slabs"]

    wait(formed, lambda: typed(host, "agentctl volume ls; agentctl slabs; agentctl why volume/swap1"), SLOW_S, 1.0)


def most_lent(first: BootedHost, hosts: Sequence[BootedHost]) -> BootedHost:
    found = places(first)
    return max(hosts[1:], key=lambda host: found.count(host.name))


def unplugged(hosts: Sequence[BootedHost], for_s: float) -> None:
    for host in hosts:
        host.cable(False)
    time.sleep(for_s)
    for host in hosts:
        host.cable(True)


def by_lenders(job: Swapping, hosts: Sequence[BootedHost], idle_minutes: float) -> None:
    first = job.host
    whole(first)
    before = places(first)
    assert len(before) == 2 * int(str(row(first)["slabs"])), before
    time.sleep(60.0 * idle_minutes)
    assert places(first) == before, f"places changed while idle: {before}, {places(first)}"
    job.through(f"idle for {idle_minutes:g} minutes, no place changed", lambda: None)
    by_units(job, hosts)
    whole(first)
    lender = most_lent(first, hosts)
    job.through(f"power of {lender.name}, which had {places(first).count(lender.name)} members", lender.power_off)
    whole(first)
    assert lender.name not in places(first)
    say(f"every slab has two members without {lender.name}")
    lender.power_on()
    for host in hosts:
        alive(host, len(hosts), SLOW_S)
    lender = most_lent(first, hosts)
    job.through(f"cable of {lender.name} out for {CUT_S:g} s", lambda: unplugged([lender], CUT_S))
    whole(first)
    job.through(f"cable of this host out for {ALONE_S:g} s", lambda: unplugged([first], ALONE_S))
    for host in hosts:
        alive(host, len(hosts), SLOW_S)
    whole(first)

    def upgraded() -> None:
        for host in hosts[1:]:
            typed(host, "systemctl restart covey", SLOW_S)
            alive(host, len(hosts), SLOW_S)

    before = places(first)
    job.through("systemctl restart covey on each lender", upgraded)
    assert places(first) == before, f"an upgrade moved slabs: {before}, {places(first)}"
    by_kills(job, hosts)


def by_kills(job: Swapping, hosts: Sequence[BootedHost]) -> None:
    """Kill slab processes, one host after the other, each once the slabs are whole again."""
    lenders = [host for host in hosts[1:] if host.name in places(job.host)]
    assert len(lenders) > 1, places(job.host)
    for host in lenders:
        whole(job.host)
        held = places(job.host).count(host.name)
        kill = partial(typed, host, "pkill -KILL -f 'agent.program slabd'")
        job.through(f"kill -9 of the slab process of {host.name}, which had {held} members", kill)


def main() -> None:
    parser = argparse.ArgumentParser("systemd_swap.py")
    parser.add_argument("kind", choices=HOSTS)
    parser.add_argument("--idle-minutes", type=float, default=3.0)
    options = parser.parse_args()
    count, toml = HOSTS[options.kind]
    with Laboratory(count, kind=BootedHost) as lab:
        hosts = [host for host in lab.hosts.values() if isinstance(host, BootedHost)]
        installed(hosts, toml)
        say(f"{count} hosts, installed as the page says")
        is_mirrored = options.kind == "mirror"
        attached(hosts[0], "swap1 192M --mirror 2" if is_mirrored else "swap1 256M")
        job = Swapping(hosts[0])
        if is_mirrored:
            by_lenders(job, hosts, options.idle_minutes)
        else:
            by_units(job, hosts)
        job.detached("swap1")
    say(f"{options.kind}: all of it holds")


if __name__ == "__main__":
    main()
