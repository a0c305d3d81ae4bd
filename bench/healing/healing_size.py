"""`make heal-size`: a rank whose state is that of GPT-2 small with Adam is killed: how long until its successor has
it.

    python bench/healing/healing_size.py [--state gpt2] [--kills 5] [--rate 10gbit] [--two] [--json FILE]

Four hosts (network namespaces, each with a link of that rate in both directions, tbf) with real agents, and a rank on
each of a script whose state has this size: 444 arrays of 1,493 MB (`gpt2`), or 20,000 arrays of 80 MB (`many`). It
pushes 1 MB a step. A rank is killed, any in turn (`--two`: with one of the others each time). LINK: what one TCP
connection between two of these hosts carries. START: from the kill until the successor asks. TRANSFER: from then until
`load` is called. LOADED: until the loop continues. GAP: how much longer the step took than the median one, by the
clock of ranks that lived through it. MEMORY: the successor's at most, over that of the rank before it. Seconds,
medians (worst). At the end all ranks hold the same bits, which are those of a run without kills. (Needs root,
iproute2, 16 GB of memory.)
"""

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.live_command import json_option, keep, options, print_head, spent_s, submitted  # noqa: E402

HOSTS = 4
PORT = 7999
PROBE_S = 2.0
BUFFER = 1 << 20
END_S = 600.0


def main(argv: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--state", choices=("gpt2", "many"), default="gpt2")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--rate", default="10gbit", help="of a host's link in each direction, as tc says it")
    parser.add_argument("--two", action="store_true", help="a second rank is killed with each")
    json_option(parser)
    return measure(parser.parse_args(argv))


def measure(args: argparse.Namespace) -> int:
    from bench.healing.healing_kills import told
    from chaos.rack.agents import AgentRack, wait
    from chaos.rack.hosts import Laboratory

    with Laboratory(HOSTS) as lab:
        hosts = list(lab.hosts.values())
        for host in hosts:
            shape = ("root", "tbf", "rate", args.rate, "burst", "2mb", "latency", "20ms")
            words = ["tc", "qdisc", "add", "dev", f"h{host.number}n0", *shape]
            subprocess.run([*lab.inside(), *words], check=True)
            host.run(["tc", "qdisc", "add", "dev", "eth0", *shape]).check_returncode()
        link = probe(hosts)
        rack = AgentRack(lab, gpus=1, voters=3)
        rack.start()
        rack.wait_up()
        job = submit(rack, args.state, 1_000_000)
        wait(lambda: all(len(steps(rack, at)) > 5 for at in range(HOSTS)), lambda: told(rack, job), 240.0)
        kills = []
        for number in range(args.kills):
            ranks = [number % HOSTS, (number + 2) % HOSTS][: 1 + args.two]
            kills.append(kill(rack, job, ranks, number + 1))
            print(f"  kill {number + 1} of {args.kills}: {kills[-1]}", file=sys.stderr, flush=True)
        stop = max(steps(rack, at)[-1][1] for at in range(HOSTS)) + 50
        with_kills = end(rack, job, stop)
        without = end(rack, submit(rack, args.state, stop), stop)
    same = len(set(with_kills + without)) == 1
    print_head("state | LINK, MB/s | START | TRANSFER | LOADED | GAP | MEMORY, MB | CPU of aggregators | the same bits")
    words = [row([each[what] for each in kills]) for what in ("start", "transfer", "loaded", "gap", "memory", "aggd")]
    print(f"| {args.state} | {link:.0f} | {' | '.join(words)} | {'yes' if same else 'NO'} |")
    keep({"kills": kills, "link_mb_s": link, "same": same}, args.json)
    return 0 if same else 1


def row(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({max(values):.2f})"


def probe(hosts: Sequence[Any]) -> float:
    """Speed of one connection from the second host to the first, in MB/s."""
    run = [sys.executable, str(Path(__file__).resolve())]
    takes = hosts[0].popen([*run, "--take"], log=hosts[0].folder / "probe")
    time.sleep(1.0)
    hosts[1].run([*run, "--give", hosts[0].address]).check_returncode()
    takes.wait(30.0)
    return float((hosts[0].folder / "probe").read_text())


def submit(rack: Any, state: str, stop: int) -> str:
    """Submit the job; returns its id."""
    for host in rack.hosts:
        for old in (host.folder / "root").glob("*[0-9]"):
            old.unlink()
        (host.folder / "root" / "stop").write_text(str(stop))
    words = f"{sys.executable} {Path(__file__).resolve()} --train {state}"
    return submitted(rack.hosts[0], f"--workers {HOSTS} -- {words}")


def lines(rack: Any, name: str) -> list[list[Any]]:
    found: list[list[Any]] = []
    for host in rack.hosts:
        file = host.folder / "root" / name
        found += (
            [json.loads(line) for line in file.read_text().splitlines() if line.endswith("]")] if file.exists() else []
        )
    return sorted(found)


def steps(rack: Any, rank: int) -> list[list[Any]]:
    """Steps of a rank: when each was done, which, and by which incarnation."""
    return lines(rack, f"steps{rank}")


def kill(rack: Any, job: str, ranks: Sequence[int], number: int) -> dict[str, float]:
    from bench.healing.healing_kills import rank_of, told
    from chaos.rack.agents import wait

    def known(rank: int) -> list[list[Any]]:
        return lines(rack, f"took{rank}")

    pids = {rank_of(pid): pid for host in rack.hosts for pid in host.find("--train") if rank_of(pid) is not None}
    aggds = [pid for host in rack.hosts for pid in host.find("aggd")]
    before = {rank: len(known(rank)) for rank in ranks}
    memory = {rank: peak(pids[rank]) for rank in ranks}
    spent = sum(map(spent_s, aggds))
    at_s = time.monotonic()
    for rank in ranks:
        os.kill(pids[rank], signal.SIGKILL)
    wait(lambda: all(len(known(rank)) > before[rank] for rank in ranks), lambda: told(rack, job), 120.0)
    asked_s, here_s, loop_s, pid_memory = map(max, zip(*(known(rank)[-1] for rank in ranks), strict=True))
    wait(lambda: all(len([each for each in steps(rack, at) if each[0] > loop_s]) > 3 for at in range(HOSTS)),
         lambda: told(rack, job), 120.0)  # fmt: skip
    lived = [rank for rank in range(HOSTS) if rank not in ranks]
    each = [steps(rack, rank) for rank in lived]
    took = [(after[0] - one[0], after[0]) for of in each for one, after in pairwise(of)]
    median_s = statistics.median(span for span, _ in took)
    gap_s = max(span for span, ended_s in took if ended_s > at_s) - median_s
    return {
        "start": asked_s - at_s,
        "transfer": here_s - asked_s,
        "loaded": loop_s - here_s,
        "gap": gap_s,
        "memory": pid_memory - min(memory.values()),
        "aggd": sum(map(spent_s, aggds)) - spent,
    }


def peak(pid: int) -> float:
    """Peak memory of a process so far, in MB."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("VmHWM:")[2].split()[0]) / 1000


def end(rack: Any, job: str, stop: int) -> list[str]:
    """End the job at step `stop`; returns the digest of what each rank holds."""
    from bench.healing.healing_kills import told

    for host in rack.hosts:
        (host.folder / "root" / "stop").write_text(str(stop))
    waited = rack.hosts[0].shell(f"agentctl wait {job}", timeout_s=END_S)
    if waited.returncode:
        raise SystemExit(waited.stdout + waited.stderr + told(rack, job))
    return [lines(rack, f"digest{rank}")[-1][0] for rank in range(HOSTS)]


# ---- on a host ----


def shapes(state: str) -> list[tuple[int, ...]]:
    """Shapes of the parameters."""
    if state == "many":
        return [(1000,)] * 6667
    block = [(768,), (768,), (768, 2304), (2304,), (768, 768), (768,), (768,), (768,), (768, 3072), (3072,)]
    return [(50257, 768), (1024, 768), *([*block, (3072, 768), (768,)] * 12), (768,), (768,)]


def train(state: str) -> None:
    """Train: each step changes a part of some arrays by what was pushed."""
    import hashlib

    import covey
    from covey.healing.healing import Healing

    draws = np.random.default_rng(1)
    arrays = {
        f"{kind} {at}": np.full(shape, at, np.float32)
        for kind in ("value", "first", "second")
        for at, shape in enumerate(shapes(state))
    }
    flat = [array.reshape(-1) for array in arrays.values()]
    times: list[float] = []
    recover = Healing.recover

    def timed(self: Healing, *args: Any, **kwargs: Any) -> Any:
        times.append(time.monotonic())
        found = recover(self, *args, **kwargs)
        times.append(time.monotonic())
        return found

    Healing.recover = timed  # type: ignore[method-assign]

    def load(given: dict[str, Any], own: Any) -> None:
        for name, array in arrays.items():
            if given[name] is not array:
                array[:] = given[name]
        draws.bit_generator.state = own or draws.bit_generator.state

    with covey.join() as job:
        log = open(f"steps{job.rank}", "a")  # noqa: SIM115
        held = job.state(lambda: arrays, load, own=lambda: draws.bit_generator.state)
        if times:
            times.append(time.monotonic())
            with open(f"took{job.rank}", "a") as took:
                took.write(json.dumps([*times, peak(os.getpid())]) + "\n")
        while held.step < int(Path("stop").read_text()):
            g = draws.standard_normal(1 << 18, np.float32)
            g = job.tensors.push_pull("g", g, mean=True)
            for at in range(held.step % 20, len(flat), 20):
                few = flat[at][: len(g)]
                few += g[: len(few)]
            held.done()
            log.write(json.dumps([time.monotonic(), held.step - 1, job.rank]) + "\n")
            log.flush()
        found = hashlib.blake2b()
        for array in flat:
            found.update(array.data)
        Path(f"digest{job.rank}").write_text(json.dumps([found.hexdigest()]) + "\n")


def take() -> None:
    with socket.create_server(("", PORT)) as server, server.accept()[0] as link:
        view, count, began_s = memoryview(bytearray(BUFFER)), 0, time.monotonic()
        while got := link.recv_into(view):
            count += got
        print(count / 1e6 / (time.monotonic() - began_s), flush=True)


def give(address: str) -> None:
    with socket.create_connection((address, PORT)) as link:
        end_s, data = time.monotonic() + PROBE_S, bytes(BUFFER)
        while time.monotonic() < end_s:
            link.sendall(data)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--train", kind]:
            os.environ["OMP_NUM_THREADS"] = "1"
            train(kind)
        case ["--take"]:
            take()
        case ["--give", address]:
            give(address)
        case _:
            sys.exit(main())
