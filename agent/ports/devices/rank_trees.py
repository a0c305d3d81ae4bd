"""Which processes are ranks of this host's devices, what belongs to them, and what they use: from /proc.

A rank carries the devices it got in its environment (COVEY_GPUS) and the socket of the agent that started it
(COVEY_SOCKET), and whatever it starts inherits both. So an agent that has just started, and knows nothing, finds its
ranks, and the agents of a rack on one machine tell theirs apart. A process that dropped its environment belongs to its
parent's rank. What a process has used when it ends is kept by the kernel with its parent, in the end with the rank's
shim, so the processor time of a tree does not fall when its processes end.
"""

import os
import time
from collections.abc import Mapping
from typing import NamedTuple

from agent.ports.processes.procfs import environment, is_ours, pids, stat
from covey.ports.processes import ProcessId

TICKS_S = 1.0 / os.sysconf("SC_CLK_TCK")
SETTLED_S = 5.0
"""Seconds after its start at which a process that has no mark gets none any more: between fork and exec it has its
parent's."""
MARKS = ("COVEY_JOB_ID", "COVEY_EPOCH", "COVEY_RANK", "COVEY_GPUS")
RESIDENT = ("RssAnon:", "RssShmem:")
"""The fields of what a process allocated. Its code and the files that it maps are the machine's, not its device's."""


class ProcRow(NamedTuple):
    """One process of a reading."""

    pid: int
    parent: int
    session: int
    started: int
    own_s: float
    waited_for_s: float
    """Processor seconds of its children that ended and that it waited for."""
    ended: bool
    """Whether the process is a zombie."""

    @property
    def id(self) -> ProcessId:
        return ProcessId(self.pid, self.started)


class RankMark(NamedTuple):
    """One rank of one epoch, and its devices."""

    job: str
    epoch: str
    rank: str
    gpus: str


class RankTree(NamedTuple):
    """One rank with everything that it started."""

    pid: int
    """The rank's pid; that of the oldest process left where the rank has ended."""
    devices: tuple[str, ...]
    rows: tuple[ProcRow, ...]
    cpu_s: float
    """Processor seconds since the processes began, ended ones included."""


def read_rows() -> dict[int, ProcRow]:
    """Every process of this machine, zombies included: what they used is counted with them until they are waited
    for."""
    found: dict[int, ProcRow] = {}
    for pid in pids():
        fields = stat(pid)
        if fields is not None and fields[0] != "X":
            found[pid] = _row(pid, fields)
    return found


def _row(pid: int, fields: list[str]) -> ProcRow:
    own, waited = int(fields[11]) + int(fields[12]), int(fields[13]) + int(fields[14])
    ended = fields[0] == "Z"
    return ProcRow(pid, int(fields[1]), int(fields[3]), int(fields[19]), own * TICKS_S, waited * TICKS_S, ended)


class RankTrees:
    """Finds ranks and their processes. It remembers which process carries which mark: an environment is read once."""

    def __init__(self, socket: str) -> None:
        """`socket`: path of the jobs.sock whose agent's ranks these are; empty: any agent's."""
        self._socket = socket
        self._marks: dict[ProcessId, RankMark | None] = {}

    def read(self) -> list[RankTree]:
        """Every rank that has a device, by pid."""
        rows = read_rows()
        self._marks = {known: mark for known, mark in self._marks.items() if _is_there(rows, known)}
        owners = self._owners(rows)
        groups: dict[RankMark, list[ProcRow]] = {}
        for pid, mark in owners.items():
            groups.setdefault(mark, []).append(rows[pid])
        alive = ((mark, members) for mark, members in groups.items() if not all(row.ended for row in members))
        return sorted(_tree(mark, members, rows, owners) for mark, members in alive)

    def _owners(self, rows: Mapping[int, ProcRow]) -> dict[int, RankMark]:
        """The rank of each pid, found through as many parents as there are."""
        owners = {pid: mark for pid, row in rows.items() if (mark := self._mark(row)) is not None}
        for pid in rows:
            line = [pid]
            while line[-1] not in owners and (parent := rows[line[-1]].parent) in rows and parent not in line:
                line.append(parent)
            if line[-1] in owners:
                owners.update(dict.fromkeys(line, owners[line[-1]]))
        return owners

    def _mark(self, row: ProcRow) -> RankMark | None:
        if row.id in self._marks:
            return self._marks[row.id]
        mark = _carried(row.pid, self._socket)
        if mark is not None or _age_s(row) > SETTLED_S:
            self._marks[row.id] = mark
        return mark


def _is_there(rows: Mapping[int, ProcRow], process: ProcessId) -> bool:
    row = rows.get(process.pid)
    return row is not None and row.started == process.started


def _age_s(row: ProcRow) -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME) - row.started * TICKS_S


def _carried(pid: int, socket: str) -> RankMark | None:
    try:
        variables = environment(pid) if is_ours(pid) else {}
    except OSError:
        return None  # it ended
    if not variables.get("COVEY_GPUS") or (socket and variables.get("COVEY_SOCKET") != socket):
        return None
    return RankMark(*(variables.get(name, "") for name in MARKS))


def _tree(
    mark: RankMark, members: list[ProcRow], rows: Mapping[int, ProcRow], owners: Mapping[int, RankMark]
) -> RankTree:
    oldest = sorted(members, key=lambda row: (row.ended, row.session != row.pid, row.started, row.pid))
    shims = {row.parent for row in members if row.parent not in owners and row.parent in rows}
    adopted_s = sum(rows[pid].waited_for_s for pid in shims if _is_shim(pid))
    cpu_s = sum(row.own_s + row.waited_for_s for row in members) + adopted_s
    return RankTree(oldest[0].pid, tuple(mark.gpus.split(",")), tuple(oldest), cpu_s)


def _is_shim(pid: int) -> bool:
    """Whether the process is a shim, which has its rank's job for a mark
    (`agent.ports.processes.processes.SHIM_KEEPS`), and no rank number."""
    try:
        variables = environment(pid)
    except OSError:
        return False
    return "COVEY_JOB_ID" in variables and "COVEY_RANK" not in variables


def resident_bytes(pid: int) -> int:
    """Bytes that this process allocated and has in memory; 0 when it is gone."""
    try:
        with open(f"/proc/{pid}/status") as file:
            lines = [line.split() for line in file]
    except OSError:
        return 0
    return sum(int(words[1]) * 1024 for words in lines if words and words[0] in RESIDENT)


def queueing_s(pid: int) -> float:
    """Seconds that the threads of this process, those that live, were ready to run and waited for a core. OSError when
    it is gone or the kernel does not count them (CONFIG_SCHED_INFO)."""
    waited = 0
    for thread in os.listdir(f"/proc/{pid}/task"):
        try:
            with open(f"/proc/{pid}/task/{thread}/schedstat") as file:
                waited += int(file.read().split()[1])
        except ProcessLookupError:
            continue
    return waited * 1e-9
