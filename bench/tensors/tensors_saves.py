"""`make bench-tensors-saves`: what a step of Adam costs more when its model is saved, side by side in one process.

    python bench/tensors/tensors_saves.py [--mb 25] [--ranks 2] [--work-ms 100] [--every 10] [--windows 6] [--json FILE]

Ranks, a process each, push gradients of so many MB to an `aggd` by its unix socket, and compute for so long in each
step. In turns they save the model with its moments (three times its size) after each `--every` steps by
`job.tensors.save`, by `job.tensors.moments` and a file of rank 0, as scripts did before, or not at all. Ratio: the
median over windows of how long a window's steps took, to the same without. LONGEST: the longest step, ms, the median
over windows.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.live_command import json_option, keep, options, print_head  # noqa: E402
from bench.tensors.tensors_lanes import EPOCH, MB, SECRET, Case, aggregator, said, tell  # noqa: E402

WAYS = ("not saved", "tensors.save", "tensors.moments")


def main(argv: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    for name, value in (("mb", 25), ("ranks", 2), ("work-ms", 100), ("every", 10), ("windows", 6)):
        parser.add_argument(f"--{name}", type=int, default=value)
    json_option(parser)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="covey-saves-") as folder:
        aggd = aggregator(Path(folder), Case(1, args.ranks, args.mb * MB, True), "1", str(ROOT))
        at = said(aggd)["address"]
        words = [sys.executable, str(Path(__file__).resolve()), "--rank"]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen(
                [*words, str(rank), folder, at, json.dumps(vars(args))],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ, cwd=ROOT,
            )
            for rank in range(args.ranks)
        ]  # fmt: skip
        found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for window in range(-1, args.windows):  # the first one makes all memory
            for way in WAYS if window % 2 else reversed(WAYS):
                for each in ranks:
                    tell(each, {"way": way})
                took, *_ = [said(each)["steps_s"] for each in ranks]
                if window >= 0:
                    found[way].append((sum(took) / len(took), max(took)))
        for each in (*ranks, aggd):
            tell(each, {})
            each.wait(60)
    print_head("way | step, ms | ratio | LONGEST")
    for way, windows in found.items():
        ratios = [mine / plain for (mine, _), (plain, _) in zip(windows, found["not saved"], strict=True)]
        step, longest = (1000 * statistics.median(column) for column in zip(*windows, strict=True))
        print(f"| {way} | {step:.1f} | {statistics.median(ratios):.3f} | {longest:.0f} |", flush=True)
    keep(found, args.json)
    return 0


def rank_main(number: str, folder: str, at: str, args: str) -> None:
    import numpy as np

    from covey.core.ids import HostId, JobId
    from covey.healing import checkpoint
    from covey.job.tensors import TensorClient
    from covey.tensors.numbers.updates import Adam
    from covey.wire.job import AggregatorAt

    asked: dict[str, Any] = json.loads(args)
    rank, (where, near) = int(number), at.split()
    gradient = np.random.default_rng(rank).standard_normal(asked["mb"] * MB // 4).astype(np.float32)
    out, every = np.zeros_like(gradient), asked["every"]
    client = TensorClient(JobId("j0"), rank, asked["ranks"], lambda epoch, why, table: None)
    client.moved(AggregatorAt(JobId("j0"), EPOCH, HostId("h1"), where, SECRET, near=near))
    client.save(Path(folder) / "model.json")
    client.model("w", out, update=Adam())
    saver, step = client.saves.saver, 0
    assert saver is not None
    work = np.random.default_rng(1).standard_normal((300, 300)).astype(np.float32)
    while (way := json.loads(sys.stdin.readline() or "{}").get("way")) is not None:
        steps_s = []
        saver.steps.every = every if way == "tensors.save" else None
        for _ in range(2 * every):
            began_s = time.monotonic()
            while time.monotonic() - began_s < asked["work_ms"] / 1000:
                work @ work
            client.push_pull("w", gradient, out=out)
            step += 1
            if way == "tensors.moments" and step % every == 0:
                steps, arrays = client.moments("w")
                if rank == 0:
                    about = checkpoint.Checkpoint(steps, (None,))
                    checkpoint.save(Path(folder) / "before", about, {"w": out, "m": arrays[0], "v": arrays[1]})
            steps_s.append(time.monotonic() - began_s)
        saver.steps.every = None
        saver.wait_saved()
        print(json.dumps({"steps_s": steps_s}), flush=True)
    client.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(*sys.argv[2:])
    else:
        sys.exit(main())
