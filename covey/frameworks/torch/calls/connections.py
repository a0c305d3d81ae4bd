"""Connections of gloo, for what no round of all ranks can do: groups of some ranks, messages from one to another.

They are made at first use, and with them the job gives up healing: a process that takes a lost one's place has none of
them. Rank 0 serves the store in which gloo's ranks find one another, at a port that the system chooses. Who needs it
tells all ranks, whatever their scripts do, and again until it has what it needs:

    rank that calls                                each other rank
      WANTED(call, everyone)  ->                     notes the call: the job heals no more
                                                     if it is for everyone: connects too, in a thread of its own
                                                   rank 0
                              <-  STORE_AT(address)
"""

import enum
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from covey.core.errors import CoveyError
from covey.tensors.numbers.telling import Tell, ToldByRank

MAKE_S = 300.0
"""Seconds within which all ranks that belong to a group must have come."""
ASK_S = 0.3
"""Seconds until a message is repeated."""
CALL_BYTES_MAX = 200
EVERYONE, SOME = b"*", b"-"


class AboutConnections(enum.IntEnum):
    """Kinds of messages among ranks, beside those of `covey.healing.state_pieces.About`."""

    WANTED = 82
    STORE_AT = 83


def address_of(data: bytes) -> tuple[str, int]:
    """Host and port in a message. ValueError when there are none."""
    host, _, port = data.decode("ascii").rpartition(":")
    if not host or len(host) > 255 or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError("no address")
    return host, int(port)


def own_address(master: str) -> str:
    """An address at which other hosts reach this one: `master` (MASTER_ADDR) if it is this host's, else its name."""
    try:
        family, _, _, _, at = socket.getaddrinfo(master, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as tried:
            tried.bind(at)
    except (OSError, IndexError):
        return socket.gethostname()
    return master


class GlooConnections:
    """The connections of one rank. The script's thread calls the first group of methods, a link's thread `told`."""

    def __init__(self, rank: int, ranks: int, tell: Callable[[Tell], None], note: Callable[[str], None]) -> None:
        """`note` is called, from any thread, with the call that makes the job heal no more, in words."""
        self._rank, self._ranks, self._tell, self._note = rank, ranks, tell, note
        self._changed = threading.Condition()
        """Guards the fields below."""
        self._server: Any = None
        self._at: tuple[str, int] | None = None
        self._connects = False
        self._everyone: Any = None
        self._failed: BaseException | None = None

    # ---- from the script ----

    def everyone(self, call: str) -> Any:
        """Gloo's group of all ranks; waits until all are connected. CoveyError when they are not in time."""
        self._note(call)
        self._connect(call)
        self._until(lambda: self._everyone is not None or self._failed is not None, call, EVERYONE)
        if self._failed is not None:
            raise _not_made(call, str(self._failed)) from self._failed
        return self._everyone

    def of(self, ranks: Sequence[int], name: str, call: str) -> Any:
        """Gloo's group of these ranks, which all call this; waits for them. Errors as of `everyone`."""
        self._note(call)
        if self._rank not in ranks:
            return None
        try:
            return self._gloo(f"covey/{name}", ranks.index(self._rank), len(ranks), call, SOME)
        except RuntimeError as error:
            raise _not_made(call, str(error)) from error

    # ---- from a link ----

    def told(self, told: ToldByRank) -> bool:
        """Handle a message of another rank. Whether it is about connections; a malformed one is ignored."""
        if told.about == AboutConnections.WANTED:
            data = bytes(told.data[:CALL_BYTES_MAX])
            call = data[1:].decode(errors="replace")
            self._note(call)
            if data[:1] == EVERYONE:
                self._connect(call)
            if self._rank == 0:
                host, port = self._served()
                self._tell(Tell(told.rank, AboutConnections.STORE_AT, 0, f"{host}:{port}".encode()))
        elif told.about == AboutConnections.STORE_AT and told.rank == 0:
            try:
                at = address_of(bytes(told.data[:300]))
            except ValueError:
                return True
            with self._changed:
                self._at = at
                self._changed.notify_all()
        return told.about in (AboutConnections.WANTED, AboutConnections.STORE_AT)

    # ---- inside ----

    def _connect(self, call: str) -> None:
        """Connect with all ranks, in a thread, unless that was begun."""
        with self._changed:
            if self._connects:
                return
            self._connects = True
        threading.Thread(target=self._connect_all, args=(call,), name="covey-connects", daemon=True).start()

    def _connect_all(self, call: str) -> None:
        try:
            made = self._gloo("covey/everyone", self._rank, self._ranks, call, EVERYONE)
        except (RuntimeError, OSError) as error:
            with self._changed:
                self._failed = error
                self._changed.notify_all()
            return
        with self._changed:
            self._everyone = made
            self._changed.notify_all()

    def _gloo(self, name: str, rank: int, ranks: int, call: str, who: bytes) -> Any:
        if self._rank == 0:
            self._served()
            self._want(call, who)
        self._until(lambda: self._at is not None, call, who)
        assert self._at is not None, "awaited"
        within = timedelta(seconds=MAKE_S)
        store = self._server or dist.TCPStore(*self._at, is_master=False, timeout=within, wait_for_workers=False)
        return dist.ProcessGroupGloo(dist.PrefixStore(f"{name}/", store), rank, ranks, within)

    def _served(self) -> tuple[str, int]:
        """Where rank 0 serves the store."""
        with self._changed:
            if self._at is None:
                host = own_address(os.environ.get("MASTER_ADDR", ""))
                within = timedelta(seconds=MAKE_S)
                self._server = dist.TCPStore(host, 0, is_master=True, timeout=within, wait_for_workers=False)
                self._at = host, self._server.port
                self._changed.notify_all()
            return self._at

    def _want(self, call: str, who: bytes) -> None:
        for rank in range(self._ranks):
            if rank != self._rank:
                said = who + call.encode()[: CALL_BYTES_MAX - 1]
                self._tell(Tell(rank, AboutConnections.WANTED, 0, said))

    def _until(self, is_so: Callable[[], bool], call: str, who: bytes) -> None:
        end_s = time.monotonic() + MAKE_S
        while not is_so():
            if time.monotonic() > end_s:
                raise _not_made(call, f"not all ranks that belong to it were connected within {MAKE_S:.0f} s")
            self._want(call, who)
            with self._changed:
                self._changed.wait_for(is_so, ASK_S)


def _not_made(call: str, why: str) -> CoveyError:
    next_ = "call it on every rank that belongs to it; give GLOO_SOCKET_IFNAME where a host's name leads nowhere"
    return CoveyError(f"{call} was not done", why, next_)
