"""Memory for tensors, from the agent to its ranks: all of them share it, or none does."""

import asyncio
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.jobs.socket.tensor_memories import TensorMemories
from agent.ports.memory.pages import MemfdPages
from covey.core.ids import HostId, JobId
from covey.job.client import JobClient
from covey.job.memory_offer import MemoryOffer
from covey.job.tensors import TensorClient, TensorError
from covey.tensors.same_host import layout as tensor_layout
from covey.wire.frames import pack
from covey.wire.job import AggregatorAt, TensorMemoryHere
from plugins.facts import TensorsSeen
from tests.agent.here import ranks, until
from tests.covey.agents import J1, Agent
from tests.plugins.aggregator.loopback import SECRET, AggdThread
from tests.quiet import quiet

EPOCH = (1 << 32) + 1


@pytest.fixture
def aggd(tmp_path: Path) -> Iterator[AggdThread]:
    running = AggdThread(tmp_path)
    yield running
    running.finish()


async def both(agent: Agent, **of_rank_0: str) -> tuple[JobClient, JobClient]:
    return await agent.client(COVEY_RANK="0", **of_rank_0), await agent.client(COVEY_RANK="1")


async def add(clients: tuple[JobClient, ...], name: str = "g", size: int = 50_000) -> None:
    """All clients do one round."""

    def one(client: JobClient) -> Any:
        return client.tensors.push_pull(name, np.full(size, 1.5, np.float32))

    rounds = [asyncio.create_task(asyncio.to_thread(one, each)) for each in clients]
    _, waiting = await asyncio.wait(rounds, timeout=20)
    if waiting:  # their threads must end, or the test never does
        for client in clients:
            client.tensors.close()
    for found in await asyncio.gather(*rounds):
        assert found.tolist() == [1.5 * len(clients)] * size


def shares(client: JobClient, name: str = "g") -> bool:
    return client.tensors._ways[name] is not None


async def end(*clients: JobClient) -> None:
    for client in clients:
        await asyncio.to_thread(client.close)


def serve(agent: Agent, aggd: AggdThread) -> None:
    at = aggd.serve("j1", EPOCH, 2)
    for peer in agent.socket.peers(J1):
        peer.send(AggregatorAt(J1, EPOCH, HostId("h1"), at.address, SECRET))


async def test_ranks_of_one_host_add_without_an_aggregator_and_without_an_agent(agent: Agent) -> None:
    clients = await both(agent)
    await add(clients)
    assert all(map(shares, clients))
    await agent.socket.stop()
    await add(clients, "another")
    assert all(shares(client, "another") for client in clients)
    await end(*clients)


async def test_the_agent_hears_how_large_tensors_are(agent: Agent) -> None:
    """The scheduler learns the skew of a model from this."""
    clients = await both(agent)
    await add(clients, "large", 50_000)
    await add(clients, "small", 1000)
    await until(lambda: TensorsSeen(J1, 1, 200_000, 204_000) in agent.facts)
    await agent.restart()
    await until(lambda: TensorsSeen(J1, 1, 200_000, 204_000) in agent.facts)
    assert [fact for fact in agent.facts if isinstance(fact, TensorsSeen)] == [TensorsSeen(J1, 1, 200_000, 204_000)]
    await end(*clients)


@pytest.mark.parametrize(("largest", "total"), [(-1, 5), (6, 5), (1, 1 << 60)])
async def test_impossible_sizes_end_the_connection(agent: Agent, largest: int, total: int) -> None:
    client = await agent.client(COVEY_RANK="0")
    client._tensors_shared(largest, total)
    await until(lambda: agent.socket.counters["malformed"] >= 1)
    assert not any(isinstance(fact, TensorsSeen) for fact in agent.facts)
    await end(client)


async def test_an_agent_that_begins_anew_leaves_the_memory_to_those_who_have_it(agent: Agent) -> None:
    clients = await both(agent)
    await add(clients)
    await agent.restart()
    await until(lambda: len(agent.socket.peers(J1)) == 2)
    await add(clients, "another")
    assert all(shares(client, "another") for client in clients)
    await end(*clients)


async def test_ranks_that_meet_a_new_agent_before_all_have_the_memory_use_none(
    agent: Agent, aggd: AggdThread, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 got the memory, then the agent began anew; it tells rank 1 that there is none, and then rank 0 too."""
    clients = await both(agent)
    await until(lambda: clients[0]._memory.now == clients[1]._memory.now == 2)
    await end(clients[1])
    await agent.restart()
    await until(lambda: len(agent.socket.peers(J1)) == 1)
    again = clients[0], await agent.client(COVEY_RANK="1")
    serve(agent, aggd)
    await add(again)
    assert not any(map(shares, again))
    assert "the agent was restarted before every rank had the memory" in capfd.readouterr().err
    await end(*again)


async def test_one_rank_that_is_not_to_share_keeps_all_from_it(agent: Agent, aggd: AggdThread) -> None:
    clients = await both(agent, COVEY_SHARED_TENSORS="0")
    serve(agent, aggd)
    await add(clients)
    assert not any(map(shares, clients))
    await end(*clients)


async def test_a_rank_that_cannot_map_it_takes_the_others_along(
    agent: Agent, aggd: AggdThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = await both(agent)
    await until(lambda: all(client._memory.now == 2 for client in clients))
    serve(agent, aggd)
    first = asyncio.create_task(asyncio.to_thread(clients[0].tensors.push_pull, "g", np.ones(9, np.float32)))
    await asyncio.sleep(0.1)
    monkeypatch.setattr(tensor_layout, "check", _refused)
    assert (await asyncio.to_thread(clients[1].tensors.push_pull, "g", np.ones(9, np.float32))).tolist() == [2.0] * 9
    assert (await asyncio.wait_for(first, 10)).tolist() == [2.0] * 9
    assert not any(map(shares, clients))
    await end(*clients)


def _refused(descriptor: int, rank: int, world_size: int) -> None:
    raise ValueError("another version")


async def test_without_memory_of_the_kernel_there_is_an_aggregator(
    agent: Agent, aggd: AggdThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(self: object, ranks: int, first: int) -> None:
        raise OSError(24, "too many open files")

    monkeypatch.setattr(MemfdPages, "make_memory", none)
    clients = await both(agent)
    serve(agent, aggd)
    await add(clients)
    assert not any(map(shares, clients))
    await end(*clients)


async def test_ranks_on_two_hosts_wait_for_no_memory(agent: Agent, aggd: AggdThread) -> None:
    import msgspec

    here = ranks("j1", "x", count=2)
    agent.runner.known = msgspec.structs.replace(here, ranks=here.ranks[:1])
    client = await agent.client(COVEY_RANK="0")
    at = aggd.serve("j1", EPOCH, 2)
    client.tensors.moved(AggregatorAt(J1, EPOCH, HostId("h1"), at.address, SECRET))
    handle = await asyncio.to_thread(client.tensors.push, "g", np.ones(3, np.float32))
    assert not handle.done and not shares(client)
    await end(client)


@pytest.mark.parametrize(("here", "shared"), [((2, 3), True), ((1, 3), False)])
async def test_ranks_of_a_larger_job_share_memory_if_they_are_in_a_row(
    agent: Agent, aggd: AggdThread, here: tuple[int, int], shared: bool
) -> None:
    """The ranks are 2 and 3 of four; the others' part is pushed by a client of its own, one by one."""
    import msgspec

    spec = ranks("j1", "x", count=4)
    placed = tuple(spec.ranks[rank] for rank in here)
    agent.runner.known = msgspec.structs.replace(spec, ranks=placed, world_size=4)
    clients = [await agent.client(COVEY_RANK=str(rank), COVEY_WORLD_SIZE="4") for rank in here]
    at = aggd.serve("j1", EPOCH, 4)
    away = [TensorClient(J1, rank, 4, lambda epoch, why, table: None) for rank in range(4) if rank not in here]
    for tensors in (*(client.tensors for client in clients), *away):
        tensors.moved(AggregatorAt(J1, EPOCH, HostId("h1"), at.address, SECRET))
    rounds = [
        asyncio.to_thread(tensors.push_pull, "g", np.full(5, 1.5, np.float32))
        for tensors in (*(client.tensors for client in clients), *away)
    ]
    for found in await asyncio.wait_for(asyncio.gather(*rounds), 20):
        assert found.tolist() == [6.0] * 5
    assert [shares(client) for client in clients] == [shared, shared]
    for tensors in away:
        tensors.close()
    await end(*clients)


async def test_the_agent_keeps_no_memory_of_jobs_that_are_over(agent: Agent) -> None:
    clients = await both(agent)
    await until(lambda: len(agent.socket._memories._made) == 1)
    (page,) = agent.socket._memories._made.values()
    await end(*clients)
    await until(lambda: not agent.socket.peers(J1))
    assert not agent.socket._memories._made and page.descriptor == -1


async def test_a_second_process_of_a_rank_is_given_the_same_memory(agent: Agent) -> None:
    clients = await both(agent)
    await until(lambda: all(client._memory.now == 2 for client in clients))
    third = await agent.client(COVEY_RANK="1")
    await until(lambda: third._memory.now == 2)
    await add((clients[0], third))
    assert shares(third) and shares(clients[0])
    await end(*clients, third)


async def test_frames_that_a_rank_must_not_send_end_its_connection(agent: Agent) -> None:
    client = await agent.client(COVEY_RANK="1")
    with client._lock:
        client._urgent.append(pack(TensorMemoryHere()))
    client._wakes.wake()
    await until(lambda: agent.socket.counters["malformed"] == 1)
    await until(lambda: agent.socket.counters["joined"] == 2)
    await until(lambda: client.connected)
    assert agent.socket.counters["joined"] == 2, "it joins again, once"
    await end(client)


async def test_a_rank_says_it_once_and_all_are_told_once(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    clients = await both(agent)
    heard: list[str] = []
    monkeypatch.setattr(MemoryOffer, "none", lambda self, why: heard.append(why))
    for _ in range(3):
        clients[1]._cannot_share("no room")
    await until(lambda: len(heard) >= 2)
    await quiet()
    assert heard == ["no room", "no room"]
    await end(*clients)


def test_what_is_said_goes_where_people_read_it() -> None:
    said = io.StringIO()
    client = TensorClient(JobId("j1"), 0, 2, lambda epoch, why, table: None, undecided=True, say=said)
    client.memory_is(None, "rank 1 cannot map it")
    client.close()
    assert said.getvalue() == "covey: rank 0 of j1 uses no memory that ranks share: rank 1 cannot map it\n"


async def test_a_rank_that_an_older_agent_told_of_no_memory_keeps_all_from_it(
    agent: Agent, aggd: AggdThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent is upgraded before rank 1 joins."""
    follows = TensorMemories.follows
    monkeypatch.setattr(TensorMemories, "follows", staticmethod(lambda spec: False))
    first = await agent.client(COVEY_RANK="0")
    await until(lambda: first._memory._decided)
    monkeypatch.setattr(TensorMemories, "follows", staticmethod(follows))
    await agent.restart()
    await until(lambda: len(agent.socket.peers(J1)) == 1)
    clients = first, await agent.client(COVEY_RANK="1")
    serve(agent, aggd)
    await add(clients)
    assert not any(map(shares, clients))
    await end(*clients)


async def test_that_a_rank_cannot_map_it_is_known_also_while_the_agent_is_away(
    agent: Agent, aggd: AggdThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = await both(agent)
    await until(lambda: all(client._memory.now == 2 for client in clients))
    assert clients[0].tensors is not None
    await agent.socket.stop()
    await until(lambda: not any(client.connected for client in clients))
    monkeypatch.setattr(tensor_layout, "check", _refused)
    assert clients[1].tensors is not None
    await agent.restart()
    await until(lambda: len(agent.socket.peers(J1)) == 2)
    serve(agent, aggd)
    await add(clients)
    assert not any(map(shares, clients))
    await end(*clients)


async def test_a_second_process_of_a_rank_after_the_agent_began_anew_is_told(agent: Agent, aggd: AggdThread) -> None:
    clients = await both(agent)
    await until(lambda: all(client._memory.now == 2 for client in clients))
    await agent.restart()
    await until(lambda: len(agent.socket.peers(J1)) == 2)
    third = await agent.client(COVEY_RANK="1")
    serve(agent, aggd)
    await add((clients[0], third))
    assert not shares(third) and not shares(clients[0])
    await end(*clients, third)


async def test_a_name_of_a_client_that_is_closed_is_not_used_again(agent: Agent) -> None:
    clients = await both(agent)
    await add(clients)
    await end(clients[0])
    again = await agent.client(COVEY_RANK="0")
    with pytest.raises(TensorError, match="another client of this rank uses this name"):
        await asyncio.to_thread(again.tensors.push_pull, "g", np.ones(50_000, np.float32))
    await end(again, clients[1])
