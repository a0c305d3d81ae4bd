"""In another release (`make elsewhere`): hosts of systemd with Covey's wheels in /opt/covey, built and compiled there.

It prints one line for each thing that holds; what does not hold ends it with its traceback.
"""

import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from chaos.rack.agents import wait
from chaos.rack.booted import InstalledHost
from chaos.rack.hosts import Laboratory
from tests.rack.installed import install, memory, start, typed
from tools.wheels import build, environment

PLACE = Path("/opt/covey")
MADE = PLACE / "made-by-a-test"
BEGAN_S = time.monotonic()
MAPPED = """
for pid in $(pgrep -f "agent.program (vold|spill|slabd)"); do
    echo $(stat -c %U /proc/$pid) $(grep -c mypyc /proc/$pid/maps) $(tr "\\0" " " < /proc/$pid/cmdline)
done
"""


def say(line: str) -> None:
    print(f"installed: {time.monotonic() - BEGAN_S:6.1f} s  {line}", flush=True)


def installed() -> None:
    """Install by pip, from wheels, as the page says; the agent's carries the byte path compiled."""
    if PLACE.exists() and not MADE.exists():
        raise SystemExit(f"{PLACE} is somebody's installation\nnext: make elsewhere, whose /opt is its own")
    shutil.rmtree(PLACE, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="covey-wheels-") as folder:
        wheels = [build("covey_job", Path(folder)), build("covey_agent", Path(folder), compiled=True)]
        environment(PLACE, wheels)
        MADE.touch()
    say(f"wheels in {PLACE}, {sys.version.split()[0]}, compiled")


def main() -> None:
    installed()
    with Laboratory(2, kind=InstalledHost) as lab:
        first, second = (host for host in lab.hosts.values() if isinstance(host, InstalledHost))
        install([first, second])
        start([first, second])
        say(f"two hosts of {typed(first, 'systemctl --version').splitlines()[0]}")
        script = memory("memory.write(0, data)").replace(sys.executable, f"{PLACE}/bin/python")
        typed(first, script)
        wait(lambda: "8/8" in first.shell("agentctl volume ls").stdout, first.journal, 30.0)
        typed(first, script.replace("memory.write(0, data)", "assert memory.read(0, len(data)) == data"))
        say("32 MiB of remote memory, every byte right")
        found = [line.split(maxsplit=2) for host in (first, second) for line in typed(host, MAPPED).splitlines()]
        assert len(found) == 3, found
        assert all(user == "covey" and int(maps) for user, maps, _ in found), found
        say("vold, its log and slabd run compiled, as the user covey")
        said = typed(first, "agentctl doctor")
        assert "0 wrong" in said and "byte path: compiled" in said, said
        say("agentctl doctor: 0 wrong")
    say("all of it holds")


if __name__ == "__main__":
    main()
