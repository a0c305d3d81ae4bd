"""The metrics of the agent itself; gossip and each plugin have a file of their own (`covey/core/metrics.py`)."""

from covey.core.metrics import MetricGroup

METRICS = MetricGroup()
BOOT = METRICS.gauge("covey_boot", "How often this agent was started.")
BUILD_INFO = METRICS.gauge("covey_build_info", "Always 1; the version is in the label.", "version")
CONTROL_CONNECTIONS = METRICS.gauge(
    "covey_control_connections", "Connections of peers to the control link, by whether they have shown a key.", "key"
)
CONTROL_LINKS = METRICS.gauge(
    "covey_control_links",
    "Hosts whose control link is known, and those of them to which a connection is open.",
    "state",
)
EVENT_LOOP_LAG_SECONDS = METRICS.histogram(
    "covey_event_loop_lag_seconds",
    "How late the event loop was, measured ten times a second.",
    bounds=(0.001, 0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5),
)
HOSTS_ALIVE = METRICS.gauge("covey_hosts_alive", "Hosts that gossip shows alive, this one included.")
DISK_FREE_BYTES = METRICS.gauge(
    "covey_disk_free_bytes", "Bytes free for the agent's user where the state directory is."
)
DISK_REFUSES = METRICS.gauge(
    "covey_disk_refuses", "1 while this host takes no submissions and no ranks, or its log waits, for lack of room."
)
GOSSIP_KEYS = METRICS.gauge(
    "covey_gossip_keys", "Keys of gossip that this host has: more than 1 while a rotation is under way."
)
HAS_LEADER = METRICS.gauge("covey_has_leader", "1 while this host knows a leader of the log.")
HOSTS = METRICS.gauge("covey_hosts", "Hosts that gossip shows, by their state, this one included.", "state")
HOSTS_WRONG = METRICS.gauge(
    "covey_hosts_wrong",
    "Hosts that need attention: of another rack, with a contested name, lost again and again, tenants not kept apart.",
)
HTTP_REFUSED = METRICS.counter(
    "covey_http_refused_total", "HTTP requests refused before they reached a command.", "why"
)
HTTP_REQUEST_SECONDS = METRICS.histogram(
    "covey_http_request_seconds",
    "How long HTTP requests took, waits that they asked for included, by route.",
    "route",
    bounds=(0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10.0),
)
HTTP_REQUESTS = METRICS.counter("covey_http_requests_total", "HTTP requests answered.", "status")
HTTP_STREAMS = METRICS.gauge("covey_http_streams", "Event streams open now (/v1/events).")
HTTP_STREAMS_ENDED = METRICS.counter(
    "covey_http_streams_ended_total",
    "Event streams that ended: the reader left, took nothing, may not read any more, or the agent stopped.",
    "why",
)
JOB_FRAMES = METRICS.counter("covey_job_frames_total", "Frames and connections of jobs.sock, by kind.", "kind")
JOB_PROCESSES = METRICS.gauge("covey_job_processes", "Processes joined on jobs.sock.")
LEADER_TERM = METRICS.gauge("covey_leader_term", "Present term of the replicated log (Raft).")
PLUGINS_FAILED = METRICS.gauge("covey_plugins_failed", "Plugins of this host that are stopped because they failed.")
PLUGIN_RESTARTS = METRICS.counter(
    "covey_plugin_restarts_total", "Times that a plugin was started again after a disk error stopped it.", "plugin"
)
TIME_SECONDS = METRICS.gauge("covey_time_seconds", "This host's clock when it answered, seconds since 1970.")
STARTER = METRICS.counter("covey_starter_total", "What the starter of this host did, by what was asked for.", "what")
SERIES_LEFT_OUT = METRICS.gauge(
    "covey_series_left_out", "Series that this answer lacks, since their metrics have more than 256."
)
LEADS = METRICS.gauge("covey_leads", "1 while this host leads the log.")
START_TIME_SECONDS = METRICS.gauge("covey_start_time_seconds", "When this agent was started, seconds since 1970.")

DEVICES = METRICS.counters(
    "covey_devices",
    {
        "timeouts": "Calls to the driver of devices that it did not answer in time.",
        "xids": "XID errors that the driver told.",
    },
)

LINKS = METRICS.counters(
    "covey_links",
    {
        "accepted": "Connections to the control link accepted.",
        "allowed": "Handshakes with a known key.",
        "bad_key": "Peers that gossiped an invalid key.",
        "closed": "Connections to peers closed because nothing was sent over them for a minute.",
        "broken_off": "Connections that ended before they had shown a key.",
        "dropped": "Messages dropped because no host gossips the sender's key now.",
        "handshakes": "Connections that have shown a key.",
        "not_connected_or_full": "Messages not sent: no connection, or its queue is full.",
        "no_socket": "Connections to peers that were not opened because this process may have no more sockets.",
        "opened": "Connections to peers opened because there was something to send.",
        "received": "Messages received from peers.",
        "refused_key": "Handshakes with a key that no host gossips.",
        "renewed": "Connections to peers replaced because the old one took no message.",
        "sent": "Messages sent to peers.",
        "silent": "Connections that showed no key in time.",
        "turned_away": "Connections turned away because too many had shown no key.",
    },
)

RAFT = METRICS.counters(
    "covey_raft",
    {
        "acknowledged_entries_lost": "Followers found to have lost entries that they had acknowledged.",
        "appends_of_strangers": "Appends of hosts that do not vote.",
        "applied": "Entries applied to the state of this host.",
        "busy": "Proposals refused because too many were under way.",
        "elected": "Elections won.",
        "elections": "Elections this host stood in.",
        "forwarded": "Proposals sent on to the leader.",
        "forwarding_failed": "Messages with proposals or reads that the leader did not answer.",
        "handover_orders_stale": "Requests to stand for election that came too late.",
        "handovers": "Times this host handed its leadership over.",
        "handovers_for_slow_disk": "Times this host offered its leadership because its disk was slow.",
        "malformed": "Messages that could not be understood.",
        "not_sent": "Messages that the control link did not take.",
        "of_another_rack": "Messages received from another rack.",
        "prevotes": "Times this host asked whether it would be elected.",
        "reads_forwarded": "Questions to the leader for reads that decide.",
        "snapshots_installed": "Snapshots received from a leader.",
        "snapshots_saved": "Snapshots written.",
        "snapshots_too_large": "Snapshots that were not written because of their size.",
        "stepped_down": "Times this host stopped being the leader.",
        "two_leaders_in_one_term": "Two leaders seen in one term; must stay 0.",
        "votes_of_another_log": "Votes not counted because the voter's log is not the one that votes.",
        "votes_of_strangers": "Votes of hosts that do not vote.",
        "votes_refused_leader_alive": "Votes refused because a leader is alive.",
        "waits_for_room": "Times the log began to wait since its disk was full.",
        "writes": "Writes of the log, each with a sync.",
    },
)

RPC = METRICS.counters(
    "covey_rpc",
    {
        "answers_failed": "Questions whose answer raised an exception.",
        "answers_late": "Answers that were not ready in time.",
        "answers_too_long": "Answers too long to be sent.",
        "asked_again": "Questions received again while their answer was computed.",
        "deadline": "Messages and questions not acknowledged before their deadline.",
        "duplicate": "Messages received again and not handled twice.",
        "late_replies": "Replies received after the asker stopped waiting.",
        "malformed": "Envelopes that could not be understood.",
        "malformed_bodies": "Messages whose body their plugin does not know.",
        "not_gossiped": "Times that the state of the log did not fit into this host's gossip.",
        "of_another_installation": "Messages of a machine whose name does not match gossip.",
        "old_boot": "Messages of an earlier start of their sender.",
        "pages_not_kept": "Pages of answers asked for after they were forgotten.",
        "questions_refused": "Questions refused because one host asked too many at once.",
        "receiver_table_full": "Messages refused by a receiver whose table of duplicates was full.",
        "refused_table_full": "Messages refused because this host's table of duplicates was full.",
        "stale": "Messages to an earlier start of this host.",
        "without_plugin": "Messages to a plugin that is off, or that could not be read.",
    },
)
