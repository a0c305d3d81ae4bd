"""An owner asks the next one whether it has memory before ranks go there, over a stream that is played."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from covey.ports.env import Env
from covey.tensors.numbers.tensor_wire import HEADER_BYTES, OWNER, Header, TensorOp, frame, parse
from covey.wire import handshake
from covey.wire.sums import NextOwner
from plugins.aggregator.datapath.blocks.state_carrier import ASKS_S, HERE_S, StateCarrier
from tests.virtual_time import play

BEGAN_S = 1000.0
"""The time at which the clock of a test begins."""
JOB, EPOCH, SECRET = 77, (1 << 32) + 1, b"sixteen bytes !!"
SIZE = (150 << 20) + 1


class PlayedOwner:
    """The next owner, and the stream to it."""

    peer, uid = "h2", -1

    def __init__(self, ready_s: float) -> None:
        self.ready_s, self.epoch = ready_s, EPOCH
        self.heard: list[tuple[float, Header]] = []
        self._answers = bytearray()
        self._hello = b""

    async def connect(self, address: str) -> "PlayedOwner":
        return self

    async def write(self, *parts: bytes | bytearray | memoryview) -> None:
        said = b"".join(parts)
        header = parse(said[:HEADER_BYTES])
        self.heard.append((_now_s(), header))
        match header.op:
            case TensorOp.HELLO:
                self._hello = said
                self._say(TensorOp.CHALLENGE, handshake.challenge(SECRET, said, bytes(16)))
            case TensorOp.PROOF:
                assert said[HEADER_BYTES:] == handshake.proof_of_client(SECRET, self._hello, bytes(16))
                self._say(TensorOp.WELCOME)
            case TensorOp.PING:
                self._say(TensorOp.PONG, round=int(_now_s() >= self.ready_s))
            case _:
                pass

    def _say(self, op: TensorOp, payload: bytes = b"", round: int = 0) -> None:
        head, body = frame(op, JOB, self.epoch, rank=OWNER, round=round, payload=payload)
        self._answers += head + bytes(body)

    async def read_into(self, view: memoryview) -> None:
        if len(self._answers) < view.nbytes:
            await asyncio.get_running_loop().create_future()  # for ever
        view[:], self._answers = self._answers[: view.nbytes], self._answers[view.nbytes :]

    def close(self) -> None: ...

    def pings(self) -> list[float]:
        assert all(header.round == (SIZE >> 20) + 1 for _, header in self.heard if header.op is TensorOp.PING)
        return [at_s for at_s, header in self.heard if header.op is TensorOp.PING]


class Bringing:
    """A carrier that brings a job of `SIZE` bytes to this owner; the Blocks are ready 10 s after it began."""

    def __init__(self, to: Any) -> None:
        self.ready_s: list[float] = []
        self.said: dict[str, Any] = {}
        self._to = to

    async def run(self) -> "Bringing":
        log = SimpleNamespace(info=lambda event, **said: self.said.update(said))
        env = SimpleNamespace(clock=SimpleNamespace(now_s=_now_s), log=log, bytes=self._to, entropy=bytes)
        ready = lambda: self.ready_s.append(_now_s())  # noqa: E731
        carrier = StateCarrier(cast(Env, env), JOB, EPOCH, NextOwner("h2:1", SECRET), SIZE, ready)
        task = asyncio.create_task(carrier.run())
        await asyncio.sleep(10.0)
        carrier.begin({})
        await task
        return self


def _now_s() -> float:
    return asyncio.get_running_loop().time() - BEGAN_S


def test_ranks_stay_until_the_next_owner_says_that_it_has_memory() -> None:
    """The next owner is told how much memory it needs."""
    to = PlayedOwner(ready_s=5.0)
    found = play(Bringing(to).run())
    assert 5.0 <= found.ready_s[0] < 5.0 + 2 * ASKS_S and found.said["whole"]
    assert len([at_s for at_s in to.pings() if at_s > 5.5]) == pytest.approx(4.5 / HERE_S, abs=1)


def test_an_answer_under_another_epoch_is_none() -> None:
    to = PlayedOwner(ready_s=0.0)
    to.epoch = EPOCH - 1
    found = play(Bringing(to).run())
    assert not found.said["whole"] and f"about epoch {EPOCH - 1}" in found.said["why"] and not to.pings()


def test_nobody_waits_for_one_that_is_not_there() -> None:
    async def connect(address: str) -> None:
        raise ConnectionRefusedError("refused the connection")

    found = play(Bringing(SimpleNamespace(connect=connect)).run())
    assert len(found.ready_s) == 1 and found.ready_s[0] < 0.1 and not found.said["whole"]
