"""`covey-sim memory`: what it prints, what it refuses, and that a seed repeats it."""

import gzip
import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.core.units import GIB
from sim import main as sim
from sim.memory import racks as memory_racks
from sim.memory import reports as memory_reports
from sim.memory import views as memory_views
from sim.memory import workload as memory_workload
from sim.memory.cluster import Rack, Strategy, ours, published
from sim.memory.pages import FILL_BYTES_PER_S, Pages
from sim.memory.reports import Setting
from sim.report import Wrong
from tests.families import in_gate

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


@pytest.mark.long
def test_every_experiment_can_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """The setting is small enough to take a second or two."""
    small = ["--trials", "20", "--crowd", "40", "--ages", "0", "3"]
    assert sim.main([*SMALL, *small, "--show", "fill", "sensitivity", "eviction", "racks", "views", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {"fill", "sensitivity", "eviction", "racks", "views"} <= set(told)
    assert "cluster" not in told
    assert {run["way"] for run in told["views"]["runs"]} == set(memory_views.WAYS)


def test_a_larger_cluster_has_as_many_containers_on_each_host(capsys: pytest.CaptureFixture[str]) -> None:
    assert sim.main([*SMALL, "--crowd", "6", "9", "--seconds", "60", "--show", "large", "--json"]) == 0
    points = json.loads(capsys.readouterr().out)["large"]["points"]
    assert [(each["hosts"], each["containers"]) for each in points[::3]] == [(6, 16), (9, 24)]
    for without, paper, covey in (points[:3], points[3:]):
        assert without["utilization"] < min(paper["utilization"], covey["utilization"])
        assert covey["disk_share"] < paper["disk_share"] < without["disk_share"] == 1


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
def test_no_slab_is_lost_with_a_rack_when_members_lie_apart_and_some_are_when_not(
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
    in_gate(
        2,
        [
            ours(),
            Strategy("cold", hot=1.25, cold_share=0.8),
            published(),
            Strategy("auto", auto_headroom=True, auto_lend=True, drawn=6),
            Strategy("one by lot", choices=1, drawn=1),
        ],
    ),
)
def test_the_machines_of_a_rack_believe_what_the_rack_has_in_every_second(way: Strategy) -> None:
    """Slabs by place, by lender and by borrower are the same slabs; no host lends to itself."""
    setting = Setting(hosts=5, containers=22, seconds=250)
    rack = Rack(way, setting.host_bytes, memory_reports.HEADROOM, setting.load(3), random.Random(3))
    for second in range(setting.seconds):
        rack.second(second)
        rack.check()
    counts, mapped = rack.counts, rack.pages.lender >= 0
    assert mapped.any()
    assert counts["mapped"] - counts["evicted"] - counts["given_back"] == mapped.sum()
    assert bool(counts["given_back"]) == (way.cold_share > 0)
    assert (rack.pages.valid[~mapped] == 0).all()


def crowded(way: Strategy, seconds: int = 250) -> Rack:
    """Five hosts with enough containers that slabs are taken back."""
    setting = Setting(hosts=5, containers=22, seconds=seconds)
    rack = Rack(way, setting.host_bytes, memory_reports.HEADROOM, setting.load(3), random.Random(3))
    for second in range(seconds):
        rack.second(second)
    return rack


def test_an_evicted_slab_moves_with_its_pages_and_a_published_one_starts_empty() -> None:
    """Reference: §2.4.4."""
    by_one = Strategy("one by lot", choices=1, drawn=1, hot=1.25)
    moved, anew = crowded(by_one), crowded(replace(by_one, published=True))
    assert moved.counts["moved"] > 0 == anew.counts["moved"] < anew.counts["evicted"]
    assert moved.pages.valid[moved.pages.lender >= 0].mean() > 0.95 > anew.pages.valid[anew.pages.lender >= 0].mean()


def test_with_lend_auto_nobody_lends_more_than_half_of_what_was_free_at_first() -> None:
    """An agent lends like this by default: `lend = "auto"`. Reference: §2.5.1."""
    one, auto = Strategy("one by lot", choices=1, drawn=1, hot=1.25), {}
    for capped in (False, True):
        rack = crowded(replace(one, auto_lend=capped), 120)
        free = rack.host_bytes - rack.pages.local[0] - memory_reports.HEADROOM.of(rack.host_bytes)
        lent = [sum(slab.size_bytes for slab in each.lent.values()) for each in rack.lenders]
        auto[capped] = float((np.array(lent) / free).max())
    assert 0.3 < auto[True] <= 0.5 < auto[False]


def test_the_new_place_of_a_slab_has_what_was_copied_when_the_old_one_closes() -> None:
    load = (np.zeros((1, 2)), np.full((1, 2), float(GIB)), np.ones((1, 2)))
    pages = Pages(GIB, True, load, random.Random(1))
    pages.second(0)
    assert pages.open(0, 0, epoch=1, lender=1, now_s=0.0) is None
    pages.valid[0] = 0.5
    filled_s = pages.open(0, 0, epoch=2, lender=0, now_s=10.0)
    assert filled_s is not None and filled_s == pytest.approx(10 + 0.5 * GIB / FILL_BYTES_PER_S)
    assert pages.close(0, 0, epoch=1, now_s=10.0 + (filled_s - 10.0) / 2)
    assert (pages.lender[0], pages.epoch[0]) == (0, 2)
    assert pages.valid[0] == pytest.approx(0.25)
    assert not pages.close(0, 0, epoch=1, now_s=20.0), "that place was closed before"
    assert not pages.close(0, 0, epoch=2, now_s=20.0)
    assert (pages.lender[0], pages.valid[0]) == (-1, 0.0)


def test_pages_are_counted_whole_and_none_is_lost_or_counted_twice() -> None:
    load = (np.zeros((40, 2)), np.full((40, 2), 3.0 * GIB), np.full((40, 2), 0.7))
    pages = Pages(GIB, True, load, random.Random(1))
    counted = np.array([np.concatenate(pages.counted(pages.second(second))) for second in range(40)])
    assert counted.dtype.kind == "i" and counted.shape == (40, 6)
    assert np.abs(counted.sum() - 40 * 2 * 0.7) < 6
