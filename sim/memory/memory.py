"""Remote memory: how evenly and how fully a rack's memory is used, and what happens at thousands of hosts.

Without more it rebuilds the paper's cluster (32 hosts, 90 containers) and its batch eviction. --show says what else:
  cluster      memory in use with and without remote memory, beside other ways to choose a lender
  eviction     batch eviction against the paper's formula
  fill         more containers on the same hosts, until paging reaches the disk
  sensitivity  what the paper leaves open about its workload
  racks        volumes kept in memory only, and a whole rack is lost
  views        1,000 and 5,000 hosts that choose on gossip 0 to 10 s old
  large        the cluster on 1,000 and 5,000 hosts (--crowd; an hour, so no part of `all`)
Your own rack: --file containers.csv with the columns host,limit,working_set (sizes such as 12 GiB).
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from covey.core.units import format_size, parse_size
from plugins.memory.policy.settings import MemorySettings
from sim.memory import racks as memory_racks
from sim.memory import reports as memory_reports
from sim.memory.reports import Setting
from sim.memory.workload import KEPT, SECONDS, SYSTEM_BYTES, containers_from
from sim.report import Progress, Report, Wrong

HELP = "remote memory: a rack of hosts and containers"
SEED = 1
SHOWN = ("cluster", "eviction", "fill", "sensitivity", "racks", "views", "large")
SLABS_MAX = 500_000
"""Most slabs in one simulated rack."""
AGES_S = (0.0, 1.0, 3.0, 10.0)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--show", nargs="+", choices=(*SHOWN, "all"), default=["cluster", "eviction"], metavar="WHAT")
    parser.add_argument("--hosts", type=int, default=32, help="hosts of the cluster (default 32)")
    parser.add_argument("--containers", type=int, default=90, help="containers on them (default 90)")
    parser.add_argument("--file", type=Path, metavar="CSV", help="containers of your own rack: host,limit,working_set")
    parser.add_argument("--memory", default="64 GiB", help="memory of each host (default 64 GiB)")
    parser.add_argument("--slab", default=MemorySettings().slab, help="size of a slab (default that of agent.toml)")
    parser.add_argument(
        "--headroom", default=MemorySettings().headroom, help="a size, a share or `auto` (default 12.5 %%)"
    )
    parser.add_argument("--kept", type=float, default=KEPT, help="resident pages that also lie in swap, 0 to 1")
    parser.add_argument("--view-age", type=int, default=1, metavar="S", help="age of gossip in the cluster, seconds")
    parser.add_argument("--seconds", type=int, default=SECONDS, help=f"length of a run (default {SECONDS})")
    parser.add_argument("--runs", type=int, default=3, help="runs by consecutive seeds (default 3)")
    parser.add_argument(
        "--crowd", type=int, nargs="+", default=[1000, 5000], metavar="N", help="hosts in `views` and `large`"
    )
    parser.add_argument("--ages", type=float, nargs="+", default=list(AGES_S), metavar="S", help="ages in `views`")
    parser.add_argument("--evict", type=int, default=10, help="E in `eviction` (default 10)")
    parser.add_argument("--trials", type=int, default=1000, help="trials in `eviction` (default 1000)")


def run(options: argparse.Namespace, progress: Progress) -> Report:
    wanted = [name for name in SHOWN if name in options.show or ("all" in options.show and name != "large")]
    setting = setting_of(options)
    experiments: dict[str, Callable[[Progress], Report]] = {
        "cluster": lambda told: memory_reports.cluster(setting, told),
        "eviction": lambda told: memory_reports.batch_eviction(
            options.evict, 50 * options.evict, options.trials, options.seed, told
        ),
        "fill": lambda told: memory_reports.fill(setting, told),
        "sensitivity": lambda told: memory_reports.sensitivity(setting, told),
        "racks": lambda told: memory_racks.report(options.seed, told),
        "views": lambda told: memory_reports.views(options.crowd, options.ages, options.seed, told),
        "large": lambda told: memory_reports.large(setting, options.crowd, told),
    }
    reports: list[Report] = []
    for number, name in enumerate(wanted):

        def told(share: float, text: str, number: int = number, name: str = name) -> None:
            progress((number + share) / len(wanted), f"{name}: {text}")

        reports.append(experiments[name](told))
    return memory_reports.together("memory", reports)


def setting_of(options: argparse.Namespace) -> Setting:
    """The setting that the options ask for, checked; raises `Wrong`."""
    _within("--hosts", options.hosts, 2, 2000)
    _within("--containers", options.containers, 1, 20_000)
    _within("--runs", options.runs, 1, 1000)
    _within("--seconds", options.seconds, 2, 1_000_000)
    _within("--view-age", options.view_age, 0, 600)
    _within("--evict", options.evict, 2, 1000)
    _within("--trials", options.trials, 1, 1_000_000)
    for hosts in options.crowd:
        _within("--crowd", hosts, 2, 20_000)
    for age_s in options.ages:
        _within("--ages", age_s, 0, 60)
    _within("--kept", options.kept, 0, 1)
    try:
        settings = msgspec.convert({"slab": options.slab, "headroom": options.headroom}, MemorySettings)
        host_bytes = parse_size(options.memory)
    except (msgspec.ValidationError, ValueError) as error:
        raise Wrong("this rack cannot be", str(error), "covey-sim memory --help") from None
    if host_bytes < max(2 * SYSTEM_BYTES, 4 * settings.slab_bytes):
        raise Wrong(f"--memory {options.memory}", "it holds the system and no slab", "give hosts 8 GiB or more")
    if settings.slab_bytes * 4096 < host_bytes:
        raise Wrong(f"--slab {options.slab}", "a host would have over 4,096 of them", "larger slabs, or smaller hosts")
    setting = Setting(
        hosts=options.hosts,
        containers=options.containers,
        host_bytes=host_bytes,
        slab_bytes=settings.slab_bytes,
        headroom=settings.headroom_kept,
        kept=options.kept,
        view_age_s=options.view_age,
        runs=options.runs,
        seconds=options.seconds,
        seed=options.seed,
    )
    if options.file is None:
        return setting
    names, given = containers_from(options.file)
    if len(names) < 2:
        raise Wrong(f"{options.file}", "all containers lie on one host", "remote memory needs at least two hosts")
    for host, name in enumerate(names):
        held = sum(min(one.limit_bytes, one.working_set_bytes) for one in given if one.host == host)
        if held + SYSTEM_BYTES > host_bytes:
            why = f"its containers may hold {format_size(held)}, and it has {format_size(host_bytes)}"
            raise Wrong(f"{options.file}: host {name}", why, "say how much a host has with --memory")
    if sum(one.working_set_bytes for one in given) > SLABS_MAX * settings.slab_bytes:
        raise Wrong(f"{options.file}", f"more than {SLABS_MAX:,} slabs of {options.slab}", "choose a larger --slab")
    return replace(setting, hosts=len(names), given=tuple(given))


def _within(flag: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise Wrong(f"{flag} {value:g}", f"expected {least:g} to {most:g}", "covey-sim memory --help")
