"""In the User-Mode Linux of `make swap`: a host whose first process is systemd swaps, by its units and what
docs/operations.md says, under a limit of memory that systemd sets.

One line for each thing that holds; what does not hold is said, and the exit status is 1.
"""

import re
import shlex
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from chaos.rack.agents import wait
from chaos.rack.booted import SHARE, BootedHost
from chaos.rack.hosts import Laboratory
from tests.rack.test_systemd import PAGE, TOML, installation, typed, up, written

MIB = 1 << 20
HELD, LIMIT = 120 * MIB, 48 * MIB
SWAPPED_MIN = 50 * MIB
LABORATORY = """\
[Service]
NetworkNamespacePath=/run/machine-net
ProtectHome=no
"""
"""For `covey-swap.service` of these hosts: NBD's netlink is in the machine's own network alone, and Python may be in
somebody's home directory."""
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
"""
BEGAN_S = time.monotonic()


def say(line: str) -> None:
    print(f"systemd: {time.monotonic() - BEGAN_S:6.1f} s  {line}", flush=True)


def swapped() -> int:
    return sum(int(line.split()[3]) << 10 for line in Path("/proc/swaps").read_text().splitlines()[1:])


def installed(first: BootedHost, second: BootedHost) -> None:
    """Both, the first with the swap helper: step 1 of the page, but for the editor and the laboratory's own lines."""
    for host in (first, second):
        lines = [line for line in installation() if "--make-key" not in line]
        typed(host, "set -e; " + "\n".join(lines[:-2]))
        typed(host, f"printf %s {shlex.quote(TOML)} > /etc/covey/agent.toml")
    typed(first, "agentd --make-key /etc/covey/gossip.key")
    written(second, "/etc/covey/gossip.key", typed(first, "cat /etc/covey/gossip.key"))
    step = PAGE.read_text().partition("1. On that host: `covey-swap.service`")[2].partition("\n")[0]
    settings = re.findall(r"`(\w+=\w+)`", step)
    assert len(settings) == 2, step
    for unit, lines in (("covey", ["[Service]", *settings]), ("covey-swap", LABORATORY.splitlines())):
        typed(first, f"mkdir -p /etc/systemd/system/{unit}.service.d")
        written(first, f"/etc/systemd/system/{unit}.service.d/override.conf", "\n".join(lines) + "\n")
    typed(first, f"cp {SHARE}/covey-swap.service /etc/systemd/system/")
    for host in (first, second):
        typed(host, "systemctl daemon-reload && systemctl enable --now covey", 120.0)
    for command in re.findall(r"`(systemctl (?:enable|restart)[^`]*)`", step):
        typed(first, command, 120.0)
    for host in (first, second):
        up(host)


def round_(first: BootedHost, turn: int) -> None:
    """The job has written every page anew and verified it."""

    def there() -> bool:
        return first.shell("cat /run/job").stdout.strip() == str(turn)

    wait(there, lambda: typed(first, "systemctl status job --no-pager; agentctl memory"), 300.0)


def main() -> None:
    with Laboratory(2, kind=BootedHost) as lab:
        first, second = (host for host in lab.hosts.values() if isinstance(host, BootedHost))
        installed(first, second)
        say("installed as the page says")
        said = typed(first, "agentctl memory attach swap1 --size 256M --swap", 120.0)
        assert len(Path("/proc/swaps").read_text().splitlines()) == 2, said
        say(said.strip())
        written(first, "/run/job.py", JOB)
        python = shlex.quote(sys.executable)
        typed(first, f"systemd-run -q --unit=job -p MemoryMax={LIMIT} -p MemorySwapMax=infinity {python} /run/job.py")
        round_(first, 0)
        assert swapped() > SWAPPED_MIN, f"only {swapped() >> 20} MiB are swapped: nothing was tried"
        say(f"{HELD >> 20} MiB written and verified under {LIMIT >> 20}, {swapped() >> 20} MiB swapped")
        harms = (
            "systemctl restart covey",
            "systemctl stop covey; sleep 1; systemctl start covey",
            "systemctl kill --kill-who=main --signal=KILL covey",
            "systemctl kill --signal=KILL covey-swap; pkill -KILL -f 'agent.program vold'",
            "systemctl restart covey-swap",
        )
        for turn, harm in enumerate(harms):
            typed(first, f"touch /run/go{turn}; sleep 0.3; {harm}", 120.0)
            round_(first, turn + 1)
            up(first)
            say(f"{harm}: every page verified")
        typed(first, "systemctl set-property --runtime job MemoryMax=infinity; agentctl memory detach swap1", 120.0)
        assert len(Path("/proc/swaps").read_text().splitlines()) == 1, "the swap is still on"
        typed(first, f"touch /run/go{len(harms)}")
        round_(first, len(harms) + 1)
        say("detached, every page verified")


if __name__ == "__main__":
    main()
