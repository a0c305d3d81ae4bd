"""`covey-sim memory`: what it prints, what it refuses, and that a seed repeats it."""

import gzip
import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.sim import main as sim
from cli.sim import memory_racks, memory_reports, memory_views, memory_workload
from cli.sim.memory_cluster import Rack, Way, ours
from cli.sim.memory_reports import Setting
from cli.sim.report import Wrong
from covey.units import GIB

SMALL = [
    "memory",
    "--quiet",
    "--hosts",
    "6",
    "--containers",
    "16",
    "--runs",
    "1",
    "--slab",
    "512 MiB",
    "--seconds",
    "200",
]


def silent(share: float, text: str) -> None:
    assert -1e-9 <= share <= 1 + 1e-9, text


def test_the_cluster_is_a_table_an_object_and_a_drawing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = tmp_path / "memory.svg"
    assert sim.main([*SMALL, "--show", "cluster", "--plot", str(drawn)]) == 0
    shown = capsys.readouterr().out
    assert "as published" in shown
    assert "full knowledge" in shown
    assert drawn.read_text().startswith("<svg")
    assert sim.main([*SMALL, "--show", "cluster", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    ways = told["cluster"]["ways"]
    assert ways["no remote memory"]["utilization"] < ways["covey"]["utilization"] < 1
    assert {"max_to_median", "max_to_min", "disk_share", "evicted", "asked"} <= set(ways["covey"])
    assert told["schema"] == 1


def test_every_experiment_can_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Small enough to take a second or two."""
    small = ["--trials", "20", "--crowd", "40", "--ages", "0", "3"]
    assert sim.main([*SMALL, *small, "--show", "fill", "sensitivity", "eviction", "racks", "views", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {"fill", "sensitivity", "eviction", "racks", "views"} <= set(told)
    assert "cluster" not in told
    assert {run["way"] for run in told["views"]["runs"]} == set(memory_views.WAYS)


def test_a_seed_repeats_a_run_and_another_does_not() -> None:
    setting = Setting(hosts=6, containers=16, runs=1, seconds=200, slab_bytes=GIB // 2)
    one, two = (memory_reports.cluster(setting, silent).data["ways"] for _ in range(2))
    assert one == two
    other = Setting(hosts=6, containers=16, runs=1, seconds=200, slab_bytes=GIB // 2, seed=9)
    assert memory_reports.cluster(other, silent).data["ways"] != one
    assert memory_views.herd("covey", 50, 3.0, 1) == memory_views.herd("covey", 50, 3.0, 1)


def test_measured_headroom_is_for_our_ways_and_not_for_the_papers(capsys: pytest.CaptureFixture[str]) -> None:
    told = {}
    for headroom in ("12.5 %", "auto"):
        assert sim.main([*SMALL, "--containers", "26", "--show", "cluster", "--headroom", headroom, "--json"]) == 0
        told[headroom] = json.loads(capsys.readouterr().out)["cluster"]["ways"]
    assert told["auto"]["covey"] == told["12.5 %"]["covey, headroom auto"] != told["12.5 %"]["covey"]
    assert told["auto"]["as published"] == told["12.5 %"]["as published"]


@pytest.mark.parametrize("scheme", memory_racks.SCHEMES, ids=lambda scheme: scheme.label)
def test_no_slab_is_lost_with_a_rack_when_its_members_lie_apart_and_some_are_when_not(
    scheme: memory_racks.Scheme,
) -> None:
    blind, apart = (memory_racks.losses(4, scheme, look, seed=3, hosts=32) for look in (False, True))
    assert apart.worst == 0 < blind.mean
    assert apart.spread < 2 * blind.spread
    two = memory_racks.losses(2, scheme, True, seed=3, hosts=16)
    assert two.worst == (1.0 if scheme.members == 6 else 0.0), "three of six in each of two racks"


def test_your_own_rack_is_read_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rack = tmp_path / "rack.csv"
    rack.write_text("host,limit,working_set\na,8 GiB,24 GiB\nb,4 GiB,4 GiB\nc,2 GiB,2 GiB\n")
    assert sim.main([*SMALL, "--show", "cluster", "--file", str(rack), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["cluster"]["setting"]["hosts"] == 3
    ways = told["cluster"]["ways"]
    assert ways["covey"]["mapped"] > 0
    assert ways["covey"]["max_to_min"] < ways["no remote memory"]["max_to_min"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("host,limit\na,1 GiB\n", "expected the columns"),
        ("", "expected the columns"),
        ("host,limit,working_set\n", ":2.*no container follows"),
        ("host,limit,working_set\n,1 GiB,2 GiB\n", ":2, column host"),
        ("host,limit,working_set\na,1 GiB,2 GiB\nb,lots,2 GiB\n", ":3, column limit"),
        ("host,limit,working_set\na,1 GiB\n", ":2, column working_set"),
        ("host,limit,working_set\na,1 GiB,0\n", ":2, column working_set"),
        ("host,limit,working_set\na,1 GiB,17 TiB\n", "16 TiB"),
        ("host,limit,working_set\na,1 GiB," + "9" * 400 + "\n", ":2, column working_set"),
    ],
)
def test_a_broken_file_is_refused_with_line_and_column(tmp_path: Path, text: str, says: str) -> None:
    rack = tmp_path / "rack.csv"
    rack.write_text(text)
    with pytest.raises(Wrong, match=says):
        memory_workload.containers_from(rack)


def test_a_byte_order_mark_and_gzip_change_nothing(tmp_path: Path) -> None:
    text = b"host,limit,working_set\na,1 GiB,2 GiB\n\nb,512 MiB,2 GiB\n"
    found = []
    for name, data in (("plain", text), ("marked", b"\xef\xbb\xbf" + text), ("packed.gz", gzip.compress(text))):
        (tmp_path / name).write_bytes(data)
        found.append(memory_workload.containers_from(tmp_path / name))
    assert found[0] == found[1] == found[2]
    assert found[0][0] == ["a", "b"]


def test_a_host_that_cannot_hold_its_containers_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rack = tmp_path / "rack.csv"
    rack.write_text("host,limit,working_set\na,70 GiB,90 GiB\nb,4 GiB,4 GiB\n")
    assert sim.main([*SMALL, "--file", str(rack)]) == 2
    assert "host a" in capsys.readouterr().err
    rack.write_text("host,limit,working_set\na,4 GiB,90 GiB\n")
    assert sim.main([*SMALL, "--file", str(rack)]) == 2
    assert "at least two hosts" in capsys.readouterr().err


WHOLE = b"host,limit,working_set\na,1 GiB,2 GiB\nb,512 MiB,2 GiB\n"


@given(junk=st.binary(max_size=60), at=st.integers(0, len(WHOLE)), cut=st.integers(0, 20))
def test_whatever_a_file_holds_it_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, junk: bytes, at: int, cut: int
) -> None:
    rack = tmp_path_factory.getbasetemp() / "mutated.csv"
    rack.write_bytes(WHOLE[:at] + junk + WHOLE[at + cut :])
    try:
        names, held = memory_workload.containers_from(rack)
    except Wrong as wrong:
        assert str(rack) in wrong.what
        assert wrong.next
    else:
        assert len(names) >= 1
        assert all(0 <= one.host < len(names) and one.limit_bytes > 0 for one in held)


@pytest.mark.parametrize(
    "wrong",
    [
        ["--hosts", "1"],
        ["--kept", "1.5"],
        ["--slab", "many"],
        ["--slab", "4 KiB"],
        ["--headroom", "110 %"],
        ["--memory", "1 GiB"],
        ["--runs", "0"],
        ["--ages", "-1"],
        ["--show", "nothing"],
        ["--file", "no-such-file.csv"],
    ],
)
def test_what_cannot_be_is_refused_with_two_as_exit_code(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert sim.main([*SMALL, *wrong]) == 2
    assert capsys.readouterr().err.strip()


def test_a_container_is_never_put_where_it_does_not_fit() -> None:
    for seed in range(5):
        held = memory_workload.containers_by_seed(8, 40, 64 * GIB, random.Random(seed))
        used = [sum(one.limit_bytes for one in held if one.host == host) for host in range(8)]
        assert max(used) <= 64 * GIB - memory_workload.SYSTEM_BYTES


def test_what_does_not_fit_is_in_swap_and_only_paging_containers_ask_for_pages() -> None:
    held = [
        memory_workload.Container(0, 10 * GIB, 5 * GIB, ramp_s=10),
        memory_workload.Container(1, 10 * GIB, 10 * GIB, ramp_s=10),
    ]
    local, swapped, requests = memory_workload.local_and_swapped(held, 2, 60, kept=0.0)
    assert local[-1].tolist() == [5 * GIB + memory_workload.SYSTEM_BYTES, 10 * GIB + memory_workload.SYSTEM_BYTES]
    assert swapped[-1].tolist() == [5 * GIB, 0]
    assert requests[-1, 0] > 0 == requests[:, 1].max()
    assert requests.mean() == pytest.approx(memory_workload.PAGES_PER_S)


@pytest.mark.parametrize(
    "way",
    [
        ours(),
        Way("cold", hot=1.25, cold=1.0),
        Way("auto", auto_headroom=True, drawn=6),
        Way("one by lot", choices=1, drawn=1),
        Way("whole", fills=False, hot=20.0),
    ],
)
def test_the_books_of_a_rack_agree_after_every_run(way: Way) -> None:
    """Slabs by lender, by borrower and by budget are the same slabs; nobody lends to itself."""
    setting = Setting(hosts=5, containers=22, seconds=250)
    rack = Rack(way, setting.host_bytes, memory_reports.HEADROOM, setting.load(3), random.Random(3))
    outcome = rack.run()
    mapped = rack.lender >= 0
    assert mapped.any()
    assert (rack.lender[mapped] != rack.owner[mapped]).all()
    lent = np.bincount(rack.lender[mapped], minlength=5)
    leaving = np.bincount([lender for _, lender, _ in rack.leaving], [slabs for *_, slabs in rack.leaving], minlength=5)
    assert [budget.lent_bytes // way.slab_bytes for budget in rack.budgets] == (lent + leaving).tolist()
    for host, held in enumerate(rack.slabs_at):
        mine = rack.lender[mapped & (rack.owner == host)]
        assert {rack.number[name]: count for name, count in held.items() if count} == {
            int(lender): int(count) for lender, count in zip(*np.unique(mine, return_counts=True), strict=True)
        }
    counts = outcome.counts
    assert counts["mapped"] - counts["evicted"] - counts["given_back"] == mapped.sum()
    assert bool(counts["given_back"]) == (way.cold is not None)
    assert 0 <= outcome.disk_share <= 1
    assert (rack.valid[~mapped] == 0).all()
