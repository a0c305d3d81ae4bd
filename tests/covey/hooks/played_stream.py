"""A played GPU stream: the functions of libcudart that `device_queue.cpp` calls. The test says when work is done."""

import ctypes
from collections.abc import Callable
from typing import Any

NOT_READY = 600
CAPTURE_UNSUPPORTED = 900


class PlayedStream:
    """Operators and events in order. While it is recorded into a graph, events and host functions may not be used."""

    def __init__(self, address: int = 0x5000) -> None:
        self.address = address
        self.queue: list[Any] = []
        """Items that are not done yet: "operator", an event, a host function."""
        self.newest: dict[int, int] = {}
        """By event: its newest record, the only one of which it tells."""
        self.done: set[int] = set()
        """Records that the device has reached."""
        self.events = self.records = self.host_functions = 0
        self.recording = False
        self.spoiled = 0
        """Number of calls that a graph does not survive while it is recorded."""
        self.error = 0
        self.cudaEventCreateWithFlags = _call([ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint], self._create)
        self.cudaEventRecord = _call([ctypes.c_void_p, ctypes.c_void_p], self._record)
        self.cudaEventQuery = _call([ctypes.c_void_p], self._query)
        self.cudaStreamIsCapturing = _call([ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)], self._capturing)
        self.cudaGetLastError = _call([], self._last_error)
        self.cudaLaunchHostFunc = _call([ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p], self._launch_host)

    def launch(self, count: int = 1) -> None:
        self.queue += ["operator"] * count

    def work(self, count: int | None = None) -> None:
        """The device does so many operators, and the items between them; None: all."""
        left = self.queue.count("operator") if count is None else count
        while self.queue and (left or self.queue[0] != "operator"):
            done = self.queue.pop(0)
            if done == "operator":
                left -= 1
            elif isinstance(done, int):
                self.done.add(done)
            else:
                done()

    def _create(self, into: Any, flags: int) -> int:
        assert flags == 3, "neither a spinning wait nor a clock is wanted"
        self.events += 1
        into[0] = self.events
        return 0

    def _record(self, event: int, stream: int | None) -> int:
        assert stream == self.address
        self.spoiled += self.recording
        self.records += 1
        self.newest[event] = self.records
        self.queue.append(self.records)
        return 0

    def _query(self, event: int) -> int:
        self.spoiled += self.recording
        return 0 if self.newest[event] in self.done else self._fail(NOT_READY)

    def _capturing(self, stream: int | None, into: Any) -> int:
        assert stream == self.address
        into[0] = int(self.recording)
        return 0

    def _last_error(self) -> int:
        error, self.error = self.error, 0
        return error

    def _launch_host(self, stream: int | None, function: int, of: int) -> int:
        assert stream == self.address
        self.spoiled += self.recording
        self.host_functions += 1
        call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
        self.queue.append(lambda: call(of))
        return 0

    def _fail(self, error: int) -> int:
        self.error = error
        return error


def _call(arguments: list[Any], function: Callable[..., int]) -> Any:
    return ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(function)
