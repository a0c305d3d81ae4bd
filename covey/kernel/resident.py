"""How much memory this process has resident, as the kernel counts."""

from typing import NamedTuple


class Resident(NamedTuple):
    """Resident memory of one process, bytes; shared pages and those of mapped files are in it."""

    now_bytes: int
    peak_bytes: int
    """The most since the process began."""


def resident() -> Resident:
    """Resident memory of this process; zeros where the kernel does not say."""
    found = {"VmRSS": 0, "VmHWM": 0}
    try:
        with open("/proc/self/status") as file:
            for line in file:
                name, _, rest = line.partition(":")
                if name in found:
                    found[name] = int(rest.split()[0]) * 1024
    except OSError:
        pass
    return Resident(found["VmRSS"], max(found.values()))
