"""The client's side of the pages shared with the agent: descriptors that came over jobs.sock become pages, and their
user is told. Runs in the client's own thread."""

import contextlib
import mmap
import os
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from covey.kernel import memfd
from covey.wire.frames import FrameError
from covey.wire.job import AskPages, Frame, NeighbourFlag, PagesHere, PagesMapped


class PageUser(Protocol):
    """The code that obeys the limits (`covey.hooks`). Called by the client's thread; a page that it is given stays
    mapped as long as it holds it, also when the agent is gone."""

    def now(self) -> AskPages:
        """The limits that it obeys now."""

    def pages_came(self, limits: mmap.mmap, report: mmap.mmap, flag: mmap.mmap) -> None:
        """Pages from a new connection, which replace the old ones; the user may write to the last two."""

    def neighbour_is(self, flag: mmap.mmap | None) -> None:
        """The flag that says when the device is idle: a neighbour's page; None when there is no neighbour."""

    def pages_lost(self) -> None:
        """The agent is away: limits end with their lease."""


class PageLink:
    """The pages of one client. `user` is set once."""

    def __init__(self) -> None:
        self.user: PageUser | None = None
        self._descriptors: deque[int] = deque()

    def hello(self) -> AskPages | None:
        return None if self.user is None else self.user.now()

    def received(self, descriptors: Sequence[int]) -> None:
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        self._descriptors.extend(descriptors)

    def heard(self, frame: Frame) -> PagesMapped | None:
        """The answer to a frame, if there is one. FrameError when the descriptors do not fit what the agent says."""
        if isinstance(frame, PagesHere):
            return self._came()
        if isinstance(frame, NeighbourFlag) and self.user is not None:
            self.user.neighbour_is(self._take(False) if frame.there else None)
        return None

    def _came(self) -> PagesMapped | None:
        limits, report, flag = self._take(False), self._take(True), self._take(True)
        if self.user is None:
            return None
        self.user.pages_came(limits, report, flag)
        return PagesMapped()

    def take(self) -> int:
        """A descriptor that came with a frame. FrameError when there is none."""
        if not self._descriptors:
            raise FrameError("the agent named a page and sent no descriptor")
        return self._descriptors.popleft()

    def writable(self) -> mmap.mmap:
        """The page that came with a frame, to write. FrameError when there is none, or it is no such page."""
        return self._take(True)

    def _take(self, writable: bool) -> mmap.mmap:
        descriptor = self.take()
        try:
            return memfd.writable(descriptor) if writable else memfd.readable(descriptor)
        except (ValueError, OSError) as error:
            raise FrameError(f"a page of the agent's cannot be used: {error}") from error
        finally:
            os.close(descriptor)

    def lost(self) -> None:
        """The connection ended: close descriptors that were not used, and tell the user."""
        while self._descriptors:
            with contextlib.suppress(OSError):
                os.close(self._descriptors.popleft())
        if self.user is not None:
            self.user.pages_lost()
