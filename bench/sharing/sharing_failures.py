"""`make bench-sharing ONLY=failures`: a real agent, two PyTorch scripts on one device, and what fails, in turn.

    python bench/sharing/sharing_failures.py [--rounds 3]

A guaranteed script (an MLP with a wait for input) and an opportunistic one (an MLP that always computes), submitted to
an agent of their own, whose only device is made of cores. In each round the agent is killed (`kill -9`) and started
again, stopped (`kill -STOP`) for a while, each script writes garbage over its own page of reports, and at last the
guaranteed script is killed. Then the same pair on a core whose driver is a stand-in beneath the real pynvml.

Printed are steps/s, of the guaranteed script as a share of its earlier rate and of the other as a share of its rate
alone, from half a second after the end of the lease on (garbage: at once); times in s; medians and the largest.
"""

import asyncio
import contextlib
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.live_command import json_option, keep, options, print_head  # noqa: E402
from bench.sharing.sharing_live import Pair, Steps  # noqa: E402
from cli.client import AgentctlError  # noqa: E402
from tests.agent.here import until  # noqa: E402
from tests.agent.ports.devices.stand_in import Board, StandIn, beneath_pynvml  # noqa: E402
from tests.plugins.sharing.driven_device import DrivenDevice  # noqa: E402
from tests.plugins.sharing.live_host import live_host  # noqa: E402
from tests.rack.living_rack import wait  # noqa: E402
from tests.rack.sharing_rack import SharingRack, sharing_rack  # noqa: E402

HOST = "gpu1"
LEASE_S, AWAY_S, LOOK_S = 2.0, 5.0, 2.0
SCRIPT = str(ROOT / "bench" / "sharing" / "failing_job.py")
SECOND = 1_000_000_000
Found = dict[str, float]


class Two:
    """The two scripts, and what they have done."""

    def __init__(self, rack: SharingRack, folder: Path, turn: int) -> None:
        self.rack = rack
        self.steps = {name: Steps(folder / f"{name}{turn}") for name in ("g", "o")}
        self.ids: dict[str, str] = {}
        self.before: Found = {}
        """Steps/s: of the guaranteed script with the other beside it, of the other alone."""
        self.beside = 0.0
        """Rate of the other script beside the guaranteed one, as a share of its rate alone."""

    def begin(self) -> None:
        self._submit("o", "mlp", "opportunistic")
        alone = self.rates(3.0)["o"]
        self._submit("g", "mlp-input", "guaranteed")
        self.controlled(120.0)
        time.sleep(6.0)
        self.before = self.rates(4.0)
        self.beside, self.before["o"] = self.before["o"] / alone, alone

    def _submit(self, name: str, kind: str, job_class: str) -> None:
        argv = [sys.executable, SCRIPT, kind, str(self.steps[name].path)]
        self.ids[name] = self.rack.submit(name, argv, job_class=job_class, gpu_memory=512 << 20)
        wait(f"{name} makes steps", lambda: len(self.steps[name].between(0, 1 << 62)) > 20, 120.0)

    def end(self) -> None:
        for job in self.ids.values():
            with contextlib.suppress(AgentctlError):
                self.rack.agent().post("jobs", job, "cancel")
            wait(f"{job} is over", lambda job=job: self.rack.job(job)["over"])  # type: ignore[misc]

    def pid(self, name: str) -> int:
        (found,) = self.rack.job(self.ids[name])["ranks"]
        return int(found["pid"])

    def controlled(self, timeout_s: float) -> float:
        """Seconds until the agent says that both share the device and what the guaranteed one costs is known."""
        began_s = time.monotonic()
        wait("both are controlled", self._controlled, timeout_s)
        return time.monotonic() - began_s

    def _controlled(self) -> bool:
        (row,) = self.rack.agent(HOST).get("shared_gpus").data
        stages = {one["job"]: one["stage"] for one in row["jobs"]}
        return row["state"] in ("run", "verify") and stages == dict.fromkeys(self.ids.values(), "running")

    def rates(self, seconds: float) -> Found:
        """Steps/s of both scripts from now on, for `seconds`."""
        began_ns = time.monotonic_ns()
        time.sleep(seconds)
        return self.between(began_ns, time.monotonic_ns())

    def between(self, from_ns: int, to_ns: int) -> Found:
        seconds = (to_ns - from_ns) / SECOND
        return {name: len(steps.between(from_ns, to_ns)) / seconds for name, steps in self.steps.items()}

    def longest_s(self, name: str, from_ns: int) -> float:
        """Longest mini-batch since then, in seconds."""
        return max((took for _, took, _, _ in self.steps[name].between(from_ns, 1 << 62)), default=0) / SECOND

    def metric(self, kind: str) -> float:
        name = f'covey_sharing_total{{kind="{kind}"}}'
        text = _metrics(self.rack)
        return next((float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name)), 0.0)


def _metrics(rack: SharingRack) -> str:
    import urllib.request

    with urllib.request.urlopen(f"http://{rack.host(HOST).http}/metrics", timeout=5) as answer:
        return str(answer.read().decode())


def agent_killed(two: Two) -> Found:
    began_ns = time.monotonic_ns()
    two.rack.kill(HOST)
    time.sleep(LEASE_S + 0.5)
    found = _shares(two, two.rates(LOOK_S))
    found["longest_s"] = two.longest_s("g", began_ns)
    two.rack.start()
    return found | {"again_s": two.controlled(60.0)}


def agent_stopped(two: Two) -> Found:
    began_ns, pid = time.monotonic_ns(), two.rack.agentd(HOST)
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(LEASE_S + 0.5)
        found = _shares(two, two.rates(LOOK_S))
    finally:
        os.kill(pid, signal.SIGCONT)
    found["longest_s"] = two.longest_s("g", began_ns)
    return found | {"again_s": two.controlled(60.0)}


def garbage(two: Two, name: str) -> Found:
    before, began_ns = two.metric("garbage"), time.monotonic_ns()
    os.kill(two.pid(name), signal.SIGUSR1)
    began_s = time.monotonic()
    wait("it is counted", lambda: two.metric("garbage") > before, 20.0)
    found = {"counted_s": time.monotonic() - began_s} | _shares(two, two.rates(LOOK_S))
    found["longest_s"] = two.longest_s("g", began_ns)
    return found | {"again_s": two.controlled(60.0)}


def job_killed(two: Two) -> Found:
    """Kill the guaranteed script; measures how long until the other makes steps at 80 % of its rate alone on the
    device."""
    began_ns = time.monotonic_ns()
    os.kill(two.pid("g"), signal.SIGKILL)
    time.sleep(4.0)
    alone = two.rates(LOOK_S)["o"]
    ended = [record[0] for record in two.steps["o"].between(0, 1 << 62)]
    grid = range(began_ns, began_ns + 4 * SECOND, SECOND // 100)
    tenth = SECOND // 10
    has = next((at for at in grid if sum(at <= one < at + tenth for one in ended) * 10 >= 0.8 * alone), grid[-1])
    return {"again_s": (has + tenth - began_ns) / SECOND, "o": alone / max(1e-9, two.before["o"])}


def _shares(two: Two, now: Found) -> Found:
    return {name: now[name] / max(1e-9, two.before[name]) for name in now}


FAILURES: dict[str, Callable[[Two], Found]] = {
    "agent killed": agent_killed,
    "agent stopped for 4.5 s": agent_stopped,
    "garbage in the guaranteed script's page": lambda two: garbage(two, "g"),
    "garbage in the other's page": lambda two: garbage(two, "o"),
    "guaranteed script killed": job_killed,
}


def live(rounds: int) -> dict[str, list[Found]]:
    found: dict[str, list[Found]] = {name: [] for name in ("nothing", *FAILURES)}
    with sharing_rack(1, 1, "beside = 1") as rack, _folder() as folder:
        for turn in range(rounds):
            two = Two(rack, folder, turn)
            two.begin()
            found["nothing"].append({"g": 1.0, "o": two.beside})
            for name, fails in FAILURES.items():
                found[name].append(fails(two))
                print(f"  round {turn + 1} of {rounds}: {name}: {found[name][-1]}", file=sys.stderr, flush=True)
                if name != "guaranteed script killed":
                    time.sleep(3.0)
            two.end()
    return found


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="covey-bench-") as name:
        yield Path(name)


async def driver(folder: Path, kind: str) -> Found:
    """Two scripts on a core whose driver, a stand-in beneath the real pynvml, hangs or raises for four seconds."""
    with beneath_pynvml(StandIn(Board("GPU-driven"))) as stand_in:
        device = DrivenDevice(stand_in, 1.0)
        await device.begin()
        async with live_host(device=device) as host:
            pair = Pair(host, "mlp-input", folder)
            await pair.begin()
            alone = await pair.guest_alone(3.0)
            before = await _lived(pair, 4.0)
            began_ns = time.monotonic_ns()
            _answers(stand_in, kind, False)
            await asyncio.sleep(1.0)
            during = await _lived(pair, 3.0)
            _answers(stand_in, kind, True)
            began_s = time.monotonic()
            while (await device.health(device.device.uuid)).condition != "ok":
                await until(lambda: host.state() in ("run", "verify"), 60.0)
            again_s = time.monotonic() - began_s
            assert host.service.watch.failures > 0, "nobody asked the driver meanwhile"
            assert host.given_back("o") is None and host.given_back("g") is None
            longest = max(took for _, took, _, _ in pair.guaranteed.between(began_ns, 1 << 62)) / SECOND
            return {"g": during["g"] / before["g"], "o": during["o"] / alone, "longest_s": longest, "again_s": again_s}


def _answers(driver: StandIn, kind: str, answers: bool) -> None:
    if kind == "raises":
        driver.present = answers
    elif answers:
        driver.open.set()
    else:
        driver.open.clear()


async def _lived(pair: Pair, seconds: float) -> Found:
    began_ns = time.monotonic_ns()
    await asyncio.sleep(seconds)
    span = began_ns, time.monotonic_ns()
    return {"g": len(pair.guaranteed.between(*span)) / seconds, "o": len(pair.guest.between(*span)) / seconds}


def drivers(rounds: int, found: dict[str, list[Found]]) -> None:
    for kind in ("hangs", "raises"):
        name = f"driver {kind} for 4 s"
        for turn in range(rounds):
            with _folder() as folder:
                found.setdefault(name, []).append(asyncio.run(driver(folder, kind)))
            print(f"  round {turn + 1} of {rounds}: {name}: {found[name][-1]}", file=sys.stderr, flush=True)


def rows(found: dict[str, list[Found]]) -> list[str]:
    def told(each: Sequence[Found], key: str, form: str) -> str:
        values = [one[key] for one in each if key in one]
        return f"{format(statistics.median(values), form)} ({format(max(values), form)})" if values else "-"

    keys = (("g", ".0%"), ("longest_s", ".2f"), ("o", ".0%"), ("counted_s", ".2f"), ("again_s", ".2f"))
    return [f"| {name} | {' | '.join(told(each, *key) for key in keys)} |" for name, each in found.items()]


def main(argv: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    json_option(parser)
    args = parser.parse_args(argv)
    found: dict[str, Any] = live(args.rounds)
    drivers(args.rounds, found)
    print_head(
        "what fails | guaranteed | its longest mini-batch, s | the other | counted after, s | again as before, s"
    )
    print("\n".join(rows(found)))
    keep(found, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
