"""A process that has joined on jobs.sock, as the agent holds it."""

from agent.jobs.socket.rank_pages import HeldPages
from covey.ports.pages import Pages, SharedPage
from covey.ports.streams import ByteStream
from covey.wire.frames import pack
from covey.wire.job import AskPages, Frame, Join, MemoryHeld, PagesHere
from plugins.base import Outbox
from plugins.facts import SavedAt

KERNEL_MAX = 64


class ConnectedProcess:
    """The `plugins.base.JobPeer` of one connected process."""

    def __init__(self, join: Join, uid: int, stream: ByteStream, is_users: bool = False) -> None:
        """`is_users`: it came where processes of other users' jobs do."""
        self.pid, self.job, self.uid, self.is_users = join.pid, join.job, uid, is_users
        self.of_job = join.job
        self.rank, self.epoch = join.rank, join.epoch
        self.kernel = plain(join.kernel, KERNEL_MAX)
        self.hooked: tuple[str, str] | None = None
        """What this process said it hooks, and why not to more."""
        self.saved: SavedAt | None = None
        """The newest checkpoint that this process said it wrote."""
        self.pages: HeldPages | None = None
        self.tensor_memory = join.tensor_memory if join.tensor_memory in (0, 1, 2) else 0
        """How the rank shares tensor memory, as in `Join`; 2 also once the memory was sent."""
        self.told_no_memory = False
        self.tables: set[int] = set()
        """The tables in which it has Blocks (`covey.tensors.numbers.blocks`)."""
        self.may_own: bool | None = None
        self.leaves = False
        """Whether it has said that it pushes nothing more."""
        self.memory: MemoryHeld | None = None
        """What this process said last of its memory."""
        self._stream = stream
        self.outbox = Outbox()

    @property
    def gone(self) -> bool:
        """Whether its connection ended, so that what is sent is lost."""
        return self.outbox.over

    def send(self, frame: Frame) -> None:
        """Send a frame. It never waits; a process too far behind is cut off."""
        self._put(pack(frame))

    def hand(self, frame: Frame, page: SharedPage) -> None:
        """Send a frame with the descriptor of a page."""
        self.put(frame, (page,))

    def put(self, frame: Frame, pages: tuple[SharedPage, ...]) -> None:
        """Send a frame with the descriptors of pages."""
        self._put(pack(frame), pages)

    def _put(self, frame: bytes, pages: tuple[SharedPage, ...] = ()) -> None:
        if not self.outbox.put(frame, pages):
            self._stream.close()

    def left(self) -> None:
        """Note that its connection ended."""
        self.outbox.over = True

    def make_pages(self, port: Pages, asked: AskPages) -> None:
        """Make the pages of a process that can go by limits; it is given them once. OSError when there is no memory for
        them."""
        if self.pages is None:
            self.pages = HeldPages(port, asked, self._put)
            self._put(pack(PagesHere()), self.pages.all)


def plain(text: str, length: int) -> str:
    """The part of a text that people may be shown."""
    return "".join(filter(str.isprintable, text[:length]))
