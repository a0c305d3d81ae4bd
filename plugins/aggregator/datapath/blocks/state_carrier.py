"""Brings the Blocks of a job that was handed over to its next owner (`block_copies`): the earlier owner's connection.

It connects before ranks are sent away, so that the next owner knows that it is brought what it would else ask ranks
for, and says every second that it is there. Before, it asks whether there is memory for the job: ranks stay until then,
since they would wait for it there.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from covey.ports.env import Env
from covey.ports.streams import ByteStream
from covey.tensors.numbers.tensor_wire import (
    HEADER_BYTES,
    OWNER,
    Frame,
    Header,
    Payload,
    TensorOp,
    TensorWireError,
    frame,
    parse,
    verify,
)
from covey.tensors.owner.sums import TensorSum
from covey.wire import handshake
from covey.wire.handshake import HANDSHAKE_S, NONCE_BYTES
from covey.wire.sums import NextOwner
from plugins.aggregator.datapath.blocks.block_copies import MEGABYTE, OutgoingCopies

COPY_SILENT_S = 3.0
"""Seconds after which either end gives up when the other one says, or takes, nothing; ranks have the state too."""
TOGETHER_BYTES = 1 << 16
"""Bytes of small frames that are written together."""
HERE_S, ASKS_S = 1.0, 0.1
"""Seconds between two messages that it is there, and between two questions until the next owner is ready."""
READY_BYTES_S = 50 << 20
"""Bytes per second at which the next owner prepares memory at least."""


class StateCarrier:
    """Carries the state of one job. Runs as a task until everything was brought, or cannot be."""

    def __init__(
        self,
        env: Env,
        job: int,
        epoch: int,
        to: NextOwner,
        state_bytes: int,
        ready: Callable[[], None],
    ) -> None:
        """`job`: number of the job in headers; `epoch`: the epoch of the next owner. `ready` is called once the next
        owner has memory for `state_bytes` bytes of tensors, or when it will never say so."""
        self._env, self._job, self._epoch, self._to = env, job, epoch, to
        self._state_bytes, self._ready = state_bytes, ready
        self._tensors: Mapping[int, TensorSum] = {}
        self._begun = asyncio.Event()
        self.over = asyncio.Event()
        """Set once nothing of the job is read any more."""

    def begin(self, tensors: Mapping[int, TensorSum]) -> None:
        """Bring these tensors, which do not change any more; an empty mapping: there is nothing to bring."""
        self._tensors = tensors
        self._begun.set()

    async def run(self) -> None:
        began_s, stream, copies = self._env.clock.now_s(), None, None
        why = "all of its state was sent"
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                stream = await self._env.bytes.connect(self._to.address)
                await self._enter(stream)
            await self._wait(stream)
            began_s, copies = self._env.clock.now_s(), OutgoingCopies(self._job, self._epoch, self._tensors)
            await self._bring(stream, copies)
        except (OSError, TimeoutError) as error:
            why = f"the next owner {str(error) or type(error).__name__}; it asks ranks"
        finally:
            if stream is not None:
                stream.close()
            self._ready()
            self.over.set()
        took_s = self._env.clock.now_s() - began_s
        figures = (copies.copied, copies.refused, copies.sent_bytes) if copies is not None else (0, 0, 0)
        said = dict(zip(("copied", "refused", "sent_bytes"), figures, strict=True))
        whole = copies is not None and copies.is_over
        self._env.log.info("state brought", to=self._to.address, why=why, whole=whole, took_s=took_s, **said)

    async def _enter(self, stream: ByteStream) -> None:
        """Connect: both ends prove that they know the secret of the next owner's assignment."""
        head, nonce = self._frame(TensorOp.HELLO, self._env.entropy(NONCE_BYTES))
        hello, secret = bytes(head) + bytes(nonce), self._to.secret
        await stream.write(hello)
        _, found = await self._hear(stream, TensorOp.CHALLENGE)
        challenge = handshake.parse_challenge(found)
        if not handshake.is_proof(challenge.proof, handshake.proof_of_server(secret, hello, challenge.nonce)):
            raise TensorWireError("does not know the secret of its assignment")
        await stream.write(*self._frame(TensorOp.PROOF, handshake.proof_of_client(secret, hello, challenge.nonce)))
        await self._hear(stream, TensorOp.WELCOME)

    async def _wait(self, stream: ByteStream) -> None:
        """Wait until there is something to bring."""
        pause_s = ASKS_S
        while not self._begun.is_set():
            await self._say(stream, self._frame(TensorOp.PING, round=-(-self._state_bytes >> MEGABYTE)))
            async with asyncio.timeout(COPY_SILENT_S):
                pong, _ = await self._hear(stream, TensorOp.PONG)
            if pong.round:
                self._ready()
                pause_s = HERE_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._begun.wait()

    async def _bring(self, stream: ByteStream, copies: OutgoingCopies) -> None:
        first = bytearray()
        for head, payload in copies.announced():
            first += head + payload
            if len(first) >= TOGETHER_BYTES:
                await self._say(stream, (bytes(first), b""))
                first.clear()
        await self._say(stream, (bytes(first), b""))
        while not copies.is_over:
            state = copies.next()
            if state is None:
                async with asyncio.timeout(COPY_SILENT_S):
                    header, _ = await self._hear(stream)
                copies.heard(header)
                continue
            for said in state:
                await self._say(stream, said)

    async def _say(self, stream: ByteStream, said: Frame) -> None:
        async with asyncio.timeout(COPY_SILENT_S):
            await stream.write(*said)

    async def _hear(self, stream: ByteStream, op: TensorOp | None = None) -> tuple[Header, bytes]:
        """Read one frame; `op`: the operation that it must have."""
        head = bytearray(HEADER_BYTES)
        await stream.read_into(memoryview(head))
        header = parse(head)
        payload = bytearray(header.length)
        await stream.read_into(memoryview(payload))
        verify(head, payload)
        if (header.job, header.epoch) != (self._job, self._epoch) or header.op is not (op or header.op):
            raise TensorWireError(f"says {header.op.name}, about epoch {header.epoch}")
        return header, bytes(payload)

    def _frame(self, op: TensorOp, payload: Payload = b"", round: int = 0) -> Frame:
        return frame(op, self._job, self._epoch, rank=OWNER, round=round, payload=payload)
