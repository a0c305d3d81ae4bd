"""When ranks that were asked to stop are killed."""

from agent.jobs.supervision import Ending

EXTENSION_MAX_S = 600.0
"""The most seconds that a job's ranks may ask for beyond their grace, once: the time to write a large checkpoint."""


def asked_to_end(known: Ending | None, grace_s: float, now_s: float, firm: bool) -> Ending:
    """The ending after one more request to stop; a repeated one with an equal grace changes nothing. `now_s`: of
    `Clock.boot_s`."""
    kill_at_s = now_s + max(0.0, grace_s)
    if known is None:
        return Ending(grace_s, kill_at_s, firm=firm)
    if grace_s < known.grace_s or firm > known.firm:
        least_s = min(kill_at_s, known.kill_at_s)
        return Ending(min(grace_s, known.grace_s), least_s, known.extended, firm or known.firm)
    return known


def extended(known: Ending | None, seconds: float, now_s: float) -> Ending | None:
    """The ending after a rank asked for `seconds` more; None: it may not have them."""
    if known is None or known.extended or known.firm or not known.kill_at_s > now_s or not seconds > 0:
        return None
    return Ending(known.grace_s, known.kill_at_s + min(seconds, EXTENSION_MAX_S), extended=True)
