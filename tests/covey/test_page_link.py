"""Pages that a rank and its agent share, over the real jobs.sock."""

import asyncio
import mmap
import os
import socket

import pytest

from covey.job.client import JobClient
from covey.job.page_link import PageLink
from covey.kernel.pages import FlagReader, FlagWriter, LimitsReader, MiniBatch, RankLimits, RankReport, ReportWriter
from covey.wire.frames import FrameError, pack
from covey.wire.job import AskPages, Join, NeighbourFlag, PagesHere, PagesMapped
from plugins.base import RankPages
from plugins.facts import RankShares
from tests.agent.here import until
from tests.covey.agents import J1, Agent
from tests.quiet import quiet

LIMITS = RankLimits(epoch=4, idle=0.5, busy=0.25, failsafe=0.1, lease_ns=10**15, memory_bytes=1 << 20)


class User:
    """A user of the pages that obeys the limits."""

    def __init__(self) -> None:
        self.came = self.lost = 0
        self.limits: LimitsReader
        self.report: ReportWriter
        self.flag: FlagWriter
        self.neighbour: FlagReader | None = None

    def now(self) -> AskPages:
        return AskPages(3, 1 << 30)

    def pages_came(self, limits: mmap.mmap, report: mmap.mmap, flag: mmap.mmap) -> None:
        self.limits, self.report, self.flag = LimitsReader(limits), ReportWriter(report), FlagWriter(flag)
        self.came += 1

    def neighbour_is(self, flag: mmap.mmap | None) -> None:
        self.neighbour = None if flag is None else FlagReader(flag)

    def pages_lost(self) -> None:
        self.lost += 1


def pages_of(agent: Agent, rank: int) -> RankPages:
    (found,) = [peer.pages for peer in agent.socket.peers(J1) if peer.rank == rank]
    assert found is not None
    return found


async def sharing(agent: Agent, rank: int) -> tuple[JobClient, User]:
    client, user = await agent.client(COVEY_RANK=str(rank)), User()
    client.share(user)
    await until(lambda: RankShares(J1, 1, rank) in agent.facts)
    return client, user


async def test_limits_go_one_way_and_reports_the_other(agent: Agent) -> None:
    client, user = await sharing(agent, 1)
    pages = pages_of(agent, 1)
    assert pages.mapped and pages.asked == AskPages(3, 1 << 30)
    pages.limits.write(LIMITS)
    assert user.limits.changed() and user.limits.newest == LIMITS
    user.report.write(RankReport(acked=4), MiniBatch(0, 5_000_000, 1_000_000))
    report = pages.report.fresh()
    assert report is not None and (report.acked, report.batches) == (4, (MiniBatch(0, 5_000_000, 1_000_000),))
    await asyncio.to_thread(client.close)


async def test_a_rank_reads_the_flag_of_its_neighbour_and_can_not_write_it(agent: Agent) -> None:
    first, guaranteed = await sharing(agent, 0)
    second, other = await sharing(agent, 1)
    pages_of(agent, 1).show(pages_of(agent, 0))
    pages_of(agent, 1).show(pages_of(agent, 0))
    await until(lambda: other.neighbour is not None)
    assert other.neighbour is not None and other.neighbour.busy() is False
    guaranteed.flag.write(True, 5)
    assert other.neighbour.busy() is True
    pages_of(agent, 1).show(None)
    await until(lambda: other.neighbour is None)
    for client in (first, second):
        await asyncio.to_thread(client.close)


async def test_a_rank_whose_agent_restarts_has_new_pages_and_says_by_what_it_goes(agent: Agent) -> None:
    client, user = await sharing(agent, 1)
    before = user.limits
    pages_of(agent, 1).limits.write(LIMITS)
    await agent.restart()
    await until(lambda: user.came == 2 and RankShares(J1, 1, 1) in agent.facts)
    assert user.lost >= 1
    assert before.changed() and before.newest == LIMITS, "what was mapped stays: the lease ends it"
    assert pages_of(agent, 1).asked == AskPages(3, 1 << 30)
    await asyncio.to_thread(client.close)


async def test_no_descriptor_is_left_behind(agent: Agent) -> None:
    count = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        client, user = await sharing(agent, 1)
        pages_of(agent, 1).show(None)
        await asyncio.to_thread(client.close)
        await until(lambda: not agent.socket.peers(J1))
        agent.facts.clear()
        del user, client
    await until(lambda: len(os.listdir("/proc/self/fd")) < count + 5)
    assert len(os.listdir("/proc/self/fd")) < count + 5, "one for each time would be five"


async def test_a_flag_of_a_rank_that_has_gone_is_not_sent(agent: Agent) -> None:
    """The number of its descriptor may belong to another file by then."""
    first, _ = await sharing(agent, 0)
    second, other = await sharing(agent, 1)
    gone = pages_of(agent, 0)
    await asyncio.to_thread(first.close)
    await until(lambda: len(agent.socket.peers(J1)) == 1)
    pages_of(agent, 1).show(gone)
    pages_of(agent, 1).show(None)
    await quiet()
    assert other.neighbour is None and second.connected
    await asyncio.to_thread(second.close)


@pytest.mark.parametrize("frame", [PagesMapped(), PagesHere(), NeighbourFlag(True), AskPages(-1)], ids=lambda f: str(f))
async def test_frames_about_pages_out_of_turn_end_that_connection_only(agent: Agent, frame: PagesMapped) -> None:
    client, _ = await sharing(agent, 0)
    reader, writer = await asyncio.open_unix_connection(agent.environ()["COVEY_SOCKET"])
    writer.write(pack(Join(1, J1, 1, 1, "secret")) + pack(frame))
    async with asyncio.timeout(5):
        while await reader.read(1 << 16):
            pass
    writer.close()
    assert client.connected
    await asyncio.to_thread(client.close)


def test_a_descriptor_that_is_no_page_ends_the_connection() -> None:
    link = PageLink()
    link.user = User()
    with pytest.raises(FrameError, match="no descriptor"):
        link.heard(PagesHere())
    ends = socket.socketpair()
    link.received([ends[0].detach()])
    with pytest.raises(FrameError, match="cannot be used"):
        link.heard(NeighbourFlag(True))
    ends[1].close()
