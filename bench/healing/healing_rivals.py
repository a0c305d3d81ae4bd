"""`make heal-rivals`: ranks of a DistributedDataParallel are killed, with Covey, torchelastic and TorchFT.

    .venv/bin/pip install --target DIR torchft==0.2.0 opentelemetry-sdk opentelemetry-exporter-otlp-proto-http --no-deps
    python bench/healing/healing_rivals.py [--torchft DIR] [--kills 8] [--steps 400]
        [--only covey,elastic] [--json FILE]

Four ranks on this machine, gloo, CPU; 32 samples each a step, which follow from step and rank, like the numbers that
dropout draws: so each system can reach the same bits. `kill -9` of any rank, eight times, each once all ranks have
done a step since the last.

covey: a job on one host, `covey.torch.attach(ddp, optimizer)`. elastic: `torchrun --max-restarts`, and a checkpoint of
each step (of a small model), so that nothing is computed twice. torchft: with at least 1 replica, as its documents do,
or with all 4, so that it waits for the lost one; a lighthouse that hears within 1 s which replica is gone (5 s if not
told), a quorum in each step before the forward pass, and a process that starts a lost replica at once. Gradients are
averaged by its `manager.allreduce`, all in one: the hook of its DistributedDataParallel (0.2.0) ends each process by
an AssertionError when another one is lost.

GAP: how much longer than the median step a step took in which one was killed, for ranks that were not killed, in ms.
RESTARTED: processes that ended and were not killed. LOST: samples of ranks that took no part in a step that counted,
of all. AGAIN: steps of a rank that were computed more than once. SAME BITS: parameters at the end, with kills and
without.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.live_command import json_option, keep, options, print_head, submitted  # noqa: E402

RANKS, BATCH, POINTS = 4, 32, 4096
PAUSE_S = 0.05
"""Seconds that each step pauses, besides what it computes."""
RIVALS = {"covey": "Covey", "elastic": "torchelastic", "torchft1": "TorchFT, at least 1", "torchft4": "TorchFT, all 4"}
HEARTBEAT_MS, TICK_MS = 1000, 20
"""Milliseconds between heartbeats and ticks of TorchFT's lighthouse; 5000 and 100 if not told."""
TIMEOUT_S = 1
"""Timeout of TorchFT's collectives in seconds; 60 if not told. A step has 0.06 s."""
END_S = 300.0


class Done(NamedTuple):
    """A step of a rank that counted."""

    at_s: float
    pid: int
    step: int
    ranks: int
    """Number of ranks that took part in the step, by this rank's account."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--torchft", metavar="DIR", default="", help="where TorchFT was installed; empty: left out")
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--only", default=",".join(RIVALS))
    parser.add_argument("--seed", type=int, default=1)
    json_option(parser)
    args = parser.parse_args(argv)
    print_head("with | kills | step, ms | GAP, median | GAP, worst | RESTARTED | LOST | AGAIN | SAME BITS")
    whole: dict[str, Any] = {}
    for name in args.only.split(","):
        if name.startswith("torchft") and not args.torchft:
            print(f"{RIVALS[name]}: left out; next: --torchft DIR, as above", file=sys.stderr)
            continue
        found = whole[name] = measure(name, args)
        print(f"| {RIVALS[name]} | {' | '.join(map(str, found['row']))} |", flush=True)
    keep(whole, args.json)
    return 0


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    with started(name, args) as run:
        killed = kill_some(run, args)
        run.wait()
        done = [run.steps(rank) for rank in range(RANKS)]
        with_kills = run.digests()
    with started(name, args) as run:
        run.wait()
        without = run.digests()
    step_s = statistics.median(after.at_s - one.at_s for each in done for one, after in pairwise(each))
    gaps = [1000 * (longest(done, at_s, rank) - step_s) for at_s, rank in killed]
    deaths = Counter(rank for _, rank in killed)
    restarted = sum(len({each.pid for each in of}) - 1 - deaths[rank] for rank, of in enumerate(done))
    took_part = Counter[int]()
    for each in (one for of in done for one in of):
        took_part[each.step] = max(took_part[each.step], each.ranks)
    lost = sum(RANKS - took_part[step] for step in range(args.steps))
    again = sum(len(of) - len({each.step for each in of}) for of in done)
    same = len(set(with_kills + without)) == 1
    lost_words = f"{lost * BATCH} of {args.steps * RANKS * BATCH}"
    words = [len(killed), f"{1000 * step_s:.0f}", f"{statistics.median(gaps):.0f}", f"{max(gaps):.0f}"]
    row = [*words, restarted, lost_words, again, "yes" if same else "no"]
    return {"row": row, "gaps_ms": gaps, "restarted": restarted, "lost": lost, "again": again, "same": same}


def longest(done: Sequence[Sequence[Done]], at_s: float, killed: int) -> float:
    """Seconds of the longest step of any other rank in which one was killed."""
    others = [of for rank, of in enumerate(done) if rank != killed]
    spans = [(one.at_s, after.at_s) for of in others for one, after in pairwise(of)]
    return max(after - before for before, after in spans if before <= at_s + 0.5 and after >= at_s)


class Run:
    """One training, as the program that started it knows it."""

    def __init__(self, logs: Callable[[int], Path], kill: Callable[[int], None], wait: Callable[[], object]) -> None:
        self._logs, self.kill, self.wait = logs, kill, wait

    def steps(self, rank: int) -> list[Done]:
        path = self._logs(rank)
        lines = path.read_text().splitlines() if path.exists() else []
        return [Done(*json.loads(line)) for line in lines if line.endswith("]")]

    def digests(self) -> list[str]:
        """Digest of the parameters at the end, for each rank."""
        return [self._logs(rank).with_suffix(".digest").read_text() for rank in range(RANKS)]


def kill_some(run: Run, args: argparse.Namespace) -> list[tuple[float, int]]:
    draws, killed, since_s = random.Random(args.seed), list[tuple[float, int]](), 0.0
    for number in range(args.kills):
        end_s = time.monotonic() + END_S
        while not all((of := run.steps(rank)) and of[-1].at_s > since_s + 0.2 for rank in range(RANKS)):
            if time.monotonic() > end_s:
                raise SystemExit(f"no step of all ranks after {number} kills")
            time.sleep(0.02)
        time.sleep(draws.uniform(0.2, 0.6))
        rank, since_s = draws.randrange(RANKS), time.monotonic()
        run.kill(rank)
        killed.append((since_s, rank))
        print(f"  kill {number + 1} of {args.kills}", file=sys.stderr, flush=True)
    return killed


@contextmanager
def started(name: str, args: argparse.Namespace) -> Iterator[Run]:
    if name == "covey":
        with of_covey(args) as run:
            yield run
        return
    folder = Path(tempfile.mkdtemp(prefix="covey-rivals-"))
    environ = {**os.environ, "PYTHONPATH": args.torchft, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    try:
        with (of_elastic if name == "elastic" else of_torchft)(folder, environ, name, args) as run:
            yield run
    finally:
        shutil.rmtree(folder)


@contextmanager
def of_covey(args: argparse.Namespace) -> Iterator[Run]:
    from bench.healing.healing_kills import rank_of
    from chaos.rack.agents import AgentRack
    from chaos.rack.hosts import Laboratory

    with Laboratory(1) as lab:
        rack = AgentRack(lab, gpus=RANKS, voters=1)
        rack.start()
        rack.wait_up()
        (host,) = rack.hosts
        words = f"{sys.executable} {Path(__file__).resolve()} --train covey {args.steps}"
        job = submitted(host, f"--workers {RANKS} -- {words}")

        def kill(rank: int) -> None:
            for pid in host.find("--train"):
                if rank_of(pid) == rank:
                    os.kill(pid, signal.SIGKILL)

        def wait() -> None:
            waited = host.shell(f"agentctl wait {job}", timeout_s=END_S)
            if waited.returncode:
                raise SystemExit(waited.stdout + waited.stderr + host.shell(f"agentctl logs {job} --rank 0").stdout)

        yield Run(lambda rank: host.folder / "root" / f"log{rank}", kill, wait)


@contextmanager
def of_elastic(folder: Path, environ: dict[str, str], name: str, args: argparse.Namespace) -> Iterator[Run]:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    words = ["--max-restarts", "1000", "--monitor-interval", "0.1", str(Path(__file__).resolve())]
    # workers of PyTorch 2.13 that start again would find in the agent's store where those before them listened
    environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*run, *words, "--train", name, str(args.steps)], cwd=folder, env=environ, stdout=log, stderr=log
        )
    found = Run(lambda rank: folder / f"log{rank}", lambda rank: kill_newest(found, rank), lambda: ended([process]))
    try:
        yield found
    finally:
        process.terminate()
        process.wait()


@contextmanager
def of_torchft(folder: Path, environ: dict[str, str], name: str, args: argparse.Namespace) -> Iterator[Run]:
    least, port = name.removeprefix("torchft"), 29_510
    environ["TORCHFT_LIGHTHOUSE"] = f"http://localhost:{port}"
    settings = ["--min_replicas", least, "--heartbeat_timeout_ms", str(HEARTBEAT_MS)]
    run = f"{args.torchft}/bin/torchft_lighthouse"
    words = ["--quorum_tick_ms", str(TICK_MS), "--bind", f"[::]:{port}"]
    processes: dict[int, subprocess.Popen[bytes]] = {}
    with (folder / "log").open("w") as log:
        lighthouse = subprocess.Popen([sys.executable, run, *settings, *words], env=environ, stdout=log, stderr=log)

        def start(rank: int) -> None:
            environ["REPLICA"] = str(rank)
            train = [sys.executable, str(Path(__file__).resolve()), "--train", name, str(args.steps)]
            processes[rank] = subprocess.Popen(train, cwd=folder, env=environ, stdout=log, stderr=log)

        def kill(rank: int) -> None:
            processes[rank].kill()
            processes[rank].wait()
            start(rank)

        def wait() -> None:
            """Wait for the end; a process that fails is started again, as a supervisor would."""
            end_s = time.monotonic() + END_S
            while any(each.poll() != 0 for each in processes.values()):
                if time.monotonic() > end_s:
                    raise SystemExit((folder / "log").read_text()[-4000:])
                for rank, each in list(processes.items()):
                    if each.poll() not in (None, 0):
                        start(rank)
                time.sleep(0.05)

        try:
            for rank in range(RANKS):
                start(rank)
            yield Run(lambda rank: folder / f"log{rank}", kill, wait)
        finally:
            for each in (*processes.values(), lighthouse):
                each.kill()
                each.wait()


def kill_newest(run: Run, rank: int) -> None:
    os.kill(run.steps(rank)[-1].pid, signal.SIGKILL)


def ended(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    for each in processes:
        if each.wait(END_S):
            raise SystemExit(f"it ended with {each.returncode}")


# ---- the script ----


class Training:
    """The parts of a training that are the same under each system."""

    def __init__(self, rank: int) -> None:
        import torch

        from examples.heal_ddp import spirals

        torch.set_num_threads(1)
        torch.manual_seed(1)
        self.torch, self.rank, self._data = torch, rank, spirals()
        linear, relu = torch.nn.Linear, torch.nn.ReLU
        self.network = torch.nn.Sequential(
            linear(2, 64), relu(), torch.nn.Dropout(0.1), linear(64, 64), relu(), linear(64, 1)
        )
        self._loss = torch.nn.BCEWithLogitsLoss()
        self._log = open(f"log{rank}", "a")  # noqa: SIM115

    def backward(self, ddp: Any, step: int) -> None:
        torch = self.torch
        each = POINTS // BATCH // RANKS
        order = torch.randperm(POINTS, generator=torch.Generator().manual_seed(step // each))
        first = (step % each * RANKS + self.rank) * BATCH
        points, side = self._data[order[first : first + BATCH]]
        torch.manual_seed(step * RANKS + self.rank)
        time.sleep(PAUSE_S)
        self._loss(ddp(points).squeeze(1), side).backward()

    def counted(self, step: int, ranks: int = RANKS) -> None:
        self._log.write(json.dumps([time.monotonic(), os.getpid(), step, ranks]) + "\n")
        self._log.flush()

    def over(self) -> None:
        learnt = self.torch.cat([each.detach().reshape(-1) for each in self.network.parameters()])
        Path(f"log{self.rank}.digest").write_text(hashlib.sha256(learnt.numpy().tobytes()).hexdigest())


def train_covey(steps: int) -> None:
    import torch

    import covey.torch

    covey.torch.init_process_group()
    training = Training(torch.distributed.get_rank())
    ddp = torch.nn.parallel.DistributedDataParallel(training.network)
    optimizer = torch.optim.Adam(ddp.parameters(), 0.01)
    state = covey.torch.attach(ddp, optimizer)
    for step in state.steps(steps):
        optimizer.zero_grad()
        training.backward(ddp, step)
        optimizer.step()
        training.counted(step)
    training.over()


def train_elastic(steps: int) -> None:
    import torch

    torch.distributed.init_process_group("gloo")
    training = Training(torch.distributed.get_rank())
    optimizer = torch.optim.Adam(training.network.parameters(), 0.01)
    kept, step = Path("kept"), 0
    if kept.exists():
        step, network, moments = torch.load(kept)
        training.network.load_state_dict(network)
        optimizer.load_state_dict(moments)
    ddp = torch.nn.parallel.DistributedDataParallel(training.network)
    for now in range(step, steps):
        optimizer.zero_grad()
        training.backward(ddp, now)
        optimizer.step()
        if training.rank == 0:
            torch.save((now + 1, training.network.state_dict(), optimizer.state_dict()), "new")
            Path("new").rename(kept)
        training.counted(now)
    training.over()
    torch.distributed.destroy_process_group()


def train_torchft(steps: int, least: int) -> None:
    from datetime import timedelta

    import torch
    from torchft import Manager, Optimizer, ProcessGroupGloo

    training = Training(int(os.environ["REPLICA"]))
    inner = torch.optim.Adam(training.network.parameters(), 0.01)

    def load(found: Any) -> None:
        training.network.load_state_dict(found["network"])
        inner.load_state_dict(found["optimizer"])

    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=TIMEOUT_S)),
        load_state_dict=load,
        state_dict=lambda: {"network": training.network.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=least,
        use_async_quorum=False,
        replica_id=f"replica_{training.rank}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        hostname="localhost",
        init_sync=False,
        timeout=timedelta(seconds=10),
    )
    optimizer = Optimizer(manager, inner)
    while manager.current_step() < steps:
        optimizer.zero_grad()
        step = manager.current_step()
        training.backward(training.network, step)
        gradients = [each.grad for each in training.network.parameters()]
        flat = torch.cat([each.reshape(-1) for each in gradients])
        manager.allreduce(flat).wait()
        for each, part in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
            each.copy_(part.reshape(each.shape))
        ranks = manager.num_participants()
        optimizer.step()
        if manager.current_step() > step:
            training.counted(step, ranks)
    training.over()
    manager.shutdown(wait=False)
    os._exit(0)


def train(name: str, steps: int) -> None:
    if name == "covey":
        train_covey(steps)
    elif name == "elastic":
        train_elastic(steps)
    else:
        train_torchft(steps, int(name.removeprefix("torchft")))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        sys.path.insert(0, str(ROOT / "examples"))
        train(sys.argv[2], int(sys.argv[3]))
    else:
        sys.exit(main())
