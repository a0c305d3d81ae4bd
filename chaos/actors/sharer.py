"""A training script on a shared GPU, on simulated ports: it follows the pages of its agent as `covey.hooks` does, and
keeps account of what it holds of the device, so that the whole rack can be checked against what the devices have.

    sharer SECONDS BUSY_MS IDLE_MS PEAK_MIB [deaf|garbage|plain|heavy]

`deaf` never applies a limit, `garbage` writes nonsense into its pages now and then, `plain` never asks for pages.
Beside a `heavy` one the others take much longer, however seldom it works.
"""

import asyncio
from collections.abc import Awaitable, Callable, Set
from typing import Any

from covey.core.ids import JobId
from covey.core.units import MIB
from covey.kernel.pages import (
    FlagReader,
    FlagWriter,
    LimitsReader,
    MiniBatch,
    RankLimits,
    RankReport,
    ReportWriter,
    rates_at,
)
from covey.ports.env import Env
from covey.ports.processes import Command
from covey.ports.streams import ByteStream
from covey.wire.frames import pack, read_frame
from covey.wire.job import AskPages, Frame, Join, Joined, NeighbourFlag, PagesHere, PagesMapped, decoder

PAUSE_S = 0.3
POLL_S = 0.01
NS = 1_000_000_000
BOUNDLESS = 1 << 60
HEAVY, HEAVY_S = 3.0, 0.05
"""Factor of a step's time beside one that began heavy work within `HEAVY_S` seconds before it."""


class DeviceAccounts:
    """What ranks hold of each device now. `wrong` is told when it is more than there is."""

    def __init__(self, wrong: Callable[[str], None], alive: Callable[[], Set[str]]) -> None:
        """Begin the accounts. `alive`: ranks that live, as `name_of` calls them; a host without power reports no
        deaths."""
        self._wrong, self._alive = wrong, alive
        self.room: dict[str, int] = {}
        """UUID -> bytes that jobs may hold."""
        self.held: dict[str, dict[tuple[str, int], int]] = {}
        """UUID -> (job and rank, pid) -> the limit in bytes that it follows."""
        self.heavy: dict[str, dict[str, float]] = {}
        """UUID -> job and rank -> when it did heavy work last."""
        self.links: dict[str, tuple[SharerLink, list[str]]] = {}
        """Job and rank -> its newest process's link, and its devices."""

    def holds(self, uuid: str, rank: str, pid: int, limit_bytes: int) -> None:
        held = self.held.setdefault(uuid, {})
        held[rank, pid] = limit_bytes if limit_bytes > 1 else 0  # 1 stands for nothing: 0 is no limit
        total, room = sum(held.values()), self.room.get(uuid, BOUNDLESS)
        if total > room:
            alive = self._alive()
            held = self.held[uuid] = {key: bytes_ for key, bytes_ in held.items() if key[0] in alive}
        if sum(held.values()) > room:
            total = sum(held.values())
            self._wrong(f"ranks may hold {total} bytes of {uuid}, which has {room}: {held}")

    def times_as_long(self, uuids: list[str], rank: str, now_s: float) -> float:
        """Time of a step beside the others on these devices, in steps alone."""
        beside = [worked_s for uuid in uuids for other, worked_s in self.heavy.get(uuid, {}).items() if other != rank]
        return HEAVY if any(now_s - worked_s < HEAVY_S for worked_s in beside) else 1.0

    def gone(self, uuid: str, rank: str, pid: int) -> None:
        self.held.get(uuid, {}).pop((rank, pid), None)


def name_of(command: Command) -> str:
    given = command.env
    return f"{given['COVEY_JOB_ID']}.{given['COVEY_EPOCH']} rank {given['COVEY_RANK']}"


class SharerLink:
    """The script's connection to the agent, and the pages that came over it."""

    def __init__(self, env: Env, given: dict[str, str], asks: bool) -> None:
        self.env, self._given, self._asks = env, given, asks
        self.job, self.rank = JobId(given["COVEY_JOB_ID"]), int(given["COVEY_RANK"])
        self.epoch = int(given["COVEY_EPOCH"])
        self.limits: LimitsReader | None = None
        self.report: ReportWriter | None = None
        self.report_page = bytearray(0)
        self.flag: FlagWriter | None = None
        self.neighbour: FlagReader | None = None
        self.came = asyncio.Event()
        self.now = RankLimits()
        """Limits that the script follows; memory only once it is applied."""
        self.applied_bytes = 0
        self.acked = 0

    async def run(self) -> None:
        while True:
            try:
                await self._talk(await self.env.bytes.connect(f"unix:{self._given['COVEY_SOCKET']}"))
            except ConnectionError:
                pass
            await asyncio.sleep(PAUSE_S)

    async def _talk(self, stream: ByteStream) -> None:
        try:
            await stream.write(pack(Join(0, self.job, self.rank, self.epoch, self._given["COVEY_TOKEN"])))
            first = await read_frame(stream, decoder)
            if not isinstance(first, Joined):
                return
            if self._asks:
                await stream.write(pack(AskPages(self.acked, self.applied_bytes)))
            while True:
                frame = await read_frame(stream, decoder)
                await self._heard(stream, frame)
        finally:
            stream.close()

    async def _heard(self, stream: Any, frame: Frame) -> None:
        if isinstance(frame, PagesHere):
            limits, report, flag = (stream.pages.popleft().view for _ in range(3))
            self.limits, self.report_page = LimitsReader(limits), report
            self.report, self.flag = ReportWriter(report), FlagWriter(flag)
            await stream.write(pack(PagesMapped()))
            self.came.set()
        elif isinstance(frame, NeighbourFlag):
            self.neighbour = FlagReader(stream.pages.popleft().view) if frame.there else None

    def look(self) -> None:
        """Take the agent's newest limits; memory waits for the next boundary."""
        if self.limits is not None and self.limits.changed() and self.limits.newest is not None:
            self.now = self.limits.newest

    def may_work(self) -> bool:
        """Whether the script may work at this moment, by the rates that hold."""
        self.look()
        rates = rates_at(self.now, round(self.env.clock.now_s() * NS))
        busy = self.neighbour is None or self.neighbour.busy() is not False
        share = rates.busy if busy else rates.idle
        return share >= 1 or self.env.rng.random() < share


def sharer(accounts: DeviceAccounts) -> Callable[[Env, Command], Awaitable[int]]:
    """The program `sharer`."""

    async def share(env: Env, command: Command) -> int:
        given = command.env
        how = command.argv[5] if len(command.argv) > 5 else ""
        link = SharerLink(env, given, how != "plain")
        env.spawn("agent link", link.run())
        script = Script(env, command, link, accounts, how)
        accounts.links[script.name] = link, script.gpus
        try:
            await script.run()
        finally:
            for uuid in script.gpus:
                accounts.gone(uuid, script.name, script.pid)
        return 0

    return share


class Script:
    def __init__(self, env: Env, command: Command, link: SharerLink, accounts: DeviceAccounts, how: str) -> None:
        self.env, self.link, self.accounts, self.how = env, link, accounts, how
        seconds, busy_ms, idle_ms, peak_mib = map(float, command.argv[1:5])
        self.until_s, self.busy_s, self.idle_s = seconds, busy_ms / 1000, idle_ms / 1000
        self.peak_bytes = int(peak_mib * MIB)
        self.gpus = [gpu for gpu in command.env["COVEY_GPUS"].split(",") if gpu]
        self.name, self.pid = name_of(command), id(self)
        self.steps, self.worked_s = 0, 0.0

    async def run(self) -> None:
        if self.how != "plain":
            await self.link.came.wait()
        while self.worked_s < self.until_s:
            began_s = self.env.clock.now_s()
            await self._stopped()
            self._flag(True)
            took_s = self.busy_s * self.env.rng.uniform(0.95, 1.05) * self._beside_others()
            await asyncio.sleep(took_s)
            self._flag(False)
            await asyncio.sleep(self.idle_s)
            self.worked_s += took_s + self.idle_s
            self._boundary(began_s)

    def _beside_others(self) -> float:
        now_s = self.env.clock.boot_s()
        if self.how == "heavy":
            for uuid in self.gpus:
                self.accounts.heavy.setdefault(uuid, {})[self.name] = now_s
        return self.accounts.times_as_long(self.gpus, self.name, now_s)

    async def _stopped(self) -> None:
        while True:
            if self.link.may_work():
                return
            await asyncio.sleep(POLL_S)

    def _flag(self, busy: bool) -> None:
        if self.link.flag is not None:
            self.link.flag.write(busy, round(self.env.clock.now_s() * NS))

    def _boundary(self, began_s: float) -> None:
        link = self.link
        link.look()
        if self.how != "deaf":  # a deaf one is suspended, or ends: what it holds meanwhile is the driver's word
            link.applied_bytes, link.acked = link.now.memory_bytes, link.now.epoch
            for uuid in self.gpus:
                self.accounts.holds(uuid, self.name, self.pid, link.applied_bytes)
        if link.report is None:
            return
        self.steps += 1
        peak = min(self.peak_bytes, link.applied_bytes or self.peak_bytes)
        step_ns = max(1, round((self.env.clock.now_s() - began_s) * NS))
        ended_ns = round(self.env.clock.now_s() * NS)
        ended = MiniBatch(self.steps, step_ns, min(step_ns, round(self.idle_s * NS)), 0, ended_ns)
        spilled = self.peak_bytes - peak
        link.report.write(RankReport(link.acked, link.applied_bytes, peak, peak // 4, spilled, 0, 1, True), ended)
        if self.how == "garbage" and self.env.rng.random() < 0.2:
            for _ in range(50):
                link.report_page[self.env.rng.randrange(len(link.report_page))] = self.env.rng.randrange(256)
