"""A stand-in for an RDMA device: two ends in one process, for what pages and tensors make of it, in `make check`.

It says nothing about devices: what those do is seen over SoftRoCE in the guest (`make rdma`). It keeps the promises of
`covey.ports.verbs`, and a test holds it up, cuts it, lets it do half of a post, or makes it refuse.
"""

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count

from covey.ports.verbs import NoVerbs, PairPlace, VerbsFound, VerbStep


class StandInNetwork:
    """All devices of a test."""

    def __init__(self) -> None:
        self.regions: dict[int, StandInRegion] = {}
        """The regions of all devices, by key."""
        self.pairs: dict[int, StandInPair] = {}
        self.numbers = count(1)
        self.lock = threading.RLock()
        """Held by a thread that uses anything here."""
        self.held = False
        """Whether posts wait until `go_on`."""
        self.steps_left = -1
        """The number of steps that are still done before everything stops; -1: no end."""
        self.steps: list[VerbStep] = []
        """The steps that were done."""
        self.unreachable = False
        self.wire: list[tuple[int, int, VerbStep, bytes]] = []
        """WRITEs that a pair had sent when it was closed: from whom, to whom, the step and its bytes."""

    def go_on(self) -> None:
        self.held = False
        for sender, receiver, step, data in self.wire:
            pair, region = self.pairs.get(receiver), self.regions.get(step.there_key)
            if pair is not None and pair.peer == sender and region is not None and region.device is pair.device:
                at = step.there - region.address
                region.memory[at : at + step.size] = data
        self.wire.clear()
        for pair in list(self.pairs.values()):
            pair.go_on()


class StandInVerbs:
    """The stand-in device of one host. `refuses`: the error of opening it; `locks`: the error of registering remote
    memory; `needs_bytes`: what a look was told last."""

    needs_bytes = 0

    def __init__(self, network: StandInNetwork) -> None:
        self.network = network
        self.refuses = self.locks = ""

    def look(self, needs_bytes: int) -> VerbsFound:
        self.needs_bytes = needs_bytes
        return VerbsFound("" if self.refuses else "stand-in", self.refuses)

    def open(self) -> "StandInDevice":
        if self.refuses:
            raise NoVerbs(self.refuses)
        return StandInDevice(self)


class StandInDevice:
    name = "stand-in"

    def __init__(self, verbs: StandInVerbs) -> None:
        self.verbs, self.network = verbs, verbs.network
        self.open_things = 0

    def register(self, memory: memoryview, remote: bool) -> "StandInRegion":
        if remote and self.verbs.locks:
            raise NoVerbs(self.verbs.locks)
        return StandInRegion(self, memory, remote)

    def pair(self, done: Callable[[str], None], watched: bool = True) -> "StandInPair":
        return StandInPair(self, done, watched)

    def close(self) -> None:
        assert not self.open_things, "a domain is closed with something in it"


class StandInRegion:
    """Registered memory, with addresses so chosen that no two regions touch."""

    def __init__(self, device: StandInDevice, memory: memoryview, remote: bool) -> None:
        self.device, self.remote = device, remote
        self.memory = memory.cast("B")
        self.key = next(device.network.numbers)
        self.address = self.key << 40
        device.network.regions[self.key] = self
        device.open_things += 1

    def close(self) -> None:
        if self.device.network.regions.pop(self.key, None) is not None:
            self.device.open_things -= 1


class StandInPair:
    def __init__(self, device: StandInDevice, done: Callable[[str], None], watched: bool) -> None:
        self.device, self._done = device, done
        self.network = device.network
        self.number = next(self.network.numbers)
        self.where = PairPlace(bytes(16), 0, self.number, 0, 3)
        self.network.pairs[self.number] = self
        self.peer = 0
        self.failed = ""
        self._posts: deque[Sequence[VerbStep]] = deque()
        self._loop = asyncio.get_running_loop() if watched else None
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        device.open_things += 1

    def connect(self, peer: PairPlace) -> None:
        self.peer = peer.number

    def post(self, steps: Sequence[VerbStep]) -> None:
        with self.network.lock:
            self._posts.append(steps)
        self.go_on()

    def go_on(self) -> None:
        """Something may be done now: the loop does it, or a thread that `descriptor` wakes."""
        if self._loop is None:
            os.eventfd_write(self.descriptor, 1)
        else:
            self._loop.call_soon(self.work)

    def completed(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)
        with self.network.lock:
            self.work()

    def close(self) -> None:
        with self.network.lock:
            self._close()

    def _close(self) -> None:
        if self.network.pairs.pop(self.number, None) is not None:
            os.close(self.descriptor)
            for step in [step for steps in self._posts for step in steps if not step.is_read]:
                here = self.network.regions[step.here_key]
                at = step.here - here.address
                self.network.wire.append((self.number, self.peer, step, bytes(here.memory[at : at + step.size])))
            self._posts.clear()
            self.device.open_things -= 1

    def work(self) -> None:
        """Do the posted steps. A peer that is not connected to us, or not there, lets us wait, like one that does not
        answer."""
        while self._posts and not self.network.held and not self.network.unreachable:
            other = self.network.pairs.get(self.peer)
            if self.failed:
                self._posts.popleft()
                self._done(self.failed)
            elif other is None or other.peer != self.number:
                return
            else:
                steps = self._posts.popleft()
                self.failed = next(filter(None, (self._step(step, other.device) for step in steps)), "")
                if self.network.steps_left == 0:
                    return
                self._done(self.failed)

    def _step(self, step: VerbStep, there: StandInDevice) -> str:
        if self.network.steps_left == 0:
            return ""
        here = self.network.regions[step.here_key]
        region = self.network.regions.get(step.there_key)
        if region is None or not region.remote or region.device is not there:
            return "the peer no longer allows access to that memory"
        at, from_ = step.there - region.address, step.here - here.address
        if at < 0 or at + step.size > len(region.memory):
            return "the peer no longer allows access to that memory"
        mine, theirs = here.memory[from_ : from_ + step.size], region.memory[at : at + step.size]
        if step.is_read:
            mine[:] = theirs
        else:
            theirs[:] = mine
        self.network.steps.append(step)
        if self.network.steps_left > 0:
            self.network.steps_left -= 1
        return ""
