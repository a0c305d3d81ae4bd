"""The formulas and orders of SWIM and Lifeguard, as pure functions."""

import hashlib
import math
import random
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, TypeVar

from covey.ports.addresses import Address
from gossip.membership.messages import MemberRecord
from gossip.types import State

T = TypeVar("T")

STATES: tuple[State, ...] = ("alive", "suspect", "gone", "left")
"""The states: at equal boot and incarnation the later in this order supersedes the earlier (SWIM 4.2)."""
SUSPICION_LONGEST = 6
"""The longest suspicion as a multiple of the shortest (memberlist, SuspicionMaxTimeoutMult)."""
HEALTH_MAX = 7
"""The worst local health score; the probe interval is multiplied by score + 1 (Lifeguard; memberlist: 8 is the
most)."""
ALONE_INTERVAL_S_MAX = 10.0
"""The longest pause between two calls of a host that is alone, seconds."""
CALLED_AT_ONCE = 3
"""The number of missing hosts that are called in one go by a host that is not alone."""


def rank(state: State) -> int:
    """How much a state outweighs another of the same incarnation: alive 0, suspect 1, gone 2, left 3 (SWIM 4.2)."""
    return STATES.index(state)


def supersedes(new: tuple[int, int, State], old: tuple[int, int, State]) -> bool:
    """Whether a received (boot, incarnation, state) replaces the one known of the same identity."""
    return (new[0], new[1], rank(new[2])) > (old[0], old[1], rank(old[2]))


def retransmits(factor: int, hosts: int) -> int:
    """How often each host sends a rumour (memberlist, retransmitLimit)."""
    return factor * math.ceil(math.log10(hosts + 1))


def suspicion_shortest_s(factor: int, hosts: int, interval_s: float) -> float:
    """Seconds of a suspicion with enough confirmations, or too few hosts to confirm. memberlist takes the factor times
    log10(hosts): twice as long at 100 hosts as at 10. What takes longer there is only that the word reaches the suspect
    and its refutation all others, some rounds of 0.2 s: so it is an eighth longer for each ten times as many hosts."""
    return factor * (1 + max(0.0, math.log10(max(1, hosts)) - 1) / 8) * interval_s


def suspicion_s(confirmations: int, expected: int, shortest_s: float) -> float:
    """Seconds for which a host is suspected: they shrink with the logarithm of independent confirmations (Lifeguard
    IV-B)."""
    if expected < 1:
        return shortest_s
    longest_s = SUSPICION_LONGEST * shortest_s
    shrunk = longest_s - (longest_s - shortest_s) * math.log(confirmations + 1) / math.log(expected + 1)
    return max(shortest_s, shrunk)


def confirmations_expected(factor: int, possible: int) -> int:
    """The number of confirmations that make a suspicion as short as can be; 0 when fewer hosts could give one
    (memberlist, suspectNode: k = factor - 2)."""
    expected = max(0, factor - 2)
    return expected if possible >= expected else 0


def health(score: int, change: int) -> int:
    """The local health score, 0 (healthy) to 7, after a change (Lifeguard IV-A)."""
    return min(HEALTH_MAX, max(0, score + change))


def change_after_failed_probe(helpers: int, nacks: int) -> int:
    """The change of the health score after a failed probe: a host that asked helpers and got not even their Nacks is
    slow or cut off itself (Lifeguard, missed nacks)."""
    return helpers - nacks if helpers else 1


def overlap_s(intervals: Iterable[tuple[float, float]], start_s: float, end_s: float) -> float:
    """Seconds of the intervals within (start, end)."""
    return sum(max(0.0, min(end, end_s) - max(start, start_s)) for start, end in intervals)


def some(candidates: Sequence[T], count: int, rng: random.Random) -> list[T]:
    """A random choice of at most `count` candidates, in random order."""
    return rng.sample(candidates, min(count, len(candidates)))


CALL_FIRST_S = 0.5
"""Seconds to pause after the first call of missing hosts."""


def call_after_s(last_s: float, alone: bool, longest_s: float) -> float:
    """Seconds to the next call of missing hosts, which double each time."""
    return min(last_s * 2, ALONE_INTERVAL_S_MAX if alone else longest_s, longest_s)


def sync_interval_s(base_s: float, hosts: int) -> float:
    """Seconds between comparisons of tables, longer on large racks: one more `base_s` for each doubling above 32 hosts
    (memberlist, pushPullScale)."""
    return base_s if hosts <= 32 else base_s * (math.ceil(math.log2(hosts) - 5) + 1)


def checksum(records: Iterable[MemberRecord]) -> int:
    """The checksum of the live part of a member table, 63 bits. Suspicions come and go, and only some hosts know the
    dead: neither counts."""
    digest = hashlib.blake2b(digest_size=8, person=b"covey-members")
    for record in sorted(records, key=lambda record: record.host):
        if record.state <= 1:
            about = (record.host, record.uuid.hex(), record.boot, record.incarnation, record.address)
            digest.update(repr(about).encode())
    return int.from_bytes(digest.digest(), "big") >> 1


Change = Literal["none", "news", "conflict", "reclaim"]


class Claimant(NamedTuple):
    """A machine that has a name, or claims it."""

    identity: int
    boot: int
    address: Address
    """The address that it speaks from, which says more than the address that it gives."""


Claim = Literal["same", "later", "earlier", "elsewhere"]
"""Who claims a name: the same identity; another one at the same address, which began later or earlier; or one
elsewhere."""


def claim(known: Claimant, other: Claimant) -> Claim:
    """How the other machine claims the name that is known. One process at a time has an address: the later of two is
    the known machine, whose identity file was lost."""
    if other.identity == known.identity:
        return "same"
    if other.address != known.address:
        return "elsewhere"
    return "later" if other.boot > known.boot else "earlier"


def change(has_name: bool, claimed: Claim, news: bool) -> Change:
    """What an `Alive` changes for its name: the first machine keeps a name until it is gone, also while it restarts."""
    if claimed == "same":
        return "news" if news else "none"
    if claimed == "later" or not has_name:
        return "reclaim"
    return "none" if claimed == "earlier" else "conflict"
