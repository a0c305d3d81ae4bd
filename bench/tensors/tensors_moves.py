"""`make bench-tensors-moves`: how long training stops when all of a model's tensors move to other aggregators.

    python bench/tensors/tensors_moves.py [--models AlexNet,VGG19,AWD-LM,BERT] [--kinds grad,model]
        [--moves 10] [--json FILE]

Six hosts (network namespaces) with real agents; a job has one rank on each of two, and so two tables. The request of
`agentctl tensors --move` gives both to two hosts without ranks, then to the two others, and back, again and again
(AutoPS, table 4.3), while the script trains: it pushes all tensors, waits for all, and computes for a while, in which
it compares each element with what it must be. (The first move, from the ranks' own hosts, which they reach by a unix
socket, does not count: over TCP each round takes longer, wherever it is added.) *grad*: an aggregator keeps nothing
between two rounds. *model*: the new one needs the parameters. *adam*: and their moments; the ranks push gradients.
PAUSE: of the rounds from when a move is asked for until four after both tables were handed over, how much longer than
their median the longest one took, in ms: the median of all moves, and the worst. NOISE: this, of eight rounds after
asking for a move to the hosts that have the tables already, which is refused. BROUGHT: how long the owner before took
to bring a table to the next one, in ms, from when it sent ranks away: the median of all tables that moved; and how
many of these tables it brought whole. (Needs root and iproute2.)
"""

import json
import re
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.live_command import json_option, keep, options, print_head, submitted  # noqa: E402
from chaos.rack.agents import AgentRack, wait  # noqa: E402
from chaos.rack.hosts import Laboratory  # noqa: E402
from cli.client import AgentctlError  # noqa: E402

HOSTS, RANKS = 6, 2
AFTER, HANDED = 8, 4
"""Rounds that are judged where nothing moves, and after a table was handed over."""
FIRST = 4
"""Rounds that do not count, since all memory is new."""
ROUND_S, END_S = 120.0, 300.0


class Model(NamedTuple):
    """A model with sizes in MB: AutoPS table 4.2, Tiresias table 3.3; where the largest tensor is not printed all are
    equal."""

    tensors: int
    size_mb: int
    large: int
    largest_mb: float
    computes_s: float
    """Seconds of computing in an iteration; ours."""

    def elements(self) -> list[int]:
        """Elements of each tensor."""
        small = self.tensors - self.large
        rest = (self.size_mb - self.largest_mb - small * 0.004) / max(1, self.large - 1)
        return [int(mb * 250_000) for mb in (self.largest_mb, *[rest] * (self.large - 1), *[0.004] * small)]


MODELS = {
    "AlexNet": Model(17, 236, 7, 144, 0.6),
    "VGG19": Model(39, 548, 15, 392, 1.2),
    "AWD-LM": Model(14, 396, 14, 396 / 14, 0.9),
    "BERT": Model(393, 1278, 393, 1278 / 393, 2.5),
}
TRAIN = """
import sys, time
import numpy as np
import covey
from covey.tensors.numbers.update_steps import take_step

kind, computes_s, sizes = sys.argv[1], float(sys.argv[2]), [int(size) for size in sys.argv[3].split(",")]
with covey.join() as job, open(f"{sys.argv[4]}{job.rank}", "w") as log:
    names = [f"t{at}" for at in range(len(sizes))]
    given = [np.full(size, 1 + job.rank, np.float32) for size in sizes]  # and more in each round: an old sum is wrong
    held = [np.zeros(size, np.float32) for size in sizes]
    if kind != "grad":
        for name, array in zip(names, held):
            job.tensors.model(name, array, update=covey.Adam() if kind == "adam" else None)
    round, wanted, few = 0, 0, [np.zeros(16, np.float32) for _ in range(3)]
    while not job.stopping:
        began = time.monotonic()
        for handle in [job.tensors.push(*each[:2], out=each[2]) for each in zip(names, given, held)]:
            handle.wait()
        ended = time.monotonic()
        round += 1
        wanted = wanted + 3 * round if kind == "model" else 3 * round
        if kind == "adam":
            new = [np.full(16, wanted, np.float32), np.empty(16, np.float32), np.empty(16, np.float32)]
            take_step(covey.Adam(), round, covey.Adam().rate, few, new)
            few, wanted = new, new[0][0]
        wrong = sum(int(np.count_nonzero(array != wanted)) for array in held)
        for array in given:
            array.fill((round + 1) * (1 + job.rank))
        print(round, began, ended, wrong, file=log, flush=True)
        time.sleep(max(0.0, ended + computes_s - time.monotonic()))
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--kinds", default="grad,model")
    parser.add_argument("--moves", type=int, default=10)
    json_option(parser)
    args = parser.parse_args(argv)
    print_head(
        "model | MB | kind | moves | a round, ms | PAUSE, median | worst | NOISE, median | "
        "BROUGHT | tables | wrong elements"
    )
    whole: dict[str, Any] = {}
    for name in args.models.split(","):
        for kind in args.kinds.split(","):
            found = whole[f"{name} {kind}"] = measure(MODELS[name], kind, args.moves)
            pauses = [1000 * pause for pause in found["pauses_s"]]
            noise = statistics.median(1000 * pause for pause in found["noise_s"])
            words = f"{name} | {MODELS[name].size_mb} | {kind} | {len(pauses)} | {1000 * found['round_s']:.0f}"
            took = [1000 * each for each in found["brought_s"]]
            brought = f"{statistics.median(took):.0f} | {len(took)}" if took else "- | 0"
            said = f"{statistics.median(pauses):.0f} | {max(pauses):.0f} | {noise:.0f} | {brought} | {found['wrong']}"
            print(f"| {words} | {said} |", flush=True)
    keep(whole, args.json)
    return 1 if any(found["wrong"] for found in whole.values()) else 0


class Round(NamedTuple):
    began_s: float
    ended_s: float
    wrong: int

    @property
    def took_s(self) -> float:
        return self.ended_s - self.began_s


def measure(model: Model, kind: str, moves: int) -> dict[str, Any]:
    with Laboratory(HOSTS) as lab:
        rack = AgentRack(lab, gpus=1, voters=1, more_toml='[aggregator]\ndirect = "never"\n')
        rack.start()
        rack.wait_up()
        for host in rack.hosts:
            (host.folder / "root" / "train.py").write_text(TRAIN)
        sizes = ",".join(map(str, model.elements()))
        words = f"--workers {RANKS} -- python train.py {kind} {model.computes_s} {sizes} rounds"
        job = submitted(rack.hosts[0], words)
        lines = wait(lambda: files(rack), lambda: told(rack, job), 60.0)
        wait(lambda: len(rounds(lines)) >= FIRST + AFTER, lambda: told(rack, job), 20 * ROUND_S)
        homes = places(rack, job)
        move(rack, job, lines, homes, 0)
        moved = [move(rack, job, lines, homes, number + 1) for number in range(moves)]
        rack.hosts[0].shell(f"agentctl cancel {job}")
        rack.hosts[0].shell(f"agentctl wait {job}", timeout_s=END_S)
        return {**pauses_of(rounds(lines), moved), "brought_s": brought(rack)}


def files(rack: AgentRack) -> list[Path]:
    """Files that the ranks write, once all do."""
    there = [path for host in rack.hosts for path in (host.folder / "root").glob("rounds*")]
    return there if len(there) == RANKS else []


def rounds(lines: Sequence[Path]) -> list[Round]:
    """Rounds of rank 0, with what was wrong at any rank."""
    each = [[line.split() for line in path.read_text().splitlines()] for path in sorted(lines, key=lambda it: it.name)]
    wrong: dict[str, int] = {}
    for words in (words for rank in each for words in rank if len(words) == 4):
        wrong[words[0]] = wrong.get(words[0], 0) + int(words[3])
    return [Round(float(words[1]), float(words[2]), wrong[words[0]]) for words in each[0] if len(words) == 4]


def brought(rack: AgentRack) -> list[float]:
    """Seconds that each owner took to bring what it had to the next one, for those that brought all of it."""
    found = []
    for log in (path for host in rack.hosts for path in host.folder.rglob("aggd.log")):
        for line in log.read_text(errors="replace").splitlines():
            said = json.loads(line) if line.startswith("{") and "state brought" in line else {}
            if said.get("whole") and said["copied"] and not said["refused"]:
                found.append(float(said["took_s"]))
    return found


def told(rack: AgentRack, job: str) -> str:
    first = rack.hosts[0]
    commands = (f"agentctl job {job}", "agentctl tensors", f"agentctl logs {job} --rank 0", f"agentctl why {job}")
    return "\n".join(first.shell(words).stdout for words in commands)


def owners(rack: AgentRack, job: str) -> dict[str, str]:
    """The owner of each table, by its name."""

    def all_there() -> dict[str, str]:
        said = rack.hosts[0].shell("agentctl tensors").stdout
        each = re.findall(rf"^({job}(?:/\d+)?) +(\S+) +\d", said, re.MULTILINE)  # not "was refused"
        return dict(each) if len(each) == RANKS else {}

    found: dict[str, str] = wait(all_there, lambda: told(rack, job), 30.0)
    return found


def places(rack: AgentRack, job: str) -> dict[str, tuple[str, str]]:
    """For each table, the two hosts between which it moves: none of them has a rank."""
    here = owners(rack, job)
    others = [host.name for host in rack.hosts if host.name not in here.values()]
    return {table: (others.pop(), others.pop()) for table in here}


class Window(NamedTuple):
    """Rounds that are judged: those that end after `began_s`, until a number of them have ended after `least_s`."""

    began_s: float
    least_s: float
    rounds: int

    def of(self, all_rounds: Sequence[Round]) -> list[Round]:
        late = [one.ended_s for one in all_rounds if one.ended_s > self.least_s][: self.rounds]
        return [one for one in all_rounds if self.began_s < one.ended_s <= late[-1]] if late else []

    def is_whole(self, all_rounds: Sequence[Round]) -> bool:
        return sum(1 for one in all_rounds if one.ended_s > self.least_s) >= self.rounds


def move(
    rack: AgentRack, job: str, lines: Sequence[Path], homes: dict[str, tuple[str, str]], number: int
) -> tuple[Window, Window]:
    """Move all tables, there and back in turn; then ask once more, which is refused."""
    to = {table: home[number % 2] for table, home in homes.items()}
    windows = []
    for least in (HANDED, AFTER):
        before, began_s = handed_over(rack), time.monotonic()
        ask(rack, to, refused=least == AFTER)
        if least == HANDED:
            wait(lambda most=before + len(to): handed_over(rack) >= most, lambda: told(rack, job), AFTER * ROUND_S)
        window = Window(began_s, time.monotonic(), least)
        wait(lambda of=window: of.is_whole(rounds(lines)), lambda: told(rack, job), AFTER * ROUND_S)
        windows.append(window)
        if owners(rack, job) != to:
            raise SystemExit("the tables did not move\n" + told(rack, job))
    print(f"  move {number + 1}", file=sys.stderr, flush=True)
    return windows[0], windows[1]


def ask(rack: AgentRack, to: dict[str, str], refused: bool) -> None:
    """Ask for the moves by the API: a command takes a round's time of a processor."""
    agent = rack.agent(rack.hosts[0])
    rows = {row["job"]: row for row in agent.get("tensors").data}
    for table, host in to.items():
        body = {"job": table, "epoch": rows[table]["epoch"], "from": rows[table]["host"], "to": host}
        try:
            agent.post("tensors", "move", body=body)
        except AgentctlError as error:
            if not refused:
                raise SystemExit(str(error)) from error


def handed_over(rack: AgentRack) -> int:
    """Number of tables that were handed over so far."""
    logs = [path for host in rack.hosts for path in host.folder.rglob("aggd.log")]
    return sum(path.read_text(errors="replace").count("job handed over") for path in logs)


def pauses_of(all_rounds: Sequence[Round], moved: Sequence[tuple[Window, Window]]) -> dict[str, Any]:
    """The median round, and by how much the longest of those after each move, and after no move, was longer."""

    def longest(window: Window) -> float:
        these = [one.took_s for one in window.of(all_rounds)]
        return max(these) - statistics.median(these)

    pauses, noise = ([longest(each[at]) for each in moved] for at in (0, 1))
    took = [one.took_s for one in all_rounds]
    usual_s = statistics.median(one.took_s for each in moved for one in each[1].of(all_rounds))
    wrong = sum(one.wrong for one in all_rounds)
    return {"round_s": usual_s, "pauses_s": pauses, "noise_s": noise, "wrong": wrong, "took_s": took}


if __name__ == "__main__":
    sys.exit(main())
