"""`make bench-tensors-hosts`: rounds of tensors between hosts, through aggregators, by ranks alone, and with gloo.

    python bench/tensors/tensors_hosts.py [--hosts 4] [--ranks 1,2] [--rate 1gbit] [--cases DDP,JAX 1 MB] [--json FILE]

Hosts are network namespaces on this machine, each with a link of that rate in both directions (tbf), an aggregator and
`--ranks` ranks. *One owner*: all tensors at the aggregator of the first host. *Owners*: in Blocks at all of them, as a
job on several hosts has them (`covey.tensors.numbers.blocks`), each rank pushing its own; to the owner of its own host
by its unix socket. *Together*: like *owners*, after the ranks of a host have added theirs in memory that they share
(`covey.tensors.aggregator.host_rounds`). With one rank a host there is nothing to add; with several, one owner is left
out. *Direct*: the first rank of each host owns its host's table (`covey.tensors.direct`), and no aggregator is needed;
ranks of a host add together first. That is what jobs do. In each window the same ranks do a block of rounds through
each, and again in the other order. ms: median round of rank 0, and in times of gloo's. CPU: processor time of a round,
all ranks and aggregators together, ms. With `JAX` before a size: averages of a JAX array. (Needs root, iproute2 and
PyTorch; JAX where it is asked for.)
"""

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.live_command import json_option, keep, options, print_head, spent_s  # noqa: E402
from bench.tensors.tensors_live import CASES, ddp, row, sums  # noqa: E402
from covey.core.ids import HostId, JobId  # noqa: E402
from covey.tensors.numbers.blocks import table_id, tables_of  # noqa: E402
from covey.tensors.same_host import layout as tensor_layout  # noqa: E402
from covey.wire.job import AggregatorAt  # noqa: E402

GRANT = 1 << 32
SECRET, NEAR = b"sixteen bytes !!", "near.sock"
ONE, OWNERS, TOGETHER, DIRECT, GLOO = "one owner", "owners", "together", "direct", "gloo"
START_S, ROUND_S = 60.0, 600.0
WARM = 2


def main(argv: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--ranks", default="1,2", help="of a host; a table for each")
    parser.add_argument(
        "--rate", default="1gbit", help="of a host's link in each direction, as tc says it; empty: none"
    )
    parser.add_argument("--rounds", type=int, default=4, help="of each block; a block is one door in one window")
    parser.add_argument("--cases", default="4 KB,1 MB,25 MB,25 MB in 100,DDP")
    json_option(parser)
    args = parser.parse_args(argv)
    whole: dict[str, Any] = {}
    for ranks in map(int, args.ranks.split(",")):
        titles = [f"{door}, {what}" for what in ("ms", "CPU ms") for door in doors(ranks)]
        print_head(" | ".join(("hosts", "ranks of each", "tensors", *titles)))
        for case in args.cases.split(","):
            found = whole[f"{ranks} {case}"] = measure(args.hosts, ranks, args.rate, case, args.rounds)
            print(f"| {args.hosts} | {ranks} | {case} | {row(found, doors(ranks), 1)} |", flush=True)
    keep(whole, args.json)
    return 0


def doors(ranks: int) -> tuple[str, ...]:
    """Ways to push that are compared, by how many ranks a host has."""
    return (ONE, OWNERS, DIRECT, GLOO) if ranks == 1 else (OWNERS, TOGETHER, DIRECT, GLOO)


def measure(hosts: int, here: int, rate: str, case: str, rounds: int) -> dict[str, Any]:
    """Measure with `here` ranks on each host. By door: the median round of rank 0, and processor time of a round."""
    from chaos.rack.hosts import Laboratory

    with Laboratory(hosts) as lab:
        each = list(lab.hosts.values())
        shared = lab.folder
        for host in each:
            if rate:
                shape = ("root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
                port = ["tc", "qdisc", "add", "dev", f"h{host.number}n0", *shape]
                subprocess.run([*lab.inside(), *port], check=True)
                host.run(["tc", "qdisc", "add", "dev", "eth0", *shape]).check_returncode()
        run = [sys.executable, str(Path(__file__).resolve())]
        for at, host in enumerate(each):
            words = [*run, "--aggd", str(at), str(hosts), str(here), host.address, str(shared)]
            host.popen(words, log=shared / f"aggd{at}.log")
        _until(lambda: all((shared / f"aggd{at}").exists() for at in range(hosts)), shared)
        ranks = [
            host.popen(
                [*run, "--rank", str(rank), str(hosts), str(here), case, str(rounds), str(shared)],
                log=shared / f"rank{rank}.log",
                GLOO_SOCKET_IFNAME="eth0",
                OMP_NUM_THREADS="1",
            )
            for at, host in enumerate(each)
            for rank in range(at * here, (at + 1) * here)
        ]
        for rank in ranks:
            if rank.wait(ROUND_S):
                raise SystemExit(_logs(shared))
        said = [json.loads((shared / f"found{at}").read_text(encoding="utf-8")) for at in range(hosts * here)]
    found: dict[str, Any] = {}
    for door in doors(here):
        all_ms = said[0][door]["ms"]
        cpu_s = sum(one[door]["cpu_s"] for one in said)
        found[door] = {"ms": statistics.median(all_ms), "cpu_ms": 1000 * cpu_s / len(all_ms), "all_ms": all_ms}
    return found


def _until(there: Callable[[], bool], shared: Path) -> None:
    end_s = time.monotonic() + START_S
    while not there():
        if time.monotonic() > end_s:
            raise SystemExit(_logs(shared))
        time.sleep(0.05)


def _logs(shared: Path) -> str:
    return "\n".join(
        f"{path.name}: {path.read_text(errors='replace')[-2000:]}" for path in sorted(shared.glob("*.log"))
    )


# ---- on a host ----


def aggd_main(at: int, hosts: int, here: int, address: str, shared: Path) -> None:
    """Run an aggregator, and the program that gives its host's ranks their memory, until the host ends."""
    import uvloop

    from covey.wire.sums import Serve
    from tests.plugins.aggregator.loopback import AggdThread

    class LikeAgents(AggdThread):
        new_loop = staticmethod(uvloop.new_event_loop)

    folder = shared / f"run{at}"
    folder.mkdir()
    running = LikeAgents(folder, bind=f"{address}:0", memory_bytes_max=4 << 30, near=NEAR)
    memory, directs = tensor_layout.make(here, at * here), tensor_layout.make(here, at * here)
    for job in (OWNERS, TOGETHER):
        running.order(Serve(table_id(JobId(job), at), GRANT + 1, hosts * here, SECRET))
    if at == 0:
        running.order(Serve(JobId("one"), GRANT + 1, hosts * here, SECRET))
    said = shared / f"aggd{at}.new"
    said.write_text(f"{running.now().address} {os.getpid()} {memory} {directs} {address}", encoding="utf-8")
    said.rename(shared / f"aggd{at}")
    threading.Event().wait()


def rank_main(rank: int, hosts: int, here: int, case: str, rounds: int, shared: Path) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    ranks, all_doors = hosts * here, doors(here)
    dist.init_process_group("gloo", init_method=f"file://{shared}/store", rank=rank, world_size=ranks)
    owners = [(shared / f"aggd{at}").read_text(encoding="utf-8").split() for at in range(hosts)]
    _, aggd, memory, directs, ip = owners[rank // here]
    addresses = [address for address, *_ in owners]
    near = {rank // here: f"{shared}/run{rank // here}/{NEAR}"}
    clients = {door: _client(door, rank, ranks, addresses, near, f"/proc/{aggd}/fd/{memory}") for door in all_doors[:2]}
    clients[DIRECT] = _direct(rank, here, hosts, ip, shared, f"/proc/{aggd}/fd/{directs}" if here > 1 else "")
    aggd_s = partial(spent_s, int(aggd)) if rank % here == 0 else lambda: 0.0
    play: Mapping[str, Callable[[], object]]
    if case.startswith("JAX "):
        play = jax_means(torch, clients, ranks, case.removeprefix("JAX "))
    else:
        play = ddp(torch, clients, ranks, case) if case == "DDP" else sums(torch, clients, case)
    found: dict[str, dict[str, Any]] = {door: {"ms": [], "cpu_s": 0.0} for door in all_doors}
    for door in all_doors:
        for _ in range(WARM):
            play[door]()
    for door in (*all_doors, *reversed(all_doors)):
        dist.barrier()
        began_cpu_s = time.process_time() + aggd_s()
        for _ in range(rounds):
            began_s = time.perf_counter()
            play[door]()
            found[door]["ms"].append(1000 * (time.perf_counter() - began_s))
        dist.barrier()
        found[door]["cpu_s"] += time.process_time() + aggd_s() - began_cpu_s
    for client in clients.values():
        client.leave()
        client.close()
    (shared / f"found{rank}").write_text(json.dumps(found), encoding="utf-8")


def jax_means(torch: Any, clients: Mapping[str, Any], ranks: int, case: str) -> dict[str, Callable[[], object]]:
    """`covey.jax.pmean` of one array, and the same through gloo, by dlpack to PyTorch and back."""
    from types import SimpleNamespace

    import jax
    import torch.distributed as dist

    import covey.jax

    ready: Any = jax.block_until_ready
    from_torch: Any = jax.dlpack.from_dlpack
    numpy: Any = jax.numpy
    array = numpy.ones(CASES[case][1] // 4, jax.numpy.float32)
    ready(array)

    def ours(client: Any) -> Callable[[], object]:
        job: Any = SimpleNamespace(tensors=client, world_size=ranks)
        return lambda: ready(covey.jax.pmean(array, job=job))

    def gloo() -> object:
        mine = torch.from_dlpack(array).clone()
        dist.all_reduce(mine)
        return ready(from_torch(mine.div_(ranks)))

    return {**{door: ours(client) for door, client in clients.items()}, GLOO: gloo}


def _client(door: str, rank: int, ranks: int, owners: Sequence[str], near: Mapping[int, str], memory: str) -> Any:
    """A client of that door. `near`: by table, the unix socket of its owner, where that is on this host."""
    from covey.job.tensors import TensorClient
    from covey.tensors.same_host.memory import TensorMemory

    job, owners = JobId("one" if door == ONE else door), owners[:1] if door == ONE else owners
    tables = tables_of(len(owners))
    client = TensorClient(job, rank, ranks, lambda epoch, why, table: None, tables=tables, undecided=door == TOGETHER)
    if door == TOGETHER:
        client.memory_is(TensorMemory(os.open(memory, os.O_RDWR), rank, ranks))
    for table, address in enumerate(owners):
        client.moved(
            AggregatorAt(job, GRANT + 1, HostId(f"h{table}"), address, SECRET, table, near=near.get(table, ""))
        )
    return client


def _direct(rank: int, here: int, hosts: int, ip: str, shared: Path, memory: str) -> Any:
    """A client of ranks that own the tables. `memory`: what the ranks of this host share; empty: nothing."""
    import torch.distributed as dist

    from covey.job.tensors import TensorClient
    from covey.tensors.same_host.memory import TensorMemory
    from covey.wire.sums import Serve

    job, ranks = JobId(DIRECT), hosts * here
    client = TensorClient(job, rank, ranks, lambda epoch, why, table: None, tables=hosts, undecided=bool(memory))
    if memory:
        client.memory_is(TensorMemory(os.open(memory, os.O_RDWR), rank, ranks))
    at = rank // here
    if rank % here == 0:
        now = client.owner.perform(Serve(table_id(job, at), GRANT + 1, ranks, SECRET), ip, 4 << 30)
        (shared / f"direct{at}").write_text(json.dumps([now.address, now.near]), encoding="utf-8")
    dist.barrier()
    for table in range(hosts):
        address, near = json.loads((shared / f"direct{table}").read_text(encoding="utf-8"))
        near = near if table == at else ""
        client.moved(AggregatorAt(job, GRANT + 1, HostId(f"h{table}"), address, SECRET, table, near=near))
    return client


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank, hosts, here = map(int, sys.argv[2:5])
        rank_main(rank, hosts, here, sys.argv[5], int(sys.argv[6]), Path(sys.argv[7]))
    elif sys.argv[1:2] == ["--aggd"]:
        at, hosts, here = map(int, sys.argv[2:5])
        aggd_main(at, hosts, here, sys.argv[5], Path(sys.argv[6]))
    else:
        sys.exit(main())
