"""A volume offered as a block device: unix sockets that NBD clients of this host connect to."""

import asyncio

from covey.ports.env import Env
from covey.ports.streams import ByteStream, Listener
from plugins.memory.datapath.doors.nbd_front import NbdFront, ServedClients
from plugins.memory.datapath.doors.nbd_pages import NbdPages
from plugins.memory.datapath.volumes.members.mirror_volume import AnyVolume

CLIENTS_MAX = 64
"""Most connections of one export; further ones are closed at once. A client opens a handful."""
EXPORTS_MAX = 16


class Exports:
    """The block devices (NBD exports) of one volume, by the path of their unix socket."""

    def __init__(self, env: Env, volume: AnyVolume) -> None:
        self._env, self._volume = env, volume
        self._pages = NbdPages(env, volume)
        self._open: dict[str, Listener] = {}
        self._changing = asyncio.Lock()
        self.clients = ServedClients()

    async def open(self, path: str) -> None:
        """Start to serve the volume at this path. Idempotent. ValueError or OSError says why not."""
        async with self._changing:
            if path in self._open:
                return
            if len(self._open) >= EXPORTS_MAX:
                raise ValueError(
                    f"{self._volume.shape.name} is exported at {EXPORTS_MAX} sockets already, which is the limit"
                )
            self._open[path] = await self._env.bytes.listen(f"unix:{path}", self._serve, bulk=True)
            self._env.log.info("volume exported", path=path)

    async def close(self, path: str) -> None:
        """Stop serving the volume at this path, and end its connections. Idempotent."""
        async with self._changing:
            listener = self._open.pop(path, None)
            if listener is not None:
                await listener.close()

    async def close_all(self) -> None:
        for path in list(self._open):
            await self.close(path)

    async def _serve(self, stream: ByteStream) -> None:
        if self.clients.connections >= CLIENTS_MAX:
            self.clients.refused += 1
            return
        self.clients.connections += 1
        try:
            front = NbdFront(self._env, self._volume, stream, self._pages, self.clients)
            front.begin()
            await front.over
        finally:
            self.clients.connections -= 1
