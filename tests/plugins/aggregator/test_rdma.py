"""Which way tensors travel between ranks of two hosts, as agents tell ranks and people."""

import pytest

from covey.ports.verbs import NoVerbsHere
from covey.wire.sums import NOTHING, Now
from plugins.aggregator.messages import AggregatorSettings
from plugins.aggregator.service.rdma import told
from tests.plugins.aggregator.ranks import Job
from tests.plugins.aggregator.test_direct import HOSTS, direct_rack, plugin
from tests.plugins.memory.stand_in_verbs import StandInNetwork, StandInVerbs

HERE = StandInVerbs(StandInNetwork())


def said(pairs: int, no_rdma: str = "") -> Now:
    return Now("10.0.0.1:5", [], 0.0, 0, 0, 0, pairs=pairs, no_rdma=no_rdma)


@pytest.mark.parametrize(
    "settings, line",
    [
        (AggregatorSettings(rdma="never"), "over TCP; RDMA is switched off ([aggregator] rdma)"),
        (
            AggregatorSettings(direct="never"),
            "over TCP; RDMA is for ranks that exchange tensors directly ([aggregator] direct)",
        ),
        (AggregatorSettings(), "over RDMA (stand-in): 0 connections to tables of ranks here"),
    ],
)
def test_the_line_names_the_setting_that_prevents_rdma(settings: AggregatorSettings, line: str) -> None:
    assert told(settings, HERE, []) == line


def test_the_line_says_what_this_host_lacks() -> None:
    line = told(AggregatorSettings(), NoVerbsHere("this host has no RDMA device"), [said(0)])
    assert line == "over TCP; no RDMA: this host has no RDMA device"


def test_the_line_says_what_ranks_met() -> None:
    """Each opens the device by itself, with the Python and the limits that it has."""
    locked = "the device refuses to register 4198400 bytes (memory that may be locked: ulimit -l)"
    ranks = [said(2), said(1, locked), None, said(0, locked), said(0, "a\nb"), NOTHING]
    assert told(AggregatorSettings(), HERE, ranks) == (
        f"over RDMA (stand-in): 3 connections to tables of ranks here; over TCP instead: ab; over TCP instead: {locked}"
    )


@pytest.mark.parametrize("rdma", ["auto", "never"])
def test_ranks_are_told_whether_they_may_use_rdma(rdma: str) -> None:
    """Both who owns a table and who pushes to it, each by its own agent."""
    with direct_rack(60, rdma=rdma) as rack:
        job = Job(rack, HOSTS, rounds=6, cut=True, direct=True)
        rack.until(job.reached(3), 60, "round 3")
        assert {at.rdma for rank in job.ranks for at in rank.told} == {rdma == "auto"}
        assert {order.rdma for rank in job.ranks for order in rank.orders} == {rdma == "auto"}
        job.finish()
        (line,) = {plugin(job, host).status()["tensors"] for host in HOSTS}
        assert line.startswith("over TCP; no RDMA: " if rdma == "auto" else "over TCP; RDMA is switched off")


def test_an_aggregator_of_its_own_is_reached_over_tcp() -> None:
    with direct_rack(61) as rack:
        job = Job(rack, HOSTS, rounds=6, cut=True, direct=False)
        rack.until(job.reached(3), 60, "round 3")
        assert {at.rdma for rank in job.ranks for at in rank.told} == {False}
        job.finish()
