"""A process that has joined on jobs.sock, as the agent holds it."""

import msgspec

from agent.jobs.socket.rank_pages import HeldPages
from covey.ports.pages import Pages, SharedPage
from covey.ports.streams import ByteStream
from covey.wire.frames import FrameError, pack
from covey.wire.job import SAVED_PATH_MAX, AskPages, Frame, Join, MemoryHeld, PagesHere, SaveIs
from plugins.base import Outbox
from plugins.facts import SavedAt

KERNEL_MAX = 64
SAVE_WORDS_MAX = 400


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
        self.saves, self.save = join.saves, SaveIs(0, "refused")
        """Whether it answers `AskSave`, and what it answered last."""
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

    def save_is(self, frame: SaveIs) -> None:
        """Note how far a save is that a person asked for. FrameError for what nobody asked, or no step."""
        if not self.saves or self.job is None or not 0 <= frame.step < 1 << 62:
            raise FrameError("SaveIs from outside a job, or of an impossible step")
        said = {"path": plain(frame.path, SAVED_PATH_MAX)}
        said |= {"why": plain(frame.why, SAVE_WORDS_MAX), "next": plain(frame.next, SAVE_WORDS_MAX)}
        self.save = msgspec.structs.replace(frame, **said)

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
