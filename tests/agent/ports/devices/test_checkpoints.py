"""Ranks that are moved out of their GPU by CUDA's checkpoint (`agent/ports/devices/guards/checkpoints.py`), over a
libcuda that is played: for each process that uses a GPU there is a file with its state. On a real one:
`tests/covey/hooks/test_gpu.py`."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.ports.devices.guards import checkpoint_guard
from agent.ports.devices.guards.checkpoints import Checkpoints
from agent.ports.processes.procfs import stat
from covey.ports.processes import ProcessId
from tests.agent.here import until

PLAYED = """
#include <fstream>
#include <string>
static std::string at(int pid) { return std::string(FOLDER) + "/" + std::to_string(pid); }
static bool has(int pid, const char* what) { return bool(std::ifstream(at(pid) + what)); }
static int state(int pid) { int found = -1; std::ifstream(at(pid)) >> found; return found; }
static int become(int pid, int from, int to) {
  if (state(pid) != from) return 401;
  std::ofstream(at(pid)) << to << std::flush;
  return 0;
}
extern "C" {
int cuInit(unsigned) { return 0; }
int cuCheckpointProcessGetState(int pid, int* into) { return *into = state(pid), *into < 0 ? 101 : 0; }
int cuCheckpointProcessLock(int pid, unsigned* args) {
  if (!args || args[0] != 5000 || args[1]) return 1;
  return has(pid, ".locked") ? 600 : become(pid, 0, 1);
}
int cuCheckpointProcessCheckpoint(int pid, void* args) {
  return has(pid, ".shared") ? 801 : args ? 1 : become(pid, 1, 2);
}
int cuCheckpointProcessRestore(int pid, void* args) {
  if (has(pid, ".full")) return std::ofstream(at(0) + ".tries", std::ios::app) << "x", 2;
  return args ? 1 : become(pid, 2, 1);
}
int cuCheckpointProcessUnlock(int pid, void* args) { return args ? 1 : become(pid, 1, 0); }
}
"""


class Played:
    """A driver, and processes that use its GPU."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("g++") or shutil.which("clang++")
        if compiler is None:
            pytest.skip("there is no C++ compiler")
        self.folder, self.library = folder, folder / "libcuda.so.1"
        (folder / "cuda.cpp").write_text(PLAYED)
        command = [
            compiler,
            "-shared",
            "-fPIC",
            f'-DFOLDER="{folder}"',
            str(folder / "cuda.cpp"),
            "-o",
            str(self.library),
        ]
        subprocess.run(command, check=True, timeout=120)
        self.processes = [subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"]) for _ in (0, 1)]
        self.made: list[Checkpoints] = []
        for pid in self.pids:
            (folder / str(pid)).write_text("0")

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def states(self) -> list[int]:
        return [int((self.folder / str(pid)).read_text() or -1) for pid in self.pids]

    def tries(self) -> int:
        """How often a process could not come back, since the GPU was full."""
        path = self.folder / "0.tries"
        return len(path.read_text()) if path.exists() else 0

    def told(self, pid: int, what: str) -> Path:
        path = self.folder / f"{pid}.{what}"
        path.touch()
        return path

    def users(self, _rank: int) -> list[ProcessId]:
        found = [(pid, stat(pid)) for pid in self.pids]
        return [ProcessId(pid, int(fields[19])) for pid, fields in found if fields is not None]

    def checkpoints(self, lease_s: float = 10.0) -> Checkpoints:
        self.made.append(Checkpoints(self.users, str(self.library), lease_s))
        return self.made[-1]


@pytest.fixture
def played(tmp_path: Path) -> Iterator[Played]:
    made = Played(tmp_path)
    yield made
    for path in tmp_path.glob("*.full"):
        path.unlink()
    for each in made.made:
        each.close()
    for process in made.processes:
        process.kill()
        process.wait()


def test_a_rank_is_moved_out_and_back(played: Played) -> None:
    checkpoints = played.checkpoints()
    assert checkpoints.able() and checkpoints.suspend(7) and played.states() == [2, 2]
    assert checkpoints.suspend(7) and played.states() == [2, 2], "said again: the lease begins anew"
    assert checkpoints.resume(7) and played.states() == [0, 0]
    assert not checkpoints.resume(7), "it was not out"


async def test_it_comes_back_when_its_lease_is_over(played: Played) -> None:
    assert played.checkpoints(lease_s=0.5).suspend(7) and played.states() == [2, 2]
    await until(lambda: played.states() == [0, 0])


async def test_it_comes_back_when_its_agent_is_gone(played: Played) -> None:
    checkpoints = played.checkpoints()
    assert checkpoints.suspend(7)
    checkpoints.close()
    await until(lambda: played.states() == [0, 0])


@pytest.mark.parametrize("trouble", ["locked", "shared"])
def test_what_the_driver_refuses_stays_as_it_was_and_all_of_its_rank(played: Played, trouble: str) -> None:
    played.told(played.pids[1], trouble)
    checkpoints = played.checkpoints()
    assert not checkpoints.suspend(7) and played.states() == [0, 0]
    assert str(played.pids[1]) in checkpoints.why and "CUDA error" in checkpoints.why


async def test_where_the_gpu_has_no_room_yet_it_comes_back_later_whoever_lives(played: Played) -> None:
    checkpoints = played.checkpoints(lease_s=0.3)
    assert checkpoints.suspend(7)
    full = played.told(played.pids[0], "full")
    await until(lambda: played.states() == [2, 0])
    tries = played.tries()
    checkpoints.close()
    await until(lambda: played.tries() > tries)
    assert played.states() == [2, 0]
    full.unlink()
    await until(lambda: played.states() == [0, 0])


def test_a_pid_that_is_used_again_is_left_alone(played: Played) -> None:
    checkpoints = played.checkpoints()
    checkpoints._users = lambda _rank: [ProcessId(played.pids[0], 1)]
    assert not checkpoints.suspend(7) and played.states() == [0, 0]


def test_a_process_without_a_gpu_is_not_suspended(played: Played) -> None:
    checkpoints = played.checkpoints()
    for pid in played.pids:
        (played.folder / str(pid)).write_text("-1")
    assert not checkpoints.suspend(7)


def test_an_older_driver_cannot_do_it_and_nobody_is_asked_for_more(tmp_path: Path) -> None:
    checkpoints = Checkpoints(lambda pid: [ProcessId(pid, 1)], str(tmp_path / "libcuda.so.1"))
    assert not checkpoints.able() and not checkpoints.suspend(os.getpid())
    assert checkpoints._guard is None


def test_the_time_of_what_is_out_begins_anew_with_every_word(monkeypatch: pytest.MonkeyPatch) -> None:
    class Out:
        def out(self, pid: int) -> str:
            return ""

        def back(self, pid: int) -> str:
            return ""

    now_s = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    own = os.getpid(), int((stat(os.getpid()) or [])[19])
    guard = checkpoint_guard.Guard(Out())  # type: ignore[arg-type]
    assert guard.hold(10.0, [own]) == ""
    now_s = 109.0
    assert guard.hold(10.0, [own]) == ""
    now_s = 115.0
    guard.end(all_of_them=False)
    assert own in guard.held, "said again 6 s ago"
    now_s = 119.5
    guard.end(all_of_them=False)
    assert not guard.held
