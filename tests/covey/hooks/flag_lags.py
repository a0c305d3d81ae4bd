"""The lag of a real script's flag behind the script, which tells the moments; a neighbour reads the flag."""

import ast
import asyncio
import statistics
import time
from pathlib import Path

from covey.kernel.pages import FlagReader, RankLimits
from tests.covey.agents import Agent
from tests.covey.hooks.torch_jobs import HEAD, running

TRIES = 3
PHASE_MS = 14.0
"""Ms after which a flag is too late. A script waits for 15 ms in each phase: a later flag belongs to the next one."""
TELLS = """
with open(os.environ["TOLD"] + ".part", "w") as file: file.write(repr(phases))
os.rename(os.environ["TOLD"] + ".part", os.environ["TOLD"])
time.sleep(60)
"""


async def flag_follows(
    agent: Agent, script: str, folder: Path, within_ms: float, head: str = HEAD, **environ: str
) -> list[tuple[float, float]]:
    """Whether the flag is lowered when the script begins to wait, and raised when it continues: in a quarter of the
    phases, since a busy machine delays script, flag and reader. Returns the lags of the tries, in ms: either the last
    one is good, or none. The script leaves `phases`: whether it continues (True) or waits from then on, and when, in
    ns."""
    tries: list[tuple[float, float]] = []
    while len(tries) < TRIES and not (tries and max(tries[-1]) < within_ms):
        told = folder / f"told{len(tries)}"
        async with running(agent, script + TELLS, 1, head, TOLD=str(told), **environ) as rank:
            rank.obey(RankLimits(1, guaranteed=True))
            seen = await asyncio.to_thread(changes, rank.flag(), told)
            phases = ast.literal_eval(await asyncio.to_thread(told.read_text))
        lags = {busy: [lag_ms(seen, busy, at_ns) for b, at_ns in phases if b == busy] for busy in (False, True)}
        tries.append((statistics.quantiles(lags[False])[0], statistics.quantiles(lags[True])[0]))
    return tries


def changes(flag: FlagReader, told: Path) -> list[tuple[bool, int]]:
    """Each value of the flag, and since when by its own words, until the script has told its phases."""
    seen: list[tuple[bool, int]] = []
    looks, end_s = 0, time.monotonic() + 60
    while (looks := looks + 1) % 100 or (time.monotonic() < end_s and not told.exists()):
        busy = flag.busy()
        if busy is not None and (not seen or seen[-1][0] != busy):
            seen.append((busy, flag.since_ns()))
        time.sleep(0.0002)
    return seen


def lag_ms(seen: list[tuple[bool, int]], busy: bool, at_ns: int) -> float:
    """Ms after `at_ns` until the flag had this value; the whole phase when it did not within it."""
    after = [(since - at_ns) / 1e6 for said, since in seen if said == busy]
    return next((lag for lag in after if -0.1 < lag < PHASE_MS), PHASE_MS)
