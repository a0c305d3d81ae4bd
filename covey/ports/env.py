"""All ports of one host, given to every service."""

import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from covey.core.ids import HostId
from covey.core.job_records import NO_JOB_RECORDS, JobRecords
from covey.ports.clock import Clock
from covey.ports.datagrams import Datagrams
from covey.ports.disk import Disk
from covey.ports.links import Links
from covey.ports.log import Logger
from covey.ports.pages import Pages
from covey.ports.probes import Probes
from covey.ports.processes import Processes
from covey.ports.starter import NOBODY_ELSE, StartsAs
from covey.ports.streams import Bytes
from covey.ports.users import NOBODY_KNOWN, Users
from covey.ports.verbs import NO_VERBS_HERE, Verbs


@dataclass(frozen=True)
class Env:
    """The ports of one host, or of one program. Given to every service when it is made."""

    host: HostId
    clock: Clock
    rng: random.Random
    entropy: Callable[[int], bytes]
    """Unpredictable bytes, for keys, tokens and nonces."""
    spawn: Callable[[str, Coroutine[Any, Any, Any]], object]
    """Run a coroutine as a named task that is kept, cancelled at shutdown, and whose exception stops its plugin."""
    log: Logger
    datagrams: Datagrams
    links: Links
    bytes: Bytes
    disk: Disk
    processes: Processes
    probes: Probes
    pages: Pages
    run_dir: str
    """Directory of this host's unix sockets: `unix:{run_dir}/NAME.sock`. Short: a socket path has 107 bytes at most."""
    verbs: Verbs = NO_VERBS_HERE
    starter: StartsAs = NOBODY_ELSE
    byte_path: str = ""
    """How the byte path of remote memory runs in this process, or in programs that it starts: `compiled`, or
    `interpreted`, why, and the next step. Empty: not known here."""
    users: Users = NOBODY_KNOWN
    records: JobRecords = NO_JOB_RECORDS
