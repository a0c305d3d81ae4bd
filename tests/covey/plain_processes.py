"""Processes of interpreters of their own, with the face of `tests.covey.forks.Forks`: for scripts without PyTorch."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class PlainProcess:
    """A process that runs a script. Its output, errors among it, is in a file without a name."""

    def __init__(self, words: list[str]) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._run = subprocess.Popen(
            [sys.executable, *words], stdout=self._output, stderr=self._output, stdin=subprocess.DEVNULL, env=environ
        )
        self.pid = self._run.pid

    def text(self) -> str:
        """What it wrote up to now."""
        return os.pread(self._output.fileno(), 1 << 24, 0).decode()

    def wait(self, within_s: float = 100.0) -> int | None:
        """Exit status, negative for a signal; None when it still runs after that time."""
        try:
            return self._run.wait(within_s)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        if self.wait(0) is None:
            self._run.kill()
            self._run.wait()
        self._output.close()


class PlainProcesses:
    """Starts them."""

    def run(self, script: Path, *words: Any) -> PlainProcess:
        return PlainProcess([str(script), *map(str, words)])
