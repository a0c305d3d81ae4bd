"""The state of a script's work on the device, by what its hooks report. Pure.

    script idles    it waits for others (input, other ranks), and has nothing new for the device
    device works    a jitted call was given to it and is not done (JAX), or it never said

The rank is idle on the device while the script idles and the device does not work.
"""


class DeviceWords:
    """The idle and busy times of a rank on its device. `now_ns` is CLOCK_MONOTONIC. The two methods that report a
    change return whether the rank has become idle or busy by it."""

    def __init__(self) -> None:
        self.idle = self.ever_idle = False
        self._script_idles = self._works = False
        self._idle_ns = self._worked_ns = 0
        self._idle_since_ns = self._works_since_ns = 0

    def script_idles(self, begins: bool, now_ns: int) -> bool:
        self._script_idles = begins
        return self._changed(now_ns)

    def device_works(self, on: bool, now_ns: int) -> bool:
        if on != self._works:
            self._works = on
            if on:
                self._works_since_ns = now_ns
            else:
                self._worked_ns += max(0, now_ns - self._works_since_ns)
        return self._changed(now_ns)

    def idle_ns(self, now_ns: int) -> int:
        """Ns that the rank was idle so far."""
        return self._idle_ns + (max(0, now_ns - self._idle_since_ns) if self.idle else 0)

    def worked_ns(self, now_ns: int) -> int:
        """Ns that jitted calls were at work on the device so far."""
        return self._worked_ns + (max(0, now_ns - self._works_since_ns) if self._works else 0)

    def _changed(self, now_ns: int) -> bool:
        idle = self._script_idles and not self._works
        if idle == self.idle:
            return False
        if idle:
            self._idle_since_ns = now_ns
        else:
            self._idle_ns += max(0, now_ns - self._idle_since_ns)
        self.idle, self.ever_idle = idle, True
        return True
