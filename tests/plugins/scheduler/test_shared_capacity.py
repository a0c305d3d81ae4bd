"""The live queue and its leader on GPUs that are shared: what the vectors of classes and quotas run through.

A plain reading of the rules (`plain_pool.py`) says the same after every event of stories in which anything happens.
"""

import random
from typing import Any

from sim.vectors.classes import SharedPool
from sim.vectors.scheduler import unordered
from tests.plugins.scheduler.plain_pool import (
    Action,
    Demote,
    Ended,
    Event,
    Looked,
    Measured,
    Pool,
    PoolJob,
    Reserve,
    Start,
    Submitted,
    Upgrade,
)

CLASSES = ("guaranteed", "guaranteed", "guaranteed", "auto", "auto", "opportunistic")


def story(dice: random.Random, steps: int) -> tuple[dict[str, Any], list[list[Any]]]:
    """A small pool and what happens in it. Jobs that end may wait or run, as it comes."""
    per_node = dice.choice((1, 2, 2, 3, 4))
    gpus = per_node * dice.randrange(2, 6)
    quotas = dict.fromkeys("abc", 0)
    for _ in range(gpus - dice.choice((0, 0, 1))):
        quotas[dice.choice("ab")] += 1
    widths = dice.choice(((1,), (1, 1, 1, 1, 1, per_node), (1, 1, 1, 1, per_node), (1, 1, 2), (1, 2, 4, 8)))
    kinds = dice.choice((CLASSES, ("guaranteed",) * 9 + ("auto", "opportunistic")))
    config = {"n": gpus, "per_node": per_node, "quota": quotas, "ot_per_gpu": dice.choice((0, 1, 1, 2, 3))}
    if dice.random() < 0.8:
        config["demote_after"] = dice.choice((0, 5, 20, 60))
    queues = dice.choice((1, 1, 3))
    now, there = 0, list[str]()
    events: list[list[Any]] = []
    for number in range(steps):
        now += dice.choice((0, 1, 1, 4))
        kind = dice.choice(("submit",) * 8 + ("finish",) * 6 + ("util", "tick"))
        if kind == "submit":
            width = min(gpus, dice.choice(widths))
            job = {"id": f"j{number:04}", "tenant": dice.choice("aaabbbcd"), "W": width, "cls": dice.choice(kinds)}
            same_node = dice.random() < (0.9 if width > 1 else 0.1)
            events.append(["submit", now, {**job, "q": dice.randrange(queues), "same_node": same_node}])
            there.append(f"j{number:04}")
        elif kind == "finish" and there:
            events.append(["finish", now, there.pop(dice.randrange(len(there)))])
        elif kind == "util":
            events.append(["util", now, {str(dice.randrange(gpus)): dice.choice((0.0, 0.3, 0.79, 0.8, 1.0))}])
        else:
            events.append(["tick", now])
    return config, events


def plain_pool(config: dict[str, Any]) -> Pool:
    demote_after = config.get("demote_after")
    beside = config["ot_per_gpu"]
    quota = config["quota"]
    return Pool(config["n"], config["per_node"], quota, demote_after_s=demote_after, opportunistic_max=beside)


def plain_event(event: list[Any]) -> Event:
    match event[0]:
        case "submit":
            job = event[2]
            return Submitted(
                PoolJob(
                    id=job["id"],
                    tenant=job["tenant"],
                    gpus=job["W"],
                    job_class=job["cls"],
                    queue=job["q"],
                    same_host=job["same_node"],
                )
            )
        case "finish":
            return Ended(event[2])
        case "util":
            return Measured({int(gpu): share for gpu, share in event[2].items()})
        case _:
            return Looked()


def said(action: Action) -> list[Any]:
    match action:
        case Start():
            return ["START_RG" if action.guaranteed else "START_OT", action.job, list(action.gpus)]
        case Reserve():
            return ["RESERVE", action.job, list(action.gpus)]
        case Demote():
            return ["DEMOTE", action.job]
        case Upgrade():
            return ["UPGRADE", action.job]


def agree(seed: int, steps: int) -> None:
    config, events = story(random.Random(seed), steps)
    live, plain = SharedPool(config, events), plain_pool(config)
    for number, event in enumerate(events):
        ours = live.handle(event)
        theirs = [said(action) for action in plain.handle(plain_event(event), event[1])]
        live.check()
        plain.check()
        assert in_steps(ours) == in_steps(theirs), f"seed {seed}, event {number}: {event}, {config}"


def in_steps(actions: list[list[Any]]) -> list[list[Any]]:
    order = {"DEMOTE": 0, "UPGRADE": 1, "START_RG": 2, "RESERVE": 2, "START_OT": 3}
    return sorted(unordered(actions), key=lambda action: order[action[0]])


def test_the_live_queue_says_what_a_plain_reading_says_of_shared_gpus() -> None:
    """12,000 events. Reference: AntMan §3.2, §3.3, Algorithm 1."""
    for seed in range(300):
        agree(seed, 40)
