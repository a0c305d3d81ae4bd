"""What `GET /metrics` says: Prometheus' text format, version 0.0.4.

A source gives `name{label="value"} -> number`; the family is the name without labels. A family that ends in `_total`
counts; everything else is a gauge.
"""

import math
from collections.abc import Mapping

HELP: Mapping[str, str] = {
    "covey_aggregator_bad_frames_total": "Frames of workers that aggd could not understand.",
    "covey_aggregator_jobs": "Jobs whose tensors this host sums.",
    "covey_aggregator_load": "Part of its cycle that the aggregator works, 0 to 1.",
    "covey_aggregator_memory_bytes": "Memory that aggd holds for tensors.",
    "covey_aggregator_promised": "Part of its cycle that the aggregator has promised to jobs, 0 to 1.",
    "covey_aggregator_received_bytes": "Bytes received of the jobs summed now.",
    "covey_aggregator_refused_total": "Connections that aggd refused.",
    "covey_aggregator_rounds": "Rounds summed of the jobs summed now.",
    "covey_aggregator_sent_bytes": "Bytes sent of the jobs summed now.",
    "covey_aggregator_starts_total": "Times that aggd was started.",
    "covey_aggregator_up": "1 while aggd answers.",
    "covey_boot": "How often this agent was started.",
    "covey_build_info": "Always 1; the version is in the label.",
    "covey_control_connections": "Connections of peers to the control link, by whether they have shown a key.",
    "covey_event_loop_lag_seconds": "How late the event loop was when last measured.",
    "covey_events_total": "Events by their source in the agent.",
    "covey_gpus_free": "GPUs of this host that no gang holds.",
    "covey_grants_total": "Grants this host decided as leader.",
    "covey_headroom_bytes": "Memory this host keeps free for itself.",
    "covey_hosts_alive": "Hosts that gossip shows alive, this one included.",
    "covey_http_refused_total": "HTTP requests refused before they reached a command.",
    "covey_http_requests_total": "HTTP requests answered.",
    "covey_job_frames_total": "What came over jobs.sock.",
    "covey_job_processes": "Processes joined on jobs.sock.",
    "covey_jobs": "Jobs in this host's copy of the log.",
    "covey_leader_term": "Raft term.",
    "covey_log_malformed_commands_total": "Commands of the log that this agent could not read.",
    "covey_page_bytes_total": "Bytes of volumes' pages read and written.",
    "covey_page_queue_pages": "Pages that wait to be written to disk.",
    "covey_pages_torn_total": "Pages whose checksum was wrong when they were read.",
    "covey_preemptions_total": "Preemptions this host decided as leader.",
    "covey_plugin_restarts_total": "Times that a plugin was started again after a sick disk stopped it.",
    "covey_slab_connections_refused_total": "Connections that slabd refused.",
    "covey_slab_evictions_total": "Slabs taken back from their borrowers.",
    "covey_slab_lent_bytes": "Bytes of slabs lent to others.",
    "covey_slab_links_reopened_total": "Links to lenders that ended and were opened again.",
    "covey_slab_touched_bytes": "Bytes of lent slabs that hold pages.",
    "covey_slabs": "Slabs this host lends, borrows over a working link, has on disk, or waits for.",
    "covey_slabs_unrecovered_total": "Slabs whose lender had lost them, or was given up, when a process began anew.",
    "covey_spare_bytes": "Memory above headroom, which may be lent.",
    "covey_start_time_seconds": "When this agent was started, seconds since 1970.",
    "covey_volumes": "Volumes of remote memory attached on this host.",
    "covey_volumes_in_trouble": "Volumes whose disk refuses pages now.",
}
"""Family -> what it counts, one line."""


def prometheus(values: Mapping[str, float]) -> str:
    """`# HELP` and `# TYPE` once per family, samples of a family together, whole numbers without a point."""
    lines: list[str] = []
    last = ""
    for name, value in sorted(values.items(), key=lambda item: (item[0].partition("{")[0], item[0])):
        family = name.partition("{")[0]
        if family != last:
            if family in HELP:
                lines.append(f"# HELP {family} {HELP[family]}")
            lines.append(f"# TYPE {family} {'counter' if family.endswith('_total') else 'gauge'}")
            last = family
        lines.append(f"{name} {_number(value)}")
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    if math.isfinite(value):
        return str(int(value)) if value == int(value) else repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
