"""A cluster for the tuner: CSV, plain or gzip, one header line, one host a line.

    host,compute_s_per_sample,nic_bytes_per_s[,kind][,role][,joins_s][,leaves_s][,lost_s][,slows_s,slows_times]

The first three columns are needed, in any order. Hosts of one `kind` are taken for equal until they are measured.
`role` is worker or server, of all hosts that are there at the start or of none. `joins_s` (0 or nothing: there from the
start), `leaves_s` (asked back, emptied first), `lost_s` (dead) and `slows_s` (computing takes `slows_times` as long
from then on) are seconds from the start of the job.
"""

import math
from collections.abc import Sequence
from pathlib import Path

from covey.core.ids import HostId
from sim.files import rows_of
from sim.report import Wrong
from sim.tuner.cluster import Machine

NEEDED = ("host", "compute_s_per_sample", "nic_bytes_per_s")
OTHERS = ("kind", "role", "joins_s", "leaves_s", "lost_s", "slows_s", "slows_times")
HOSTS_MAX = 512
NAME_MAX = 100
TIME_MAX_S = 1e9


def read_cluster(path: Path) -> tuple[list[Machine], list[HostId] | None]:
    """Read a cluster: (hosts, those that work at the start, None when the file does not say). Raises Wrong, with line,
    column and what was expected, when a line cannot be used."""
    rows = rows_of(path)
    number, header = next(rows, (1, []))
    columns = _columns(path, number, [name.strip() for name in header])
    machines: list[Machine] = []
    workers: list[HostId] = []
    roles: dict[str, int] = {}
    seen: dict[HostId, int] = {}
    for number, row in rows:
        if len(row) != len(columns):
            what = f"{path}, line {number}: {len(row)} columns"
            raise Wrong(what, f"the first line has {len(columns)}", "correct the line")
        line = _Line(path, number, {name: row[at].strip() for name, at in columns.items()})
        machine = line.machine()
        if machine.host in seen:
            what = f"{path}, line {number}, column host: {machine.host} is there twice"
            raise Wrong(what, f"line {seen[machine.host]} has it already", "give every host a name of its own")
        seen[machine.host] = number
        machines.append(machine)
        if machine.joins_s <= 0:
            roles[line.role()] = number
            workers += [machine.host] if line.role() == "worker" else []
    if not 2 <= len(machines) <= HOSTS_MAX:
        what = f"{path}: {len(machines)} hosts"
        raise Wrong(what, f"2 to {HOSTS_MAX} can be simulated", "a worker and a server are the least")
    if "" in roles and len(roles) > 1:
        what = f"{path}, line {roles['']}, column role: ''"
        raise Wrong(what, "other hosts have a role, so worker or server is expected", "give all a role, or none")
    return machines, None if "" in roles else workers


def _columns(path: Path, number: int, names: Sequence[str]) -> dict[str, int]:
    for name in NEEDED:
        if name not in names:
            found = ", ".join(names) if any(names) else "nothing"
            what = f"{path}, line {number}: no column {name}"
            raise Wrong(what, f"the first line names the columns; it has {found}", f"begin with {','.join(NEEDED)}")
    for name in names:
        if names.count(name) > 1:
            raise Wrong(f"{path}, line {number}: column {name} is there twice", "a name says one thing", "rename one")
        if name not in (*NEEDED, *OTHERS):
            known = ", ".join((*NEEDED, *OTHERS))
            raise Wrong(f"{path}, line {number}: column {name!r} is not known", f"known: {known}", "take it out")
    return {name: at for at, name in enumerate(names)}


class _Line:
    def __init__(self, path: Path, number: int, fields: dict[str, str]) -> None:
        self.path, self.number, self.fields = path, number, fields

    def machine(self) -> Machine:
        name = self.fields["host"]
        if not name or len(name) > NAME_MAX or not name.isprintable():
            raise self.wrong("host", f"1 to {NAME_MAX} printable characters")
        if bool(self.fields.get("slows_s")) != bool(self.fields.get("slows_times")):
            empty = "slows_times" if self.fields.get("slows_s") else "slows_s"
            raise self.wrong(empty, "a number: slows_s and slows_times say together when and how much")
        joins_s = self.at("joins_s") or 0.0
        for column in ("leaves_s", "lost_s"):
            gone_s = self.at(column)
            if gone_s is not None and gone_s <= joins_s:
                raise self.wrong(column, f"seconds after it joined, at {joins_s:g}")
        return Machine(
            host=HostId(name),
            sample_s=self.number_of("compute_s_per_sample", 1e-12, 1e6),
            nic_bytes_per_s=self.number_of("nic_bytes_per_s", 1.0, 1e15),
            kind=self.fields.get("kind", ""),
            joins_s=joins_s,
            leaves_s=self.at("leaves_s"),
            lost_s=self.at("lost_s"),
            slows_s=self.at("slows_s"),
            slows_times=self.number_of("slows_times", 0.01, 1000.0) if self.fields.get("slows_times") else 1.0,
        )

    def role(self) -> str:
        role = self.fields.get("role", "")
        if role not in ("", "worker", "server"):
            raise self.wrong("role", "worker or server")
        return role

    def at(self, column: str) -> float | None:
        return self.number_of(column, 0.0, TIME_MAX_S) if self.fields.get(column) else None

    def number_of(self, column: str, low: float, high: float) -> float:
        text = self.fields[column]
        try:
            number = float(text) if text.isascii() and "_" not in text else math.nan
        except ValueError:
            number = math.nan
        if not low <= number <= high:
            raise self.wrong(column, f"a number from {low:g} to {high:g}")
        return number

    def wrong(self, column: str, expected: str) -> Wrong:
        what = f"{self.path}, line {self.number}, column {column}: {self.fields.get(column, '')[:60]!r}"
        return Wrong(what, f"expected {expected}", "correct the line")
