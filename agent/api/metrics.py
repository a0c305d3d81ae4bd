"""The text of `GET /metrics`: Prometheus' text format, version 0.0.4.

A source gives `name{label="value"} -> number`; the family is the name without labels. A family that ends in `_total`
counts, one with samples `_bucket` is a histogram, everything else is a gauge. What a part of the agent counts by a word
(`counters["elections"]`) is a family for each word, `covey_raft_elections_total`; values of labels are `[a-z0-9_]+`.
"""

import math
import re
from collections.abc import Mapping, Set

HELP: Mapping[str, str] = {
    "covey_aggregator_bad_frames_total": "Frames of workers that aggd could not understand.",
    "covey_aggregator_copied_total": "Blocks of parameters that came from the aggregator before.",
    "covey_aggregator_copies_failed_total": "Aggregators before that ended before they had brought all they had said.",
    "covey_aggregator_jobs": "Jobs whose tensors this host sums.",
    "covey_aggregator_load": "Part of its cycle in which the aggregator is busy, 0 to 1.",
    "covey_aggregator_memory_bytes": "Memory that aggd holds for tensors.",
    "covey_aggregator_not_finite": "Numbers that were NaN or infinite in sums of the jobs summed now.",
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
    "covey_gossip_alone": "1 while no other host answers although seeds or known hosts should.",
    "covey_gossip_health_score": "Local health score (Lifeguard): 0 is healthy, probes wait longer as it grows.",
    "covey_gossip_loop_lag_max_seconds": "Longest stall of the event loop since the start.",
    "covey_gossip_seeds_unknown": "Seeds whose names do not resolve.",
    "covey_gpus_free": "GPUs of this host that take jobs and that no gang holds.",
    "covey_gpus_out": "GPUs of this host that take no job: sick ones, and those of which nobody knows how they are.",
    "covey_gpu_jobs": "Jobs on each GPU of this host, by its number.",
    "covey_gpu_memory_free_bytes": "Device memory of each GPU of this host that is promised to no job.",
    "covey_gpu_utilization": "Use of each GPU of this host over the last 10 s, 0 to 1.",
    "covey_interference_ratio": "How much slower a guaranteed job is beside others, as a share of its step alone.",
    "covey_device_failures_total": "Looks at a GPU of this host that its driver did not answer.",
    "covey_sharing_total": "What the sharing of GPUs did on this host, by kind.",
    "covey_grants_total": "Grants this host decided as leader.",
    "covey_headroom_bytes": "Memory this host keeps free for itself.",
    "covey_hosts_alive": "Hosts that gossip shows alive, this one included.",
    "covey_hosts_wrong": "Hosts with something to mend: of another rack, with a contested name, lost again and again.",
    "covey_http_refused_total": "HTTP requests refused before they reached a command.",
    "covey_http_requests_total": "HTTP requests answered.",
    "covey_job_frames_total": "Frames and connections of jobs.sock, by kind.",
    "covey_job_processes": "Processes joined on jobs.sock.",
    "covey_jobs": "Jobs in this host's copy of the log.",
    "covey_leader_term": "Raft term.",
    "covey_log_malformed_commands_total": "Commands of the log that this agent could not read.",
    "covey_memory_links": "Places of volumes at lenders, by how their links are.",
    "covey_memory_pages_refused_total": "Pages that came back from a lender and were not what had been sealed for it.",
    "covey_memory_tenant_bytes": "Remote memory of each tenant: its volumes on this host, and what is lent to it.",
    "covey_memory_rack_bytes": "Remote memory that the rack lends to each tenant and job, as this host hears it.",
    "covey_memory_budget_bytes": "Most of it that a tenant or a job may have, over the whole rack.",
    "covey_memory_budget_refused_total": "Volumes (borrower) and slabs (lender) refused for a budget.",
    "covey_memory_read_seconds": "How long reads of volumes took, by volume and by who answered.",
    "covey_memory_write_seconds": "How long writes of volumes took, by volume and by who answered.",
    "covey_page_bytes_total": "Bytes of volumes' pages read and written.",
    "covey_page_queue_pages": "Pages that wait to be written to disk.",
    "covey_memory_stalls_total": "Times that slabd, or a vold, held up its own loop for more than 5 ms.",
    "covey_memory_stall_longest_seconds": "The longest of them in the last minute or two.",
    "covey_memory_processor_waits_total": "Times that slabd, or a vold, waited for a processor for more than 5 ms.",
    "covey_memory_processor_wait_longest_seconds": "The longest of them in the last minute or two.",
    "covey_pages_torn_total": "Pages whose checksum was wrong when they were read.",
    "covey_preemptions_total": "Preemptions this host decided as leader.",
    "covey_plugin_restarts_total": "Times that a plugin was started again after a disk error stopped it.",
    "covey_slab_queue_pairs": "Volumes of other hosts that reach this host's slabs over RDMA.",
    "covey_volume_mapped_slabs": "Borrowed slabs of this host whose memory is mapped.",
    "covey_volume_one_sided_slabs": "Borrowed slabs whose pages go over RDMA.",
    "covey_volume_queue_pairs_failed_total": "Links to lenders that ended because their queue pair failed.",
    "covey_slab_connections_refused_total": "Connections that slabd refused.",
    "covey_slab_evictions_total": "Slabs taken back from their borrowers.",
    "covey_slab_lent_bytes": "Bytes of slabs lent to others.",
    "covey_slab_links_reopened_total": "Links to lenders that ended and were opened again.",
    "covey_slab_unlocked_bytes": "Bytes of lent slabs that may be swapped out.",
    "covey_slab_touched_bytes": "Bytes of lent slabs that hold pages.",
    "covey_slabs": "Slabs this host lends, borrows over a working link, has on disk, or waits for.",
    "covey_slabs_unrecovered_total": "Slabs lost at a restart: their lender had lost them, or was given up.",
    "covey_spare_bytes": "Memory above headroom, which may be lent.",
    "covey_start_time_seconds": "When this agent was started, seconds since 1970.",
    "covey_volumes": "Volumes of remote memory attached on this host.",
    "covey_volumes_in_trouble": "Volumes whose disk refuses pages now.",
}
"""Family -> what it counts, one line."""

COUNTED: Mapping[str, Mapping[str, str]] = {
    "devices": {
        "timeouts": "Calls to the driver of devices that it did not answer in time.",
        "xids": "XID errors that the driver told.",
    },
    "gossip": {
        "dropped": "Datagrams dropped before their content was used, by reason.",
        "facts_ignored": "Facts of hosts that were older than what was known.",
        "facts_refused": "Facts received of hosts that are not members.",
        "full": "Hosts not taken into the table of members, which is full.",
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
    "links": {
        "accepted": "Connections to the control link accepted.",
        "allowed": "Handshakes with a known key.",
        "bad_key": "Peers that gossiped an invalid key.",
        "broken_off": "Connections that ended before they had shown a key.",
        "dropped": "Messages dropped because no host gossips the sender's key now.",
        "handshakes": "Connections that have shown a key.",
        "not_connected_or_full": "Messages not sent: no connection, or its queue is full.",
        "received": "Messages received from peers.",
        "refused_key": "Handshakes with a key that no host gossips.",
        "renewed": "Connections to peers replaced because the old one took no message.",
        "sent": "Messages sent to peers.",
        "silent": "Connections that showed no key in time.",
        "turned_away": "Connections turned away because too many had shown no key.",
    },
    "raft": {
        "acknowledged_entries_lost": "Followers found to have lost entries that they had acknowledged.",
        "appends_of_strangers": "Appends of hosts that do not vote.",
        "applied": "Entries applied to the state of this host.",
        "busy": "Proposals refused because too many were under way.",
        "elected": "Elections won.",
        "elections": "Elections this host stood in.",
        "forwarded": "Proposals sent on to the leader.",
        "forwarding_failed": "Proposals whose leader did not answer.",
        "handover_orders_stale": "Orders to stand for election that came too late to be followed.",
        "handovers": "Times this host handed its leadership over.",
        "handovers_for_slow_disk": "Times this host offered its leadership because its disk was slow.",
        "malformed": "Messages that could not be understood.",
        "not_sent": "Messages that the control link did not take.",
        "of_another_rack": "Messages received from another rack.",
        "prevotes": "Times this host asked whether it would be elected.",
        "snapshots_installed": "Snapshots received from a leader.",
        "snapshots_saved": "Snapshots written.",
        "snapshots_too_large": "Snapshots that were not written because of their size.",
        "stepped_down": "Times this host stopped being the leader.",
        "two_leaders_in_one_term": "Never: two leaders seen in one term.",
        "votes_of_another_log": "Votes not counted because the voter's log is not the one that votes.",
        "votes_of_strangers": "Votes of hosts that do not vote.",
        "votes_refused_leader_alive": "Votes refused because a leader is alive.",
        "waits_for_room": "Times the log began to wait since its disk was full.",
        "writes": "Writes of the log, each with a sync.",
    },
    "rpc": {
        "answers_failed": "Questions whose answer raised an exception.",
        "answers_late": "Answers that were not ready in time.",
        "answers_too_long": "Answers too long to be sent.",
        "asked_again": "Questions received again while their answer was computed.",
        "deadline": "Messages and questions not acknowledged before their deadline.",
        "duplicate": "Messages received again and not handled twice.",
        "late_replies": "Replies received after the asker stopped waiting.",
        "malformed": "Envelopes that could not be understood.",
        "malformed_bodies": "Messages whose body their plugin does not know.",
        "not_gossiped": "Times that the state of the log here did not fit into what a host gossips.",
        "of_another_installation": "Messages of a machine that has not the name it gives, by gossip.",
        "old_boot": "Messages of an earlier start of their sender.",
        "pages_not_kept": "Pages of answers asked for after they were forgotten.",
        "questions_refused": "Questions refused because one host asked too many at once.",
        "receiver_table_full": "Messages refused by a receiver whose table of duplicates was full.",
        "refused_table_full": "Messages refused because this host's table of duplicates was full.",
        "stale": "Messages to an earlier start of this host.",
        "without_plugin": "Messages to a plugin that is off, or that could not be read.",
    },
}
"""Subsystem -> what it counts -> what that is, one line."""
_SPLIT = {"dropped_": ("dropped", "reason"), "told_": ("told", "kind")}
"""Words whose rest is a label."""


def counted(subsystem: str, counters: Mapping[str, int]) -> dict[str, float]:
    """Counters of one part of the agent as samples of `covey_SUBSYSTEM_WORD_total`."""
    found: dict[str, float] = {}
    for word, count in counters.items():
        family, label = word, ""
        for prefix, (short, name) in _SPLIT.items():
            if word.startswith(prefix):
                family, label = short, f'{{{name}="{_snake(word[len(prefix) :])}"}}'
        found[f"covey_{subsystem}_{family}_total{label}"] = float(count)
    return found


def _snake(word: str) -> str:
    """A class name as a label's value."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", word).lower()


def _help(family: str) -> str | None:
    subsystem, _, word = family.removeprefix("covey_").removesuffix("_total").partition("_")
    return HELP.get(family) or COUNTED.get(subsystem, {}).get(word)


def prometheus(values: Mapping[str, float]) -> str:
    """`# HELP` and `# TYPE` once per family, samples of a family together, whole numbers without a point."""
    lines: list[str] = []
    last = ""
    histograms = {name.partition("_bucket{")[0] for name in values if "_bucket{" in name}
    for family, name, value in sorted(
        ((_family(name, histograms), name, value) for name, value in values.items()),
        key=lambda each: (each[0], "" if each[0] in histograms else each[1]),
    ):
        if family != last:
            if (told := _help(family)) is not None:
                lines.append(f"# HELP {family} {told}")
            plain = "counter" if family.endswith("_total") else "gauge"
            lines.append(f"# TYPE {family} {'histogram' if family in histograms else plain}")
            last = family
        lines.append(f"{name} {_number(value)}")
    return "\n".join(lines) + "\n"


def _family(name: str, histograms: Set[str]) -> str:
    """Samples of a histogram are of one family, and stand as their source gave them: by rising bound."""
    plain = name.partition("{")[0]
    base = plain.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
    return base if base in histograms else plain


def _number(value: float) -> str:
    if math.isfinite(value):
        return str(int(value)) if value == int(value) else repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
