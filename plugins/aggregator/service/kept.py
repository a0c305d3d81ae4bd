"""State of the aggregator plugin of one host, which is kept on disk."""

import msgspec

from covey.ports.processes import ProcessId
from plugins.aggregator.machine.direct_tables import DirectTable
from plugins.aggregator.machine.served_job import ServedJob
from plugins.aggregator.messages import Assigned


class AggregatorState(msgspec.Struct, frozen=True):
    """Content of the state file."""

    process: ProcessId | None = None
    held: list[ServedJob] = []
    known: list[Assigned] = []
    direct: list[DirectTable] = []


kept_states = msgspec.msgpack.Decoder(AggregatorState)
