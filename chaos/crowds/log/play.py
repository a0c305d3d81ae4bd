"""Play worlds of logs by their seeds."""

import heapq

from chaos.crowds.log.nodes import SLOW_S_MAX, Violation
from chaos.crowds.log.world import World


def run_seed(seed: int, steps: int = 2000) -> World:
    """Play one world: `steps` events with faults, then everything heals and must converge within 20 s. Raises
    Violation (with the seed) when something that must hold does not."""
    world = World(seed)
    try:
        while world.steps < steps:
            world.step()
        world.heal()
        world.heap = [entry for entry in world.heap if entry[2] != "client"]
        heapq.heapify(world.heap)
        end_s = world.now_s + 20
        while not world.converged():
            if world.now_s > end_s:
                raise Violation("after everything healed the hosts did not converge within 20 s")
            world.step()
        quiet(world)
        states = {(tuple(node.state.done), node.state.digest) for node in world.nodes.values()}
        if len(states) != 1:
            raise Violation("hosts that applied the same entries are in different states")
        done = set(next(iter(states))[0])
        lost = [one for one in world.clients.values() if one.acknowledged and one.proposal.id not in done]
        if lost:
            raise Violation(f"{len(lost)} commands that were acknowledged are gone")
    except AssertionError as error:
        raise Violation(
            f"seed {seed}, event {world.steps}, {world.now_s:.3f} s, {world.conditions}: {error}"
        ) from error
    return world


def quiet(world: World) -> None:
    """Assert that the leader stays once nothing fails, even when a former voter does not know that it is none."""
    advance(world, SLOW_S_MAX)  # a write that hung before may still let a leader hand over
    terms = {node.raft.term for node in world.nodes.values()}
    advance(world, 4.0)
    after = {node.raft.term for node in world.nodes.values()}
    if max(after) > max(terms):
        raise Violation(f"terms went from {max(terms)} to {max(after)} although nothing fails")


def advance(world: World, seconds: float) -> None:
    end_s = world.now_s + seconds
    while world.now_s < end_s:
        world.step()


def run_seeds(first: int, count: int, steps: int = 2000) -> tuple[int, int, int]:
    """Play the worlds of the seeds `first .. first + count - 1`; returns (events, commands acknowledged, crashes and
    snapshots)."""
    events = commands = seen = 0
    for seed in range(first, first + count):
        world = run_seed(seed, steps)
        events += world.steps
        commands += sum(one.acknowledged for one in world.clients.values())
        seen += world.seen
    return events, commands, seen
