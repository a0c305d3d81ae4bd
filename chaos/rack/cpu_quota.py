"""A processor quota for some processes of a laboratory: a cgroup with the cpu controller, version 1 or 2."""

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

PERIOD_US = 100_000
OLD, NEW = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
ENDS_S = 5.0


class CpuQuota:
    """A cgroup whose processes together use at most so many processors. OSError where none can be made."""

    def __init__(self, name: str, processors: float) -> None:
        old = (OLD / "cpu.cfs_quota_us").parent.is_dir() and (OLD / "cgroup.procs").exists()
        self.path = (OLD if old else NEW) / f"{name}-{os.getpid()}"
        self._quota = round(processors * PERIOD_US)
        self._old = old
        self._enabled = False
        """Whether the controller is on for the sake of this cgroup alone."""

    def __enter__(self) -> "CpuQuota":
        if not self._old:
            controllers = NEW / "cgroup.subtree_control"
            self._enabled = "cpu" not in controllers.read_text().split()
            controllers.write_text("+cpu")
        try:
            self.path.mkdir()
            if self._old:
                (self.path / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (self.path / "cpu.cfs_quota_us").write_text(str(self._quota))
            else:
                (self.path / "cpu.max").write_text(f"{self._quota} {PERIOD_US}")
        except OSError:
            self._remove()
            raise
        return self

    def hold(self, pids: Iterable[int]) -> None:
        """Move these processes into it; one that has ended is left out."""
        for pid in pids:
            with suppress(ProcessLookupError):
                (self.path / "cgroup.procs").write_text(str(pid))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Give the processes back to the parent, and remove the cgroup. TimeoutError when it stays."""
        end_s = time.monotonic() + ENDS_S
        while time.monotonic() < end_s:
            for pid in (self.path / "cgroup.procs").read_text().split():
                with suppress(OSError):
                    (self.path.parent / "cgroup.procs").write_text(pid)
            if self._remove():
                return
            time.sleep(0.05)
        raise TimeoutError(f"the cgroup {self.path} was not removed in {ENDS_S:g} s: processes are still in it")

    def _remove(self) -> bool:
        """Remove the cgroup, and what was switched on for it: whether it is gone."""
        with suppress(OSError):
            self.path.rmdir()
        if self.path.exists():
            return False
        if self._enabled:
            with suppress(OSError):  # another cgroup uses it by now
                (NEW / "cgroup.subtree_control").write_text("-cpu")
        return True
