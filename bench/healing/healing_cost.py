"""`make heal-cost`: what it costs a step, when nothing fails, that any rank of the job may be lost.

    python bench/healing/healing_cost.py [--kinds numpy,ddp] [--ranks 2,4] [--ms 5,10,30,150]
        [--work idle,busy] [--seconds 10]

Processes of this machine are the ranks of two jobs at once, with a connection each to one real aggregator, as between
hosts: the same script attached (`job.state`, `covey.torch.attach(ddp, optimizer)`) and not
(`covey.torch.attach(ddp)`), by turns of a few steps, ABBA, with a pause before each in which no rank computes. Both
push the same to the same aggregator; the attached one draws random numbers in each step, which are its rank's own. A
step computes for `--ms` milliseconds: `busy` on the processor, a fixed amount of work that takes this time when
nothing else runs; `idle` sleeps, as a script that waits for its device does. MORE: how much longer a step of rank 0
takes attached than not, the median over all ABBA, in ms and in % of the median step not attached; after +- the error
of that median, by the quarters. CPU: how much more processor time a step takes, of a rank and of the aggregator, in
ms, the median too.

    numpy   a generator's state is a rank's own, two sums of 40 KB and 40 bytes, momentum
    ddp     PyTorch: twelve layers with dropout, 26 tensors of 0.4 MB, Adam; needs PyTorch

With more ranks than cores, all wait for whatever any process does.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.live_command import json_option, keep, options, print_head  # noqa: E402

JOBS = ("plain", "healed")
EPOCH, SECRET = (1 << 32) + 1, b"sixteen bytes !!"
BLOCK_S = 0.06
"""Seconds of a turn, roughly; the machine does something else a second later."""
CALIBRATED = 20
PAUSE_S = 0.002
"""Seconds of pause before and after a turn: what ranks and the aggregator still do for the one before is over then."""
SIDE = 96
"""Side of the matrices that are multiplied as work."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--kinds", default="numpy,ddp")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--ms", default="5,10,30,150", help="that a step computes")
    parser.add_argument("--work", default="idle,busy")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each row, at least")
    json_option(parser)
    args = parser.parse_args(argv)
    print_head("script | ranks | work | ms | step, ms | MORE, ms | MORE, % | CPU of a rank | CPU of the aggregator")
    whole: dict[str, Any] = {}
    for kind in args.kinds.split(","):
        for ranks in map(int, args.ranks.split(",")):
            for work in args.work.split(","):
                for ms in map(float, args.ms.split(",")):
                    found = measure(kind, ranks, work, ms, args.seconds)
                    whole[f"{kind}, {ranks} ranks, {work}, {ms:g} ms"] = found
                    print(f"| {kind} | {ranks} | {work} | {ms:g} | {row(found)} |", flush=True)
    keep(whole, args.json)
    return 0


def row(found: dict[str, Any]) -> str:
    plain = statistics.median(found["plain"]["ms"])
    more, error = median_of(found, "ms")
    rank, aggregator = (median_of(found, what)[0] for what in ("cpu_ms", "aggregator_ms"))
    cpu = statistics.median(found["plain"]["cpu_ms"])
    return (
        f"{plain:.2f} | {more:+.3f} | {100 * more / plain:+.2f} +- {100 * error / plain:.2f} | "
        f"{rank:+.3f} of {cpu:.2f} | {aggregator:+.3f}"
    )


def median_of(found: dict[str, Any], what: str) -> tuple[float, float]:
    """How much more the attached job needs, the median over all ABBA, and the error of that."""
    plain, healed = (found[job][what] for job in JOBS)
    more = [sum(healed[at : at + 2]) / 2 - sum(plain[at : at + 2]) / 2 for at in range(0, len(plain), 2)]
    low, middle, high = statistics.quantiles(more, n=4)
    return middle, 0.93 * (high - low) / len(more) ** 0.5


def measure(kind: str, ranks: int, work: str, ms: float, seconds: float) -> dict[str, Any]:
    import uvloop

    from tests.plugins.aggregator.loopback import AggdThread

    class LikeAgents(AggdThread):
        new_loop = staticmethod(uvloop.new_event_loop)

    per_ms = calibrated() if work == "busy" else 0.0
    with tempfile.TemporaryDirectory(prefix="covey-bench-") as folder:
        aggd = LikeAgents(Path(folder))
        for job in JOBS:
            address = aggd.serve(job, EPOCH, ranks).address
        words = [kind, str(ranks), str(ms), str(per_ms), str(seconds), address]
        command = [sys.executable, str(Path(__file__).resolve()), "--rank"]
        one = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen([*command, str(rank), *words], stdout=subprocess.PIPE, text=True, env=os.environ | one)
            for rank in range(ranks)
        ]
        said = [process.communicate()[0] for process in processes]
        aggd.finish()
        if any(process.returncode for process in processes):
            raise SystemExit(f"{kind}, {ranks} ranks: a rank failed")
    each = [json.loads(text) for text in said]
    found = {}
    for job in JOBS:
        found[job] = each[0][job]
        found[job]["cpu_ms"] = [statistics.mean(of) for of in zip(*(one[job]["cpu_ms"] for one in each), strict=True)]
    return found


def calibrated() -> float:
    """Number of products that fit into a millisecond when nothing else runs."""
    multiply(CALIBRATED)
    took_s = []
    for _ in range(200):
        began_s = time.perf_counter()
        multiply(CALIBRATED)
        took_s.append(time.perf_counter() - began_s)
    return CALIBRATED / (1000 * min(took_s))


def multiply(count: int) -> None:
    import numpy as np

    a, b, into = (np.full((SIDE, SIDE), 0.5, np.float32) for _ in range(3))
    for _ in range(count):
        np.matmul(a, b, out=into)


# ---- in a rank ----


class Played:
    """The part of a job that a script uses, with a client made by hand."""

    def __init__(self, job: str, rank: int, ranks: int, address: str) -> None:
        from covey.core.ids import HostId, JobId
        from covey.job.tensors import TensorClient
        from covey.wire.job import AggregatorAt

        self.rank, self.world_size = rank, ranks
        self.tensors = TensorClient(JobId(job), rank, ranks, lambda epoch, why, table: None)
        self.tensors.moved(AggregatorAt(JobId(job), EPOCH, HostId("h1"), address, SECRET))

    def state(self, get: Any, load: Any, *, own: Any, step: int = 0) -> Any:
        from covey.healing.neighbours import HealedRank
        from covey.job.job_state import ScriptState, begun

        me = HealedRank(self.rank, self.tensors.world_size, step=step)
        return begun(self.tensors, me, ScriptState(get, load, own))


Step = Callable[[], None]
Work = Callable[[float], None]


def work_of(ms: float, per_ms: float) -> Work:
    """A function that computes a part of the step."""
    return lambda part: multiply(round(part * ms * per_ms)) if per_ms else time.sleep(part * ms / 1000)


def numpy_script(job: Any, heals: bool, work: Work) -> Step:
    import numpy as np

    draws = np.random.default_rng(job.rank)
    arrays = {"w": np.zeros(10_000, np.float32), "b": np.zeros(10, np.float32)}
    moments = {f"m {name}": np.zeros_like(array) for name, array in arrays.items()}
    state = None
    if heals:
        state = job.state(lambda: arrays | moments, lambda arrays, own: None, own=lambda: draws.bit_generator.state)

    def step() -> None:
        noise = draws.standard_normal(10_000, np.float32)
        if state is not None:
            state.drawn()
        work(1.0)
        mine = {"w": arrays["w"] + noise, "b": arrays["b"] + noise[:10]}
        handles = {name: job.tensors.push(name, g, out=g, mean=True) for name, g in mine.items()}
        for name, handle in handles.items():
            m = moments[f"m {name}"]
            m *= np.float32(0.9)
            m += handle.wait()
            arrays[name] -= np.float32(0.01) * m
        if state is not None:
            state.done()

    return step


def ddp_script(job: Any, heals: bool, work: Work) -> Step:
    import torch

    import covey.torch

    class Works(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: Any) -> Any:
            work(1 / 3)
            return x.view_as(x)

        @staticmethod
        def backward(_: Any, gradient: Any) -> Any:
            work(2 / 3)
            return gradient

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(32, 96)
            layers = [torch.nn.Linear(96, 96) for _ in range(11)]
            self.rest = torch.nn.Sequential(
                *(each for layer in layers for each in (layer, torch.nn.ReLU(), torch.nn.Dropout(0.1))),
                torch.nn.Linear(96, 1),
            )

        def forward(self, x: Any) -> Any:
            return self.rest(Works.apply(self.first(x)))

    torch.manual_seed(1)
    ddp = torch.nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.Adam(ddp.parameters(), 0.001)
    inputs = torch.randn(16, 32)
    if heals:
        covey.torch.attach(ddp, optimizer, job)
    else:
        covey.torch.attach(ddp, job)

    def step() -> None:
        optimizer.zero_grad()
        ddp(inputs).square().mean().backward()
        optimizer.step()

    return step


def rank_main(rank: int, kind: str, ranks: int, ms: float, per_ms: float, seconds: float, address: str) -> None:
    jobs = {job: Played(job, rank, ranks, address) for job in JOBS}
    if kind == "ddp":
        import torch

        import covey.torch

        torch.set_num_threads(1)
        torch.set_flush_denormal(True)
        covey.torch.init_process_group(jobs["healed"])  # type: ignore[arg-type]
    script = {"numpy": numpy_script, "ddp": ddp_script}[kind]
    steps = {job: script(jobs[job], job == "healed", work_of(ms, per_ms)) for job in JOBS}
    found: dict[str, dict[str, list[float]]] = {job: {"ms": [], "cpu_ms": [], "aggregator_ms": []} for job in JOBS}
    for job in JOBS:
        for _ in range(30):
            steps[job]()
    count = max(2, round(1000 * BLOCK_S / (ms + 2)))
    for _ in range(max(20, round(seconds / (4 * count * (ms + 2) / 1000)))):
        for job in (*JOBS, *reversed(JOBS)):
            block(jobs["plain"].tensors.barrier, steps[job], count, found[job])
    for job in jobs.values():
        job.tensors.leave()
    print(json.dumps(found), flush=True)
    for job in jobs.values():
        job.tensors.close()


def block(barrier: Step, step: Step, count: int, found: dict[str, list[float]]) -> None:
    """Do the steps of a turn, and note what one took."""
    barrier()
    time.sleep(PAUSE_S)
    aggregator_s, cpu_s, began_s = aggregators_s(), time.process_time(), time.perf_counter()
    for _ in range(count):
        step()
    found["ms"].append(1000 * (time.perf_counter() - began_s) / count)
    found["cpu_ms"].append(1000 * (time.process_time() - cpu_s) / count)
    time.sleep(PAUSE_S)
    found["aggregator_ms"].append(1000 * (aggregators_s() - aggregator_s) / count)


def aggregators_s() -> float:
    """Seconds of processor time of the process that started this one, in which the aggregator is."""
    return (
        sum(int(each.read_text().split()[0]) for each in Path(f"/proc/{os.getppid()}/task").glob("*/schedstat")) / 1e9
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        kind, *numbers, address = sys.argv[3:]
        rank_main(int(sys.argv[2]), kind, int(numbers[0]), *map(float, numbers[1:]), address)
    else:
        sys.exit(main())
