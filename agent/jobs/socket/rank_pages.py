"""The pages that one rank and this agent share, from its `AskPages` to the end of its connection."""

from collections.abc import Callable

from covey.kernel.pages import FlagReader, LimitsWriter, ReportReader
from covey.ports.pages import Pages, SharedPage
from covey.wire.frames import pack
from covey.wire.job import AskPages, NeighbourFlag
from plugins.base import RankPages


class HeldPages:
    """The `plugins.base.RankPages` of one rank. `send` takes a frame and the pages that go with it."""

    def __init__(self, pages: Pages, asked: AskPages, send: Callable[[bytes, tuple[SharedPage, ...]], None]) -> None:
        self.asked, self._send = asked, send
        self._limits = pages.make("limits", True)
        self._report = pages.make("report", False)
        self.flag = pages.make("flag", False)
        self.limits, self.report = LimitsWriter(self._limits.view), ReportReader(self._report.view)
        self.mapped = False
        self._shown: HeldPages | None = None

    @property
    def all(self) -> tuple[SharedPage, ...]:
        """The three pages in the order in which `PagesHere` names them."""
        return (self._limits, self._report, self.flag)

    @property
    def busy(self) -> bool | None:
        return FlagReader(self.flag.view).busy() if self.mapped else None

    def seal(self) -> None:
        """Note that the rank has mapped the pages."""
        if not self.mapped:
            self._report.seal()
            self.flag.seal()
            self.mapped = True

    def show(self, neighbour: RankPages | None) -> None:
        assert neighbour is None or isinstance(neighbour, HeldPages)
        if neighbour is self._shown or not self.mapped or (neighbour is not None and not neighbour.mapped):
            return
        self._shown = neighbour
        pages = () if neighbour is None else (neighbour.flag,)
        self._send(pack(NeighbourFlag(neighbour is not None)), pages)

    def close(self) -> None:
        for page in self.all:
            page.close()
