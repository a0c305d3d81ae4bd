"""Both ends of the unix socket between an agent and one of its byte processes (`control` has the frames)."""

import asyncio
from collections.abc import Awaitable, Callable

from covey.ports.env import Env
from covey.ports.streams import ByteStream, Listener
from covey.wire.frames import FrameError, pack, read_frame
from covey.wire.handshake import is_secret
from plugins.memory.datapath.wire.control import (
    Answer,
    ControlFrame,
    ControlHello,
    No,
    Question,
    Told,
    answer_decoder,
    asked_decoder,
)

QUESTIONS_MAX = 1024
"""Most questions of one agent that may be under way in a process; more end the connection."""


class ControlServer:
    """The process's end of the control socket. `answer` is called with every question; ValueError or OSError from it
    becomes `No`."""

    def __init__(self, env: Env, secret: bytes, answer: Callable[[Question], Awaitable[Answer]]) -> None:
        self._env, self._secret, self._answer = env, secret, answer
        self._agents: list[ByteStream] = []
        self._listener: Listener | None = None

    async def open(self, name: str) -> None:
        """Listen on `NAME.sock`. OSError when another process does: then that one owns what this one would."""
        self._listener = await self._env.bytes.listen(f"unix:{self._env.run_dir}/{name}.sock", self._serve)

    async def close(self) -> None:
        if self._listener is not None:
            await self._listener.close()

    def tell(self, frame: Told) -> None:
        for stream in self._agents:
            self._env.spawn("tell agent", self._send(stream, frame))

    async def _serve(self, stream: ByteStream) -> None:
        first = await read_frame(stream, asked_decoder)
        if not isinstance(first, ControlHello) or not is_secret(first.secret, self._secret):
            self._env.log.warning("refused a control connection", peer=stream.peer)
            return
        self._agents.append(stream)
        under_way = 0

        async def reply(question: Question) -> None:
            nonlocal under_way
            try:
                answer = await self._answer(question)
            except (ValueError, OSError) as error:
                answer = No(question.id, str(error)[:400])
            finally:
                under_way -= 1
            await self._send(stream, answer)

        try:
            while True:
                question = await read_frame(stream, asked_decoder)
                if isinstance(question, ControlHello) or under_way >= QUESTIONS_MAX:
                    raise FrameError("out of turn")
                under_way += 1
                self._env.spawn("answer agent", reply(question))
        finally:
            self._agents.remove(stream)

    async def _send(self, stream: ByteStream, frame: ControlFrame) -> None:
        try:
            await stream.write(pack(frame))
        except ValueError as error:  # longer than a frame may be: the agent counts it as no answer
            self._env.log.error("an answer is too long", frame=type(frame).__name__, why=str(error))
        except ConnectionError:
            stream.close()  # the agent is gone, or will ask again


class ControlClient:
    """The agent's end of one connection. `told` gets frames that the process sends by itself; `ended` is set when it is
    over."""

    def __init__(self, env: Env, stream: ByteStream, told: Callable[[Told], None]) -> None:
        self._env, self._stream, self._told = env, stream, told
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._last_id = 0
        self.ended = asyncio.Event()

    @classmethod
    async def connect(cls, env: Env, name: str, secret: bytes, told: Callable[[Told], None]) -> "ControlClient":
        """Connect to the process. ConnectionError when none listens on `NAME.sock`."""
        stream = await env.bytes.connect(f"unix:{env.run_dir}/{name}.sock")
        client = cls(env, stream, told)
        await stream.write(pack(ControlHello(secret)))
        env.spawn(f"control {name}", client._read())
        return client

    @property
    def next_id(self) -> int:
        """Id for the next question."""
        self._last_id += 1
        return self._last_id

    async def ask(self, question: Question, timeout_s: float) -> Answer:
        """Ask a question and return the answer. ConnectionError when the process went away, TimeoutError when it is
        silent."""
        if self.ended.is_set():
            raise ConnectionResetError("the process is gone")
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[question.id] = answer
        try:
            async with asyncio.timeout(timeout_s):
                await self._stream.write(pack(question))
                return await answer
        finally:
            self._waiting.pop(question.id, None)

    def close(self) -> None:
        self._stream.close()

    async def _read(self) -> None:
        try:
            while True:
                frame = await read_frame(self._stream, answer_decoder)
                if isinstance(frame, Told):
                    self._told(frame)
                    continue
                waiting = self._waiting.get(frame.id)
                if waiting is not None and not waiting.done():
                    waiting.set_result(frame)
        except ConnectionError as error:
            self._end(error)
        finally:
            self._stream.close()
            self._end(ConnectionResetError("closed here"))

    def _end(self, error: ConnectionError) -> None:
        self.ended.set()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ConnectionResetError(f"the process went away: {error}"))
