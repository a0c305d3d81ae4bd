"""The number of processors that this process may use."""

import os


def cores_now(quota_file: str = "/sys/fs/cgroup/cpu.max") -> int:
    """The number of processors by the process's affinity, and by the quota of its cgroup, if that is less; at least
    1."""
    cores = len(os.sched_getaffinity(0))
    try:
        with open(quota_file) as file:
            quota, _, period = file.read().strip().partition(" ")
        if quota != "max":
            cores = min(cores, int(quota) // int(period))
    except (OSError, ValueError, ZeroDivisionError):
        pass  # no such file, or of another form: there is no quota
    return max(1, cores)
