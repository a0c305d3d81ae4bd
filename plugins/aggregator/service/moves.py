"""A person moves the sums of a table to another host: `agentctl tensors --move j7/1 gpu4`.

    any agent --MoveTensors--> its owner --Handover, wished--> its coordinator --Offer--> the host that was named

It stays with its owner until that host accepted, and one that declines is asked again, less and less often. The wish
holds until the job's run is over, or another host is its coordinator.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from covey.core.errors import Refused
from covey.core.ids import HostId, JobId
from covey.tensors.numbers.blocks import job_of
from plugins.aggregator.messages import MoveTensors
from plugins.facts import HostView
from plugins.gossiped import AggregatorNow


class TableMove(msgspec.Struct, frozen=True):
    """A person's order to move a table."""

    owner: HostId
    """Host that sums it now."""
    order: MoveTensors


def move_of(
    given: Mapping[str, Any], hosts: Sequence[HostView], of_job: Callable[[JobId], Collection[HostId]] = lambda job: ()
) -> TableMove:
    """Parse the order: `job`, `epoch` and `from` as `agentctl tensors` shows them, `to`. `of_job`: hosts
    whose ranks may own the job's tables. Refused."""
    try:
        order = msgspec.convert({name: given.get(name) for name in ("job", "epoch", "to")}, MoveTensors)
        owner = msgspec.convert(given.get("from"), HostId)
    except msgspec.ValidationError as error:
        raise Refused(2, "nothing was moved", str(error), "agentctl tensors --move j7/1 gpu4") from error
    what, views = f"{order.job} was not moved", {view.host: view for view in hosts}
    if owner == order.to:
        raise Refused(4, what, f"{owner} already sums it", "agentctl tensors")
    for host in (owner, order.to):
        if host not in views:
            raise Refused(3, what, f"there is no host {host!r}", "agentctl hosts")
    view = views[order.to]
    now = view.value("aggregator", AggregatorNow)
    if view.state != "alive":
        raise Refused(4, what, f"{order.to} is {view.state}", "agentctl hosts")
    sums = isinstance(now, AggregatorNow) and bool(now.address)
    if not sums and order.to not in of_job(job_of(order.job)):
        why = f"{order.to} does not sum tensors"
        raise Refused(4, what, why, "set serve = true in [aggregator] of its agent.toml")
    return TableMove(owner, order)
