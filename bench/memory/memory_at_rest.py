"""What agents, volumes and jobs at rest weigh: a rack of two is started, with volumes and a job that sleeps.

    python bench/memory/memory_at_rest.py [--volumes 4] [--json FILE]

PRIVATE: memory that no other process has, MiB; PSS: that, and a fair part of what is shared; RSS: all of it. The code
that Covey's programs are forked with is shared with their agent (`agent/ports/processes/forker.py`). The ring of a
volume's log is shared by `vold` and `spill`.
"""

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from subprocess import DEVNULL

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from agent.ports.processes.procfs import words
from bench.live_command import json_option, keep, options, print_head
from cli.rack import processes, rack

FIELDS = ("Private_Clean", "Private_Dirty", "Pss", "Rss")
SETTLED_S = 15.0


def weight(pid: int) -> tuple[float, float, float]:
    """PRIVATE, PSS and RSS of a process, MiB."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    clean, dirty, pss, rss = (int(re.findall(rf"(?m)^{each}:\s+(\d+)", text)[0]) / 1024 for each in FIELDS)
    return clean + dirty, pss, rss


def name(pid: int) -> str:
    said = words(pid, "cmdline")
    if "agent.program" in said:
        return said[said.index("agent.program") + 1]
    return "agentd" if any("agentd" in word for word in said[:3]) else "shim" if "shim.py" in " ".join(said) else ""


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--volumes", type=int, default=4)
    json_option(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="covey-at-rest-") as folder:
        directory, silent = Path(folder) / "rack", rack.Timer(lambda _line: None)
        found: dict[str, list[tuple[float, float, float]]] = {}
        try:
            hosts = rack.start(directory, 2, 2, os.environ, silent)
            agentctl = [str(Path(sys.executable).with_name("agentctl")), "--agent", hosts[0].address]
            for at in range(args.volumes):
                subprocess.run([*agentctl, "volume", "create", f"v{at}", "256MiB"], check=True, stdout=DEVNULL)
            subprocess.run([*agentctl, "submit", "--", "sleep", "600"], check=True, stdout=DEVNULL)
            time.sleep(SETTLED_S)
            for ours in processes.find(directory, [Path(host.run_dir) for host in hosts]):
                if name(ours.pid):
                    found.setdefault(name(ours.pid), []).append(weight(ours.pid))
        finally:
            rack.stop(directory, os.environ, lambda _line: None)
    print_head("process | how many | PRIVATE | PSS | RSS")
    for each, weights in sorted(found.items()):
        private, pss, rss = (statistics.median(column) for column in zip(*weights, strict=True))
        print(f"| {each} | {len(weights)} | {private:.1f} | {pss:.1f} | {rss:.1f} |")
    keep(found, args.json)


if __name__ == "__main__":
    main()
