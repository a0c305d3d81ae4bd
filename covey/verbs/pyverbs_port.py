"""`covey.ports.verbs` over pyverbs, which Debian has as python3-pyverbs. It is loaded when a device is opened, not
before."""

import contextlib
import importlib.util
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from covey.ports.verbs import NUMBER_BITS, STEPS_MAX, NoVerbs, PairPlace, VerbsDevice, VerbsFound, VerbStep
from covey.verbs.found import RdmaFound, RdmaPort, look, pyverbs_spec

EVENT_FILE = "anon_inode:[infinibandevent]"
"""The kernel's name for the descriptor of a completion channel; pyverbs does not tell its number."""
CHANNEL_TRIES = 8
POLLED = 64
"""The number of completions taken at once."""
RESPONDER = 4
"""The number of READs of one end that the other has under way at once."""
ACK_TIMEOUT, RETRIES = 14, 7
"""The exponent of the time without an answer, 4.096 us * 2^14 = 67 ms, and the number of retries; then the pair has
failed."""
NO_RECEIVER_TIMER = 12
STATUSES = {
    4: "a local protection error", 5: "flushed", 10: "the peer no longer allows access to that memory",
    12: "the peer does not answer", 13: "the peer is not ready",
}  # fmt: skip


_one_thread = threading.Lock()
"""Held by a thread that loads pyverbs, opens a device or makes a completion channel."""


class PyVerbs:
    """The `covey.ports.verbs.Verbs` of this host."""

    def __init__(self) -> None:
        self._opened: OpenedDevice | None = None

    def look(self, needs_bytes: int) -> VerbsFound:
        found = self._look(needs_bytes)
        return VerbsFound("" if found.port is None else found.port.device, found.why)

    def open(self) -> VerbsDevice:
        try:
            with _one_thread:
                found = self._look()
                if found.port is None:
                    raise NoVerbs(found.why)
                _load()
                if self._opened is None or self._opened.port != found.port:
                    self._opened = OpenedDevice(found.port)
            return PyVerbsDevice(self._opened)
        except ImportError as error:
            raise NoVerbs(f"pyverbs cannot be loaded: {error}") from error

    def _look(self, needs_bytes: int = 0) -> RdmaFound:
        opened = self._opened
        return look(needs_bytes=needs_bytes, known=opened.port if opened is not None else None)


def _load() -> None:
    """Load pyverbs also from where a virtual environment does not look; nothing else is found there because of it."""
    if "pyverbs" in sys.modules:
        return
    spec = pyverbs_spec()
    if spec is None or spec.loader is None:
        raise ImportError("no pyverbs")
    module = importlib.util.module_from_spec(spec)
    sys.modules["pyverbs"] = module
    spec.loader.exec_module(module)


@contextlib.contextmanager
def _refusals(what: str) -> Iterator[None]:
    """Turn errors of pyverbs, which say what the device refused, into NoVerbs."""
    from pyverbs.pyverbs_error import PyverbsError

    try:
        yield
    except (PyverbsError, OSError, MemoryError) as error:
        raise NoVerbs(f"the device refuses {what}: {error}".replace("\n", " ")) from error


class OpenedDevice:
    """One port of a device, opened once in a process."""

    def __init__(self, port: RdmaPort) -> None:
        import pyverbs.addr  # all that is used later, when a connection waits for it
        import pyverbs.cq
        import pyverbs.mr
        import pyverbs.qp
        import pyverbs.wr  # noqa: F401
        from pyverbs.device import Context

        self.port = port
        with _refusals("to be opened"):
            self.context = Context(name=port.device)
            self.mtu = int(self.context.query_port(port.port).active_mtu)


class PyVerbsDevice:
    """The `covey.ports.verbs.VerbsDevice`."""

    def __init__(self, opened: OpenedDevice) -> None:
        from pyverbs.pd import PD

        self.name, self.port = opened.port.device, opened.port
        self.context, self.mtu = opened.context, opened.mtu
        with _refusals("a protection domain"):
            self.domain = PD(self.context)

    def register(self, memory: memoryview, remote: bool) -> "PyRegion":
        return PyRegion(self, memory, remote)

    def pair(self, done: Callable[[str], None], watched: bool = True) -> "PyPair":
        return PyPair(self, done, watched)

    def close(self) -> None:
        self.domain.close()


class PyRegion:
    """The `covey.ports.verbs.Region`."""

    def __init__(self, device: PyVerbsDevice, memory: memoryview, remote: bool) -> None:
        import numpy as np
        import pyverbs.enums as e
        from pyverbs.mr import MR

        access = int(e.IBV_ACCESS_LOCAL_WRITE)
        if remote:
            access |= int(e.IBV_ACCESS_REMOTE_READ) | int(e.IBV_ACCESS_REMOTE_WRITE)
        self._held: Any = np.frombuffer(memory, np.uint8)
        """The buffer that keeps the memory where it is until no peer can reach it."""
        self.address = int(self._held.ctypes.data)
        with _refusals(f"to register {len(self._held)} bytes (memory that may be locked: ulimit -l)"):
            self._region = MR(device.domain, len(self._held), access, self.address)
        self.key = int(self._region.rkey if remote else self._region.lkey)

    def close(self) -> None:
        if self._held is not None:
            self._region.close()
            self._held = None


class PyPair:
    """The `covey.ports.verbs.Pair`. It has a completion channel of its own, whose descriptor a loop watches, or the
    threads that use it."""

    def __init__(self, device: PyVerbsDevice, done: Callable[[str], None], watched: bool) -> None:
        import pyverbs.enums as e
        from pyverbs.cq import CQ
        from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr

        self._e, self._device, self._done = e, device, done
        self._loop = _running_loop() if watched else None
        self._refused = ""
        """Why a post was refused, until `completed` says so."""
        self._under_way: deque[int] = deque()
        """The numbers of posts under way, oldest first."""
        self._last = 0
        self._closed = False
        with _refusals("a queue pair"):
            self._channel, self.descriptor = _channel(device.context)
            self._queue = CQ(device.context, 2 * STEPS_MAX, channel=self._channel)
            self._queue.req_notify()
            cap = QPCap(max_send_wr=STEPS_MAX, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
            wanted = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self._queue, rcq=self._queue, cap=cap)
            self._pair = QP(device.domain, wanted, QPAttr())
            first = QPAttr(port_num=device.port.port)
            first.qp_access_flags = e.IBV_ACCESS_REMOTE_READ | e.IBV_ACCESS_REMOTE_WRITE
            self._pair.to_init(first)
        psn = int.from_bytes(os.urandom(3), "little")
        self.where = PairPlace(device.port.gid, device.port.lid, int(self._pair.qp_num), psn, device.mtu)
        self._poll = select.poll()
        self._poll.register(self.descriptor, select.POLLIN)
        if self._loop is not None:
            self._loop.add_reader(self.descriptor, self.completed)

    def connect(self, peer: PairPlace) -> None:
        from pyverbs.addr import GID, AHAttr, GlobalRoute
        from pyverbs.qp import QPAttr

        port = self._device.port
        with _refusals("to connect a queue pair"):
            route = GlobalRoute(dgid=GID(_gid_text(peer.gid)), sgid_index=port.gid_index)
            how = QPAttr(port_num=port.port, path_mtu=min(self.where.mtu, peer.mtu))
            how.ah_attr = AHAttr(gr=route, is_global=1, port_num=port.port, dlid=peer.lid)
            how.dest_qp_num = peer.number
            how.rq_psn, how.sq_psn = peer.first_psn, self.where.first_psn
            how.max_dest_rd_atomic = how.max_rd_atomic = RESPONDER
            how.min_rnr_timer = NO_RECEIVER_TIMER
            how.timeout, how.retry_cnt, how.rnr_retry = ACK_TIMEOUT, RETRIES, 0
            self._pair.to_rts(how)

    def post(self, steps: Sequence[VerbStep]) -> None:
        from pyverbs.wr import SGE, SendWR

        e, self._last = self._e, self._last + 1
        self._under_way.append(self._last)
        works: list[Any] = []  # each points to the one after it, and keeps nothing alive
        for step in reversed(steps):
            following = works[-1] if works else None
            work = SendWR(
                wr_id=self._last,
                opcode=e.IBV_WR_RDMA_READ if step.is_read else e.IBV_WR_RDMA_WRITE,
                num_sge=1,
                sg=[SGE(step.here, step.size, step.here_key)],
                send_flags=e.IBV_SEND_SIGNALED if following is None else 0,
                next_wr=following,
            )
            work.set_wr_rdma(step.there_key, step.there)
            works.append(work)
        try:
            with _refusals("a request"):
                self._pair.post_send(works[-1])
        except NoVerbs as why:
            self._refused = str(why)
            if self._loop is not None:
                self._loop.call_soon(self.completed)

    def completed(self) -> None:
        if self._closed:
            return
        if self._poll.poll(0):
            self._channel.get_cq_event(self._queue)
            self._queue.ack_events(1)
            self._queue.req_notify()
        while not self._closed:
            count, found = self._queue.poll(POLLED)
            for completion in found:
                if completion.status:
                    status = int(completion.status)
                    self._fail(STATUSES.get(status, f"status {status} of verbs"))
                    return
                if self._under_way and completion.wr_id == self._under_way[0]:
                    self._under_way.popleft()
                    self._done("")
                    if self._closed:
                        return
            if not count:
                break
        if self._refused:
            self._fail(self._refused)

    def _fail(self, why: str) -> None:
        under_way, self._under_way = self._under_way, deque()
        for _ in under_way:
            self._done(why)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._under_way.clear()
            if self._loop is not None:
                self._loop.remove_reader(self.descriptor)
            self._pair.close()
            self._queue.close()
            self._channel.close()


def _running_loop() -> Any:
    import asyncio  # a rank may have no loop

    return asyncio.get_running_loop()


def _channel(context: Any) -> tuple[Any, int]:
    """A completion channel and its descriptor, which is the one that this process did not have before."""
    from pyverbs.cq import CompChannel

    with _one_thread:
        for _ in range(CHANNEL_TRIES):
            before = _channels()
            channel = CompChannel(context)
            new = _channels() - before
            if len(new) == 1:
                (descriptor,) = new
                os.set_blocking(descriptor, False)
                return channel, descriptor
            channel.close()  # it took the place of one that another thread closed
    raise NoVerbs("the descriptor of a completion channel cannot be found")


def _channels() -> set[int]:
    """Descriptors of the completion channels of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it was closed since
            if os.readlink(f"/proc/self/fd/{name}") == EVENT_FILE:
                found.add(int(name))
    return found


def _gid_text(gid: bytes) -> str:
    return ":".join(gid[at : at + 2].hex() for at in range(0, 16, 2))


assert NUMBER_BITS == 24
