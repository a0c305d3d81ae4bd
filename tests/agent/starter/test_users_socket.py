"""The socket for ranks of other users: who may join there, and as what. Only root can be several users."""

import asyncio
import contextlib
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest

from agent.jobs.socket import jobs_socket as jobs_module
from agent.jobs.whose import RANKS_SOCKET
from covey.core.ids import JobId
from covey.ports.streams import ByteStream
from covey.wire import frames
from covey.wire.frames import pack
from covey.wire.job import Frame, Join, Joined, Refusal, VolumeWanted, decoder
from tests.agent.here import until
from tests.agent.jobs.test_jobs_socket import FOUR, GOOD, J1, Door, door
from tests.agent.starter.starter_here import ALICE, BOB
from tests.covey.test_volume_users import as_user

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
OF_ALICE = msgspec.structs.replace(FOUR, user="alice", uid=ALICE)


@pytest.fixture
def short() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="covey-", ignore_cleanup_errors=True) as directory:
        os.chmod(directory, 0o755)
        yield directory


@pytest.fixture
async def opened(short: str) -> AsyncIterator[Door]:
    """A job of alice runs here."""
    async with door(short) as found:
        found.runner.known = OF_ALICE
        await found.socket.let_users_in()
        yield found


async def told(found: Door, uid: int, *said: Frame, name: str = RANKS_SOCKET, of: type[Frame] | None = None) -> str:
    """The class of the first answer (of that class) that a process of that user gets, and why it was refused; empty: it
    gets none."""

    def asks() -> object:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(10)
            client.connect(f"{found.host.env.run_dir}/{name}")
            client.sendall(b"".join(map(pack, said)))
            data = bytearray()
            while part := client.recv(4096):
                data += part
                for answer in frames.whole(data, decoder):
                    if of is not None and not isinstance(answer, of):
                        continue
                    return f"{type(answer).__name__} {answer.why if isinstance(answer, Refusal) else ''}".strip()
            return ""

    return await asyncio.to_thread(as_user, uid, asks)


async def test_a_rank_of_the_jobs_user_joins(opened: Door) -> None:
    assert await told(opened, ALICE, GOOD) == Joined.__name__


async def test_the_socket_of_the_agents_own_jobs_stays_closed(opened: Door) -> None:
    assert await told(opened, ALICE, GOOD, name="jobs.sock") == "EACCES"


async def test_another_user_is_not_even_answered(opened: Door) -> None:
    assert await told(opened, BOB, GOOD) in ("", "ECONNRESET", "EPIPE")
    assert opened.socket.counters["strangers"] == 1


async def test_a_users_token_and_number_are_of_one_job(opened: Door) -> None:
    """Bob has ranks here too, and learned the token of alice's."""
    opened.runner.other_uids = lambda: {ALICE, BOB}  # type: ignore[method-assign]
    said = await told(opened, BOB, GOOD)
    assert said == f"Refusal it runs as uid {BOB}, and the job as alice (uid {ALICE})"
    assert "COVEY_TOKEN is wrong" in await told(opened, ALICE, msgspec.structs.replace(GOOD, token="guess"))


async def test_root_does_not_speak_for_a_users_rank(opened: Door) -> None:
    stream, answer = await opened.say(GOOD)
    assert isinstance(answer, Refusal) and "it runs as uid 0" in answer.why
    stream.close()


async def test_a_process_that_is_no_rank_asks_for_its_job_alone(opened: Door) -> None:
    """A child of a rank opens a volume for its job, by the job's token, and as the job's user."""

    def wants(job: JobId | None, token: str = "secret") -> VolumeWanted:
        return VolumeWanted("v", 1 << 20, job=job, epoch=3, token=token)

    assert "has not said of which it is" in await told(opened, ALICE, Join(pid=5), wants(None), of=Refusal)
    assert "COVEY_TOKEN is wrong" in await told(opened, ALICE, Join(pid=5), wants(J1, "guess"), of=Refusal)
    assert opened.heard == []
    opened.answer = lambda peer, frame: peer.send(Refusal("heard", "heard", "heard"))
    assert await told(opened, ALICE, Join(pid=5), wants(J1), of=Refusal) == "Refusal heard"
    ((peer, _),) = opened.heard
    assert (peer.of_job, peer.uid) == (J1, ALICE)


async def test_a_job_of_the_agents_own_is_not_joined_there(opened: Door) -> None:
    opened.runner.known = FOUR
    opened.runner.other_uids = lambda: {ALICE}  # type: ignore[method-assign]
    assert "that job is the agent's own" in await told(opened, ALICE, GOOD)


async def test_a_volume_for_a_job_is_its_users_to_open(opened: Door) -> None:
    """A tool of the agent's user speaks for the job by its token."""
    stream, answer = await opened.say(Join(pid=5), VolumeWanted("v", 1 << 20, job=J1, epoch=3, token="secret"))
    assert isinstance(answer, Joined)
    found = await frames.read_frame(stream, decoder)
    assert isinstance(found, Refusal) and "it runs as uid 0" in found.why and opened.heard == []
    stream.close()


async def test_the_connections_of_one_user_are_bounded(opened: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "OF_USER_MAX", 0)
    assert await told(opened, ALICE, GOOD) in ("", "ECONNRESET", "EPIPE")
    monkeypatch.setattr(jobs_module, "OF_USER_MAX", 1)
    assert await told(opened, ALICE, GOOD) == "Joined"
    await until(lambda: not opened.socket.peers(J1))
    assert await told(opened, ALICE, GOOD) == "Joined", "the first one has closed"


async def test_the_socket_opens_once_and_closes_with_the_other(opened: Door) -> None:
    await opened.socket.let_users_in()
    await opened.socket.stop()
    stream: ByteStream | None = None
    with contextlib.suppress(ConnectionError):
        stream = await opened.host.env.bytes.connect(f"unix:{opened.host.env.run_dir}/{RANKS_SOCKET}")
    assert stream is None
