"""covey-chaos: play failure stories on a simulated rack, repeat one by its seed, look for seeds that break something.

    covey-chaos sim --seed 7                 one story of many faults; what happened, and its hash
    covey-chaos sim --seed 7 --story half_and_half --log --until 30
    covey-chaos hash --seed 7                only the hash: equal seeds have equal hashes, under any PYTHONHASHSEED
    covey-chaos crowd --hosts 1000 --seed 7  machines only
    covey-chaos soak --seeds 1-1000 --cpu-seconds 600
    covey-chaos mutants --area memory        do the checks notice planted bugs?
    covey-chaos storm --seed 1 --seconds 1800   real agents in network namespaces, a fault every 10 s

Exit status: 0 all held, 1 something did not (the line that repeats it is printed), 2 usage.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from chaos.checks import handlers
from chaos.crowds.crowd import gossip_story
from chaos.crowds.memory_crowd import memory_story
from chaos.known_trials import KnownTrials
from chaos.novelty import VARIATIONS, Seen
from chaos.planted import known_mutants, range_of
from chaos.proving import WORKERS_MAX, prove
from chaos.story import held_stories, known_stories, stories_of_worlds, tell

SHOWN = re.compile(r"^ *[\d.]+ \S+ +(settings|fault|healed|failover|power|agent started|process ended|warning|error)")
"""Lines of a story that are printed without --log."""
GOSSIP_HOSTS_MAX = 100
"""Most hosts that gossip in the crowd without --gossip: every one compares itself with all."""
MIXED = ("mischief", "people", "strangers")
"""Stories that a soak for handlers plays in turn, beside directed ones."""
VARIED_AFTER = 60
"""Stories of a soak after which seeds are varied: to the first ones every state is new."""
REPEATED = 20
"""One seed in this many is played again under another PYTHONHASHSEED."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    try:
        sys.exit(options.run(options))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("covey-chaos", description="Failure stories on a simulated rack, by seed.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    names = sorted(known_stories())
    for name, run, about in (
        ("sim", _sim, "play one story and print what happened"),
        ("hash", _hash, "play one story and print its hash only"),
    ):
        sim = commands.add_parser(name, help=about)
        sim.add_argument("--seed", type=int, required=True)
        sim.add_argument("--hosts", type=int, default=4)
        sim.add_argument("--story", choices=names, default="swarm", metavar="NAME", help=f"one of {', '.join(names)}")
        sim.add_argument("--until", type=float, metavar="S", help="stop at this virtual second")
        sim.add_argument("--vary", type=int, default=0, metavar="N", help="variation N of the faults of a swarm")
        sim.add_argument("--log", action="store_true", help="print every line of the story")
        sim.set_defaults(run=run)
    crowd = commands.add_parser("crowd", help="thousands of hosts, only their machines")
    crowd.add_argument("--hosts", type=int, default=1000)
    crowd.add_argument("--seed", type=int, required=True)
    crowd.add_argument(
        "--gossip", action="store_true", help=f"gossip too, also with more than {GOSSIP_HOSTS_MAX} hosts"
    )
    crowd.set_defaults(run=_crowd)
    soak = commands.add_parser("soak", help="play all stories for many seeds, as long as there is time")
    soak.add_argument("--seeds", type=_range, default=range(1, 10_001), metavar="A-B")
    soak.add_argument("--cpu-seconds", type=float, default=300.0)
    soak.add_argument("--story", choices=names, metavar="NAME", help="only this one")
    soak.add_argument("--first", action="store_true", help="stop at the first that breaks; nothing is played twice")
    soak.add_argument("--handlers", action="store_true", help="say at the end which except handlers were never entered")
    soak.set_defaults(run=_soak)
    mutants = commands.add_parser("mutants", help="plant small bugs in a copy of the tree: does their check notice?")
    mutants.add_argument("--area", metavar="AREA", help="only those of this folder of chaos/mutants")
    mutants.add_argument("--only", metavar="SLUG", help="only this one")
    mutants.add_argument(
        "--cpu-seconds",
        type=float,
        default=300.0,
        help="for the simulator, per mutant that concerns several hosts (default 300; 0: only stories it names)",
    )
    mutants.add_argument("--workers", type=int, default=WORKERS_MAX, choices=range(1, WORKERS_MAX + 1))
    mutants.add_argument(
        "--known",
        type=Path,
        metavar="FILE",
        help="results from run to run: those whose file and tests have not changed are not tried again",
    )
    mutants.set_defaults(run=_mutants)
    storm = commands.add_parser(
        "storm", help="real agents on hosts of their own (network namespaces), harmed for a while"
    )
    storm.add_argument("--hosts", type=int, default=6)
    storm.add_argument("--seconds", type=float, default=1800.0)
    storm.add_argument("--every", type=float, default=10.0, metavar="S", help="seconds between two faults")
    storm.add_argument("--seed", type=int, required=True)
    storm.add_argument("--faults", default="", metavar="A,B", help="only these; --faults ? names all")
    storm.set_defaults(run=_storm)
    return parser


def _range(text: str) -> range:
    try:
        return range_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _sim(options: argparse.Namespace) -> int:
    def show(line: str) -> None:
        if options.log or SHOWN.match(line):
            print(line)

    try:
        told = tell(options.story, options.seed, options.hosts, show, options.until, options.vary)
    except AssertionError as error:
        print(f"BROKEN: {error}")
        return 1
    print(told.line())
    return 0


def _hash(options: argparse.Namespace) -> int:
    try:
        told = tell(options.story, options.seed, options.hosts, None, options.until, options.vary)
    except AssertionError as error:
        print(f"BROKEN: {error}", file=sys.stderr)
        return 1
    print(f"{told.story_hash:08x}")
    return 0


def _crowd(options: argparse.Namespace) -> int:
    results: list[msgspec.Struct] = []
    try:
        results.append(memory_story(options.seed, options.hosts))
        if options.gossip or options.hosts <= GOSSIP_HOSTS_MAX:
            results.append(gossip_story(options.seed, options.hosts))
    except AssertionError as error:
        print(f"BROKEN: {error}")
        return 1
    for result in results:
        print(type(result).__name__, *(f"{key}={value}" for key, value in msgspec.structs.asdict(result).items()))
    return 0


def _storm(options: argparse.Namespace) -> int:
    from chaos.rack.faults import KINDS
    from chaos.rack.hosts import why_not
    from chaos.rack.storm import play

    if trouble := why_not():
        print(f"no hosts can be made here: {trouble}", file=sys.stderr)
        return 2
    kinds = [name for name in options.faults.split(",") if name]
    if unknown := [name for name in kinds if name not in KINDS]:
        print(f"{unknown[0]!r} is no fault; faults are {', '.join(KINDS)}", file=sys.stderr)
        return 2
    return play(
        options.hosts, options.seconds, options.seed, options.every, lambda line: print(line, flush=True), kinds
    )


def _soak(options: argparse.Namespace) -> int:
    """Play seeds: each plays all worlds of machines, the swarm, and two directed stories, the next seed the next ones.
    For handlers, no worlds, and instead of the swarm one story with mischief, people or strangers."""
    if options.handlers and not handlers.installed():
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-P", "-m", "chaos.watched", *sys.argv[1:]])
    worlds = [] if options.story or options.handlers else stories_of_worlds()
    apart = (*stories_of_worlds(), "swarm", *(MIXED if options.handlers else ["mischief"]))
    names = [options.story] if options.story else [name for name in held_stories() if name not in apart]
    played, broken, faults, seconds, began, seen = 0, 0, 0, 0.0, time.process_time(), Seen()
    for seed in options.seeds:
        mixed = [] if options.story else [MIXED[seed % len(MIXED)] if options.handlers else "swarm"]
        directed = dict.fromkeys((names[2 * seed % len(names)], names[(2 * seed + 1) % len(names)]))
        for name in [*worlds, *mixed, *directed]:
            if time.process_time() - began > options.cpu_seconds:
                return _soaked(options, played, broken, faults, seconds, began, seen)
            known = len(seen.states)
            try:
                told = tell(name, seed, seen=seen)
            except Exception as error:
                broken += 1
                print(f"BROKEN: {name} seed {seed}: {type(error).__name__}: {error}", flush=True)
                if options.first:
                    return _soaked(options, played, broken, faults, seconds, began, seen)
                continue
            played, faults, seconds = played + 1, faults + told.faults, seconds + told.seconds
            if seed % REPEATED == 0 and not options.first and not _same_again(name, seed, told.story_hash):
                broken += 1
            if name in ("swarm", *MIXED) and len(seen.states) > known and played > VARIED_AFTER:
                broken += _vary(name, seed, seen)
    return _soaked(options, played, broken, faults, seconds, began, seen)


def _vary(name: str, seed: int, seen: Seen) -> int:
    """Play a seed that showed a state never seen with other faults; returns how many of its variations broke."""
    seen.kept.append(seed)
    broken = 0
    for number in range(1, VARIATIONS + 1):
        seen.played += 1
        try:
            tell(name, seed, vary=number, seen=seen)
        except Exception as error:
            broken += 1
            print(f"BROKEN: {name} seed {seed} vary {number}: {type(error).__name__}: {error}", flush=True)
    return broken


def _same_again(name: str, seed: int, story_hash: int) -> bool:
    """Play a seed in another process with other hashes of strings; returns whether its hash is the same."""
    again = [sys.executable, "-P", "-m", "chaos.main", "hash", "--seed", str(seed), "--story", name]
    environment = {**os.environ, "PYTHONHASHSEED": str(1 + seed % 1000)}
    found = subprocess.run(again, env=environment, capture_output=True, text=True, check=False).stdout.strip()
    if found != f"{story_hash:08x}":
        print(f"BROKEN: {name} seed {seed} has hash {story_hash:08x} here and {found} in another process", flush=True)
        return False
    return True


def _soaked(
    options: argparse.Namespace, played: int, broken: int, faults: int, seconds: float, began: float, seen: Seen
) -> int:
    cpu_s = time.process_time() - began
    print(
        f"{played} stories held, {broken} broke; {seconds / 3600 * 4:.1f} simulated host-hours, {faults} faults, "
        f"{cpu_s:.0f} s of CPU; {seen.line()}"
    )
    enough = True
    if options.handlers:
        words, enough = handlers.report()
        print(words)
    return 1 if broken or not enough else 0


def _mutants(options: argparse.Namespace) -> int:
    every = known_mutants()
    if not every:
        print("covey-chaos: planted bugs come with a checkout, not with the wheel; next: make mutants", file=sys.stderr)
        return 2
    chosen = [
        mutant
        for mutant in every
        if options.area in (None, mutant.area) and options.only in (None, mutant.slug, mutant.name)
    ]
    if not chosen:
        areas = ", ".join(sorted({mutant.area for mutant in every}))
        print(f"covey-chaos: no such mutant; areas are {areas}, see chaos/mutants", file=sys.stderr)
        return 2
    try:
        known = None if options.known is None else KnownTrials(options.known)
    except ValueError as error:
        print(f"covey-chaos: {error}", file=sys.stderr)
        return 2
    return 0 if prove(chosen, options.cpu_seconds, options.workers, known) else 1


if __name__ == "__main__":
    main()
