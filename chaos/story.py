"""Telling a story: a rack by its seed, what happens to it, and what must be true at the end.

A story is a function of a `SimRack` in a file of `chaos/stories`. `tell` plays one by name and seed; every invariant
is watched meanwhile, and `ended` checks what must be true once all faults are healed: the rack is whole within a
bound, every job is over and known alike everywhere, nothing of it is left behind.
"""

import importlib
import pkgutil
import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import msgspec

from chaos import knobs
from chaos.checks.books import unrecorded
from chaos.novelty import Seen
from chaos.rackworld import SimRack
from chaos.world.world import Broken, Enough
from covey.core.ids import JobId
from plugins.registry import PLUGINS
from plugins.scheduler.machine.log.jobs import OVER

WHOLE_S = 90.0
"""Seconds after `heal` within which all hosts see each other and one leader."""
PLUGINS_S = 60.0
"""Seconds after that within which every plugin is on again: the longest pause before another try, and a start."""
OVER_S = 240.0
"""Seconds after `heal` within which all jobs are over: a lost host is waited for (60 s) before its job is placed
again."""
QUIET_S = 30.0
"""Seconds after the last job within which nothing of any job is left on any host."""
BOOKS_S = 90.0
"""Seconds after that within which every host has a record of each ended job: what it lacks it asks for every 30 s."""
READ_S = 120.0
"""Seconds after all is healed within which every page of a volume is read back."""

HOSTS = 4
"""Hosts of a rack, unless more are asked for, or the story's module has `RACK_HOSTS`: the fewest and the most."""

Story = Callable[[Any], Any]


class Told(msgspec.Struct, frozen=True):
    """Facts about one story that was played."""

    story: str
    seed: int
    seconds: float
    """Virtual seconds that the story took."""
    steps: int
    faults: int
    story_hash: int
    counts: dict[str, int]

    def line(self) -> str:
        return (
            f"{self.story} seed {self.seed}: {self.seconds:.0f} s, {self.steps} callbacks, {self.faults} faults, "
            f"hash {self.story_hash:08x}"
        )


def known_stories() -> dict[str, Story]:
    """Name -> function of each story: every module of `chaos.stories` has a `play`, and perhaps `SETTINGS`, sections
    of agent.toml, and `PLUGINS`; or it has `WORLDS`, machines alone, and is told by its seed only."""
    names = sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).with_name("stories"))]))
    return {name: getattr(_module(name), "play", partial(_worlds, name)) for name in names}


def held_stories() -> list[str]:
    """Stories that must hold now. A module of a story may set `KNOWN_BROKEN`, with a reason, until that is fixed."""
    return [name for name in known_stories() if not hasattr(_module(name), "KNOWN_BROKEN")]


def stories_of_worlds() -> list[str]:
    """Stories of machines alone: many hosts for little, so a soak plays each of them for every seed."""
    return [name for name in known_stories() if hasattr(_module(name), "WORLDS")]


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"chaos.stories.{name}")


def tell(
    name: str,
    seed: int,
    hosts: int = HOSTS,
    log: Callable[[str], None] | None = None,
    until: float | None = None,
    vary: int = 0,
    seen: Seen | None = None,
) -> Told:
    """Play one story, or that variation of its plan; `seen` looks at its states. Raises `Broken` with the line that
    repeats it when something does not hold, KeyError for an unknown story."""
    play = known_stories()[name]
    if name in stories_of_worlds():
        return _worlds(name, seed)
    if hosts == HOSTS and hasattr(_module(name), "RACK_HOSTS"):
        hosts = random.Random(f"{seed}/hosts").randint(*_module(name).RACK_HOSTS)
    quotas: Mapping[str, int] = {"red": hosts, "blue": max(1, hosts // 2)}
    chosen = knobs.drawn(seed) if name in knobs.STORIES else {}
    settings = knobs.joined(chosen, getattr(_module(name), "SETTINGS", None))
    plugins = getattr(_module(name), "PLUGINS", PLUGINS)
    with SimRack(seed, hosts, log=log, quotas=quotas, settings=settings, plugins=plugins) as rack:
        rack.world.replay += f" --story {name}"
        if chosen:
            rack.world.mark("settings", "chaos", knobs.told(chosen))
        if vary:
            rack.variation = vary
            rack.world.replay += f" --vary {vary}"
        if seen is not None:
            seen.watch(rack)
        if until is not None:
            rack.world.stop_at = until
        rack.start()
        try:
            play(rack)
        except Enough:
            pass
        except AssertionError as error:
            if "repeat with:" in str(error):
                raise
            raise rack.world.broken(str(error)) from error
        world = rack.world
        return Told(
            name, seed, round(world.now, 3), world.steps, world.counts.get("fault", 0), world.story_hash, world.counts
        )


class Played(Protocol):
    """One world of machines alone, after its end."""

    @property
    def now_s(self) -> float: ...

    @property
    def steps(self) -> int: ...

    @property
    def faults(self) -> int: ...

    @property
    def ended(self) -> object:
        """Something that differs when the worlds differ, and prints alike in every process."""


Worlds = Sequence[tuple[Callable[[int], Played], int]]
"""How a world is played by its number, and how many of them for each seed."""


def _worlds(name: str, seed: int) -> Told:
    kinds: Worlds = _module(name).WORLDS
    try:
        played = [play(number) for play, times in kinds for number in range(seed * times, (seed + 1) * times)]
    except AssertionError as error:
        raise Broken(f"{error}\nrepeat with: covey-chaos sim --seed {seed} --story {name}") from error
    seconds, steps = sum(world.now_s for world in played), sum(world.steps for world in played)
    hashed = zlib.crc32(repr([world.ended for world in played]).encode())
    return Told(name, seed, round(seconds, 3), steps, sum(world.faults for world in played), hashed, {})


# ---- what must be true at the end ------------------------------------------------------------------------------------


def ended(rack: SimRack, jobs: Mapping[JobId, tuple[str, ...]], over_s: float = OVER_S) -> None:
    """Heal everything; then the rack must be whole, and every job over in one of the states allowed for it."""
    rack.heal()
    rack.run(2.0)
    rack.settle(WHOLE_S)
    rack.until(lambda: not rack.failed(), PLUGINS_S, "every plugin that a sick disk stopped is on again")
    rack.until(lambda: all(_state(rack, job) in OVER for job in jobs), over_s, f"all of {', '.join(jobs)} are over")
    for job, allowed in jobs.items():
        seen = {name: _state(rack, job, name) for name in rack.hosts}
        rack.until(
            lambda job=job: len({_state(rack, job, name) for name in rack.hosts}) == 1,  # type: ignore[misc]
            10.0,
            f"all hosts tell the same of {job}, now {seen}",
        )
        job_now = rack.plugin(next(iter(rack.hosts)), "scheduler").queue.jobs[job]
        assert job_now.state in allowed, f"{job} is {job_now.state} ({job_now.reason}), expected {' or '.join(allowed)}"
    rack.until(lambda: not leftovers(rack), QUIET_S, "nothing is left of jobs that are over" + _what_is_left(rack))
    if any(plugin.name == "scheduler" for plugin in rack.plugins):
        rack.until(lambda: not unrecorded(rack), BOOKS_S, "all hosts have the records of all jobs")
    not_stale(rack)


def _state(rack: SimRack, job: JobId, on: str | None = None) -> str:
    """A job's state as a host's copy of the log has it."""
    for name in [on] if on else list(rack.hosts):
        scheduler = rack.plugin(name, "scheduler")
        if scheduler is not None:
            known = scheduler.queue.jobs.get(job)
            return "unknown" if known is None else str(known.state)
    return "unknown"


def leftovers(rack: SimRack) -> list[str]:
    """Ranks, supervisors, reservations and ports that no job needs any more."""
    found: list[str] = []
    for name, host in rack.hosts.items():
        for process in host.processes.values():
            short = process.name.partition("/")[2]
            if short.startswith("sup-") or "COVEY_EPOCH" in getattr(host.commands.get(process.id.pid), "env", {}):
                found.append(process.name)
        scheduler = rack.plugin(name, "scheduler")
        if scheduler is not None:
            found += [f"{name} holds GPUs for {hold.job}" for hold in scheduler.ranks.reservations.all()]
    return found


def _what_is_left(rack: SimRack) -> str:
    found = leftovers(rack)
    return f": {', '.join(found[:5])}" if found else ""


def not_stale(rack: SimRack) -> None:
    """Assert that no acknowledged page was lost."""
    assert not rack.stale, rack.stale[0]
