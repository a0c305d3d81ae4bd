"""Settings at their extremes: a rack must bear whatever a person may write into agent.toml.

In a share of the stories with many faults, by the seed, every setting is drawn with a small chance from its extremes,
the same on all hosts: the least and the greatest value that is accepted, or, where there is no bound or a story would
outlast every soak, one that a person might plausibly choose. What was drawn is printed when the story begins, and the
bounds of a story's waits follow the settings that decide them (`patience_s`).

`quotas`, addresses, names and files are the rack's own and are no knobs; `plugins` and `serve` switch off what stories
look at. A greatest time is left out where it means "for ever" to a story that waits for the rack to be whole again.
"""

import random
from collections.abc import Mapping
from typing import Any

Tree = dict[str, Any]

STORIES = ("swarm", "mischief", "people", "strangers")
"""Stories with many faults and wide bounds, in which knobs are drawn."""
SHARE = 0.2
"""Share of the seeds that have knobs, in a story with knobs."""
EACH = 0.1
"""Chance of each knob."""
INF = float("inf")
PROBES = (
    {"probe_interval_s": 0.05, "probe_timeout_s": 0.035},
    {"probe_interval_s": 3.0, "probe_timeout_s": 2.25},
)
ELECTIONS = (
    {"heartbeat_s": 0.05, "election_min_s": 0.3, "election_max_s": 0.45, "step_down_s": 0.4},
    {"heartbeat_s": 0.01},
    {"heartbeat_s": 1.0, "election_min_s": 3.0, "election_max_s": 5.0, "step_down_s": 6.0, "observer_s": 2.0},
)
"""Settings that depend on one another and are drawn together."""

KNOBS: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "gossip": {
        "": PROBES,
        "indirect_probes": (0, 16),
        "suspicion_factor": (1, 20),
        "retransmit_factor": (1, 20),
        "gossip_interval_s": (0.02, 10.0),
        "gossip_fanout": (1, 16),
        "sync_interval_s": (1.0, 3600.0),
        "announce_interval_s_max": (1.0, 60.0),
        "spread_interval_s": (0.05, 3.0),
        "heartbeat_s": (0.1, 60.0),
        "away_s": (0, 300),
        "datagram_bytes": (1232, 1472),
        "hosts_max": (8, 4096),
    },
    "leader": {
        "": ELECTIONS,
        "snapshot_entries": (16, 1 << 20),
        "keep_entries": (0, 1 << 20),
        "voters_wanted": (1, 5),
    },
    "tuner": {
        "gain": (0.01, 1.0),
        "report_s": (1.0, 60.0),
    },
    "memory": {
        "slab": ("16 KiB", "256 KiB"),
        "": ({"page": "8 KiB", "spill_queue": "2 MiB"},),
        "page": ("512 B",),
        "spill_queue": ("2 MiB", "1 GiB"),
        "headroom": ("0 %", "99 %", "auto"),
        "lend": ("0 B", "1 TiB"),
        "hot_requests_per_s": (0.0, 1e9, "auto"),
        "cold_share": (0.0, 0.99),
        "drawn": (2, 16),
        "seal": (False,),
        "budgets": ({"ann": "0 B"}, {"ann": "1 TiB"}),
        "default_budget": ("64 KiB", "1 TiB"),
        "remote_deadline": ("50 ms", "20 s"),
        "rdma": ("off",),
        "same_host": ("map", "socket"),
        "grace": ("0.1 s", "60 s"),
        "lease": ("5 s", "600 s"),
        "volumes_max": (4096,),
        "volumes_per_job_max": (1, 4096),
    },
    "scheduler": {
        "queue_thresholds_gpu_s": ((), (0.1,), (0.1, 0.2, 1e12)),
        "narrow_first": (True, False),
        "defragment": (True, False),
        "packlimit": (0.0, 1.0),
        "packlimit_refit": (True, False),
        "preemption": (False,),
        "demote_after_s": (0.0, INF),
        "starve_limit_s": (0.0, INF),
        "promote_knob": (1.0, INF),
        "gang_patience_s": (1.0, INF),
        "restart_s": (0.0, 600.0),
        "unsaved_stops": (0, 1000),
        "host_lost_after_s": (6.0, 120.0),
        "coordinator_lost_after_s": (0.1, 20.0),
        "heal_pause_s": (0.5, 30.0),
        "placing_limit_s": (5.0, 600.0),
        "reservation_lease_s": (1.0, 120.0),
        "reserve_deadline_s": (0.3, 20.0),
        "env_copies": (0, 64),
        "place_attempts": (1, 100),
        "checkpoint_s": (0.3, 300.0),
        "current_s": (2.5, 60.0),
        "beside": (1, 8),
    },
    "jobs": {
        "output_rank_max": ("1 MiB", "1 TiB"),
        "output_host_max": ("1 MiB", "1 TiB"),
        "keep_ended": (1, 1 << 40),
        "keep_ended_for": ("1 s", "10000 d"),
        "disk_free_min": ("0 B", "512 GiB"),
        "shell_kept": ("1 s", "10000 d"),
        "shell_idle": ("0 s", "1 s"),
        "users_dir": ("/srv/covey-jobs",),
    },
    "aggregator": {
        "direct": ("never",),
        "rdma": ("never",),
        "jobs_max": (16, 4096),
        "load_max": (0.3, 1.0),
        "memory_bytes_max": (1 << 20, 1 << 50),
        "lanes": (1, 1),
        "loss_limit": (0.001, 1.0),
        "trial_iterations": (2, 10_000),
        "revert_iterations": (2, 100_000),
        "cycles_max": (1, 64),
        "scale_s": (1.0, 1e9),
    },
}


def drawn(seed: int) -> Tree:
    """Sections of agent.toml for the story of this seed; empty for most of them."""
    rng = random.Random(f"{seed}/knobs of a story")
    if rng.random() >= SHARE:
        return {}
    tree: Tree = {}
    for section, knobs in KNOBS.items():
        for name, extremes in knobs.items():
            if rng.random() < EACH:
                value = rng.choice(extremes)
                tree.setdefault(section, {}).update({name: value} if name else value)
    return _kept_apart(tree)


def _kept_apart(tree: Tree) -> Tree:
    """Drop the queues where `starve_limit_s` is 0. A job that waits is first in line at once, and one that ran for a
    moment leaves the highest queue: two jobs that need the same GPUs stop one another at every `checkpoint_s`, when
    the log hears what they attained, for ever if one of them takes longer than that and has no checkpoint. These
    settings mean that, so no story may ask for an end of jobs under both."""
    scheduler = tree.get("scheduler", {})
    if scheduler.get("starve_limit_s") == 0.0:
        scheduler.pop("queue_thresholds_gpu_s", None)
    return tree


def joined(*trees: Mapping[str, Mapping[str, Any]] | None) -> Tree:
    """Sections of all these trees; the later wins."""
    found: Tree = {}
    for tree in trees:
        for section, values in (tree or {}).items():
            found[section] = found.get(section, {}) | dict(values)
    return found


def told(tree: Mapping[str, Mapping[str, Any]]) -> str:
    """The settings as one would write them into agent.toml, in one line."""
    return "; ".join(f"[{section}] {name} = {value!r}" for section, of in tree.items() for name, value in of.items())


def patience_s(settings: Mapping[str, Mapping[str, Any]]) -> float:
    """Seconds that a rack with these settings may take longer than one with the defaults, for whatever is waited for
    once all is healed."""
    gossip, leader = settings.get("gossip", {}), settings.get("leader", {})
    jobs, memory = settings.get("scheduler", {}), settings.get("memory", {})
    factor: float = gossip.get("suspicion_factor", 4) / 4 * gossip.get("probe_interval_s", 1.0)
    return float(
        max(0.0, 6 * 2.4 * (factor - 1))
        + max(0.0, 4 * (leader.get("election_max_s", 1.75) - 1.75))
        + max(0.0, jobs.get("host_lost_after_s", 60.0) - 60.0)
        + max(0.0, min(jobs.get("placing_limit_s", 60.0), 120.0) - 60.0)
        + max(0.0, jobs.get("reservation_lease_s", 15.0) - 15.0)
        + max(0.0, 3 * (jobs.get("reserve_deadline_s", 3.0) - 3.0))
        + (60.0 if memory.get("remote_deadline") == "20 s" else 0.0)
    )
