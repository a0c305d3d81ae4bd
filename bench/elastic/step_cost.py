"""What elastic jobs cost those that do not change: lines of Covey in a step, here and in another tree; PyTorch and DDP.

    python bench/elastic/step_cost.py lines [--tree DIR] [--rounds 3]
    python bench/elastic/step_cost.py one-rank [--widths 256,16384] [--rounds 3]

Both start a rack of one host (`covey-rack`) with two simulated GPUs, and a job with two ranks on it.

lines       `examples/healing.py`, whose ranks count by `sys.settrace` the lines of Covey that they run in 200 steps:
            SCRIPT in the script's thread, ALL in all threads. Counted in turns in this tree and in DIR (a checkout of
            another commit), for the time of so short a step differs by 3 % from start to start, and the count by 0.3 %.
one-rank    one network with two layers, BatchNorm, dropout and Adam, 240 steps, in turns under DDP (`attach(ddp, ..)`)
            and with `attach(.., elastic=True)`: STEP and PROCESSOR in ms. (Needs PyTorch.)
"""

import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.live_command import json_option, keep, options, print_head  # noqa: E402

FIRST, LAST = 60, 260
"""Steps between which lines are counted."""
COUNTS = """
import os, runpy, sys, threading
import covey.job.job_state
OURS = os.path.dirname(covey.__file__) + os.sep
counts, marks, done = {}, {}, covey.job.job_state.JobState.done
def line(frame, event, arg):
    counts[threading.get_ident()] += event == "line"
    return line
def call(frame, event, arg):
    if not frame.f_code.co_filename.startswith(OURS): return None
    counts.setdefault(threading.get_ident(), 0)
    counts[threading.get_ident()] += 1
    return line
def noted(state, **more):
    step = state.step
    done(state, **more)
    if step in (FIRST, LAST): marks[step] = dict(counts)
    if step == LAST:
        a, b, own = marks[FIRST], marks[LAST], threading.main_thread().ident
        print("counted", (b[own] - a[own]) / (LAST - FIRST), (sum(b.values()) - sum(a.values())) / (LAST - FIRST))
covey.job.job_state.JobState.done = noted
script, *sys.argv[1:] = sys.argv[1:]
sys.path[0], sys.argv[0] = os.path.dirname(script), script
threading.settrace(call)
sys.settrace(call)
runpy.run_path(script, run_name="__main__")
""".replace("FIRST", str(FIRST)).replace("LAST", str(LAST))
TRAINS = """
import statistics, sys, time
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
import covey.torch
way, width, steps = sys.argv[1], int(sys.argv[2]), 240
torch.set_num_threads(1)
torch.manual_seed(1)
data = TensorDataset(torch.randn(4096, 64), torch.randint(0, 10, (4096,)))
inner = torch.nn.BatchNorm1d(width), torch.nn.ReLU(), torch.nn.Dropout(0.2)
net = torch.nn.Sequential(torch.nn.Linear(64, width), *inner, torch.nn.Linear(width, 10))
times, loss = [], torch.nn.functional.cross_entropy
def ended():
    times.append((time.monotonic(), time.process_time()))
    return len(times) >= steps
def ddp():
    covey.torch.init_process_group()
    model = DistributedDataParallel(net)
    optimizer, sampler = torch.optim.Adam(model.parameters()), covey.torch.StepSampler(len(data), 16)
    loader = DataLoader(data, batch_sampler=sampler)
    state = covey.torch.attach(model, optimizer, data=sampler)
    for _ in sampler.epochs(steps):
        for seen, wanted in loader:
            optimizer.zero_grad()
            loss(model(seen), wanted).backward()
            optimizer.step()
            if ended(): return
def elastic():
    optimizer, sampler = torch.optim.Adam(net.parameters()), covey.torch.StepSampler(len(data), 16)
    loader = DataLoader(data, batch_sampler=sampler)
    training = covey.torch.attach(net, optimizer, data=sampler, elastic=True)
    for epoch in sampler.epochs(steps):
        for _ in training.steps(min(steps, (epoch + 1) * sampler.steps_per_epoch)):
            for rank in training.carried():
                with rank:
                    for seen, wanted in loader: loss(net(seen), wanted).backward()
            training.step()
            if ended(): return
{"ddp": ddp, "elastic": elastic}[way]()
(began, first), (end, last) = times[40], times[-1]
took = statistics.median(b[0] - a[0] for a, b in zip(times[40:], times[41:]))
print("counted", 1000 * took, 1000 * (last - first) / (len(times) - 41))
"""
COUNTED = re.compile(r"counted ([\d.]+) ([\d.]+)")


def main(argv: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("what", choices=("lines", "one-rank"))
    parser.add_argument("--tree", type=Path, help="a checkout of another commit, to be counted beside this one")
    parser.add_argument("--widths", default="256,16384", help="of the network's inner layer")
    parser.add_argument("--rounds", type=int, default=3)
    json_option(parser)
    args = parser.parse_args(argv)
    healing = "examples/healing.py"
    if args.what == "lines":
        trees = [ROOT, *([args.tree.resolve()] if args.tree else [])]
        cases = {str(tree): (tree, COUNTS, f"{tree}/{healing} --steps {LAST + 20}") for tree in trees}
        heads = "LINES, SCRIPT | LINES, ALL"
    else:
        widths = [int(width) for width in args.widths.split(",")]
        cases = {f"{way}, {width}": (ROOT, TRAINS, f"{way} {width}") for width in widths for way in ("ddp", "elastic")}
        heads = "STEP, ms | PROCESSOR, ms"
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    for _ in range(args.rounds):
        for name, case in cases.items():
            found[name] += run(*case)
    print_head(f"case | {heads} | least and most")
    for name, each in found.items():
        one, other = zip(*each, strict=True)
        middle = statistics.median(one), statistics.median(other)
        print(f"| {name} | {middle[0]:.5g} | {middle[1]:.5g} | {min(one):.5g} to {max(one):.5g} |")
    keep(found, args.json)
    return 0


def run(tree: Path, program: str, words: str) -> list[tuple[float, float]]:
    """Run a job of this program with two ranks on a rack of that tree's agents; returns what each rank counted."""
    bin, environ = Path(sys.executable).parent, {**os.environ, "PYTHONPATH": str(tree)}
    with tempfile.TemporaryDirectory(prefix="covey-bench-") as folder:
        script, rack = Path(folder) / "train.py", f"--dir {folder}/rack"
        script.write_text(program)

        def typed(line: str) -> str:
            command = ["bash", "-c", f"PATH={bin}:$PATH; {line}"]
            return subprocess.run(command, cwd=tree, env=environ, capture_output=True, text=True, check=False).stdout

        try:
            typed(f"covey-rack start --hosts 1 --gpus 2 {rack}")
            settings = Path(folder, "rack", "gpu1", "agent.toml").read_text()
            match = re.search(r'^run_dir = "([^"]*)"', settings, re.M)
            assert match is not None, "no rack was started"
            agent = f"--agent unix:{match[1]}/agent.sock"
            job = typed(
                f"agentctl submit {agent} --workers 2 --env PYTHONPATH={tree} -- python {script} {words}"
            ).split()
            typed(f"agentctl wait {job[0]} {agent}")
            said = typed(f"agentctl logs {job[0]} {agent}")
        finally:
            typed(f"covey-rack stop {rack}")
    found = [(float(one), float(other)) for one, other in COUNTED.findall(said)]
    if len(found) != 2:
        raise SystemExit(said)
    return found


if __name__ == "__main__":
    sys.exit(main())
