"""`make bench-tensors-jobs`: jobs share live aggregators, or have one each (AutoPS, figure 4.9, table 4.4).

    python bench/tensors/tensors_jobs.py [--sets "AlexNet,AlexNet;AlexNet,VGG19,BERT"] [--seconds 150] [--json FILE]

Four hosts (network namespaces) with real agents. Each job has two ranks that train on one host, by way of an
aggregator (shared memory is off); it sums the tensors of a model, a tenth of the real size, and waits for the time
that it would compute. First each aggregator takes one job (`jobs_max = 1`: a server for each), then all that its own
check admits, with the settings that agents have. SERVERS: aggregators that serve a job once it has settled. CPU: of
all summing processes, of one core. LOSS: of each job's speed, against its own server: over all iterations, and the
worst hundred in a row, from the first one on, trial and moves with them; 10 % is the limit. WRONG: elements of any
sum. (Needs root and iproute2.)
"""

import re
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.live_command import json_option, keep, options, print_head, spent_s, submitted  # noqa: E402
from bench.tensors.tensors_moves import MODELS, TRAIN, Model  # noqa: E402
from chaos.rack.agents import AgentRack, wait  # noqa: E402
from chaos.rack.hosts import Laboratory  # noqa: E402

HOSTS, RANKS = 4, 2
SETS = "AlexNet,AlexNet;AlexNet,VGG19,BERT;AlexNet,AlexNet,AlexNet,AlexNet;AlexNet,VGG19,AWD-LM,BERT"
OWN = "[aggregator]\njobs_max = 1\n"
FIRST = 4
"""Iterations that do not count, since all memory is new."""
WINDOW = 100
SETTLED_S = 60.0
"""Seconds after which CPU and servers are counted."""
START_S = 120.0


class Measured(NamedTuple):
    """Measurements of some jobs that run at once."""

    iterations_s: list[list[float]]
    """Seconds of each job's iterations, one after the other."""
    servers: int
    cpu: float
    """CPU of the servers in cores."""
    wrong: int


def main(argv: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--sets", default=SETS, help="models of jobs that run at once; sets between semicolons")
    parser.add_argument("--seconds", type=float, default=150.0, help="for which each set runs")
    parser.add_argument("--divide", type=int, default=10, help="models are so much smaller")
    json_option(parser)
    args = parser.parse_args(argv)
    print_head("jobs | SERVERS, own | shared | CPU, own | shared | saved | LOSS of each | worst 100 | WRONG")
    whole: dict[str, Any] = {}
    for names in args.sets.split(";"):
        models = [smaller(MODELS[name], args.divide) for name in names.split(",")]
        own, shared = (measure(models, toml, args.seconds) for toml in (OWN, ""))
        losses, worst = losses_of(own, shared)
        wrong = own.wrong + shared.wrong
        print(
            f"| {names} | {own.servers} | {shared.servers} | {own.cpu:.0%} | {shared.cpu:.0%} "
            f"| {1 - shared.servers / own.servers:.0%} | {', '.join(f'{each:.1%}' for each in losses)} "
            f"| {max(worst):.1%} | {wrong} |",
            flush=True,
        )
        whole[names] = {"own": own._asdict(), "shared": shared._asdict(), "losses": losses, "worst": worst}
    keep(whole, args.json)
    return 1 if any(each[way]["wrong"] for each in whole.values() for way in ("own", "shared")) else 0


def smaller(model: Model, by: int) -> Model:
    return model._replace(
        size_mb=max(1, model.size_mb // by), largest_mb=model.largest_mb / by, computes_s=model.computes_s / 2
    )


def measure(models: Sequence[Model], toml: str, seconds: float) -> Measured:
    with Laboratory(HOSTS) as lab:
        rack = AgentRack(lab, gpus=RANKS, voters=1, more_toml=toml)
        rack.start()
        rack.wait_up()
        for host in rack.hosts:
            (host.folder / "root" / "train.py").write_text(TRAIN)
        jobs = [submit(rack, number, model) for number, model in enumerate(models)]
        wait(lambda: served(rack).keys() >= set(jobs), lambda: told(rack), START_S)
        time.sleep(min(SETTLED_S, seconds / 2))
        began_s, before_s = time.monotonic(), all_spent_s(rack)
        servers = []
        while time.monotonic() < began_s + seconds - SETTLED_S:
            time.sleep(5.0)
            servers.append(len(set(served(rack).values())))
        cpu = (all_spent_s(rack) - before_s) / (time.monotonic() - began_s)
        print(told(rack), file=sys.stderr, flush=True)
        for job in jobs:
            rack.hosts[0].shell(f"agentctl cancel {job}")
        lines = [rounds(rack, number) for number in range(len(jobs))]
        times = [[after[0] - before[0] for before, after in pairwise(job)] for job in lines]
        return Measured(
            [job[FIRST:] for job in times], servers[-1], cpu, sum(int(one[1]) for job in lines for one in job)
        )


def submit(rack: AgentRack, number: int, model: Model) -> str:
    """Submit a job; returns its id."""
    sizes = ",".join(map(str, model.elements()))
    words = f"python train.py grad {model.computes_s} {sizes} job{number}-"
    return submitted(rack.hosts[0], f"--workers {RANKS} --env COVEY_SHARED_TENSORS=0 -- {words}")


def told(rack: AgentRack) -> str:
    return "\n".join(rack.hosts[0].shell(words).stdout for words in ("agentctl jobs", "agentctl tensors"))


def served(rack: AgentRack) -> dict[str, str]:
    """The aggregator of each job."""
    said = rack.hosts[0].shell("agentctl tensors").stdout
    return dict(re.findall(r"^(j\d+) +(\S+)", said, re.MULTILINE))


def all_spent_s(rack: AgentRack) -> float:
    """Processor time of all summing processes, in seconds of a core."""
    return sum(spent_s(pid) for host in rack.hosts for pid in host.find("aggd"))


def rounds(rack: AgentRack, number: int) -> list[tuple[float, int]]:
    """Rounds of a job's first rank: when each began, and what was wrong."""
    for host in rack.hosts:
        file = host.folder / "root" / f"job{number}-0"
        if file.exists():
            each = [line.split() for line in file.read_text().splitlines()]
            return [(float(words[1]), int(words[3])) for words in each if len(words) == 4]
    raise SystemExit(f"job {number} wrote nothing\n{told(rack)}")


def losses_of(own: Measured, shared: Measured) -> tuple[list[float], list[float]]:
    """Loss of speed of each job: over all iterations, and over the worst hundred in a row."""
    losses, worst = [], []
    for alone, beside in zip(own.iterations_s, shared.iterations_s, strict=True):
        usual_s = statistics.fmean(alone)
        losses.append(1 - usual_s / statistics.fmean(beside))
        window = min(WINDOW, len(beside))
        means = [statistics.fmean(beside[at : at + window]) for at in range(len(beside) - window + 1)]
        worst.append(1 - usual_s / max(means))
    return losses, worst


if __name__ == "__main__":
    sys.exit(main())
