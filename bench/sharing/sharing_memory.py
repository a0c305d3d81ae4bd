"""`make bench-sharing ONLY=memory`: memory limits on a PyTorch script that runs (AntMan, table 2 and figure 11).

    python bench/sharing/sharing_memory.py [--rounds 5] [--seconds 1.5]

One script on one core, attached, its limits written as an agent writes them: none, then 90, 60 or 30 % of its demand,
none again, and so on. SHRINK and GROW: from the write of the limit until the script has acknowledged it, which it does
at the end of a mini-batch once the limit holds; median and worst. HELD, HOST: device memory at most in a mini-batch,
and what lay in host memory instead, MiB; parameters and gradients always stay on the device. STEP: median mini-batch,
compared with those without a limit just before.

SAME BITS: losses of all mini-batches and parameters after each twentieth are those of the same script run without
limits and without Covey.
"""

import asyncio
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

from bench.live_command import json_option, keep, leave_the_device, options, print_head  # noqa: E402
from covey.core.units import MIB  # noqa: E402
from covey.kernel.pages import RankLimits, RankReport  # noqa: E402
from tests.agent.here import here  # noqa: E402
from tests.covey.agents import Agent  # noqa: E402
from tests.covey.hooks.torch_jobs import TorchRank, running  # noqa: E402

SHARES = (0.9, 0.6, 0.3)
PATIENCE_S = 60.0
MODELS = {
    "conv": """
layers = [torch.nn.Conv2d(3, 24, 3, padding=1), torch.nn.BatchNorm2d(24), torch.nn.ReLU(), torch.nn.Conv2d(24, 24, 3)]
layers += [torch.nn.ReLU(), torch.nn.MaxPool2d(2), torch.nn.Flatten(), torch.nn.Linear(24 * 15 * 15, 10)]
shape = (64, 3, 32, 32)
""",
    "mlp": """
layers = [layer for _ in range(6) for layer in (torch.nn.Linear(384, 384), torch.nn.ReLU())]
shape = (256, 384)
""",
}
TRAINS = """
import hashlib, os, struct, sys, torch
os.sched_setaffinity(0, {0})
torch.set_num_threads(1)
torch.manual_seed(7)
%s
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
steps, at = %d, 0
with open(%r, "ab", buffering=0) as out:
    while at < steps:
        optimizer.zero_grad()
        loss = model(torch.randn(shape)).square().mean()
        loss.backward()
        optimizer.step()
        at += 1
        out.write(struct.pack("<d", loss.item()))
        if at %% 20 == 0:
            bits = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
            out.write(hashlib.sha256(bits).digest()[:8])
"""
ENDLESS = 1 << 40


class Limited:
    """A script that runs, and its limits."""

    def __init__(self, rank: TorchRank) -> None:
        self.rank, self.epoch = rank, 0

    async def told(self, memory_bytes: int) -> float:
        """Write a limit (0: none); returns the milliseconds until the script has acknowledged it."""
        self.epoch += 1
        began_s = time.monotonic()
        self.rank.obey(RankLimits(self.epoch, memory_bytes=memory_bytes))
        while self.rank.acked() != self.epoch:
            if time.monotonic() - began_s > PATIENCE_S:
                raise SystemExit("the script does not acknowledge its limit")
            await asyncio.sleep(0.0005)
        return (time.monotonic() - began_s) * 1000

    async def lived(self, seconds: float) -> dict[str, float]:
        """Medians over the mini-batches of the next seconds; the first one, in which things move, is left out."""
        end_s, steps = time.monotonic() + seconds, []
        while time.monotonic() < end_s:
            report = self.rank.pages.report.fresh()
            if report is not None:
                steps += [batch.step_ns / 1e6 for batch in report.batches]
            await asyncio.sleep(0.01)
        newest: RankReport | None = self.rank.pages.report.newest
        assert newest is not None
        held, host = newest.peak_bytes / MIB, newest.spill_bytes / MIB
        return {"step_ms": statistics.median(steps[1:]), "held_mib": held, "host_mib": host}


async def live(model: str, out: Path, rounds: int, seconds: float) -> dict[str, Any]:
    found: dict[str, Any] = {str(share): [] for share in SHARES}
    with tempfile.TemporaryDirectory(prefix="covey-bench-") as folder:
        async with here(folder) as host:
            agent = Agent(host)
            await agent.socket.start()
            try:
                async with running(agent, TRAINS % (MODELS[model], ENDLESS, str(out))) as rank:
                    limited = Limited(rank)
                    while (await limited.lived(1.0))["held_mib"] == 0:
                        pass
                    found["demand_mib"] = (await limited.lived(seconds))["held_mib"]
                    for turn in range(rounds):
                        for share in SHARES if turn % 2 == 0 else SHARES[::-1]:
                            found[str(share)].append(await one_round(limited, share * found["demand_mib"], seconds))
                        print(f"  {model}: round {turn + 1} of {rounds}", file=sys.stderr, flush=True)
            finally:
                await agent.socket.stop()
    return found


async def one_round(limited: Limited, limit_mib: float, seconds: float) -> dict[str, float]:
    free = await limited.lived(seconds)
    shrink_ms = await limited.told(int(limit_mib * MIB))
    under = await limited.lived(seconds)
    grow_ms = await limited.told(0)
    return under | {"free_step_ms": free["step_ms"], "shrink_ms": shrink_ms, "grow_ms": grow_ms}


def same_bits(model: str, limited: bytes) -> int:
    """Number of mini-batches that were compared; 0: something differs."""
    steps = 0
    while wrote(steps + 20) <= len(limited):
        steps += 20
    with tempfile.TemporaryDirectory(prefix="covey-bench-") as folder:
        plain = Path(folder) / "plain"
        script = TRAINS % (MODELS[model], steps, str(plain))
        subprocess.run([sys.executable, "-c", script], check=True, env={"PATH": os.environ["PATH"], "HOME": "/tmp"})
        return steps if plain.read_bytes() == limited[: wrote(steps)] else 0


def wrote(steps: int) -> int:
    """Bytes that a number of mini-batches writes."""
    return 8 * (steps + steps // 20)


def rows(model: str, found: dict[str, Any]) -> list[str]:
    lines = []
    for share in SHARES:
        each = found[str(share)]
        slower = [100 * (one["step_ms"] / one["free_step_ms"] - 1) for one in each]
        told = [spread([one["shrink_ms"] for one in each]), spread([one["grow_ms"] for one in each])]
        told += [f"{statistics.median(one[key] for one in each):.1f}" for key in ("held_mib", "host_mib")]
        told += [f"{statistics.median(slower):+.1f} ({min(slower):+.1f} .. {max(slower):+.1f})"]
        same = f"{found['compared']} steps" if found["compared"] else "**no**"
        lines.append(f"| {model}, {found['demand_mib']:.1f} MiB | {share:.0%} | {' | '.join(told)} | {same} |")
    return lines


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.0f} ({max(values):.0f})"


def main(argv: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.5, help="with each limit, and without")
    json_option(parser)
    args = parser.parse_args(argv)
    leave_the_device()
    whole = {}
    print_head("script, demand | limit | SHRINK, ms | GROW, ms | HELD, MiB | HOST, MiB | STEP, % | SAME BITS")
    for model in args.models.split(","):
        with tempfile.TemporaryDirectory(prefix="covey-bench-") as folder:
            out = Path(folder) / "losses"
            whole[model] = asyncio.run(live(model, out, args.rounds, args.seconds))
            whole[model]["compared"] = same_bits(model, out.read_bytes())
        print("\n".join(rows(model, whole[model])), flush=True)
    keep(whole, args.json)
    return 0 if all(found["compared"] for found in whole.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
