"""When a rank that is lost is started again alone, and under which number.

A script that called `job.state` says so (`covey.wire.job.Heals`): the other ranks have what a successor needs. A
successor is the same command with the next COVEY_INCARNATION. A rank that is lost again and again in one step is not
started any more: then it is the step, or this host, and the job ends or runs again as without healing.
"""

from collections.abc import Collection

import msgspec

from agent.jobs.supervision import INCARNATION, RankHealing, RankStart, SupervisorState
from covey.core.errors import EXIT_STATE_LOST
from covey.ports.processes import Command

NEVER = 1 << 60
"""The step that stands for a rank whose script is through."""
LOSSES_IN_A_STEP_MAX = 5
EXIT_AGAIN = 75
"""The exit code by which a script asks for the whole job to be started again."""

FOR_GOOD = (0, EXIT_AGAIN, EXIT_STATE_LOST, None)
"""The exit codes after which a process has no successor. None: how it ended is not known."""


def healing_said(known: RankHealing | None, step: int) -> RankHealing:
    """What is known of a rank whose newest process has the state, at the beginning of this step."""
    if known is None:
        return RankHealing(step)
    if step <= known.step:
        return msgspec.structs.replace(known, has_had_state=True)
    return RankHealing(step, 0, known.incarnation)


def after_loss(known: RankHealing | None, code: int | None) -> RankHealing | None:
    """What is known of a rank's successor after its process ended with `code` (None: how is not known); None: there is
    no successor."""
    if known is None or known.step >= NEVER or code in FOR_GOOD or known.losses >= LOSSES_IN_A_STEP_MAX:
        return None
    return msgspec.structs.replace(known, losses=known.losses + 1, incarnation=known.incarnation + 1)


def after_leaving(known: RankHealing | None) -> RankHealing:
    """What stays known of a rank that left: its number, which grows, so that no process that comes here as this rank
    later has the files of an earlier one."""
    number = 0 if known is None else known.incarnation
    return RankHealing(0, 0, number + 1, has_had_state=False)


def may_be_lost(ranks: Collection[int], state: SupervisorState) -> bool:
    """Whether this host may be lost with all these ranks: none has ended, or is through, or came here and is yet to get
    the state."""
    known = [state.healing.get(rank) for rank in ranks]
    return not state.codes and all(rank is not None and rank.has_had_state and rank.step < NEVER for rank in known)


def stand_still_unconfirmed(ranks: Collection[int], state: SupervisorState) -> bool:
    """Whether the ranks here are suspended when no leader confirms them. Ranks that may be lost no more, as they are
    through, count too: whoever decides that others take their place may not have heard of that yet."""
    return bool(state.healing) and all(rank in state.healing or rank in state.codes for rank in ranks)


def command_of(start: RankStart, incarnation: int, had_state: bool = False) -> Command:
    """The command of one process of a rank. Each process has its own files, by which it is found again. `had_state`: it
    replaces one that had the job's state, so in an elastic job the others wait for it."""
    if not incarnation:
        return start.command
    before = int(start.command.env.get(INCARNATION, "0"))
    env = {**start.command.env, INCARNATION: str(before + incarnation)}
    run = f"{start.command.run}.{incarnation}" if start.command.run else ""
    held_back = start.command.held_back and not (had_state and env.get("COVEY_ELASTIC") == "1")
    return msgspec.structs.replace(start.command, env=env, run=run, held_back=held_back)


def incarnation_of(state: SupervisorState, rank: int) -> int:
    known = state.healing.get(rank)
    return 0 if known is None else known.incarnation
