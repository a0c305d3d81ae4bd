"""`make bench-tuner-splits`: the four applications on six real hosts: the tuner from its two worst starts, against
every fixed split into workers and servers, and all hosts both.

    python bench/elastic/tuner_splits.py [--only nmf ...] [--rate 100mbit] [--seconds 8]

Hosts are network namespaces with real agents, each with a card of that rate in each direction (tbf). A pass of a rank
takes `--pass-s` at least, which it sleeps, so that six hosts compute at once on a machine with few cores. One job of
each application is arranged in turn as each split, all with as many ranks on each worker and tables on each server as
whole numbers allow; then it starts from one worker and from one server, and `agentctl tune` has it. STEP: median time
between two steps, ms, over `--seconds` each, measured from files that the job's script writes, not by the tuner. (Needs
root and iproute2.)
"""

import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.elastic.elastic_changes import TRAIN, shell, times, told  # noqa: E402
from bench.elastic.tuner_live import shape  # noqa: E402
from bench.live_command import json_option, keep, options, print_head, submitted  # noqa: E402
from chaos.rack.agents import AgentRack, wait  # noqa: E402
from chaos.rack.hosts import Laboratory  # noqa: E402
from cli.client import AgentctlError  # noqa: E402

HOSTS, RANKS, TABLES = 6, 12, 4
APPLICATIONS: Mapping[str, str] = {
    "nmf": "--columns 24000 --rows 4 --blocks 12",
    "mlr": "--features 12000 --rows 4 --blocks 12",
    "lda": "--words 6000 --documents 1 --blocks 12",
    "lasso": "--features 60000 --rows 4 --blocks 12",
}
"""Options that make models of about a megabyte, with little to compute: a pass is mostly sleep."""
CHANGE_S, TUNED_S, IDLE_S = 60.0, 150.0, 40.0
"""Most seconds for a change, and for the tuner; it is done when it has changed nothing for the third of these."""


class Split(NamedTuple):
    """How many hosts, the first ones, carry ranks, and how many, the last ones, own tables."""

    workers: int
    servers: int

    @property
    def name(self) -> str:
        return "all both" if self.workers == self.servers == HOSTS else f"{self.workers} : {self.servers}"


SPLITS = (*(Split(workers, HOSTS - workers) for workers in range(1, HOSTS)), Split(HOSTS, HOSTS))


def main(argv: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--only", nargs="+", choices=APPLICATIONS, default=list(APPLICATIONS))
    parser.add_argument("--rate", default="100mbit", help="of a host's card in each direction, as tc says it")
    parser.add_argument("--pass-s", type=float, default=0.02)
    parser.add_argument("--seconds", type=float, default=8.0, help="for which each split is watched")
    json_option(parser)
    args = parser.parse_args(argv)
    found: dict[str, Any] = {}
    with Laboratory(HOSTS) as lab:
        shape(lab, [*lab.hosts.values()], args.rate)
        rack = AgentRack(lab, gpus=1, voters=3)
        rack.start()
        rack.wait_up()
        for name in args.only:
            try:
                row = found.setdefault(name, {"fixed": {}, "tuned": []})
                of_application(rack, name, args.pass_s, args.seconds, row)
            finally:
                keep(found, args.json)
    names = [split.name for split in SPLITS]
    print_head(f"STEP, ms | {' | '.join(names)} | tuned from {SPLITS[0].name} | from {SPLITS[-2].name} | of the best")
    for name, row in found.items():
        best = min(row["fixed"].values())
        fixed = " | ".join(f"{1000 * row['fixed'][split]:.0f}" for split in names)
        tuned = " | ".join(f"{1000 * one['step_s']:.0f} ({one['as']})" for one in row["tuned"])
        of_best = ", ".join(f"{best / one['step_s']:.2f}" for one in row["tuned"])
        print(f"| {name} | {fixed} | {tuned} | {of_best} |")
    return 0


def of_application(rack: AgentRack, name: str, pass_s: float, seconds: float, into: dict[str, Any]) -> None:
    for host in rack.hosts:
        (host.folder / "root" / "train.py").write_text(TRAIN)
        for old in (host.folder / "root").glob("steps.*"):
            old.unlink()
    script = f"{ROOT}/examples/elastic/{name}.py {APPLICATIONS[name]} --steps 100000 --step-seconds {pass_s}"
    job = submitted(rack.hosts[0], f"--workers 1..{RANKS} -- python train.py {script}")
    wait(lambda: len(times(rack)) > 5, lambda: told(rack, job), 120.0)
    for split in SPLITS[::-1]:
        arrange(rack, job, split)
        into["fixed"][split.name] = step_s = watched(rack, seconds)
        print(f"  {name} {split.name}: {1000 * step_s:.0f} ms", file=sys.stderr, flush=True)
    for start in (SPLITS[0], SPLITS[-2]):
        arrange(rack, job, start)
        found = tune(rack, job)
        into["tuned"].append({"from": start.name, "step_s": watched(rack, seconds), **found})
        print(f"  {name} tuned from {start.name}: {into['tuned'][-1]}", file=sys.stderr, flush=True)
        shell(rack, f"agentctl tune {job} off")
    print(shell(rack, f"agentctl why {job}"), file=sys.stderr)
    shell(rack, f"agentctl cancel {job}")
    wait(lambda: not any(host.find("train.py") for host in rack.hosts), lambda: told(rack, job), 60.0)


def arrange(rack: AgentRack, job: str, split: Split) -> None:
    """Arrange the job so, and wait until it runs so."""
    names = [host.name for host in rack.hosts]
    workers, servers = names[: split.workers], names[HOSTS - split.servers :]
    shares = {host: RANKS // len(workers) + (at < RANKS % len(workers)) for at, host in enumerate(workers)}
    owners = [servers[table % len(servers)] for table in range(TABLES)]
    body = {"processes": dict.fromkeys(workers, 1), "shares": shares, "owners": owners, "by": "the bench"}
    end_s = time.monotonic() + CHANGE_S
    while True:
        try:
            rack.agent().post("jobs", job, "arrange", body=body)
            break
        except AgentctlError as error:  # some of its processes may not have the state yet
            if "stay as they are" in str(error):
                break
            if time.monotonic() > end_s:
                raise
        time.sleep(1.0)
    time.sleep(2.0)
    done = len(times(rack))
    wait(lambda: len(times(rack)) > done + 10, lambda: told(rack, job), CHANGE_S)


def tune(rack: AgentRack, job: str) -> dict[str, Any]:
    """Let the tuner have the job until it has changed nothing for a while; how it is then."""
    end_s, kept_s, before = time.monotonic() + TUNED_S, time.monotonic(), ""
    changes = -1
    shell(rack, f"agentctl tune {job}")
    while time.monotonic() < min(end_s, kept_s + IDLE_S):
        time.sleep(2.0)
        now = rack.agent().get("jobs", job).data["elastic"]
        words = json.dumps([now.get("shares"), now.get("owners")])
        if words != before:
            before, kept_s, changes = words, time.monotonic(), changes + 1
    roles = f"{' '.join(str(now['shares'].get(host.name, 0)) for host in rack.hosts)}; {' '.join(now['owners'])}"
    return {"as": roles, "changes": changes}


def watched(rack: AgentRack, seconds: float) -> float:
    """The median time between two steps, in seconds, of at least ten of them."""
    done = len(times(rack))
    time.sleep(seconds)
    wait(lambda: len(times(rack)) > done + 10, lambda: "the job stands still", CHANGE_S)
    return statistics.median(after - before for before, after in pairwise(times(rack)[done:]))


if __name__ == "__main__":
    sys.exit(main())
