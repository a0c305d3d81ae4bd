"""Answers questions of volumes' processes (`covey.wire.swap_wire`): a thread for each connection, nothing kept between
two.

It decides nothing but whether pages have room when they are to come back (`plugins.memory.policy.swapping`), which is
looked at until they are back: when room ends, taking them back is given up, and the swap stays on.
"""

import contextlib
import os
import socket
import stat
import subprocess
import threading
from collections.abc import Sequence
from typing import assert_never

from agent.ports.network.root_helper import Connections, Say
from agent.swap import kernel, nbd
from agent.swap.netlink import GenericNetlink
from agent.swap.received import receive
from covey.wire import frames
from covey.wire import swap_wire as swapwire
from covey.wire.swap_wire import AskSwap, BeginSwap, ConnectSwap, EndSwap, SwapConnected, SwapNow, SwapRefused
from plugins.memory.policy.swapping import lacks_room

LOOK_S = 0.1
"""Seconds between two looks at whether pages that come back still have room."""
CONNECTIONS_MAX = 32
ROOT = 0
Question = ConnectSwap | BeginSwap | EndSwap | AskSwap
Answer = SwapConnected | SwapNow | SwapRefused
READ_LOG = "journalctl -u covey-swap"


class Impossible(Exception):
    """What cannot be done, why, and the next step."""

    def __init__(self, why: str, next: str) -> None:
        super().__init__(why)
        self.next = next


class SwapHelper:
    """Answers questions of volumes' processes. `lacks`: what this process may not have, so that it could wait for the
    swap that it serves; empty: nothing."""

    def __init__(self, owner: int, lacks: str, say: Say) -> None:
        self._lacks, self._say = lacks, say
        self._changing = threading.Lock()
        """The lock under which devices are found and made."""
        self._connections = Connections((owner, ROOT), CONNECTIONS_MAX, self._unserved)

    def serve(self, listener: socket.socket) -> None:
        """Serve until the listener is closed."""
        self._connections.serve(listener, self._converse)

    def _unserved(self, _: str, line: str) -> None:
        if line:
            self._say(line)

    def _converse(self, connection: socket.socket) -> None:
        try:
            while (received := receive(connection, swapwire.to_helper)) is not None:
                question, descriptors = received
                try:
                    answer = self.answer(question, descriptors)
                finally:
                    for descriptor in descriptors:
                        os.close(descriptor)
                connection.sendall(frames.pack(answer))
        except ConnectionError as error:
            self._say(f"dropped a connection: {error}")

    def answer(self, question: Question, descriptors: Sequence[int]) -> Answer:
        try:
            match question:
                case ConnectSwap():
                    return self._connect(question, descriptors)
                case BeginSwap():
                    return self._begin(question)
                case EndSwap():
                    return self._end(question)
                case AskSwap():
                    return self._now(question.backend)
                case _:
                    assert_never(question)
        except Impossible as impossible:
            return self._refused(question, str(impossible), impossible.next)
        except OSError as error:
            return self._refused(question, error.strerror or str(error), READ_LOG)

    def _refused(self, question: Question, why: str, next: str) -> SwapRefused:
        self._say(f"refused {type(question).__name__} of {question.backend}: {why}")
        return SwapRefused(why[:400], next)

    def _connect(self, question: ConnectSwap, descriptors: Sequence[int]) -> SwapConnected:
        if len(descriptors) != 1 or not stat.S_ISSOCK(os.fstat(descriptors[0]).st_mode):
            raise Impossible("the request must carry one socket", "upgrade covey-swapd and the agent together")
        netlink = _netlink()
        with self._changing, contextlib.closing(netlink):
            found = kernel.numbered(question.backend)
            if found is not None:
                nbd.reconfigure(netlink, found, question.backend, question.timeout_s, descriptors[0])
                self._say(f"{kernel.device(found)} of {question.backend} has a new socket")
                return SwapConnected(kernel.device(found), True)
            if question.resume:
                raise Impossible("the kernel no longer has this device", "agentctl volume unswap NAME")
            size = question.size_bytes // question.block_bytes * question.block_bytes
            shape = size, question.block_bytes, question.timeout_s
            number = nbd.connect(netlink, question.backend, *shape, descriptors[0])
            if kernel.numbered(question.backend) != number:
                nbd.disconnect(netlink, number)
                raise Impossible("this kernel does not keep the names of NBD devices", "use Linux 5.14 or newer")
        self._say(f"{kernel.device(number)} is {question.backend}, {size} bytes")
        return SwapConnected(kernel.device(number), False)

    def _begin(self, question: BeginSwap) -> SwapNow:
        if self._lacks:
            raise Impossible(
                f"the swap helper could deadlock on its own swap: {self._lacks}", "systemctl cat covey-swap"
            )
        device = self._device(question.backend)
        if kernel.area(device) is None:
            kernel.begin(device, question.priority)
            self._say(f"swap is on: {device}")
        return self._now(question.backend)

    def _end(self, question: EndSwap) -> SwapNow:
        number = kernel.numbered(question.backend)
        if number is None:
            return SwapNow()
        device = kernel.device(number)
        if kernel.area(device) is not None:
            self._take_back(device)
            self._say(f"swap is off: {device}")
        if kernel.in_use(device):
            raise Impossible(
                f"the kernel has {device} in use", f"swapoff {device}, or unmount it, then agentctl volume unswap again"
            )
        with contextlib.closing(_netlink()) as netlink:
            nbd.disconnect(netlink, number)
        return SwapNow()

    def _take_back(self, device: str) -> None:
        """Take back the swap of a device by `swapoff`, which a signal ends with the swap as it was."""
        further = "free memory, raise the limit or end programs, then agentctl volume unswap again"
        why = lacks_room(kernel.room(device))
        if why:
            raise Impossible(why, further)
        process = subprocess.Popen(
            ("swapoff", device),
            env={"PATH": kernel.PROGRAMS, "LC_ALL": "C"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        while True:
            try:
                _, said = process.communicate(timeout=LOOK_S)
                break
            except subprocess.TimeoutExpired:
                why = why or lacks_room(kernel.room(device))
                if why:
                    process.kill()  # the only signal that this process does not keep from its children
        if process.returncode and kernel.area(device) is not None:
            raise Impossible(why or (said or "").strip() or f"swapoff ended with {process.returncode}", further)

    def _now(self, backend: str) -> SwapNow:
        number = kernel.numbered(backend)
        if number is None:
            return SwapNow()
        device = kernel.device(number)
        found = kernel.area(device)
        return SwapNow(device) if found is None else SwapNow(device, True, found.used_bytes)

    def _device(self, backend: str) -> str:
        number = kernel.numbered(backend)
        if number is None:
            raise Impossible("the kernel does not have this device", "agentctl volume swap NAME")
        return kernel.device(number)


def _netlink() -> GenericNetlink:
    """A socket to a kernel that has NBD. Impossible says what it lacks."""
    try:
        kernel.load_module()
        netlink = GenericNetlink()
    except OSError as error:
        raise Impossible(f"this kernel has no NBD: {error}", "install the module nbd of this kernel") from error
    try:
        netlink.family(nbd.FAMILY)
    except OSError as error:
        netlink.close()
        raise Impossible(
            f"this kernel has no NBD over netlink: {error}", "install the module nbd of this kernel"
        ) from error
    return netlink
