"""What is written down about ranks that were started here: one record per job and epoch, and where its files lie."""

import re

import msgspec

from covey.core import JobId
from covey.ports import ProcessId
from plugins.base import RanksSpec

START_OR_FORGOTTEN = re.compile(r"^jobs/([a-z0-9][a-z0-9.-]{0,62})/(?:(\d{1,18})\.start|forgotten)$")
Key = tuple[JobId, int]


class Record(msgspec.Struct, frozen=True):
    """`jobs/JOB/EPOCH.start`."""

    spec: RanksSpec
    token: str
    supervisor: ProcessId | None = None
    """None until it is started, or when the agent died in between."""


decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


def instance_of(key: Key) -> str:
    return f"sup-{key[0]}-{key[1]}"


def file_of(key: Key, ending: str) -> str:
    return f"jobs/{key[0]}/{key[1]}.{ending}"


def log_of(job: JobId, rank: int) -> str:
    return f"jobs/{job}/rank{rank}.log"
