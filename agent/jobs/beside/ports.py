"""Connections to ports of this host where a job's user listens, such as a notebook's, as streams that go in turns."""

import asyncio
import contextlib
import socket
from pathlib import Path

from agent.jobs.beside.conversation import Conversation
from agent.jobs.beside.messages import OUT
from covey.core.errors import Refused
from covey.ports.clock import Clock
from covey.ports.env import Env

READ_BYTES = 64 << 10
CONNECT_S = 3.0
LOST_S = 30.0
"""Seconds without a turn after which a connection is closed."""
TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
LISTENS = "0A"


def listeners(port: int, tables: tuple[Path, ...] = TABLES) -> list[tuple[str, int]]:
    """The addresses at which somebody listens on this port here, and the user number of each, from the kernel."""
    found: list[tuple[str, int]] = []
    for table in tables:
        with contextlib.suppress(OSError):
            for line in table.read_text().splitlines()[1:]:
                words = line.split()
                address, _, number = words[1].partition(":")
                if words[3] == LISTENS and int(number, 16) == port:
                    found.append((_address(address), int(words[7])))
    return found


def _address(text: str) -> str:
    """The address where a listener is reached on its own host: words of 32 bits, each in the order of this host."""
    words = [int(text[at : at + 8], 16).to_bytes(4, "little") for at in range(0, len(text), 8)]
    packed = b"".join(words)
    if not any(packed):
        return "127.0.0.1" if len(packed) == 4 else "::1"
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)


async def connected(env: Env, port: int, uid: int) -> "PortStream":
    """A connection to this port, where that user listens. Refused says why there is none: at ports of others nobody is
    let in."""
    what, step = f"port {port} of {env.host} cannot be reached", "agentctl logs JOB    (which port it says)"
    found = listeners(port)
    if not found:
        raise Refused(75, what, "nothing listens there (yet)", step)
    own = [address for address, owner in found if owner == uid]
    if not own:
        raise Refused(4, what, "another user listens there", step)
    try:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(own[0], port)
    except (OSError, TimeoutError) as error:
        raise Refused(75, what, str(error) or "it does not answer", step) from error
    stream = PortStream(env.clock, reader, writer)
    env.spawn(f"port {port}: out", stream.read())
    env.spawn(f"port {port}: in", stream.write())
    return stream


class PortStream:
    """One connection."""

    def __init__(self, clock: Clock, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.conversation = Conversation(clock, self)
        self._reader, self._writer = reader, writer
        self._room, self._typed = asyncio.Event(), asyncio.Event()

    @property
    def is_over(self) -> bool:
        """Whether it has ended and that was told, or nobody takes turns any more."""
        talk = self.conversation
        return (talk.told and not talk.is_attended) or talk.away_s > LOST_S

    def close(self) -> None:
        self.conversation.ends(0)
        self._room.set()
        self._typed.set()
        self._writer.close()

    async def read(self) -> None:
        """Bring what comes from the port, as far as there is room."""
        talk = self.conversation
        with contextlib.suppress(OSError):
            while talk.code is None:
                if not talk.output.room:
                    self._room.clear()
                    await self._room.wait()
                elif data := await self._reader.read(min(READ_BYTES, talk.output.room)):
                    talk.add(OUT, data)
                else:
                    break
        talk.ends(0)
        self._typed.set()

    async def write(self) -> None:
        """Bring what was sent to the port."""
        talk = self.conversation
        with contextlib.suppress(OSError):
            while talk.code is None:
                self._typed.clear()
                if data := talk.input.held():
                    self._writer.write(data)
                    await self._writer.drain()
                    talk.input.written(len(data))
                    talk.wake()
                elif talk.input.ended:
                    self._writer.write_eof()
                    return
                else:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(LOST_S):
                            await self._typed.wait()
                    if talk.away_s > LOST_S:
                        break
        self.close()

    def has_input(self) -> None:
        self._typed.set()

    def has_room(self) -> None:
        if self.conversation.output.room:
            self._room.set()

    def resize(self, rows: int, columns: int) -> None:
        """A connection has no size."""

    def interrupt(self) -> None:
        self.close()

    def leave(self) -> None:
        self.close()
