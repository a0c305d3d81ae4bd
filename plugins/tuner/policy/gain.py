"""When a change is worth it."""

GAIN_MIN = 0.05
"""Share of the time that a change must save; with less the tuner would swing to and fro (Cruise §3.3.1: 5 %)."""


def is_worth_it(now_s: float, then_s: float, gain_min: float = GAIN_MIN) -> bool:
    """Does a change from epochs, or steps, of `now_s` to `then_s` seconds save enough? (Cruise §3.3.1)"""
    return now_s - then_s >= gain_min * now_s
