"""XID errors as they happen: a thread that waits for the driver's events, a second at a time."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

WAIT_MS = 1000
PAUSE_S = 1.0
ANY_INSTANCE = 0xFFFFFFFF


class XidEvents:
    """XIDs of one NVML that is initialised. `heard(uuid of the GPU, instance or None, number)` is called in the
    thread."""

    def __init__(self, nvml: Any, handles: Sequence[Any], heard: Callable[[str, int | None, int], None]) -> None:
        self._nvml, self._handles, self._heard = nvml, tuple(handles), heard
        self._over = threading.Event()
        self.why = ""
        """Why the thread ended, as the driver says it."""
        self.deaf: tuple[str, ...] | None = None
        """Why nothing is heard of each of these GPUs, in order; empty: it is; None: that is not known yet."""
        # A daemon: a driver that hangs must not keep the agent from ending.
        self._thread = threading.Thread(target=self._run, name="nvml: events", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs; False: the driver has no events, or failed."""
        return self._thread.is_alive()

    def close(self) -> None:
        """End the thread, within a second; it is not waited for."""
        self._over.set()

    def _run(self) -> None:
        nvml = self._nvml
        try:
            events = nvml.nvmlEventSetCreate()
        except nvml.NVMLError as error:
            self._deafened(error)
            return
        try:
            if self._registered(events):
                while not self._over.is_set():
                    self._wait(events)
        except nvml.NVMLError as error:
            self._deafened(error)  # the driver is gone; a new one gets new threads
        finally:
            self._free(events)

    def _registered(self, events: Any) -> int:
        """The number of GPUs that tell events. Some do not: an older GPU, a container."""
        deaf: list[str] = []
        for handle in self._handles:
            try:
                self._nvml.nvmlDeviceRegisterEvents(handle, self._nvml.nvmlEventTypeXidCriticalError, events)
            except self._nvml.NVMLError as error:
                self.why = str(error)
                deaf.append(self.why)
                continue
            deaf.append("")
        self.deaf = tuple(deaf)
        return deaf.count("")

    def _deafened(self, error: Exception) -> None:
        self.why = str(error)
        self.deaf = (self.why,) * len(self._handles)

    def _wait(self, events: Any) -> None:
        """Wait for one event, for a second at most. NVMLError when the driver is gone."""
        nvml = self._nvml
        try:
            event = nvml.nvmlEventSetWait_v2(events, WAIT_MS)
            uuid = nvml.nvmlDeviceGetUUID(event.device)
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_UNINITIALIZED:
                raise
            if error.value != nvml.NVML_ERROR_TIMEOUT:
                self._over.wait(PAUSE_S)  # a GPU that is lost fails at once, each time
            return
        if event.eventType & nvml.nvmlEventTypeXidCriticalError:
            instance = int(event.gpuInstanceId)
            name = uuid.decode(errors="replace") if isinstance(uuid, bytes) else uuid
            self._heard(name, None if instance == ANY_INSTANCE else instance, int(event.eventData))

    def _free(self, events: Any) -> None:
        try:
            self._nvml.nvmlEventSetFree(events)
        except self._nvml.NVMLError:
            return
