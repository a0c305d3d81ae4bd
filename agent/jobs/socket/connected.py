"""A process that has joined on jobs.sock, as the agent holds it."""

from agent.jobs.socket.rank_pages import HeldPages
from covey.ports import ByteStream, Pages, SharedPage
from covey.wire.frames import pack
from covey.wire.job import AskPages, Frame, Join, PagesHere
from plugins.base import Outbox

KERNEL_MAX = 64


class ConnectedProcess:
    """`plugins.base.JobPeer`."""

    def __init__(self, join: Join, uid: int, stream: ByteStream) -> None:
        self.pid, self.job, self.uid = join.pid, join.job, uid
        self.of_job = join.job
        self.rank, self.epoch = join.rank, join.epoch
        self.kernel = plain(join.kernel, KERNEL_MAX)
        self.hooked: tuple[str, str] | None = None
        """To what, and why not to more, as this process said."""
        self.pages: HeldPages | None = None
        self.tensor_memory = join.tensor_memory if join.tensor_memory in (0, 1, 2) else 0
        """As in `Join`; 2 also once it was sent."""
        self.told_no_memory = False
        self.tables: set[int] = set()
        """In which it has Blocks (`covey.tensors.numbers.blocks`), other than table 0."""
        self._stream = stream
        self.outbox = Outbox()

    @property
    def gone(self) -> bool:
        """Its connection ended: nobody hears what is sent."""
        return self.outbox.over

    def send(self, frame: Frame) -> None:
        """Never waits; a process too far behind is cut off."""
        self._put(pack(frame))

    def put(self, frame: Frame, pages: tuple[SharedPage, ...]) -> None:
        """`send`, with descriptors."""
        self._put(pack(frame), pages)

    def _put(self, frame: bytes, pages: tuple[SharedPage, ...] = ()) -> None:
        if not self.outbox.put(frame, pages):
            self._stream.close()

    def make_pages(self, port: Pages, asked: AskPages) -> None:
        """It can go by limits; it is given its pages once. OSError when there is no memory for them."""
        if self.pages is None:
            self.pages = HeldPages(port, asked, self._put)
            self._put(pack(PagesHere()), self.pages.all)


def plain(text: str, length: int) -> str:
    """What people may be shown of it."""
    return "".join(filter(str.isprintable, text[:length]))
