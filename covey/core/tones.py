"""How each state looks to people: agentctl and the web page take their colours from this table alone.

Nothing is decided by it: programs read in `JobView.over` whether a job is over.
"""

from collections.abc import Mapping
from typing import Literal

Tone = Literal["good", "waiting", "warning", "bad", "quiet"]

TONES: Mapping[str, Tone] = {
    # hosts
    "alive": "good", "suspect": "warning", "away": "waiting", "gone": "bad", "left": "quiet",
    # jobs
    "queued": "waiting", "placing": "waiting", "running": "good", "stopping": "waiting",
    "done": "good", "failed": "bad", "cancelled": "waiting",
    # slabs
    "cold": "quiet", "asking": "waiting", "mapped": "good", "moving": "waiting", "reopening": "waiting",
    "recovering": "waiting", "lost": "bad",
    # plugins, which fail as jobs do
    "on": "good", "off": "quiet",
}  # fmt: skip
"""State -> how it looks. A word that names states of two kinds of things has one tone for both."""
