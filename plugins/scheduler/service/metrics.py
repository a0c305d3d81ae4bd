"""The metrics of the plugin `scheduler`."""

from covey.core.metrics import MetricGroup

METRICS = MetricGroup()
GPUS_FREE = METRICS.gauge("covey_gpus_free", "GPUs of this host that take jobs and that no gang holds.")
GPUS_OUT = METRICS.gauge(
    "covey_gpus_out", "GPUs of this host that take no job, since they failed or their state is not known."
)
GRANTS = METRICS.counter("covey_grants_total", "Grants this host decided as leader.")
JOBS = METRICS.gauge("covey_jobs", "Jobs in this host's copy of the log.", "state")
LOG_MALFORMED_COMMANDS = METRICS.counter(
    "covey_log_malformed_commands_total", "Commands of the log that this agent could not read."
)
PREEMPTIONS = METRICS.counter("covey_preemptions_total", "Preemptions this host decided as leader.")
