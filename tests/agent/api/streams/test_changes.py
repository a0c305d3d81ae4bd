"""What a reader knows after a snapshot and changes, whatever it missed, is what the list says."""

from collections.abc import Mapping
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.api.access import job_outline
from agent.api.gossip_row import GossipRow
from agent.api.streams import told as told_tables
from agent.api.streams.tables import HAPPENED, TABLES, difference, settled
from agent.api.streams.told import ToldTable
from covey.core.ids import HostId, JobId
from plugins.scheduler.service.tenants import TenantView
from plugins.views import (
    AccountView,
    AggregatorJobView,
    EventLine,
    GpuRow,
    HostRow,
    JobView,
    LeaderView,
    QuotaView,
    SlabView,
    VolumeView,
    VoterRow,
)
from tests.agent.api.test_access import a_job
from tests.compatibility.samples import sample
from tests.families import examples

HOST = HostRow(HostId("h"), "alive", 0.5, "a:1", False, 9.0)
GPU = GpuRow(HostId("h"), 0, "u", "m", 100, 50, 0.5, None, False, 0.0)
JOB = a_job(id=JobId("j1"))
lists = st.dictionaries(
    st.sampled_from(["gpu1", "gpu2", "gpu3", "gpu4"]),
    st.builds(
        lambda state, age_s, gpus, held: msgspec.structs.replace(
            HOST, state=state, age_s=age_s, since_s=age_s, gpus_free=gpus, gpus_held=held
        ),
        st.sampled_from(["alive", "gone"]),
        st.sampled_from([0.0, 0.5, 7.0]),
        st.sampled_from([None, 0, 2]),
        st.sampled_from([{}, {JobId("j1"): "idle"}]),
    ),
    max_size=4,
)
TIME = ("age_s", "since_s")


def applied(known: dict[str, Any], message: tuple[str, dict[str, Any]] | None) -> dict[str, Any]:
    """What a reader knows after a message, as a page does it."""
    if message is None:
        return known
    event, data = message
    if event == "snapshot":
        return dict(data["rows"])
    rows = {**known, **{key: {**known.get(key, {}), **row} for key, row in data["set"].items()}}
    return {key: row for key, row in rows.items() if key not in data["gone"]}


def without_time(rows: Mapping[str, Any]) -> dict[str, Any]:
    found = msgspec.to_builtins(rows)
    return {key: {field: value for field, value in row.items() if field not in TIME} for key, row in found.items()}


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.tuples(lists, st.sets(st.sampled_from("abc"))), max_size=12), st.sampled_from([1, 2, 4096]))
def test_snapshot_and_changes_together_are_the_list_whoever_read_when(
    story: list[tuple[dict[str, HostRow], set[str]]], gone_max: int
) -> None:
    told_tables.GONE_MAX, kept = gone_max, told_tables.GONE_MAX
    try:
        table, number = ToldTable("hosts", TABLES["hosts"], 3), 3
        readers: dict[str, tuple[int | None, dict[str, Any]]] = {name: (None, {}) for name in "abc"}
        for at, (rows, reading) in enumerate(story):
            number += table.publish(rows, (), number + 1, float(at))
            for name in reading:
                known, has = readers[name]
                message = table.since(known, lambda row: row, float(at))
                readers[name] = number, applied(has, message)
                assert without_time(readers[name][1]) == without_time(rows)
                assert table.since(number, lambda row: row, float(at)) is None, "it knows everything"
    finally:
        told_tables.GONE_MAX = kept


def test_time_and_noise_are_no_change_until_they_add_up() -> None:
    gpus = TABLES["gpus"]
    assert settled(gpus, GPU, msgspec.structs.replace(GPU, age_s=9.0, utilization=0.54, memory_used_bytes=50)) is GPU
    now, told = GPU, GPU
    for percent in range(50, 61):
        now = msgspec.structs.replace(GPU, utilization=percent / 100)
        told = settled(gpus, told, now)
        assert told.utilization is not None and abs(told.utilization - percent / 100) < 0.05
    unknown = msgspec.structs.replace(GPU, utilization=None)
    assert settled(gpus, GPU, unknown) is unknown, "not known is no value nearby"
    later = msgspec.structs.replace(JOB.times, for_s=JOB.times.for_s + 5)
    assert settled(TABLES["jobs"], JOB, msgspec.structs.replace(JOB, times=later)) is JOB
    lost = msgspec.structs.replace(JOB, losses=msgspec.structs.replace(JOB.losses, away={HostId("other"): 1.0}))
    assert settled(TABLES["jobs"], JOB, lost) is lost


def test_what_a_reader_may_not_see_is_no_change_to_it() -> None:
    table = ToldTable("jobs", TABLES["jobs"], 0)
    table.publish({"j1": JOB}, (), 1, 0.0)
    table.publish({"j1": msgspec.structs.replace(JOB, argv=("other",), name="other")}, (), 2, 1.0)

    def outline(job: JobView) -> JobView:
        return job_outline(job)

    assert table.since(1, outline, 1.0) is None
    assert table.since(1, lambda job: job, 1.0) is not None
    event, data = table.since(0, outline, 1.0) or ("", {})
    assert event == "change" and b"secret" not in msgspec.json.encode(data)


ROWS: Mapping[str, type[msgspec.Struct]] = {
    "hosts": HostRow, "jobs": JobView, "gpus": GpuRow, "slabs": SlabView, "volumes": VolumeView,
    "accounts": AccountView, "tenants": TenantView, "quotas": QuotaView, "tensors": AggregatorJobView,
    "gossip": GossipRow, "leader": LeaderView, "voters": VoterRow, HAPPENED: EventLine,
}  # fmt: skip


def test_every_table_can_compare_the_rows_of_its_list() -> None:
    assert ROWS.keys() == TABLES.keys()
    for name, kind in ROWS.items():
        row = sample(kind)
        assert settled(TABLES[name], row, row) is row and isinstance(TABLES[name].key(row), str), name


def test_a_row_that_only_stands_is_not_in_the_difference() -> None:
    found = difference(TABLES["hosts"], {"h": HOST, "i": HOST}, {"h": msgspec.structs.replace(HOST, age_s=1.0)})
    assert (dict(found.set), list(found.gone)) == ({}, ["i"])
