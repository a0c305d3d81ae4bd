"""The client's side of the shared pages: descriptors that came over jobs.sock become pages, and whoever goes by them is
told. In the client's own thread."""

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
    """Who goes by the limits (`covey.hooks`). Called by the client's thread; what it is given stays mapped for as long
    as it holds it, also when the agent is gone."""

    def now(self) -> AskPages:
        """By what it goes now."""

    def pages_came(self, limits: mmap.mmap, report: mmap.mmap, flag: mmap.mmap) -> None:
        """Of a new connection; those of before are of no use any more. It may write the last two."""

    def neighbour_is(self, flag: mmap.mmap | None) -> None:
        """Whose flag says when the device is idle; None: nobody's."""

    def pages_lost(self) -> None:
        """The agent is away: limits run out with their lease."""


class PageLink:
    """What one client holds of it. `user` is set once."""

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
        """What is to be answered. FrameError when the descriptors do not fit what the agent says."""
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

    def _take(self, writable: bool) -> mmap.mmap:
        descriptor = self.take()
        try:
            return memfd.writable(descriptor) if writable else memfd.readable(descriptor)
        except (ValueError, OSError) as error:
            raise FrameError(f"a page of the agent's cannot be used: {error}") from error
        finally:
            os.close(descriptor)

    def lost(self) -> None:
        """The connection ended."""
        while self._descriptors:
            with contextlib.suppress(OSError):
                os.close(self._descriptors.popleft())
        if self.user is not None:
            self.user.pages_lost()
