"""The metrics of gossip."""

from covey.core.metrics import MetricGroup

METRICS = MetricGroup()
ALONE = METRICS.gauge("covey_gossip_alone", "1 while no other host answers although seeds or known hosts should.")
HEALTH_SCORE = METRICS.gauge(
    "covey_gossip_health_score", "Local health score (Lifeguard): 0 is healthy, probes wait longer as it grows."
)
LOOP_LAG_MAX_SECONDS = METRICS.gauge(
    "covey_gossip_loop_lag_max_seconds", "Longest stall of the event loop since the start."
)
ROUND_TRIP_SECONDS = METRICS.histogram(
    "covey_gossip_round_trip_seconds",
    "How long hosts took to answer a probe, of those that answered before other hosts were asked to probe them.",
    bounds=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
)
SEEDS_UNKNOWN = METRICS.gauge("covey_gossip_seeds_unknown", "Seeds whose names do not resolve.")

COUNTED = METRICS.counters(
    "covey_gossip",
    {
        "dropped": "Datagrams dropped before their content was used, by reason.",
        "facts_ignored": "Facts of hosts that were older than the known ones.",
        "facts_refused": "Facts received of hosts that are not members.",
        "full": "Hosts not taken into the table of members, which is full.",
        "joins": "Asks of new hosts for the key, by what came of them: given, or why not.",
        "messages_unknown": "Messages of a kind that this version does not know.",
        "not_sent": "Datagrams that this host could not send.",
        "probes": "Members probed.",
        "probes_failed": "Probes without an answer.",
        "probes_void": "Probes not counted because the event loop of this host stalled meanwhile.",
        "received": "Datagrams received.",
        "received_bytes": "Bytes of datagrams received.",
        "refutations": "Times this host said that it is alive although others suspected it.",
        "relays": "Probes sent on behalf of others.",
        "sent": "Datagrams sent.",
        "sent_bytes": "Bytes of datagrams sent.",
        "stalls": "Times the event loop stalled for longer than a probe may take.",
        "told": "Events about hosts that gossip gave to the agent, by kind.",
    },
    split={"dropped": "reason", "joins": "outcome", "told": "kind"},
)
