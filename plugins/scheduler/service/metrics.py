"""The metrics of the plugin `scheduler`."""

from covey.core.metrics import MetricGroup

METRICS = MetricGroup()
GPUS_FREE = METRICS.gauge("covey_gpus_free", "GPUs of this host that take jobs and that no gang holds.")
GPUS_OUT = METRICS.gauge(
    "covey_gpus_out",
    "GPUs of this host that take no job: failed, their state is not known, or others use them.",
)
GPU_INFO = METRICS.gauge(
    "covey_gpu_info",
    "Always 1: GPUs and MIG instances of this host, by number and model.",
    "uuid",
    "gpu",
    "model",
)
GPU_CONDITION = METRICS.gauge(
    "covey_gpu_condition",
    "Always 1: the condition of each GPU of this host. One that is unknown, drain or lost takes no job.",
    "uuid",
    "condition",
)
GPU_FOREIGN = METRICS.gauge(
    "covey_gpu_foreign",
    "1 while processes that no job started use the GPU, which no job gets then; absent where the driver never told its "
    "processes.",
    "uuid",
)
GPU_HELD = METRICS.gauge("covey_gpu_held", "1 while a job holds the GPU or a part of it.", "uuid")
GPU_IDLE_SECONDS = METRICS.gauge(
    "covey_gpu_idle_seconds",
    "For how long a held GPU has computed nothing, 0 for less than 10 minutes; absent where the driver does not tell "
    "its use.",
    "uuid",
)
GPU_MEMORY_BYTES = METRICS.gauge("covey_gpu_memory_bytes", "Memory of the GPU.", "uuid")
GPU_MEMORY_USED_BYTES = METRICS.gauge("covey_gpu_memory_used_bytes", "Memory of the GPU in use.", "uuid")
GPU_TAKES_JOBS = METRICS.gauge(
    "covey_gpu_takes_jobs", "1 while a job may start on the GPU once none holds it, 0 while it is sick or used.", "uuid"
)
GPU_UTILIZATION = METRICS.gauge(
    "covey_gpu_utilization", "Share of the driver's last window in which the GPU was in use, 0 to 1.", "uuid"
)
GRANTS = METRICS.counter("covey_grants_total", "Grants this host decided as leader.")
JOBS = METRICS.gauge("covey_jobs", "Jobs in this host's copy of the log.", "state")
JOB_GPU_INFO = METRICS.gauge("covey_job_gpu_info", "Always 1: the GPUs that jobs hold on this host.", "job_id", "uuid")
JOB_INFO = METRICS.gauge(
    "covey_job_info",
    "Always 1: jobs with ranks on this host, by tenant and class.",
    "job_id",
    "tenant",
    "class",
)
JOB_WAIT_SECONDS = METRICS.histogram(
    "covey_job_wait_seconds",
    "How long jobs waited from submission to their first start, counted by the host that placed them.",
    bounds=(1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0),
)
JOBS_WAIT_LONGEST_SECONDS = METRICS.gauge(
    "covey_jobs_wait_longest_seconds", "Wait of the job that has waited longest for its first start; 0 if none waits."
)
PLACEMENT_SECONDS = METRICS.histogram(
    "covey_placement_seconds",
    "How long it took from the leader's grant until the job's hosts had reserved its GPUs and the log had its places.",
    bounds=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0),
)
DECISION_SECONDS = METRICS.histogram(
    "covey_decision_seconds",
    "How long the leader computed which jobs may run now, each time that it looked.",
    bounds=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0),
)
LOG_MALFORMED_COMMANDS = METRICS.counter(
    "covey_log_malformed_commands_total", "Commands of the log that this agent could not read."
)
PREEMPTIONS = METRICS.counter("covey_preemptions_total", "Preemptions this host decided as leader.")
