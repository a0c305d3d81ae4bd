"""Metrics of the plugin `aggregator`."""

from covey.core.metrics import MetricGroup

METRICS = MetricGroup()
BAD_FRAMES = METRICS.counter("covey_aggregator_bad_frames_total", "Frames of workers that aggd could not understand.")
COPIED = METRICS.counter("covey_aggregator_copied_total", "Blocks of parameters received from the previous aggregator.")
COPIES_FAILED = METRICS.counter(
    "covey_aggregator_copies_failed_total",
    "Previous aggregators that ended before they had sent all that they had announced.",
)
DIRECT = METRICS.gauge("covey_aggregator_direct", "Tables that ranks on this host sum for their jobs.")
JOBS = METRICS.gauge("covey_aggregator_jobs", "Jobs whose tensors this host sums.")
LOAD = METRICS.gauge("covey_aggregator_load", "Part of its cycle in which the aggregator is busy, 0 to 1.")
MEMORY_BYTES = METRICS.gauge("covey_aggregator_memory_bytes", "Memory that aggd holds for tensors.")
NOT_FINITE = METRICS.gauge(
    "covey_aggregator_not_finite", "Numbers that were NaN or infinite in sums of the jobs summed now."
)
PROMISED = METRICS.gauge(
    "covey_aggregator_promised", "Part of its cycle that the aggregator has promised to jobs, 0 to 1."
)
RECEIVED_BYTES = METRICS.gauge("covey_aggregator_received_bytes", "Bytes received of the jobs summed now.")
REFUSED = METRICS.counter("covey_aggregator_refused_total", "Connections that aggd refused.")
ROUNDS = METRICS.gauge("covey_aggregator_rounds", "Rounds summed of the jobs summed now.")
SENT_BYTES = METRICS.gauge("covey_aggregator_sent_bytes", "Bytes sent of the jobs summed now.")
STARTS = METRICS.counter("covey_aggregator_starts_total", "Times that aggd was started.")
UP = METRICS.gauge("covey_aggregator_up", "1 while aggd answers.")
