"""`make bench-sharing`: two real training scripts on one core, and what each law makes of them.

    python bench/sharing/sharing_live.py [--pairs conv-input,mlp-input] [--rounds 5] [--measure 5] [--settle 7]

One process of each script lives through all laws in turn, forwards and backwards (ABBA), so that both meet the same
machine. The service of `plugins/sharing`, jobs.sock, pages and `covey.hooks` are those of agents; only which scripts
run is decided here, and for rivals which controller takes the ladder's place. The device is core 0; this process and
everything else should leave it alone.

    alone        the other is stopped
    packed       no control
    step-up      AntMan's law: one rate for all times, from nothing upwards, halved when the guaranteed job suffers
    step-up+flag the same, in busy phases; idle ones are free
    flag         idle phases are free, busy ones closed; no control
    ours         the ladder

DELAY is how much longer than alone the guaranteed script's thread is in the run queue, per step, as a share of its
step alone: what a kernel of a GPU waits behind another's. STEP is wall time, noisier, with what caches and clocks do.
In brackets what the device model says, fed with the phases that the guaranteed script had alone
(`sharing_predicted.py`).
"""

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.live_command import json_option, keep, leave_the_device, options, print_head  # noqa: E402
from bench.sharing.live_jobs import RECORD, to_whole_batches_s  # noqa: E402
from bench.sharing.sharing_predicted import Phases, phases, predicted  # noqa: E402
from covey.core.ids import JobId  # noqa: E402
from covey.core.units import GIB, MIB  # noqa: E402
from plugins.sharing.machine.control import Steady  # noqa: E402
from plugins.sharing.machine.ladder import Ladder  # noqa: E402
from plugins.sharing.machine.rivals import Alone, Flag, Flagged, Naive, Throttle  # noqa: E402
from plugins.sharing.policy.rivals import StepUp  # noqa: E402
from tests.plugins.sharing.live_host import LiveHost, live_host  # noqa: E402
from tests.plugins.sharing.ruled import rule, ruled  # noqa: E402

PAIRS = ("conv-input", "conv", "mlp-input", "transformer", "evaluation", "jax", "conv-input/jax-guest")
"""Guaranteed scripts; behind a slash the opportunistic one, if it is not `GUEST`."""
GUEST = "mlp"
OPERATION_S = 0.001
"""Seconds of an operation after which the opportunistic script can be stopped, for the model: a quantum of `gate.cpp`.
Operators are shorter."""
IDLE_SEEN_S = 0.0008
"""Seconds after which a wait for input is seen, for the model: `gate.cpp` looks 0.3 ms after a fetch began, and half a
millisecond later where the script computed meanwhile, as loaders do."""
WAKE_S = 0.0007
"""Seconds that the script is in the run queue when it wakes while the other computes, for the model: fitted to what
the law `flag` costs conv-input and mlp-input. Beside a plain loop it was 0.5 to 1.9 ms, at most 3.9 (Linux 6.18)."""
TITLES = "guaranteed script | law | DELAY, % of its step | STEP, % | the other, % of alone"
START_S = 120.0
"""Most seconds until both scripts make steps and the guaranteed one is known."""


Laws = Mapping[str, type[Ladder]]
LAWS: Laws = {
    "alone": ruled(lambda tolerance: Alone()),
    "packed": ruled(lambda tolerance: Naive()),
    "step-up": ruled(lambda tolerance: Throttle(StepUp(), tolerance)),
    "step-up+flag": ruled(lambda tolerance: Flagged(StepUp(), tolerance)),
    "flag": ruled(lambda tolerance: Flag()),
    "ours": Ladder,
}


WINDOW = 50
"""Mini-batches whose delay is judged together."""
AT_ONCE, SETTLED_S = ("alone", "packed", "flag"), 1.0
"""Laws that measure nothing and have nothing to settle, and their seconds to settle."""


class Steps:
    """What a script recorded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def between(self, from_ns: int, to_ns: int) -> list[tuple[int, int, int, int]]:
        """Steps that began and ended then: ended, took, waited for the core, ran; ns."""
        whole = self.path.read_bytes() if self.path.exists() else b""
        records = RECORD.iter_unpack(whole[: len(whole) // RECORD.size * RECORD.size])
        return [record for record in records if record[0] - record[1] >= from_ns and record[0] <= to_ns]  # type: ignore[misc]


class Pair:
    """One guaranteed script and one opportunistic one, on one core."""

    def __init__(self, host: LiveHost, kind: str, folder: Path, laws: Laws = LAWS, whole: bool = False) -> None:
        self.host, self.laws = host, laws
        self.options = ("--whole-operations",) if whole else ()
        self.kind, _, guest = kind.partition("/")
        self.guest_kind = guest or GUEST
        self.alone: list[Phases] = []
        self.guaranteed, self.guest = Steps(folder / "g"), Steps(folder / "o")

    async def begin(self) -> None:
        script = str(ROOT / "bench" / "sharing" / "live_jobs.py")
        await self.host.come(
            "o",
            "opportunistic",
            (sys.executable, script, self.guest_kind, str(self.guest.path), *self.options),
            256 * MIB,
        )
        await self._steps(self.guest, 20)
        argv = (sys.executable, script, self.kind, str(self.guaranteed.path), *self.options)
        await self.host.come("g", "guaranteed", argv, GIB)
        await self._steps(self.guaranteed, 20)
        end_s = time.monotonic() + START_S
        while self.host.state() not in ("baseline", "run"):
            if time.monotonic() > end_s:
                raise SystemExit(
                    f"{self.kind}: the guaranteed script is not known after {START_S:.0f} s: {self.host.state()}"
                )
            await asyncio.sleep(0.1)

    async def _steps(self, steps: Steps, count: int) -> None:
        end_s = time.monotonic() + START_S
        while len(steps.between(0, 1 << 62)) < count:
            if time.monotonic() > end_s:
                raise SystemExit(f"{self.kind}: no steps after {START_S:.0f} s")
            await asyncio.sleep(0.2)

    async def guest_alone(self, seconds: float) -> float:
        """Steps/s of the opportunistic script with the other one suspended."""
        await self.host.devices.suspend(self.host.processes[JobId("g")].pid)
        self.rule("packed")
        began_ns = time.monotonic_ns()
        await asyncio.sleep(seconds)
        rate = len(self.guest.between(began_ns, time.monotonic_ns())) / seconds
        await self.host.devices.resume(self.host.processes[JobId("g")].pid)
        return rate

    async def _whole_batches(self) -> None:
        """Wait until the script that quickens begins with whole batches again."""
        await asyncio.sleep(to_whole_batches_s(time.monotonic()))

    def rule(self, law: str) -> None:
        """Put this law in force from now on."""
        (gpu,) = self.host.service.machine.gpus.values()
        gpu.controller = self.laws[law]
        if isinstance(gpu.control, Steady):
            rule(gpu)

    async def live(self, law: str, settle_s: float, measure_s: float) -> dict[str, Any]:
        if self.kind == "quickens":
            await self._whole_batches()
        self.rule("alone")  # a law that keeps its first baseline must not take it from what the one before left
        await asyncio.sleep(0.5)
        self.rule(law)
        await asyncio.sleep(min(settle_s, SETTLED_S) if law in AT_ONCE else settle_s)
        began_ns = time.monotonic_ns()
        await asyncio.sleep(measure_s)
        ended_ns = time.monotonic_ns()
        mine, theirs = self.guaranteed.between(began_ns, ended_ns), self.guest.between(began_ns, ended_ns)
        if not mine:
            return {"step_ms": float("nan"), "delay_ms": float("nan"), "rate": len(theirs) / measure_s, "windows": []}
        if law == "alone":
            self.alone.append(phases(mine, measure_s))
        # A phase without the device (an evaluation) is one long step: medians leave it out.
        return {
            "step_ms": statistics.fmean(sorted(took for _, took, _, _ in mine)[: max(1, len(mine) - 1)]) / 1e6,
            "delay_ms": statistics.fmean(waited for _, _, waited, _ in mine) / 1e6,
            "rate": len(theirs) / measure_s,
            "windows": [
                statistics.fmean(waited for _, _, waited, _ in mine[at : at + WINDOW]) / 1e6
                for at in range(0, len(mine) - WINDOW + 1, WINDOW)
            ],
        }


async def compare(
    kind: str, rounds: int, settle_s: float, measure_s: float, laws: Laws = LAWS, whole: bool = False
) -> dict[str, Any]:
    """Run every law `rounds` times, forwards and backwards in turn; "alone" and "packed" are among them. `whole`: on a
    core that takes no operation off (`whole_operations.py`)."""
    with tempfile.TemporaryDirectory(prefix="covey-bench-") as folder:
        async with live_host(4 * GIB) as host:
            pair = Pair(host, kind, Path(folder), laws, whole)
            await pair.begin()
            alone_rate = await pair.guest_alone(measure_s)
            found: dict[str, list[dict[str, Any]]] = {law: [] for law in laws}
            for turn in range(rounds):
                for law in laws if turn % 2 == 0 else reversed(list(laws)):
                    found[law].append(await pair.live(law, settle_s, measure_s))
                print(f"  {kind}: round {turn + 1} of {rounds}", file=sys.stderr, flush=True)
            return {
                "guest_alone": alone_rate,
                "laws": found,
                "gate": gate_of(host),
                "flag": flag_of(host),
                "model": {} if whole else said(kind, pair.alone, settle_s, measure_s, laws),
            }


def said(
    kind: str, alone: Sequence[Phases], settle_s: float, measure_s: float, laws: Laws
) -> dict[str, tuple[float, float]]:
    """The model's prediction for each law: slowdown, and share of the other. It does not know scripts whose work
    varies."""
    if kind in ("drift", "quickens", "noisy") or "sudden" in kind:
        return {}
    mean = Phases(*(statistics.fmean(values) for values in zip(*map(astuple, alone), strict=True)))
    device = OPERATION_S, IDLE_SEEN_S, WAKE_S
    return {law: predicted(kind, mean, law, *device, settle_s, measure_s) for law in laws if law != "alone"}


def gate_of(host: LiveHost) -> bool | None:
    (gpu,) = host.service.machine.gpus.values()
    return gpu.members[JobId("o")].gate


def flag_of(host: LiveHost) -> bool:
    (gpu,) = host.service.machine.gpus.values()
    return gpu.members[JobId("g")].flag


def rows(kind: str, found: dict[str, Any]) -> list[str]:
    """A line for each law: medians over the rounds, and their spread."""
    alone = found["laws"]["alone"]
    alone_step = statistics.median(one["step_ms"] for one in alone)
    alone_delay = statistics.median(one["delay_ms"] for one in alone)
    lines = []
    for law, each in found["laws"].items():
        delays = [100 * (one["delay_ms"] - alone_delay) / alone_step for one in each]
        steps = [100 * (one["step_ms"] / alone_step - 1) for one in each]
        shares = [100 * one["rate"] / found["guest_alone"] for one in each]
        slower, share = (
            (f" [{100 * value:.1f}]" for value in found["model"][law]) if law in found["model"] else ("", "")
        )
        lines.append(f"| {kind} | {law} | {spread(delays)}{slower} | {spread(steps)} | {spread(shares)}{share} |")
    return lines


def bad_windows(found: dict[str, Any], law: str, tolerance: float) -> str:
    """How many windows of all rounds have more delay than that, and out of how many."""
    alone = found["laws"]["alone"]
    alone_step = statistics.median(one["step_ms"] for one in alone)
    alone_delay = statistics.median(one["delay_ms"] for one in alone)
    windows = [delay for one in found["laws"][law] for delay in one["windows"]]
    return f"{sum(delay - alone_delay > tolerance * alone_step for delay in windows)} of {len(windows)}"


def spread(values: Sequence[float]) -> str:
    """Median, and the whole range of the rounds."""
    return f"{statistics.median(values):+.1f} ({min(values):+.1f} .. {max(values):+.1f})"


def main(argv: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--pairs", default=",".join(PAIRS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measure", type=float, default=5.0, metavar="SECONDS")
    parser.add_argument("--settle", type=float, default=7.0, metavar="SECONDS", help="of laws that measure first")
    json_option(parser)
    args = parser.parse_args(argv)
    leave_the_device()
    print_head(TITLES)
    whole = {}
    for kind in args.pairs.split(","):
        whole[kind] = asyncio.run(compare(kind, args.rounds, args.settle, args.measure))
        print("\n".join(rows(kind, whole[kind])), flush=True)
    keep(whole, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
