"""What gossip costs a host of a large rack, how old facts are there, and when a death is known, in virtual time.

    python bench/control/gossip_crowd.py [--hosts 200] [--seconds 10] [--kills 4] [--json FILE]

Datagrams are sealed and opened for real, and counted as UDP payload. A change: each host writes a value of 24 bytes
once a second. Ages are looked at once a second on twenty hosts. Processor time is that of machines and seals, without
sockets.
"""

import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.live_command import json_option, keep, options, print_head
from chaos.crowds.gossip import Crowd, Member

WARM_S = 9.0
VALUE_BYTES = 24


def rack(hosts: int, seed: int) -> tuple[Crowd, list[Member]]:
    crowd = Crowd(seed=seed)
    crowd.checking = False
    return crowd, crowd.rack(hosts)


def changes(crowd: Crowd, host: Member, rng: random.Random) -> None:
    """Let a host write a value once a second, for ever."""
    host.spread("spare", rng.randbytes(VALUE_BYTES))
    crowd.after(1.0, host, lambda: changes(crowd, host, rng))


def ages(crowd: Crowd, looking: list[Member]) -> list[float]:
    views = [view for host in looking for view in host.gossip.hosts(crowd.now_s) if view.host != host.name]
    return [view.age_s for view in views if view.state == "alive"]


def cost(hosts: int, seconds: int, changing: bool) -> dict[str, float]:
    crowd, members = rack(hosts, seed=1)
    rng = random.Random(7)
    for member in members:
        if changing:
            crowd.after(rng.random(), member, lambda member=member: changes(crowd, member, rng))
        else:
            member.spread("spare", rng.randbytes(VALUE_BYTES))
    crowd.run(WARM_S)
    sent, sent_bytes = sum(each.sent for each in members), sum(each.sent_bytes for each in members)
    began_s, found = time.process_time(), []
    for _ in range(seconds):
        crowd.run(1.0)
        found += ages(crowd, members[:: max(1, hosts // 20)])
    shares, cut = hosts * seconds, statistics.quantiles(found, n=100)
    return {
        "packets_s": (sum(each.sent for each in members) - sent) / shares,
        "bytes_s": (sum(each.sent_bytes for each in members) - sent_bytes) / shares,
        "core": (time.process_time() - began_s) / shares,
        "age_p50_s": cut[49],
        "age_p99_s": cut[98],
    }


def death_known_s(hosts: int, seed: int) -> float:
    """Seconds until all know that a host was killed."""
    crowd, members = rack(hosts, seed)
    crowd.run(8.0 + seed / 7 % 1)
    victim = members[seed % hosts]
    crowd.kill(victim)
    return crowd.run(30.0, lambda: crowd.all_see(victim.name, "gone"))


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--hosts", type=int, default=200)
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--kills", type=int, default=4)
    json_option(parser)
    args = parser.parse_args()
    found: dict[str, object] = {"hosts": args.hosts}
    print_head("hosts | what they do | packets/s a host | KB/s a host | % of a core | age p50, s | p99, s")
    for name in ("nothing", "a change a second each"):
        row = cost(args.hosts, args.seconds, name != "nothing")
        found[name] = row
        shown = f"{row['packets_s']:.1f} | {row['bytes_s'] / 1000:.2f} | {100 * row['core']:.2f}"
        print(f"| {args.hosts} | {name} | {shown} | {row['age_p50_s']:.1f} | {row['age_p99_s']:.1f} |", flush=True)
    known = sorted(death_known_s(args.hosts, seed) for seed in range(args.kills))
    found["death_known_s"] = known
    print(f"\na death was known by all after {', '.join(f'{each:.1f}' for each in known)} s")
    keep(found, args.json)


if __name__ == "__main__":
    main()
